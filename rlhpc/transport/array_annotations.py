"""Find the arrays of a message type from its annotations, so that its codec knows them before the first message.

Input: a dataclass.  Output: the dtype, one of DTYPES, of every array annotation in it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import StrEnum
from typing import Any

import numpy as np

DTYPES = {
    np.dtype(kind).str: np.dtype(kind)
    for kind in (np.bool_, np.uint8, np.int8, np.int32, np.int64, np.float16, np.float32, np.float64)
}
_SCALARS = (int, float, str, bool, types.NoneType)
_CONTAINERS = (tuple, dict, types.UnionType, typing.Union)


def array_annotations(annotation: Any) -> dict[Any, np.dtype[Any]]:
    """Return every array annotation below this one with its dtype.  Raises TypeError for one that cannot be encoded."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is np.ndarray:
        (kind,) = typing.get_args(arguments[1]) or (None,)
        if kind is None or isinstance(kind, typing.TypeVar) or np.dtype(kind).str not in DTYPES:
            raise TypeError(f"arrays of {kind} cannot be sent")
        return {annotation: np.dtype(kind)}
    if annotation is np.ndarray:
        raise TypeError("an array annotation must name its dtype")
    found: dict[Any, np.dtype[Any]] = {}
    if dataclasses.is_dataclass(annotation):
        arguments = tuple(typing.get_type_hints(annotation).values())
    elif origin not in _CONTAINERS and annotation not in _SCALARS and not _is_string_enum(annotation):
        raise TypeError(f"{annotation} cannot be sent")
    for argument in arguments:
        if argument is not ...:
            found |= array_annotations(argument)
    return found


def _is_string_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, StrEnum)
