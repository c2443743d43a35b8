"""What a user has before a mistake is made: a run file, a model, a dataset, a module; and the ways of spoiling them.

A Spoil changes one thing and returns further words of the command line.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ring.run_kit import Lab, quick_settings

RECORDS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
SITE = '[cluster]\nshared_directory = "/"\n[trainer]\ngpu = "h100"\n[generation]\ngpu = "h100"\n'


class Desk:
    """A directory of a user, in which everything is right."""

    def __init__(self, lab: Lab, root: Path) -> None:
        self.root, self._lab = root, lab
        self.run_file, self.data = root / "run.toml", root / "train.jsonl"
        self.write_records(RECORDS)
        self.settings: dict[str, Any] = quick_settings(lab, "first")
        self.settings["run"]["directory"] = "runs/first"
        self.settings["data"] = {"path": "train.jsonl", "task": "integer_arithmetic"}
        self.text: str | bytes | None = None  # of the run file, in place of the settings
        self.model: Path | None = None

    def own_model(self) -> Path:
        """A copy of the model, to be spoiled."""
        if self.model is None:
            self.model = self.root / "model"
            shutil.copytree(self._lab.model, self.model)
            self.settings["model"]["path"] = "model"
        return self.model

    def write_records(self, records: Sequence[object], name: str = "train.jsonl") -> None:
        lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
        (self.root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def write_run_file(self) -> None:
        if not isinstance(self.text, bytes):
            text = as_toml(self.settings) if self.text is None else self.text
            self.run_file.write_text(text, encoding="utf-8")
        else:
            self.run_file.write_bytes(self.text)


def as_toml(settings: Mapping[str, Any]) -> str:
    """A run file: a table for each section, or several."""
    lines = []
    for section, value in settings.items():
        for table in value if isinstance(value, list) else [value]:
            if not isinstance(table, dict):
                lines.insert(0, f"{section} = {_value(table)}")
                continue
            lines.append(f"[[{section}]]" if isinstance(value, list) else f"[{section}]")
            lines += [f"{name} = {_value(each)}" for name, each in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)  # nan, inf


Spoil = Callable[[Desk], Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class Case:
    """One mistake, and what the refusal of it has to name: place, value, what is legal."""

    what: str
    spoil: Spoil
    says: tuple[str, ...]
    is_tried: bool = False  # a process is started that runs the user's code
    without: str = "Traceback"  # what it must not say


def case(what: str, spoil: Spoil, *says: str, **how: Any) -> Case:
    return Case(what, spoil, says, **how)


# ------------------------------------------------------------------------------------------------------------- spoiling


def text(content: str | bytes) -> Spoil:
    """The whole run file."""

    def spoil(desk: Desk) -> None:
        desk.text = content

    return spoil


def replaced(old: str, new: str) -> Spoil:
    """Some characters of the run file."""

    def spoil(desk: Desk) -> None:
        whole = as_toml(desk.settings)
        assert old in whole, whole
        desk.text = whole.replace(old, new, 1)

    return spoil


def key(name: str, value: Any, **others: Any) -> Spoil:
    """Keys, "section.key" each, in others with "__" for the dot; None: the key is taken away."""

    def spoil(desk: Desk) -> None:
        for full, wanted in {name: value, **{k.replace("__", "."): v for k, v in others.items()}}.items():
            *tables, last = full.split(".")
            table: Any = desk.settings
            for part in tables:
                table = table.setdefault(part, {})
            if wanted is None:
                table.pop(last, None)
            else:
                table[last] = wanted

    return spoil


def words(*given: str) -> Spoil:
    """Words behind the run file."""
    return lambda desk: given


def config_json(**changes: Any) -> Spoil:
    """Keys of the model's config.json; None takes one away."""

    def spoil(desk: Desk) -> None:
        path = desk.own_model() / "config.json"
        document = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))

    return spoil


def model_file(name: str, content: str | bytes | None) -> Spoil:
    """A file of the model; None: it is not there."""

    def spoil(desk: Desk) -> None:
        path = desk.own_model() / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def weights(change: Callable[[Path], object]) -> Spoil:
    """What becomes of model.safetensors."""

    def spoil(desk: Desk) -> None:
        change(desk.own_model() / "model.safetensors")

    return spoil


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Another header of a safetensors file, before the same numbers."""

    def spoil(path: Path) -> None:
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        encoded = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])

    return spoil


def records(*lines: object, **data: Any) -> Spoil:
    """Another dataset, and keys of [data]."""

    def spoil(desk: Desk) -> None:
        desk.write_records(lines)
        desk.settings["data"] |= data

    return spoil


def data_file(name: str, content: str | bytes, **data: Any) -> Spoil:
    """A dataset of another name, and keys of [data]."""

    def spoil(desk: Desk) -> None:
        path = desk.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        desk.settings["data"] |= {"path": name} | data

    return spoil


def module(source: str, **sections: dict[str, Any]) -> Spoil:
    """A module `mine` of the user's own, beside the run file, and sections that name it."""

    def spoil(desk: Desk) -> None:
        (desk.root / "mine.py").write_text(source)
        for section, table in sections.items():
            desk.settings.setdefault(section, {}).update(table)

    return spoil


def site(content: str, *overrides: str) -> Spoil:
    """A site file beside a run that is right."""

    def spoil(desk: Desk) -> list[str]:
        desk.settings["trainer"]["device"] = "auto"
        (desk.root / "site.toml").write_text(content, encoding="utf-8")
        return ["--site", "site.toml", *overrides]

    return spoil


def both(*spoils: Spoil) -> Spoil:
    """One after the other."""

    def spoil(desk: Desk) -> list[str]:
        return [word for each in spoils for word in each(desk) or ()]

    return spoil
