"""Safetensors files written tensor by tensor, with a checksum taken on the way.

Input: tensors in a known order.  Output: files that safetensors reads.  The library's own writer wants all tensors of a
file in memory at once; here one tensor at a time is enough, because names, types and shapes are known before.
Format: 8 bytes little-endian header length, a JSON header, the tensors' bytes end to end.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from rlhpc.crc import crc32
from rlhpc.errors import CheckpointError
from rlhpc.files import rename, sync_directory
from rlhpc.training.checkpoint.file_record import FileRecord
from rlhpc.types import TensorSpec

FORMAT_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}  # name there, bytes


def size_in_bytes(spec: TensorSpec) -> int:
    """Bytes of one tensor."""
    return math.prod(spec.shape) * FORMAT_DTYPES[spec.dtype][1]


def plan_shards(specs: Sequence[TensorSpec], shard_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """Cut specs, in order, into files of at most shard_bytes; a larger tensor gets a file of its own."""
    shards: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for spec in specs:
        if shards[-1] and size_in_bytes(spec) > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= size_in_bytes(spec)
    return [tuple(shard) for shard in shards]


def write_safetensors(path: Path, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> FileRecord:
    """Write one file, taking as many tensors from the iterator as there are specs.

    Durable when it returns: written under a temporary name, fsynced, renamed.  Raises CheckpointError naming the file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            record = _write_body(file, specs, tensors)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):  # the same disk may refuse this, too
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    return record


def _write_body(file: BinaryIO, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> FileRecord:
    header = _header_of(specs)
    num_bytes, crc = file.write(header), crc32(header)
    for spec in specs:
        tensor = next(tensors).detach()
        found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        assert found == (spec.dtype, spec.shape), f"{spec.name}: {found} where {spec} was announced"
        # bfloat16 has no numpy type: look at the bytes.
        content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        num_bytes += file.write(content)
        crc = crc32(content, crc)
    return FileRecord(num_bytes, crc)


def _header_of(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + size_in_bytes(spec)
        dtype = FORMAT_DTYPES[spec.dtype][0]
        entries[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors to 8 bytes
    return len(text).to_bytes(8, "little") + text
