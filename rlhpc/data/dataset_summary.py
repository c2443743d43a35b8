"""Statistics of a dataset, after making all its prompts and references.

Input: records, and how to make prompts from them.  Output: DatasetSummary; a DataError for a record that gives none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhpc.data.prompt_form import PromptForm
from rlhpc.data.records import Record
from rlhpc.data.references import CheckOf, refuse_bad_references

# Where models that see or hear have it inserted; others read the word.
_PLACE = re.compile(r"<(image|img|video|audio)>|<\|(image_pad|vision_start|image|video_pad|audio)\|>|\[IMG\]")
_PICTURES = re.compile(r"(?i)(image|picture|video|audio|pixel_value)s?$")
_CHECKED_AT_ONCE = 20_000  # records; as many references are counted in tokens


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """Plain values, which are kept between commands."""

    num_records: int
    longest_prompt_tokens: int
    mean_prompt_tokens: float
    longest_source: str  # file and line of the longest prompt
    example: str  # the first prompt, as the tokenizer gets it
    example_source: str
    example_tokens: int
    num_references_counted: int  # those of the first records that are text
    num_references_longer: int  # of them, than a completion may be
    num_references_checked: int = 0  # by their tasks; all, where tasks check them and there is time
    num_spelling_control: int = 0  # records whose own text spells special tokens
    spelling_control: str = ""  # file and line of the first of them, and the token
    highest_token: int = -1  # of all prompts
    highest_source: str = ""  # file and line of its prompt
    last_token: int = -1  # of the first prompt
    num_distinct: int = 0  # prompts that differ from each other
    num_showing_reference: int = 0  # records whose prompt tells the answer that is looked for
    num_with_pictures: int = 0  # records whose text has a place for a picture, a video or a sound
    picture_field: str = ""  # of the first of them that has one beside it


def summarise(records: Sequence[Record], form: PromptForm, check_of: CheckOf | None = None) -> DatasetSummary:
    """Make every prompt and reference once; check_of: task → its check of references.

    Raises DataError for one that fails, with the number of those that are too long, or naming the first bad references.
    """
    form.refuse_unknown_task_field(records)
    lengths, tokens, distinct = list[int](), list[int](), set[int]()
    for first in range(0, len(records), _CHECKED_AT_ONCE):
        texts = form.texts(records[first : first + _CHECKED_AT_ONCE])
        some, highest = form.measured(texts)
        lengths += some
        tokens += highest
        distinct.update(hash(text) for text, _ in texts)
    form.refuse_lengths(lengths, records)
    checked = 0 if check_of is None else refuse_bad_references(records, form.reference_field, form.task, check_of)
    references = form.reference_lengths(records[:_CHECKED_AT_ONCE])
    longest, highest_place = int(np.argmax(lengths)), int(np.argmax(tokens))
    spelling = [f"{record.source} {token!r}" for record in records if (token := form.spelt_control(record))]
    pictured = [record for record in records if any(map(_PLACE.search, form.own_texts(record)))]
    return DatasetSummary(
        num_records=len(lengths),
        longest_prompt_tokens=lengths[longest],
        mean_prompt_tokens=float(np.mean(lengths)),
        longest_source=records[longest].source,
        example=form.text(records[0])[0],
        example_source=records[0].source,
        example_tokens=lengths[0],
        num_references_counted=len(references),
        num_references_longer=sum(length > form.max_completion_tokens for length in references),
        num_references_checked=checked,
        num_spelling_control=len(spelling),
        spelling_control=spelling[0] if spelling else "",
        highest_token=tokens[highest_place],
        highest_source=records[highest_place].source,
        last_token=int(form.tokens(records[0])[-1]),
        num_distinct=len(distinct),
        num_showing_reference=sum(map(form.shows_reference, records)),
        num_with_pictures=len(pictured),
        picture_field=next(filter(None, map(_picture_field, pictured)), ""),
    )


def _picture_field(record: Record) -> str:
    return next((name for name in record.fields if _PICTURES.search(name)), "")
