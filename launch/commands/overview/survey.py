"""All runs below some directories and in the queue, with their states; Slurm is queried once for all.

Input: directories.  Output: Survey, sorted by the last sign of activity.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launch.commands.overview.find import DEPTH, Identity, RunFiles, find_runs, run_at
from launch.commands.overview.standing import Queue, Standing, State, is_mine, standing_of
from launch.slurm.queue import JobRow, MyQueue, look_at_my_jobs

_AT_ONCE = 16
_NOT_ASKED = "another user's jobs are not queried"


@dataclass(frozen=True, slots=True)
class Survey:
    """All runs, the latest sign of life first."""

    runs: tuple[Standing, ...]
    remarks: tuple[str, ...]
    now: float


def survey(tops: Sequence[Path], depth: int = DEPTH, queue: MyQueue | None = None) -> Survey:
    """Find the runs and their states.  queue: used instead of asking Slurm.  Raises nothing."""
    found = find_runs(tops, depth)
    asked = look_at_my_jobs() if queue is None else queue
    runs = {files.identity: files for files in found.runs}
    remarks = [*found.remarks, *_elsewhere(asked, runs)]
    by_run, others = _jobs_by_run(asked, runs.values())
    now = time.time()

    def judge(files: RunFiles) -> Standing:
        trouble = asked.trouble if is_mine(files) else _NOT_ASKED
        return standing_of(files, Queue(tuple(by_run.get(files.identity, ())), others, trouble), now)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        judged = sorted(pool.map(judge, runs.values()), key=lambda each: -each.figures.last_sign_unix_s)
    # Without a Slurm here nothing is said about it, unless a run needs it.
    if asked.trouble and (asked.is_there or any(run.state is State.UNKNOWN for run in judged)):
        remarks.append(asked.trouble)
    return Survey(tuple(judged), tuple(remarks), now)


def _elsewhere(queue: MyQueue, runs: dict[Identity, RunFiles]) -> list[str]:
    """Add runs that are in the queue but in no directory that was searched; returns problems with them."""
    remarks, known = [], {files.root for files in runs.values()}
    waiting = {job.run_directory: job.row for job in queue.jobs if job.run_directory and job.row.state.is_alive}
    for root in waiting.keys() - known:
        files = run_at(root)
        if files is None:
            remarks.append(f"job {waiting[root].label}: its run directory {root} does not exist; `scancel` ends it")
        elif files.identity not in runs:
            runs[files.identity] = files
    return sorted(remarks)


def _jobs_by_run(
    queue: MyQueue, runs: Iterable[RunFiles]
) -> tuple[dict[Identity, list[JobRow]], dict[int, list[JobRow]]]:
    """Rows by the directory that their log names, and by id those whose log names none."""
    names = {files.root: files.identity for files in runs}
    by_run: dict[Identity, list[JobRow]] = defaultdict(list)
    others: dict[int, list[JobRow]] = defaultdict(list)
    for job in queue.jobs:
        root = job.run_directory
        if root is None:
            others[job.row.job_id].append(job.row)
        elif identity := names.get(root) or _identity(root):
            by_run[identity].append(job.row)
    return by_run, others


def _identity(root: Path) -> Identity | None:
    try:
        stat = root.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
