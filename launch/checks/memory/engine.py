"""Memory of a generator's GPUs: the engine, and what a new version of the weights needs while it arrives.

Input: a Config and a ModelShape.  Output: EngineMemory.  Pure, without torch.  Legend: Ψ parameters of the model, t
engine ranks, b bytes of model.dtype, B the buckets of weights.bucket_bytes, larger where a single tensor is larger.

    weights    b·Ψ / t
    KV cache   given by generation.kv_cache_bytes; otherwise at least one sequence of the maximum length,
               2·b·L·K·D·tokens / t
    staging    shadow: two buckets (the version itself is in host memory).  paused: three buckets, one being filled, one
               being loaded, one whose tensor a loader still references; and the largest module that is assembled from
               several tensors, both as received and as this rank's shard.  auto may become either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.checks.memory.plan import ELEMENT_BYTES, GIB, bucket_sizes
from rlhpc.config import Config
from rlhpc.model_shape import ModelShape

ENGINE_ALLOWANCE = 2 * GIB  # guess: CUDA context, graphs, activations of a step
STAGING_ALLOWANCE = GIB // 2  # guess: NCCL's buffers of the weights' group, fragments
_BLOCK_TOKENS = 128  # of the KV cache; as large as any that vLLM chooses


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of a replica."""

    weights: int
    kv_cache: int  # given, or the smallest useful size
    staging: int  # while a version arrives
    allowance: int

    @property
    def engine(self) -> int:
        """What vLLM counts as its own."""
        return self.weights + self.kv_cache + self.allowance

    @property
    def beside(self) -> int:
        """What it does not know of."""
        return self.staging + STAGING_ALLOWANCE

    @property
    def total(self) -> int:
        """Both."""
        return self.engine + self.beside


def plan_engine(config: Config, shape: ModelShape) -> EngineMemory:
    """What one GPU of a replica needs at least."""
    generation, b = config.generation, ELEMENT_BYTES[config.model.dtype]
    tokens = generation.max_tokens
    return EngineMemory(
        weights=b * shape.num_parameters // generation.tensor_parallel,
        kv_cache=generation.kv_cache_bytes or _cache_bytes(config, shape, tokens),
        staging=staging_bytes(config, shape),
        allowance=ENGINE_ALLOWANCE,
    )


def least_cache_bytes(config: Config, shape: ModelShape) -> int:
    """The smallest generation.kv_cache_bytes with which vLLM starts: whole blocks for one sequence, and a spare one."""
    tokens = config.generation.max_tokens
    return _cache_bytes(config, shape, (-(-tokens // _BLOCK_TOKENS) + 1) * _BLOCK_TOKENS)


def _cache_bytes(config: Config, shape: ModelShape, num_tokens: int) -> int:
    ranks = min(config.generation.tensor_parallel, shape.num_key_heads)
    return (
        2 * ELEMENT_BYTES[config.model.dtype] * shape.num_layers * shape.num_key_heads * shape.head_size * num_tokens
    ) // ranks


def staging_bytes(config: Config, shape: ModelShape) -> int:
    """On each GPU of an engine, at the fullest moment of an update."""
    buckets = bucket_sizes(config, shape)
    module = ELEMENT_BYTES[config.model.dtype] * shape.largest_module
    shadow = max(buckets[0::2], default=0) + max(buckets[1::2], default=0)
    paused = _fullest_run(buckets, 3) + module + module // config.generation.tensor_parallel
    return {"shadow": shadow, "paused": paused, "auto": max(shadow, paused)}[config.weights.staging]


def _fullest_run(buckets: Sequence[int], length: int) -> int:
    return max((sum(buckets[start : start + length]) for start in range(len(buckets))), default=0)


def indivisible(shape: ModelShape, ranks: int) -> str:
    """The size of config.json that vLLM cannot share out over so many ranks; "": there is none.

    Heads and the width of MLPs are divided; of more ranks than key heads each has a copy of one, alike many.
    """
    keys = shape.num_key_heads
    if shape.num_heads % ranks:
        return f"num_attention_heads={shape.num_heads}"
    if keys % ranks and ranks % keys:
        return f"num_key_value_heads={keys}"
    if shape.num_layers > len(shape.expert_layers) and shape.mlp_width % ranks:
        return f"intermediate_size={shape.mlp_width}"
    if shape.expert_layers and shape.expert_width % ranks:
        return f"moe_intermediate_size={shape.expert_width}"
    return ""


def legal_ranks(shape: ModelShape) -> tuple[int, ...]:
    """Every generation.tensor_parallel with which vLLM takes the model."""
    return tuple(ranks for ranks in range(1, shape.num_heads + 1) if not indivisible(shape, ranks))
