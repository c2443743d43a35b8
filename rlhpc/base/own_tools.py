"""Tools that the policy may call: functions of the user, which a run file names as package.module:function.

Input: a function with type hints, and a docstring in Google's style whose "Args:" describe the parameters.  Output: its
JSON schema for chat templates, and keyword arguments from a call of the policy.

The schema is the one that transformers' get_json_schema makes, so that a model reads the same words here as in TRL.  It
is made anew because that function loads torch, which neither login nodes nor reward workers load.  Differences: (1) the
name is the one in the run file; (2) types without values in JSON are refused, not called objects; (3) arguments may be
described as "city (str): …", too; (4) a description goes on where lines are indented further, whatever their words.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from rlhpc.base.processes import child_command, child_environment
from rlhpc.base.user_code import is_import_path, load, look_up, place_of, source_of
from rlhpc.protocol.environment import TOOL_SCHEMAS, tool_name
from rlhpc.protocol.errors import ConfigError

KEY = "environment.tools"
_LEGAL = (
    'legal: def f(city: str, days: int = 1) -> str, with a docstring that says what it does and has a section "Args:" '
    'with a line "city: …" for each'
)


# ----------------------------------------------------------------------------------------------------------------- tool


@dataclass(frozen=True, slots=True)
class OwnTool:
    """A function of the user, as a tool."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]  # as in TOOL_SCHEMAS
    hints: Mapping[str, Any]  # types of its parameters, by name

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments from those of a call: of the types that the parameters have.

        Raises ValueError, with a message for the policy, for an argument that is unknown, missing or of another type.
        """
        parameters = self.schema["function"]["parameters"]
        for name in given:
            if name not in self.hints:
                known = ", ".join(self.hints) or "none"
                raise ValueError(f"{self.name} has no argument {name!r}; its arguments: {known}")
        for name in parameters.get("required", ()):
            if name not in given:
                raise ValueError(f"{self.name} needs the argument {name!r}")
        return {name: self._argument(name, value) for name, value in given.items()}

    def _argument(self, name: str, value: Any) -> Any:
        legal = self.schema["function"]["parameters"]["properties"][name].get("enum")
        if legal is not None and value not in legal and not (value is None and self._may_lack(name)):
            raise ValueError(
                f"{self.name}, argument {name!r}: one of {json.dumps(legal, ensure_ascii=False)} is wanted"
            )
        try:
            return msgspec.convert(value, self.hints[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"{self.name}, argument {name!r}: {error}") from error

    def _may_lack(self, name: str) -> bool:
        return bool(self.schema["function"]["parameters"]["properties"][name].get("nullable"))


def load_tool(path: str) -> OwnTool:
    """Import a function as a tool.  Raises ConfigError for one that cannot be told to a model, or called by it."""
    function, name = load(KEY, path), tool_name(path)
    try:
        return _tool(name, function)
    except (
        TypeError,
        ValueError,
        NameError,
        AttributeError,
        SyntaxError,
    ) as error:  # the last ones: of hints in quotes
        raise ConfigError(f"{KEY}={path!r}: {error}{place_of(function)}; {_LEGAL}") from error


def _tool(name: str, function: Callable[..., Any]) -> OwnTool:
    """Raises TypeError, ValueError, and what hints in quotes raise."""
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        kind = "class" if isinstance(function, type) else type(function).__name__
        raise TypeError(f"{name} is a {kind}, not a function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name} yields its results; a call has one")
    description, about, about_result = _described(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"{name} has no docstring that says what it does")
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    properties, required = dict[str, dict[str, Any]](), list[str]()
    for parameter in parameters.values():
        properties[parameter.name] = _property(parameter, hints, about)
        required += [parameter.name] if parameter.default is parameter.empty else []
    told: dict[str, Any] = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties} | ({"required": required} if required else {}),
    }
    if "return" in hints:
        result = _schema(hints["return"], "what it returns")
        told["return"] = result | ({"description": about_result} if about_result else {})
    schema = {"type": "function", "function": told}
    return OwnTool(name, function, schema, MappingProxyType({each: hints[each] for each in parameters}))


def _property(parameter: inspect.Parameter, hints: Mapping[str, Any], about: Mapping[str, str]) -> dict[str, Any]:
    """Schema of a parameter.  Raises TypeError, ValueError."""
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TypeError(f"its parameter {parameter} cannot be given by name, as calls do")
    if name not in hints:
        raise TypeError(f"its parameter {name!r} has no type hint")
    if name not in about:
        raise ValueError(f'its docstring has no line "{name}: …" in a section "Args:"')
    what = f"its parameter {name!r}"
    found, text = _schema(hints[name], what), about[name]
    if choices := _CHOICES.search(text):
        try:
            found["enum"] = [*json.loads(choices[1])]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{what}: choices: {choices[1]!r} is no list in JSON") from error
        text = text[: choices.start()].rstrip()
    return found | {"description": text}


# ---------------------------------------------------------------------------------------------------------------- types

_PLAIN: Mapping[Any, str] = MappingProxyType(
    {
        str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null",
        list: "array", tuple: "array", dict: "object",
    }
)  # fmt: skip


def _schema(hint: Any, what: str) -> dict[str, Any]:
    """JSON schema of the values of a type hint.  Raises TypeError, naming `what`, if JSON has none."""
    try:
        msgspec.json.Decoder(hint)  # which also reads dates, dataclasses and the like, that schemas here do not tell
        return _schema_of(hint)
    except TypeError as error:
        raise TypeError(
            f"{what} has the type {inspect.formatannotation(hint)}, whose values JSON does not have, or does not tell "
            "apart; it has str, int, float, bool, list[…], dict[str, …], tuple[…, …], Literal[…], unions of these, Any"
        ) from error


def _schema_of(hint: Any) -> dict[str, Any]:
    hint = getattr(hint, "__value__", hint)  # of an alias, since Python 3.12
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if not parts and (origin or hint) in _PLAIN:
        return {"type": _PLAIN[origin or hint]}
    if origin in (Union, UnionType):
        return _one_of(parts)
    if origin is Literal:
        names = list(dict.fromkeys(_PLAIN[type(value)] for value in parts))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(parts)}
    if origin is list:
        return {"type": "array", "items": _schema_of(parts[0])}
    if origin is tuple and Ellipsis not in parts:
        return {"type": "array", "prefixItems": [_schema_of(part) for part in parts]}
    if origin is dict and parts[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(parts[1])}
    raise TypeError(f"{hint} has no schema")


def _one_of(parts: Sequence[Any]) -> dict[str, Any]:
    """Schema of a union: names of types if these say all, else each part's."""
    schemas = [_schema_of(part) for part in parts if part is not NoneType]
    if len(schemas) == 1:
        found = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        found = {"type": names[0] if len(names) == 1 else names}
    else:
        found = {"anyOf": schemas}
    return found | {"nullable": True} if NoneType in parts else found


