"""Numbers by group id, in arrays that grow: an object a group would cost a long run gigabytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class GroupColumn:
    """One integer for each group, -1 where none was set."""

    def __init__(self) -> None:
        self._values = np.full(1024, -1, np.int64)
        self.length = 0  # one more than the highest id that was set

    def __getitem__(self, group: int) -> int:
        return int(self._values[group]) if 0 <= group < self.length else -1

    def __setitem__(self, group: int, value: int) -> None:
        if group >= len(self._values):
            more = np.full(max(len(self._values), group + 1 - len(self._values)), -1, np.int64)
            self._values = np.concatenate([self._values, more])
        self._values[group] = value
        self.length = max(self.length, group + 1)

    def fill(self, groups: NDArray[Any], values: NDArray[Any]) -> None:
        """Set many at once."""
        if len(groups):
            top = int(groups.max())
            self[top] = self[top]  # makes room
            self._values[groups] = values

    def upto(self, length: int) -> NDArray[np.int64]:
        """The values of groups 0 to length − 1."""
        known = self._values[:length]
        return np.concatenate([known, np.full(length - len(known), -1, np.int64)])

    def clear(self) -> None:
        """Forget all groups."""
        self._values[:] = -1
        self.length = 0


def joined(parts: list[NDArray[Any]], kind: Any = np.int64) -> NDArray[Any]:
    """Arrays end to end; an empty one of that kind if there are none."""
    return np.concatenate(parts) if parts else np.empty(0, kind)


def reduced(ufunc: Any, values: NDArray[Any], offsets: NDArray[Any], empty: int) -> NDArray[np.int64]:
    """A ufunc over each piece values[offsets[i]:offsets[i + 1]]; `empty` for pieces without values."""
    result = np.full(len(offsets) - 1, empty, np.int64)
    is_filled = offsets[1:] > offsets[:-1]
    if is_filled.any():
        result[is_filled] = ufunc.reduceat(values, offsets[:-1][is_filled])
    return result
