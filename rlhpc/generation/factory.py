"""Start the engine that a run's configuration names."""

from __future__ import annotations

from functools import partial

from rlhpc.config import Config
from rlhpc.contracts import GenerationEngine, WeightReceiver
from rlhpc.run_layout import RunLayout


async def start_engine(config: Config, *, seed: int, layout: RunLayout) -> GenerationEngine:
    """One replica's engine, ready to sample.

    seed: differs between replicas, for whatever is not drawn by (run, group, sample).  layout: where an engine may keep
    files of the run; neither of ours does.  Raises EngineError and leaves no process behind.
    """
    if config.generation.engine == "scripted":
        # Each engine loads what only it needs: a scripted one runs where there is no vLLM.
        from rlhpc.generation.scripted_engine import ScriptedEngine

        # Replicas share a seed, so that a sample is the same on any replica: no sample is drawn by two of them.
        return ScriptedEngine.of(
            config, seed=config.run.seed, make_receiver=partial(_receiver, config.weights.timeout_s)
        )
    # As above.
    from rlhpc.generation.vllm_engine import VllmEngine

    return await VllmEngine.start(config, seed=seed)


def _receiver(timeout_s: float, transport: str) -> WeightReceiver:
    from rlhpc.weights.factory import make_receiver  # loads torch, which a scripted engine needs only from here on

    return make_receiver(transport, device="cpu", timeout_s=timeout_s)
