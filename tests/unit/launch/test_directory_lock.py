"""The lock of a run directory: one holder, and it holds as long as any process that has inherited it lives."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run_directory.owner import LockHeld, holders, lock_directory, own_run
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RunDirectoryError
from tests.unit.launch.launchers import controller_elsewhere

ROOT = Path(__file__).parents[3]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path)


def test_of_two_one_gets_the_lock_and_the_other_after_it(layout: RunLayout) -> None:
    first = lock_directory(layout)
    with pytest.raises(LockHeld):
        lock_directory(layout)
    first.close()
    lock_directory(layout).close()


@pytest.mark.starts
def test_a_child_keeps_the_lock_that_its_parent_has_closed_and_is_named(layout: RunLayout) -> None:
    lock = lock_directory(layout)
    words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=(lock.descriptor,)) as child:
        lock.close()
        with pytest.raises(LockHeld):
            lock_directory(layout)
        assert [identity.pid for identity in holders(layout)] == [child.pid]
    lock_directory(layout).close()


def test_a_lock_of_a_directory_that_was_made_again_excludes_nobody(layout: RunLayout) -> None:
    first = lock_directory(layout)
    layout.lock.unlink()
    assert not first.is_of_the_directory
    second = lock_directory(layout)
    assert second.is_of_the_directory
    first.close()
    second.close()


def test_who_is_refused_leaves_the_launcher_of_a_living_run_recorded(layout: RunLayout) -> None:
    layout.config.write_text('{"config": {}, "hash": ""}')
    with controller_elsewhere(layout):
        recorded = layout.launcher.read_bytes()
        for _ in range(2):  # or the second start would take its own record for nobody's
            with (
                pytest.raises(RunDirectoryError, match="a run is active here on another-host"),
                own_run(layout, lambda _: None, may_take_over=True),
            ):
                raise AssertionError("two launchers own a run")
        assert layout.launcher.read_bytes() == recorded


@pytest.mark.starts
def test_where_processes_of_others_are_hidden_none_of_them_is_the_recorded_one() -> None:
    """hidepid=1: its directory in /proc is there, and what it holds is for its owner."""
    looks = "import os; from launch.run_directory.owner import ProcessIdentity as P; before = P.of(1); "
    leaves = "os.setgroups([]); os.setgid(65534); os.setuid(65534); "
    as_nobody = shlex.join([sys.executable, "-c", f"{looks}{leaves}print(before.pid, before.is_alive, P.of(1))"])
    script = f"mount -t proc -o hidepid=1 proc /proc && {as_nobody}; exit $?"
    words = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"only root may do that: {done.stderr.strip()}")
    assert (done.returncode, done.stdout.strip()) == (0, "1 False None"), done.stderr
