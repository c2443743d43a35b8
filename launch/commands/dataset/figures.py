"""`rlhpc data stats`: what a dataset consists of, in a table.

Input: Source.  Output: lines.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.commands.dataset.source import ANY_LENGTH, Source
from launch.common.text_table import aligned
from rlhpc.data.row_formats import kind
from rlhpc.errors import DataError

_FAULTS_SHOWN = 3


def figures(source: Source) -> list[str]:
    """Records, fields, and with a model prompts and references."""
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
