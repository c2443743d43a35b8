"""Outcomes of an attempt, or of one run of a job between two requeues."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Cause(enum.Enum):
    """Why it ended: in words, and what follows."""

    COMPLETE = "complete", "end", 0
    UNCLEAN = "complete, but a rank did not end well", "end", 1
    STOP = "asked for by `rlhpc stop`", "end", 0
    ABORT = "ABORT was asked for", "end", 1
    TIME = "the time of this job is nearly over", "requeue", 0
    YIELD = "the time of another job of the run is nearly over", "again", 0
    SIGNAL = "Slurm ended this job (scancel, pre-emption, a dead node)", "leave", 143
    FENCED = "a later attempt has taken over", "leave", 1
    FAILED = "failed", "again", 1
    GIVEN_UP = "failed too often without a new checkpoint", "end", 1
    STALLED = "made no progress", "end", 1
    ALONE = "another role never came", "end", 5
    SETTINGS = "the settings are at fault", "end", 2
    COMPONENT = "a component was cancelled", "end", 1
    UNRECORDED = "nobody has recorded this job: its submission was given up", "leave", 1

    def __init__(self, words: str, follows: str, status: int) -> None:
        """follows: "end": of all jobs of the run; "requeue": another life; "again": an attempt in this one; "leave"."""
        self.words, self.follows, self.status = words, follows, status


@dataclass
class Outcome:
    """A cause and its story."""

    cause: Cause
    text: str  # never empty

    def __post_init__(self) -> None:
        """Where nobody has given a reason the cause is one."""
        self.text = self.text.strip() or self.cause.words
