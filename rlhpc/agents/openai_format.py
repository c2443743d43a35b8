"""Chat and text completions as in OpenAI's API; platform.openai.com/docs/api-reference/chat/create.

Input: JSON of a request.  Output: AgentRequest; Refused, with a status and a message for people.  Then, of a turn: one
object, or a stream of chunks with all of its text in one.

Thoughts stay in the content, where clients that know of none send them back; with separate_reasoning (a key of other
servers, too) they are reasoning_content beside it.  Both ways they may come back either way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rlhpc.agents.turns import (
    AgentRequest,
    AgentTurn,
    Fixed,
    Form,
    Message,
    SamplingSettings,
    assistant_message,
    call_of,
    in_json,
    list_of,
    object_of,
    refuse_other_distributions,
    smallest_limit,
    text_of,
)
from rlhpc.protocol.environment import ROLES
from rlhpc.transport.http_server import Refused

# ------------------------------------------------------------------------------------------------------------- requests

_FIXED: Fixed = MappingProxyType(
    {
        "n": (1,),
        "top_p": (1,),
        "top_k": (-1, 0),
        "min_p": (0,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto",),
        "logprobs": (False,),
        "modalities": (["text"],),
        "separate_reasoning": (False, True),
    }
)
# Keys that do not affect sampling.  How long a model thinks is the run's affair.
_IDLE = frozenset(
    {
        "model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options", "user",
        "metadata", "store", "seed", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "timeout", "reasoning_effort", "verbosity",
    }
)  # fmt: skip


def read_request(body: object, run: SamplingSettings) -> AgentRequest:
    """Parse a chat completion request.  Raises Refused."""
    asked = object_of(body)
    refuse_other_distributions(asked, run, idle=_IDLE, fixed=_FIXED)
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: a list of at least one message")
    tools = asked.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools: a list of objects")
    read = tuple(read_message(place, message) for place, message in enumerate(messages))
    return replace(_asked_of(asked, read), tools=tuple(tools))


def _asked_of(body: Mapping[str, Any], messages: tuple[Message, ...]) -> AgentRequest:
    """A request with the fields of a body besides its messages or prompt.  Raises Refused."""
    options = body.get("stream_options") or {}
    return AgentRequest(
        messages=messages,
        max_tokens=asked_limit(body),
        model=str(body.get("model") or ""),
        is_streamed=bool(body.get("stream")),
        seed=body["seed"] if isinstance(body.get("seed"), int) else None,
        wishes={
            "with_usage": isinstance(options, dict) and bool(options.get("include_usage")),
            "separate_reasoning": bool(body.get("separate_reasoning")),
        },
    )


def asked_limit(body: Mapping[str, Any]) -> int | None:
    """Requested limit of this turn's tokens; None: none.  Raises Refused."""
    return smallest_limit(body, "max_completion_tokens", "max_tokens")


def read_message(place: int, message: object) -> Message:
    """One message, normalised for templates and comparisons.  Raises Refused."""
    where = f"messages.{place}"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(f"{where}: an object with a role of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    found: dict[str, Any] = {"role": role, "content": text_of(where, message.get("content"))}
    if role == "assistant":
        thoughts = message.get("reasoning_content") or message.get("reasoning")
        calls = [_call(where, call) for call in list_of(where, message.get("tool_calls") or [])]
        found = dict(assistant_message(found["content"], thoughts if isinstance(thoughts, str) else "", calls))
    return found | {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}


def _call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f'{where}.tool_calls: {{"id": …, "type": "function", "function": {{"name": …}}}} each')
    return call_of(f"{where}.tool_calls", function["name"], function.get("arguments", "{}"), call.get("id"))


# -------------------------------------------------------------------------------------------------------------- replies


def completion(session: str, turn: AgentTurn, asked: AgentRequest) -> dict[str, Any]:
    """The whole answer, object chat.completion."""
    choice = {"index": 0, "message": _spoken(turn, asked), "logprobs": None, "finish_reason": _finish_reason(turn)}
    return _head(f"chatcmpl-{session}", turn, asked, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}


def chunks(session: str, turn: AgentTurn, asked: AgentRequest) -> Iterator[dict[str, Any]]:
    """The answer as objects chat.completion.chunk."""
    head = _head(f"chatcmpl-{session}", turn, asked, "chat.completion.chunk")
    spoken = _spoken(turn, asked)
    if "tool_calls" in spoken:
        spoken["tool_calls"] = [{"index": place, **call} for place, call in enumerate(spoken["tool_calls"])]
    for delta, reason in ((spoken, None), ({}, _finish_reason(turn))):
        yield head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
    if asked.wishes["with_usage"]:
        yield head | {"choices": [], "usage": _usage(turn)}


