"""`rlhpc data head|stats|convert`.

Input: options.  Output: lines, or files.  A plain file shows its fields; with a model, or keys of [data], its prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from launch.checks.preflight import with_marks
from launch.common.text import aligned, escaped, printable, printable_line
from launch.evaluate.request import document_without_run
from rlhpc.config.file import load_config, settled
from rlhpc.config.rules import Config
from rlhpc.data.demonstrations import DemonstrationForm, keys_of_demonstrations
from rlhpc.data.files import WRITTEN, kind, write_records
from rlhpc.data.prompt_form import PromptForm
from rlhpc.data.prompts import dialogue_template
from rlhpc.data.record_source import PREFIX, Record, read_records, records_of
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.data.validation import MOST_S, CheckOf, References, try_references
from rlhpc.protocol.errors import ConfigError, DataError
from rlhpc.rewards.registry import composite_reference_check

# --------------------------------------------------------------------------------------------------------------- source
#
# The dataset of `rlhpc data`: its records, and with a model the prompts made of them.
#
# Input: a dataset or a run file, a model, settings.  Output: Sources.

OPEN = ("data", "demonstrations", "generation", "sft")  # sections that overrides may change
_WHERE = tuple(f"data.{key}" for key in ("split", "size", "source_seed", "levels", "settings"))
ANY_LENGTH = 1 << 40  # tokens
Text = TypeVar("Text")


@dataclass(frozen=True, slots=True)
class Source(ABC, Generic[Text]):
    """Records, and if a model is given what a run makes of them: prompts, or conversations to learn."""

    title: str
    records: Sequence[Record]
    max_tokens: int = ANY_LENGTH  # of a text; ANY_LENGTH: no limit was given
    noun: ClassVar[str] = "prompt"

    @property
    @abstractmethod
    def has_model(self) -> bool:
        """Whether texts can be made."""

    @abstractmethod
    def text(self, record: Record) -> Text:
        """The prompt or conversation of a record.  Raises DataError.  Needs a model, as what follows does."""

    @abstractmethod
    def written(self, text: Text) -> str:
        """A text for people."""

    @abstractmethod
    def counts(self, texts: Sequence[Text]) -> list[int]:
        """Their numbers of tokens."""

    @abstractmethod
    def shown(self, record: Record) -> list[str]:
        """Lines with what a model sees of a record.  Raises DataError."""

    @abstractmethod
    def judged(self) -> list[str]:
        """Lines of `stats` about what is judged, or learnt."""

    def refused(self) -> dict[int, str]:
        """Reasons why a run refuses records, besides their length, by place of the record."""
        return self.texts()[1]

    def texts(self) -> tuple[dict[int, Text], dict[int, str]]:
        """The text of every record that has one, and the reasons of the others, by place of the record."""
        texts, faults = dict[int, Text](), dict[int, str]()
        for place, record in enumerate(self.records):
            try:
                texts[place] = self.text(record)
            except DataError as error:
                faults[place] = str(error)
        return texts, faults

    def of_limit(self, length: int) -> str:
        """ " of 512, too many", of a number of tokens."""
        limit = "" if self.max_tokens == ANY_LENGTH else f" of {self.max_tokens:,}"
        return f"{limit}{', too many' if length > self.max_tokens else ''}"


@dataclass(frozen=True, slots=True)
class Prompts(Source[tuple[str, bool]]):
    """Records of [data]."""

    tokenizer: PromptTokenizer | None = None
    form: PromptForm | None = None  # with a model
    check_of: CheckOf = lambda _: None

    @property
    def has_model(self) -> bool:
        """Whether texts can be made."""
        return self.form is not None

    def text(self, record: Record) -> tuple[str, bool]:
        """The prompt, and whether a chat template made it."""
        assert self.form is not None
        return self.form.text(record)

    def written(self, text: tuple[str, bool]) -> str:
        """The prompt."""
        return text[0]

    def counts(self, texts: Sequence[tuple[str, bool]]) -> list[int]:
        """Their numbers of tokens."""
        assert self.tokenizer is not None
        return self.tokenizer.lengths(texts)

    def shown(self, record: Record) -> list[str]:
        """Prompt, tokens, task and reference."""
        assert self.form is not None
        text, is_chat = self.text(record)
        (length,) = self.counts([(text, is_chat)])
        reference, task = self.form.reference(record), self.form.task(record)
        chat = ", chat template" if is_chat else ""
        head = f"{record.source}  {length:,} tokens{self.of_limit(length)}{chat}"
        tail = [f"  reference  {printable(_cut(reference))}"] + ([f"  task       {task}"] if task else [])
        return [head, *(f"  | {printable_line(line)}" for line in text.split("\n")), *tail]

    def refused(self) -> dict[int, str]:
        """Records without prompt, reference or task, and references that the task refuses."""
        assert self.form is not None
        faults, good = dict[int, str](), list[int]()
        for place, record in enumerate(self.records):
            try:
                self.form.checked_text(record)
            except DataError as error:
                faults[place] = str(error)
            else:
                good.append(place)
        tried = self._tried([self.records[place] for place in good], most_s=math.inf)
        return faults | {good[place]: why for place, why in tried.refused.items()}

    def judged(self) -> list[str]:
        """References and tasks."""
        assert self.form is not None
        found, faults, tasks = list[tuple[Record, str]](), list[str](), Counter[str]()
        for record in self.records:
            try:
                reference, task = self.form.reference(record), self.form.task(record)
            except DataError as error:
                faults.append(str(error))
            else:
                found.append((record, reference))
                tasks[task] += 1
        tried = self._tried([record for record, _ in found], most_s=MOST_S)
        num_good = sum(bool(text.strip()) for place, (_, text) in enumerate(found) if place not in tried.refused)
        least, mean, most = _spread([len(text) for _, text in found])
        share = f"{num_good / len(self.records):.1%}"
        lines = [f"references  {share} of records; characters: least {least}, mean {mean}, most {most}"]
        lines += _faults("references", faults)
        lines += _listed(f"references that are refused in {len(tried.refused):,} records:", [*tried.refused.values()])
        lines += _listed(f"references that are doubtful in {len(tried.doubted):,} records:", tried.doubted)
        if 0 < tried.num_checked < len(found):
            lines.append(f"tried       the first {tried.num_checked:,}, in {MOST_S:.0f} s")
        return lines + [f"task        {name}: {number:,}" for name, number in tasks.items() if name]

    def _tried(self, records: Sequence[Record], *, most_s: float) -> References:
        assert self.form is not None
        return try_references(records, self.form.reference_field, self.form.task, self.check_of, most_s=most_s)


@dataclass(frozen=True, slots=True)
class Conversations(Source[list[list[tuple[str, bool]]]]):
    """Records of [[demonstrations]]; a text is the parts of an answer, of preferences those of both."""

    form: DemonstrationForm = field(kw_only=True)
    tokenizer: PromptTokenizer = field(kw_only=True)
    noun: ClassVar[str] = "conversation"

    @property
    def has_model(self) -> bool:
        """A run file names one."""
        return True

    def text(self, record: Record) -> list[list[tuple[str, bool]]]:
        """Parts, told and learnt."""
        with keys_of_demonstrations():
            return self.form.all_parts(record)

    def written(self, text: list[list[tuple[str, bool]]]) -> str:
        """All parts."""
        return "\n".join("".join(part for part, _ in parts) for parts in text)

    def counts(self, texts: Sequence[list[list[tuple[str, bool]]]]) -> list[int]:
        """Tokens, of preferences those of the longer answer."""
        return [max(len(one.token_ids) for one in each.sequences) for each in self.form.joined(texts)]

    def shown(self, record: Record) -> list[str]:
        """The conversation, or both of a pair, with what is learnt in «»."""
        lines = []
        for one in self.form.joined([self.text(record)])[0].sequences:
            num, learnt = len(one.token_ids), int(np.count_nonzero(one.loss_mask))
            lines.append(f"{record.source}  {num:,} tokens{self.of_limit(num)}; {learnt:,} of them, in «», are learnt")
            lines += [f"  | {printable_line(line)}" for line in with_marks(one, self.tokenizer).split("\n")]
        return lines

    def judged(self) -> list[str]:
        """Tokens that are learnt."""
        made = self.form.joined([*self.texts()[0].values()])
        learnt = sum(int(np.count_nonzero(one.loss_mask)) for each in made for one in each.sequences)
        return [f"learnt      {learnt:,} tokens of {sum(len(o.token_ids) for e in made for o in e.sequences):,}"]


AnySource = Source[Any]


def sources_of(data: Path, model: Path | None, words: Sequence[str]) -> list[AnySource]:
    """Open the datasets of a run file, or the dataset at this path.  Raises ConfigError, DataError."""
    is_run_file = data.suffix == ".toml"
    legal = OPEN if is_run_file else ("data", "generation")
    for word in words:
        if word.partition(".")[0].strip() not in legal:
            option = "; the model is --model DIR" if word.startswith("model.") else ""
            also = "; demonstrations are those of a run file" if word.startswith("demonstrations.") else ""
            names = ", ".join(f"{section}.…" for section in legal)
            raise ConfigError(f"{word!r}: not a setting of `rlhpc data`; legal: {names}{option}{also}")
    if is_run_file:
        config = load_config(data, [*words, *([f"model.path={model}"] if model is not None else [])])
        tokenizer: PromptTokenizer | None = PromptTokenizer.of(config.model)
    else:
        config = _settings(data, words)
        if model is None and any(word.partition("=")[0].strip() not in _WHERE for word in words):
            raise ConfigError(f"{words[0]!r} sets the prompt; showing prompts needs --model DIR")
        tokenizer = PromptTokenizer(model.absolute()) if model is not None else None
    found: list[AnySource] = []
    if tokenizer is not None:
        for table in config.demonstrations:
            with keys_of_demonstrations():
                records = read_records(table.path, table.split)
            form, limit = DemonstrationForm(table, tokenizer), config.longest_conversation
            title = f"demonstrations, {table.path.name}"
            found.append(Conversations(title, records, limit, form=form, tokenizer=tokenizer))
    return [*found, *_prompts_of(config, tokenizer)]


def _prompts_of(config: Config, tokenizer: PromptTokenizer | None) -> Iterator[Prompts]:
    limit = config.generation.max_prompt_tokens
    has_dialogues = any(each.environment for each in config.data)
    dialogue = dialogue_template(config, tokenizer) if tokenizer is not None and has_dialogues else None
    for each in config.data:
        limits = {"max_prompt_tokens": each.max_prompt_tokens or limit, "max_completion_tokens": ANY_LENGTH}
        goes_on = dialogue if each.environment else None
        form = None if tokenizer is None else PromptForm(each, tokenizer, **limits, dialogue=goes_on)
        yield Prompts(
            each.title,
            records_of(each),
            limits["max_prompt_tokens"],
            tokenizer,
            form,
            lambda task: (
                composite_reference_check(task, config.composite, config.judge, config.sandbox, config.reward_model)
                if task
                else None
            ),
        )


def _settings(data: Path, words: Sequence[str]) -> Config:
    table = {"source": str(data)} if str(data).startswith(PREFIX) else {"path": str(data), "task": ""}
    document = document_without_run("data", table, {"max_prompt_tokens": ANY_LENGTH, "max_completion_tokens": 1})
    document["trainer"]["token_budget"] = 2 * ANY_LENGTH
    return settled(document, words, "rlhpc data")


# -------------------------------------------------------------------------------------------------------------- convert
#
# `rlhpc data convert`: write records in another form, filtered, or split into train and validation.
#
# Input: Source, options.  Output: files, and lines that say what was written.  A record's part depends on the record
# alone, so that it stays there when records are added or reordered.


def convert(source: AnySource, out: Path, options: argparse.Namespace) -> list[str]:
    """Write the selected records; return a line for each file.  Raises ConfigError, DataError, OSError."""
    parts = _files(out, options.validation)
    kept, refused = _kept(source, options)
    if not kept:
        why = f"; {refused[0]}" if refused else ""
        raise ConfigError(f"none of {len(source.records):,} records is within the bounds; nothing is written{why}")
    chosen: dict[Path, list[Record]] = {file: [] for file in parts.values()}
    for record in kept:
        chosen[parts[options.validation is not None and _draw(record) < options.validation]].append(record)
    for file, records in chosen.items():
        if not records:
            raise ConfigError(f"--validation {options.validation:g} of {len(kept):,} records leaves none for {file}")
    for file, records in chosen.items():
        write_records(file, [record.fields for record in records])
    left_out = len(source.records) - len(kept)
    said = [f"{file}: {len(records):,} records" for file, records in chosen.items()]
    said += [f"left out: {left_out:,}"] if left_out else []
    return said + _listed(f"of these {len(refused):,} that a run refuses:", refused, most=_REFUSED_SHOWN)


def _files(out: Path, validation: float | None) -> dict[bool, Path]:
    """Files to write, by whether they are for validation.  Raises ConfigError: one exists, or has another form."""
    if validation is None:
        if out.suffix not in WRITTEN:
            raise ConfigError(f"{out}: legal is a {' or '.join(WRITTEN)} file")
        parts = {False: out}
    else:
        if not 0 < validation < 1:
            raise ConfigError(f"--validation {validation:g}; legal: between 0 and 1")
        if out.suffix in WRITTEN:
            raise ConfigError(f"{out}: with --validation, OUT is a directory, for train.jsonl and validation.jsonl")
        parts = {False: out / "train.jsonl", True: out / "validation.jsonl"}
    for file in parts.values():
        if file.exists():
            raise ConfigError(f"{file} exists; nothing is overwritten")
    return parts


def _kept(source: AnySource, options: argparse.Namespace) -> tuple[list[Record], list[str]]:
    """Records to write, and why a run would refuse others that --valid leaves out."""
    bounds = {
        "tokens": (options.min_tokens, options.max_tokens),
        "characters": (options.min_characters, options.max_characters),
    }
    given = {what: pair for what, pair in bounds.items() if pair != (None, None)}
    if not given and not options.distinct and not options.valid:
        return list(source.records), []
    if not source.has_model:
        flags = ("--valid",) * options.valid + ("--distinct",) * options.distinct
        asks = flags[0] if flags else f"bounds of {next(iter(given))}"
        raise ConfigError(f"{asks}: of prompts, which need --model DIR")
    return _within(source, options, given)


def _within(
    source: AnySource, options: argparse.Namespace, given: Mapping[str, tuple[int | None, int | None]]
) -> tuple[list[Record], list[str]]:
    """Records to write, and why others are refused, as of _kept; given: bounds."""
    texts, faults = source.texts()
    if options.valid:
        faults = dict(sorted(source.refused().items()))
        texts = {place: text for place, text in texts.items() if place not in faults}
    if faults and not options.valid:
        first = next(iter(faults.values()))
        raise ConfigError(f"{len(faults):,} records make no {source.noun}: {first}; --valid leaves them out")
    characters = {place: len(source.written(text)) for place, text in texts.items()}
    tokens = (
        dict(zip(texts, source.counts([*texts.values()]), strict=True)) if "tokens" in given or options.valid else {}
    )
    if options.valid:  # as a run refuses them
        long = [place for place, length in tokens.items() if length > source.max_tokens]
        faults |= {place: f"{source.records[place].source}: {tokens[place]:,} tokens, too many" for place in long}
    lengths = {"tokens": tokens, "characters": characters}
    places = [
        place
        for place in texts
        if place not in faults
        and all(
            (low or 0) <= lengths[what][place] <= (math.inf if high is None else high)
            for what, (low, high) in given.items()
        )
    ]
    if options.distinct:  # the first of each text
        places = sorted({source.written(texts[place]): place for place in reversed(places)}.values())
    return [source.records[place] for place in places], [*faults.values()]


def _draw(record: Record) -> float:
    """Number from 0 to 1 that depends on the content of a record alone."""
    content = json.dumps(record.fields, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) / 2**64


# ------------------------------------------------------------------------------------------------------------- examples
#
# `rlhpc data head`: the first records, as fields or as prompts for a model.
#
# Input: Source.  Output: lines.

_LONGEST_VALUE = 100  # characters of a field


def first_records(source: AnySource, number: int) -> list[str]:
    """Lines with fields, or with a model what it sees of them; and the number of records."""
    shown = source.records[:number]
    blocks = [line for record in shown for line in (_seen(source, record) if source.has_model else _as_fields(record))]
    rest = len(source.records) - len(shown)
    return [*blocks, f"{len(source.records):,} records" + (f", {rest:,} not shown" if rest else "")]


def _as_fields(record: Record) -> list[str]:
    width = max(map(len, record.fields), default=0)
    return [record.source, *(f"  {name:<{width}}  {_value(value)}" for name, value in record.fields.items())]


def _seen(source: AnySource, record: Record) -> list[str]:
    try:
        return source.shown(record)
    except DataError as error:
        return [str(error)]


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return printable(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} … ({len(text):,} characters)"


# -------------------------------------------------------------------------------------------------------------- figures
#
# `rlhpc data stats`: statistics of a dataset, in a table.
#
# Input: Source.  Output: lines.

_FAULTS_SHOWN, _REFUSED_SHOWN = 3, 50


def figures(source: AnySource) -> list[str]:
    """Lines about records, fields, and with a model prompts and references, or conversations."""
    records = source.records
    whole = [json.dumps(record.fields, sort_keys=True, default=str) for record in records]
    lines = [f"records     {len(records):,}{_repeated(whole, 'the same as an earlier one')}", "", *_fields(source)]
    return lines + (["", *_lengths(source), *source.judged()] if source.has_model else [])


def _fields(source: AnySource) -> list[str]:
    names = dict.fromkeys(name for record in source.records for name in record.fields)
    rows = [("field", "is", "in records", "characters: least", "mean", "most", "values")]
    for name in names:
        values = [value for record in source.records if (value := record.fields.get(name)) is not None]
        texts = [each if isinstance(each, str) else json.dumps(each, sort_keys=True, default=str) for each in values]
        kinds = " or ".join(sorted({kind(value) for value in values})) or "null"
        share = f"{len(values) / len(source.records):.0%}"
        rows.append((name, kinds, share, *_spread([len(text) for text in texts]), f"{len(set(texts)):,}"))
    return aligned(rows)


def _spread(lengths: Sequence[int]) -> tuple[str, str, str]:
    if not lengths:
        return "", "", ""
    return f"{min(lengths):,}", f"{sum(lengths) / len(lengths):,.0f}", f"{max(lengths):,}"


def _lengths(source: AnySource) -> list[str]:
    """Lines about texts of records."""
    texts, faults = source.texts()
    lengths, noun = source.counts([*texts.values()]), f"{source.noun}s"
    lines = _faults(noun, [*faults.values()])
    if lengths:
        least, median, high, most = np.percentile(lengths, [0, 50, 95, 100])
        lines += [
            f"{noun:<11} {len(lengths):,}, tokens: least {least:,.0f}, median {median:,.0f}, "
            f"95 % up to {high:,.0f}, most {most:,.0f}; {sum(lengths):,} in all"
            f"{_repeated([source.written(each) for each in texts.values()], 'repeated')}"
        ]
        if source.max_tokens != ANY_LENGTH:
            longer = sum(length > source.max_tokens for length in lengths)
            lines.append(f"too long    {longer:,} of more than {source.max_tokens:,} tokens")
    return lines


def _faults(what: str, faults: Sequence[str]) -> list[str]:
    return _listed(f"no {what} in {len(faults):,} records:", faults)


def _listed(head: str, faults: Sequence[str], most: int = _FAULTS_SHOWN) -> list[str]:
    """The head and the first faults; [] if there are none."""
    more = [f"            and {len(faults) - most:,} more"] if len(faults) > most else []
    return [head, *(f"            {fault}" for fault in faults[:most]), *more] if faults else []


def _repeated(values: Sequence[Any], what: str) -> str:
    number = len(values) - len(set(values))
    return f"; {number:,} {what}" if number else ""


# -------------------------------------------------------------------------------------------------------------- command

_ONLY_CONVERT = ("min_tokens", "max_tokens", "min_characters", "max_characters", "distinct", "valid", "validation")
SHOWN = 3  # records that `head` shows by default


def look_at_dataset(options: argparse.Namespace) -> int:
    """Carry out the action: print, or write files.  Raises ConfigError, DataError."""
    overrides = [word for word in options.words if "=" in word]
    outputs = [Path(word) for word in options.words if "=" not in word]
    _refuse_options(options, outputs)
    sources = sources_of(options.data, options.model, overrides)
    if options.action == "convert":
        if len(sources) > 1:
            raise ConfigError(f"{options.data} has {len(sources)} datasets; give the file of one, or a run file of one")
        print("\n".join(convert(sources[0], outputs[0], options)))
        return 0
    number = SHOWN if options.records is None else options.records
    for source in sources:
        lines = first_records(source, number) if options.action == "head" else figures(source)
        head = [f"== {source.title}"] * (len(sources) > 1)
        print(escaped("\n".join([*head, *lines])))  # names of fields are foreign, too
    return 0


def _refuse_options(options: argparse.Namespace, outputs: list[Path]) -> None:
    """Raise ConfigError for an option of another action."""
    if options.action == "convert" and len(outputs) != 1:
        raise ConfigError("convert needs one OUT: a .jsonl or .parquet file, or with --validation a directory")
    if options.action != "convert":
        given = [name for name in _ONLY_CONVERT if getattr(options, name) not in (None, False)]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')}: for convert, and this is {options.action}")
        if outputs:
            raise ConfigError(f"{str(outputs[0])!r}: only convert has an OUT; a setting has the form data.key=value")
    if options.action != "head" and options.records is not None:
        raise ConfigError(f"--records {options.records}: for head, and this is {options.action}")
