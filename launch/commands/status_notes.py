"""What `rlhpc status` says of the guard, of prompts that are kept from generators, and of evaluations.

Input: guard.jsonl, strikes.jsonl and evaluations/ of a run directory.  Output: lines, or JSON.  Loads nothing where
none of them is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from launch.common.text_table import shortened
from rlhpc.errors import ConfigError, RunDirectoryError
from rlhpc.run_layout import RunLayout

if TYPE_CHECKING:
    from rlhpc.buffer.lost_leases import Suspicion

NUM_SHOWN = 5  # prompts


@dataclass(frozen=True)
class Notes:
    """What there is to say."""

    guard: Sequence[dict[str, Any]]  # entries of guard.jsonl, oldest first
    quarantined: Sequence[Suspicion]  # prompts that are given to no generator any more
    suspects: Sequence[Suspicion]  # prompts that something died of, and that may still be completed
    evaluations: dict[str, dict[int, dict[str, Any]]]  # figures by dataset and step

    def lines(self) -> list[str]:
        """For people; none where nothing has happened."""
        found = []
        if self.quarantined:
            more = [f"and {len(self.quarantined) - NUM_SHOWN} more"] * (len(self.quarantined) > NUM_SHOWN)
            shown = "; ".join([*(shortened(each.text) for each in self.quarantined[:NUM_SHOWN]), *more])
            found.append(
                f"quarantined prompts   {len(self.quarantined)}: {shown}; "
                "a resume with --lift-quarantine samples them again"
            )
        if self.suspects:
            found.append(f"suspect prompts   {len(self.suspects)}; generators or reward workers died with them")
        if self.guard:
            last = self.guard[-1]
            number = f"{len(self.guard)} {'action' if len(self.guard) == 1 else 'actions'}"
            found.append(
                f"guard   {number}, the last one: {last['action']} (attempt {last['attempt']}), {last['text']}"
            )
        if self.evaluations:
            from launch.commands.evaluate.past import lines_about

            found += lines_about(self.evaluations)
        return found

    def as_document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "guard": [*self.guard],
            "quarantined": [asdict(each) for each in self.quarantined],
            "suspects": [asdict(each) for each in self.suspects],
            "evaluations": self.evaluations,
        }


def read_notes(layout: RunLayout) -> Notes:
    """Read both files.  Raises RunDirectoryError if one cannot be read."""
    try:
        quarantined, suspects = _prompts(layout) if layout.strikes.exists() else ([], [])
        guard = _guard(layout) if layout.guard.exists() else []
        evaluations = _evaluations(layout) if layout.evaluations.is_dir() else {}
        return Notes(guard, quarantined, suspects, evaluations)
    except OSError as error:
        raise RunDirectoryError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _guard(layout: RunLayout) -> list[dict[str, Any]]:
    from rlhpc.roles.controller.guard_file import read_guard_file  # slow to import, and rarely needed

    return [asdict(entry) for entry in read_guard_file(layout.guard)]


def _evaluations(layout: RunLayout) -> dict[str, dict[int, dict[str, Any]]]:
    from launch.commands.evaluate.past import past_evaluations

    return past_evaluations(layout)


def _prompts(layout: RunLayout) -> tuple[list[Suspicion], list[Suspicion]]:
    from rlhpc.buffer.lost_leases import LostLeaseFile
    from rlhpc.config_file import read_resolved

    try:
        max_attempts = read_resolved(layout)[0].admission.max_attempts
    except ConfigError:  # `rlhpc check` says so
        return [], []
    found = LostLeaseFile(layout.strikes).suspicions()
    quarantined = [each for each in found if each.is_quarantined(max_attempts)]
    return quarantined, [each for each in found if not each.is_quarantined(max_attempts)]
