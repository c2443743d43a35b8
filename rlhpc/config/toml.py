"""Read a TOML file, and write values as TOML; for invalid TOML, tell the author what to change.

Input: a file.  Output: its tables.  A fault is a ConfigError that names file and line, quotes the line, and says what
is legal there: most are habits from other formats.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from datetime import date, time
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rlhpc.base.near_names import nearest
from rlhpc.protocol.errors import ConfigError

_LINE = re.compile(r"at line (\d+)")
_SHOWN_CHARACTERS = 80
_SHOWN_OF_A_TEXT = 200
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_QUOTES = re.compile("[“”„‘’«»`]")
_TABLE_IN_WORDS_OF_A_LIBRARY = re.compile(r"\('([^()]*)',?\)")
_INVISIBLE = re.compile("[\u00a0\u00ad\u200b-\u200f\u2028-\u202f\u2060\ufeff]")

_LINE_OF_YAML = re.compile(r"\s*(?:- |[\"']?[\w.-]+[\"']?\s*:(?:\s|$))")
_OTHER_FORMAT = (
    "legal: TOML, [section] on a line of its own and key = value below it (docs/coming_from.md, for files of others)"
)

# Patterns of lines that are no `key = value`, and what is legal instead.
_STATEMENTS = (
    (re.compile(r"//|/\*|\*|--|;|%|<!--"), "# before a comment"),
    (
        re.compile(r"(?:[{}]|- |[\"']?[\w.-]+[\"']?\s*:)[^=]*$"),
        "TOML: [section] on a line of its own, key = value below it",
    ),
    (re.compile(r"[\w.-]+\s+[^=]+$"), "key = value"),
    (re.compile(r"\["), "[section], closed on its line"),
)
# Patterns of common mistakes in values, and what is legal instead.
_HABITS = (
    (re.compile(r"[^\"']*\s(?://|/\*|--|;)"), "# before a comment"),
    (re.compile(r"(?i:true|false)\b"), "true and false in small letters"),
    (re.compile(r"(?i:yes|no|on|off)$"), "true or false"),
    (re.compile(r"[=>:]"), "one = between key and value"),
    (re.compile(r"[({]\s*[\"'\d]"), "[1, 2] for a list"),
    (re.compile(r"[+-]?\d*\.\d*$"), "a digit on both sides of the point"),
    (re.compile(r"[\d.e]+\s*(?:\*|/|<<|\^|\+|-)"), "the number itself: nothing is computed"),
    (re.compile(r"(?i:null|none|nil)\b"), "leave the key out where nothing is meant"),
    (re.compile(r"[+-]?\d+,\d+$"), "a decimal point, no comma; of thousands 1_000"),
    (re.compile(r"[^\[{]*[,;]$"), "nothing behind the value"),
    (re.compile(r"[+-]?0\d"), "a number without zeros before it"),
    (re.compile(r"[+-]?[\d.]+\s*[A-Za-z%]+$"), "the number alone: its unit is part of the key's name"),
    (re.compile(r"[A-Za-z_~/$.]"), 'a text in quotes: key = "text"'),
)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read the tables of a file; what: "run file", for messages.  Raises ConfigError: missing, not UTF-8, not TOML."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        others = [each.stem for each in sorted(path.parent.glob("*.toml"))]
        meant = "".join(nearest(path.stem, others))
        hint = f" (did you mean {path.with_name(f'{meant}.toml')}?)" if meant else ""
        raise ConfigError(f"{path}: no such {what}{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a directory, not a {what}") from None
    text = _decoded(content, path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if other := _other_format(path, text):
            raise ConfigError(f"{path}: this is {other}; {_OTHER_FORMAT}") from error
        said = _TABLE_IN_WORDS_OF_A_LIBRARY.sub(lambda found: f"[{found[1]}]".replace("', '", "."), str(error))
        raise ConfigError(f"{path}: not TOML: {said}{_advice(text, said)}") from error
    except ValueError as error:  # Python reads no longer ones
        raise ConfigError(f"{path}: holds a number of thousands of digits") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: holds brackets within brackets, hundreds deep") from error


def shown(value: object) -> str:
    """Spell a value as in the TOML file, apart from its quotes; long texts are cut."""
    match value:
        case bool():
            return str(value).lower()
        case date() | time():
            return value.isoformat()
        case dict():
            return f"{{{', '.join(f'{key} = {shown(each)}' for key, each in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(shown, value))}]"
        case str() if len(value) > _SHOWN_OF_A_TEXT:
            return f"{value[:_SHOWN_OF_A_TEXT]!r}…"
    return repr(value)


def as_override(value: object) -> str:
    """Spell a value as in an override on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def toml_value(value: object) -> str:
    """Spell a value in TOML, on one line.  Raises ConfigError: TOML has no such value."""
    match value:
        case bool():
            return str(value).lower()
        case Integral():
            return str(int(value))
        case Real():
            return repr(float(value))
        case str() | Path():  # JSON's escapes are TOML's, but for pairs of surrogates and one character
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case date() | time():
            return value.isoformat()
        case Mapping():
            return f"{{{', '.join(f'{toml_value(str(key))} = {toml_value(each)}' for key, each in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case None:
            raise ConfigError("None; legal: leave the key out where nothing is meant")
    raise ConfigError(f"{value!r}; legal: a number, True or False, a text, a path, or a list or dict of these")


