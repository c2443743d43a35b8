"""What the components of test_het_executor.py run.  Light: every task imports it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import submitit


def where_am_i() -> dict[str, object]:
    """What a task sees of itself."""
    seen = submitit.JobEnvironment()
    print(f"rank {seen.global_rank} of {seen.num_tasks} speaks")
    names = ("RLHPC_HET_COMPONENT", "SLURM_JOB_PARTITION", "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME")
    return {
        "rank": seen.global_rank,
        "num_tasks": seen.num_tasks,
        "num_nodes": seen.num_nodes,
        "nodes": list(seen.hostnames),
        "step": os.environ.get("SLURM_STEP_ID"),
        **{name: os.environ.get(name) for name in names},
    }


def fail() -> NoReturn:
    """Raise."""
    raise ArithmeticError("one third of a GPU")


def sleep_long() -> str:
    """Outlast the test unless ended."""
    try:
        print("asleep", flush=True)
        time.sleep(600)
    finally:
        print("leaves in good order", flush=True)
    return "slept"


class FailsFirst:
    """Dies without a result until it has been begun `times` times."""

    def __init__(self, tally: Path, times: int) -> None:
        self.tally, self.times = tally, times

    def __call__(self) -> int:
        with self.tally.open("a") as file:
            file.write("x")
        started = len(self.tally.read_text())
        if started <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)
        return started


class WaitsFor:
    """Ends when a file is there: when the test has seen what it wanted to see."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> str:
        while not self.path.exists():
            time.sleep(0.1)
        return "waited"


class FailsAfter(WaitsFor):
    """Raises when a file is there."""

    def __call__(self) -> str:
        super().__call__()
        return fail()


class Counts:
    """Counts to `end`, and on until its life is `min_lives`; continues where its checkpoint was taken."""

    def __init__(self, end: int, min_lives: int = 1, begun_at: int = 0, lives: int = 1) -> None:
        self.end, self.min_lives = end, min_lives
        self.count, self.begun_at, self.lives = begun_at, begun_at, lives

    def __call__(self) -> tuple[int, int, int]:
        while self.count < self.end or self.lives < self.min_lives:
            self.count += 1
            print(f"life {self.lives} counts {self.count}", flush=True)
            time.sleep(0.1)
        return self.lives, self.begun_at, self.count

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(Counts(self.end, self.min_lives, self.count, self.lives + 1))
