"""Read the tool calls in a turn, in the forms in which models have learnt to write them.

    hermes   <tool_call>{"name": "search", "arguments": {"query": "…"}}</tool_call>      any number, text around them
    llama3   {"name": "search", "parameters": {"query": "…"}}      the whole turn, several separated by ";"
             <|python_tag|>{…} the same; <|python_tag|>search.call(query="…"); other text behind <|python_tag|> is code

Sources: the function-calling format of Nous Hermes (github.com/NousResearch/Hermes-Function-Calling) and the chat
template of Qwen2.5; Meta's page on Llama 3.1 prompt formats.  Input: text.  Output: calls, and what was meant as one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_BUILT_IN = re.compile(r"(\w+)\.call\((.*)\)", re.DOTALL)
_KEYWORD = re.compile(r'(\w+)\s*=\s*("(?:[^"\\]|\\["\\/bfnrt])*"|-?[0-9]+(?:\.[0-9]+)?)')
_SHOWN_CHARACTERS = 40  # of what is wrong
_DECODER = json.JSONDecoder(strict=False)  # models write newlines into strings


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallError:
    """A text that was meant as a call, but is none."""

    why: str


Calls = list[Call | CallError]


def hermes_calls(turn: str) -> Calls:
    """Every <tool_call> of a turn; one without its end is an error."""
    found: Calls = []
    for text, end in _HERMES.findall(turn):
        found.append(_call(text) if end else CallError("a <tool_call> without </tool_call>"))
    return found


def llama3_calls(turn: str) -> Calls:
    """The calls that a turn consists of; none where it is text."""
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


FORMS: Mapping[str, Callable[[str], Calls]] = MappingProxyType({"hermes": hermes_calls, "llama3": llama3_calls})


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
    """brave_search.call(query="…"): keyword arguments that are texts, as JSON spells them."""
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
