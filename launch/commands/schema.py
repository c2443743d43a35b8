"""The JSON schema of run files and site files, for editors that check and complete TOML by one.

Output: JSON Schema 2020-12.  What a key means is its description; rules over several keys are not in it.

A key's meaning is the string below it in its class.  pydantic's use_attribute_docstrings would read these sources
whenever any process starts; here they are read when somebody asks.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import get_args

from pydantic import BaseModel

from launch.plan.site_file import Site
from rlhpc.config.rules import Config

_MODELS: dict[str, type[BaseModel]] = {"run": Config, "site": Site}


def schema_of(kind: str) -> str:
    """kind: "run" or "site"."""
    schema = _MODELS[kind].model_json_schema()
    models = {model.__name__: model for model in _with_its_tables(_MODELS[kind])}
    for name, table in schema["$defs"].items():
        for key, field in models[name].model_fields.items():
            table["properties"][field.alias or key]["description"] = meaning_of(models[name], key)
    if kind == "run":
        schema["$defs"]["DataConfig"].pop("required")  # `task`, which a source has of its own
    for name in ("data", "evaluation") if kind == "run" else ():  # one table, or several
        tables = schema["properties"][name]
        schema["properties"][name] = {"anyOf": [tables["items"], tables]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rlhpc {kind} file"}
    return json.dumps({**schema, **head}, indent=1)


def meaning_of(model: type[BaseModel], key: str) -> str:
    """What a key of a table means, on one line; "" if nothing says it."""
    parents = (parent for parent in model.__mro__ if issubclass(parent, BaseModel) and parent is not BaseModel)
    return next(filter(None, (_docstrings(parent).get(key) for parent in parents)), "")


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
