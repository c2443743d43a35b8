"""A request for the policy's next turn, and the turn, whichever API the agent speaks.

    openai_format.py (chat, plain text)  ┐
    anthropic_format.py (Messages)       ├─ read ─▶ AgentRequest ─▶ session.py ─▶ AgentTurn ─ whole, or pieces ─▶ JSON
    responses_format.py (Responses)      ┘

All of them normalise messages alike: content is text, thoughts are reasoning_content, calls are tool_calls with parsed
arguments, as chat templates read them.  All rollouts of a run are sampled alike (docs/design.md, assumptions): what
would change the distribution of a turn is refused with a message for people.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.data.tokenizer import THINKING_END, THINKING_START
from rlhpc.environments.tools import FORMS, Call, schemas_of
from rlhpc.transport.http_server import Refused

# ------------------------------------------------------------------------------------------------------------- requests

Message = Mapping[str, Any]  # normalised
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
FULL = "context_length_exceeded"  # code of a refusal for lack of room, OpenAI's
Fixed = Mapping[str, tuple[Any, ...]]  # keys that change the distribution → the values that leave it as it is


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request for the policy's next turn."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None  # of this turn
    model: str = ""  # name given in the request
    is_streamed: bool = False
    plain: str | tuple[int, ...] | None = None  # the prompt of a text completion, not of a chat
    wishes: Mapping[str, Any] = field(default_factory=dict)  # other keys of the body that shape the reply
    seed: int | None = None  # the same messages with another one ask for another turn


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings of the run, which a request may repeat."""

    temperature: float
    stop: tuple[str, ...] = ()


def object_of(body: object) -> dict[str, Any]:
    """The body of a request.  Raises Refused unless it is an object."""
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    return body


def refuse_other_distributions(
    body: Mapping[str, Any], run: SamplingSettings, *, idle: frozenset[str], fixed: Fixed, stop: str = "stop"
) -> None:
    """Raise Refused for keys that change the distribution, and for unknown ones; idle: keys that do not.

    stop: the key of stop strings.
    """
    fixed = {**fixed, stop: (list(run.stop), *run.stop[: len(run.stop) == 1])}
    asked, temperature = body.get("temperature"), run.temperature
    if asked is not None and asked != temperature:
        raise Refused(
            f"temperature={shown(asked)}: this run samples with generation.temperature={temperature:g}, and log-"
            f"probabilities of another would not be those that are trained; legal: {temperature:g}, or leave it out",
            code="unsupported_value",
        )
    for key, value in body.items():
        if value is None or key in idle or key == "temperature":
            continue
        if key not in fixed:
            raise Refused(f"{key[:80]}: not known here; leave it out", code="unsupported_parameter")
        legal = fixed[key]
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in legal):
            raise Refused(
                f"{key}={shown(value)}: all rollouts of a run are sampled alike; legal: "
                f"{' or '.join(json.dumps(each) for each in legal)}, or leave it out",
                code="unsupported_value",
            )


def smallest_limit(body: Mapping[str, Any], *keys: str) -> int | None:
    """The smallest limit of a turn's tokens among these keys; None: there is none.  Raises Refused."""
    given = {key: body[key] for key in keys if body.get(key) is not None}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(f"{key}={shown(value)}; legal: a whole number from 1")
    return min(given.values(), default=None)