def _decoded(content: bytes, path: Path) -> str:
    if content.startswith(_UTF_16):
        raise ConfigError(f"{path}: encoded as UTF-16; legal: UTF-8 (save it again as UTF-8)")
    try:
        return content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: not UTF-8 at line {line}: byte 0x{content[error.start]:02x}; legal: a text saved as UTF-8"
        ) from error


def _other_format(path: Path, text: str) -> str:
    """Name the format of a file that is not TOML at all; "" if it is TOML with a mistake."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if path.suffix == ".json" or (lines and lines[0].startswith("{")):
        return "JSON"
    has_no_section = not any(line.startswith("[") for line in lines)
    is_yaml = bool(lines) and has_no_section and (lines[0] == "---" or _LINE_OF_YAML.match(lines[0]) is not None)
    return "YAML" if path.suffix in (".yaml", ".yml") or is_yaml else ""


def _advice(text: str, said: str) -> str:
    """Quote the faulty line, and describe what would be legal there."""
    found = _LINE.search(said)
    lines = text.split("\n")
    line = lines[int(found[1]) - 1].strip() if found else lines[-1].strip() or (lines[-2].strip() if lines[1:] else "")
    legal = _legal_toml(line, said)
    shown = repr(line)[1:-1] if not line.isprintable() else line
    return f": `{shown[:_SHOWN_CHARACTERS]}`{f'; legal: {legal}' if legal else ''}"


def _legal_toml(line: str, said: str) -> str:
    _, equals, value = line.partition("=")
    value = value.partition("#")[0].strip()
    if "Cannot overwrite" in said:
        return "each key once"
    if "Cannot declare" in said:
        return "each [section] once; [[data]] and [[evaluation]] are several"
    if unseen := _INVISIBLE.search(line):
        return f"the line without its invisible character U+{ord(unseen[0]):04X}"
    if "\r" in line:
        return "a line feed at the end of each line, as Linux and Windows write it"
    if _QUOTES.search(line):
        return 'straight quotes, "text"'
    if "\\" in value:
        return "\\\\ for each \\ between double quotes, or single quotes: 'C:\\data'"
    if statement := next((legal for form, legal in _STATEMENTS if form.match(line)), ""):
        return statement
    return next((legal for form, legal in _HABITS if equals and form.match(value)), "")


def beyond_64_bits(values: Any, place: str = "") -> list[str]:
    """Faults of whole numbers beyond 64 bits, which no message and no array can hold."""
    if isinstance(values, int) and abs(values) >= 1 << 63:
        return [f"{place}={values}: legal: below 2^63"]
    within = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [line for key, each in within for line in beyond_64_bits(each, f"{place}.{key}".removeprefix("."))]
