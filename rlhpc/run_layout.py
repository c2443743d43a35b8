"""Every path of a run directory, said once.

The directory does not depend on a job id, lives on a POSIX filesystem with atomic rename, and is all a resume needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Paths below one run directory.  Creates nothing."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, its hash and the commit, as JSON."""
        return self.root / "config.json"

    @property
    def attempts(self) -> Path:
        """One JSON line per start of the run: attempt, from_step, host, time."""
        return self.root / "attempts.jsonl"

    @property
    def launcher(self) -> Path:
        """Process that runs the run: pid, host, time of its birth."""
        return self.root / "launcher.json"

    @property
    def secrets(self) -> Path:
        """CURVE keys, 0700."""
        return self.root / "secrets"

    @property
    def rendezvous(self) -> Path:
        """One file per bound socket: address, public key, incarnation."""
        return self.root / "rendezvous"

    @property
    def rollouts(self) -> Path:
        """Sealed segments."""
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """One directory per saved step."""
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        """Logs of all roles."""
        return self.root / "logs"

    @property
    def status(self) -> Path:
        """What the controller last knew of every role, as JSON; rewritten by rename."""
        return self.root / "status.json"

    @property
    def weights(self) -> Path:
        """Meeting places of weight groups, and files of the disk transport."""
        return self.root / "weights"

    @property
    def summary(self) -> Path:
        """Figures of the whole run, as JSON, written at its end."""
        return self.root / "summary.json"

    def log(self, role: str, replica: int, attempt: int) -> Path:
        """Output of one process."""
        return self.logs / f"{role}-{replica}" / f"attempt_{attempt}.log"

    def segment(self, index: int) -> Path:
        """A sealed segment."""
        return self.rollouts / f"segment_{index:06d}.h5"

    def checkpoint(self, step: int) -> Path:
        """A checkpoint, complete once it holds COMPLETE."""
        return self.checkpoints / f"step_{step:06d}"
