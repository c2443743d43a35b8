"""Turn a record into a prompt, as a table [data] specifies.

    record ── template, or field ──▶ text or messages ── chat template ──▶ text ── tokenizer ──▶ tokens

Input: Record.  Output: Prompt.  Any fault of a record is a DataError that names its file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise, takewhile
from string import Formatter
from typing import Any

import numpy as np

from rlhpc.base.near_names import near_hint
from rlhpc.config.tables import AGENT, OWN_REWARD, WHOLE_RECORD, DataConfig
from rlhpc.data.files import kind
from rlhpc.data.record_source import Record, is_unicode
from rlhpc.data.tokenizer import THINKING_END, THINKING_START, PromptTokenizer
from rlhpc.protocol.environment import ROLES
from rlhpc.protocol.errors import ConfigError, DataError
from rlhpc.protocol.types import Int32, Prompt

# --------------------------------------------------------------------------------------------------------- conversation
#
# The chat messages of a record, in the form that chat templates expect.
#
# Input: a field of a record.  Output: messages, {"role", "content"} each, content as text.  Messages come as lists of
# objects (verl, TRL, OpenAI), with content in parts where models see pictures, or as such a list in JSON; or as
# {"from", "value"} each, with other names of the roles (ShareGPT).

Message = dict[str, Any]
_MAY_BE_MESSAGES = re.compile(r"\s*\[\s*\{")
_PYTHONS = re.compile(r"\s*\[\s*\{\s*'(role|content)'\s*:")
_OF_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def is_conversation(value: Any) -> bool:
    """True if a field holds a list of objects, which can only be messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def prompt_messages(value: Any, source: str, name: str, system_prompt: str) -> list[Message]:
    """Messages up to the answer that is to be sampled: assistant messages at the end are left out.

    As conversation_messages; DataErrors also if nothing is asked.
    """
    messages = conversation_messages(value, source, name)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{source}: field {name!r} holds no message that asks for an answer")
    return told_first(messages, system_prompt)


def conversation_messages(value: Any, source: str, name: str) -> list[Message]:
    """All messages of a field.  source, name: record and field, for messages of DataErrors."""
    return [_message(each, f"{source}: field {name!r}, message {place}") for place, each in enumerate(value, 1)]


def told_first(messages: list[Message], system_prompt: str) -> list[Message]:
    """The messages with a system message first, unless they have one, or it is empty."""
    has_one = not system_prompt or messages[0]["role"] in ("system", "developer")
    return messages if has_one else [system(system_prompt), *messages]


def as_conversation(value: Any) -> Any:
    """Parse a list of messages written as JSON, as in CSV; return anything else unchanged."""
    if isinstance(value, str) and _MAY_BE_MESSAGES.match(value):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return read if is_conversation(read) and all({"role", "from"} & each.keys() for each in read) else value
    return value


def refuse_no_messages(value: Any, source: str, name: str) -> None:
    """Raise DataError for an empty list, and for str() of a list of messages, which pandas writes into CSV."""
    if value == []:
        raise DataError(f"{source}: field {name!r} is a list without a message; legal: at least one that asks")
    if isinstance(value, str) and _PYTHONS.match(value):
        raise DataError(f"{source}: field {name!r} holds messages as Python writes them; legal: JSON (json.dumps)")


def _message(value: Mapping[str, Any], where: str) -> Message:
    message: Message = without_nulls(value)
    if "role" not in message and {"from", "value"} <= message.keys():
        role, content = message.pop("from"), message.pop("value")
        message |= {"role": _OF_SHAREGPT.get(role, role), "content": content}
    role = message.get("role")
    if role not in ROLES:
        keys = ", ".join(map(repr, message)) or "none"
        raise DataError(f"{where}: role is {role!r}, its keys are {keys}; legal: {', '.join(map(repr, ROLES))}")
    message["content"] = _text(message.get("content", ""), where)
    if role == "assistant" and isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(each, f"{where}: tool_calls.{place}") for place, each in enumerate(calls)]
        if not calls:
            del message["tool_calls"]
    for key, each in message.items():
        if not is_unicode(each if isinstance(each, str) else json.dumps(each, default=str, ensure_ascii=False)):
            raise DataError(f"{where}: {key} holds half of a surrogate pair, which is no character")
    return message


