"""Whether an engine that has its GPUs to itself fits them, new weights included; if not, which change would help.

Input: a Config, a ModelShape and the memory of a GPU.  Output: nothing, or a ConfigError.  An estimate (engine.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from launch.checks.memory.engine import indivisible, least_cache_bytes, legal_ranks, plan_engine
from launch.checks.memory.plan import GIB
from launch.checks.memory.trainer_verdict import Change
from rlhpc.config import Config, with_values
from rlhpc.errors import ConfigError
from rlhpc.model_shape import ModelShape

BUCKETS = (256 << 20, 64 << 20)  # below, a broadcast is all latency
SHARES = (0.85, 0.8, 0.75, 0.7, 0.6, 0.5)


def refuse_engine(config: Config, shape: ModelShape, memory_gib: float, gpu: str) -> None:
    """Raises ConfigError with a change that fits.  gpu: words for which GPU that is and who says so."""
    refuse_small_cache(config, shape)
    complaint = _complaint(config, shape, memory_gib)
    if complaint:
        raise ConfigError(f"{complaint} of {gpu}; {_advice(config, shape, memory_gib)}")


def refuse_unfit_ranks(config: Config, model: Mapping[str, Any], shape: ModelShape | None) -> None:
    """Raises ConfigError: vLLM cannot share the model, whose config.json this is, out over the GPUs of a replica."""
    ranks, heads = config.generation.tensor_parallel, int(model.get("num_attention_heads") or 0)
    if shape is not None:
        size, legal = indivisible(shape, ranks), legal_ranks(shape)
    else:  # of other families the heads alone are known
        size = f"num_attention_heads={heads}" if heads % ranks else ""
        legal = tuple(number for number in range(1, heads + 1) if heads % number == 0)
    if size:
        raise ConfigError(
            f"generation.tensor_parallel={ranks} does not divide {size} of {config.model.path / 'config.json'}; "
            f"legal: {', '.join(map(str, legal))}"
        )


def refuse_small_cache(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError: the KV cache of a given size is too small for vLLM to start."""
    given, least = config.generation.kv_cache_bytes, least_cache_bytes(config, shape)
    if given is not None and given < least:
        raise ConfigError(
            f"generation.kv_cache_bytes={given} cannot hold one sequence of max_prompt_tokens + max_completion_tokens; "
            f"legal: {least} or more"
        )


def _complaint(config: Config, shape: ModelShape, memory_gib: float) -> str:
    """What does not fit; "" if all does."""
    generation, need = config.generation, plan_engine(config, shape)
    engine, beside = need.engine / GIB, need.beside / GIB
    parts = f"weights {need.weights / GIB:.1f}, KV cache {need.kv_cache / GIB:.1f}"
    if generation.kv_cache_bytes is not None:
        words = f"engine ({parts}) and new weights while they arrive ({beside:.1f}) need {engine + beside:.1f} GiB"
        too_much, limit = engine + beside > memory_gib, memory_gib
        key = f"generation.kv_cache_bytes={generation.kv_cache_bytes}"
    elif engine > (limit := generation.gpu_memory_utilization * memory_gib):
        words, too_much = f"an engine needs at least {engine:.1f} GiB ({parts})", True
        key = f"generation.tensor_parallel={generation.tensor_parallel}"
    else:
        limit = memory_gib - limit
        words, too_much = f"new weights need {beside:.1f} GiB beside the engine while they arrive", beside > limit
        key = f"generation.gpu_memory_utilization={generation.gpu_memory_utilization:g}"
    return f"{key}: {words} (estimate), more than the {limit:.1f} GiB they may use" if too_much else ""


def _advice(config: Config, shape: ModelShape, memory_gib: float) -> str:
    for change in _changes(config, shape):
        if not _complaint(with_values(config, change), shape, memory_gib):
            return f"would fit: {' '.join(f'{key}={value}' for key, value in change.items())}"
    return "no setting that was tried fits: take larger GPUs or a smaller model"


def _changes(config: Config, shape: ModelShape) -> Iterator[Change]:
    """Cheapest first: smaller buckets, then less KV cache, then more GPUs a replica."""
    generation = config.generation
    buckets: list[Change] = [{}]
    buckets += [{"weights.bucket_bytes": size} for size in BUCKETS if size < config.weights.bucket_bytes]
    shares: list[Change] = [{}]
    if generation.kv_cache_bytes is None:
        smaller = [share for share in SHARES if share < generation.gpu_memory_utilization]
        shares += [{"generation.gpu_memory_utilization": share} for share in smaller]
    ranks: list[Change] = [{}]
    wider = [n for n in legal_ranks(shape) if n > generation.tensor_parallel and (n <= 8 or n % 8 == 0)]
    ranks += [{"generation.tensor_parallel": n} for n in wider]
    for wide, share, bucket in itertools.product(ranks, shares, buckets):
        yield {**wide, **share, **bucket}
