"""One row of a dataset, and its fields by the names that keys of the run file have for them.

Input: paths.  Output: Record.  A name with dots leads into objects and lists: "reward_model.ground_truth", "choices.0";
a field whose own name has dots comes first.  Errors are DataErrors that name file, line, field and key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhpc.config_data import WHOLE_RECORD
from rlhpc.data.dataset_files import dataset_files
from rlhpc.data.row_formats import kind, read_rows
from rlhpc.errors import DataError

_LONGEST_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a dataset."""

    fields: dict[str, Any]
    source: str  # "train.jsonl:17", for messages; of a table or an array it is the row

    def text(self, name: str, key: str = "data.prompt_template") -> str:
        """A field as text for a prompt: a string, or a finite number in digits.  Raises DataError otherwise."""
        return self._as_text(name, key)

    def reference(self, name: str, key: str = "data.reference_field") -> str:
        """A field as a reference: text as it is, lists and objects (test cases) as JSON.  Raises DataError."""
        if name == WHOLE_RECORD:
            return json.dumps(self.fields, default=_spelled)
        if isinstance(value := self.value(name, key), list | dict):
            return json.dumps(value, default=_spelled)
        return self._as_text(name, key)

    def number(self, name: str, key: str) -> float:
        """A field as a number; `key` of the run file names the field.  Raises DataError otherwise."""
        value = self.value(name, key)
        if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise DataError(f"{self.source}: field {name!r}, which {key} names, is {value!r}; legal: a number")

    def value(self, name: str, key: str) -> Any:
        """A field as it is; `key` of the run file names it.  Raises DataError if there is none."""
        if name in self.fields:
            return self.fields[name]
        here: Any = self.fields
        inside = ""  # the part of the name that was found
        for part in name.split("."):
            here, found = _inner(here, part)
            if not found:
                raise DataError(f"{self.source}: {self._missing(name, key, inside, here)}")
            inside = f"{inside}.{part}" if inside else part
        return here

    def has(self, name: str) -> bool:
        """Whether there is such a field, and it is not null."""
        try:
            return self.value(name, "") is not None
        except DataError:
            return False

    def holds_several(self, name: str) -> bool:
        """Whether a field, which must exist, is a list or an object."""
        return isinstance(self.value(name, ""), list | dict)

    def _missing(self, name: str, key: str, inside: str, here: Any) -> str:
        what = f"field {inside!r}" if inside else "the record"
        if isinstance(here, list):
            has, names = f"is a list of {len(here)}", []
        elif isinstance(here, dict):
            names = [str(each) for each in here]
            has = f"has {_listed(names)}"
        else:
            has, names = f"is {kind(here)}", []
        close = _closest(name, inside, names)
        hint = f" (did you mean {close}?)" if close else ""
        return f"no field {name!r}, which {key} names; {what} {has}{hint}"

    def _as_text(self, name: str, key: str) -> str:
        """`key` of the run file names the field."""
        value = self.value(name, key)
        if isinstance(value, str):
            if not is_unicode(value):
                raise DataError(f"{self.source}: field {name!r} holds half of a surrogate pair, which is no character")
            return value
        if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):
            return format(Decimal(str(value)), "f")  # without an exponent, which mathematics reads as e
        shown = "" if value is None else f" {str(value)[:_LONGEST_SHOWN]}"
        raise DataError(
            f"{self.source}: field {name!r} is {kind(value)}{shown}, and {key} names it; legal: a string or a number"
        )


def reference_of(text: str, reference_field: str) -> str:
    """The reference in a whole record, as Record.reference makes it; "" where there is none."""
    record = Record(json.loads(text), "the record of a prompt")
    has_one = reference_field == WHOLE_RECORD or record.has(reference_field)
    return record.reference(reference_field) if has_one else ""


def read_records(path: Path, split: str = "") -> list[Record]:
    """All records, files of a directory in the order of their names.

    Raises DataError: nothing there, not a format known here, malformed, or no record at all.
    """
    records = [
        Record(fields, f"{file}:{number}") for file in dataset_files(path, split) for fields, number in read_rows(file)
    ]
    if not records:
        raise DataError(f"data.path={path} has no records")
    return records


def _spelled(value: Any) -> str:
    """What JSON has no form for, as text; a decimal number as _as_text has it."""
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def is_unicode(text: str) -> bool:
    """JSON can spell lone surrogates; neither tokenizers nor the wire can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _inner(value: Any, part: str) -> tuple[Any, bool]:
    """(What `part` names in an object, a list or JSON text, True), or (the value itself, False) if there is none."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):  # CSV has no other way
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value, False
    if isinstance(value, dict) and part in value:
        return value[part], True
    if isinstance(value, list) and part.removeprefix("-").isdecimal() and -len(value) <= int(part) < len(value):
        return value[int(part)], True
    return value, False


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "no fields"


def _closest(name: str, inside: str, names: list[str]) -> str:
    part = name[len(inside) + 1 :].partition(".")[0] if inside else name.partition(".")[0]
    found = get_close_matches(part, names, 1)
    return ".".join(filter(None, (inside, *found))) if found else ""
