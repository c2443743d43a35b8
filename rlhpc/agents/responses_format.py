"""Responses as in OpenAI's API; platform.openai.com/docs/api-reference/responses.

Input: JSON of a request.  Output: AgentRequest; Refused, with a status and a message for people.  Then, of a turn: a
response with items (reasoning, message, function_call), or the events of a stream, each item in one delta.

Items of the policy that follow each other are one turn.  Thoughts are the reasoning_text of a reasoning item, and its
encrypted_content if the client asks for that, for clients that send only the latter back.  A response is known to its
session alone, by previous_response_id; it cannot be fetched, and none is computed in the background.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rlhpc.agents.turns import (
    AgentRequest,
    AgentTurn,
    Fixed,
    Form,
    Message,
    SamplingSettings,
    Tool,
    assistant_message,
    call_of,
    in_json,
    list_of,
    object_of,
    refuse_other_distributions,
    shown,
    smallest_limit,
    text_of,
    tool_of,
)
from rlhpc.protocol.environment import ROLES
from rlhpc.transport.http_server import Refused

# ------------------------------------------------------------------------------------------------------------- requests

_ENCRYPTED = "reasoning.encrypted_content"
_FIXED: Fixed = MappingProxyType(
    {
        "top_p": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "top_logprobs": (0,),
        "tool_choice": ("auto",),
        "truncation": ("disabled",),
        "background": (False,),
        "include": ([], [_ENCRYPTED]),
    }
)
# Keys that do not affect sampling.  Whether and how long a model thinks is the run's affair.
_IDLE = frozenset(
    {
        "model", "input", "instructions", "previous_response_id", "tools", "max_output_tokens", "stream",
        "stream_options", "store", "metadata", "user", "parallel_tool_calls", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "reasoning", "text",
    }
)  # fmt: skip
_REPEATED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "tools")


def read_response_request(body: object, run: SamplingSettings) -> AgentRequest:
    """Parse a request for a response; its messages lack those of the previous response.  Raises Refused."""
    asked = object_of(body)
    refuse_other_distributions(asked, run, idle=_IDLE, fixed=_FIXED)
    _refuse_other_text(asked.get("text"))
    for key in ("instructions", "previous_response_id"):
        if not isinstance(asked.get(key) or "", str):
            raise Refused(f"{key}={shown(asked[key])}: a text")
    instructions = asked.get("instructions")
    told: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    tools = list_of("tools", asked.get("tools") or [])
    return AgentRequest(
        messages=(*told, *_messages(asked.get("input"))),
        tools=tuple(_tool(f"tools.{place}", tool) for place, tool in enumerate(tools)),
        max_tokens=smallest_limit(asked, "max_output_tokens"),
        model=str(asked.get("model") or ""),
        is_streamed=bool(asked.get("stream")),
        wishes={key: asked.get(key) for key in (*_REPEATED, "include")},
    )


def _refuse_other_text(text: object) -> None:
    """Raise Refused for an answer in a forced form."""
    wished = (text or {}) if isinstance(text or {}, dict) else {"format": text}
    assert isinstance(wished, dict)
    if wished.get("format") not in (None, {"type": "text"}):
        raise Refused(
            f'text.format={shown(wished["format"])}: no format is forced upon the policy; legal: {{"type": "text"}}',
            code="unsupported_value",
        )


def _tool(where: str, tool: object) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Refused(
            f"{where}: {shown(tool)}: no tool is run by this endpoint, and calls have arguments in JSON; legal: tools "
            "of type function",
            code="unsupported_value",
        )
    return tool_of(where, tool, "parameters")


def _messages(said: object) -> list[Message]:
    """Messages of an input: a text, or items.  Raises Refused."""
    if isinstance(said, str) and said:
        return [{"role": "user", "content": said}]
    if not isinstance(said, list) or not said:
        raise Refused("input: a text, or a list of at least one item")
    found: list[Message] = []
    turn = _Turn()
    for place, item in enumerate(said):
        where = f"input.{place}"
        if not isinstance(item, dict):
            raise Refused(f"{where}: an object")
        if not turn.takes(where, item):
            found += turn.ended()
            turn = _Turn()
            if not turn.takes(where, item):
                found.append(_told(where, item))
    return found + turn.ended()


class _Turn:
    """Items of one turn of the policy: thoughts, then a text, then calls."""

    def __init__(self) -> None:
        self._thoughts, self._texts = list[str](), list[str]()
        self._calls = list[dict[str, Any]]()

    def takes(self, where: str, item: Mapping[str, Any]) -> bool:
        """Add an item; False if it is none of the policy's, or begins another turn.  Raises Refused."""
        kind = item.get("type") or "message"
        if kind == "function_call":
            self._calls.append(call_of(where, item.get("name"), item.get("arguments", "{}"), item.get("call_id")))
        elif kind == "reasoning" and not (self._texts or self._calls):
            self._thoughts.append(_thoughts(where, item))
        elif kind == "message" and item.get("role") == "assistant" and not (self._texts or self._calls):
            self._texts.append(text_of(where, item.get("content")))
        else:
            return False
        return True

    def ended(self) -> list[Message]:
        """The message of a turn that has items."""
        if not (self._thoughts or self._texts or self._calls):
            return []
        return [assistant_message("".join(self._texts), "\n".join(self._thoughts), self._calls)]


