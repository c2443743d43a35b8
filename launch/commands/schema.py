"""The JSON schema of run files and site files, for editors that check and complete TOML by one.

Output: JSON Schema 2020-12.  What a key means is its description; rules over several keys are not in it.
"""

from __future__ import annotations

import json

from pydantic import BaseModel

from launch.plan.site_file import Site
from rlhpc.config import Config

_MODELS: dict[str, type[BaseModel]] = {"run": Config, "site": Site}


def schema_of(kind: str) -> str:
    """kind: "run" or "site"."""
    schema = _MODELS[kind].model_json_schema()
    if kind == "run":
        schema["$defs"]["DataConfig"].pop("required")  # `task`, which a source has of its own
    for name in ("data", "evaluation") if kind == "run" else ():  # one table, or several
        tables = schema["properties"][name]
        schema["properties"][name] = {"anyOf": [tables["items"], tables]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rlhpc {kind} file"}
    return json.dumps({**schema, **head}, indent=1)
