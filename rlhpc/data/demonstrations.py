"""Demonstrations: conversations as tokens, and their order in training.

    records ──▶ messages, or prompt and completion ──▶ tokens, and which of them are learnt ──▶ an endless sequence

A conversation is tokenised like a dialogue with a policy: messages of others by the chat template, one by one, and each
turn of the assistant by itself, as if sampled; the turn's tokens and its end token are learnt.  Each dataset is
tokenised once, and cached as arrays: four bytes a token, no object for a conversation.

Input: tables [[demonstrations]], [sft].  Output: Demonstration, a pure function of settings, records and its number in
the sequence, which is all that a restart needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import rlhpc
from rlhpc.config.rules import Config
from rlhpc.config.tables import DataConfig
from rlhpc.config.tables_sft import DemonstrationsConfig
from rlhpc.data.files import dataset_files, read_rows
from rlhpc.data.prompt_form import (
    ASKING,
    DialogueTemplate,
    Message,
    PromptForm,
    as_conversation,
    conversation_messages,
    is_conversation,
    refuse_no_messages,
    told_first,
    without_nulls,
)
from rlhpc.data.prompts import raw_draws, seed_of_dataset
from rlhpc.data.record_source import HOW_TO_ASK, Record, cached
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.data.validation import CODE_FILES, TOKENIZER_FILES, FaultyRecords, states_of
from rlhpc.protocol.errors import ConfigError, DataError
from rlhpc.protocol.types import Bool, Int32

# --------------------------------------------------------------------------------------------------------- conversation

_NOT_ENDED = 1 << 30
_KEYS = "|".join(DemonstrationsConfig.model_fields)
_SHARED = 'data.prompt_template="" (both answers begin with the prompt)'
_SPEAKS = ("assistant", "gpt")  # roles
_MOST_TOOLS = 64  # sets of tools whose templates are kept
_AT_ONCE = 2000  # records that are tokenised together, by all processors


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation as tokens."""

    token_ids: Int32  # [L]
    loss_mask: Bool  # [L] tokens that are learnt
    rejected: Demonstration | None = None  # of preferences: the answer to which this one is preferred

    @property
    def sequences(self) -> tuple[Demonstration, ...]:
        """Itself, and the one to which it is preferred."""
        return (self,) if self.rejected is None else (self, self.rejected)

    def preferred_to(self, other: Demonstration) -> Demonstration:
        """The pair: of both, tokens are learnt from the first that differs; what they share cancels out."""
        num = min(len(self.token_ids), len(other.token_ids))
        shared = int(np.argmax(self.token_ids[:num] != other.token_ids[:num]))  # 0 of two that are the same
        mine, theirs = (
            replace(each, loss_mask=each.loss_mask & (np.arange(len(each.loss_mask)) >= shared))
            for each in (self, other)
        )
        return replace(mine, rejected=theirs)