def _thoughts(where: str, item: Mapping[str, Any]) -> str:
    """Text of a reasoning item.  Raises Refused."""
    text, encrypted = text_of(where, item.get("content"), between="\n"), item.get("encrypted_content")
    if text or encrypted is None:
        return text
    try:
        return base64.b64decode(str(encrypted), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise Refused(f"{where}.encrypted_content: not what this endpoint has sent: {error}") from error


def _told(where: str, item: Mapping[str, Any]) -> Message:
    """A message of an item that is not the policy's.  Raises Refused."""
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise Refused(f"{where}.call_id: the id of a call")
        output = item.get("output")
        return {"role": "tool", "content": text_of(f"{where}.output", output), "tool_call_id": call_id}
    role = item.get("role")
    if kind != "message" or role not in ROLES or role == "tool":
        raise Refused(
            f"{where}: type={shown(kind)}, role={shown(role)}; legal: items message (of user, assistant, system, "
            "developer), function_call, function_call_output, reasoning"
        )
    return {"role": "system" if role == "developer" else role, "content": text_of(where, item.get("content"))}


# ---------------------------------------------------------------------------------------------------- previous response


@dataclass(frozen=True, slots=True)
class _Known:
    """A response, and what it has answered."""

    previous: str | None
    messages: tuple[Message, ...]  # without instructions, which hold for one request; the last one is the response


class KnownResponses:
    """Responses of one session, by which its later requests begin."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def continued(self, asked: AgentRequest) -> AgentRequest:
        """The request with the messages up to its previous response.  Raises Refused for an unknown one."""
        name, parts = asked.wishes["previous_response_id"], list[tuple[Message, ...]]()
        while name:
            known = self._known.get(name)
            if known is None:
                raise Refused(
                    f"previous_response_id={shown(name)}: no response of this session; legal: the id of one, or all "
                    "items as input",
                    code="previous_response_not_found",
                )
            parts.append(known.messages)
            name = known.previous
        told, said = _without_instructions(asked)
        return replace(asked, messages=(*told, *itertools.chain(*reversed(parts)), *said))

    def keep(self, name: str, asked: AgentRequest, turn: AgentTurn) -> None:
        """Know a response from now on; asked: as it was read."""
        _, said = _without_instructions(asked)
        self._known[name] = _Known(asked.wishes["previous_response_id"] or None, (*said, turn.message))


def _without_instructions(asked: AgentRequest) -> tuple[Sequence[Message], Sequence[Message]]:
    num_told = bool(asked.wishes["instructions"])
    return asked.messages[:num_told], asked.messages[num_told:]


# -------------------------------------------------------------------------------------------------------------- replies


def response_id(session: str, turn: AgentTurn) -> str:
    """Name of a response."""
    return f"resp_{session}_{turn.number}"


def response_of(session: str, turn: AgentTurn, asked: AgentRequest) -> dict[str, Any]:
    """The whole answer, object response."""
    reason = {"reason": "max_output_tokens"} if turn.is_cut else None
    return _head(session, turn, asked) | {
        "status": _status(turn),
        "incomplete_details": reason,
        "output": _items(session, turn, asked),
        "usage": _usage(turn),
    }


def events(session: str, turn: AgentTurn, asked: AgentRequest) -> Iterator[dict[str, Any]]:
    """The answer as the events of a stream, numbered."""
    head = _head(session, turn, asked)
    said: list[dict[str, Any]] = [{"type": f"response.{word}", "response": head} for word in ("created", "in_progress")]
    for index, item in enumerate(_items(session, turn, asked)):
        said += _in_deltas(item, index)
    whole = response_of(session, turn, asked)
    said.append({"type": f"response.{whole['status']}", "response": whole})
    for number, each in enumerate(said):
        yield each | {"sequence_number": number}


def _status(turn: AgentTurn) -> str:
    return "incomplete" if turn.is_cut else "completed"


def _head(session: str, turn: AgentTurn, asked: AgentRequest) -> dict[str, Any]:
    """A response that is under way."""
    return {
        "id": response_id(session, turn),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": asked.model or "policy",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        **{key: asked.wishes[key] for key in _REPEATED},
        "tools": asked.wishes["tools"] or [],
        "metadata": asked.wishes["metadata"] or {},
    }


def _usage(turn: AgentTurn) -> dict[str, Any]:
    return {
        "input_tokens": turn.num_read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": turn.num_sampled,
        "output_tokens_details": {"reasoning_tokens": turn.num_thought},
        "total_tokens": turn.num_read + turn.num_sampled,
    }


def _items(session: str, turn: AgentTurn, asked: AgentRequest) -> list[dict[str, Any]]:
    """Items of a turn, at least one: an empty message says that the policy has said nothing."""
    name, status, items = f"{session}_{turn.number}", _status(turn), list[dict[str, Any]]()
    if thoughts := turn.thoughts:
        is_wanted = _ENCRYPTED in (asked.wishes["include"] or ())
        items.append(
            {
                "id": f"rs_{name}",
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": [{"type": "reasoning_text", "text": thoughts}],
                "encrypted_content": base64.b64encode(thoughts.encode()).decode() if is_wanted else None,
            }
        )
    if turn.content or not (thoughts or turn.calls):
        text = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [text]})
    for place, (call_id, call) in enumerate(turn.named_calls):
        called = {"call_id": call_id, "name": call.name, "arguments": in_json(call.arguments)}
        items.append({"id": f"fc_{name}_{place}", "type": "function_call", "status": status, **called})
    return items


def _in_deltas(item: dict[str, Any], output_index: int) -> list[dict[str, Any]]:
    """Events that add one item."""
    of_item = {"item_id": item["id"], "output_index": output_index}
    if item["type"] == "function_call":
        empty, key, kind = item | {"arguments": ""}, "arguments", "response.function_call_arguments"
        within = _in_delta(kind, of_item, key, item["arguments"])
        within[-1]["name"] = item["name"]
    else:
        (part,) = item["content"]
        empty = item | {"content": []}
        in_part = of_item | {"content_index": 0}
        within = [
            {"type": "response.content_part.added", "part": part | {"text": ""}, **in_part},
            *_in_delta(f"response.{part['type']}", in_part, "text", part["text"]),
            {"type": "response.content_part.done", "part": part, **in_part},
        ]
    added = empty | {"status": "in_progress"}
    return [
        {"type": "response.output_item.added", "output_index": output_index, "item": added},
        *within,
        {"type": "response.output_item.done", "output_index": output_index, "item": item},
    ]


def _in_delta(kind: str, where: Mapping[str, Any], key: str, text: str) -> list[dict[str, Any]]:
    more: dict[str, Any] = {"logprobs": []} if kind == "response.output_text" else {}
    return [
        {"type": f"{kind}.delta", "delta": text, **where, **more},
        {"type": f"{kind}.done", key: text, **where, **more},
    ]


RESPONSES = Form(read_response_request, response_of, events)
