"""The tensors of LoRA adapters by the modules that they adapt, for an engine of any library.

Input: manifests and tensors of versions in adapter form (protocol/types.py, AdapterForm), or a PEFT directory.
Output: A and B of each module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhpc.models.adapter import PEFT_PREFIX, PEFT_WEIGHTS
from rlhpc.models.weights import NotSafetensors, read_header
from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import WeightManifest

POLICY = 1  # number of the adapter that a version is; an evaluation has others beside it
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of PEFT's files


class Pair(NamedTuple):
    """A and B of one module, [rank, in] and [out, rank]; None: not received yet."""

    a: Any
    b: Any


def pairs_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Pair]:
    """A and B by module, in order of first appearance.  Raises GroupFailed for a tensor that is neither."""
    found: dict[str, Pair] = {}
    for name, tensor in tensors:
        match = TENSOR.fullmatch(name)
        if match is None:
            raise GroupFailed(f"{name} is no A or B of an adapter")
        pair = found.get(match["module"], Pair(None, None))
        found[match["module"]] = pair._replace(**{match["matrix"].lower(): tensor})
    return found


def fitting_pairs(manifest: WeightManifest, rank: int, base: str, modules: Collection[str]) -> dict[str, Pair]:
    """Pairs without numbers of a version that is for an engine with adapters of this rank, base and these modules.

    base: digest of the weights that the engine holds; "": not known.  Raises GroupFailed, naming the module.
    """
    form, name = manifest.adapter, f"version {manifest.policy_version}"
    if form is None:
        raise GroupFailed(f"{name} is of whole weights, and this engine holds adapters")
    if base and form.base and form.base != base:
        raise GroupFailed(f"{name} is for the base {form.base}, and this engine holds {base}")
    if form.rank != rank:
        raise GroupFailed(f"{name} is of rank {form.rank}, and this engine holds adapters of rank {rank}")
    pairs = pairs_of((spec.name, torch.empty(spec.shape, device="meta")) for spec in manifest.tensors)
    for module in sorted(pairs.keys() ^ modules):
        lacks = "has no adapter of" if module in modules else "has an adapter of a module that is none here:"
        raise GroupFailed(f"{name} {lacks} {module}")
    for module, pair in pairs.items():
        if pair.a is None or pair.b is None:
            raise GroupFailed(f"{name} has {'no A' if pair.a is None else 'no B'} of {module}")
    return pairs


def read_peft(directory: Path) -> list[tuple[str, Tensor]]:
    """A and B of a PEFT adapter directory by the names of a version.  Raises NotSafetensors, OSError."""
    file = directory / PEFT_WEIGHTS
    content = bytearray(file.read_bytes())
    found = list[tuple[str, Tensor]]()
    for name, stored in read_header(file).items():
        if stored.end > len(content) or stored.dtype not in _DTYPES:
            raise NotSafetensors(f"{name}: {stored.dtype} in bytes {stored.begin} to {stored.end} of {len(content)}")
        numbers = torch.frombuffer(memoryview(content)[stored.begin : stored.end], dtype=_DTYPES[stored.dtype])
        found.append((name.removeprefix(PEFT_PREFIX), numbers.view(stored.shape)))
    return found
