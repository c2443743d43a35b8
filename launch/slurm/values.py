"""Values printed by Slurm's commands: durations and array tasks.

Input: text.  Output: numbers.  Pure; Python 3.9 and the standard library.
"""

from __future__ import annotations

import re

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
    """Array tasks of "0,2-4%2": 0, 2, 3, 4.  Slurm truncates a long list with "...", which is ignored."""
    tasks: list[int] = []
    for part in text.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            tasks += range(int(first), int(last or first) + 1)
    return tasks
