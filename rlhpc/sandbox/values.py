"""Plain values as JSON, with tags where JSON has no such type.  Part of the harness that runs beside a program.

{"$tuple": […]}  {"$set": […]}  {"$frozenset": […]}  {"$bytes": "hex"}  {"$int": "hex"}  {"$float": "nan"}
{"$complex": [re, im]}  {"$dict": [[key, value], …]} where keys are no strings or begin with "$"
"""

from __future__ import annotations

import math
from typing import Any, Dict

_SEQUENCES: Dict[Any, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_LARGEST = 1 << 63


def encode(value: Any) -> Any:
    """Encode built-in types exactly.  Raises TypeError for any other, RecursionError for one that holds itself."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_LARGEST < value < _LARGEST else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is complex:
        return {"$complex": [encode(value.real), encode(value.imag)]}
    if kind in (bytes, bytearray):
        return {"$bytes": value.hex()}
    if kind is list:
        return [encode(item) for item in value]
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [encode(item) for item in value]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"$dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError("a value of type %s is no plain data" % kind.__name__)


def decode(value: Any) -> Any:
    """Undo encode.  Raises ValueError or TypeError for what it did not make."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if not tag.startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    content = value[tag]
    if tag == "$dict":
        return {decode(key): decode(item) for key, item in content}
    if tag == "$complex":
        return complex(*[decode(part) for part in content])
    makers: Dict[str, Any] = {"$bytes": bytes.fromhex, "$int": lambda text: int(text, 16), "$float": float}
    if tag in makers:
        return makers[tag](content)
    for kind, name in _SEQUENCES.items():
        if tag == name:
            return kind(decode(item) for item in content)
    raise ValueError("%s is no tag of a value" % tag)
