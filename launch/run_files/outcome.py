"""Outcomes of an attempt, or of one run of a job between two requeues."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rlhpc.exit_status import EXIT_ALONE, EXIT_CONFIG, EXIT_FENCED


class Cause(enum.Enum):
    """Why it ended, what follows, and the exit status of the batch step."""

    COMPLETE = "complete", "end", 0
    UNCLEAN = "complete, but a rank did not exit cleanly", "end", 1
    STOP = "asked for by `rlhpc stop`", "end", 0
    ABORT = "asked for by `rlhpc stop --now`", "end", 1
    TIME = "this job is close to its time limit", "requeue", 0
    YIELD = "another job of the run is close to its time limit", "again", 0
    SIGNAL = "Slurm ended this job (scancel, preemption, node failure)", "leave", 143
    INTERRUPTED = "interrupted", "leave", 130
    FENCED = "a later attempt has taken over", "leave", EXIT_FENCED
    FAILED = "failed", "again", 1
    GIVEN_UP = "failed too often without a new checkpoint", "end", 1
    STALLED = "made no progress", "end", 1
    ALONE = "another role never connected", "end", EXIT_ALONE
    SETTINGS = "invalid settings", "end", EXIT_CONFIG
    COMPONENT = "a component was cancelled", "end", 1
    UNRECORDED = "this job has no record: its submission was abandoned", "leave", 1

    def __init__(self, words: str, follows: str, status: int) -> None:
        """follows: "end" all jobs of the run; "requeue" this job; try "again" in this job; "leave": only exit."""
        self.words, self.follows, self.status = words, follows, status


@dataclass
class Outcome:
    """How an attempt or a job ended: the cause, and details for people."""

    cause: Cause
    text: str  # never empty
    status: int | None = None  # as in a shell, of the process that failed, or of a stopped controller that did

    def __post_init__(self) -> None:
        """Without details, the text of the cause."""
        self.text = self.text.strip() or self.cause.words
