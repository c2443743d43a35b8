"""What a model's weight loaders do with the tensors of a version, found on tensors without memory.

Input: parameters that loaders fill, and stand-ins for a version's tensors.  Output: the copies from these to those.
Guarantee: whatever else is done with either (arithmetic, a copy to a buffer, places filled twice or not at all) raises
NoPlan: the copies alone then do not make what the loaders make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Parameter = tuple[nn.Module, str]  # a layer and the name that it has there


class NoPlan(Exception):
    """Why versions cannot be loaded by copies alone."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a tensor, as torch.as_strided takes it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements after the tensor's first

    @classmethod
    def of(cls, part: Tensor, whole: Tensor) -> Cut:
        """The part of `whole` that a view of it is."""
        return cls(tuple(part.shape), part.stride(), int(part.storage_offset() - whole.storage_offset()))

    def from_(self, whole: Tensor) -> Tensor:
        """View that part of a tensor that is laid out as the one it was cut from."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


class Copied(NamedTuple):
    """One copy that a loader made."""

    source: str  # name in the version
    to: Parameter
    place: Cut
    part: Cut  # of the source


class LoadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies while it is active and carries none of them out."""

    def __init__(
        self, parameters: Mapping[Parameter, Tensor], buffers: Iterable[Tensor], sources: Mapping[str, Tensor]
    ) -> None:
        """parameters: those that loaders may fill; buffers: those that they must not; sources: of the version."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copied] = []
        self._parameters, self._sources = parameters, sources
        self._zeros: list[tuple[Parameter, Cut]] = []
        self._places = {_memory_of(tensor): place for place, tensor in parameters.items()}
        self._names = {_memory_of(tensor): name for name, tensor in sources.items()}
        self._known = {*self._places, *self._names, *map(_memory_of, buffers)}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [tensor for tensor in given if _memory_of(tensor) in self._known]
        if not known:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copy(*given)
            return args[0]
        if func in (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar) and not any(args[1:]):
            self._zeros.append((self._place_of(given[0]), Cut.of(given[0], self._parameters[self._place_of(given[0])])))
            return args[0]
        made = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or any(_memory_of(leaf) not in self._known for leaf in _tensors(made)):
            raise NoPlan(f"{func} of {self._name_of(known[0])}")
        return made

    def filled(self) -> Iterator[tuple[Parameter, bool]]:
        """Yield parameters that are filled, each element once, and whether some of it are zeros.

        Raises NoPlan if there are others, except those that no copy went to.
        """
        zeros, places = {place for place, _ in self._zeros}, dict[Parameter, list[Cut]]()
        for place, cut in [*((copied.to, copied.place) for copied in self.copies), *self._zeros]:
            places.setdefault(place, []).append(cut)
        for place, cuts in places.items():
            if not _is_partition(cuts, self._parameters[place]):
                raise NoPlan(f"{self._name_of(self._parameters[place])} is not filled piece by piece")
            yield place, place in zeros

    def _copy(self, to: Tensor, source: Tensor) -> None:
        name = self._names.get(_memory_of(source))
        if name is None:
            raise NoPlan(f"what is copied to {self._name_of(to)} is no part of a tensor of the version")
        place = self._place_of(to)
        if to.shape != source.shape:
            raise NoPlan(f"{name}: {list(source.shape)} is copied to {list(to.shape)} of {self._name_of(to)}")
        cuts = Cut.of(to, self._parameters[place]), Cut.of(source, self._sources[name])
        self.copies.append(Copied(name, place, *cuts))

    def _place_of(self, tensor: Tensor) -> Parameter:
        place = self._places.get(_memory_of(tensor))
        if place is None:
            raise NoPlan(f"something is written to {self._name_of(tensor)}")
        return place

    def _name_of(self, tensor: Tensor) -> str:
        memory = _memory_of(tensor)
        if memory in self._places:
            layer, name = self._places[memory]
            return f"{name} of {type(layer).__name__}"
        return self._names.get(memory, "a buffer")


def _memory_of(tensor: Tensor) -> int:
    """Identity of what views share, also where there is no memory."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(made: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]


def _is_partition(cuts: list[Cut], whole: Tensor) -> bool:
    """True if these are runs of the whole's memory, one after the other, from its first element to its last."""
    if not whole.is_contiguous() or any(not _is_run(cut) for cut in cuts):
        return False
    ends = sorted((cut.offset, cut.offset + _count(cut.shape)) for cut in cuts if _count(cut.shape))
    follow = all(end == begin for (_, end), (begin, _) in pairwise(ends))
    return bool(ends) and follow and ends[0][0] == 0 and ends[-1][1] == whole.numel()


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _is_run(cut: Cut) -> bool:
    """True if the cut has no gaps."""
    expected = 1
    for size, stride in zip(reversed(cut.shape), reversed(cut.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
