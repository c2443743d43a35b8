"""Turn a record into a prompt, as a table [data] specifies.

    record ── template, or field ──▶ text or messages ── chat template ──▶ text ── tokenizer ──▶ tokens

Input: Record.  Output: Prompt.  Any fault of a record is a DataError that names its file and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from string import Formatter

from rlhpc.config_data import AGENT, OWN_REWARD, WHOLE_RECORD, DataConfig
from rlhpc.data.conversation import (
    Message,
    as_conversation,
    is_conversation,
    prompt_messages,
    refuse_pythons,
    system,
    user,
)
from rlhpc.data.dialogue_template import DialogueTemplate
from rlhpc.data.records import Record
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ConfigError, DataError
from rlhpc.types import Int32, Prompt

_ASKING = ("system", "developer", "user")  # templates may shorten what was answered before, such as thoughts


class PromptForm:
    """Makes prompts of the records of one dataset."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PromptTokenizer,
        *,
        max_prompt_tokens: int,
        max_completion_tokens: int,
        dialogue: DialogueTemplate | None = None,
    ) -> None:
        """dialogue: for prompts that an environment continues, which is given the whole record.

        Raises ConfigError for a template that names no field.
        """
        self._data, self._tokenizer, self._dialogue = data, tokenizer, dialogue
        self._pieces = _pieces(data.prompt_template)
        self._max_prompt_tokens, self.max_completion_tokens = max_prompt_tokens, max_completion_tokens

    def prompt(self, record: Record, prompt_id: int) -> Prompt:
        """Make the prompt of a record.  Raises DataError for a record that makes none."""
        tokens, reference = self.tokens(record), self.reference(record)
        return Prompt(prompt_id=prompt_id, task=self.task(record), token_ids=tokens, reference=reference)

    def tokens(self, record: Record) -> Int32:
        """Tokens [Lp].  Raises DataError naming file, line and length if they are too many."""
        text, is_chat = self.text(record)
        token_ids = self._tokenizer.encode_rendered(text) if is_chat else self._tokenizer.encode(text)
        if not 0 < len(token_ids) <= self._max_prompt_tokens:
            raise DataError(self._length_fault(len(token_ids), record))
        return token_ids

    def lengths(self, records: Sequence[Record]) -> list[int]:
        """Numbers of tokens of the prompts.  Raises as `texts`."""
        return self.measured(self.texts(records))[0]

    def texts(self, records: Sequence[Record]) -> list[tuple[str, bool]]:
        """The texts of the prompts, as text() returns them; references and tasks are tried.

        Raises DataError for a record that makes no prompt, however long it might be.
        """
        made: list[tuple[str, bool]] = []
        for record in records:
            self.reference(record)
            self.task(record)
            made.append(self.text(record))
        return made

    def measured(self, texts: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """Numbers of tokens of these texts, and the highest token of each, by all processors."""
        return self._tokenizer.measured(texts)

    def refuse_unknown_task_field(self, records: Sequence[Record]) -> None:
        """Raises DataError if no record has data.task_field: it would have no effect."""
        field = self._data.task_field
        if field and not any(record.has(field) for record in records):
            names = sorted({name for record in records[:100] for name in record.fields})
            close = get_close_matches(field, names, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise DataError(
                f"data.task_field={field!r}: no record has such a field, the first, {records[0].source}, has "
                f"{', '.join(map(repr, records[0].fields))}{hint}"
            )

    def reference_lengths(self, records: Sequence[Record]) -> list[int]:
        """Numbers of tokens of the references that are text, not tests or entries."""
        field = self._data.reference_field
        judged = [record for record in records if field != WHOLE_RECORD and self.task(record) != OWN_REWARD]
        plain = [record for record in judged if not record.holds_several(field)]
        return self._tokenizer.lengths([(record.reference(field), True) for record in plain])

    def refuse_lengths(self, lengths: Sequence[int], records: Sequence[Record]) -> None:
        """Raises DataError for the first prompt that is too long, and says how many are."""
        wrong = [place for place, length in enumerate(lengths) if not 0 < length <= self._max_prompt_tokens]
        if not wrong:
            return
        share = f"{len(wrong):,} of {len(lengths):,} prompts, the longest {max(lengths):,} tokens"
        raise DataError(
            self._length_fault(lengths[wrong[0]], records[wrong[0]]) + (f" ({share})" if len(wrong) > 1 else "")
        )

    def text(self, record: Record) -> tuple[str, bool]:
        """The text that is tokenised, and whether a chat template made it, which spells special tokens itself."""
        data = self._data
        if self._dialogue is not None and data.environment == AGENT:
            return self._dialogue.beginning, True  # the agent says all else
        if data.prompt_field:
            value = as_conversation(record.value(data.prompt_field, "data.prompt_field"))
            if is_conversation(value):
                messages = prompt_messages(value, record.source, data.prompt_field, data.system_prompt)
                self._refuse_empty([messages[-1]["content"]], record, f"the last message of {data.prompt_field!r}")
                return self._chat(messages, record), True
            refuse_pythons(value, record.source, data.prompt_field)
            text = record.text(data.prompt_field, "data.prompt_field")
            self._refuse_empty([text], record, f"field {data.prompt_field!r} (data.prompt_field)")
        else:
            text = self._filled(record)
        if not data.use_chat_template:
            return self._without_chat(text, record), False
        return self._chat([system(data.system_prompt)] * bool(data.system_prompt) + [user(text)], record), True

    def spelt_control(self, record: Record) -> str:
        """A special token that the text of the record spells, and no template of ours; "": none.  Raises DataError.

        Not of a prompt_field that is the whole prompt: it may have been rendered before.
        """
        is_whole = bool(self._data.prompt_field) and not self._data.use_chat_template
        if is_whole and not self._is_conversation(record):
            return ""
        return next(filter(None, map(self._tokenizer.spelt_control, self.own_texts(record))), "")

    def own_texts(self, record: Record) -> list[str]:
        """What the record itself gives to its prompt.  Raises DataError."""
        data = self._data
        if data.environment == AGENT:
            return []
        if not data.prompt_field:
            return [record.text(name) for _, name in self._pieces if name]
        value = as_conversation(record.value(data.prompt_field, "data.prompt_field"))
        if is_conversation(value):
            return [message["content"] for message in prompt_messages(value, record.source, data.prompt_field, "")]
        return [record.text(data.prompt_field, "data.prompt_field")]

    def shows_reference(self, record: Record) -> bool:
        """Whether the prompt tells the answer: it has the reference's field in it, or the record's text ends so."""
        field = self._data.reference_field
        if field == WHOLE_RECORD or self.task(record) == OWN_REWARD or record.holds_several(field):
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
        """What the reward function compares with; for a dialogue the whole record, which contains it.

        Raises DataError.
        """
        if self._dialogue is None:
            return record.reference(self._data.reference_field)
        if self.task(record) != OWN_REWARD:
            record.reference(self._data.reference_field)
        return record.reference(WHOLE_RECORD)

    def task(self, record: Record) -> str:
        """The reward function that judges answers to it.  Raises DataError for a value that is not in data.tasks."""
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
        template = self._tokenizer.chat_template  # where there is none, that is no fault of the record
        try:
            text = template.render(messages) if self._dialogue is None else self._dialogue.prompt_text(messages)
        except ConfigError as error:
            raise DataError(f"{record.source}: {error}") from error
        self._refuse_left_out(messages, text, record)
        return text

    def _refuse_left_out(self, messages: Sequence[Message], text: str, record: Record) -> None:
        """Raises DataError for a message that asks or tells something, and that the chat template does not write."""
        for message in messages:
            if message["role"] not in _ASKING or _is_in(text, message["content"]):
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
        """Raises DataError for a record that asks nothing; an environment may ask in its place."""
        if self._dialogue is None and not any(text.strip() for text in texts):
            raise DataError(f"{record.source}: {where} is empty, and nothing else asks for an answer")

    def _length_fault(self, length: int, record: Record) -> str:
        return (
            f"{record.source}: the prompt has {length} tokens; legal: 1 to "
            f"{'data' if self._data.max_prompt_tokens else 'generation'}.max_prompt_tokens={self._max_prompt_tokens}"
        )


def task_of(record: Record, data: DataConfig) -> str:
    """The reward function that judges answers to a record.  Raises DataError for a value that is not in data.tasks."""
    if not data.task_field or not record.has(data.task_field):
        return data.task
    value = record.text(data.task_field, "data.task_field")
    if value not in data.tasks:
        close = get_close_matches(value, data.tasks, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise DataError(
            f"{record.source}: field {data.task_field!r} is {value!r}, which is not in "
            f"data.tasks: {', '.join(map(repr, data.tasks))}{hint}"
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


def _is_in(text: str, content: str) -> bool:
    """Whether a text has this in it; templates strip contents, and some change their white space."""
    return content.strip() in text or "".join(content.split()) in "".join(text.split())


def _is_name(name: str) -> bool:
    """A column, and a dot for each level below it: "question", "Problem Text", "choices.0", "info.question"."""
    first, *inner = name.split(".")
    words = first.replace("-", " ").split()
    is_column = bool(words) and words[0].isidentifier() and all(("_" + word).isidentifier() for word in words)
    return is_column and all(part.removeprefix("-").isdecimal() or part.isidentifier() for part in inner)
