"""The processes of an evaluation: started, watched, ended.

Input: the directory of an evaluation, GPUs.  Output: logs and samples in the directory.  A process that fails ends the
others; all end with this one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from launch.common.text_table import span
from launch.plan.gpu_map import VARIABLE, GpuMap
from launch.run_files.exit_records import last_error_in
from launch.supervisor.local_run import private_temporary_directory
from launch.supervisor.surroundings import caches_below
from rlhpc.errors import RoleFailed
from rlhpc.evaluation.settings import EvaluationSettings
from rlhpc.files import leave_deleted_directory
from rlhpc.parent_death import die_with

BLOCK_BYTES = 1 << 20
LOOK_S = 0.2
FIRST_WORD_S, WORD_S = 10.0, 30.0  # between two lines about progress: at first, and later
END_S = 10.0  # for a process that was asked to end; then it is killed


@contextmanager
def caches_on_this_node() -> Iterator[None]:
    """In a job of Slurm's: engines started meanwhile compile once, and not into a home directory on a network.

    Like those of a run (role_task.py).  What the user's environment says of a cache is left as it is.
    """
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    directory = private_temporary_directory()
    places = {variable: place for variable, place in caches_below(directory).items() if variable not in os.environ}
    os.environ.update(places)
    try:
        yield
    finally:
        for variable in places:
            os.environ.pop(variable, None)
        shutil.rmtree(directory, ignore_errors=True)


def sample_all(
    directory: Path, settings: EvaluationSettings, gpus: GpuMap, descriptor: int, tell: Callable[[str], None]
) -> None:
    """Draw the missing samples with as many processes as generation.num_replicas says.

    descriptor: of the directory's lock, which they keep.  Raises RoleFailed; KeyboardInterrupt for SIGTERM too.
    """
    num_shares = settings.config.generation.num_replicas
    count = _SampleCount(directory)
    progress = _Progress(settings.num_samples, count.look(), tell)
    with ExitStack() as stack:
        temporary = private_temporary_directory()
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        stack.enter_context(_sigterm_interrupts())
        running: dict[int, subprocess.Popen[bytes]] = {}
        stack.callback(lambda: end_all(running.values(), END_S))
        for index in range(num_shares):
            running[index] = _start(directory, index, num_shares, gpus, descriptor, temporary)
        while running:
            time.sleep(LOOK_S)
            progress.show(count.look())
            for index, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[index]
                if process.returncode != 0:
                    raise RoleFailed(_why(directory, index, process.returncode))


def _log(directory: Path, index: int) -> Path:
    return directory / f"evaluator-{index}.log"


def _start(
    directory: Path, index: int, num_shares: int, gpus: GpuMap, descriptor: int, temporary: Path
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    if (devices := gpus.variable(f"generator-{index}")) is not None:
        environment[VARIABLE] = devices
    words = [sys.executable, "-P", "-m", "rlhpc.roles.evaluator", str(directory), "--share", f"{index}/{num_shares}"]
    leave_deleted_directory(directory)
    with _log(directory, index).open("ab") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then asks the others
            pass_fds=(descriptor,),
            preexec_fn=partial(die_with, os.getpid()),  # this process has one thread
        )


def end_all(processes: Collection[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Ask them to end; each that has not after its time is killed."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _why(directory: Path, index: int, status: int) -> str:
    log = _log(directory, index)
    words = last_error_in(log)
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return f"evaluator-{index} ended with {how}: {words or 'its log says no more'}; see {log}"


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Slurm's and a user's `kill` are Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _SampleCount:
    """How many samples all processes have written: counts lines, and reads none again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}  # bytes of each file
        self._num_lines = 0

    def look(self) -> int:
        """Whole lines of all files.  Raises OSError."""
        for path in self._directory.glob("samples-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                while block := file.read(BLOCK_BYTES):
                    self._num_lines += block.count(b"\n")
                self._read[path] = file.tell()
        return self._num_lines


class _Progress:
    """Tells from time to time how far it has got."""

    def __init__(self, num_samples: int, num_done: int, tell: Callable[[str], None]) -> None:
        self._num_samples, self._first, self._tell = num_samples, num_done, tell
        self._told_s, self._pause_s = time.monotonic(), FIRST_WORD_S
        self._began: tuple[float, int] | None = None  # when the first new sample was there, and how many there were

    def show(self, num_done: int) -> None:
        now = time.monotonic()
        if self._began is None and num_done > self._first:
            self._began = now, num_done
        if now - self._told_s < self._pause_s:
            return
        self._told_s, self._pause_s = now, WORD_S
        left = "" if self._began is not None else ", engines are starting"
        if self._began is not None and num_done > self._began[1]:
            rate = (num_done - self._began[1]) / (now - self._began[0])
            left = f", {span(int((self._num_samples - num_done) / rate))} left"
        self._tell(f"{num_done} of {self._num_samples} samples{left}")
