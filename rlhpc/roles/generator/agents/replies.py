"""The policy's turn in the format of OpenAI's API: one object, or a stream of chunks; tool calls parsed from the text.

Input: the text of a turn.  Output: JSON objects.  A stream has all of a turn's text in one chunk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlhpc.rewards.environments.tool_calls import FORMS, Call
from rlhpc.roles.generator.agents.requests import Asked, Message

_OPENS = "<tool_call>"  # of the form "hermes"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy, as the agent sees it."""

    number: int  # of the session, from 1
    content: str
    calls: tuple[Call, ...]
    is_cut: bool  # a limit has ended it
    num_read: int  # tokens before it
    num_sampled: int  # tokens of it
    token_ids: tuple[int, ...] = ()  # the same, as sampled

    @property
    def message(self) -> Message:
        """As a history has it, normalised."""
        calls = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for name, call in zip(self._names, self.calls, strict=True)
        ]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})

    @property
    def finish_reason(self) -> str:
        """One of OpenAI's."""
        return "length" if self.is_cut else "tool_calls" if self.calls else "stop"

    @property
    def spoken(self) -> dict[str, Any]:
        """The message as it travels: arguments are JSON in a text."""
        calls = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": _json(call.arguments)}}
            for name, call in zip(self._names, self.calls, strict=True)
        ]
        return {"role": "assistant", "content": self.content or None if calls else self.content} | (
            {"tool_calls": calls} if calls else {}
        )

    @property
    def usage(self) -> dict[str, int]:
        """Tokens."""
        read, sampled = self.num_read, self.num_sampled
        return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}

    @property
    def _names(self) -> list[str]:
        """Ids of the calls: the same when the session is played again."""
        return [f"call_{self.number}_{place}" for place in range(len(self.calls))]


def turn_of(
    text: str,
    answer: str,
    call_form: str,
    *,
    number: int,
    has_tools: bool,
    is_cut: bool,
    num_tokens: tuple[int, int],
    token_ids: tuple[int, ...] = (),
) -> Turn:
    """text: with special tokens, of which calls may consist; answer: without.  What is no whole call stays text."""
    found = FORMS[call_form](text) if has_tools else []
    calls = tuple(call for call in found if isinstance(call, Call) and _is_sayable(call))
    if len(calls) < len(found):
        calls = ()
    content = answer
    if calls:
        content = text.partition(_OPENS)[0].strip() if call_form == "hermes" else ""
    return Turn(number, content, calls, is_cut, *num_tokens, token_ids)


def completion(session: str, turn: Turn, asked: Asked) -> dict[str, Any]:
    """The whole of it, object chat.completion."""
    choice = {"index": 0, "message": turn.spoken, "logprobs": None, "finish_reason": turn.finish_reason}
    return _head(session, turn, asked, "chat.completion") | {"choices": [choice], "usage": turn.usage}


def chunks(session: str, turn: Turn, asked: Asked) -> Iterator[dict[str, Any]]:
    """The same as objects chat.completion.chunk."""
    head = _head(session, turn, asked, "chat.completion.chunk")
    spoken = dict(turn.spoken)
    if "tool_calls" in spoken:
        spoken["tool_calls"] = [{"index": place, **call} for place, call in enumerate(spoken["tool_calls"])]
    for delta, reason in ((spoken, None), ({}, turn.finish_reason)):
        yield head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
    if asked.with_usage:
        yield head | {"choices": [], "usage": turn.usage}


def event(data: dict[str, Any] | None) -> bytes:
    """A server-sent event; None: the last one."""
    return f"data: {'[DONE]' if data is None else json.dumps(data)}\n\n".encode()


def _head(session: str, turn: Turn, asked: Asked, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{session}-{turn.number}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model or "policy",
    }


def _is_sayable(call: Call) -> bool:
    """False: it spells half a surrogate pair, which no client can send back, and the endpoint would refuse."""
    try:
        (call.name + _json(call.arguments)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _json(arguments: Any) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)
