"""Run-length encoding of arrays: the versions and the mask of a rollout are a number or two, not 20 KB.

Input: a one-dimensional array of integers or booleans.  Output: values and lengths, and the reverse.  Where the ends
look like no runs, as with token ids, looking costs half a microsecond.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Runs: TypeAlias = tuple[list[Any], list[int]]  # value of each run, length of each run

MIN_BYTES = 1 << 10  # a shorter array is cheaper to copy than to look at
MAX_RUNS = 16
MAX_ELEMENTS = 1 << 28  # what a few bytes on the wire may grow to: no rollout is longer


def find_runs(array: NDArray[Any]) -> Runs | None:
    """Return the runs of an array that has few, or None."""
    if array.nbytes < MIN_BYTES or array.ndim != 1 or array.dtype.kind not in "bi":
        return None
    first, last = array.item(0), array.item(-1)
    if first != array.item(1) or last != array.item(-2):
        return None
    if first == last:
        # Equal to itself shifted by one element: the quickest way to see that there is but one run.
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


def expand_runs(dtype: np.dtype[Any], wire: Any) -> NDArray[Any]:
    """Return the array of [dtype, length, values, lengths].  Raises ValueError unless it is exactly that."""
    code, num_elements, values, lengths = wire
    if code != dtype.str:
        raise ValueError(f"dtype {code!r} where {dtype.str!r} is due")
    if type(values) is not list or type(lengths) is not list or not 1 <= len(values) == len(lengths) <= MAX_RUNS:
        raise ValueError("not as many run lengths as values, or too many")
    kind = bool if dtype.kind == "b" else int
    if any(type(value) is not kind for value in values) or any(type(n) is not int or n < 1 for n in lengths):
        raise ValueError("runs of an impossible value or length")
    if sum(lengths) != num_elements or not num_elements * dtype.itemsize >= MIN_BYTES or num_elements > MAX_ELEMENTS:
        raise ValueError(f"runs of {sum(lengths)} elements where {num_elements!r} are due")
    if len(values) == 1:
        return np.full(num_elements, values[0], dtype)  # OverflowError for a value the dtype has not
    return np.repeat(np.array(values, dtype), lengths)
