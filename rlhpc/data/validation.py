"""Statistics of a dataset, after making all its prompts and references.

Input: records, and how to make prompts from them.  Output: DatasetSummary; a DataError for a record that gives none.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

import rlhpc
from rlhpc.base.own_tools import told_tools
from rlhpc.config.rules import Config
from rlhpc.config.tables import OWN_REWARD
from rlhpc.data.files import dataset_files
from rlhpc.data.prompt_form import PromptForm
from rlhpc.data.record_source import Record, cached, library_version
from rlhpc.protocol.errors import DataError

# ----------------------------------------------------------------------------------------------------------- references
#
# Check every reference before a run: if its task cannot read one, no completion gets a verdict.
#
# Input: records, and the check of their task.  Output: References; a DataError that shows the first bad ones, each with
# its line.

ReferenceCheck = Callable[[str], str | None]  # raises ValueError, which says what is legal; may return a doubt
CheckOf = Callable[[str], ReferenceCheck | None]  # by task; None: it checks none
MOST_S = 60.0  # for the references of a dataset: mathematics takes some milliseconds each
_MOST_SHOWN = 5
_SHOWN_CHARACTERS = 1000


@dataclass(slots=True)
class References:
    """Findings of the checks of tasks about the references of a dataset."""

    num_checked: int = 0
    refused: dict[int, str] = field(default_factory=dict)  # by place of the record: why, with its line
    doubted: list[str] = field(default_factory=list)  # those that are read, with their lines


def try_references(
    records: Sequence[Record],
    field: str,
    task_of: Callable[[Record], str],
    check_of: CheckOf,
    *,
    most_s: float = MOST_S,
    clock: Callable[[], float] = time.monotonic,
) -> References:
    """Try as many as `most_s` seconds allow; tasks without a check are left out.

    An environment that rewards by itself needs no reference.

    Raises DataError: a record has no such field.
    """
    found, checks, end = References(), dict[str, ReferenceCheck | None](), clock() + most_s
    for place, record in enumerate(records):
        if (task := task_of(record)) == OWN_REWARD:
            continue
        reference = record.reference(field)
        if task not in checks:
            checks[task] = check_of(task)
        if (check := checks[task]) is None or clock() > end:
            continue
        found.num_checked += 1
        try:
            doubt = check(reference)
        except (ValueError, RecursionError) as error:  # JSON of thousands of levels
            found.refused[place] = _fault(record, field, task, error)
        else:
            found.doubted += [f"{record.source}: {doubt}"] if doubt else []
    return found


def refuse_bad_references(
    records: Sequence[Record],
    field: str,
    task_of: Callable[[Record], str],
    check_of: CheckOf,
    *,
    most_s: float = MOST_S,
    clock: Callable[[], float] = time.monotonic,
) -> References:
    """Try references.  Raises DataError: as try_references; or the first refused references, a line each."""
    found = try_references(records, field, task_of, check_of, most_s=most_s, clock=clock)
    if faults := list(found.refused.values()):
        shown = faults[:_MOST_SHOWN]
        rest = f"and {len(faults) - len(shown)} more of {found.num_checked} records"
        raise DataError("\n".join([*shown, *([rest] if len(faults) > len(shown) else [])]))
    return found


def _fault(record: Record, field: str, task: str, error: Exception) -> str:
    why = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
    where = f"field {field!r} (data.reference_field)" if field else 'data.reference_field=""'
    return f"{record.source}: {where}, for data.task={task!r}: {why}"


# ------------------------------------------------------------------------------------------------------- faulty records
#
# Records of which nothing can be made, counted: one message for all of them, in place of a message for the first.


Made = TypeVar("Made")
_MOST_KINDS = 5  # of faults in a message
_SURE = 100  # first records that are all faulty: a key is wrong, and not they


class FaultyRecords:
    """Tries records one after the other, and refuses all faulty ones together."""

    def __init__(self) -> None:
        """None so far."""
        self._sources: dict[str, list[str]] = {}  # by fault
        self._num_tried = self._num_faulty = 0

    def tried(self, make: Callable[[Record], Made], record: Record) -> Made | None:
        """make(record); None if it raises a DataError, which is kept.  Raises it if no record was without a fault."""
        self._num_tried += 1
        try:
            return make(record)
        except DataError as error:
            self._num_faulty += 1
            self._sources.setdefault(str(error).removeprefix(f"{record.source}: "), []).append(record.source)
            if self._num_faulty == self._num_tried == _SURE:
                self.refuse()
            return None

    def refuse(self) -> None:
        """Raise DataError if there is a fault: the first of each kind, with their number unless all have it."""
        if not self._num_faulty:
            return
        first = next(iter(self._sources.items()))
        if self._num_faulty == self._num_tried:
            raise DataError(_said(*first))
        lines = [f"{_said(*each)} {self._where(each[1])}" for each in list(self._sources.items())[:_MOST_KINDS]]
        if len(self._sources) > 1:
            lines.append(f"{self._num_faulty:,} of {self._num_tried:,} records are faulty")
        raise DataError("\n".join(lines) + "; `rlhpc data convert RUN.toml OUT --valid` leaves such records out")

    def _where(self, sources: Sequence[str]) -> str:
        """ "(3 of 50 records, also train.jsonl:12, …)"."""
        others = ", ".join(Path(each).name for each in sources[1:_MOST_SHOWN])
        more = ", …" if len(sources) > _MOST_SHOWN else ""
        also = f", also {others}{more}" if others else ""
        return f"({len(sources):,} of {self._num_tried:,} records{also})"


def _said(why: str, sources: Sequence[str]) -> str:
    return why if why.startswith(sources[0]) else f"{sources[0]}: {why}"


# ------------------------------------------------------------------------------------------------------ dataset summary


# Placeholders of pictures and sounds in multimodal models; other models read the word.
_PLACE = re.compile(r"<(image|img|video|audio)>|<\|(image_pad|vision_start|image|video_pad|audio)\|>|\[IMG\]")
_PICTURES = re.compile(r"(?i)(image|picture|video|audio|pixel_value)s?$")
TOOLS_FIELDS = ("tools", "functions", "available_tools")  # usual names of a field with schemas of tools
_CHECKED_AT_ONCE = 20_000  # records; as many references are counted in tokens


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """Statistics of a dataset; plain values, which are cached between commands."""

    num_records: int
    longest_prompt_tokens: int
    mean_prompt_tokens: float
    longest_source: str  # file and line of the longest prompt
    example: str  # the first prompt, as the tokenizer gets it
    example_source: str
    example_tokens: int
    num_references_counted: int  # text references of the first records
    num_references_longer: int  # of these, longer than a completion may be
    num_references_checked: int = 0  # by their tasks; all, where tasks check them and there is time
    num_spelling_control: int = 0  # records whose own text spells special tokens
    spelling_control: str = ""  # file and line of the first of them, and the token
    highest_token: int = -1  # of all prompts
    highest_source: str = ""  # file and line of its prompt
    last_token: int = -1  # of the first prompt
    num_distinct: int = 0  # prompts that differ from each other
    num_showing_reference: int = 0  # records whose prompt contains the answer
    num_with_pictures: int = 0  # records whose text has a place for a picture, a video or a sound
    picture_field: str = ""  # field with the picture, of the first such record that has one
    num_references_doubted: int = 0
    doubted_reference: str = ""  # the first of them: file, line and why
    tools_field: str = ""  # field with schemas of tools, which prompts do not tell of


def summarise(records: Sequence[Record], form: PromptForm, check_of: CheckOf | None = None) -> DatasetSummary:
    """Make every prompt and reference once; check_of: task → its check of references.

    Raises DataError for prompts that fail, with their number, for too long ones, or naming the first bad references.
    """
    form.refuse_unknown_task_field(records)
    lengths, tokens, distinct = list[int](), list[int](), set[int]()
    faulty = FaultyRecords()
    for first in range(0, len(records), _CHECKED_AT_ONCE):
        made = [faulty.tried(form.checked_text, record) for record in records[first : first + _CHECKED_AT_ONCE]]
        texts = [text for text in made if text is not None]
        some, highest = form.measured(texts)
        lengths += some
        tokens += highest
        distinct.update(hash(text) for text, _ in texts)
    faulty.refuse()
    form.refuse_lengths(lengths, records)
    tried = References()
    if check_of is not None:
        tried = refuse_bad_references(records, form.reference_field, form.task, check_of)
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
        num_references_checked=tried.num_checked,
        num_references_doubted=len(tried.doubted),
        doubted_reference=next(iter(tried.doubted), ""),
        num_spelling_control=len(spelling),
        spelling_control=spelling[0] if spelling else "",
        highest_token=tokens[highest_place],
        highest_source=records[highest_place].source,
        last_token=int(form.tokens(records[0])[-1]),
        num_distinct=len(distinct),
        num_showing_reference=sum(map(form.shows_reference, records)),
        num_with_pictures=len(pictured),
        picture_field=next(filter(None, map(_picture_field, pictured)), ""),
        tools_field=next((name for name in TOOLS_FIELDS if any(_has_schemas(each, name) for each in records)), ""),
    )


def _has_schemas(record: Record, name: str) -> bool:
    value = record.fields.get(name)
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _picture_field(record: Record) -> str:
    return next((name for name in record.fields if _PICTURES.search(name)), "")


# ------------------------------------------------------------------------------------------------------- checked before
#
# Cache the check of a dataset until its files, the tokenizer, the settings or the code change.
#
# Input: Config.  Output: DatasetSummary.  Files are identified by path, size, times and inode, without reading them, so
# that a million prompts are checked only once.  Faults are not cached.

CODE_FILES = ("data/*.py", "rewards/*.py", "protocol/environment.py")  # the code that determines the result
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def once(config: Config, place: int, with_references: bool, look: Callable[[], DatasetSummary]) -> DatasetSummary:
    """Return look()'s result for one dataset of a run, cached if possible.  Raises as `look`.

    with_references: whether tasks check their references.
    """
    data = config.data[place]
    files = dataset_files(data.path, data.split) if data.path is not None else []
    package = Path(rlhpc.__file__).parent
    made_of = {
        "data": data.model_dump(mode="json"),
        "references": with_references,
        "task_tables": [
            table.model_dump(mode="json")
            for table in (config.judge, config.instructions, config.math, config.text, config.sandbox)
        ],
        "template": states_of([Path(config.judge.template_file)] if config.judge.template_file else []),
        "composites": {name: table.model_dump(mode="json") for name, table in config.composite.items()},
        "tools": told_tools(config.environment.tools, config.tool_servers).schemas if data.environment else (),
        "curriculum": config.curriculum.model_dump(mode="json"),
        "generation": [config.generation.max_prompt_tokens, config.generation.max_completion_tokens],
        "files": states_of(files),
        "library": library_version() if data.source else "",
        "chat_template_kwargs": config.model.chat_template_kwargs,
        "tokenizer": states_of(config.model.path / name for name in TOKENIZER_FILES),
        "code": states_of(file for part in CODE_FILES for file in sorted(package.glob(part))),
    }
    found = cached("datasets", json.dumps(made_of), lambda: json.dumps(asdict(look())).encode(), is_whole=_is_summary)
    return DatasetSummary(**json.loads(found))


def _is_summary(content: bytes) -> bool:
    try:
        DatasetSummary(**json.loads(content))
    except (TypeError, ValueError):
        return False
    return True


def states_of(files: Iterable[Path]) -> list[tuple[str, int, int, int, int]]:
    """States of the files that exist; ctime cannot be set back."""
    states = ((file, file.stat()) for file in files if file.exists())
    return [(str(file), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for file, s in states]