# ----------------------------------------------------------------------------------------------------------- docstrings

_SECTION = re.compile(r"(Args|Arguments|Returns|Raises):\s*")
_ENTRY = re.compile(r"(\w+)(?: ?\(.*?\))?:\s*")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def _described(docstring: str) -> tuple[str, dict[str, str], str]:
    """Descriptions of a function, of its parameters by name, and of what it returns."""
    sections: dict[str, list[str]] = {"": []}
    here = ""
    for line in docstring.splitlines():
        if section := _SECTION.fullmatch(line):
            here = section[1].replace("Arguments", "Args")
        elif here and line[:1].strip():  # what is not indented belongs to no section
            here = "after"
        sections.setdefault(here, []).append("" if section else line)
    result = " ".join(line.strip() for line in sections.get("Returns", ()) if line.strip())
    return "\n".join(sections[""]).strip(), _entries(sections.get("Args", ())), result


def _entries(lines: Sequence[str]) -> dict[str, str]:
    """Descriptions by name; what is indented further than a name continues its description."""
    lines = [line for line in lines if line.strip()]
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    found, name = dict[str, str](), ""
    for line in lines:
        entry = _ENTRY.match(line, margin)
        if entry is not None:
            name = entry[1]
            found[name] = line[entry.end() :].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


# -------------------------------------------------------------------------------------------------------------- schemas
#
# The schemas of a run's tools, for its prompts.  A process of its own imports the user's functions, since they may load
# and start anything: `python -m rlhpc.base.own_tools PATH…` prints {"schemas": {path: schema}}, or {"refused": why}.

_MOST_S = 120.0  # for the imports, and for servers to start


@dataclass(frozen=True, slots=True)
class ToldTools:
    """The tools of a run, as prompts tell of them."""

    schemas: tuple[Mapping[str, Any], ...]  # in the order of the run file, those of servers last
    of_servers: str  # digest of the schemas of servers; "" without servers


