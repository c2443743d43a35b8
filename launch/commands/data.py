"""`rlhpc data head|stats|convert`.

Input: options.  Output: lines, or files.  A plain file shows its fields; with a model, or keys of [data], its prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.common.text import aligned, escaped, printable, printable_line
from launch.evaluate.request import document_without_run
from rlhpc.config.file import load_config, settled
from rlhpc.config.rules import Config
from rlhpc.config.tables import DataConfig
from rlhpc.data.files import WRITTEN, kind, write_records
from rlhpc.data.prompt_form import PromptForm
from rlhpc.data.prompts import dialogue_template
from rlhpc.data.record_source import PREFIX, Record, records_of
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import ConfigError, DataError

# --------------------------------------------------------------------------------------------------------------- source
#
# The dataset of `rlhpc data`: its records, and with a model the prompts made of them.
#
# Input: a dataset or a run file, a model, settings.  Output: Sources.

OPEN = ("data", "generation")  # sections that overrides may change
_WHERE = tuple(f"data.{key}" for key in ("split", "size", "source_seed", "levels", "settings"))
ANY_LENGTH = 1 << 40  # tokens


@dataclass(frozen=True, slots=True)
class Source:
    """Records, and their prompts if a model is given."""

    data: DataConfig
    records: Sequence[Record]
    tokenizer: PromptTokenizer | None
    form: PromptForm | None  # with a model
    max_prompt_tokens: int  # ANY_LENGTH: no limit was given

    def prompts(self) -> tuple[list[tuple[str, bool] | None], list[str]]:
        """Return the text of every prompt, None for a record without, and the reasons; needs a model."""
        assert self.form is not None
        texts: list[tuple[str, bool] | None] = []
        faults = []
        for record in self.records:
            try:
                texts.append(self.form.text(record))
            except DataError as error:
                texts.append(None)
                faults.append(str(error))
        return texts, faults

    def lengths(self, texts: Sequence[tuple[str, bool] | None]) -> list[int | None]:
        """Numbers of tokens of prompts; needs a model."""
        assert self.tokenizer is not None
        counted = iter(self.tokenizer.lengths([text for text in texts if text is not None]))
        return [None if text is None else next(counted) for text in texts]


def sources_of(data: Path, model: Path | None, words: Sequence[str]) -> list[Source]:
    """Open the datasets of a run file, or the dataset at this path.  Raises ConfigError, DataError."""
    for word in words:
        if word.partition(".")[0].strip() not in OPEN:
            option = "; the model is --model DIR" if word.startswith("model.") else ""
            legal = ", ".join(f"{section}.…" for section in OPEN)
            raise ConfigError(f"{word!r}: not a setting of `rlhpc data`; legal: {legal}{option}")
    if data.suffix == ".toml":
        config = load_config(data, [*words, *([f"model.path={model}"] if model is not None else [])])
        tokenizer: PromptTokenizer | None = PromptTokenizer.of(config.model)
    else:
        config = _settings(data, words)
        if model is None and any(word.partition("=")[0].strip() not in _WHERE for word in words):
            raise ConfigError(f"{words[0]!r} sets the prompt; showing prompts needs --model DIR")
        tokenizer = PromptTokenizer(model.absolute()) if model is not None else None
    limit = config.generation.max_prompt_tokens
    has_dialogues = any(each.environment for each in config.data)
    dialogue = dialogue_template(config, tokenizer) if tokenizer is not None and has_dialogues else None
    found = []
    for each in config.data:
        limits = {"max_prompt_tokens": each.max_prompt_tokens or limit, "max_completion_tokens": ANY_LENGTH}
        goes_on = dialogue if each.environment else None
        form = None if tokenizer is None else PromptForm(each, tokenizer, **limits, dialogue=goes_on)
        found.append(Source(each, records_of(each), tokenizer, form, limits["max_prompt_tokens"]))
    return found


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


def convert(source: Source, out: Path, options: argparse.Namespace) -> list[str]:
    """Write the selected records; return a line for each file.  Raises ConfigError, DataError, OSError."""
    parts = _files(out, options.validation)
    kept = _kept(source, options)
    if not kept:
        raise ConfigError(f"none of {len(source.records):,} records is within the bounds; nothing is written")
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
    return said + ([f"left out: {left_out:,}"] if left_out else [])


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


def _kept(source: Source, options: argparse.Namespace) -> list[Record]:
    bounds = {
        "tokens": (options.min_tokens, options.max_tokens),
        "characters": (options.min_characters, options.max_characters),
    }
    given = {what: pair for what, pair in bounds.items() if pair != (None, None)}
    if not given and not options.distinct:
        return list(source.records)
    if source.form is None:
        asks = "--distinct" if options.distinct else f"bounds of {next(iter(given))}"
        raise ConfigError(f"{asks}: of prompts, which need --model DIR")
    texts, faults = source.prompts()
    if faults:
        raise ConfigError(f"{len(faults):,} records make no prompt: {faults[0]}")
    characters = [len(text[0]) for text in texts if text is not None]
    tokens = [length or 0 for length in source.lengths(texts)] if "tokens" in given else characters
    lengths = {"tokens": tokens, "characters": characters}
    places = [
        place
        for place in range(len(texts))
        if all(
            (low or 0) <= lengths[what][place] <= (math.inf if high is None else high)
            for what, (low, high) in given.items()
        )
    ]
    if options.distinct:  # the first of each text
        places = sorted({texts[place]: place for place in reversed(places)}.values())
    return [source.records[place] for place in places]


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


def first_records(source: Source, number: int) -> list[str]:
    """Lines with fields, or with a model prompt, tokens, task and reference; and the number of records."""
    shown = source.records[:number]
    blocks = [line for record in shown for line in (_as_prompt(source, record) if source.form else _as_fields(record))]
    rest = len(source.records) - len(shown)
    return [*blocks, f"{len(source.records):,} records" + (f", {rest:,} not shown" if rest else "")]


def _as_fields(record: Record) -> list[str]:
    width = max(map(len, record.fields), default=0)
    return [record.source, *(f"  {name:<{width}}  {_value(value)}" for name, value in record.fields.items())]


def _as_prompt(source: Source, record: Record) -> list[str]:
    assert source.form is not None
    try:
        text, is_chat = source.form.text(record)
        (length,) = source.lengths([(text, is_chat)])
        reference, task = source.form.reference(record), source.form.task(record)
    except DataError as error:
        return [str(error)]
    limit = "" if source.max_prompt_tokens == ANY_LENGTH else f" of {source.max_prompt_tokens:,}"
    over = "" if length is not None and length <= source.max_prompt_tokens else ", too many"
    head = f"{record.source}  {length:,} tokens{limit}{over}{', chat template' if is_chat else ''}"
    tail = [f"  reference  {printable(_cut(reference))}"] + ([f"  task       {task}"] if task else [])
    return [head, *(f"  | {printable_line(line)}" for line in text.split("\n")), *tail]


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

_FAULTS_SHOWN = 3


def figures(source: Source) -> list[str]:
    """Lines about records, fields, and with a model prompts and references."""
    records = source.records
    whole = [json.dumps(record.fields, sort_keys=True, default=str) for record in records]
    lines = [f"records     {len(records):,}{_repeated(whole, 'the same as an earlier one')}", "", *_fields(source)]
    return lines + (["", *_prompts(source)] if source.form is not None else [])


def _fields(source: Source) -> list[str]:
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


def _prompts(source: Source) -> list[str]:
    texts, faults = source.prompts()
    lengths = [length for length in source.lengths(texts) if length is not None]
    lines = _faults("prompts", faults)
    if lengths:
        least, median, high, most = np.percentile(lengths, [0, 50, 95, 100])
        lines += [
            f"prompts     {len(lengths):,}, tokens: least {least:,.0f}, median {median:,.0f}, "
            f"95 % up to {high:,.0f}, most {most:,.0f}; {sum(lengths):,} in all"
            f"{_repeated([each[0] for each in texts if each is not None], 'repeated')}"
        ]
        if source.max_prompt_tokens != ANY_LENGTH:
            longer = sum(length > source.max_prompt_tokens for length in lengths)
            lines.append(f"too long    {longer:,} of more than {source.max_prompt_tokens:,} tokens")
    return lines + _references(source)


def _references(source: Source) -> list[str]:
    assert source.form is not None
    found, faults, tasks = list[str](), list[str](), Counter[str]()
    for record in source.records:
        try:
            found.append(source.form.reference(record))
            tasks[source.form.task(record)] += 1
        except DataError as error:
            faults.append(str(error))
    share = len([each for each in found if each.strip()]) / len(source.records)
    least, mean, most = _spread([len(each) for each in found])
    lines = [f"references  {share:.1%} of records; characters: least {least}, mean {mean}, most {most}"]
    lines += _faults("references", faults)
    return lines + [f"task        {name}: {number:,}" for name, number in tasks.items() if name]


def _faults(what: str, faults: Sequence[str]) -> list[str]:
    if not faults:
        return []
    more = [f"            and {len(faults) - _FAULTS_SHOWN:,} more"] if len(faults) > _FAULTS_SHOWN else []
    head = f"no {what} in {len(faults):,} records:"
    return [head, *(f"            {fault}" for fault in faults[:_FAULTS_SHOWN]), *more]


def _repeated(values: Sequence[Any], what: str) -> str:
    number = len(values) - len(set(values))
    return f"; {number:,} {what}" if number else ""


# -------------------------------------------------------------------------------------------------------------- command

_ONLY_CONVERT = ("min_tokens", "max_tokens", "min_characters", "max_characters", "distinct", "validation")
SHOWN = 3  # records that `head` shows by default


def look_at_dataset(options: argparse.Namespace) -> int:
    """Carry out the action: print, or write files.  Raises ConfigError, DataError."""
    overrides = [word for word in options.words if "=" in word]
    outputs = [Path(word) for word in options.words if "=" not in word]
    _refuse_options(options, outputs)
    sources = sources_of(options.data, options.model, overrides)
    if options.action == "convert":
        if len(sources) > 1:
            raise ConfigError(f"{options.data} has {len(sources)} datasets; give the file of one")
        print("\n".join(convert(sources[0], outputs[0], options)))
        return 0
    number = SHOWN if options.records is None else options.records
    for source in sources:
        lines = first_records(source, number) if options.action == "head" else figures(source)
        head = [f"== {source.data.title}"] * (len(sources) > 1)
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
