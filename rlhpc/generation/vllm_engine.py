"""Sample, or score rows, with vLLM (engine.py, vllm_core.py).

A pooling engine eats token ids and makes a classifier's numbers, of the whole row or in each place, without an
activation unless one is asked for: for reward models, and process reward models.  Rows are batched as they come.
On CPU the core is on a thread of this process, on CUDA in processes that end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import Decode, no_text
from rlhpc.generation.engine import ABORT_ALL_S, Engine, held_adapters, in_our_errors, refuse_weights_it_would_make_up
from rlhpc.generation.running_core import CoreRequest, RunningCore, device_here
from rlhpc.generation.vllm_start import engine_profile, start_vllm, stop_vllm
from rlhpc.models.weights import object_in, weight_files
from rlhpc.protocol.contracts import Clock, PoolingEngine
from rlhpc.protocol.errors import ConfigError, EngineError
from rlhpc.protocol.types import Float32, Int32

if TYPE_CHECKING:
    import psutil

# Ends of the names of architectures that vLLM's pooling runner scores with.
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForProcessRewardModel", "ForRewardModel")


class VllmEngine(Engine):
    """GenerationEngine over vLLM's engine core (vllm_core.py)."""

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        seed: int,
        clock: Clock = time.monotonic,
        is_apart: bool = False,
        decode: Decode = no_text,
        num_adapters: int = 1,
    ) -> VllmEngine:
        """Start vLLM on CUDA if there is a device, else on CPU.  Blocks the event loop until it is ready.

        is_apart: in a process of its own, which is always so on CUDA, and with weights.staging = "paused".  decode: for
        stop strings.  num_adapters: how many it holds at once, if [lora] says that it holds any.
        Sets environment variables of this process.  Raises EngineError and leaves no process behind.
        """
        is_apart = is_apart or config.weights.staging == "paused"  # whose tests fail with the core on a thread
        refuse_weights_it_would_make_up(config)
        adapters = held_adapters(config, num_adapters)
        adapted = adapters.modules if adapters is not None else ()
        profile = engine_profile(
            config, seed=seed, device=device_here(), is_apart=is_apart, adapted=adapted, num_adapters=num_adapters,
            model=object_in(config.model.path / "config.json"),
        )  # fmt: skip
        core, processes = start_vllm(profile)
        engine = cls(core, partial(stop_vllm, core, processes), config, clock, decode)
        await engine._prepare(adapters)
        return engine


class VllmPoolingEngine(PoolingEngine):
    """PoolingEngine over vLLM's engine core."""

    def __init__(self, core: RunningCore, processes: list[psutil.Process]) -> None:
        """Use VllmPoolingEngine.start."""
        self._core, self._processes = core, processes
        self._serial = itertools.count()
        self._death = ""  # why this engine is dead; "" while it is alive
        self._is_closed = False

    @classmethod
    async def start(cls, config: Config, *, seed: int, is_apart: bool = False) -> VllmPoolingEngine:
        """Start vLLM on CUDA if there is a device, else on CPU.  Blocks the event loop until it is ready.

        is_apart: in a process of its own, which is always so on CUDA.
        Sets environment variables of this process.  Raises EngineError and leaves no process behind.
        """
        _refuse_other_models(config)
        profile = engine_profile(config, seed=seed, device=device_here(), is_apart=is_apart)
        engine = cls(*start_vllm(replace(profile, engine_args=profile.engine_args | {"runner": "pooling"})))
        try:
            await engine._core.collective_rpc("rlhpc_follow_parent", (os.getpid(),))
        except BaseException:  # nothing is survived, but no process of an engine may be left behind
            await engine.close()
            raise
        return engine

    async def classify(self, token_ids: Int32, *, use_activation: bool = False) -> Float32:
        """See PoolingEngine."""
        return await self._pool(token_ids, "classify", use_activation)

    async def classify_tokens(self, token_ids: Int32, *, use_activation: bool = False) -> Float32:
        """See PoolingEngine."""
        return await self._pool(token_ids, "token_classify", use_activation)

    async def close(self) -> None:
        """See PoolingEngine."""
        if not self._death:
            self._death = "closed"
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(ABORT_ALL_S):
                    await in_our_errors(self._core.collective_rpc("rlhpc_heed_signals"), self._die)
        if not self._is_closed:
            self._is_closed = True
            stop_vllm(self._core, self._processes)
            del self._core
        gc.collect()  # as in Engine.close

    async def _pool(self, token_ids: Int32, task: str, use_activation: bool) -> Float32:
        self._require_life()
        name = f"pool/{next(self._serial)}"
        asked = CoreRequest(name, token_ids.tolist(), "0", task=task, use_activation=use_activation)
        finished = await in_our_errors(self._core.sample(asked), self._die)
        if finished.pooled is None:
            raise self._die(f"{name} ended without an output")
        return finished.pooled

    def _die(self, why: str) -> EngineError:
        self._death = self._death or why
        return EngineError(f"the pooling engine is dead: {self._death}")

    def _require_life(self) -> None:
        if self._death:
            raise EngineError(f"the pooling engine is dead: {self._death}")


def _refuse_other_models(config: Config) -> None:
    """Raise EngineError for a checkpoint that is no classifier, or lacks weight files."""
    path = config.model.path
    try:
        architectures = object_in(path / "config.json").get("architectures") or []
        weight_files(path)
    except (ConfigError, OSError) as error:
        raise EngineError(f"vLLM is not started: {error}") from error
    if not any(name.endswith(CLASSIFIERS) for name in architectures):
        legal = ", ".join(f"…{name}" for name in CLASSIFIERS)
        raise EngineError(f"{path}/config.json: architectures={architectures}: no reward model; legal: {legal}")
