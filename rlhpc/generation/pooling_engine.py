"""Score rows of tokens with a classifier in vLLM's pooling runner: reward models, and process reward models.

Input: token ids.  Output: the classifier's numbers, of the whole row or in each place, without an activation unless one
is asked for.  Rows are batched as they come, like requests of the generators' engine, whose core this is
(vllm_core.py): on CPU on a thread of this process, on CUDA in processes that end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhpc.config.rules import Config
from rlhpc.generation.vllm_core import RunningCore
from rlhpc.generation.vllm_engine import ABORT_ALL_S, in_our_errors
from rlhpc.generation.vllm_start import device_here, engine_profile, start_vllm, stop_vllm
from rlhpc.models.weights import object_in, weight_files
from rlhpc.protocol.contracts import PoolingEngine
from rlhpc.protocol.errors import ConfigError, EngineError
from rlhpc.protocol.types import Float32, Int32

if TYPE_CHECKING:
    import psutil

# Ends of the names of architectures that vLLM's pooling runner scores with.
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForProcessRewardModel", "ForRewardModel")


class VllmPoolingEngine(PoolingEngine):
    """PoolingEngine over vLLM's engine core."""

    def __init__(self, llm: RunningCore, processes: list[psutil.Process]) -> None:
        """Use VllmPoolingEngine.start."""
        self._llm, self._processes = llm, processes
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
            await engine._llm.collective_rpc("rlhpc_follow_parent", (os.getpid(),))
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
                    await in_our_errors(self._llm.collective_rpc("rlhpc_heed_signals"), self._die)
        if not self._is_closed:
            self._is_closed = True
            stop_vllm(self._llm, self._processes)
            del self._llm
        gc.collect()  # as in VllmEngine.close

    async def _pool(self, token_ids: Int32, task: str, use_activation: bool) -> Float32:
        from vllm import PoolingParams  # vLLM is imported after its environment is set (vllm_start.py)

        self._require_life()
        prompt = {"prompt_token_ids": token_ids.tolist(), "cache_salt": "0"}
        params = PoolingParams(task=task, use_activation=use_activation)
        return await in_our_errors(self._llm.pool(prompt, params, f"pool/{next(self._serial)}"), self._die)

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
