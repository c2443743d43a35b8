"""Messages as in Anthropic's API; platform.claude.com/docs/en/api/messages.

Input: JSON of a request.  Output: AgentRequest; Refused, which error_body() tells in Anthropic's shape.  Then, of a
turn: a message of blocks (thinking, text, tool_use), or the events of a stream, each block in one delta.

The results of tools in a user's message become messages of role tool, and its texts a message behind them; several
texts are lines.  A result's is_error is not read: its text says so.  A turn that generation.stop has ended says
end_turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from rlhpc.agents.turns import (
    FULL,
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
from rlhpc.transport.http_server import Refused

# ------------------------------------------------------------------------------------------------------------- requests

_FIXED: Fixed = MappingProxyType(
    {
        "top_p": (1,),
        "top_k": (-1, 0),
        "mcp_servers": ([],),
        "thread": (False,),
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    }
)
# Keys that do not affect sampling.  Whether and how long a model thinks is the run's affair.
_IDLE = frozenset(
    {
        "model", "messages", "system", "tools", "tool_choice", "max_tokens", "stream", "metadata", "service_tier",
        "thinking", "cache_control", "inference_geo", "output_config", "betas", "diagnostics", "speed", "fallbacks",
    }
)  # fmt: skip
_NO_THREAD = "thread_unsupported_request"  # Anthropic's, upon which its client goes on without
_ROLES = ("user", "assistant", "system")
_BETWEEN = "\n"  # text blocks


def read_messages(body: object, run: SamplingSettings) -> AgentRequest:
    """Parse a request for a message.  Raises Refused."""
    asked = object_of(body)
    if asked.get("thread"):
        raise Refused("thread: no messages are held here; each request repeats them all", code=_NO_THREAD)
    refuse_other_distributions(asked, run, idle=_IDLE, fixed=_FIXED, stop="stop_sequences")
    _refuse_other_choices(asked)
    messages = list_of("messages", asked.get("messages"))
    if not messages:
        raise Refused("messages: a list of at least one message")
    system = text_of("system", asked.get("system"), between=_BETWEEN)
    read = [_told("system", system)] if system else []
    for place, message in enumerate(messages):
        read += _read_message(f"messages.{place}", message)
    tools = list_of("tools", asked.get("tools") or [])
    return AgentRequest(
        messages=tuple(read),
        tools=tuple(_tool(f"tools.{place}", tool) for place, tool in enumerate(tools)),
        max_tokens=smallest_limit(asked, "max_tokens"),
        model=str(asked.get("model") or ""),
        is_streamed=bool(asked.get("stream")),
    )


def _refuse_other_choices(asked: Mapping[str, Any]) -> None:
    """Raise Refused for a forced call, and for an answer in a forced form."""
    choice, output = asked.get("tool_choice") or {"type": "auto"}, asked.get("output_config") or {}
    if not isinstance(choice, dict) or choice.get("type") != "auto":
        raise Refused(
            f'tool_choice={shown(choice)}: the policy decides whether it calls; legal: {{"type": "auto"}}, or leave it '
            "out",
            code="unsupported_value",
        )
    if not isinstance(output, dict) or output.get("format") is not None:
        raise Refused("output_config: no format is forced upon the policy; leave it out", code="unsupported_value")


def _tool(where: str, tool: object) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise Refused(
            f"{where}: {shown(tool)}: no tool is run by this endpoint; legal: the agent's own tools, with an "
            "input_schema",
            code="unsupported_value",
        )
    return tool_of(where, tool, "input_schema")


def _read_message(where: str, message: object) -> list[Message]:
    """One message, normalised: several if it holds results of tools."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise Refused(f"{where}: an object with a role of {', '.join(_ROLES)}")
    role, content = message["role"], message.get("content")
    if isinstance(content, str) or content is None:
        return [assistant_message(content or "", "", ())] if role == "assistant" else [_told(role, content or "")]
    blocks = [_block(f"{where}.content.{place}", block, role) for place, block in enumerate(list_of(where, content))]
    texts = _BETWEEN.join(block["text"] for block in blocks if block["type"] == "text")
    if role == "assistant":
        return [_turn(where, blocks, texts)]
    results = [_result(where, block) for block in blocks if block["type"] == "tool_result"]
    has_texts = any(block["type"] == "text" for block in blocks)
    return [*results, _told(role, texts)] if has_texts or not results else results


def _told(role: str, content: str) -> Message:
    return {"role": role, "content": content}


