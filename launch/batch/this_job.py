"""The Slurm job whose batch step this process is: its identity, its end time, and how to requeue it.

Input: the environment variables that Slurm sets.  Knows nothing about other jobs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from launch.batch.slurm_commands import SlurmError, slurm
from launch.batch.slurm_values import duration_s, is_unlimited

PATIENCE_S = 300.0  # with a slurmctld that is away: it comes back, or the time limit settles it
ASK_AGAIN_S = 60.0  # while the end of a life is not known


@dataclass(frozen=True)
class ThisJob:
    """Identity of one life of a job."""

    job_id: int  # of the leader in a heterogeneous job, of the task itself in an array
    array_id: int | None  # of the whole array
    array_task: int | None
    restart: int  # how often Slurm has requeued it
    is_heterogeneous: bool
    began: float  # unix time of this life, s

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ThisJob:
        """Read who we are.  Raises SlurmError outside a job."""
        if "SLURM_JOB_ID" not in environment:
            raise SlurmError("SLURM_JOB_ID is not set: this is no job step; `rlhpc submit` starts runs")
        task = environment.get("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=int(environment["SLURM_JOB_ID"]),
            array_id=int(environment["SLURM_ARRAY_JOB_ID"]) if task is not None else None,
            array_task=int(task) if task is not None else None,
            restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
            is_heterogeneous="SLURM_HET_SIZE" in environment,
            began=time.time(),
        )

    @property
    def submitted_id(self) -> int:
        """What sbatch said: the array's id, or the job's."""
        return self.job_id if self.array_id is None else self.array_id

    @property
    def name(self) -> str:
        """As squeue writes it: JOB, or JOB_TASK."""
        return str(self.job_id) if self.array_task is None else f"{self.array_id}_{self.array_task}"

    def incarnation(self, start: int) -> str:
        """What a process started now is called; a later life of this job is of a higher order."""
        return f"{self.job_id}.{self.restart}.{start}"

    def requeue(self) -> None:
        """Put this job back into the queue; Slurm ends its batch step in a moment.

        Call it when no srun is alive: Slurm 25.11 and later turns the requeue of a job whose first component has a live
        step into its cancellation.  Raises SlurmError where the site forbids it.
        """
        # By its name: the id of an array's last task is that of the whole array, and would requeue all of it.
        slurm("scontrol", "requeue", self.name, patience_s=PATIENCE_S)

    def component_states(self) -> dict[int, str]:
        """Slurm's state of every component of a heterogeneous job; of another job that of component 0.

        Raises SlurmError.
        """
        out = slurm(
            "squeue", "--all", "--noheader", "--states=all", f"--jobs={self.job_id}", "--format=%i %T", patience_s=30.0
        )
        rows = [line.split() for line in out.splitlines() if line.strip()]
        return {int(job.partition("+")[2] or 0): state for job, state in rows if job.partition("+")[0].isdigit()}


class TimeLimit:
    """When this life ends.

    Asked of Slurm at its beginning, every minute until Slurm has answered, and again before anybody acts on it: limits
    can be changed.
    """

    def __init__(self, job: ThisJob, environment: Mapping[str, str]) -> None:
        self._job = job
        said = environment.get("SLURM_JOB_END_TIME", "")  # since Slurm 23.02
        self._end: float | None = float(said) if said.isdigit() else None
        self.is_known = self._end is not None
        self._asked_at = time.monotonic()
        if not self.is_known:
            self.ask()

    @property
    def end(self) -> float | None:
        """Unix time of the end, s; None: there is no limit, or it is not known yet."""
        if not self.is_known and time.monotonic() - self._asked_at >= ASK_AGAIN_S:
            self.ask()
        return self._end

    def ask(self) -> None:
        """See when Slurm ends this life as of now.  What was known before holds where it does not say."""
        try:
            out = slurm("squeue", "--all", "--noheader", f"--jobs={self._job.name}", "--format=%L", timeout_s=30.0)
        except SlurmError:
            out = ""
        self._asked_at = time.monotonic()
        said = [line.strip() for line in out.splitlines() if line.strip()]
        left = [seconds for seconds in map(duration_s, said) if seconds is not None]
        if left:
            self._end, self.is_known = time.time() + min(left), True
        elif any(map(is_unlimited, said)):
            self._end, self.is_known = None, True

    def left_s(self) -> float:
        """Seconds from now; infinity without a limit, and while it is not known."""
        end = self.end
        return float("inf") if end is None else end - time.time()

    @property
    def life_s(self) -> float:
        """Seconds of the whole life; infinity likewise."""
        end = self.end
        return float("inf") if end is None else end - self._job.began

    def in_words(self) -> str:
        """How long this life may run."""
        if not self.is_known:
            return "until an end that Slurm has not said yet"
        return "without a time limit" if self._end is None else f"for {self.left_s():.0f} s"
