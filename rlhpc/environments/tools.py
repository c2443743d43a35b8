"""The environment "tools": a question is answered with the help of tools, in as many turns as it takes.

A turn that calls tools gets their results, one message of role "tool" per call; a turn that calls none is the answer,
which the dataset's task judges.  A malformed call, a call of an unknown tool or with arguments of other types, or one
whose tool raises a ValueError gets an error as its result: the policy may try again.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from rlhpc.base.own_tools import OwnTool, digest_of_tools, load_tool
from rlhpc.base.user_code import is_import_path
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.protocol.environment import MOST_KEPT, TOOL_SCHEMAS, Environment, Message, Step, tool_name
from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards.code_place import failure, limits_of, place
from rlhpc.rewards.environments import servers_here
from rlhpc.rewards.outcomes import NoReward

if TYPE_CHECKING:
    from rlhpc.environments.mcp import Sessions

# ----------------------------------------------------------------------------------------------------------- calculator
#
# A calculator: arithmetic of numbers, exact for whole numbers.
#
# Input: an expression such as (3 + 4) * 12.  Output: its value as text.  Python parses the expression; of its syntax
# tree only numbers and the operators below have a value.  Length and numbers are bounded, so that no expression takes
# long.

MOST_CHARACTERS = 500
MOST_BITS = 4096  # of a whole number
Number = int | float
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=\d)")  # Python refuses 007
_SPELLINGS = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-"})


def calculate(expression: str) -> str:
    """Return the value of an expression.  Raises ValueError if it is not arithmetic, or too large."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {MOST_CHARACTERS} characters")
    text = _LEADING_ZEROS.sub("", " ".join(expression.translate(_SPELLINGS).split()))
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the number is too large") from error
    except (SyntaxError, UnicodeError) as error:
        raise _no_arithmetic(expression) from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("not so deeply nested, please") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _bounded(_OPERATORS[type(kind)](_value(left), _value(right)))
    raise _no_arithmetic(ast.unparse(node))


def _no_arithmetic(text: str) -> ValueError:
    return ValueError(f"{text[:80]!r} is not arithmetic; there are numbers, + - * / // % ** and parentheses")


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MOST_BITS:
        raise OverflowError
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a root of a negative number is not real")
    return base**exponent


_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: _power,
    }
)


def _bounded(value: Number) -> Number:
    is_finite = value.bit_length() <= MOST_BITS if isinstance(value, int) else math.isfinite(value)
    if not is_finite:
        raise OverflowError
    return value


# ---------------------------------------------------------------------------------------------------------- python tool
#
# A Python tool: a program of the policy in the sandbox.
#
# Input: a program.  Output: its output and its failure.  The policy sees the program's own failure; a failure of the
# sandbox raises SandboxError, a verifier error.


def run_python(code: str) -> str:
    """Run a program; return its standard output, then a line on a failure.  Raises SandboxError."""
    sandbox, settings = place()
    run = sandbox.run(code.encode(errors="replace"), b"", limits_of(settings, settings.wall_s))
    printed, why = run.stdout.decode(errors="replace"), failure(run)
    return "\n".join(filter(None, (printed.rstrip("\n"), f"error: {why}" if why else ""))) or "(nothing was printed)"


# --------------------------------------------------------------------------------------------------------------- search
#
# Search a local collection of documents, by BM25 (Robertson & Zaragoza 2009, The Probabilistic Relevance Framework).
#
# The library bm25s scores, as Lucene does.  Words are runs of letters and digits, in lower case.
# Input: a .jsonl file of {"text": …}, or with a "title".  Output: the best documents as text; ties in the file's order.

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class Collection:
    """Documents, indexed."""

    def __init__(self, documents: Sequence[str]) -> None:
        """documents: at least one contains a word."""
        from bm25s import BM25  # takes a second, which runs without a search are spared

        self._documents = documents
        self._index = BM25(method="lucene", k1=K1, b=B)
        self._index.index([_words(document) for document in documents], show_progress=False)

    def found(self, query: str, count: int) -> str:
        """The best documents that have a word of the query, a paragraph each."""
        words = _words(query)
        scores = self._index.get_scores(words) if words else np.zeros(0)
        having = np.flatnonzero(scores)
        best = having[np.argsort(-scores[having], kind="stable")][:count]
        return "\n\n".join(self._documents[number] for number in best) or "nothing was found"


