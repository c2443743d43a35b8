"""A submitted run as submitit's Job: `state`, `done`, `wait`, `result`, `cancel`, `stdout`.

Input: a run directory with jobs.  The state is that of the job that hosts the controller, the newest if there are
several in succession.  `result` is the run's summary.json; nothing is unpickled for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, UncompletedJobError

from launch.common.paths import quoted
from launch.door.run import Run
from launch.run_files.events import last_outcome
from launch.run_files.job_records import JobRecord, read_records
from launch.slurm.commands import SlurmError
from launch.slurm.control import cancel
from launch.submitit_hetjob.job import HeterogeneousSlurmJob
from rlhpc.errors import RunDirectoryError
from rlhpc.files import is_listed
from rlhpc.run_layout import RunLayout


class RunJob(HeterogeneousSlurmJob[dict[str, Any]]):
    """The jobs of one run, as one job.  Any process can create it from the run directory at any time."""

    def __init__(self, directory: str | Path) -> None:
        """Raises RunDirectoryError: no job of a controller is recorded there."""
        self._layout = RunLayout(Path(directory))
        super().__init__(self._layout.logs / "slurm", str(self._newest().job_id))

    @property
    def run(self) -> Run:
        """The run with its results."""
        return Run.load(self._layout.root)

    @property
    def state(self) -> str:
        """Slurm's state of the controller's job: PENDING, RUNNING, COMPLETED …; as of the last query."""
        job_id = str(self._newest().job_id)
        self.watcher.register_job(job_id)
        return str(self.watcher.get_state(job_id))

    def done(self, force_check: bool = False) -> bool:
        """True if the run is over: neither a requeue nor a successor will continue it."""
        job_id = self._newest().job_id
        try:
            if is_listed(self._layout.logs / "slurm" / f"{job_id}_0_result.pkl"):
                return job_id == self._newest().job_id
        except FileNotFoundError:
            return False
        return bool(self.watcher.is_done(str(job_id), mode="force" if force_check else "standard"))

    def results(self) -> list[dict[str, Any]]:
        """[summary], once all is over.  Raises what `exception` returns."""
        error = self.exception()
        if error is not None:
            raise error
        return [self.run.summary or {}]

    def exception(self) -> UncompletedJobError | FailedJobError | None:
        """Waits; None if the run is complete, else why it is not."""
        self.wait()
        if self.run.summary is not None:
            return None
        name = str(self._newest().job_id)
        why = last_outcome(self._layout, name)
        where = f"`rlhpc status {quoted(self._layout.root)}` says more"
        if not why:
            return UncompletedJobError(f"job {name} ({self.state}) ended without recording a reason; {where}")
        return FailedJobError(f"{why}; {where}")

    def cancel(self, check: bool = True) -> None:
        """Cancel all jobs of the run.  check: raise SlurmError if that fails.  `run.stop()` saves first."""
        try:
            cancel([record.job_id for record in read_records(self._layout)])
        except SlurmError:
            if check:
                raise
        self.watcher.look_soon(str(self._newest().job_id))

    def stdout(self) -> str | None:
        """The batch log of the controller's job, over all requeues; None: it has not begun."""
        record = self._newest()
        path = self._layout.logs / "slurm" / f"{record.name}-{record.job_id}.log"
        return path.read_text(errors="replace") if path.exists() else None

    def stderr(self) -> str | None:
        """The same as stdout: both are one file."""
        return self.stdout()

    def _newest(self) -> JobRecord:
        records = [record for record in read_records(self._layout) if record.hosts_controller]
        if not records:
            raise RunDirectoryError(f"{self._layout.root}: no job of this run is recorded; was it submitted?")
        return records[-1]
