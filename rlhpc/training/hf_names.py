"""The names of tensors on disk and in vLLM, where transformers stores them differently in memory.

Input: a parameter of a transformers module.  Output: the tensors of an HF checkpoint: the same, but for mixtures of
experts.  Transformers holds all experts of a layer in one tensor; checkpoints name every expert's matrices.

    ….mlp.experts.gate_up_proj [E, 2·I, H]  →  ….mlp.experts.e.gate_proj.weight [I, H], ….mlp.experts.e.up_proj.weight
    ….mlp.experts.down_proj    [E, H, I]    →  ….mlp.experts.e.down_proj.weight [H, I]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from rlhpc.training.sharded_tensors import Shard, ShardedTensorSpec
from rlhpc.types import TensorSpec

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def on_disk(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """The tensors on disk of a parameter of this name and shape."""
    stem = spec.name.rpartition(".")[0]
    if spec.name.endswith(_GATE_UP):
        experts, rows, columns = spec.shape
        return tuple(
            TensorSpec(f"{stem}.{expert}.{matrix}_proj.weight", spec.dtype, (rows // 2, columns))
            for expert in range(experts)
            for matrix in ("gate", "up")
        )
    if spec.name.endswith(_DOWN):
        experts, *shape = spec.shape
        return tuple(
            TensorSpec(f"{stem}.{expert}.down_proj.weight", spec.dtype, tuple(shape)) for expert in range(experts)
        )
    return (spec,)


def views_on_disk(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """Views of `tensor`, the parameter `name`, in the order of on_disk; to be read or written to."""
    if name.endswith(_GATE_UP):
        for expert in tensor:
            yield from expert.chunk(2)
    elif name.endswith(_DOWN):
        yield from tensor
    else:
        yield tensor


def named_on_disk(spec: TensorSpec, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, view) of a parameter; `tensor` is the parameter, or something of its shape."""
    return zip((each.name for each in on_disk(spec)), views_on_disk(spec.name, tensor), strict=True)


def sharded_on_disk(spec: TensorSpec, shards: Sequence[Shard]) -> ShardedTensorSpec:
    """A parameter that consists of these flat shards, end to end, as an item under its names on disk."""
    return ShardedTensorSpec(specs=on_disk(spec), shards=tuple(shards), join=partial(_join, spec))


def _join(spec: TensorSpec, shards: Sequence[Tensor]) -> Iterator[Tensor]:
    whole = shards[0] if len(shards) == 1 else torch.cat(list(shards))
    return views_on_disk(spec.name, whole.view(spec.shape))
