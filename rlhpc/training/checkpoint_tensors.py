"""The tensors of a checkpoint: gathered from ranks, read in part, and written one by one with a checksum on the way.

In this file: sharded tensors of the ranks; reading safetensors files; writing them.

Input of the writer: tensors in a known order.  Output: files that safetensors reads.  The library's own writer wants
all tensors of a file in memory at once; here one at a time is enough, because names, types and shapes are known before.
Format: 8 bytes little-endian header length, a JSON header, the tensors' bytes end to end.
"""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhpc.base.files import rename, sync_directory
from rlhpc.base.native import crc32
from rlhpc.models.weights import REAL_DTYPES
from rlhpc.protocol.errors import CheckpointError, ConfigError, RlhpcError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_directory import FileRecord

# ------------------------------------------------------------------------------------------------------ sharded tensors
#
# Gather sharded tensors from the ranks, one by one.
#
# Input: flat shards of parameters as a backend keeps them.  Output: whole tensors under their HF names on one rank.
# Used for weights that go to the generators, and for master weights and moments that go into a checkpoint. Guarantees:
# extra memory is one bucket, or one item that is larger, and the tensors that one item is joined to; items arrive as
# announced and in order; every other rank only sends, so that no two wait for each other.

BUCKET_ELEMENTS = 64 << 20
BUCKET_SHARDS = 256  # NCCL has hung on batches of many more messages (pytorch/pytorch#174288)


@dataclass(frozen=True, slots=True)
class Shard:
    """A flat run of numbers on one rank of the default process group."""

    rank: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class ShardedTensorSpec:
    """The HF tensors that one parameter of a backend becomes, and the shards that it consists of."""

    specs: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    join: Callable[[Sequence[Tensor]], Iterable[Tensor]]  # flat shards, in order → tensors in the order of specs

    @property
    def num_elements(self) -> int:
        """Numbers of all shards."""
        return sum(shard.num_elements for shard in self.shards)


def gather_stream(
    items: Sequence[ShardedTensorSpec],
    own: Callable[[int], Sequence[Tensor]],
    *,
    to_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Any = None,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, whole tensor) on to_rank, in the order of items; yield nothing elsewhere.  A collective.

    own(index): this rank's shards of items[index], flat, contiguous, of `dtype` on `device`, in the order of its
    shards; called once per item and only if there are any.  group: of to_rank and all ranks that hold shards; NCCL
    needs a collective of the whole group before.  A tensor is valid until the next one is asked for, and may be the
    rank's own memory: it is not to be written to.

    Every rank must run the iterator to its end.  Closing it early on to_rank, or an error in join, receives what the
    others still send and discards it.  An error in own or of the network is raised at once: the ranks are out of step
    then, and the group cannot be used any more.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    here = _Here(items, own, rank, to_rank, dtype, device, group)
    buckets = _buckets_of(items, bucket_elements)
    for bucket in buckets:
        arrived = here.exchange(bucket)
        if rank != to_rank:
            continue
        try:
            yield from _joined(items, arrived)
        except BaseException:
            arrived.clear()
            for rest in buckets:
                here.exchange(rest)
            raise


def _buckets_of(items: Sequence[ShardedTensorSpec], bucket_elements: int) -> Iterator[list[int]]:
    """Cut indices, in order, into runs of at most bucket_elements and BUCKET_SHARDS; a larger item has its own."""
    bucket: list[int] = []
    room, places = bucket_elements, BUCKET_SHARDS
    for index, item in enumerate(items):
        if bucket and (item.num_elements > room or len(item.shards) > places):
            yield bucket
            bucket, room, places = [], bucket_elements, BUCKET_SHARDS
        bucket.append(index)
        room, places = room - item.num_elements, places - len(item.shards)
    if bucket:
        yield bucket


