"""Sample with transformers (engine.py, transformers_core.py): where vLLM has no wheel, and as a second opinion.

The core is on a thread of this process, on CUDA, too.  For any model that transformers loads and has a paged cache for.
Versions are received whole and loaded between two steps: weights.staging = "paused" is refused.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from rlhpc.config.rules import Config, with_values
from rlhpc.data.tokenizer import Decode, no_text
from rlhpc.generation.engine import Engine, held_adapters, refuse_weights_it_would_make_up
from rlhpc.generation.running_core import CoreThread, device_here
from rlhpc.generation.transformers_core import TransformersSteps
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.errors import EngineError

SHUTDOWN_S = 5.0  # for the step that is under way


class TransformersEngine(Engine):
    """GenerationEngine over transformers' continuous batching."""

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        seed: int,
        clock: Clock = time.monotonic,
        decode: Decode = no_text,
        num_adapters: int = 1,
    ) -> TransformersEngine:
        """Load the model, on CUDA if there is a device, else on CPU.  Blocks the event loop until it is ready.

        decode: for stop strings.  num_adapters: how many it holds at once, if [lora] says that it holds any.
        Raises EngineError.
        """
        config = with_values(config, {"weights.staging": "shadow"})
        refuse_weights_it_would_make_up(config)
        adapters = held_adapters(config, num_adapters)
        device = torch.device(device_here())
        if device.type == "cpu":
            torch.set_num_threads(1)  # as vLLM: replicas scale better than threads
        try:
            core = CoreThread(lambda: TransformersSteps(config, seed, device, num_adapters))
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            raise EngineError(f"transformers did not start: {error}") from error
        engine = cls(core, partial(core.shutdown, SHUTDOWN_S), config, clock, decode)
        await engine._prepare(adapters)
        return engine
