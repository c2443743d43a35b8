"""Whether a message is what its type says, looked up in the annotations and not by the codec."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Hashable
from typing import Any

import numpy as np


def conforms(value: Any, annotation: Any) -> bool:
    """Whether a value is one of the annotation: every field, every element, arrays of one dimension and their dtype."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(conforms(value, each) for each in arguments)
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return type(value) is tuple and len(kinds) == len(value) and all(map(conforms, value, kinds))
    if origin is dict:
        key, item = arguments
        return type(value) is dict and all(conforms(k, key) and conforms(v, item) for k, v in value.items())
    if origin is np.ndarray:
        (wanted,) = typing.get_args(arguments[1])
        return type(value) is np.ndarray and value.dtype == wanted and value.ndim == 1
    if dataclasses.is_dataclass(annotation):
        fields = _fields(typing.cast(Hashable, annotation))
        return type(value) is annotation and all(conforms(getattr(value, n), kind) for n, kind in fields)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return isinstance(value, annotation)
    return type(value) is annotation


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]
