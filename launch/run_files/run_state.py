"""What a supervisor reads from the run directory: attempt, progress, and requests by users and other jobs.

A file that is missing or incomplete counts as absent.  So does one that cannot be read at the moment, for who looks
again soon; with is_certain, for who decides by it, OSError is raised for it (rlhpc/patience.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.run_files.events import certain_document, read_document
from rlhpc.files import is_absent, is_listed, matching
from rlhpc.patience import seen
from rlhpc.run_layout import RunLayout

FIRST_SAVE_S = 60.0  # assumed for a run that has not saved yet


@dataclass(frozen=True)
class Attempt:
    """The current attempt."""

    index: int
    resume_step: int | None
    job_id: int
    restart: int
    fence: str = ""  # the owner as whom its controller and trainer write to the run directory (rlhpc/ownership.py)

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Attempt:
        """Parse attempt.json.  Raises KeyError."""
        return cls(
            document["attempt"],
            document["resume_step"],
            document["job_id"],
            document["restart"],
            document.get("fence", ""),
        )

    @property
    def owner(self) -> tuple[int, int]:
        """Job and restart count that began it; a later one compares greater."""
        return self.job_id, self.restart


def read_attempt(layout: RunLayout) -> Attempt | None:
    """Read attempt.json."""
    document = read_document(layout.attempt)
    try:
        return Attempt.parse(document)
    except KeyError:
        return None


def longest_save_before_s(layout: RunLayout) -> float:
    """The longest save of the last attempt before the current one that has saved; 0: not known."""
    return float(read_document(layout.attempt).get("save_s", 0.0))


def run_name(settings: Mapping[str, Any], root: Path) -> str:
    """The run's, as its settings say; that of its directory where these are damaged.

    settings: the resolved run file, by section and key.
    """
    return stated_name(settings) or root.name


def stated_name(settings: object) -> str:
    """The run's, as its settings say; "" where these are damaged."""
    table = settings.get("run") if isinstance(settings, Mapping) else None
    return str(table.get("name") or "") if isinstance(table, Mapping) else ""


def is_complete(layout: RunLayout, *, is_certain: bool = False) -> bool:
    """True if the run has finished its last step."""
    return _exists(layout.summary, is_certain)


def wants_stop(layout: RunLayout, *, is_certain: bool = False) -> bool:
    """True after `rlhpc stop`."""
    return _exists(layout.stop_request, is_certain)


def wants_abort(layout: RunLayout, *, is_certain: bool = False) -> bool:
    """True after `rlhpc stop --now`."""
    return _exists(layout.abort_request, is_certain)


def save_requests(layout: RunLayout) -> list[Path]:
    """Requests to save, by jobs that are close to their time limit."""
    return sorted(_found(layout.jobs, "*.yield"))


def saved_step(layout: RunLayout, *, is_certain: bool = False) -> int:
    """Step of the newest complete checkpoint; 0 if there is none."""
    steps = [path.name.rpartition("_")[2] for path in _checkpoints(layout, is_certain)]
    return max((int(step) for step in steps if step.isdigit()), default=0)


@dataclass(frozen=True)
class Progress:
    """The controller's last status of the run."""

    attempt: int
    phase: str
    step: int
    step_s: float  # the longest recent step
    save_s: float  # the longest save of this attempt; 0: none yet
    age_s: float  # by the clock of this machine
    roles: tuple[dict[str, Any], ...]
    has_told_all: bool = False  # to leave, or is about to: also where the run has failed
    written_unix_s: float = 0.0  # by the clock of the controller's machine
    save_before_s: float = 0.0  # the longest of an earlier attempt, where this one has not saved yet

    def waits(self) -> str:
        """Which role waits for what, in words."""
        said = [f"{role['name']} ({role['state']}) waits for {role['waits_for'] or 'nothing'}" for role in self.roles]
        return f"phase {self.phase!r}, step {self.step}; " + ("; ".join(said) or "no role has registered")

    @property
    def is_training(self) -> bool:
        """True once all roles have met, until the run ends."""
        return self.phase == "training"

    @property
    def is_over(self) -> bool:
        """True once the controller is about to tell all roles to exit: the run is complete, or has been stopped."""
        return self.phase in ("complete", "stopped")

    @property
    def is_ending(self) -> bool:
        """True once the controller ends, after whatever it was: who leaves now was told to."""
        return self.is_over or self.has_told_all

    def names(self, role: str) -> list[str]:
        """Names of the registered processes of a role."""
        return [each["name"] for each in self.roles if each["name"].startswith(f"{role}-")]


def read_progress(layout: RunLayout, *, is_certain: bool = False) -> Progress | None:
    """Read status.json."""
    document = certain_document(layout.status) if is_certain else read_document(layout.status)
    try:
        return Progress(
            attempt=document.get("attempt", -1),
            phase=document["phase"],
            step=document["step"],
            step_s=document.get("step_s", 0.0),
            save_s=(save_s := document.get("save_s", 0.0)),
            save_before_s=0.0 if save_s else longest_save_before_s(layout),
            age_s=max(0.0, time.time() - document["unix_time_s"]),
            roles=tuple(document["roles"]),
            has_told_all=document.get("is_ending", False),
            written_unix_s=document["unix_time_s"],
        )
    except KeyError:
        return None


def needed_to_stop_s(progress: Progress | None, life_s: float) -> float:
    """Seconds from the request to stop until a job has ended: the current step, a checkpoint, the shutdown of roles.

    Measured times get a margin, during which generators exit; times not measured yet are guessed, at most a tenth of
    the job's time limit.  A save of an earlier attempt, which may have been slow for once, takes at most half of it.
    """
    margin_s = min(30.0, life_s / 6)
    if progress is None:
        return margin_s
    save_s = 2.0 * progress.save_s or min(2.0 * progress.save_before_s, life_s / 2) or min(FIRST_SAVE_S, life_s / 10)
    return margin_s + 1.5 * progress.step_s + save_s


def _exists(path: Path, is_certain: bool) -> bool:
    try:
        return not is_absent(path) if is_certain else is_listed(path)
    except OSError:
        if is_certain:
            raise
        return False


def _checkpoints(layout: RunLayout, is_certain: bool) -> list[Path]:
    """Those that are complete."""
    try:
        return [path for path in matching(layout.checkpoints, "step_*") if not is_absent(path / "COMPLETE")]
    except OSError:
        if is_certain:
            raise
        return []


def _found(directory: Path, pattern: str) -> list[Path]:
    """None where the file server does not answer: this is asked several times a second, and would end the run."""
    return seen(lambda: matching(directory, pattern), [])
