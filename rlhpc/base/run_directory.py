"""Every path of a run directory, defined once.

The directory does not depend on a job id, is on a POSIX filesystem with atomic rename, and is all that a resume needs.
Python 3.9 and the standard library: supervisors of Slurm jobs use it on nodes with nothing else installed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlhpc.protocol.errors import RunDirectoryError


@dataclass(frozen=True)
class RunLayout:
    """Paths below one run directory.  Creates nothing."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, its hash and the commit, as JSON."""
        return self.root / "config.json"

    @property
    def is_run(self) -> bool:
        """True for a run directory: its config.json is ours, perhaps damaged.  HF checkpoints have another one."""
        try:
            return {"config", "hash"} <= set(json.loads(self.config.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (ValueError, TypeError):
            return True

    @property
    def being_deleted(self) -> Path:
        """config.json of a run while --fresh deletes it."""
        return self.root / "config.json.deleted"

    def require_run(self) -> None:
        """Raises RunDirectoryError if this is not a run directory."""
        if not self.is_run:
            raise RunDirectoryError(
                f"{self.root}: not a run directory: it has no {self.config.name} of a run; `rlhpc list` shows your runs"
            )

    @property
    def inputs(self) -> Path:
        """Digests of the model's files and of the dataset at the first start, as JSON."""
        return self.root / "inputs.json"

    @property
    def attempts(self) -> Path:
        """One JSON line per start of the run: attempt, from_step, host, time."""
        return self.root / "attempts.jsonl"

    @property
    def launcher(self) -> Path:
        """Process that runs the run: pid, host, process start time."""
        return self.root / "launcher.json"

    @property
    def owner(self) -> Path:
        """The attempt that may write here, as JSON (ownership.py); replaced by rename when another takes over."""
        return self.root / "owner.json"

    @property
    def lock(self) -> Path:
        """Locked by the launcher and the processes of a local run, until the last of them ends."""
        return self.root / ".lock"

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
        """The controller's last status of every role, as JSON; replaced by rename."""
        return self.root / "status.json"

    @property
    def timeline(self) -> Path:
        """Busy and idle roles per interval, arrivals and losses: JSON lines, appended by controllers."""
        return self.root / "timeline.jsonl"

    @property
    def evaluations(self) -> Path:
        """Results of `rlhpc evaluate` for the run's models."""
        return self.root / "evaluations"

    @property
    def weights(self) -> Path:
        """Rendezvous of weight groups, and files of the disk transport."""
        return self.root / "weights"

    @property
    def model(self) -> Path:
        """HF checkpoint at the end of supervised fine-tuning."""
        return self.root / "model"

    @property
    def summary(self) -> Path:
        """Metrics of the whole run, as JSON, written at its end."""
        return self.root / "summary.json"

    @property
    def judge_replies(self) -> Path:
        """Cached replies of the llm_judge model, by request: JSON lines, one file per reward worker."""
        return self.root / "judge"

    @property
    def lost_leases(self) -> Path:
        """Prompts that lost leases because a generator died: JSON lines, appended; outlives every attempt."""
        return self.root / "lost_leases.jsonl"

    @property
    def guard(self) -> Path:
        """Actions of the guard on steps outside the limits: JSON lines, appended; outlives every attempt."""
        return self.root / "guard.jsonl"

    @property
    def local_plan(self) -> Path:
        """Processes that `rlhpc run` starts on this machine, as JSON: job_plan.json without Slurm."""
        return self.root / "local_plan.json"

    # ------------------------------------------------------------------------------------------------- of Slurm jobs

    @property
    def attempt(self) -> Path:
        """The current attempt, as JSON: attempt, resume_step, job_id, restart, host; replaced by rename."""
        return self.root / "attempt.json"

    @property
    def site(self) -> Path:
        """A verbatim copy of the site file that the run was submitted with."""
        return self.root / "site.toml"

    @property
    def job_plan(self) -> Path:
        """Processes that the supervisor of each job starts, as JSON (docs/slurm.md)."""
        return self.root / "job_plan.json"

    @property
    def scripts(self) -> Path:
        """Batch scripts, as submitted."""
        return self.root / "scripts"

    @property
    def jobs(self) -> Path:
        """One JSON file per submitted job, and the events of its supervisors."""
        return self.root / "jobs"

    @property
    def stop_request(self) -> Path:
        """A file; while it exists, supervisors finish the step, save and end all jobs (`rlhpc stop`)."""
        return self.root / "STOP"

    @property
    def abort_request(self) -> Path:
        """A file; while it exists, supervisors end all jobs at once (`rlhpc stop --now`, or `touch`)."""
        return self.root / "ABORT"

    def job_record(self, job_id: int) -> Path:
        """The job submitted under this id."""
        return self.jobs / f"{job_id}.json"

    def job_events(self, name: str) -> Path:
        """Actions of the supervisor of a job (or of an array task, JOB_TASK): JSON lines."""
        return self.jobs / f"{name}.events.jsonl"

    def save_request(self, name: str) -> Path:
        """A job that ends asks the controller to save and to continue in another attempt; it contains the reason."""
        return self.jobs / f"{name}.yield"

    def retired(self, name: str) -> Path:
        """An empty file: `rlhpc scale` has retired this task of an added array (JOB_TASK), which is no accident."""
        return self.jobs / f"{name}.retired"

    @property
    def failures(self) -> Path:
        """Failed attempts since the last new checkpoint, as JSON; they count against `cluster.max_retries`."""
        return self.jobs / "failures.json"

    def exit_record(self, role: str, replica: int, attempt: int) -> Path:
        """Record of a supervised process's end, as JSON; next to its log."""
        return self.logs / f"{role}-{replica}" / f"attempt_{attempt}.exit.json"

    # --------------------------------------------------------------------------------------------------------- parts

    def log(self, role: str, replica: int, attempt: int) -> Path:
        """Output of one process."""
        return self.logs / f"{role}-{replica}" / f"attempt_{attempt}.log"

    def segment(self, index: int) -> Path:
        """A sealed segment."""
        return self.rollouts / f"segment_{index:06d}.h5"

    def checkpoint(self, step: int) -> Path:
        """A checkpoint, complete once it contains COMPLETE."""
        return self.checkpoints / f"step_{step:06d}"
