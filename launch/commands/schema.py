"""The meaning of keys of run files and site files: the JSON schema that editors check by, and the reference page.

    python -m launch.commands.schema configs/README.md

writes the part of the page anew that begins with the first table.  The schema is JSON Schema 2020-12; rules over
several keys are not in it.  A key's meaning is the string below it in its class.  pydantic's use_attribute_docstrings
would read these sources at every start of a process; here they are read on demand.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from launch.plan.site_file import Site
from rlhpc.config.file import SEVERAL, sections
from rlhpc.config.rules import Config
from rlhpc.config.setting import Idle, Section, Usual, marks_of, rules_of
from rlhpc.metrics.names import table_markdown

_MODELS: dict[str, type[BaseModel]] = {"run": Config, "site": Site}


def print_schema(options: argparse.Namespace) -> int:
    """Print a schema, or the names of metrics; returns exit status 0."""
    print(table_markdown() if options.kind == "metrics" else schema_of(options.kind))
    return 0


def schema_of(kind: str) -> str:
    """Make the JSON schema of a file.  kind: "run" or "site"."""
    schema = _MODELS[kind].model_json_schema()
    models = {model.__name__: model for model in _with_its_tables(_MODELS[kind])}
    for name, table in schema["$defs"].items():
        for key, field in models[name].model_fields.items():
            table["properties"][field.alias or key]["description"] = meaning_of(models[name], key)
    if kind == "run":
        schema["$defs"]["DataConfig"].pop("required")  # `task`, which has a default if there is a source
    for name in SEVERAL if kind == "run" else ():  # one table, or several
        tables = schema["properties"][name]
        schema["properties"][name] = {"anyOf": [tables["items"], tables]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rlhpc {kind} file"}
    return json.dumps({**schema, **head}, indent=1)


def _with_its_tables(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for part in _parts_of(field.annotation):
            yield from _with_its_tables(part)


def _parts_of(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _parts_of(part)


# ------------------------------------------------------------------------------------------------------- reference page

_MOST_VALUES = 3  # named one by one
_TYPES = {
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    str: "text",
    Path: "path",
    dict[str, float]: "numbers by name",
    dict[str, int]: "integers by name",
    dict[str, str]: "texts by name",
    dict[str, bool | int | float | str]: "values by name",
    dict[str, dict[str, bool | int | float | str]]: "tables by name",
    tuple[int, ...]: "list of integers",
    tuple[float, ...]: "list of numbers",
    tuple[str, ...]: "list of texts",
}
_BOUNDS = {"gt": "above", "ge": "from", "lt": "below", "le": "up to"}


def reference() -> str:
    """Every table of a run file in Markdown, with its keys: the end of configs/README.md."""
    tables = (_table(name, model) for name, model in sections().items())
    return "\n".join((*tables, "## The whole file", "", *_rules(Config)))


def meaning_of(model: type[BaseModel], key: str) -> str:
    """Return on one line the meaning of a key, and the settings with which it has an effect; "" if not documented."""
    parents = (parent for parent in model.__mro__ if issubclass(parent, BaseModel) and parent is not BaseModel)
    meaning = next(filter(None, (_docstrings(parent).get(key) for parent in parents)), "")
    conditions = (f"{_condition(mark, model)}." for mark in marks_of(model.model_fields[key], Idle))
    return " ".join((meaning, *conditions)) if meaning else ""


def _table(name: str, model: type[BaseModel]) -> str:
    assert issubclass(model, Section)
    rows = [f"## [{name}]", ""]
    rows += [line for mark in model.whole_table for line in (f"{_condition(mark, model)}.", "")]
    rows += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        usual = "".join(f"; usual {each}" for each in marks_of(field, Usual))
        kind = " or ".join(_part(part, field.metadata) for part in _alternatives(field.annotation))
        rows.append(f"| `{key}` | {kind}{usual} | {_default(field)} | {meaning_of(model, key)} |")
    return "\n".join((*rows, "", *_rules(model)))


def _rules(model: type[Section]) -> list[str]:
    rules = [f"* {' '.join((each.__doc__ or '').split())}" for each in rules_of(model)]
    return ["Rules:", "", *rules, ""] if rules else []


def _condition(mark: Idle, model: type[BaseModel]) -> str:
    keys = {name: f"`{_short(name, model)}`" for name in mark.beside}
    listed = [f"{keys[name]}{_values(values)}" for name, values in mark.beside.items()]
    too_many = any(len(values) > _MOST_VALUES for values in mark.beside.values())
    if too_many:
        said = f"Only with {mark.other}"
    elif not mark.is_inverted:
        said = f"No effect with {' and '.join(listed)}"
    elif all(values and values[0] in (None, "") for values in mark.beside.values()):
        said = f"Only without {' and '.join(keys.values())}"
    else:
        said = f"Only with {' or '.join(listed)}"
    notes = [mark.why] if mark.why and not mark.is_inverted else []
    notes += [f"`{_toml(each)}` is always accepted" for each in mark.accepts]
    return said + (f" ({'; '.join(notes)})" if notes else "")


def _short(name: str, model: type[BaseModel]) -> str:
    """Name of a key without its table."""
    section, _, key = name.partition(".")
    return key if sections()[section] is model else name


def _values(values: tuple[object, ...]) -> str:
    return f" = {' or '.join(f'`{_toml(each)}`' for each in values)}" if values else ""


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, text in pairwise(definition.body):
        match statement, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = " ".join(words.split())
    return found


def _alternatives(annotation: Any) -> Iterator[Any]:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return (part for part in parts if part is not type(None))


def _part(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata = [*metadata, *(bound for part in more for bound in getattr(part, "metadata", ()))]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{_toml(value)}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple and get_origin(get_args(annotation)[0]) is Literal:
        return f"list of {_part(get_args(annotation)[0], [])}"
    bounds = [
        f"{word} {getattr(each, name)}" for each in metadata for name, word in _BOUNDS.items() if hasattr(each, name)
    ]
    return f"{_TYPES[annotation]} {', '.join(bounds)}".rstrip()


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "**required**"
    return "none" if field.default is None else f"`{_toml(field.default)}`"


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return str(list(value))
        case int() if value >= 10_000:
            return f"{value:_}"
    return str(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m launch.commands.schema", description="Write the tables of configs/README.md anew."
    )
    parser.add_argument("page", type=Path, help="the page to write: configs/README.md")
    page = parser.parse_args().page
    by_hand, _, _ = page.read_text(encoding="utf-8").partition("## [run]\n")
    page.write_text(by_hand + reference(), encoding="utf-8")