def _call(call: Any, where: str) -> Any:
    """A call of a tool, with arguments: an object, or one in JSON, which the chat template gets as an object.

    Raises DataError for other arguments, for which vLLM would write none.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or (function is call and "arguments" not in call):
        return call
    arguments = read = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(arguments)
    if not isinstance(read, dict):
        raise DataError(f"{where}: arguments are {arguments!r:.60}; legal: an object, or one in JSON")
    with_them = function | {"arguments": arguments}
    return with_them if function is call else call | {"function": with_them}


def without_nulls(value: Any) -> Any:
    """Drop nulls: Parquet fills in null for every key of other messages, and every argument of other calls."""
    if isinstance(value, Mapping):
        return {str(key): without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


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


# ---------------------------------------------------------------------------------------------------- dialogue template
#
# Render new messages of an environment with the model's chat template, as tokens to append after a turn.
#
#     tokens of the prompt │ opening │ turn, as sampled │ observation │ turn, as sampled │ …
#
# A turn is never tokenised, and earlier messages are never rendered again: an observation is the text that the new
# messages add to a dialogue of two fixed messages, from the end of the second one on.  So tokens that the policy
# sampled or read never change, whatever a template does to older messages (Qwen3 drops thoughts).  At the start a test
# checks that the added text does not depend on earlier messages; templates that fail are refused.

AnyMessage = Mapping[str, Any]
_ASKED: AnyMessage = {"role": "user", "content": "Q"}
_MARK = "~the~turn~"  # a turn that occurs in no template
_ANSWERED: AnyMessage = {"role": "assistant", "content": _MARK}
_OTHER: tuple[AnyMessage, ...] = (_ASKED, {"role": "assistant", "content": "A"}, {"role": "user", "content": "R"})
_PROBE: AnyMessage = {"role": "user", "content": "O"}
_TOLD: AnyMessage = {"role": "system", "content": "S"}
_OF_A_TURN = {"tool_calls", "function_call", "reasoning_content", "thinking"}  # beside its content
_TOOL: AnyMessage = {"type": "function", "function": {"name": "f", "description": "F", "parameters": {}}}


class DialogueTemplate:
    """A model's chat template, applied message by message."""

    def __init__(
        self, tokenizer: PromptTokenizer, tools: Sequence[Mapping[str, Any]] = (), *, of_servers: str = ""
    ) -> None:
        """tools: JSON schemas, which the template writes into the prompt; of_servers: digest of those of servers.

        Raises ConfigError if the template cannot be applied message by message, or if its turns do not end with a
        special token.
        """
        self._tokenizer, self._tools, self.of_servers = tokenizer, tuple(tools), of_servers
        self._close = self._rendered((_ASKED, _ANSWERED), add_generation_prompt=False).rpartition(_MARK)[2]
        closing = tokenizer.encode_rendered(self._close)
        if not len(closing) or not self._ends_a_turn(int(closing[0])):
            raise self._refused(f"a turn ends with {self._close!r}, which does not begin with a special token")
        self.turn_end = int(closing[0])  # id of the token with which the template ends a turn
        self._try_out()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn, ascending."""
        return tuple(sorted({self.turn_end, *self._tokenizer.eos_token_ids}))

    def prompt(self, user_message: str) -> Int32:
        """Tokens [L] of the beginning of a dialogue, with the tools; the environment's opening follows."""
        return self._tokenizer.encode_rendered(self.prompt_text([{"role": "user", "content": user_message}]))

    def prompt_text(self, messages: Sequence[AnyMessage]) -> str:
        """The text of such a prompt, for messages of a record."""
        return self._rendered(messages, add_generation_prompt=False)

    @cached_property
    def beginning(self) -> str:
        """The special tokens, at least one, that dialogues of any first role begin with.  Raises ConfigError."""
        texts = [self._rendered([_ASKED])]
        for messages, tools in (([_TOLD, _ASKED], ()), ([_ASKED], (_TOOL,))):
            with suppress(ConfigError):  # a template that knows no system message, or no tools
                texts.append(self._tokenizer.chat_template.render(messages, tools=tools))
        shared = "".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False)))
        beginning = ""
        for token in takewhile(self._tokenizer.is_special, self._tokenizer.encode_rendered(shared).tolist()):
            longer = beginning + self._tokenizer.decode([token], keep_special_tokens=True)
            if not shared.startswith(longer):  # a letter that the vocabulary lacks
                break
            beginning = longer
        if not beginning:
            raise self._refused("dialogues do not begin with a special token")
        return beginning

    @cached_property
    def tokens_of_beginning(self) -> Int32:
        """Tokens [L] of `beginning`."""
        return self._tokenizer.encode_rendered(self.beginning)

    def whole(self, messages: Sequence[AnyMessage]) -> Int32:
        """Tokens [L] of a dialogue up to the policy's next turn.  Raises ConfigError if the template refuses it."""
        return self._tokenizer.encode_rendered(self._rendered(messages))

    def demonstration(self, messages: Sequence[AnyMessage]) -> list[str]:
        """Parts of a conversation up to the end of its last turn: told text, a turn, told text, …

        Each turn is written by the template as a last one, as a policy would have sampled it.  A part after a turn
        begins with the turn's end token; the last part is this token and the text after it.  Raises ConfigError:
        there is no turn, or the template refuses the conversation.
        """
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ConfigError("no message of the assistant, which is what is learnt")
        parts = [self._rendered(messages[: turns[0]])]
        for place, following in pairwise([*turns, len(messages)]):
            parts.append(self._turn(messages[place]))
            told = (_ASKED, _ANSWERED, *messages[place + 1 : following])
            parts.append(self._close if place == turns[-1] else self._after(told))
        return parts

    def _turn(self, message: AnyMessage) -> str:
        whole = self._rendered((_ASKED, message), add_generation_prompt=False)
        if not (whole.startswith(self._asking) and whole.endswith(self._close)):
            raise self._refused(f"a turn is not between {self._asking!r} and {self._close!r}, but {whole!r}")
        return whole[len(self._asking) : len(whole) - len(self._close)]

    @cached_property
    def _asking(self) -> str:
        return self._rendered((_ASKED,))

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template writes the tools anywhere."""
        return self._asking != self._tokenizer.chat_template.render((_ASKED,))

    @cached_property
    def is_thinking(self) -> bool | None:
        """True: turns begin within a thought; False: they may begin with one; None: the template knows no thoughts."""
        return self._asking.rstrip().endswith(THINKING_START) if self._tokenizer.may_think else None

    @cached_property
    def end_of_thought(self) -> tuple[int, ...]:
        """Tokens of the mark that ends thoughts."""
        return tuple(self.plain(THINKING_END).tolist())

    def left_out(self, turn: AnyMessage) -> str:
        """The key of a turn whose value, or a part of whose list, the template does not write; "" if it writes all."""
        written, content = self._turn(turn), turn["content"]
        shorter: list[tuple[str, Any]] = [] if _is_in(written, content) else [("content", "")]
        for key in _OF_A_TURN & turn.keys():
            value = turn[key]
            parts = range(len(value)) if isinstance(value, list) else range(bool(value))
            shorter += [(key, [*value[:i], *value[i + 1 :]] if isinstance(value, list) else "") for i in parts]
        for key, less in shorter:
            with suppress(ConfigError):  # a template that refuses what is left has read the rest
                if self._turn({**turn, key: less} if less or key == "content" else _without(turn, key)) == written:
                    return key
        return ""

    def plain(self, text: str) -> Int32:
        """Tokens [L] of a text without a template; special tokens may be spelt out in it."""
        return self._tokenizer.encode_rendered(text)

    @property
    def vocab_size(self) -> int:
        """All token ids are below it."""
        return self._tokenizer.vocab_size

    def opening(self, messages: Sequence[AnyMessage]) -> Int32:
        """Tokens [L] from the end of any prompt up to the policy's first turn.  Raises ConfigError."""
        before = self.prompt_text([_ASKED])
        whole = self._rendered((_ASKED, *messages))
        if not whole.startswith(before):
            raise self._refused("what it makes of a prompt is not the beginning of what it makes of a dialogue")
        return self._tokenizer.encode_rendered(whole[len(before) :])

    def observation(self, messages: Sequence[AnyMessage], *, last_token: int) -> Int32:
        """Tokens [L] from the end of a turn up to the next one; last_token: of the turn, as sampled.

        A cut turn, which lacks its end token, gets it here.
        """
        tokens = self._tokenizer.encode_rendered(self._after((_ASKED, _ANSWERED, *messages)))
        return tokens[1:] if last_token in self.stop_token_ids else tokens

    def _try_out(self) -> None:
        after = self._after((_ASKED, _ANSWERED, _PROBE))
        if _MARK in after:
            raise self._refused("a turn is rendered more than once")
        if not after.startswith(self._close):
            raise self._refused(f"a turn ends with {self._close!r} where it is the last one, else with {after!r}")
        if self._after((*_OTHER, _ANSWERED, _PROBE)) != after:
            raise self._refused("what it makes of a message depends on the number of those before it")
        whole = self._rendered((_ASKED, _ANSWERED, _PROBE))
        parts = [self._tokenizer.encode_rendered(part) for part in (whole[: -len(after)], after)]
        if not np.array_equal(self._tokenizer.encode_rendered(whole), np.concatenate(parts)):
            raise self._refused("its tokenizer makes other tokens of a message than of the same text in a dialogue")
        self.opening(())

    def _after(self, messages: Sequence[AnyMessage]) -> str:
        """The rendered text behind the marked turn."""
        _, found, after = self._rendered(messages).partition(_MARK)
        if not found:
            raise self._refused("a turn is not rendered as it is")
        return after

    def _rendered(self, messages: Sequence[AnyMessage], *, add_generation_prompt: bool = True) -> str:
        template = self._tokenizer.chat_template
        return template.render(messages, tools=self._tools, add_generation_prompt=add_generation_prompt)

    def _ends_a_turn(self, token_id: int) -> bool:
        return token_id in self._tokenizer.eos_token_ids or self._tokenizer.is_special(token_id)

    @staticmethod
    def _refused(why: str) -> ConfigError:
        return ConfigError(
            f"model.path: its chat template cannot be applied one message after the other: {why}; "
            "legal: a template that writes every message once, and ends a turn with a special token"
        )