def text_of(where: str, content: object, *, between: str = "") -> str:
    """Text of a content, which may be a list of text parts; between: what stands between two.  Raises Refused."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = list_of(where, content)
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise Refused(f"{where}.content: text, or parts of type text; there is no other kind here")
    return between.join(part["text"] for part in parts)


def list_of(where: str, value: object) -> list[Any]:
    """The value.  Raises Refused unless it is a list."""
    if not isinstance(value, list):
        raise Refused(f"{where}: a list, not {type(value).__name__}")
    return value


def tool_of(where: str, tool: Mapping[str, Any], schema: str) -> Tool:
    """A tool that is told flat, as templates read it; schema: the key of its parameters.  Raises Refused."""
    name, parameters = tool.get("name"), tool.get(schema)
    if not isinstance(name, str) or not name:
        raise Refused(f'{where}: {{"name": …, "description": …, "{schema}": {{…}}}} each')
    if not isinstance(parameters or {}, dict):
        raise Refused(f"{where}.{schema}: a JSON schema, which is an object")
    description = text_of(where, tool.get("description"))
    function = {"name": name, "description": description, "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def call_of(where: str, name: object, arguments: object, call_id: object) -> dict[str, Any]:
    """A call of a tool, normalised; arguments: a value, or one in JSON.  Raises Refused."""
    if not isinstance(name, str):
        raise Refused(f"{where}: the name of its function is missing")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{where}: arguments are not JSON: {error}") from error
    identity = {"id": str(call_id)} if call_id else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(content: str, thoughts: str, calls: Sequence[Mapping[str, Any]]) -> Message:
    """A turn, normalised: what is empty is left out, but for its content."""
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        found["reasoning_content"] = thoughts
    return found | ({"tool_calls": list(calls)} if calls else {})


def shown(value: object) -> str:
    """The beginning of a value, for an error."""
    return json.dumps(value, ensure_ascii=False)[:80]


# ------------------------------------------------------------------------------------------------------------ histories


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
    """A message as it is compared: thoughts may come back as reasoning_content, or within the content."""
    core = {key: value.strip() if isinstance(value, str) else value for key, value in message.items()}
    if core["role"] != "assistant":
        return core
    thoughts, content = core.pop("reasoning_content", ""), core["content"]
    if not thoughts and THINKING_END in content:
        thoughts, _, content = content.partition(THINKING_END)
    said = [part.removeprefix(THINKING_START).strip() for part in (thoughts, content)]
    return core | {"content": list(filter(None, said))}


# ---------------------------------------------------------------------------------------------------------------- turns

_OPENS = "<tool_call>"  # of all forms but "llama3", in which a call is the whole turn


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """A turn of the policy, as the agent sees it."""

    number: int  # of the session, from 1
    content: str  # without thoughts and calls
    calls: tuple[Call, ...]
    is_cut: bool  # a limit has ended it
    num_read: int  # tokens before it
    num_sampled: int  # tokens of it
    token_ids: tuple[int, ...] = ()  # the same, as sampled
    thinking: str = ""  # thoughts as sampled, with the marks around them and the white space behind
    num_thought: int = 0  # tokens up to the end of the thoughts
    place: int = 1  # among the turns of its history, from 1

    @property
    def thoughts(self) -> str:
        """Thoughts without marks."""
        return self.thinking.strip().removeprefix(THINKING_START).removesuffix(THINKING_END).strip()

    @property
    def said(self) -> str:
        """Thoughts and content, as sampled."""
        return self.thinking + self.content

    @property
    def message(self) -> Message:
        """The message, normalised as in histories."""
        calls = [call_of("", call.name, dict(call.arguments), name) for name, call in self.named_calls]
        return assistant_message(self.content, self.thoughts, calls)

    @property
    def named_calls(self) -> list[tuple[str, Call]]:
        """Calls with their ids, which are the same when the session is replayed, in whatever order of its rows."""
        return [(f"call_{self.place}_{number}", call) for number, call in enumerate(self.calls)]


def turn_of(
    text: str,
    answer: str,
    call_form: str,
    *,
    number: int,
    before: Sequence[Message] = (),
    tools: Sequence[Mapping[str, Any]],
    is_cut: bool,
    num_tokens: tuple[int, int],
    token_ids: tuple[int, ...] = (),
    is_thinking: bool | None = None,
    end_of_thought: tuple[int, ...] = (),
) -> AgentTurn:
    """Parse a turn; text: with special tokens, of which calls may consist; answer: without.  Broken calls stay text.

    before: the messages that it answers.  is_thinking, end_of_thought: see DialogueTemplate.
    """
    are_marks_special = any(mark in text and mark not in answer for mark in (THINKING_START, THINKING_END))
    thinking, content = split_thoughts(text if are_marks_special else answer, is_thinking)
    spoken = split_thoughts(text, is_thinking)[1]  # a call in a thought is not meant
    found = FORMS[call_form](spoken, schemas_of(tools)) if tools else []
    calls = tuple(call for call in found if isinstance(call, Call) and _is_sayable(call))
    if len(calls) < len(found):
        calls = ()
    if calls:
        content = "" if call_form == "llama3" else spoken.partition(_OPENS)[0].strip()
    num_thought = _end_of(end_of_thought, token_ids) if thinking else 0
    place = _place_behind(before) if calls else 1
    return AgentTurn(number, content, calls, is_cut, *num_tokens, token_ids, thinking, num_thought, place)


def _place_behind(before: Sequence[Message]) -> int:
    """The place of a turn behind these messages, or a later one if they have calls of that place, too."""
    known = {call.get("id") for message in before for call in message.get("tool_calls", ())}
    place = 1 + len([message for message in before if message["role"] == "assistant"])
    while f"call_{place}_0" in known:
        place += 1
    return place


def split_thoughts(text: str, is_thinking: bool | None) -> tuple[str, str]:
    """A turn's thoughts, with the marks around them and the white space behind, and the rest; "": there are none.

    is_thinking: see DialogueTemplate.  Thoughts that never end do so before the first call, or with the turn.
    """
    if is_thinking is None or not (is_thinking or text.lstrip().startswith(THINKING_START)):
        return "", text
    _, has_ended, rest = text.partition(THINKING_END)
    rest = rest.lstrip() if has_ended else text[len(text.partition(_OPENS)[0]) :]
    return text[: len(text) - len(rest)], rest


def _end_of(mark: tuple[int, ...], token_ids: tuple[int, ...]) -> int:
    """Number of tokens up to the end of the first such mark; all of them without one."""
    size = len(mark)
    places = (place for place in range(len(token_ids) - size + 1) if token_ids[place : place + size] == mark)
    return next(places, len(token_ids) - size) + size


def in_json(arguments: Mapping[str, Any]) -> str:
    """Arguments of a call as JSON."""
    return json.dumps(dict(arguments), ensure_ascii=False)


def _is_sayable(call: Call) -> bool:
    """False for what no client can send back as it was: half a surrogate pair, and NaN, which equals nothing."""
    try:
        json.dumps([call.name, dict(call.arguments)], ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------- forms


@dataclass(frozen=True, slots=True)
class Form:
    """One API: what it asks, and how it is answered."""

    read: Callable[[object, SamplingSettings], AgentRequest]  # raises Refused
    whole: Callable[[str, AgentTurn, AgentRequest], dict[str, Any]]  # session, …
    pieces: Callable[[str, AgentTurn, AgentRequest], Iterator[Mapping[str, Any]]]  # of a stream
    ending: bytes = b""  # of a stream


def event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event, named by its type if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()
