"""The Slurm job that evaluates a run while it trains: submitted beside the run's own, and once only.

Input: settings of a run, a site file.  Output: a job that waits for the run's first one; its id in
evaluations/job.json.  It is not one of the run's jobs: nothing waits for it, and the run ends without it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

from launch.commands.evaluate.job import SCRIPT, EvaluationJob
from launch.common.paths import quoted
from launch.plan.site_file import Site
from launch.slurm.commands import SlurmError
from launch.slurm.control import PATIENCE_S, cancel
from launch.slurm.queue import look_at_jobs
from launch.slurm.sbatch import submit_script
from launch.slurm.this_job import ThisJob
from rlhpc.config import Config
from rlhpc.deadline import Deadline
from rlhpc.files import leave_deleted_directory, write_atomically
from rlhpc.privacy import PRIVATE
from rlhpc.run_layout import RunLayout

ENDED_S = 60.0  # for a job that was cancelled
Tell = Callable[[str], None]


class TimeIsUp(BaseException):
    """This job is close to its time limit.  Like KeyboardInterrupt it passes whoever catches every Exception."""


def submit_following(config: Config, layout: RunLayout, site: Site, controller_job: int | None, tell: Tell) -> None:
    """Put it into the queue, to start when the job of the controller has started; one that is there goes on.

    Raises ConfigError, SlurmError.
    """
    job = following_job(layout)
    if job is not None and _is_alive(job):
        tell(f"evaluation  job {job} goes on")
        return
    layout.evaluations.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    options = [] if controller_job is None else [f"--dependency=after:{controller_job}"]
    submitted = EvaluationJob.following(config, site).submit(*options, record=partial(_record, layout))
    tell(f"evaluation  job {submitted}; its figures are in {layout.evaluations}, and in TensorBoard")


def following_job(layout: RunLayout) -> int | None:
    """Id of the job that was submitted last."""
    try:
        return int(json.loads(_record_of(layout).read_bytes())["job_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_following_job(layout: RunLayout) -> bool:
    """Whether this process is that job."""
    return os.environ.get("SLURM_JOB_ID") == str(following_job(layout))


def end_following(layout: RunLayout, tell: Tell) -> None:
    """Cancel it, if there is one, and wait for its end.  Raises SlurmError."""
    job = following_job(layout)
    if job is None or is_following_job(layout) or not _is_alive(job):
        return
    cancel([job], patience_s=PATIENCE_S)
    deadline = Deadline(ENDED_S)
    while _is_alive(job) and not deadline.is_over:
        time.sleep(1.0)
    tell(f"cancelled    evaluation job {job}; `rlhpc evaluate {quoted(layout.root)}` evaluates the newest checkpoint")


class TimeWarning:
    """In that job: hears Slurm say that its time is nearly over, and raises TimeIsUp in `remind`.

    Not at once: what a signal raises within pydantic or torch comes out as an error of theirs, and Python drops what it
    raises while an object is being finalised.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._has_come = False

    def __enter__(self) -> Self:
        if "SLURM_JOB_ID" in os.environ:
            self._before = signal.signal(signal.SIGUSR2, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if "SLURM_JOB_ID" in os.environ:
            signal.signal(signal.SIGUSR2, self._before)

    def remind(self) -> None:
        """Raises TimeIsUp once the warning has come; KeyboardInterrupt in a job of somebody else's."""
        if self._has_come:
            # It is recorded by now, if it is that job; this process may have started before.
            raise TimeIsUp if is_following_job(self._layout) else KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True


def go_on_later(layout: RunLayout, tell: Tell) -> int:
    """Back into the queue, or a successor where the site forbids that.  Returns the exit status of the batch step."""
    job = ThisJob.of(os.environ)
    tell("this job is close to its time limit; it goes on after its requeue")
    try:
        job.requeue_and_end()
    except SlurmError as error:
        tell(f"not requeued ({error}); job {_succeed(layout, f'--dependency=afterany:{job.job_id}')} goes on")
    return 0


def look_again_later(layout: RunLayout, tell: Tell) -> int:
    """Free the node while the run itself waits in the queue.  Returns the exit status of the batch step."""
    tell(f"the run waits in the queue; job {_succeed(layout, '--begin=now+1hour')} looks again in an hour")
    return 0


def _succeed(layout: RunLayout, option: str) -> int:
    leave_deleted_directory(layout.root)
    return submit_script(layout.evaluations / SCRIPT, (option,), record=partial(_record, layout), patience_s=PATIENCE_S)


def _record_of(layout: RunLayout) -> Path:
    return layout.evaluations / "job.json"


def _record(layout: RunLayout, job: int) -> None:
    write_atomically(_record_of(layout), json.dumps({"job_id": job}).encode())


def _is_alive(job: int) -> bool:
    """True also where Slurm does not say: a second one would do the same work."""
    look = look_at_jobs([job])
    return bool(look.trouble) or any(row.state.is_alive for row in look.rows)
