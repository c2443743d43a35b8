"""What this process's Slurm says of jobs, in the rows of launch/slurm/queue.py, once it answers and once it is so."""

from __future__ import annotations

from collections.abc import Callable

from launch.slurm.queue import JobRow, look_at_jobs
from launch.slurm.states import JobStage, reason_in_words
from launch.view.status import render_status
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from tests.slurm.cluster_kit import PATIENCE_S, wait_until


def rows_of(*jobs: int) -> tuple[JobRow, ...]:
    """What Slurm says of them, as soon as it answers: a busy one may not."""
    for _ in Deadline(PATIENCE_S).polls(0.5):
        look = look_at_jobs(jobs)
        if not look.trouble:
            return look.rows
    raise AssertionError(look.trouble)


def row_of(job: int) -> JobRow:
    (row,) = rows_of(job)
    return row


def wait_row(job: int, is_so: Callable[[JobRow], bool], what: str, patience_s: float = PATIENCE_S) -> JobRow:
    seen: list[JobRow] = []

    def is_there() -> bool:
        seen.append(row_of(job))
        return is_so(seen[-1])

    wait_until(is_there, f"job {job} {what}", patience_s)
    return seen[-1]


def wait_name(job: int, name: str, patience_s: float = PATIENCE_S) -> JobRow:
    return wait_row(job, lambda row: row.state.name == name, name, patience_s)


def wait_reason(job: int, reason: str, patience_s: float = PATIENCE_S) -> JobRow:
    row = wait_row(job, lambda row: row.reason == reason, f"waits for {reason}", patience_s)
    assert row.state.life is JobStage.WAITING
    assert " " in reason_in_words(reason)
    return row


def status_of(layout: RunLayout) -> str:
    """`rlhpc status`, as soon as Slurm answers."""
    for _ in Deadline(PATIENCE_S).polls(0.5):
        text = render_status(layout)
        if "Slurm did not answer" not in text:
            return text
    raise AssertionError(text)
