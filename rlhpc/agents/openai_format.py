"""Parse a chat completion request; refuse parameters that would be ignored or make log-probabilities wrong.

Input: JSON as in OpenAI's API (platform.openai.com/docs/api-reference/chat/create).  Output: AgentRequest; Refused,
with a status and a message for people.  All rollouts of a run are sampled alike (docs/design.md, assumptions): a
temperature other than the run's, or a truncated distribution (top_p, …), is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlhpc.environments.tools import FORMS, Call, schemas_of
from rlhpc.protocol.environment import ROLES
from rlhpc.transport.http_server import Refused

# ------------------------------------------------------------------------------------------------------------- requests

Message = Mapping[str, Any]  # normalised: content is text, calls have parsed arguments

# Keys that change the sampling distribution, with the only values that leave it unchanged.
_FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
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
    }
)
# Keys that do not affect sampling.
_IDLE = frozenset(
    {
        "model", "messages", "tools", "temperature", "max_tokens", "max_completion_tokens", "stream", "stream_options",
        "user", "metadata", "store", "seed", "parallel_tool_calls", "service_tier", "safety_identifier",
        "prompt_cache_key", "timeout",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request for the policy's next turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None  # of this turn
    model: str = ""  # name given in the request
    is_streamed: bool = False
    with_usage: bool = False  # at the end of a stream
    plain: str | tuple[int, ...] | None = None  # the prompt of a text completion, not of a chat


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings of the run, which a request may repeat."""

    temperature: float
    stop: tuple[str, ...] = ()


def read_request(body: object, run: SamplingSettings) -> AgentRequest:
    """Parse a chat completion request.  Raises Refused."""
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    refuse_other_distributions(body, run)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: a list of at least one message")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools: a list of objects")
    return asked_of(body, tuple(read_message(place, message) for place, message in enumerate(messages)), tuple(tools))


def asked_of(
    body: Mapping[str, Any],
    messages: tuple[Message, ...],
    tools: tuple[Mapping[str, Any], ...] = (),
    plain: str | tuple[int, ...] | None = None,
) -> AgentRequest:
    """Read the fields of a body besides its messages or prompt.  Raises Refused."""
    options = body.get("stream_options") or {}
    return AgentRequest(
        messages=messages,
        tools=tools,
        max_tokens=asked_limit(body),
        model=str(body.get("model") or ""),
        is_streamed=bool(body.get("stream")),
        with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        plain=plain,
    )


def is_same(mine: Sequence[Message], other: Sequence[Message]) -> bool:
    """True if two histories are the same, apart from white space around texts, which is not read again."""
    return len(mine) == len(other) and all(_core(a) == _core(b) for a, b in zip(mine, other, strict=True))


def first_difference(known: Sequence[Message], said: Sequence[Message]) -> int | None:
    """Index of the first message in which `said` differs from `known`; None: `said` begins with all of `known`."""
    for place, message in enumerate(known):
        if place >= len(said) or _core(message) != _core(said[place]):
            return place
    return None


def _core(message: Message) -> Any:
    return {key: value.strip() if isinstance(value, str) else value for key, value in message.items()}


def refuse_other_distributions(
    body: Mapping[str, Any], run: SamplingSettings, more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
) -> None:
    """Raise Refused for keys that change the distribution; more: other such keys, with their neutral values."""
    fixed = {**_FIXED, "stop": (list(run.stop), *run.stop[: len(run.stop) == 1]), **more}
    asked, temperature = body.get("temperature"), run.temperature
    if asked is not None and asked != temperature:
        raise Refused(
            f"temperature={asked}: this run samples with generation.temperature={temperature:g}, and log-probabilities "
            f"of another would not be those that are trained; legal: {temperature:g}, or leave it out",
            code="unsupported_value",
        )
    for key, value in body.items():
        if value is None or key in _IDLE:
            continue
        if key not in fixed:
            raise Refused(f"{key}: not known here; leave it out", code="unsupported_parameter")
        legal = fixed[key]
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in legal):
            raise Refused(
                f"{key}={json.dumps(value)[:80]}: all rollouts of a run are sampled alike; legal: "
                f"{' or '.join(json.dumps(each) for each in legal)}, or leave it out",
                code="unsupported_value",
            )


