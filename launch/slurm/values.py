"""Values printed by Slurm's commands: durations and array tasks.

Input: text.  Output: numbers.  Pure; Python 3.9 and the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


def duration_s(text: str) -> int | None:
    """Seconds of [DAYS-][HOURS:]MINUTES:SECONDS; None for UNLIMITED, INVALID, NOT_SET, N/A."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def is_unlimited(text: str) -> bool:
    """True if Slurm says that there is no limit; INVALID and NOT_SET mean unknown."""
    return text.strip() == "UNLIMITED"


def task_numbers(text: str) -> list[int]:
    """Array tasks of "0,2-4,8-12:2%2": 0, 2, 3, 4, 8, 10, 12.  Slurm may cut a long list off, with or without "...".

    What was cut is not there; where every task counts, squeue is asked with --array.
    """
    tasks: list[int] = []
    for part in text.partition("%")[0].split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is not None:
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            tasks += range(first, last + 1, step)
    return tasks


def tasks_in_words(tasks: Iterable[int]) -> str:
    """The inverse: "0,2-4" for 0, 2, 3, 4."""
    spans: list[list[int]] = []
    for task in sorted(set(tasks)):
        if spans and task == spans[-1][1] + 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