_BLOCKS: Mapping[str, Mapping[str, str]] = MappingProxyType(  # by role: types, each with the key of its text
    {
        "user": {"text": "text", "tool_result": "tool_use_id"},
        "system": {"text": "text"},
        "assistant": {"text": "text", "thinking": "thinking", "tool_use": "name"},
    }
)


def _block(where: str, block: object, role: str) -> dict[str, Any]:
    """The block.  Raises Refused unless it is of a kind that this role may say."""
    kind, legal = block.get("type") if isinstance(block, dict) else None, _BLOCKS[role]
    if not isinstance(block, dict) or not isinstance(kind, str) or kind not in legal:
        raise Refused(f"{where}: {shown(kind)}; legal in a message of role {role}: blocks {', '.join(legal)}")
    if not isinstance(block.get(legal[kind]), str):
        raise Refused(f"{where}.{legal[kind]}: a text")
    return block


def _turn(where: str, blocks: list[dict[str, Any]], texts: str) -> Message:
    thoughts = _BETWEEN.join(block["thinking"] for block in blocks if block["type"] == "thinking")
    uses = [block for block in blocks if block["type"] == "tool_use"]
    calls = [call_of(where, use["name"], use.get("input") or {}, use.get("id")) for use in uses]
    return assistant_message(texts, thoughts, calls)


def _result(where: str, block: Mapping[str, Any]) -> Message:
    content = text_of(where, block.get("content"), between=_BETWEEN)
    return {"role": "tool", "content": content, "tool_call_id": block["tool_use_id"]}


# -------------------------------------------------------------------------------------------------------------- replies


def message_of(session: str, turn: AgentTurn, asked: AgentRequest) -> dict[str, Any]:
    """The whole answer, object message."""
    usage = {"input_tokens": turn.num_read, "output_tokens": turn.num_sampled}
    return _head(session, turn, asked) | _end(turn) | {"content": _blocks(session, turn), "usage": usage}


def events(session: str, turn: AgentTurn, asked: AgentRequest) -> Iterator[dict[str, Any]]:
    """The answer as the events of a stream."""
    yield {
        "type": "message_start",
        "message": _head(session, turn, asked)
        | {"content": [], "stop_reason": None, "stop_sequence": None}
        | {"usage": {"input_tokens": turn.num_read, "output_tokens": 0}},
    }
    for index, block in enumerate(_blocks(session, turn)):
        empty, deltas = _in_deltas(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _end(turn), "usage": {"output_tokens": turn.num_sampled}}
    yield {"type": "message_stop"}


def _head(session: str, turn: AgentTurn, asked: AgentRequest) -> dict[str, Any]:
    name = f"msg_{session}_{turn.number}"
    return {"id": name, "type": "message", "role": "assistant", "model": asked.model or "policy"}


def _end(turn: AgentTurn) -> dict[str, Any]:
    reason = "max_tokens" if turn.is_cut else "tool_use" if turn.calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _blocks(session: str, turn: AgentTurn) -> list[dict[str, Any]]:
    """Blocks of a turn, at least one: an empty text says that the policy has said nothing."""
    blocks: list[dict[str, Any]] = []
    if turn.thoughts:
        # Clients send a signature back; nobody here asks for it.
        blocks.append({"type": "thinking", "thinking": turn.thoughts, "signature": f"{session}_{turn.number}"})
    if turn.content or not (turn.thoughts or turn.calls):
        blocks.append({"type": "text", "text": turn.content})
    for name, call in turn.named_calls:
        blocks.append({"type": "tool_use", "id": name, "name": call.name, "input": dict(call.arguments)})
    return blocks


def _in_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without its words, and the deltas that add them."""
    match block["type"]:
        case "thinking":
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
            return block | {"thinking": "", "signature": ""}, deltas
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": in_json(block["input"])}]


MESSAGES = Form(read_messages, message_of, events)

# --------------------------------------------------------------------------------------------------------------- errors

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        404: "not_found_error",
        408: "timeout_error",
        410: "not_found_error",
        413: "request_too_large",
    }
)


def error_body(status: int, message: str, code: str) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    said = f"prompt is too long: {message}" if code == FULL else message  # Anthropic's words, by which clients know it
    details = {"error_code": code} | ({"unsupported": ["thread"]} if code == _NO_THREAD else {})
    return {"type": "error", "error": {"type": kind, "message": said, "details": details}, "request_id": None}
