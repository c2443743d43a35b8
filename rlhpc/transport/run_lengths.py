"""Run-length encoding of arrays: versions and mask of a rollout take a number or two, not 20 KB.

Input: a one-dimensional array of integers or booleans.  Output: values and lengths, and the reverse.  If the ends do
not look like runs, as with token ids, the check costs half a microsecond.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Runs: TypeAlias = tuple[list[Any], list[int]]  # value of each run, length of each run

MIN_BYTES = 1 << 10  # shorter arrays are cheaper to copy than to check
MAX_RUNS = 16
FREE_BYTES = 1 << 20  # what the runs of any message may grow to
MAX_GROWTH = 4  # and for each byte of it besides: a rollout has 8 bytes a token that are no runs, and 5 that may be


class Allowance:
    """Expanded bytes left for the runs of one message: a few bytes on the wire must not fill the memory."""

    def __init__(self, num_sent: int) -> None:
        """num_sent: bytes of the message."""
        self._left = FREE_BYTES + MAX_GROWTH * num_sent

    def covers(self, nbytes: int) -> bool:
        """Whether runs that expand to this many bytes are allowed."""
        return nbytes <= self._left

    def sent(self, nbytes: int) -> None:
        """Add bytes of the message."""
        self._left += MAX_GROWTH * nbytes

    def grew(self, nbytes: int) -> None:
        """Subtract bytes of expanded runs."""
        self._left -= nbytes


def find_runs(array: NDArray[Any]) -> Runs | None:
    """Return the runs of an array that has few, or None."""
    if array.nbytes < MIN_BYTES or array.ndim != 1 or array.dtype.kind not in "bi":
        return None
    first, last = array.item(0), array.item(-1)
    if first != array.item(1) or last != array.item(-2):
        return None
    if first == last:
        # Equal to itself shifted by one element: the quickest test for a single run.
        raw = array.tobytes()
        if raw[array.itemsize :] == raw[: -array.itemsize]:
            return [first], [len(array)]
    changes = np.flatnonzero(array[1:] != array[:-1])
    if len(changes) >= MAX_RUNS:
        return None
    starts = [0, *(changes + 1).tolist()]
    ends = [*starts[1:], len(array)]
    return array[starts].tolist(), [end - start for start, end in zip(starts, ends, strict=True)]


def is_runs_form(wire: object) -> bool:
    """True for [dtype, length, values, lengths], as against [dtype, *shape]."""
    return type(wire) is list and len(wire) == 4 and type(wire[2]) is list


def expand_runs(dtype: np.dtype[Any], wire: Any, allowance: Allowance) -> NDArray[Any]:
    """Return the array of [dtype, length, values, lengths].  Raises ValueError if malformed or not allowed."""
    code, num_elements, values, lengths = wire
    if code != dtype.str:
        raise ValueError(f"dtype {code!r} where {dtype.str!r} is expected")
    if type(values) is not list or type(lengths) is not list or not 1 <= len(values) == len(lengths) <= MAX_RUNS:
        raise ValueError("not as many run lengths as values, or too many")
    kind = bool if dtype.kind == "b" else int
    if any(type(value) is not kind for value in values) or any(type(n) is not int or n < 1 for n in lengths):
        raise ValueError("runs of an impossible value or length")
    nbytes = sum(lengths) * dtype.itemsize
    if sum(lengths) != num_elements or nbytes < MIN_BYTES or not allowance.covers(nbytes):
        raise ValueError(f"runs of {sum(lengths)} elements, expected {num_elements!r}, or too many for the message")
    allowance.grew(nbytes)
    if len(values) == 1:
        return np.full(sum(lengths), values[0], dtype)  # OverflowError for a value the dtype has not
    return np.repeat(np.array(values, dtype), lengths)
