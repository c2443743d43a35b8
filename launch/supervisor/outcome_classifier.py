"""Determine the outcome of an attempt from exit statuses, exit records and the states of Slurm components.

Input: how the controller exited and why it was asked to.  Output: Outcome.  Starts and ends no process.
"""

from __future__ import annotations

from launch.run_files.exit_records import ExitRecord, read_record, read_records
from launch.run_files.outcome import Cause, Outcome
from launch.run_files.plan_file import JobPart
from launch.run_files.run_state import Attempt, is_complete, read_attempt, wants_abort, wants_stop
from launch.slurm.commands import SlurmError
from launch.slurm.control import component_states
from launch.slurm.this_job import ThisJob
from launch.supervisor.steps import Step
from rlhpc.exit_status import EXIT_ALONE, EXIT_CONFIG
from rlhpc.run_layout import RunLayout

_FINAL = {
    Cause.ABORT,
    Cause.INTERRUPTED,
    Cause.FENCED,
    Cause.STALLED,
    Cause.COMPONENT,
    Cause.GIVEN_UP,
    Cause.STOP,
    Cause.SETTINGS,
}  # whatever the status
_STOPS = (Cause.STOP, Cause.ABORT, Cause.INTERRUPTED)


def asked_to_end(layout: RunLayout) -> Outcome | None:
    """The outcome that users have requested with `rlhpc stop`, with or without --now; None: nothing requested."""
    if wants_abort(layout):
        return Outcome(Cause.ABORT, f"{layout.abort_request} exists")
    if wants_stop(layout):
        return Outcome(Cause.STOP, f"{layout.stop_request} exists")
    return None


class OutcomeClassifier:
    """Classifies the attempts of one job."""

    def __init__(self, plan: JobPart, job: ThisJob) -> None:
        self._plan, self._job, self._layout = plan, job, plan.layout

    def classify(self, status: int, attempt: Attempt, asked: Cause | None, why: str, end_requested: bool) -> Outcome:
        """Classify an attempt whose controller exited with `status`.

        asked, why: the reason why it had been asked to exit.  end_requested: Slurm has ended this job.
        Raises OSError.
        """
        if is_complete(self._layout, is_certain=True):
            unclean = self._unclean_ranks(attempt)
            return (
                Outcome(Cause.UNCLEAN, f"complete, but {unclean}") if unclean else Outcome(Cause.COMPLETE, "complete")
            )
        if asked in _FINAL:
            return Outcome(asked, why, status=status or None if asked in _STOPS else None)
        records = self._records(attempt)
        settings = [record for record in records if record.status == EXIT_CONFIG]
        if settings or status == EXIT_CONFIG:
            text = self._told(settings[0], attempt) if settings else "the controller refused the settings"
            return Outcome(Cause.SETTINGS, text)
        if status == EXIT_ALONE:
            text = "; ".join(self._told(r, attempt) for r in records if r.status == EXIT_ALONE)
            return Outcome(Cause.ALONE, text or Cause.ALONE.words)
        if asked is Cause.TIME or (status == 0 and asked is not None and asked is not Cause.FAILED):
            return Outcome(asked, why)
        return self._failure(status, records, attempt, asked, why, end_requested)

    def taken_over(self, attempt: Attempt) -> Outcome | None:
        """Whether another supervisor has begun an attempt since."""
        latest = read_attempt(self._layout)
        if latest is None or (latest.owner <= attempt.owner and latest.index <= attempt.index):
            return None
        if latest.owner > attempt.owner:
            return Outcome(Cause.FENCED, f"attempt {latest.index} has begun in job {latest.job_id}")
        # A stale supervisor has replaced the run's keys.
        return Outcome(Cause.FAILED, f"attempt {latest.index} was begun by job {latest.job_id}, which is over")

    def exit_summary(self, step: Step) -> str:
        """How a component ended: the error of the first of its processes that failed.  Raises OSError."""
        for name in sorted(step.processes):
            record = read_record(self._layout, name, step.attempt.index)
            if record is not None and record.status != 0:
                return self._told(record, step.attempt)
        return f"exit status {step.status()}, no error recorded"

    def _told(self, record: ExitRecord, attempt: Attempt) -> str:
        """How a process ended, and where to read more."""
        role, _, replica = record.name.rpartition("-")
        return f"{record.cause} (log: {self._layout.log(role, int(replica), attempt.index)})"

    def _untold(self, status: int, attempt: Attempt) -> str:
        """How a controller ended whose record says nothing of a failure."""
        if status:
            return f"the controller ended with status {status}"
        log = self._layout.log("controller", 0, attempt.index)
        return f"the controller ended before the run did, without a word: by os._exit in code of your own? (log: {log})"

    def _failure(
        self,
        status: int,
        records: list[ExitRecord],
        attempt: Attempt,
        asked: Cause | None,
        why: str,
        end_requested: bool,
    ) -> Outcome:
        failed = [record for record in records if record.status not in (0, EXIT_ALONE)]
        # The trainer first: when it fails, the controller does, too.
        failed.sort(key=lambda record: not record.name.startswith("trainer"))
        text = self._told(failed[0], attempt) if failed else why or self._untold(status, attempt)
        if end_requested:  # before components are checked: Slurm may be requeueing all of them
            by = "a signal" if self._plan.is_local else "Slurm"
            return Outcome(Cause.SIGNAL, f"ended by {by}: {text}", status=status or None)
        if self._component_is_gone("trainer"):
            return Outcome(Cause.COMPONENT, f"Slurm has ended the trainer's component; {text}")
        if asked is Cause.FAILED and self._component_is_gone("generation"):
            return Outcome(Cause.COMPONENT, f"Slurm has ended the generators' component; {text}")
        return Outcome(Cause.FAILED, text, status=failed[0].status if failed else status or None)

    def _unclean_ranks(self, attempt: Attempt) -> str:
        """Trainer ranks of this job that have not exited cleanly: srun's exit status is not enough."""
        for part in self._plan.parts:
            if part.name == "trainer":
                records = read_records(self._layout, "trainer", attempt.index)
                ranks = range(part.share_of("trainer").num_processes)
                missing = [str(rank) for rank in ranks if rank not in records or records[rank].status != 0]
                return f"trainer ranks {', '.join(missing)} did not exit cleanly" if missing else ""
        return ""

    def _records(self, attempt: Attempt) -> list[ExitRecord]:
        roles = ("controller", "trainer")
        return [r for role in roles for _, r in sorted(read_records(self._layout, role, attempt.index).items())]

    def _component_is_gone(self, name: str) -> bool:
        """True if this component of the job has ended for good: it was cancelled, or reached its own time limit."""
        names = [part.name for part in self._plan.parts]
        if not self._job.is_heterogeneous or name not in names:
            return False
        try:
            states = component_states(self._job.job_id, patience_s=30.0)
        except SlurmError:
            return False
        return states.get(names.index(name), "RUNNING") in ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE")
