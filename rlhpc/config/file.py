"""Read a run file, apply overrides, and write the result once for every role to read.

Input: TOML and key=value overrides.  Output: Config.  Every error is a ConfigError of one line per fault that names the
place, the value and what is legal.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_json

from rlhpc.base.files import is_absent, write_atomically
from rlhpc.base.near_names import nearest
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.foreign import counterpart_of, in_words, is_theirs, section_in_words
from rlhpc.config.rules import Config, is_of_stage_alone
from rlhpc.config.toml import beyond_64_bits, read_toml, shown, toml_value
from rlhpc.protocol.errors import ConfigError

COMMAND_LINE = "command line"  # source of overrides, in messages


def load_config(path: Path, overrides: Sequence[str] = (), whence: str = COMMAND_LINE) -> Config:
    """Read a run file and apply ``dotted.key=value`` overrides, the value in TOML syntax or a bare string.

    Relative paths in the result are made absolute from the current directory.  whence: source of overrides in messages.
    Raises ConfigError: file missing, not TOML, unknown key, wrong type, illegal value, keys that contradict each other.
    """
    if path.is_dir() and RunLayout(path).is_run:
        raise ConfigError(
            f"{path}: a run directory, not a run file; legal: the file from which it was started "
            "(`rlhpc run RUN.toml --resume` continues it)"
        )
    document = read_toml(path, "run file")
    if not document and not overrides:
        needed = "; ".join(
            f"[{name}] {_required(name)}" for name, key in Config.model_fields.items() if key.is_required()
        )
        raise ConfigError(
            f"{path}: it has no settings; legal: at least {needed} (`rlhpc recipes copy NAME` writes a whole run file, "
            "configs/README.md has every key)"
        )
    if document.keys() & set(OF_SITE_FILES) and not document.keys() & set(OF_RUN_FILES):
        raise ConfigError(f"{path}: a site file, not a run file; legal: the run file first, then the site file")
    return settled(document, overrides, str(path), whence)


def override(config: Config, words: Sequence[str]) -> Config:
    """Apply ``dotted.key=value`` overrides to settings read before.  Raises ConfigError as load_config does."""
    return settled(config.model_dump(mode="json"), words, "settings of the run")


def settled(document: dict[str, Any], overrides: Sequence[str], source: str, whence: str = COMMAND_LINE) -> Config:
    """Apply overrides to the tables of a run file, in place, and return the settings.

    source: source of the tables in messages; whence: of the overrides.  Raises as load_config does.
    """
    typed = [_apply_override(document, word) for word in overrides]
    return _with_absolute_paths(_validate(document, (source, whence), typed))


def config_hash(config: Config) -> str:
    """Short digest of the settings; roles of one run must agree on it."""
    return _digest(config.model_dump(mode="json"))


def write_resolved(config: Config, layout: RunLayout, commit: str) -> None:
    """Write config.json: settings, their hash, the commit they ran under."""
    document = {"hash": config_hash(config), "commit": commit, "config": config.model_dump(mode="json")}
    write_atomically(layout.config, json.dumps(document, indent=1).encode())


def read_resolved(layout: RunLayout) -> tuple[Config, str]:
    """Return the settings a run was started with, and their hash.  Raises ConfigError if missing or altered, OSError.

    The hash is checked against the file as written, which distinguishes altered settings from those of another version
    of rlhpc.
    """
    try:
        document = json.loads(layout.config.read_bytes())
        settings, digest = dict(document["config"]), str(document["hash"])
        is_as_written = _digest(settings) == digest
    except FileNotFoundError:
        if not is_absent(layout.config):
            raise
        raise ConfigError(f"{layout.config}: missing; {layout.root} is not a run directory") from None
    except KeyError as error:
        raise ConfigError(f"{layout.config}: has no {error}; {layout.root} is not a run directory") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{layout.config}: damaged: {error}") from error
    try:
        config = _validate(settings, (str(layout.config), ""))
    except ConfigError as error:
        if not is_as_written:
            raise
        version = f"another version of rlhpc, {document.get('commit') or 'of no known commit'}"
        raise ConfigError(f"{error}\n{layout.config}: written by {version}: go on with that one") from None
    if not is_as_written:
        raise ConfigError(f"{layout.config}: altered since the run was started: its hash is {digest}")
    return config, digest


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(settings)).hexdigest()[:16]


def _apply_override(document: dict[str, Any], word: str) -> str:
    """Apply an override; return the key that it added: the first part that the document lacked, or the whole key."""
    key, equals, text = word.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{word!r}: an override has the form section.key=value")
    table: Any = document
    own: list[str] = []
    *sections, name = parts
    while sections:
        part = sections.pop(0)
        if not own and part not in table:
            own = parts[: -1 - len(sections)]
        table = table.setdefault(part, {})
        if isinstance(table, list) or (part in SEVERAL and isinstance(table, dict)):
            table = _one_of(table if isinstance(table, list) else [table], part, sections, word)
        if not isinstance(table, dict):
            raise ConfigError(f"{word!r}: {part} is a value, not a section")
    table[name] = _parse_value(text.strip())
    return ".".join(own or parts)


def _one_of(tables: list[Any], section: str, rest: list[str], word: str) -> Any:
    """Return the table with the number in the next part, which may be left out if there is at most one table."""
    tables += [] if tables else [{}]
    has_number = bool(rest) and rest[0].isdecimal()
    if has_number and int(rest[0]) < len(tables):
        return tables[int(rest.pop(0))]
    if len(tables) == 1 and not has_number:
        return tables[0]
    if len(tables) == 1:
        raise ConfigError(f"{word!r}: there is but one table [{section}]; legal: {section}.…")
    legal = ", ".join(f"{section}.{place}.…" for place in range(len(tables)))
    raise ConfigError(f"{word!r}: there are {len(tables)} tables [[{section}]]; legal: {legal}")


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, or nested too deep for TOML's reader
        return text


def _required(section: str) -> str:
    """Keys of a section without a default, separated by commas."""
    return ", ".join(name for name, key in _SECTIONS[section].model_fields.items() if key.is_required())


def fault_lines(error: ValidationError, explain: Callable[[str, ErrorDetails], str | None]) -> list[str]:
    """One line for each fault that pydantic has found: key, value and what is legal.

    explain: key and fault → the file's own message; None: the common message.
    """
    said: dict[str, list[str]] = {}  # a key and value may come several times: no alternative of its type fits
    for detail in error.errors(include_url=False):
        key = ".".join(map(str, _place_in_file(detail["loc"])))
        if (line := explain(key, detail)) is not None:
            said[line] = []
        elif detail["type"] == "missing":
            said[f"{key}: missing; it has no default"] = []
        else:
            said.setdefault(f"{key}={shown(detail['input'])}: ", []).append(_legal(detail))
    return [f"{line}legal: {', or '.join(dict.fromkeys(legal))}" if legal else line for line, legal in said.items()]


_LEGAL = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "path_type": "a path",
    "tuple_type": "a list",
    "too_short": "{min_length} or more",
    "too_long": "{max_length} or fewer",
    "dict_type": "a table",
    "model_type": "a table",
    "literal_error": "{expected}",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
    "string_pattern_mismatch": "{words}",
}

_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-', a letter or digit first",
    r"^[A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-'",
}
MOST_HINTS = 2
_ALIKE = 0.75  # similarity at which a section's name is taken for a slip; other systems' names are below
OF_SITE_FILES = ("cluster", "common", "controller", "prologue", "rates")  # tables of site files only
OF_RUN_FILES = ("run", "model", "data", "admission")  # tables of run files only, which each of them needs
_RARE = ("evaluation", "critic", "judge", "lora", "sft", "demonstrations")  # rarely used tables, the rarest last


def _legal(detail: ErrorDetails) -> str:
    """Describe the legal values in the words of a run file; in pydantic's for a fault not listed here."""
    if detail["type"] == "tuple_type" and isinstance(value := detail["input"], str | int | float):
        return f"a list: {toml_value([_number_in(value)])}"
    form, context = _LEGAL.get(detail["type"]), detail.get("ctx", {})
    pattern = str(context.get("pattern", ""))
    words = _PATTERNS.get(pattern, f"text that matches {pattern}")
    return form.format(**context, words=words) if form else detail["msg"].removeprefix("Input should be ")


