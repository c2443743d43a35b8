"""Parse a chat completion request; refuse parameters that would be ignored or make log-probabilities wrong.

Input: JSON as OpenAI's API has it (platform.openai.com/docs/api-reference/chat/create).  Output: Asked; Refused, with a
status and a message for people.  All rollouts of a run are sampled alike (docs/design.md, assumptions): a temperature
other than the run's, or a truncated distribution (top_p, …), is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Message = Mapping[str, Any]  # normalised: content is text, calls have parsed arguments
ROLES = ("system", "developer", "user", "assistant", "tool")

# Keys that change what is sampled, with the only values that change nothing.
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
# Keys that ask for nothing of the sampler.
_IDLE = frozenset(
    {
        "model", "messages", "tools", "temperature", "max_tokens", "max_completion_tokens", "stream", "stream_options",
        "user", "metadata", "store", "seed", "parallel_tool_calls", "service_tier", "safety_identifier",
        "prompt_cache_key", "timeout",
    }
)  # fmt: skip


class Refused(Exception):
    """Not to be answered; status, code and message are for the agent."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for the policy's next turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None  # of this turn
    model: str = ""  # as it was called
    is_streamed: bool = False
    with_usage: bool = False  # at the end of a stream
    plain: str | tuple[int, ...] | None = None  # the prompt of a text completion (text_completions.py), not of a chat


@dataclass(frozen=True, slots=True)
class Sampled:
    """How the run samples, which a request may repeat."""

    temperature: float
    stop: tuple[str, ...] = ()


def read_request(body: object, run: Sampled) -> Asked:
    """Raises Refused."""
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    refuse_other_distributions(body, run)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: a list of at least one message")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools: a list of objects")
    return asked_of(body, tuple(_message(place, message) for place, message in enumerate(messages)), tuple(tools))


def asked_of(
    body: Mapping[str, Any],
    messages: tuple[Message, ...],
    tools: tuple[Mapping[str, Any], ...] = (),
    plain: str | tuple[int, ...] | None = None,
) -> Asked:
    """With what a body says beside them, of a chat and of a text alike.  Raises Refused."""
    options = body.get("stream_options") or {}
    return Asked(
        messages=messages,
        tools=tools,
        max_tokens=_limit(body),
        model=str(body.get("model") or ""),
        is_streamed=bool(body.get("stream")),
        with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        plain=plain,
    )


def is_same(mine: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether two histories say the same; white space around a text does not count, it is not read again."""
    return len(mine) == len(other) and all(_core(a) == _core(b) for a, b in zip(mine, other, strict=True))


def first_difference(known: Sequence[Message], said: Sequence[Message]) -> int | None:
    """The place of the first message of `known` that `said` has not; None: `said` begins with all of them."""
    for place, message in enumerate(known):
        if place >= len(said) or _core(message) != _core(said[place]):
            return place
    return None


def _core(message: Message) -> Any:
    return {key: value.strip() if isinstance(value, str) else value for key, value in message.items()}


def refuse_other_distributions(
    body: Mapping[str, Any], run: Sampled, more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
) -> None:
    """more: other keys, with the only values that change nothing.  Raises Refused."""
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


def _limit(body: Mapping[str, Any]) -> int | None:
    """Tokens of this turn; None: no wish.  Raises Refused."""
    given = [body[key] for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(f"max_tokens={value!r}; legal: a whole number from 1")
    return min(given, default=None)


def _message(place: int, message: object) -> Message:
    """One message in the form that templates and comparisons take.  Raises Refused."""
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
    """Of a text, or of parts that are texts."""
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
