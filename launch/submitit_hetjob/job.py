"""Job objects of the heterogeneous executor, and how they find out their state.

submitit's SlurmJob asks only sacct: without accounting a cancelled job never ends, and it does not know components.
Here squeue is asked first, then sacct for jobs that squeue no longer lists; a job that neither knows has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from submitit.slurm.slurm import SlurmJob

from launch.slurm.commands import SlurmError
from launch.slurm.control import cancel
from launch.slurm.part_states import FINAL, ask_states, base_id
from launch.submitit_hetjob.submitit_seams import Watcher, sub_jobs
from rlhpc.files import is_listed

R = TypeVar("R", covariant=True)


class StateWatcher(Watcher):
    """States of jobs J, components J+1 and array tasks J_1.  One for all jobs; limits how often Slurm is asked."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Slurm's word for the state; GONE; or UNKNOWN while Slurm does not answer."""
        if mode != "cache":
            self.get_info(base_id(job_id), mode=mode)
        info = self.known(job_id) or self.known(base_id(job_id))
        return info.get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """True if the job is over for good; a requeued job is not, squeue shows it as PENDING."""
        return self.get_state(job_id, mode=mode) in FINAL

    def ask(self, bases: set[str]) -> dict[str, dict[str, str]] | None:
        """Two calls at most, however many jobs."""
        return ask_states(bases)


class HeterogeneousSlurmJob(SlurmJob[R]):
    """A component of a job, or a whole job.  `results()`, `task(i)`, `stdout()`, … as of any submitit job."""

    watcher = StateWatcher(delay_s=60)

    def __init__(
        self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,), component: int | None = None
    ) -> None:
        """component: its number in a heterogeneous job; None: the whole job."""
        super().__init__(folder, job_id, tasks)
        self.component = component
        for task in sub_jobs(self):
            assert isinstance(task, HeterogeneousSlurmJob)  # submitit makes them of our own class
            task.component = component

    @property
    def slurm_id(self) -> str:
        """What Slurm calls it: 12, or 12+1."""
        return self.job_id if self.component is None else f"{self.job_id}+{self.component}"

    @property
    def state(self) -> str:
        """Of this component, as of the last look at Slurm."""
        return self.watcher.get_state(self.slurm_id)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """State and nodes of this component."""
        self.watcher.get_info(self.job_id, mode=mode)
        return self.watcher.known(self.slurm_id) or self.watcher.known(self.job_id)

    def done(self, force_check: bool = False) -> bool:
        """True if every task has a result, or the component has ended without one."""
        if self.num_tasks > 1:
            return all(task.done(force_check) for task in sub_jobs(self))
        if self._has_result():
            return True
        return self.watcher.is_done(self.slurm_id, mode="force" if force_check else "standard")

    def cancel(self, check: bool = True) -> None:
        """Cancel the whole job: its components live and die together.  check: raise SlurmError if that fails."""
        try:
            cancel([self.job_id])
        except SlurmError:
            if check:
                raise
        self.watcher.look_soon(self.job_id)

    def _has_result(self) -> bool:
        try:
            return is_listed(self.paths.result_pickle)
        except FileNotFoundError:
            return False