def _number_in(value: str | float) -> str | float:
    """Convert a text to its number; return the text if it is none."""
    read = _parse_value(str(value))
    return read if isinstance(read, int | float) else value


def _place_in_file(place: tuple[str | int, ...]) -> list[str | int]:
    """Remove pydantic's own parts from a place: the key of a table, and the alternative of a type that it tried."""
    *before, last = place or ("",)
    plain = place if last not in ("bool", "int", "float", "str") or len(before) < 3 else before
    added = ("[key]", "constrained-float", "constrained-int")
    return [part for part in plain if part not in added and not str(part).startswith("literal[")]


def _validate(document: dict[str, Any], sources: tuple[str, str], typed: Sequence[str] = ()) -> Config:
    """Check the document.  sources: names of the file and of the overrides.  typed: keys that overrides brought."""
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        lacking = tuple(f"{place}: missing" for place in _misspelt(error))  # the message on the misspelling suffices
        explain = partial(_explain, is_supervised=is_of_stage_alone(document))
        lines = [line for line in fault_lines(error, explain) if not line.startswith(lacking)]
        faults = [_of_the_only_table(line, document) for line in lines]
    else:
        faults = beyond_64_bits(document)
    if faults:
        own = [_of_the_only_table(key, document) for key in typed]
        raise ConfigError("\n".join(f"{_whose(fault, sources, own)}: {fault}" for fault in faults))
    return config


