"""Every path of a run directory, defined once.

The directory does not depend on a job id, lives on a POSIX filesystem with atomic rename, and is all that a resume
needs.  Python 3.9 and the standard library suffice: the supervisor of a Slurm job reads it on nodes that have nothing
else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


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
        """True if a run is here: its config.json is ours, perhaps damaged.  An HF checkpoint has another."""
        try:
            return {"config", "hash"} <= set(json.loads(self.config.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (ValueError, TypeError):
            return True

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
        """Process that runs the run: pid, host, time of its birth."""
        return self.root / "launcher.json"

    @property
    def owner(self) -> Path:
        """The attempt that may write here, as JSON (ownership.py); replaced by rename when another takes over."""
        return self.root / "owner.json"

    @property
    def lock(self) -> Path:
        """Locked by the launcher and every process of a local run, as long as one of them lives."""
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
        """Who worked and who waited, interval by interval, arrivals and losses: JSON lines, appended by controllers."""
        return self.root / "timeline.jsonl"

    @property
    def evaluations(self) -> Path:
        """What `rlhpc evaluate` has found out about the run's models."""
        return self.root / "evaluations"

    @property
    def weights(self) -> Path:
        """Rendezvous of weight groups, and files of the disk transport."""
        return self.root / "weights"

    @property
    def summary(self) -> Path:
        """Metrics of the whole run, as JSON, written at its end."""
        return self.root / "summary.json"

    @property
    def judge_replies(self) -> Path:
        """Replies of the task llm_judge's model, by what it was asked: JSON lines, a file for each reward worker."""
        return self.root / "judge"

    @property
    def strikes(self) -> Path:
        """Prompts that lost leases because a generator died: JSON lines, appended; outlives every attempt."""
        return self.root / "strikes.jsonl"

    @property
    def guard(self) -> Path:
        """What the guard did about steps out of bounds: JSON lines, appended; outlives every attempt."""
        return self.root / "guard.jsonl"

    @property
    def local_plan(self) -> Path:
        """What `rlhpc run` starts on this machine, as JSON: job_plan.json without Slurm."""
        return self.root / "local_plan.json"

    # ------------------------------------------------------------------------------------------------- of Slurm jobs

    @property
    def attempt(self) -> Path:
        """The attempt that is on, as JSON: attempt, resume_step, job_id, restart, host; replaced by rename."""
        return self.root / "attempt.json"

    @property
    def site(self) -> Path:
        """The site file that the run was submitted with, word for word."""
        return self.root / "site.toml"

    @property
    def job_plan(self) -> Path:
        """What the supervisor of each job starts, as JSON (docs/slurm.md)."""
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
        """While it exists, supervisors finish the step, save and end all jobs (`rlhpc stop`)."""
        return self.root / "STOP"

    @property
    def abort_request(self) -> Path:
        """While it exists, supervisors end all jobs at once (`rlhpc stop --now`, or `touch`)."""
        return self.root / "ABORT"

    def job_record(self, job_id: int) -> Path:
        """What was submitted under this id."""
        return self.jobs / f"{job_id}.json"

    def job_events(self, name: str) -> Path:
        """What the supervisor of a job (or of an array task, JOB_TASK) has done: a JSON line each."""
        return self.jobs / f"{name}.events.jsonl"

    def save_request(self, name: str) -> Path:
        """A job whose time is nearly over asks the controller to save and to go on in another attempt."""
        return self.jobs / f"{name}.yield"

    def hand_over_request(self, job_id: int) -> Path:
        """A successor that has loaded everything asks the job that owns the run to save and to leave it the run."""
        return self.jobs / f"{job_id}.hand_over"

    def released(self, job_id: int) -> Path:
        """This job has saved and begins no attempt any more: its successor need not wait for its end."""
        return self.jobs / f"{job_id}.released"

    @property
    def failures(self) -> Path:
        """Failed attempts since the last new checkpoint, as JSON; what is left of `cluster.max_retries`."""
        return self.jobs / "failures.json"

    def exit_record(self, role: str, replica: int, attempt: int) -> Path:
        """How a process under a supervisor ended, as JSON; lies beside its log."""
        return self.logs / f"{role}-{replica}" / f"attempt_{attempt}.exit.json"

    def loaded_mark(self, role: str, replica: int, attempt: int, job_id: int) -> Path:
        """There once a process of a job that stands by for this attempt has loaded everything; beside its log."""
        return self.logs / f"{role}-{replica}" / f"attempt_{attempt}.job_{job_id}.loaded"

    # --------------------------------------------------------------------------------------------------------- parts

    def log(self, role: str, replica: int, attempt: int) -> Path:
        """Output of one process."""
        return self.logs / f"{role}-{replica}" / f"attempt_{attempt}.log"

    def segment(self, index: int) -> Path:
        """A sealed segment."""
        return self.rollouts / f"segment_{index:06d}.h5"

    def checkpoint(self, step: int) -> Path:
        """A checkpoint, complete once it holds COMPLETE."""
        return self.checkpoints / f"step_{step:06d}"
