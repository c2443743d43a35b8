"""The chat messages of a record, in the form that chat templates expect.

Input: a field of a record.  Output: messages, {"role", "content"} each, content as text.  Messages come as lists of
objects (verl, TRL, OpenAI), with content in parts where models see pictures, or as such a list in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rlhpc.data.records import is_unicode
from rlhpc.data.row_formats import kind
from rlhpc.errors import DataError

Message = dict[str, Any]
_MAY_BE_MESSAGES = re.compile(r"\s*\[\s*\{")
_PYTHONS = re.compile(r"\s*\[\s*\{\s*'(role|content)'\s*:")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def is_conversation(value: Any) -> bool:
    """Whether a field holds a list of objects, which can only be messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def prompt_messages(value: Any, source: str, name: str, system_prompt: str) -> list[Message]:
    """Messages up to the answer that is to be sampled: what the assistant says at the end is left out.

    source, name: record and field, for messages of DataErrors.  system_prompt: put first, unless there is one.
    """
    where = f"{source}: field {name!r}"
    messages = [_message(each, f"{where}, message {place}") for place, each in enumerate(value, 1)]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{where} holds no message that asks for an answer")
    if system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, system(system_prompt))
    return messages


def as_conversation(value: Any) -> Any:
    """Parse a list of messages that is written as JSON, as in CSV; return anything else as it is."""
    if isinstance(value, str) and _MAY_BE_MESSAGES.match(value):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return read if is_conversation(read) and all("role" in each for each in read) else value
    return value


def refuse_pythons(value: Any, source: str, name: str) -> None:
    """Raises DataError for str() of a list of messages, which pandas writes into CSV, and which is no prompt."""
    if isinstance(value, str) and _PYTHONS.match(value):
        raise DataError(f"{source}: field {name!r} holds messages as Python writes them; legal: JSON (json.dumps)")


def _message(value: Mapping[str, Any], where: str) -> Message:
    message: Message = _without_nulls(value)
    role = message.get("role")
    if role not in _ROLES:
        keys = ", ".join(map(repr, message)) or "none"
        raise DataError(f"{where}: role is {role!r}, its keys are {keys}; legal: {', '.join(map(repr, _ROLES))}")
    message["content"] = _text(message.get("content", ""), where)
    for key, each in message.items():
        if not is_unicode(each if isinstance(each, str) else json.dumps(each, default=str, ensure_ascii=False)):
            raise DataError(f"{where}: {key} holds half of a surrogate pair, which is no character")
    return message


def _without_nulls(value: Any) -> Any:
    """Parquet has a column for each key that some message has, and for each argument of some call."""
    if isinstance(value, Mapping):
        return {str(key): _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: content is {kind(content)}; legal: a string, or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            named = part.get("type") if isinstance(part, Mapping) else kind(part)
            raise DataError(
                f"{where}: a part of its content is {named!r}; legal: text, since models here read nothing else"
            )
        texts.append(part["text"])
    return "".join(texts)
