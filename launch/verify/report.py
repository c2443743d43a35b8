"""The result of an audit: for each check, the examined items and the violations.

Independent of files.  All violations are counted but kept up to a limit, so that a ruined run fits into memory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# ------------------------------------------------------------------------------------------------------------- run rows
#
# The rows of `rlhpc check RUN_DIR`: the result for one item.


ReadProgress = Callable[[str], None]  # called with the file being read


class FileVerdict(enum.Enum):
    """Verdict of a row."""

    SOUND = "sound"
    NOTE = "note"  # no relevant damage
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Row:
    """One checked item."""

    # settings, inputs, attempts, checkpoints, segments, journal, events, partials, replay, leftovers
    part: str
    name: str
    verdict: FileVerdict
    text: str


def listed(numbers: list[int]) -> str:
    """The first ten."""
    return f"{', '.join(map(str, numbers[:10]))}{' …' if numbers[10:] else ''}"


def from_to(paths: Sequence[Path]) -> str:
    """Names of consecutive files: first and last, or the only one."""
    first, last = paths[0].stem, paths[-1].stem
    return first if first == last else f"{first} to {last}"


# --------------------------------------------------------------------------------------------------------------- report


MOST_KEPT = 1000  # offences of a check


class CheckVerdict(enum.Enum):
    """The result of a check."""

    HOLDS = "holds"
    REMARK = "remark"  # true, allowed, and worth knowing
    VIOLATED = "violated"
    UNSEEN = "not looked at"


@dataclass(frozen=True, slots=True)
class Offence:
    """A violation and its place; -1 and "": without such a number, or file."""

    text: str
    group: int = -1
    step: int = -1
    sample: int = -1
    file: str = ""  # relative to the run directory
    row: int = -1  # of `groups` or `rollouts` in a segment, of `rollouts` in the journal; a line, from 1, of events
    forbids_going_on: bool = False  # a resume from the newest checkpoint would train a group or step a second time


@dataclass(slots=True)
class Check:
    """A named rule on the history of a run."""

    name: str
    looked_at: str = ""  # examined items, in words and counts
    remarks: list[str] = field(default_factory=list)
    offences: list[Offence] = field(default_factory=list)
    num_offences: int = 0
    is_seen: bool = True  # False: it was not checked

    def accuse(self, offence: Offence) -> None:
        """Report a violation."""
        self.num_offences += 1
        if len(self.offences) < MOST_KEPT:
            self.offences.append(offence)

    @property
    def verdict(self) -> CheckVerdict:
        """The result of the whole check."""
        if not self.is_seen:
            return CheckVerdict.UNSEEN
        if self.num_offences:
            return CheckVerdict.VIOLATED
        return CheckVerdict.REMARK if self.remarks else CheckVerdict.HOLDS


@dataclass(slots=True)
class Audit:
    """All checks of a run, and the numbers of groups per place."""

    checks: list[Check]
    places: dict[str, int]  # "drawn", "trained", "buffered", "in_flight", "dropped", "missing" → groups
    dropped: dict[str, int]  # reason → groups
    num_steps: int  # trained or skipped
    version: int  # of the policy after them
    resume_step: int | None  # of the newest sound checkpoint
    lengths: dict[str, dict[str, float]] = field(default_factory=dict)  # fate of rollouts → figures of their lengths

    @property
    def is_clean(self) -> bool:
        """True if nothing is violated."""
        return all(check.verdict is not CheckVerdict.VIOLATED for check in self.checks)