# ---------------------------------------------------------------------------------------------------------- prompt form

ASKING = ("system", "developer", "user")  # templates may shorten what was answered before, such as thoughts


class PromptForm:
    """Makes prompts from the records of one dataset."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PromptTokenizer,
        *,
        max_prompt_tokens: int,
        max_completion_tokens: int,
        dialogue: DialogueTemplate | None = None,
    ) -> None:
        """dialogue: for prompts that an environment continues; it gets the whole record.

        Raises ConfigError for a template that names no field.
        """
        self._data, self._tokenizer, self._dialogue = data, tokenizer, dialogue
        self._pieces = _pieces(data.prompt_template)
        self._max_prompt_tokens, self.max_completion_tokens = max_prompt_tokens, max_completion_tokens

    def prompt(self, record: Record, prompt_id: int) -> Prompt:
        """Make the prompt of a record.  Raises DataError if that is impossible."""
        tokens, reference = self.tokens(record), self.reference(record)
        tools = self._dialogue.of_servers if self._dialogue is not None else ""
        return Prompt(prompt_id, self.task(record), tokens, reference, tools)

    def tokens(self, record: Record) -> Int32:
        """Tokens [Lp] of a record's prompt.  Raises DataError naming file, line and length if it is too long."""
        text, is_chat = self.text(record)
        token_ids = self._tokenizer.encode_rendered(text) if is_chat else self._tokenizer.encode(text)
        if not 0 < len(token_ids) <= self._max_prompt_tokens:
            raise DataError(self._length_fault(len(token_ids), record))
        return token_ids

    def lengths(self, records: Sequence[Record]) -> list[int]:
        """Numbers of tokens of the prompts.  Raises as `texts`."""
        return self.measured(self.texts(records))[0]

    def texts(self, records: Sequence[Record]) -> list[tuple[str, bool]]:
        """The texts of the prompts, as text() returns them; also reads references and tasks.

        Raises DataError for a record without a prompt; lengths are not checked.
        """
        return list(map(self.checked_text, records))

    def checked_text(self, record: Record) -> tuple[str, bool]:
        """The text of one prompt, after its reference and its task.  Raises as `texts`."""
        self.reference(record)
        self.task(record)
        return self.text(record)

    def measured(self, texts: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """Number of tokens and highest token of each text, computed on all processors."""
        return self._tokenizer.measured(texts)

    def refuse_unknown_task_field(self, records: Sequence[Record]) -> None:
        """Raise DataError if no record has data.task_field: it would have no effect."""
        field = self._data.task_field
        if field and not any(record.has(field) for record in records):
            names = sorted({name for record in records[:100] for name in record.fields})
            raise DataError(
                f"data.task_field={field!r}: no record has such a field, the first, {records[0].source}, has "
                f"{', '.join(map(repr, records[0].fields))}{near_hint(field, names)}"
            )

    def reference_lengths(self, records: Sequence[Record]) -> list[int]:
        """Numbers of tokens of the references that are text, not tests or entries."""
        field = self._data.reference_field
        judged = [record for record in records if field not in ("", WHOLE_RECORD) and self.task(record) != OWN_REWARD]
        plain = [record for record in judged if not record.holds_several(field)]
        return self._tokenizer.lengths([(record.reference(field), True) for record in plain])

    def refuse_lengths(self, lengths: Sequence[int], records: Sequence[Record]) -> None:
        """Raise DataError for the first prompt that is too long, with the number of such prompts."""
        wrong = [place for place, length in enumerate(lengths) if not 0 < length <= self._max_prompt_tokens]
        if not wrong:
            return
        share = f" ({len(wrong):,} of {len(lengths):,} prompts, the longest {max(lengths):,} tokens)"
        raise DataError(self._length_fault(lengths[wrong[0]], records[wrong[0]], share if len(wrong) > 1 else ""))

    def text(self, record: Record) -> tuple[str, bool]:
        """The text to tokenise, and whether a chat template made it, which writes special tokens itself."""
        if self._dialogue is not None and self._data.environment == AGENT:
            return self._dialogue.beginning, True  # the agent sends the rest
        asked = self.asked(record)
        return (
            (self._without_chat(asked, record), False) if isinstance(asked, str) else (self._chat(asked, record), True)
        )

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that make the prompt."""
        return (
            (self._data.prompt_field,) if self._data.prompt_field else tuple(name for _, name in self._pieces if name)
        )

    def asked(self, record: Record) -> str | list[Message]:
        """Prompt of a record: text, or messages for the chat template.  Raises DataError: it is empty."""
        data = self._data
        if data.prompt_field:
            value = as_conversation(record.value(data.prompt_field, "data.prompt_field"))
            if is_conversation(value):
                messages = prompt_messages(value, record.source, data.prompt_field, data.system_prompt)
                self._refuse_empty([messages[-1]["content"]], record, f"the last message of {data.prompt_field!r}")
                return messages
            refuse_no_messages(value, record.source, data.prompt_field)
            text = record.text(data.prompt_field, "data.prompt_field")
            self._refuse_empty([text], record, f"field {data.prompt_field!r} (data.prompt_field)")
        else:
            text = self._filled(record)
        return told_first([user(text)], data.system_prompt) if data.use_chat_template else text

    def spelt_control(self, record: Record) -> str:
        """A special token spelt in the record's own text, not in the template's; "": none.  Raises DataError.

        A prompt_field that is the whole prompt is not searched: it may have been rendered before.
        """
        is_whole = bool(self._data.prompt_field) and not self._data.use_chat_template
        if is_whole and not self._is_conversation(record):
            return ""
        return next(filter(None, map(self._tokenizer.spelt_control, self.own_texts(record))), "")

    def own_texts(self, record: Record) -> list[str]:
        """Texts of the prompt that come from the record itself.  Raises DataError."""
        data = self._data
        if data.environment == AGENT:
            return []
        if not data.prompt_field:
            return [record.text(name) for _, name in self._pieces if name]
        value = as_conversation(record.value(data.prompt_field, "data.prompt_field"))
        if is_conversation(value):
            return [message["content"] for message in prompt_messages(value, record.source, data.prompt_field, "")]
        refuse_no_messages(value, record.source, data.prompt_field)
        return [record.text(data.prompt_field, "data.prompt_field")]

    def shows_reference(self, record: Record) -> bool:
        """True if the prompt contains the answer: the reference's field, or text that ends with the reference."""
        field = self._data.reference_field
        if field in ("", WHOLE_RECORD) or self.task(record) == OWN_REWARD or record.holds_several(field):
            return False
        if field == self._data.prompt_field or any(name == field for _, name in self._pieces):
            return True
        texts, reference = self.own_texts(record), record.reference(field).strip()
        return bool(texts and reference) and texts[-1].rstrip().endswith(reference)

    def _is_conversation(self, record: Record) -> bool:
        return is_conversation(as_conversation(record.value(self._data.prompt_field, "data.prompt_field")))

    @property
    def reference_field(self) -> str:
        """The field that holds references."""
        return self._data.reference_field

    def reference(self, record: Record) -> str:
        """Reference for the reward function; for a dialogue the whole record, which contains it.

        Raises DataError.
        """
        if self._dialogue is None:
            return record.reference(self._data.reference_field)
        if self.task(record) != OWN_REWARD:
            record.reference(self._data.reference_field)
        return record.reference(WHOLE_RECORD)

    def task(self, record: Record) -> str:
        """Reward function of a record's answers.  Raises DataError for a value that is not in data.tasks."""
        return task_of(record, self._data)

    def _filled(self, record: Record) -> str:
        if self._data.prompt_template == "{prompt}" and is_conversation(record.fields.get("prompt")):
            raise DataError(
                f"{record.source}: field 'prompt' is a list of chat messages; set data.prompt_field = 'prompt'"
            )
        values = [record.text(name) if name else "" for _, name in self._pieces]
        fields = ", ".join(repr(name) for _, name in self._pieces if name)
        self._refuse_empty(values, record, f"field {fields} (data.prompt_template)")
        return "".join(literal + value for (literal, _), value in zip(self._pieces, values, strict=True))

    def _without_chat(self, text: str, record: Record) -> str:
        if self._data.system_prompt:
            raise DataError(
                f"{record.source}: data.system_prompt, and the prompt is text without a chat template; "
                "set data.use_chat_template = true"
            )
        return text

    def _chat(self, messages: Sequence[Message], record: Record) -> str:
        template = self._tokenizer.chat_template  # first: a missing template is no fault of the record
        try:
            text = template.render(messages) if self._dialogue is None else self._dialogue.prompt_text(messages)
        except ConfigError as error:
            raise DataError(f"{record.source}: {error}") from error
        self.refuse_left_out(messages, text, record)
        return text

    def refuse_left_out(self, messages: Sequence[Message], text: str, record: Record) -> None:
        """Raise DataError for a message with content that the chat template leaves out."""
        for message in messages:
            if message["role"] not in ASKING or _is_in(text, message["content"]):
                continue
            if message["role"] == "user":
                raise DataError(
                    f"{record.source}: the chat template of model.path leaves what the user says out of the prompt; "
                    "legal: one that writes contents that are texts (it may look for parts of them)"
                )
            where = "data.system_prompt" if self._data.system_prompt == message["content"] else "of the record"
            raise DataError(
                f"{record.source}: the chat template of model.path leaves out the {message['role']} message ({where}): "
                "it would have no effect; legal: without it (prompt_template can say the same to the user), or another "
                "chat template"
            )

    def _refuse_empty(self, texts: Sequence[str], record: Record, where: str) -> None:
        """Raise DataError for a record with an empty prompt, unless an environment opens the dialogue."""
        if self._dialogue is None and not any(text.strip() for text in texts):
            raise DataError(f"{record.source}: {where} is empty, and nothing else asks for an answer")

    def _length_fault(self, length: int, record: Record, share: str = "") -> str:
        limit, table = self._max_prompt_tokens, "data" if self._data.max_prompt_tokens else "generation"
        remedy = f"; `rlhpc data convert … --max-tokens {limit}` leaves longer ones out" if length else ""
        legal = f"legal: 1 to {table}.max_prompt_tokens={limit}"
        return f"{record.source}: the prompt has {length} tokens; {legal}{share}{remedy}"


def task_of(record: Record, data: DataConfig) -> str:
    """Reward function of a record's answers.  Raises DataError for a value that is not in data.tasks."""
    if not data.task_field or not record.has(data.task_field):
        return data.task
    value = record.text(data.task_field, "data.task_field")
    if value not in data.tasks:
        raise DataError(
            f"{record.source}: field {data.task_field!r} is {value!r}, which is not in "
            f"data.tasks: {', '.join(map(repr, data.tasks))}{near_hint(value, data.tasks)}"
        )
    return data.tasks[value]


def _pieces(template: str) -> tuple[tuple[str, str], ...]:
    """Text of a template and the field after it, "" for none.  Raises ConfigError for anything but names of fields."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"data.prompt_template={template!r}: {error}; a literal brace is doubled") from error
    for _, name, style, conversion in parts:
        if name is not None and (not _is_name(name) or style or conversion):
            raise ConfigError(
                f"data.prompt_template={template!r}: {{{name}}} is not the plain name of a field; "
                "a literal brace is doubled"
            )
    if not any(name for _, name, _, _ in parts):
        raise ConfigError(f"data.prompt_template={template!r} names no field: every prompt would be the same")
    return tuple((literal, name or "") for literal, name, _, _ in parts)


def _without(message: AnyMessage, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def _is_in(text: str, content: str) -> bool:
    """True if a text contains this content; templates strip contents, and some change white space."""
    return content.strip() in text or "".join(content.split()) in "".join(text.split())


def _is_name(name: str) -> bool:
    """True for a column, with a dot per level below it: "question", "Problem Text", "choices.0", "info.question"."""
    first, *inner = name.split(".")
    words = first.replace("-", " ").split()
    is_column = bool(words) and words[0].isidentifier() and all(("_" + word).isidentifier() for word in words)
    return is_column and all(part.removeprefix("-").isdecimal() or part.isidentifier() for part in inner)