@cache
def open_collection(path: Path) -> Collection:
    """Read and index a file, once in a process.  Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split(
            "\n"
        )  # splitlines also splits at U+2028, legal inside of JSON
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"environment.corpus={path} cannot be read: {error}") from error
    documents = [_document(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not any(map(_WORD.search, documents)):
        raise ConfigError(f"environment.corpus={path} holds no document with a word")
    return Collection(documents)


def _document(line: str, source: str) -> str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"environment.corpus: {source}: malformed JSON: {error}") from error
    text, title = (fields.get("text"), fields.get("title", "")) if isinstance(fields, dict) else (None, None)
    if not isinstance(text, str) or not isinstance(title, str):
        raise ConfigError(f'environment.corpus: {source}: legal: {{"text": …}}, with a "title" or without')
    return f"{title}\n{text}" if title else text


def _words(text: str) -> list[str]:
    return [*map(sys.intern, _WORD.findall(text.lower()))]  # millions of a few words


# ----------------------------------------------------------------------------------------------------------- tool calls
#
# Read the tool calls in a turn, in the formats that models were trained on.
#
#    hermes   <tool_call>{"name": "search", "arguments": {"query": "…"}}</tool_call>      any number, text around them
#    llama3   {"name": "search", "parameters": {"query": "…"}}      the whole turn, several separated by ";"
#             <|python_tag|>{…} the same; <|python_tag|>search.call(query="…"); other text behind <|python_tag|> is code
#    qwen3_coder      <tool_call><function=search><parameter=query>…</parameter></function></tool_call>      any number
#
# Sources: the function-calling format of Nous Hermes (github.com/NousResearch/Hermes-Function-Calling) and the chat
# template of Qwen2.5; Meta's page on Llama 3.1 prompt formats; the chat templates of Qwen3-Coder and Qwen3.5.
# Input: text, and the JSON schemas of the tools, by which values that are not quoted get their types.
# Output: calls, and malformed calls.

_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_BUILT_IN = re.compile(r"(\w+)\.call\((.*)\)", re.DOTALL)
_KEYWORD = re.compile(r'(\w+)\s*=\s*("(?:[^"\\]|\\["\\/bfnrt])*"|-?[0-9]+(?:\.[0-9]+)?)')
_SHOWN_CHARACTERS = 40  # of a malformed call
_NO_END = "a <tool_call> without </tool_call>"
_DECODER = json.JSONDecoder(strict=False)  # models write newlines into strings


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word} is no number in JSON")
    return value


_STRICT = json.JSONDecoder(strict=False, parse_constant=_finite, parse_float=_finite)  # NaN may be meant as text
_DEPTH = 8  # of schemas within a schema


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallError:
    """A malformed call."""

    why: str


Calls = list[Call | CallError]
Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]  # of a tool's arguments, by its name
_NONE_KNOWN: Schemas = MappingProxyType({})


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    """Schemas of arguments by the names of tools, which are told as in OpenAI's API; those of others are left out."""
    functions = filter(_is_object, (tool.get("function", tool) for tool in tools))
    named = ((each.get("name"), each.get("parameters")) for each in functions)
    return {name: schema for name, schema in named if isinstance(name, str) and _is_object(schema)}


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def hermes_calls(turn: str, _schemas: Schemas = _NONE_KNOWN) -> Calls:
    """Every <tool_call> of a turn; one without its end is an error."""
    return [_call(text) if end else CallError(_NO_END) for text, end in _TAGGED.findall(turn)]


