"""Check every reference before a run: if its task cannot read one, no completion gets a verdict.

Input: records, and what the task checks a reference with.  Output: how many were checked; a DataError that shows the
first bad ones, each with its line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlhpc.config_data import OWN_REWARD
from rlhpc.data.records import Record
from rlhpc.errors import DataError

ReferenceCheck = Callable[[str], None]  # raises ValueError, which says what is legal
CheckOf = Callable[[str], ReferenceCheck | None]  # by task; None: it checks none
MOST_S = 60.0  # for the references of a dataset: mathematics takes some milliseconds each
_MOST_SHOWN = 5
_SHOWN_CHARACTERS = 1000


def refuse_bad_references(
    records: Sequence[Record],
    field: str,
    task_of: Callable[[Record], str],
    check_of: CheckOf,
    *,
    most_s: float = MOST_S,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Return how many records were checked: all, or as many as `most_s` seconds allow; none of a task without a check.

    An environment that rewards by itself has no use for a reference.

    Raises DataError: a record has no such field, or the first references that are refused, a line each.
    """
    faults, checks = list[str](), dict[str, ReferenceCheck | None]()
    num_bad, num_checked, end = 0, 0, clock() + most_s
    for record in records:
        if (task := task_of(record)) == OWN_REWARD:
            continue
        reference = record.reference(field)
        if task not in checks:
            checks[task] = check_of(task)
        if (check := checks[task]) is None or clock() > end:
            continue
        num_checked += 1
        try:
            check(reference)
        except (ValueError, RecursionError) as error:  # JSON of thousands of levels
            num_bad += 1
            if len(faults) < _MOST_SHOWN:
                faults.append(_fault(record, field, task, error))
    if num_bad:
        rest = f"and {num_bad - len(faults)} more of {num_checked} records"
        raise DataError("\n".join([*faults, *([rest] if num_bad > len(faults) else [])]))
    return num_checked


def _fault(record: Record, field: str, task: str, error: Exception) -> str:
    why = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
    return f"{record.source}: field {field!r} (data.reference_field), for data.task={task!r}: {why}"
