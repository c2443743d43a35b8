"""The Slurm job whose batch step this process is: its identity, its end time, and how to requeue it.

Input: the environment variables that Slurm sets.  Knows nothing about other jobs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from launch.slurm.commands import SlurmError, slurm
from launch.slurm.control import SOON_S, requeue
from launch.slurm.values import duration_s, is_unlimited

PATIENCE_S = 300.0  # for a slurmctld that is away: it comes back, or the time limit ends the job
REQUEUED_S = 120.0  # for Slurm to end the batch step of a requeued job
ASK_AGAIN_S = 60.0  # while the end time is not known


@dataclass(frozen=True)
class ThisJob:
    """Identity of one life of a job: from its start to its end or requeue."""

    job_id: int  # of the leader in a heterogeneous job, of the task itself in an array
    array_id: int | None  # of the whole array
    array_task: int | None
    restart: int  # how often Slurm has requeued it
    is_heterogeneous: bool
    began: float  # when this life began, s on this machine's monotonic clock

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ThisJob:
        """Read the identity from the environment.  Raises SlurmError outside a job."""
        if "SLURM_JOB_ID" not in environment:
            raise SlurmError("SLURM_JOB_ID is not set: not in a Slurm job; start runs with `rlhpc submit`")
        task = environment.get("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=int(environment["SLURM_JOB_ID"]),
            array_id=int(environment["SLURM_ARRAY_JOB_ID"]) if task is not None else None,
            array_task=int(task) if task is not None else None,
            restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
            is_heterogeneous="SLURM_HET_SIZE" in environment,
            began=time.monotonic(),
        )

    @classmethod
    def without_slurm(cls) -> ThisJob:
        """Takes the place of a job where processes are started on this machine alone."""
        return cls(job_id=0, array_id=None, array_task=None, restart=0, is_heterogeneous=False, began=time.monotonic())

    @property
    def submitted_id(self) -> int:
        """The id that sbatch returned: the array's, or the job's."""
        return self.job_id if self.array_id is None else self.array_id

    @property
    def name(self) -> str:
        """As squeue writes it: JOB, or JOB_TASK."""
        return str(self.job_id) if self.array_task is None else f"{self.array_id}_{self.array_task}"

    def incarnation(self, start: int) -> str:
        """Incarnation of a process started now; increases with every life of this job."""
        return f"{self.job_id}.{self.restart}.{start}"

    def requeue(self) -> None:
        """Put this job back into the queue; Slurm ends its batch step in a moment.  Raises SlurmError."""
        # By JOB_TASK: the id of an array's last task equals that of the whole array, and would requeue all of it.
        requeue(self.name, PATIENCE_S)

    def requeue_and_end(self) -> None:
        """The same, and wait for that end.  Raises SlurmError."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Slurm ends this step now, and need not wait for its KillWait
        self.requeue()
        time.sleep(REQUEUED_S)

    def is_being_preempted(self) -> bool:
        """True in the grace time (GraceTime) of a preemption; False too if Slurm does not answer.

        Slurm has signalled every srun then, but not the batch step, and does not requeue a job that ends meanwhile.
        """
        return any(state == "RUNNING" and is_preempted for state, is_preempted in self._components())

    def is_to_go_on(self) -> bool:
        """True if Slurm has not ended this job: who has sent its batch step a signal, by scancel, was a person.

        False too if Slurm does not answer.
        """
        components = self._components()
        return bool(components) and all(state == "RUNNING" and not preempted for state, preempted in components)

    def _components(self) -> list[tuple[str, bool]]:
        """State of each, and whether Slurm has said when it must go; none if Slurm does not answer."""
        if not self.job_id:
            return []
        words = ("squeue", "--all", "--noheader", f"--jobs={self.name}", "--Format=State:20,PreemptTime:30")
        try:
            rows = [line.split() for line in slurm(*words, timeout_s=30.0).splitlines()]
        except SlurmError:
            return []
        return [(row[0], row[-1][:1].isdigit()) for row in rows if row]  # N/A: it has not


class NoTimeLimit:
    """For a life without a time limit."""

    began = 0.0  # s, monotonic

    @property
    def end(self) -> float | None:
        """The end in s on this machine's monotonic clock; None: no limit, or not known yet."""
        return None

    @property
    def life_s(self) -> float:
        """Seconds from the beginning of this life to its limit; infinite in the same cases."""
        end = self.end
        return float("inf") if end is None else end - self.began

    def left_s(self) -> float:
        """Seconds from now; infinite in the same cases."""
        end = self.end
        return float("inf") if end is None else end - time.monotonic()

    def ask(self) -> None:
        """Learn whether the limit has changed."""


class TimeLimit(NoTimeLimit):
    """When the time limit ends this life.

    Slurm is asked every minute until it has answered, and again before anyone acts on it, because limits can be
    changed.  Until then the end in the environment is believed, which is of slurmctld's clock: this node's may differ.
    """

    def __init__(self, job: ThisJob, environment: Mapping[str, str]) -> None:
        self._job, self.began = job, job.began
        self._end = _end_as_said(job, environment)
        self.is_known, self._has_answered = self._end is not None, False
        self._asked_at = time.monotonic()
        if not self.is_known:
            self.ask()

    @property
    def end(self) -> float | None:
        """The end in s on this machine's monotonic clock; None: no limit, or not known yet."""
        if not self._has_answered and time.monotonic() - self._asked_at >= ASK_AGAIN_S:
            self.ask()
        return self._end

    def ask(self) -> None:
        """Ask Slurm how much time is left.  If it does not answer, the last known end stays."""
        try:
            out = slurm("squeue", "--all", "--noheader", f"--jobs={self._job.name}", "--format=%L", timeout_s=SOON_S)
        except SlurmError:
            out = ""
        self._asked_at = time.monotonic()
        said = [line.strip() for line in out.splitlines() if line.strip()]
        left = [seconds for seconds in map(duration_s, said) if seconds is not None]
        if left:
            self._end, self.is_known, self._has_answered = time.monotonic() + min(left), True, True
        elif any(map(is_unlimited, said)):
            self._end, self.is_known, self._has_answered = None, True, True

    def in_words(self) -> str:
        """How long this job may run."""
        if not self.is_known:
            return "until a time limit that is not known yet"
        return "without a time limit" if self._end is None else f"for {self.left_s():.0f} s"


def _end_as_said(job: ThisJob, environment: Mapping[str, str]) -> float | None:
    """The end as Slurm's variables say it, since 23.02; None: they do not."""
    start, end = (environment.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    if not end.isdigit():
        return None
    said = time.monotonic() + float(end) - time.time()
    # By a clock that is behind, it would come minutes too late.
    return min(said, job.began + float(end) - float(start)) if start.isdigit() else said