def llama3_calls(turn: str, _schemas: Schemas = _NONE_KNOWN) -> Calls:
    """The calls that a turn consists of; none if the turn is text."""
    text = turn.strip()
    is_tagged = text.startswith(_PYTHON_TAG)
    text = text.removeprefix(_PYTHON_TAG).strip()
    if text.startswith("{"):
        calls = _sequence(text)
        is_meant = is_tagged or any(isinstance(call, Call) for call in calls) or '"name"' in text
        return calls if is_meant else []
    if not is_tagged:
        return []
    built_in = _BUILT_IN.fullmatch(text)
    return [_built_in(built_in[1], built_in[2]) if built_in else Call("python", {"code": text})]


def qwen3_coder_calls(turn: str, schemas: Schemas = _NONE_KNOWN) -> Calls:
    """Every <tool_call> of a turn; one that is damaged, or a <function=…> outside of one, is an error."""
    found: Calls = []
    for text, end in _TAGGED.findall(turn):
        found.append(_spelt_out(text.strip(), schemas) if end else CallError(_NO_END))
    if "<function=" in _TAGGED.sub("", turn):
        found.append(CallError("a <function=…> outside of <tool_call>"))
    return found


FORMS: Mapping[str, Callable[[str, Schemas], Calls]] = MappingProxyType(
    {"hermes": hermes_calls, "llama3": llama3_calls, "qwen3_coder": qwen3_coder_calls}
)


def _sequence(text: str) -> Calls:
    """JSON objects one after the other, ";" between them."""
    found: Calls = []
    while text:
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*found, CallError(f"not JSON: {error}")]
        found.append(_of_value(value))
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return found


def _call(text: str) -> Call | CallError:
    try:
        value, end = _DECODER.raw_decode(text.strip())
    except (ValueError, RecursionError) as error:
        return CallError(f"not JSON: {error}")
    if rest := text.strip()[end:].strip():
        return CallError(f"after the JSON comes {rest[:_SHOWN_CHARACTERS]!r}")
    return _of_value(value)