def _whose(fault: str, sources: tuple[str, str], typed: Sequence[str]) -> str:
    """Source of the key with which a fault begins; both sources if a rule compares keys of the two.

    typed: keys that overrides brought.
    """
    first = re.split(r"[=: ]", fault, maxsplit=1)[0].strip("[]")
    section = Config.model_fields.get(first.partition(".")[0])
    if ": missing; " in fault and section is not None and section.is_required():
        return sources[0]  # also if overrides alone have keys of a table that every run file needs
    if any(f"{first}.".startswith(f"{key}.") for key in typed):
        return sources[1]
    values = fault.partition("; legal: ")[0]
    return " and ".join(sources) if any(f" {key}=" in values for key in typed) else sources[0]


def _misspelt(error: ValidationError) -> Iterator[str]:
    """Yield the keys and [sections] that unknown ones may mean, in the form of messages."""
    unknown = [detail["loc"] for detail in error.errors(include_url=False) if detail["type"] == "extra_forbidden"]
    for *within, name in (map(str, place) for place in unknown):
        if within:
            yield from (".".join((*within, meant)) for meant in nearest(name, _SECTIONS[within[0]].model_fields))
        else:
            yield from (f"[{meant}]" for meant in nearest(name, _SECTIONS, cutoff=_ALIKE))


def _of_the_only_table(line: str, document: dict[str, Any]) -> str:
    """Remove the number of a table from a fault if there is only one table of its kind."""
    name, number, key = [*line.split(".", 2), "", ""][:3]
    tables = document.get(name)
    return f"{name}.{key}" if number == "0" and not (isinstance(tables, list) and len(tables) > 1) else line


def _explain(key: str, detail: ErrorDetails, *, is_supervised: bool) -> str | None:
    if detail["type"] == "path_type" and isinstance(detail["input"], list):
        return (
            f"{key}={shown(detail['input'])}: legal: one path; of several files a directory, or a table [[data]] each"
        )
    if detail["type"] == "tuple_type" and key in _SECTIONS:
        return f"{key}={shown(detail['input'])}: legal: a table [{key}], or several [[{key}]]"
    is_word = detail["type"] == "model_type" and key in _SECTIONS and isinstance(detail["input"], str)
    if is_word and (places := _keys_called(key)):
        return f"{key}={shown(detail['input'])}: legal: a table (did you mean {' or '.join(places[:MOST_HINTS])}?)"
    if detail["type"] == "missing" and key in _SECTIONS:
        return f"[{key}]: missing; required in it: {_required(key)}"
    if detail["type"] == "extra_forbidden":
        *section, name = map(str, detail["loc"])
        legal = [*_SECTIONS[section[0]].model_fields] if section else [*_SECTIONS]
        if not section and isinstance(detail["input"], dict | list):
            return _unknown_section(name, detail["input"])
        return _unknown_key_of_a_run(key, detail["input"], legal, is_supervised=is_supervised)
    if detail["type"] == "value_error":  # raised by a rule over several keys names them, of one key says what is legal
        cause = str(detail["ctx"]["error"])
        return f"{key}={shown(detail['input'])}: {cause}" if _is_of_a_key(detail["loc"]) else cause
    return None


def _is_of_a_key(place: tuple[str | int, ...]) -> bool:
    """Whether a fault is in one key, not in a whole table."""
    return len(place) > 1 and place[-1] in _SECTIONS[str(place[0])].model_fields


def _unknown_section(name: str, tables: object) -> str:
    """Describe an unknown section: the one that may be meant, or our keys for a section of another system."""
    if meant := nearest(name, _SECTIONS, cutoff=_ALIKE):
        return f"[{name}]: unknown section (did you mean [{meant[0]}]?)"
    if isinstance(tables, dict) and (theirs := section_in_words(name, tables)):
        return f"[{name}]: unknown section, of another system; here {theirs}"
    more = f"; [{name}] is a section of site files" if name in OF_SITE_FILES else ""
    return f"[{name}]: unknown section; legal: {', '.join(_SECTIONS)}{more}"


