"""Start the engine named in a run's configuration."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rlhpc.base.hf_config import language_model
from rlhpc.base.native import loading_libraries
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import LoraConfig
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.data.tokenizer import Decode, no_text
from rlhpc.models.weights import object_in
from rlhpc.protocol.contracts import GenerationEngine, PoolingEngine, WeightReceiver

SEED_BITS = 31  # the range that every library behind an engine accepts


def engine_seed(run_seed: int, replica: int) -> int:
    """Seed of one replica's engine, the same in every attempt.

    Hashed: with `run_seed + replica` runs of neighbouring seeds would share most of their random streams.
    """
    digest = hashlib.blake2b(f"rlhpc generator {run_seed} {replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


async def start_engine(
    config: Config,
    *,
    seed: int,
    make_decode: Callable[[], Decode] = lambda: no_text,
    any_stop: bool = False,
    num_adapters: int = 1,
) -> GenerationEngine:
    """Start one replica's engine; it is ready to sample.

    seed: differs between replicas, for draws that (run, group, sample) do not determine.  make_decode: returns the
    decoder; called if the run has stop strings, or requests may have any.  num_adapters: how many it holds at once.
    Raises EngineError and leaves no process behind.
    """
    decode = make_decode() if config.generation.stop or any_stop else no_text
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
        if config.generation.engine == "transformers":
            from rlhpc.generation.transformers_core import TransformersEngine

            return await TransformersEngine.start(config, seed=seed, decode=decode, num_adapters=num_adapters)
        from rlhpc.generation.vllm_engine import VllmEngine

    return await VllmEngine.start(config, seed=seed, decode=decode, num_adapters=num_adapters)


async def start_pooling_engine(config: Config, *, seed: int) -> PoolingEngine:
    """Start the engine of a reward model; it is ready to score.  Raises EngineError and leaves no process behind."""
    if config.generation.engine == "scripted":
        # As in start_engine, here and below.
        from tests.engines.scripted_pooling import ScriptedPoolingEngine

        return ScriptedPoolingEngine.of(config)
    with loading_libraries():
        from rlhpc.generation.vllm_engine import VllmPoolingEngine

    return await VllmPoolingEngine.start(config, seed=seed)


TEMPLATE_TOKENS = 4096  # room for what a judge or a reward model is told beside a completion
TEACHER_BATCHED_TOKENS = 2048  # of a step: their logits are held in float32, and a copy
REWARD_BATCHED_TOKENS = 8192


def service_settings(config: Config, service: ServiceConfig) -> Config:
    """Return the settings of a started service's engine: the run's, with the service's model and sizes.

    generation.max_tokens is the longest sequence: for a teacher a rollout and the token that vLLM samples behind it.
    A size that the run file leaves to us is not larger than the model's own.  Raises ConfigError.
    """
    assert service.path is not None, "it is started by others"
    is_teacher, path = service.kind == "teacher", service.path
    samples = service.kind != "reward"
    rollout, said = config.generation.max_tokens, config.judge.max_tokens if service.kind == "judge" else 0
    longest = service.max_tokens or (rollout if is_teacher else 2 * rollout + TEMPLATE_TOKENS + said)
    longest += is_teacher
    if service.max_tokens is None:
        longest = min(longest, model_number(path, "max_position_embeddings") or longest)
    batched: int | None = None  # of a judge: as of a generator
    if is_teacher:
        batched = max(TEACHER_BATCHED_TOKENS, service.max_num_seqs)
    elif not samples:  # some classifiers do not split a row over two steps
        batched = max(REWARD_BATCHED_TOKENS, longest, service.max_num_seqs)
    model: dict[str, object] = {"path": path, "dtype": service.dtype or config.model.dtype, "chat_template_kwargs": {}}
    generation: dict[str, object] = {
        "tensor_parallel": service.tensor_parallel,
        "max_prompt_tokens": longest - 1,
        "max_completion_tokens": 1,
        "temperature": 1.0,
        "stop": (),
        "max_num_seqs": service.max_num_seqs,
        "max_num_batched_tokens": batched,
        "kv_cache_bytes": service.kv_cache_bytes,
        "prefix_caching": not is_teacher,  # a teacher computes every token that it scores
        "seeded_samples": False,
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "generation": config.generation.model_copy(update=generation),
            "lora": LoraConfig(),
            "algorithm": config.algorithm.model_copy(update={"routing_replay": False}),
            "weights": config.weights.model_copy(update={"staging": "auto"}),
        }
    )


def model_number(path: Path, key: str) -> int | None:
    """Return a number of a checkpoint's config.json, of its language model if there are others; None: there is none."""
    file = path / "config.json"
    if not file.is_file():
        return None
    value = language_model(object_in(file)).get(key)
    return value if isinstance(value, int) else None


def _receiver(timeout_s: float, transport: str) -> WeightReceiver:
    from rlhpc.weights.factory import make_receiver  # loads torch, which a scripted engine needs only from here on

    return make_receiver(transport, device="cpu", timeout_s=timeout_s)