def _of_value(value: Any) -> Call | CallError:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return CallError('a call is {"name": …, "arguments": {…}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as in OpenAI's interface
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return CallError(f"its arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return CallError("its arguments are no object")
    return Call(value["name"], arguments)


def _built_in(name: str, arguments: str) -> Call | CallError:
    """Parse brave_search.call(query="…"): keyword arguments that are JSON strings."""
    values, rest = dict[str, Any](), arguments.strip()
    while rest:
        word = _KEYWORD.match(rest)
        if word is None:
            return CallError(f'{name}.call(…) takes arguments such as query="…"')
        try:
            values[word[1]] = _DECODER.decode(word[2])
        except ValueError:  # 007, or a number of more digits than Python reads
            return CallError(f"{name}.call({word[1]}=…): {word[2][:_SHOWN_CHARACTERS]} is no number")
        rest = rest[word.end() :].lstrip().removeprefix(",").lstrip()
    return Call(name, values)


_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*)</function>", re.DOTALL)
# A value ends where the next parameter, or the end of the function, follows: it may hold </parameter> itself.
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_KNOWN_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_SPELLINGS_OF_PYTHON = {"True": True, "False": False, "None": None}  # as templates write them


def _spelt_out(text: str, schemas: Schemas) -> Call | CallError:
    """Parse <function=…>…</function>, in which each argument is a text between tags."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return CallError("a call is <function=…><parameter=…>…</parameter></function>, each tag with its end")
    name, rest = function[1].strip(), function[2].rstrip()
    schema, values, place = schemas.get(name, {}), dict[str, Any](), 0
    while place < len(rest):
        parameter = _PARAMETER.match(rest, place)
        if parameter is None:
            shown = rest[place:].lstrip()[:_SHOWN_CHARACTERS]
            return CallError(f"{name}: {shown!r} is no <parameter=…>…</parameter>")
        key, value = parameter[1].strip(), parameter[2]
        if key in values:
            return CallError(f"{name}: the parameter {key!r} is there twice")
        if "<parameter=" in value or "<function=" in value:  # the next one's: an end is missing
            return CallError(f"{name}: the parameter {key!r} is without </parameter>")
        try:
            values[key] = _typed(value.removeprefix("\n").removesuffix("\n"), _types(schema, key))
        except ValueError as error:
            return CallError(f"{name}: the parameter {key!r}: {error}")
        place = parameter.end()
    return Call(name, values)


def _typed(text: str, types: frozenset[str]) -> Any:
    """The value that a text stands for; types: of JSON Schema, none if they are not known.  Raises ValueError.

    Of several types that fit, text is the last.  Where none is known, all but an object and a list stays text.
    """
    words = text.strip()
    try:
        value = _SPELLINGS_OF_PYTHON[words] if words in _SPELLINGS_OF_PYTHON else _STRICT.decode(words)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, float) and value.is_integer() and "number" not in types and "integer" in types:
        value = int(value)
    kinds = types or {"object", "array"}
    if not isinstance(value, str) and kinds & _names_of(value):
        return value
    if types and "string" not in types:
        raise ValueError(f"{words[:_SHOWN_CHARACTERS]!r} is no {' or '.join(sorted(types))}")
    return text


def _names_of(value: Any) -> set[str]:
    """Names of JSON Schema's types that a value has."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
    return {"array" if isinstance(value, list) else "object"}


def _types(schema: Schema, key: str) -> frozenset[str]:
    """Names of the types that an argument may have; none if its schema does not say."""
    types = _types_in(_inside(schema, ("properties", key)), schema, _DEPTH)
    may_lack = bool(types) and _inside(schema, ("properties", key, "nullable")) is True  # transformers' word for null
    return types | {"null"} if may_lack else types


def _types_in(schema: Any, root: Schema, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    if isinstance(path := schema.get("$ref"), str):
        return _types_in(_inside(root, path.removeprefix("#/").split("/")), root, depth - 1)
    if "type" in schema:
        said = schema["type"]
        return _KNOWN_TYPES.intersection(map(str, said if isinstance(said, list) else [said]))
    parts = [part for word in ("anyOf", "oneOf", "allOf") for part in _list(schema.get(word))]
    if parts:
        return frozenset[str]().union(*(_types_in(part, root, depth - 1) for part in parts))
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    return frozenset[str]().union(*map(_names_of, values))


def _inside(value: Any, path: Sequence[str]) -> Any:
    """The value at a path in nested objects; None: nothing."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# ---------------------------------------------------------------------------------------------------------------- tools

Tool = Callable[..., Any]  # raises ValueError with a message for the policy; may be async


class Described(Protocol):
    """A tool that its own schema describes: OwnTool, or ServedTool of a server."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema, as in TOOL_SCHEMAS."""

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments from those of a call.  Raises ValueError, with a message for the policy."""


def open_tools(settings: EnvironmentConfig) -> dict[str, Tool]:
    """The tools of a run by name.  Raises ConfigError for a corpus that cannot be read, and for own ones that are none.

    Those of the user take keyword arguments, the others a text.
    """

    known: dict[str, Tool] = {"calculator": calculate, "python": run_python, "shell": _no_shell}
    if settings.corpus is not None:
        collection = open_collection(settings.corpus)
        known["search"] = lambda query: collection.found(query, settings.num_documents)
    own = {each.name: each.function for each in own_tools(settings)}
    return {tool_name(tool): (own if is_import_path(tool) else known)[tool_name(tool)] for tool in settings.tools}


def _no_shell(_command: str) -> str:
    raise ValueError("there is no container")  # the environment "container" puts its own in this place


def own_tools(settings: EnvironmentConfig) -> list[OwnTool]:
    """The user's tools of a run, imported.  Raises ConfigError."""
    return [_own_tool(tool) for tool in settings.tools if is_import_path(tool)]


_own_tool = cache(load_tool)  # each dialogue opens an environment


class ToolEnvironment(Environment):
    """Calls tools for the policy.

    Subclass it for tools that know their dialogue: put a method in the place of a function of environment.tools, which
    describes it.  `tools` maps names to callables; one that environment.tools does not name takes a text.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self.tools: dict[str, Tool] = open_tools(settings)
        self._described: dict[str, Described] = {each.name: each for each in own_tools(settings)}
        self._served = servers_here()
        self._sessions: Sessions | None = None
        if self._served.tables:
            self._add_servers()
        self._calls_in = FORMS[settings.call_form]
        self._schemas = schemas_of([*TOOL_SCHEMAS.values(), *(each.schema for each in self._described.values())])

    @classmethod
    def open(cls, settings: EnvironmentConfig) -> Self:
        """See Environment."""
        return cls(settings)

    async def reset(self, record: Mapping[str, Any]) -> Sequence[Message]:
        """No messages: the prompt is the question, and the chat template names the tools."""
        return ()

    async def step(self, completion: str) -> Step:
        """Results of the calls, or the end."""
        calls = self._calls_in(completion, self._schemas)
        if not calls:
            return Step(is_done=True)
        return Step([{"role": "tool", "content": self._cut(await self._result(call))} for call in calls])

    def offered_tools(self) -> tuple[str, ...]:
        """See Environment."""
        return tuple(self.tools)

    def served_tools(self) -> str:
        """See Environment."""
        return digest_of_tools(self._served.schemas)

    @property
    def most_kept(self) -> int:
        """See Environment: each dialogue may have sessions of servers, and their processes."""
        own = (table.max_sessions for table in self._served.tables.values() if table.session == "dialogue")
        return min(own, default=MOST_KEPT)

    async def close(self) -> None:
        """End the dialogue's sessions of servers."""
        if self._sessions is not None:
            await self._sessions.close()

    def _add_servers(self) -> None:
        """Add the tools of [mcp.NAME]."""
        # Imported here because its library takes a second, which runs without servers are spared.
        from rlhpc.environments.mcp import Sessions

        self._sessions = Sessions(self._served.tables, self._served.schemas)
        for name, tool in self._sessions.tools.items():
            self._described[name], self.tools[name] = tool, partial(self._sessions.call, tool)

    async def _result(self, call: Call | CallError) -> str:
        if isinstance(call, CallError):
            return f"error: {call.why}"
        if call.name not in self.tools:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self.tools)}"
        described, tool = self._described.get(call.name), self.tools[call.name]
        try:
            result = tool(_argument(call)) if described is None else tool(**described.arguments(call.arguments))
            return _text(call.name, await result if inspect.isawaitable(result) else result)
        except ValueError as error:
            return f"error: {error}"

    def _cut(self, result: str) -> str:
        most = self.settings.max_result_characters
        return result if len(result) <= most else f"{result[:most]}… ({len(result) - most} more characters)"


def _text(name: str, result: object) -> str:
    """A text as it is, else JSON.  Raises NoReward for a value that JSON does not have."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=_as_list)
    except (TypeError, ValueError, RecursionError) as error:
        raise NoReward(f"tool {name}: its result is neither a text nor a value in JSON: {error}") from error


def _as_list(value: Any) -> Any:
    """Lists and numbers of arrays, numpy's and torch's."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__}")
    return value.tolist()


def _argument(call: Call) -> str:
    """The only argument, under the name of its schema, or any other.  Raises ValueError."""
    values = [value for value in call.arguments.values() if isinstance(value, str | int | float)]
    schema = TOOL_SCHEMAS.get(call.name, {"function": {"parameters": {"required": ["text"]}}})
    (name,) = schema["function"]["parameters"]["required"]
    if len(call.arguments) != 1 or len(values) != 1:
        raise ValueError(f'{call.name} has one argument: {{"{name}": …}}')
    return str(values[0])
