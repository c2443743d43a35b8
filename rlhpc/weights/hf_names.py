"""Names of tensors on disk, in versions and in vLLM, where transformers stores them differently in memory.

Input: a parameter of a transformers module.  Output: the tensors of an HF checkpoint: the same, but for mixtures of
experts.  Transformers holds all experts of a layer in one tensor; checkpoints name every expert's matrices.

    ….mlp.experts.gate_up_proj [E, 2·I, H]  →  ….mlp.experts.e.gate_proj.weight [I, H], ….mlp.experts.e.up_proj.weight
    ….mlp.experts.down_proj    [E, H, I]    →  ….mlp.experts.e.down_proj.weight [H, I]

Some checkpoints (gpt-oss) have one tensor for all experts, too: what is stored as it is in memory has a mark in its
name, which its name on disk has not:

    ….mlp.experts.gate_up_proj@ [E, H, 2·I]  →  ….mlp.experts.gate_up_proj

Adapters of experts are one tensor for each projection, too (lora.py):

    ….mlp.experts.up_proj.lora_A.weight [E, r, H]  →  ….mlp.experts.e.up_proj.lora_A.weight [r, H]

Of a checkpoint that also sees (Qwen3.5), transformers loads the language model alone, under shorter names; modules get
those on disk back, so that parameters, layers with adapters and exports have them:

    model.layers.0.…  →  model.language_model.layers.0.…
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor, nn

from rlhpc.protocol.types import TensorSpec

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_AS_IT_IS = "@"
_ADAPTERS = re.compile(r"(.+\.experts)(\.\w+\.lora_[AB]\.weight)")


def on_disk(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """The tensors on disk of a parameter of this name and shape."""
    if spec.name.endswith(_AS_IT_IS):
        return (TensorSpec(spec.name.removesuffix(_AS_IT_IS), spec.dtype, spec.shape),)
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
    if match := _ADAPTERS.fullmatch(spec.name):
        experts, *shape = spec.shape
        return tuple(TensorSpec(f"{match[1]}.{each}{match[2]}", spec.dtype, tuple(shape)) for each in range(experts))
    return (spec,)


def views_on_disk(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """Views of `tensor`, the parameter `name`, in the order of on_disk; to be read or written to."""
    if name.endswith(_GATE_UP):
        for expert in tensor:
            yield from expert.chunk(2)
    elif name.endswith(_DOWN) or _ADAPTERS.fullmatch(name):
        yield from tensor
    else:
        yield tensor


def name_of(parameter: str, stored: Container[str]) -> str:
    """The name for on_disk of a module's parameter; stored: the tensors of the checkpoint."""
    is_as_it_is = parameter.endswith((_GATE_UP, _DOWN)) and parameter in stored
    return parameter + _AS_IT_IS if is_as_it_is else parameter


def is_as_on_disk(name: str) -> bool:
    """Whether a parameter of this name holds all experts of a layer, in memory and on disk."""
    return name.endswith(_AS_IT_IS)


def named_on_disk(spec: TensorSpec, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, view) of a parameter; `tensor` is the parameter, or a tensor of its shape."""
    return zip((each.name for each in on_disk(spec)), views_on_disk(spec.name, tensor), strict=True)


class InnerTrunk(nn.Module):
    """A trunk as part of one that also sees; answers for it."""

    def __init__(self, name: str, trunk: nn.Module) -> None:
        super().__init__()
        self._name = name
        setattr(self, name, trunk)

    def __getattr__(self, name: str) -> Any:
        """Look a name up here, then in the trunk."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self._name), name)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Call the trunk."""
        return getattr(self, self._name)(*args, **options)


def name_as_stored(module: Any, stored: Container[str], inner: str) -> None:
    """Nest the trunk of a language model that is part of a larger checkpoint, so that its names are those on disk.

    inner: the name of the language model within the trunk that is stored.
    """
    prefix = module.base_model_prefix
    first = next(name for name, _ in module.named_parameters() if name.startswith(f"{prefix}."))
    if first not in stored and first.replace(prefix, f"{prefix}.{inner}", 1) in stored:
        setattr(module, prefix, InnerTrunk(inner, module.base_model))