def _joined(items: Sequence[ShardedTensorSpec], arrived: dict[int, list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Join one item after the other, each leaving `arrived` as it is joined."""
    for index in tuple(arrived):
        item = items[index]
        yield from zip((spec.name for spec in item.specs), item.join(arrived.pop(index)), strict=True)


@dataclass(frozen=True, slots=True)
class _Here:
    """This rank's side of the stream."""

    items: Sequence[ShardedTensorSpec]
    own: Callable[[int], Sequence[Tensor]]
    rank: int
    to_rank: int
    dtype: torch.dtype
    device: torch.device
    group: Any

    def exchange(self, bucket: Sequence[int]) -> dict[int, list[Tensor]]:
        """Send this rank's shards; on to_rank return all shards of all items of the bucket, elsewhere nothing."""
        arrived: dict[int, list[Tensor]] = {}
        exchanges: list[dist.P2POp] = []
        for index in bucket:
            shards = self.items[index].shards
            mine = iter(self._own_pieces(index))
            if self.rank == self.to_rank:
                arrived[index] = [next(mine) if shard.rank == self.rank else self._room(shard) for shard in shards]
                exchanges += [
                    dist.P2POp(dist.irecv, tensor, shard.rank, self.group)
                    for shard, tensor in zip(shards, arrived[index], strict=True)
                    if shard.rank != self.rank and shard.num_elements
                ]
            else:
                exchanges += [dist.P2POp(dist.isend, t, self.to_rank, self.group) for t in mine if t.numel()]
        for exchange in dist.batch_isend_irecv(exchanges) if exchanges else ():
            exchange.wait()
        return arrived

    def _own_pieces(self, index: int) -> Sequence[Tensor]:
        announced = [shard.num_elements for shard in self.items[index].shards if shard.rank == self.rank]
        tensors = self.own(index) if announced else ()
        found = [tensor.numel() for tensor in tensors]
        assert found == announced, (
            f"{self.items[index].specs[0].name}: {found} numbers where {announced} were announced"
        )
        assert all(tensor.dtype == self.dtype for tensor in tensors)
        return tensors

    def _room(self, shard: Shard) -> Tensor:
        return torch.empty(shard.num_elements, dtype=self.dtype, device=self.device)


# -------------------------------------------------------------------------------------------------------- tensor source
#
# Tensors in safetensors files, of which only the requested parts are read.
#
# Input: the directory of an HF checkpoint, or files that hold named tensors.  Output: rows and columns of them.
# Guarantees: files are mapped, not read; few are open at once; errors of the disk or of the format are raised as our
# own errors, naming the file.

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_OPEN_FILES = 4  # pages of a mapped file count as this process's memory until it is closed


class TensorSource:
    """Names, shapes and parts of tensors.  For one thread; a pickled or copied one does not work."""

    def __init__(self, files: Mapping[str, Path], *, origin: str, error: Callable[[str], RlhpcError]) -> None:
        """files: tensor name → the file that holds it.  origin: begins every message.  Opens nothing yet."""
        self._files, self._origin, self._error = dict(files), origin, error
        self._open: OrderedDict[Path, Any] = OrderedDict()  # least recently used first

    @classmethod
    def of_files(cls, files: Mapping[str, Path], *, error: Callable[[str], RlhpcError] = ConfigError) -> TensorSource:
        """files: tensor name → file.  error: the class that is raised for a bad file."""
        return cls(files, origin="", error=error)

    @classmethod
    def of_model(cls, directory: Path) -> TensorSource:
        """Take an HF checkpoint: one safetensors file, several with an index, or several without.

        If there is a model.safetensors it is the whole checkpoint, as for transformers: other files are of another
        save.  Raises ConfigError naming model.path and the file, also for a missing file of the index.
        """
        origin = f"model.path={directory}: "
        is_one_file = (directory / ONE_FILE).is_file()
        if not is_one_file and (directory / INDEX_FILE).is_file():
            files = _files_of_index(directory, origin)
            for path in sorted(set(files.values())):
                if not path.is_file():
                    raise ConfigError(f"{origin}{path.name} is missing, though {INDEX_FILE} names it")
            return cls(files, origin=origin, error=ConfigError)
        paths = [directory / ONE_FILE] if is_one_file else sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"{origin}no *.safetensors file in this directory")
        with cls({}, origin=origin, error=ConfigError) as source:
            files = {name: path for path in paths for name in source._names_in(path)}
        return cls(files, origin=origin, error=ConfigError)

    def __enter__(self) -> TensorSource:
        """No action: files are opened when something is read."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the header of its file.  Raises `error` for an unknown name."""
        with self._mapped(name):
            return tuple(self._file_of(name).get_slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype | None = None, index: tuple[slice, ...] | None = None) -> Tensor:
        """Return tensor[index] on the CPU, all of it without `index`, in its own dtype without `dtype`.

        May be a view of the mapped file, which is read from disk on access: copy it, neither keep it nor write to it.
        Raises `error` for an unknown name, or a file that is damaged or cannot be read.
        """
        with self._mapped(name):
            part: Tensor = self._file_of(name).get_slice(name)[index or ...]
        return part if dtype is None else part.to(dtype)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `error` naming the tensor if it is missing, of another shape, or of integers."""
        found = self.shape(name)
        with self._mapped(name):
            dtype = self._file_of(name).get_slice(name).get_dtype()
        if dtype not in REAL_DTYPES:
            raise self._error(
                f"{self._origin}{self._files[name]}: {name} is stored as {dtype}: quantised weights are not trained; "
                f"legal: {', '.join(REAL_DTYPES)}"
            )
        if found != shape:
            raise self._error(
                f"{self._origin}{self._files[name]}: {name} is {found}, not {shape} as config.json has it"
            )

    def close(self) -> None:
        """Close open files; reading opens them again."""
        self._open.clear()

    @contextmanager
    def _mapped(self, name: str) -> Iterator[None]:
        """Map foreign errors to our own."""
        if name not in self._files:
            raise self._error(f"{self._origin}there is no tensor {name}")
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise self._error(f"{self._origin}{self._files[name]}: cannot read {name}: {error}") from error

    def _file_of(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            while len(self._open) >= MAX_OPEN_FILES:
                self._open.popitem(last=False)
            self._open[path] = safe_open(path, framework="pt")
        self._open.move_to_end(path)
        return self._open[path]

    def _names_in(self, path: Path) -> list[str]:
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (OSError, SafetensorError) as error:
            raise self._error(f"{self._origin}{path.name}: is no safetensors file: {error}") from error


def _files_of_index(directory: Path, origin: str) -> dict[str, Path]:
    try:
        content = json.loads((directory / INDEX_FILE).read_bytes())
        return {str(name): directory / str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{origin}{INDEX_FILE} cannot be read: {error!r}") from error


# ----------------------------------------------------------------------------------------------------- safetensors file

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