def asked_limit(body: Mapping[str, Any]) -> int | None:
    """Requested limit of this turn's tokens; None: none.  Raises Refused."""
    given = [body[key] for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(f"max_tokens={value!r}; legal: a whole number from 1")
    return min(given, default=None)


def read_message(place: int, message: object) -> Message:
    """One message, normalised for templates and comparisons.  Raises Refused."""
    where = f"messages.{place}"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(f"{where}: an object with a role of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    found: dict[str, Any] = {"role": role, "content": _text(where, message.get("content"))}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            found[key] = message[key]
    if role == "assistant" and message.get("tool_calls"):
        found["tool_calls"] = [_call(where, call) for call in _listed(where, message["tool_calls"])]
    return found


def _text(where: str, content: object) -> str:
    """Text of a content, which may be a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = _listed(where, content)
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise Refused(f"{where}.content: text, or parts of type text; there is no other kind here")
    return "".join(part["text"] for part in parts)


def _listed(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(f"{where}: a list, not {type(value).__name__}")
    return value


def _call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f'{where}.tool_calls: {{"id": …, "type": "function", "function": {{"name": …}}}} each')
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{where}.tool_calls: arguments are not JSON: {error}") from error
    assert isinstance(call, dict)
    identity = {"id": str(call["id"])} if call.get("id") else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


# -------------------------------------------------------------------------------------------------------------- replies
#
# The policy's turn in the format of OpenAI's API: one object, or a stream of chunks; tool calls parsed from the text.
#
# Input: the text of a turn.  Output: JSON objects.  A stream has all of a turn's text in one chunk.

_OPENS = "<tool_call>"  # of all forms but "llama3", in which a call is the whole turn


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """A turn of the policy, as the agent sees it."""

    number: int  # of the session, from 1
    content: str
    calls: tuple[Call, ...]
    is_cut: bool  # a limit has ended it
    num_read: int  # tokens before it
    num_sampled: int  # tokens of it
    token_ids: tuple[int, ...] = ()  # the same, as sampled

    @property
    def message(self) -> Message:
        """The message, normalised as in histories."""
        calls = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for name, call in zip(self._names, self.calls, strict=True)
        ]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish_reason."""
        return "length" if self.is_cut else "tool_calls" if self.calls else "stop"

    @property
    def spoken(self) -> dict[str, Any]:
        """The message as sent: arguments are JSON in a string."""
        calls = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": _json(call.arguments)}}
            for name, call in zip(self._names, self.calls, strict=True)
        ]
        return {"role": "assistant", "content": self.content or None if calls else self.content} | (
            {"tool_calls": calls} if calls else {}
        )

    @property
    def usage(self) -> dict[str, int]:
        """Counts of tokens, as in OpenAI's API."""
        read, sampled = self.num_read, self.num_sampled
        return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}

    @property
    def _names(self) -> list[str]:
        """Ids of the calls: the same when the session is replayed."""
        return [f"call_{self.number}_{place}" for place in range(len(self.calls))]


def turn_of(
    text: str,
    answer: str,
    call_form: str,
    *,
    number: int,
    tools: Sequence[Mapping[str, Any]],
    is_cut: bool,
    num_tokens: tuple[int, int],
    token_ids: tuple[int, ...] = (),
) -> AgentTurn:
    """Parse a turn; text: with special tokens, of which calls may consist; answer: without.  Broken calls stay text."""
    found = FORMS[call_form](text, schemas_of(tools)) if tools else []
    calls = tuple(call for call in found if isinstance(call, Call) and _is_sayable(call))
    if len(calls) < len(found):
        calls = ()
    content = answer
    if calls:
        content = "" if call_form == "llama3" else text.partition(_OPENS)[0].strip()
    return AgentTurn(number, content, calls, is_cut, *num_tokens, token_ids)


def completion(session: str, turn: AgentTurn, asked: AgentRequest) -> dict[str, Any]:
    """The whole answer, object chat.completion."""
    choice = {"index": 0, "message": turn.spoken, "logprobs": None, "finish_reason": turn.finish_reason}
    return _head(f"chatcmpl-{session}", turn, asked, "chat.completion") | {"choices": [choice], "usage": turn.usage}


def chunks(session: str, turn: AgentTurn, asked: AgentRequest) -> Iterator[dict[str, Any]]:
    """The answer as objects chat.completion.chunk."""
    head = _head(f"chatcmpl-{session}", turn, asked, "chat.completion.chunk")
    spoken = dict(turn.spoken)
    if "tool_calls" in spoken:
        spoken["tool_calls"] = [{"index": place, **call} for place, call in enumerate(spoken["tool_calls"])]
    for delta, reason in ((spoken, None), ({}, turn.finish_reason)):
        yield head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
    if asked.with_usage:
        yield head | {"choices": [], "usage": turn.usage}


def event(data: dict[str, Any] | None) -> bytes:
    """A server-sent event; None: the last event."""
    return f"data: {'[DONE]' if data is None else json.dumps(data)}\n\n".encode()


def _head(name: str, turn: AgentTurn, asked: AgentRequest, kind: str) -> dict[str, Any]:
    model = asked.model or "policy"
    return {"id": f"{name}-{turn.number}", "object": kind, "created": int(time.time()), "model": model}


def _is_sayable(call: Call) -> bool:
    """False for a text with half a surrogate pair, which no client can send back, and the endpoint would refuse."""
    try:
        (call.name + _json(call.arguments)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _json(arguments: Any) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)


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
_FIXED_FOR_TEXT: Mapping[str, tuple[Any, ...]] = MappingProxyType({"echo": (False,), "best_of": (1,), "suffix": ("",)})


def read_text_request(body: object, run: SamplingSettings) -> AgentRequest:
    """Parse a text completion request.  Raises Refused."""
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    for key in ("messages", "tools"):
        if key in body:
            raise Refused(f"{key}: /completions has a prompt; legal: /chat/completions", code="unsupported_parameter")
    refuse_other_distributions({key: body[key] for key in body if key != "prompt"}, run, _FIXED_FOR_TEXT)
    plain = _prompt(body.get("prompt"))
    return asked_of(body, ({"role": PIECE, "content": (plain,)},), plain=plain)


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
    return next(text_chunks(session, turn, asked)) | {"usage": turn.usage}


def text_chunks(session: str, turn: AgentTurn, asked: AgentRequest) -> Iterator[dict[str, Any]]:
    """The answer as a stream of one chunk."""
    head, said = _head(f"cmpl-{session}", turn, asked, "text_completion"), {"index": 0, "text": turn.content}
    ids = {"token_ids": list(turn.token_ids), "logprobs": None, "finish_reason": turn.finish_reason}
    yield head | {"choices": [said | ids]}
    if asked.with_usage:
        yield head | {"choices": [], "usage": turn.usage}
