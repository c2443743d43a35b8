"""Plain values as JSON, with tags for types that JSON lacks.  Part of the harness that runs beside a program.

{"$tuple": […]}  {"$set": […]}  {"$frozenset": […]}  {"$bytes": "hex"}  {"$int": "hex"}  {"$float": "nan"}
{"$complex": [re, im]}  {"$dict": [[key, value], …]} where keys are no strings or begin with "$"
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Dict

_SEQUENCES: Dict[Any, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_PLAIN: Any = (int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
_LARGEST = 1 << 63


def encode(value: Any) -> Any:
    """Encode built-in types exactly, and other plain types as these: see _as_plain.

    Raises TypeError for any other type, RecursionError for a value that contains itself.
    """
    value = _as_plain(value)
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


def _as_plain(value: Any) -> Any:
    """Return the built-in form of a Counter, a defaultdict, a named tuple, and of numbers and arrays of numpy.

    A class of the program gains nothing by this: its content is compared elsewhere, not by its own `==`.
    """
    kind = type(value)
    if kind is bool or kind in _PLAIN:
        return value
    if kind.__module__.partition(".")[0] in ("numpy", "pandas") and hasattr(value, "shape"):
        if value.shape:
            return list(value)
        is_narrow = str(value.dtype) in ("float16", "float32")
        return float(str(value)) if is_narrow else value.item()  # 0.1, and not 0.10000000149011612
    for plain in _PLAIN:
        if isinstance(value, plain):
            return str.__str__(value) if plain is str else plain(value)
    if isinstance(value, numbers.Number):  # Fraction, Decimal
        number: Any = value
        return int(number) if number == int(number) else float(number)
    return value


def decode(value: Any) -> Any:
    """Undo encode.  Raises ValueError or TypeError for anything that `encode` does not produce."""
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
