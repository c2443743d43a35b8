"""Processes are started, watched and ended; the first failure is told in a line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.commands import local_executor as local
from launch.commands.local_executor import LocalExecutor
from launch.plan.processes import ProcessPlan, RunPlan
from launch.run_directory.owner import RunOwner
from launch.run_files.exit_records import last_error_line, read_failures
from rlhpc.run_layout import RunLayout
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.starts

PATIENT = "import time; time.sleep(60)"
STUBBORN = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(60)"
WITH_CHILD = (
    "import subprocess, sys, pathlib, time;"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "pathlib.Path('child').write_text(str(child.pid)); time.sleep({})"
)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def executor(tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalExecutor]:
    """Makes an executor of roles that each run some Python."""
    real = subprocess.Popen

    def popen(command: list[str], **settings: object) -> subprocess.Popen[bytes]:
        assert command[:3] == [sys.executable, "-m", "rlhpc.roles"]
        return real([sys.executable, "-c", *command[3:]], cwd=tmp_path, **settings)

    monkeypatch.setattr("launch.commands.local_executor.subprocess.Popen", popen)

    def make(**programs: str) -> LocalExecutor:
        processes = tuple(
            ProcessPlan(
                name.rpartition("_")[0], int(name.rpartition("_")[2]), (code,), is_expendable="generator" in name
            )
            for name, code in programs.items()
        )
        layout = RunLayout(tmp_path / "run")
        return LocalExecutor(RunPlan(layout, 0, processes), told.append, RunOwner(layout, None))

    return make


def test_a_controller_that_ends_well_ends_the_run_well(executor: Callable[..., LocalExecutor]) -> None:
    with executor(controller_0="", trainer_0="", generator_0="") as started:
        assert started.wait(lambda: None) == 0


def test_a_missed_process_ends_the_run_with_its_status_and_its_last_error(
    executor: Callable[..., LocalExecutor], told: list[str], tmp_path: Path
) -> None:
    program = "import sys; sys.exit('2026-01-01 trainer-0 rlhpc.lifecycle ERROR CheckpointError: torn')"
    with executor(controller_0=PATIENT, trainer_0=program, generator_0=PATIENT) as started:
        assert started.wait(lambda: None) == 1
    (line,) = told
    assert line.startswith("trainer-0 ended with exit status 1: CheckpointError: torn (log: ")
    assert str(tmp_path / "run/logs/trainer-0/attempt_0.log") in line


def test_the_first_failure_is_written_down_also_of_a_process_that_was_killed(
    executor: Callable[..., LocalExecutor], tmp_path: Path
) -> None:
    killed = "import os; print('step 5', flush=True); os.kill(os.getpid(), 9)"
    with executor(controller_0=PATIENT, trainer_0=killed, generator_0=PATIENT) as started:
        assert started.wait(lambda: None) == 9
    (record,) = read_failures(RunLayout(tmp_path / "run"), 0)  # not that the others were told to end
    assert (record.name, record.status, record.last_words) == ("trainer-0", 137, "step 5")


def test_an_expendable_process_is_missed_only_when_it_was_the_last_of_its_kind(
    executor: Callable[..., LocalExecutor], told: list[str]
) -> None:
    killed = "import os; os.kill(os.getpid(), 9)"
    with executor(controller_0="import time; time.sleep(1)", generator_0=killed, generator_1=PATIENT) as started:
        started.wait(lambda: _end(started, "generator-1") if told else None)
    assert told[0].startswith("generator-0 ended with signal SIGKILL: no output")
    assert told[0].endswith("the run continues without it")
    told.clear()
    with executor(controller_0=PATIENT, generator_0=killed) as started:
        assert started.wait(lambda: None) == signal.SIGKILL
    assert "the run continues" not in told[0]


def test_what_does_not_end_in_time_is_killed(
    executor: Callable[..., LocalExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "INTERRUPT_GRACE_S", 0.5)
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell has put the tests in the background
    with executor(controller_0=STUBBORN, generator_0=STUBBORN) as started:
        pids = [running.process.pid for running in started._running]
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        assert started.wait(lambda: None) == 130
        assert time.monotonic() - began < 5
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_everything_at_once(executor: Callable[..., LocalExecutor]) -> None:
    with executor(controller_0=STUBBORN, generator_0=STUBBORN) as started:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        began = time.monotonic()
        assert started.wait(lambda: None) == 130
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("lives_s", [0, 60])
def test_children_that_a_process_leaves_behind_end_with_it(
    executor: Callable[..., LocalExecutor], tmp_path: Path, lives_s: int
) -> None:
    """Whether it ends by itself or is killed when the executor is left."""
    with executor(controller_0=WITH_CHILD.format(lives_s)) as started:
        if lives_s == 0:
            started.wait(lambda: None)
        else:
            while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
                time.sleep(0.02)
        child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and _lives(child):
        time.sleep(0.02)
    assert not _lives(child)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (b"", "no output"),
        (b"Segmentation fault\n\n", "Segmentation fault"),
        (b"a role-0 rlhpc.lifecycle ERROR RoleFailed: gone\na role-0 rlhpc.lifecycle INFO x\n", "RoleFailed: gone"),
        (b"a r rlhpc.x ERROR first\na r rlhpc.lifecycle ERROR last\nwarning: leaked semaphores\n", "last"),
        (b"vllm.engine ERROR theirs\nTraceback\nOSError: \xff\n", "OSError: \ufffd"),
    ],
)
def test_last_words_are_our_last_error_or_the_last_line(log: bytes, words: str) -> None:
    assert last_error_line(log) == words


def _end(executor: LocalExecutor, name: str) -> None:
    for running in executor._running:
        if running.plan.name == name:
            running.process.kill()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_temporary_files_of_all_processes_are_private_and_go_with_the_run(
    executor: Callable[..., LocalExecutor], tmp_path: Path
) -> None:
    leaves_one = (
        "import os, pathlib, tempfile; pathlib.Path('seen').write_text(tempfile.gettempdir());"
        "tempfile.mkstemp(); assert os.stat(tempfile.gettempdir()).st_mode & 0o777 == 0o700"
    )
    with executor(controller_0=leaves_one) as started:
        assert started.wait(lambda: None) == 0
        directory = Path((tmp_path / "seen").read_text())
        assert list(directory.iterdir())
    assert not directory.exists()
