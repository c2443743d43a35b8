"""Read a run file, apply overrides, and write the result once for every role to read.

Input: TOML and key=value overrides.  Output: Config.  Every error is a ConfigError of one line per fault that names the
place, the value and what is legal.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_json

from rlhpc.config import HAS_BEGUN, Config
from rlhpc.errors import ConfigError
from rlhpc.files import write_atomically
from rlhpc.retired_keys import without_retired_keys
from rlhpc.run_layout import RunLayout


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run file and apply ``dotted.key=value`` overrides, the value in TOML syntax or a bare string.

    Relative paths in the result are made absolute from the current directory.
    Raises ConfigError: file missing, not TOML, unknown key, wrong type, illegal value, keys that contradict each other.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a directory, not a run file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for word in overrides:
        _apply_override(document, word)
    return _with_absolute_paths(_validate(document, str(path)))


def override(config: Config, words: Sequence[str]) -> Config:
    """Apply ``dotted.key=value`` overrides to settings read before.  Raises ConfigError as load_config does."""
    document = config.model_dump(mode="json")
    for word in words:
        _apply_override(document, word)
    return _with_absolute_paths(_validate(document, "overrides"))


def config_hash(config: Config) -> str:
    """Short digest of the settings; roles of one run must agree on it."""
    return _digest(config.model_dump(mode="json"))


def write_resolved(config: Config, layout: RunLayout, commit: str) -> None:
    """Write config.json: settings, their hash, the commit they ran under."""
    document = {"hash": config_hash(config), "commit": commit, "config": config.model_dump(mode="json")}
    write_atomically(layout.config, json.dumps(document, indent=1).encode())


def read_resolved(layout: RunLayout) -> tuple[Config, str]:
    """Return the settings a run was started with, and their hash.  Raises ConfigError if missing or altered.

    The hash is of the file as it was written, so that a run that began under a version with other keys goes on.
    """
    try:
        document = json.loads(layout.config.read_bytes())
        settings, digest = dict(document["config"]), str(document["hash"])
    except FileNotFoundError:
        raise ConfigError(f"{layout.config}: missing; {layout.root} is not a run directory") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{layout.config}: damaged: {error}") from error
    config = _validate(settings, str(layout.config), is_begun=True)
    if _digest(settings) != digest:
        raise ConfigError(f"{layout.config}: altered since the run was started: its hash is {digest}")
    return config, digest


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(settings)).hexdigest()[:16]


def _apply_override(document: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{word!r}: an override has the form section.key=value")
    table = document
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{word!r}: {part} is a value, not a section")
    table[parts[-1]] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _validate(document: dict[str, Any], source: str, *, is_begun: bool = False) -> Config:
    """is_begun: settings of a run that has begun: retired keys and keys without effect cannot be taken back."""
    document, retired = without_retired_keys(document)
    faults = [] if is_begun else retired
    try:
        config = Config.model_validate(document, context=HAS_BEGUN if is_begun else None)
    except ValidationError as error:
        faults += [_explain(detail) for detail in error.errors(include_url=False)]
    if faults:
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults))
    return config


def _explain(detail: ErrorDetails) -> str:
    """One line for one fault, in the words of the run file."""
    location = tuple(str(part) for part in detail["loc"])
    key, value, kind = ".".join(location), detail["input"], detail["type"]
    if kind == "extra_forbidden":
        return f"{key}={value!r}: unknown key; legal: {_legal_keys(location)}"
    if kind == "missing":
        return f"{key}: missing; it has no default"
    if kind == "value_error":  # raised by a rule over several keys, whose message names them
        return str(detail["ctx"]["error"])
    if kind == "literal_error":
        return f"{key}={value!r}: illegal; legal: {detail['ctx']['expected']}"
    return f"{key}={value!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _legal_keys(location: tuple[str, ...]) -> str:
    model: type[BaseModel] = Config
    for part in location[:-1]:
        annotation = model.model_fields[part].annotation
        candidates = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    names = list(model.model_fields)
    close = difflib.get_close_matches(location[-1], names, n=1)
    return f"{', '.join(names)}" + (f" (did you mean {close[0]}?)" if close else "")


def _with_absolute_paths(config: Config) -> Config:
    """Roles may run in another directory than the command."""
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"directory": config.run_directory}),
            "model": config.model.model_copy(update={"path": config.model.path.absolute()}),
            "data": config.data.model_copy(update={"path": config.data.path.absolute()}),
        }
    )
