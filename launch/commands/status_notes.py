"""What `rlhpc status` says of the guard, of prompts that are kept from generators, and of evaluations.

Input: guard.jsonl, strikes.jsonl and evaluations/ of a run directory.  Output: lines, or JSON.  Loads nothing where
none of them is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhpc.errors import ConfigError, RunDirectoryError
from rlhpc.run_layout import RunLayout

NUM_SHOWN = 5  # prompts


@dataclass(frozen=True)
class Notes:
    """What there is to say."""

    guard: Sequence[dict[str, Any]]  # entries of guard.jsonl, oldest first
    quarantined: Sequence[str]  # prompts, by digest, that are given to no generator any more
    suspects: Sequence[str]  # prompts that lost leases to deaths of generators, and may still be completed
    evaluations: dict[str, dict[int, dict[str, Any]]]  # figures by dataset and step

    def lines(self) -> list[str]:
        """For people; none where nothing has happened."""
        found = []
        if self.quarantined:
            shown = ", ".join(self.quarantined[:NUM_SHOWN]) + (", …" if len(self.quarantined) > NUM_SHOWN else "")
            found.append(f"quarantined prompts   {len(self.quarantined)}; they ended generators or verifiers: {shown}")
        if self.suspects:
            found.append(f"suspect prompts   {len(self.suspects)}; a generator died with them or a verifier failed")
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
            "quarantined": [*self.quarantined],
            "suspects": [*self.suspects],
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


def _prompts(layout: RunLayout) -> tuple[list[str], list[str]]:
    from rlhpc.buffer.lost_leases import LostLeaseFile
    from rlhpc.config_file import read_resolved

    try:
        max_attempts = read_resolved(layout)[0].admission.max_attempts
    except ConfigError:  # `rlhpc check` says so
        return [], []
    strikes = {suspicion.prompt: suspicion.strikes for suspicion in LostLeaseFile(layout.strikes).read()}
    quarantined = sorted(prompt for prompt, number in strikes.items() if number >= max_attempts)
    return quarantined, sorted(prompt for prompt, number in strikes.items() if 0 < number < max_attempts)