def _unknown_key_of_a_run(key: str, value: object, legal: Sequence[str], *, is_supervised: bool) -> str:
    """Describe an unknown key: by another system's key of this name, else by similar keys of ours."""
    name = key.rpartition(".")[2]
    if is_supervised and name in _SECTIONS["sft"].model_fields:
        return unknown_key(key, value, legal, [f"sft.{name}"])
    if isinstance(value, dict) and (section := section_in_words(key, value)):
        return f"{key}: unknown section, of another system; here {section}"
    found = counterpart_of(key, is_supervised=is_supervised)
    is_ours = found is not None and found.ours.rpartition(".")[2] == name  # and may be in several of our tables
    if found is None or is_ours or (name in _KEYS and not is_theirs(key)):
        return unknown_key(key, value, legal, _places_of(name))
    note = f" {found.note}" if found.note else ""
    hint = f"did you mean {found.ours}?{note}" if found.ours else in_words(found)
    return f"{key}={shown(value)}: unknown key ({hint}); legal: {', '.join(legal)}"


def unknown_key(key: str, value: object, legal: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """Describe an unknown key: the legal keys, and the one that may be meant, similar or in another table."""
    name = key.rpartition(".")[2]
    meant = [*nearest(name, legal), *(place for place in elsewhere if place.rpartition(".")[2] not in legal)]
    hint = f" (did you mean {' or '.join(meant[:MOST_HINTS])}?)" if meant else ""
    return f"{key}={shown(value)}: unknown key{hint}; legal: {', '.join(legal)}"


def key_meant(name: str) -> str:
    """Find the key of a run file by its last word, or by another system's name for it; "" if none is known.

    Returns a command in backticks if a command takes the key's place.
    """
    if name in _KEYS or (found := counterpart_of(name)) is None:
        return "".join(_places_of(name)[:1])
    return found.ours


def _places_of(name: str) -> list[str]:
    """Return every place at which a key of this name is legal; if there is none, of a similar name."""
    keys = {f"{section}.{key}": key for section, model in _SECTIONS.items() for key in model.model_fields}
    similar = nearest(name, sorted({*keys.values()}), cutoff=0.8)
    wanted = name if name in keys.values() else similar[0] if similar else None
    return sorted((place for place, key in keys.items() if key == wanted), key=_rarity)


def _keys_called(name: str) -> list[str]:
    """Return every place at which a key has exactly this name."""
    return [place for place in _places_of(name) if place.rpartition(".")[2] == name]


def _rarity(place: str) -> int:
    """Sort key of places with one name: the higher, the more rarely the place is meant."""
    return _RARE.index(table) + 1 if (table := place.partition(".")[0]) in _RARE else 0


def sections() -> dict[str, type[BaseModel]]:
    """Tables of a run file by name; SEVERAL, [composite.NAME] and [mcp.NAME] may occur several times."""
    annotations = {name: field.annotation for name, field in Config.model_fields.items()}
    return {
        name: each
        for name, annotation in annotations.items()
        for each in (get_args(annotation) or (annotation,))
        if isinstance(each, type) and issubclass(each, BaseModel)
    }


_SECTIONS = sections()
_KEYS = frozenset(key for model in _SECTIONS.values() for key in model.model_fields)
SEVERAL = ("data", "evaluation", "demonstrations")  # tables that may occur several times


def _with_absolute_paths(config: Config) -> Config:
    """Make paths absolute: roles may run in another directory than the command."""
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"directory": config.run_directory}),
            "model": config.model.model_copy(update={"path": config.model.path.absolute()}),
            "critic": config.critic.model_copy(update={"path": config.critic.path and config.critic.path.absolute()}),
            "lora": config.lora.model_copy(update={"initial": config.lora.initial and config.lora.initial.absolute()}),
            "environment": config.environment.model_copy(
                update={"corpus": config.environment.corpus and config.environment.corpus.absolute()}
            ),
            "agent": config.agent.model_copy(update={"command": _with_absolute_files(config.agent.command)}),
            "mcp": {
                name: server.model_copy(update={"command": _with_absolute_files(server.command)})
                for name, server in config.mcp.items()
            },
            **{
                name: tuple(
                    each.model_copy(update={"path": each.path and each.path.absolute()})
                    for each in getattr(config, name)
                )
                for name in SEVERAL
            },
        }
    )


def _with_absolute_files(command: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(Path(word).absolute()) if Path(word).is_file() else word for word in command)