def told_tools(tools: Sequence[str], servers: Servers) -> ToldTools:
    """Return environment.tools and the tools of [mcp.NAME].

    Raises ConfigError as schemas_of_tools and schemas_of_servers do, and for two tools of one name.
    """
    own, served = schemas_of_tools(tools), schemas_of_servers(servers)
    found: dict[str, str] = {}
    for place, schemas in ((KEY, own), *((f"mcp.{name}", each) for name, each in served.items())):
        for name in map(name_of, schemas):
            if name in found:
                raise ConfigError(
                    f"{place} has a tool {name!r}, and so has {found[name]}: the policy could not tell them apart; "
                    f"legal: mcp.NAME.prefix, or mcp.NAME.tools without it"
                )
            found[name] = place
    return ToldTools((*own, *(schema for each in served.values() for schema in each)), digest_of_tools(served))


def name_of(schema: Mapping[str, Any]) -> str:
    """The name by which the policy calls a tool."""
    return str(schema["function"]["name"])


def digest_of_tools(served: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A short digest of the schemas of servers, by their names; "" if there are none."""
    return hashlib.sha256(json.dumps(served, sort_keys=True).encode()).hexdigest()[:16] if served else ""


def schemas_of_tools(tools: Sequence[str]) -> list[dict[str, Any]]:
    """JSON schemas of tools of the run file, in their order.  Raises ConfigError for one that load_tool refuses."""
    own = tuple(filter(is_import_path, tools))
    for path in own:
        look_up(KEY, path)
    told = json.loads(_told(own, tuple(map(_state_of, own)))) if own else {}
    return [told[tool] if tool in told else dict(TOOL_SCHEMAS[tool]) for tool in tools]


def _state_of(path: str) -> tuple[str, int, int]:
    """Path, size and time of the source of a function, which change with it, as in a notebook."""
    file = source_of(path)
    if file is None:
        return "", 0, 0
    status = file.stat()
    return str(file), status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)
def _told(paths: tuple[str, ...], _states: tuple[tuple[str, int, int], ...]) -> str:
    """Schemas as JSON, by path."""
    value = f"{KEY}={', '.join(map(repr, paths))}"
    # A compiled file knows the second of its source's last change: what is edited twice in it would stay as it was.
    command = child_command("rlhpc.base.own_tools", *paths)
    return _said(command, "", f"{value}: importing them", PYTHONDONTWRITEBYTECODE="1")


def _said(command: Sequence[str], asked: str, what: str, **variables: str) -> str:
    """Schemas as JSON, which a process prints; asked: its input.  Raises ConfigError, beginning with `what`."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=child_environment(**variables),
            timeout=_MOST_S, check=False, input=asked,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{what} has not ended within {_MOST_S:g} s") from error
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        if "refused" not in said:
            return json.dumps(said["schemas"])
        raise ConfigError(said["refused"])
    except (ValueError, IndexError, KeyError, TypeError):
        raise ConfigError(f"{what} ended with status {done.returncode}: {done.stderr[-300:]}") from None


# -------------------------------------------------------------------------------------------------------------- servers
#
# Tools of servers, [mcp.NAME] of the run file.  A process of its own asks them, since the library takes a second to
# import: rlhpc/environments/mcp.py, which also calls them.

Servers = Mapping[str, Mapping[str, Any]]  # tables of the run file by name, as values of JSON
_MOST_BYTES = 64 << 10  # of schemas: they are in every prompt, and in a variable of workers


def schemas_of_servers(servers: Servers, *, anew: bool = False) -> dict[str, list[dict[str, Any]]]:
    """JSON schemas of the tools of servers, by the servers' names; they are asked once in a process.

    anew: ask again.  Raises ConfigError, with the key, for a server that cannot be started or asked, and for tools that
    cannot be told to a model.
    """
    if not servers:
        return {}
    if anew:
        _served.cache_clear()
    found: dict[str, list[dict[str, Any]]] = json.loads(_served(json.dumps(servers)))
    return found


@lru_cache(maxsize=8)
def _served(servers: str) -> str:
    names = ", ".join(f"mcp.{name}" for name in json.loads(servers))
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(f"{names}: the package mcp is not installed here; legal: pip install 'rlhpc[mcp]'")
    said = _said(child_command("rlhpc.environments.mcp"), servers, f"{names}: asking for tools")
    if (size := len(said.encode())) > _MOST_BYTES:
        raise ConfigError(
            f"{names}: the schemas of their tools have {size:,} bytes, and every prompt would have them; legal: the "
            f"names of a few in mcp.NAME.tools, {_MOST_BYTES:,} bytes at most"
        )
    return said


def main(paths: Sequence[str]) -> int:
    """Print the schemas; return the exit status."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            said: dict[str, Any] = {"schemas": {path: load_tool(path).schema for path in paths}}
        except ConfigError as error:
            said = {"refused": str(error)}
    sys.stdout.write(f"\n{json.dumps(said)}\n")
    sys.stdout.flush()
    return 1 if "refused" in said else 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    os._exit(status)  # threads that a module has started may never end
