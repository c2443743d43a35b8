"""Start the engine named in a run's configuration."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from collections.abc import Callable
from functools import partial

from rlhpc.base.native import loading_libraries
from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import Decode, no_text
from rlhpc.protocol.contracts import GenerationEngine, WeightReceiver

SEED_BITS = 31  # the range that every library behind an engine accepts


def engine_seed(run_seed: int, replica: int) -> int:
    """Seed of one replica's engine, the same in every attempt.

    Hashed: with `run_seed + replica` runs of neighbouring seeds would share most of their random streams.
    """
    digest = hashlib.blake2b(f"rlhpc generator {run_seed} {replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


async def start_engine(
    config: Config, *, seed: int, make_decode: Callable[[], Decode] = lambda: no_text, num_adapters: int = 1
) -> GenerationEngine:
    """Start one replica's engine; it is ready to sample.

    seed: differs between replicas, for draws that (run, group, sample) do not determine.  make_decode: returns the
    decoder; called if the run has stop strings.  num_adapters: how many vLLM holds at once.
    Raises EngineError and leaves no process behind.
    """
    decode = make_decode() if config.generation.stop else no_text
    if config.generation.engine == "scripted":
        # Each engine loads what only it needs: a scripted one runs where there is no vLLM.
        from tests.engines.scripted_engine import ScriptedEngine

        # Load torch while waiting for the trainer, and not when the first weight group is formed.
        asyncio.get_running_loop().run_in_executor(None, importlib.import_module, "rlhpc.weights.factory")
        # Replicas share a seed, so that a sample is the same on any replica: no sample is drawn by two of them.
        return ScriptedEngine.of(
            config, seed=config.run.seed, decode=decode, make_receiver=partial(_receiver, config.weights.timeout_s)
        )
    # As above.
    with loading_libraries():
        from rlhpc.generation.vllm_engine import VllmEngine

    return await VllmEngine.start(config, seed=seed, decode=decode, num_adapters=num_adapters)


def _receiver(timeout_s: float, transport: str) -> WeightReceiver:
    from rlhpc.weights.factory import make_receiver  # loads torch, which a scripted engine needs only from here on

    return make_receiver(transport, device="cpu", timeout_s=timeout_s)
