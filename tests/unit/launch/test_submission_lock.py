"""Of two submissions at once one is refused; what the dead have left behind keeps nobody out."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.run_directory.owner import ABANDONED_S, Holder, submits_alone
from rlhpc.protocol.errors import RunDirectoryError
from tests.full_disk import fill, small_disk


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / ".run.submitting"


def left_behind(lock: Path, holder: Holder) -> None:
    lock.write_text(holder.to_json())


def holder(unix_time_s: float | None = None, **changes: Any) -> Holder:
    """This process, but for `changes` of its identity."""
    mine = Holder.of_this_process()
    return Holder(replace(mine.process, **changes), unix_time_s or mine.unix_time_s)


def test_the_second_is_refused_and_told_who_and_how_to_remove_it(lock: Path) -> None:
    with submits_alone(lock, print):
        with (
            pytest.raises(RunDirectoryError, match=f"by pid {os.getpid()} on .*{socket.gethostname()}.*`rm {lock}`"),
            submits_alone(lock, print),
        ):
            raise AssertionError
        assert lock.exists()
    assert not list(lock.parent.iterdir())


def test_it_is_given_up_when_a_submission_fails(lock: Path) -> None:
    with pytest.raises(KeyboardInterrupt), submits_alone(lock, print):
        raise KeyboardInterrupt
    assert not lock.exists()


@pytest.mark.starts
def test_that_of_a_process_which_has_ended_is_taken_over_with_a_word(lock: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    said: list[str] = []
    left_behind(lock, holder(pid=ended.pid))
    with submits_alone(lock, said.append):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    (line,) = said
    begins = f"taken over  {lock}: left behind by pid {ended.pid} on {socket.gethostname()}, "
    assert re.fullmatch(re.escape(begins) + r"\d+ s ago", line)
    assert not list(lock.parent.iterdir())


def test_a_pid_that_was_given_to_another_process_keeps_nobody_out(lock: Path) -> None:
    left_behind(lock, holder(start_ticks=0))
    with submits_alone(lock, print):
        pass


def test_that_of_an_earlier_boot_of_this_machine_keeps_nobody_out(lock: Path) -> None:
    left_behind(lock, holder(boot_id="another"))
    with submits_alone(lock, print):
        pass


def test_that_of_another_host_holds_for_ten_minutes(lock: Path) -> None:
    there = {"host": "another-host", "boot_id": "another", "pid": 1}
    for behind_s in (0, ABANDONED_S + 1, -ABANDONED_S):  # the clock of that host
        left_behind(lock, holder(time.time() - behind_s, **there))
        with pytest.raises(RunDirectoryError, match="pid 1 on another-host"), submits_alone(lock, print):
            raise AssertionError
        then = time.time() - ABANDONED_S - 1
        os.utime(lock, (then, then))
        with submits_alone(lock, print):
            pass
    assert not list(lock.parent.iterdir())


def test_one_that_is_half_written_counts_as_held_until_it_is_old(lock: Path) -> None:
    lock.touch()
    with pytest.raises(RunDirectoryError, match="by an unknown process"), submits_alone(lock, print):
        raise AssertionError
    os.utime(lock, (0, 0))
    with submits_alone(lock, print):
        pass


@pytest.mark.starts
def test_of_many_at_once_one_holds_it(lock: Path) -> None:
    """Also where a stale one is to be taken over by all of them."""
    left_behind(lock, holder(start_ticks=0))
    code = (
        "import sys, time; from pathlib import Path; from launch.run_directory.owner import submits_alone\n"
        "from rlhpc.protocol.errors import RunDirectoryError\n"
        "sys.stdin.readline()\n"
        "try:\n    with submits_alone(Path(sys.argv[1]), lambda _: None):\n"
        "        print('alone'); sys.stdout.flush(); sys.stdin.readline()\n"
        "except RunDirectoryError:\n    print('refused'); sys.stdout.flush()\n"
    )
    words = [sys.executable, "-c", code, str(lock)]
    racers = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]
    for racer in racers:
        racer.communicate("done\n")
    assert sorted(said) == ["alone"] + ["refused"] * 5


@pytest.mark.starts
def test_a_full_disk_leaves_no_lock_behind_and_the_error_names_it(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    lock = disk / ".run.submitting"
    with small_disk(disk, 1 << 20):
        fill(disk / "filler", but_bytes=0)
        with pytest.raises(OSError, match="No space left on device") as caught, submits_alone(lock, print):
            raise AssertionError
        assert caught.value.filename == str(lock)
        (disk / "filler").unlink()
        with submits_alone(lock, print):
            pass
