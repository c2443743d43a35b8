"""`rlhpc data head`: the first records as they are, or as a model sees them.

Input: Source.  Output: lines.
"""

from __future__ import annotations

import json
from typing import Any

from launch.commands.dataset.source import ANY_LENGTH, Source
from launch.common.text_table import printable, printable_line
from rlhpc.data.records import Record
from rlhpc.errors import DataError

_LONGEST_VALUE = 100  # characters of a field


def first_records(source: Source, number: int) -> list[str]:
    """Fields, or with a model prompt, tokens, task and reference; and how many records there are."""
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