class DemonstrationForm:
    """Makes conversations from the records of one table."""

    def __init__(self, data: DemonstrationsConfig, tokenizer: PromptTokenizer) -> None:
        self._data, self._tokenizer = data, tokenizer
        self.num_empty = 0  # answers without a text that it has made
        self.num_untold = 0  # conversations that call a tool of which the model is not told
        as_prompts = {"prompt_field", "use_chat_template", "system_prompt", "path"}
        self._share_prompt = bool(data.rejected_field) and not (data.prompt_template or data.prompt_field)
        if not self._share_prompt:
            as_prompts.add("prompt_template")
        table = DataConfig.model_construct(task="", **data.model_dump(include=as_prompts))
        self._prompts = PromptForm(table, tokenizer, max_prompt_tokens=_NOT_ENDED, max_completion_tokens=_NOT_ENDED)
        self._template_with = lru_cache(_MOST_TOOLS)(self._template)

    def parts(self, record: Record, key: str = "completion_field") -> list[tuple[str, bool]]:
        """(text, is rendered by a template) of told and learnt parts, alternating.  Raises DataError, ConfigError.

        key: of the table, that of the answer.
        """
        try:
            return self._parts(record, key)
        except DataError as error:
            if all(map(record.has, self._fields)) or not (way := fitting_keys(record, self._data)):
                raise
            raise DataError(f"{str(error).removesuffix(HOW_TO_ASK)}; legal: {way}") from error

    @property
    def _fields(self) -> tuple[str, ...]:
        """Names of the fields that are read."""
        data = self._data
        asked = () if self._share_prompt else self._prompts.fields
        answers = tuple(filter(None, (data.completion_field, data.rejected_field)))
        return (*asked, *answers) if answers else (data.messages_field,)

    def _parts(self, record: Record, key: str) -> list[tuple[str, bool]]:
        if not self._data.completion_field:
            name, key = self._data.messages_field, "data.messages_field"
            value = as_conversation(record.value(name, key))
            if not is_conversation(value):
                refuse_no_messages(value, record.source, name)
                raise DataError(
                    f"{record.source}: field {name!r} ({key}) is no list of chat messages; legal: "
                    '[{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], or a completion_field'
                )
            messages = conversation_messages(value, record.source, name)
            return self._chat(told_first(messages, self._data.system_prompt), record)
        if self._share_prompt:
            return self._without_prompt(record, self._answer(record, key))
        asked, said = self._prompts.asked(record), self._answer(record, key)
        if not isinstance(said, str) and said[0]["role"] in ASKING:
            raise DataError(
                f"{record.source}: the answer is a whole conversation; legal: {self._of_whole_conversations}"
            )
        if isinstance(asked, str):
            if not isinstance(said, str):
                raise DataError(
                    f"{record.source}: a prompt that is text, and a completion that is chat messages; "
                    "legal: data.use_chat_template=true, which makes the prompt a message"
                )
            text, is_rendered = self._prompts.text(record)
            return [(text, is_rendered), (said, True)]
        return self._chat(
            [*asked, *([{"role": "assistant", "content": said}] if isinstance(said, str) else said)], record
        )

    @property
    def _of_whole_conversations(self) -> str:
        """Keys for answers that begin with their prompt."""
        if self._data.rejected_field:
            return f"{_SHARED}, without data.prompt_field" if self._data.prompt_field else _SHARED
        return f'data.messages_field="{self._data.completion_field}", without data.completion_field'

    def _answer(self, record: Record, of: str) -> str | list[Message]:
        name, key = getattr(self._data, of), f"data.{of}"
        value = as_conversation(record.value(name, key))
        return conversation_messages(value, record.source, name) if is_conversation(value) else record.text(name, key)

    def _without_prompt(self, record: Record, said: str | list[Message]) -> list[tuple[str, bool]]:
        """Parts of an answer that begins with its prompt, as the other does: of texts, up to a word that differs."""
        if not isinstance(said, str):
            return self._chat(told_first(said, self._data.system_prompt), record)
        both = [str(self._answer(record, key)) for key in ("completion_field", "rejected_field")]
        differs = (place for place, letters in enumerate(zip(*both, strict=False)) if len(set(letters)) > 1)
        prompt = re.sub(r"\s*\S*\Z", "", said[: next(differs, min(map(len, both)))])
        if not prompt:
            raise DataError(f"{record.source}: two answers that do not begin with the same prompt")
        return [(prompt, False), (said[len(prompt) :], True)]

    def _chat(self, messages: list[Message], record: Record) -> list[tuple[str, bool]]:
        template = self._template_with(tools := self._tools(record))
        try:
            parts = template.demonstration(messages)
            unwritten = list(filter(None, map(template.left_out, (m for m in messages if m["role"] == "assistant"))))
        except ConfigError as error:
            raise DataError(f"{record.source}: {error}") from error
        if unwritten:
            raise DataError(
                f"{record.source}: the chat template of model.path does not write {unwritten[0]} of the assistant: the "
                f"model would learn to leave it out; legal: a template that writes it, or records without it"
            )
        if tools != "[]" and not template.writes_tools:
            raise DataError(
                f"{record.source}: the chat template of model.path does not write tools, and "
                f"data.tools_field={self._data.tools_field!r}; legal: a template that does, or "
                'data.tools_field="", which leaves them out'
            )
        told = "".join([tools, *parts[::2]])
        self.num_untold += any(name not in told for message in messages for name in _called(message))
        learnt = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
        self._prompts.refuse_left_out(messages[:learnt], "".join(parts), record)
        return [(part, True) for part in parts]

    def _template(self, tools: str) -> DialogueTemplate:
        return DialogueTemplate(self._tokenizer, json.loads(tools))

    def _tools(self, record: Record) -> str:
        """The tools of a conversation, a list in JSON.  Raises DataError."""
        name = self._data.tools_field
        if not name or not record.has(name):
            return "[]"
        value = as_tools = record.value(name, "data.tools_field")
        if isinstance(value, str):
            with suppress(ValueError):
                as_tools = json.loads(value)
        if not as_tools:  # an empty cell, and null in JSON, as hubs store tools
            return "[]"
        if not isinstance(as_tools, list) or not all(isinstance(each, dict) for each in as_tools):
            raise DataError(
                f"{record.source}: field {name!r} (data.tools_field) is no list of JSON schemas; legal: "
                '[{"type": "function", "function": {"name": …}}], or data.tools_field="", which leaves it out'
            )
        return json.dumps(without_nulls(as_tools))

    def demonstrations(self, records: Sequence[Record]) -> list[Demonstration]:
        """Conversations of records, in their order.  Raises as `parts`."""
        return self.joined(list(map(self.all_parts, records)))

    def all_parts(self, record: Record) -> list[list[tuple[str, bool]]]:
        """`parts` of the answer, and of preferences those of the worse one.  Raises as `parts`."""
        keys = ("completion_field", "rejected_field") if self._data.rejected_field else ("completion_field",)
        return [self.parts(record, key) for key in keys]

    def joined(self, parts_of: Sequence[list[list[tuple[str, bool]]]]) -> list[Demonstration]:
        """Conversations of all_parts of records."""
        texts = [parts for both in parts_of for parts in both]
        self.num_empty += sum(not parts[len(parts) // 2 * 2 - 1][0].strip() for parts in texts)
        tokens = iter(self._tokenizer.encode_all([part for parts in texts for part in parts]))
        made = [self._joined([next(tokens) for _ in parts]) for parts in texts]
        if not self._data.rejected_field:
            return made
        return [made[i].preferred_to(made[i + 1]) for i in range(0, len(made), 2)]

    def _joined(self, parts: list[Int32]) -> Demonstration:
        """Join parts as of DialogueTemplate.demonstration; two parts alone, without a template, lack the end token."""
        parts = [*parts, np.array([self._tokenizer.end_token_id], np.int32)] if len(parts) == 2 else parts
        parts[-1] = parts[-1][:1]
        masks = [np.full(len(part), place % 2 == 1) for place, part in enumerate(parts)]
        for mask in masks[2::2]:
            mask[:1] = True  # the end of the previous turn
        mask = np.concatenate(masks)
        mask[:1] = False  # no token precedes it
        return Demonstration(np.concatenate(parts), mask)


def _called(message: Message) -> Iterator[str]:
    """Names of the tools that a message calls."""
    for call in message.get("tool_calls", ()) if message["role"] == "assistant" else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            yield name


_QUESTIONS = ("prompt", "instruction", "question", "problem", "query", "input")  # names of columns, the likeliest first
_ANSWERS = ("completion", "output", "response", "answer", "solution", "target")


def fitting_keys(record: Record, data: DemonstrationsConfig) -> str:
    """Keys of [[demonstrations]] that fit the columns of a record, by their usual names; "" if none do.

    data: the table, whose keys of both answers are not repeated.
    """

    def roles(name: str) -> list[object]:
        value = as_conversation(record.fields.get(name))
        return [each.get("role", each.get("from")) for each in value] if is_conversation(value) else []

    whole = [name for name in record.fields if (said := roles(name)) and said[0] not in _SPEAKS and said[-1] in _SPEAKS]
    question, answer = (next(filter(record.fields.__contains__, names), "") for names in (_QUESTIONS, _ANSWERS))
    asked = f"data.prompt_field={question!r}" if roles(question) else f'data.prompt_template="{{{question}}}"'
    if {"chosen", "rejected"} <= record.fields.keys():
        shared = _SHARED if "chosen" in whole or not question else asked
        if (data.completion_field, data.rejected_field) == ("chosen", "rejected"):
            return shared
        return f"sft.loss='dpo', data.completion_field='chosen', data.rejected_field='rejected', {shared}"
    if whole:
        return f"data.messages_field={whole[0]!r}"
    if question == "instruction" and isinstance(record.fields.get("input"), str):
        asked = 'data.prompt_template="{instruction}\\n\\n{input}"'
    return f"data.completion_field={answer!r}, {asked}" if question and answer else ""


# --------------------------------------------------------------------------------------------------------------- corpus


_COUNTS = 5  # numbers before the borders


class Corpus:
    """Conversations of one table in their cached form: ~token for a learnt token."""

    def __init__(self, content: bytes, *, in_pairs: bool = False) -> None:
        """content: made by _tokenised.  in_pairs: each second one is that to which the one before it is preferred.

        num_dropped: longer ones; num_equal: pairs of the same tokens; num_empty: those with an answer without a text;
        num_untold: those that call a tool that nobody described.
        """
        self._in_pairs = in_pairs
        counts = np.frombuffer(content, np.int64, _COUNTS).tolist()
        num, self.num_dropped, self.num_equal, self.num_empty, self.num_untold = counts
        self.borders = np.frombuffer(content, np.int64, num + 1, 8 * _COUNTS)
        self._values = np.frombuffer(content, np.int32, -1, 8 * _COUNTS + self.borders.nbytes)

    @staticmethod
    def is_whole(content: bytes) -> bool:
        """True if the content has its full length."""
        if len(content) < 8 * (_COUNTS + 1):
            return False
        num = int(np.frombuffer(content, np.int64, 1)[0])
        head = 8 * (_COUNTS + num + 1)
        return head <= len(content) and len(content) == head + 4 * int(np.frombuffer(content, np.int64, 1, head - 8)[0])

    def __len__(self) -> int:
        return (len(self.borders) - 1) // (1 + self._in_pairs)

    def __getitem__(self, index: int) -> Demonstration:
        if self._in_pairs:
            return replace(self._sequence(2 * index), rejected=self._sequence(2 * index + 1))
        return self._sequence(index)

    def _sequence(self, index: int) -> Demonstration:
        values = self._values[self.borders[index] : self.borders[index + 1]]
        return Demonstration(np.where(values < 0, ~values, values), values < 0)

    @property
    def num_learnt(self) -> int:
        """Number of learnt tokens of all conversations."""
        return int(np.count_nonzero(self._values < 0))

    @property
    def highest_token(self) -> int:
        """Highest token of all conversations."""
        return int(max(self._values.max(initial=-1), (~self._values).max(initial=-1)))


def open_corpus(config: Config, place: int) -> Corpus:
    """Tokenise one table, or read it from the cache.  Raises DataError, ConfigError."""
    data, package = config.demonstrations[place], Path(rlhpc.__file__).parent
    with keys_of_demonstrations():
        made_of = {
            "table": data.model_dump(mode="json", exclude={"passes", "held_out"}),
            "limits": [config.longest_conversation, config.sft.too_long],
            "files": states_of(dataset_files(data.path, data.split)),
            "chat_template_kwargs": config.model.chat_template_kwargs,
            "tokenizer": states_of(config.model.path / name for name in TOKENIZER_FILES),
            "code": states_of(file for part in CODE_FILES for file in sorted(package.glob(part))),
        }
        content = cached(
            "demonstrations", json.dumps(made_of), lambda: _tokenised(config, data), is_whole=Corpus.is_whole
        )
    return Corpus(content, in_pairs=bool(data.rejected_field))


@contextmanager
def keys_of_demonstrations() -> Iterator[None]:
    """Rename keys in a DataError: code that reads records names [data], whose keys have the same names here."""
    try:
        yield
    except DataError as error:
        raise DataError(re.sub(rf"\bdata\.(?=({_KEYS})\b)", "demonstrations.", str(error))) from error


def _tokenised(config: Config, data: DemonstrationsConfig) -> bytes:
    form, most = DemonstrationForm(data, PromptTokenizer.of(config.model)), config.longest_conversation
    values, lengths, num_records, too_long = list[bytes](), list[int](), 0, list[tuple[int, str]]()
    num_equal = 0
    records = (
        Record(fields, f"{file}:{number}")
        for file in dataset_files(data.path, data.split)
        for fields, number in read_rows(file)
    )
    faulty = FaultyRecords()
    while some := list(islice(records, _AT_ONCE)):
        num_records += len(some)
        good = [(record, parts) for record in some if (parts := faulty.tried(form.all_parts, record)) is not None]
        for (record, _), each in zip(good, form.joined([parts for _, parts in good]), strict=True):
            if (longest := max(len(one.token_ids) for one in each.sequences)) > most:
                too_long.append((longest, record.source))
                continue
            num_equal += each.rejected is not None and np.array_equal(each.token_ids, each.rejected.token_ids)
            for one in each.sequences:
                values.append(np.where(one.loss_mask, ~one.token_ids, one.token_ids).tobytes())
                lengths.append(len(one.token_ids))
    if not num_records:
        raise DataError(f"data.path={data.path} has no records")
    faulty.refuse()
    if too_long and (config.sft.too_long == "refuse" or not lengths):
        length, source = too_long[0]
        longest = max(too_long)[0]
        share = f" ({len(too_long):,} of {num_records:,} are too long, the longest {longest:,} tokens)"
        if config.sft.too_long == "drop":
            shortest = min(too_long)[0]
            raise DataError(
                f'{data.path}: nothing is left with sft.too_long="drop": the {num_records:,} records have {shortest:,} '
                f"to {longest:,} tokens, and sft.max_tokens is {most:,}; legal: {shortest:,} or more"
            )
        raise DataError(
            f'{source}: the conversation has {length} tokens; legal: up to {most}, or sft.too_long="drop"{share}'
        )
    counts = (len(lengths), len(too_long), num_equal, form.num_empty, form.num_untold)
    head = np.array([*counts, 0, *np.cumsum(lengths)], np.int64)
    return b"".join([head.tobytes(), *values])


# ---------------------------------------------------------------------------------------------------------------- order

_ORDER, _HELD_OUT, _EPOCH = 2, 3, 4  # streams of random numbers


class Demonstrations:
    """Conversations of all tables as an endless sequence, with an order for each epoch."""

    def __init__(self, config: Config, corpora: Sequence[Corpus]) -> None:
        """Raises DataError: all conversations are held out."""
        self.corpora, self._seed = tuple(corpora), config.run.seed
        tables = config.demonstrations
        split = [self._split(place, each.held_out, config.sft.held_out) for place, each in enumerate(tables)]
        self._learnt, self._held_out = ([each[part] for each in split] for part in (0, 1))
        self._counts = [
            max(1, round(table.passes * len(own))) if len(own) else 0
            for table, own in zip(tables, self._learnt, strict=True)
        ]
        if not self.num_conversations:
            raise DataError(f"sft.held_out={config.sft.held_out:g} leaves no conversation to learn from")
        self._starts = np.concatenate(([0], np.cumsum(self._counts)))
        self._order = lru_cache(2 + 2 * len(corpora))(self._drawn)  # a batch may begin in one epoch and end in the next

    @property
    def num_conversations(self) -> int:
        """Number of conversations in an epoch."""
        return sum(self._counts)

    @property
    def num_held_out(self) -> int:
        """Number of conversations that are never learnt."""
        return sum(map(len, self._held_out))

    def learnt(self, number: int) -> Demonstration:
        """Conversation at a place of the endless sequence, from 0."""
        epoch, position = divmod(number, self.num_conversations)
        entry = int(self._order(self.num_conversations, self._seed, _EPOCH, epoch)[position])
        place = int(np.searchsorted(self._starts, entry, side="right")) - 1
        own = self._learnt[place]
        turn, position = divmod(epoch * self._counts[place] + entry - int(self._starts[place]), len(own))
        order = self._order(len(own), seed_of_dataset(self._seed, place), _ORDER, turn)
        return self.corpora[place][int(own[order[position]])]

    def held_out(self) -> Iterator[Demonstration]:
        """Yield conversations that are never learnt, in the order of tables and files."""
        for corpus, own in zip(self.corpora, self._held_out, strict=True):
            yield from (corpus[int(index)] for index in own)

    def _split(self, place: int, is_held_out: bool, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places of learnt conversations, and of held-out ones."""
        num = len(self.corpora[place])
        num_held_out = num if is_held_out else min(num, max(1, round(share * num))) if share else 0
        order = self._drawn(num, seed_of_dataset(self._seed, place), _HELD_OUT, 0)
        return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])

    @staticmethod
    def _drawn(num: int, *seeds: int) -> NDArray[np.int64]:
        return np.argsort(raw_draws(num, *seeds), kind="stable")


def open_demonstrations(config: Config) -> Demonstrations:
    """Tokenise the demonstrations of a run, or read them from the cache.  Raises DataError, ConfigError."""
    return Demonstrations(config, [open_corpus(config, place) for place in range(len(config.demonstrations))])
