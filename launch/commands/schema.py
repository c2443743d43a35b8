"""The JSON schema of run files and site files, for editors that check and complete TOML by one.

Output: JSON Schema 2020-12.  What a key means is its description; rules over several keys are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel

from launch.plan.site_file import Site
from rlhpc.config.reference import meaning_of
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