def _spoken(turn: AgentTurn, asked: AgentRequest) -> dict[str, Any]:
    """The message as sent: arguments are JSON in a string."""
    is_separate = asked.wishes["separate_reasoning"] and bool(turn.thoughts)
    content = turn.content if is_separate else turn.said.strip() if turn.calls else turn.said
    spoken: dict[str, Any] = {"role": "assistant", "content": content or None if turn.calls else content}
    if is_separate:
        spoken["reasoning_content"] = turn.thoughts
    if turn.calls:
        spoken["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": in_json(call.arguments)}}
            for name, call in turn.named_calls
        ]
    return spoken


def _finish_reason(turn: AgentTurn) -> str:
    return "length" if turn.is_cut else "tool_calls" if turn.calls else "stop"


def _usage(turn: AgentTurn) -> dict[str, int]:
    """Counts of tokens."""
    read, sampled = turn.num_read, turn.num_sampled
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _head(name: str, turn: AgentTurn, asked: AgentRequest, kind: str) -> dict[str, Any]:
    model = asked.model or "policy"
    return {"id": f"{name}-{turn.number}", "object": kind, "created": int(time.time()), "model": model}


_DONE = b"data: [DONE]\n\n"
CHAT = Form(read_request, completion, chunks, _DONE)


# ----------------------------------------------------------------------------------------------------- text completions
#
# Completions of a plain text, beside those of a chat: POST /completions of OpenAI's API.
#
# A prompt is a text or a list of token ids, and each prompt of a session begins with the whole session so far: prompt,
# completion, prompt, completion.  The added part is read unchanged, without a chat template.  Prompts of text repeat
# completions without special tokens, which stay where they were sampled; prompts of token ids repeat them exactly.
# Input: JSON (platform.openai.com/docs/api-reference/completions).  Output: AgentRequest; JSON objects.

PIECE = "piece"  # role of a prompt's part, and of a completion, in the history of a session
Plain = str | tuple[int, ...]
_FIXED_FOR_TEXT: Fixed = MappingProxyType({**_FIXED, "echo": (False,), "best_of": (1,), "suffix": ("",)})


def read_text_request(body: object, run: SamplingSettings) -> AgentRequest:
    """Parse a text completion request.  Raises Refused."""
    asked = object_of(body)
    for key in ("messages", "tools"):
        if key in asked:
            raise Refused(f"{key}: /completions has a prompt; legal: /chat/completions", code="unsupported_parameter")
    refuse_other_distributions(asked, run, idle=_IDLE | {"prompt"}, fixed=_FIXED_FOR_TEXT)
    plain = _prompt(asked.get("prompt"))
    return replace(_asked_of(asked, ({"role": PIECE, "content": (plain,)},)), plain=plain)


def _prompt(prompt: object) -> Plain:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return tuple(prompt)
    raise Refused("prompt: a text, or a list of token ids, and not empty; a session has one at a time")


def piece(plain: Plain | None, token_ids: Sequence[int]) -> Message:
    """A piece of a history; plain: None if only the token ids are known."""
    return {"role": PIECE, "content": (plain,), "token_ids": tuple(token_ids)}


def added(history: Sequence[Message], plain: Plain) -> Plain | None:
    """The part of a prompt after the history; None if the prompt does not begin with the history."""
    if any(message["role"] != PIECE for message in history):
        return None
    if isinstance(plain, str):
        texts = [message["content"][0] for message in history]
        if not all(isinstance(text, str) for text in texts):
            return None
        known = "".join(texts)
        return plain[len(known) :] if plain.startswith(known) else None
    ids = tuple(token_id for message in history for token_id in message["token_ids"])
    return plain[len(ids) :] if plain[: len(ids)] == ids else None


def text_completion(session: str, turn: AgentTurn, asked: AgentRequest) -> dict[str, Any]:
    """The whole answer, object text_completion; token_ids: as sampled, for the next prompt."""
    return next(text_chunks(session, turn, asked)) | {"usage": _usage(turn)}


def text_chunks(session: str, turn: AgentTurn, asked: AgentRequest) -> Iterator[dict[str, Any]]:
    """The answer as a stream of one chunk."""
    head, said = _head(f"cmpl-{session}", turn, asked, "text_completion"), {"index": 0, "text": turn.content}
    ids = {"token_ids": list(turn.token_ids), "logprobs": None, "finish_reason": _finish_reason(turn)}
    yield head | {"choices": [said | ids]}
    if asked.wishes["with_usage"]:
        yield head | {"choices": [], "usage": _usage(turn)}


TEXT = Form(read_text_request, text_completion, text_chunks, _DONE)
