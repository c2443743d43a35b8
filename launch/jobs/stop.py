"""End a run: well, with a checkpoint, or at once.

Eats a run directory, ends the launcher of this machine or the jobs of Slurm.  Promises: only the recorded launcher and
recorded job ids are touched, nothing by its name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

from launch.batch.job_records import read_records
from launch.batch.slurm_commands import SlurmError, slurm
from launch.jobs.queue import JobRow, look_at_jobs
from launch.jobs.states import Life
from launch.run_directory import launcher_of
from rlhpc.errors import RunDirectoryError
from rlhpc.files import write_atomically
from rlhpc.run_layout import RunLayout

Tell = Callable[[str], None]

ASK_S = 3.0
SAY_S = 60.0  # a line at least so often while nothing changes
FOLLOWERS_S = 120.0  # what outlives the controller for so long does not end by itself
PATIENCE_S = 60.0  # with a slurmctld that is away
INTERRUPTED = 130
_IS_OVER = ("Invalid job id specified", "already completing or completed")


def stop_run(layout: RunLayout, *, now: bool, tell: Tell) -> int:
    """Finish the step, save, and end every process of a run; returns the exit status when nothing is left.

    now: no step is finished.  A local run has what Ctrl-C gives it, seven seconds; jobs are cancelled.
    Raises RunDirectoryError: not a run directory; SlurmError: it has jobs, and Slurm does not answer.
    """
    if not layout.config.exists():
        raise RunDirectoryError(f"{layout.root}: not a run directory")
    pid = launcher_of(layout)
    if pid is not None:
        os.kill(pid, signal.SIGINT if now else signal.SIGTERM)
        while launcher_of(layout) is not None:
            time.sleep(0.2)
        tell(_outcome(layout, "`rlhpc run … --resume`"))
        return 0
    if not _living(layout):
        tell(f"{layout.root}: nothing runs here")
        return 0
    request = layout.abort_request if now else layout.stop_request
    write_atomically(request, b"")
    try:
        _see_to_the_end(layout, now, tell)
    except SlurmError as error:
        raise SlurmError(
            f"{error}; {request.name} stands in {layout.root}: what runs sees it and ends by itself, what waits in the "
            f"queue does when it begins; the same command again, or `scancel {_ids(layout)}`, ends the rest"
        ) from error
    except KeyboardInterrupt:
        tell(f"{layout.root}: the request stands and its jobs will end; `rlhpc status {layout.root}` shows them")
        return INTERRUPTED
    tell(_outcome(layout, f"`rlhpc resume {layout.root}`"))
    return 0


def cancel(ids: Iterable[str], *options: str) -> None:
    """scancel; one that has ended by itself is no error.  Raises SlurmError."""
    listed = list(dict.fromkeys(ids))
    if not listed:
        return
    try:
        slurm("scancel", *options, *listed, patience_s=PATIENCE_S)
    except SlurmError as error:
        if not any(words in str(error) for words in _IS_OVER):
            raise


def _see_to_the_end(layout: RunLayout, now: bool, tell: Tell) -> None:
    said, said_at = "", 0.0
    led_at, pause_s = time.monotonic(), 0.2
    while rows := _living(layout):
        leads = {record.job_id for record in read_records(layout) if record.is_lead}
        waiting = [row for row in rows if row.state.life in (Life.WAITING, Life.HELD)]
        if any(row.job_id in leads for row in rows):
            led_at = time.monotonic()
        if now or time.monotonic() - led_at > FOLLOWERS_S:
            cancel(str(row.job_id) for row in rows if row.state.life is not Life.ENDING)
        elif waiting:  # of these, only what has not begun meanwhile
            cancel((str(row.job_id) for row in waiting), "--state=PENDING")
        words = ", ".join(dict.fromkeys(f"{row.name} {row.label} {row.state.name.lower()}" for row in rows))
        if words != said or time.monotonic() - said_at > SAY_S:
            tell(f"waits for    {words}")
            said, said_at = words, time.monotonic()
        pause_s = min(2 * pause_s, ASK_S)
        time.sleep(pause_s)


def _ids(layout: RunLayout) -> str:
    return " ".join(str(record.job_id) for record in read_records(layout))


def _living(layout: RunLayout) -> list[JobRow]:
    deadline = time.monotonic() + PATIENCE_S
    ids = [record.job_id for record in read_records(layout)]
    while (look := look_at_jobs(ids)).trouble:
        if time.monotonic() > deadline or "no such command" in look.trouble:
            raise SlurmError(look.trouble)
        time.sleep(ASK_S)
    return [row for row in look.rows if row.state.is_alive]


def _outcome(layout: RunLayout, command: str) -> str:
    return f"{layout.root}: " + ("complete" if layout.summary.exists() else f"stopped; {command} goes on")
