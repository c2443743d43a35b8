"""A file system that refuses for a while: every system call of a kind below a run directory fails; the run goes on."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Sequence

import pytest

from tests.faults.refusing_disk import COMPILER, ERRORS, KINDS, READ_ONLY, RefusingDisk
from tests.ring.run_kit import Lab, Run, make_lab
from tests.ring.run_kit import rlhpc as run_command

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
SLOW = {"task": "tests.ring.ring_rewards:slow_parity"}
ENDLESS = {"num_steps": 1_000_000}
FURTHER_STEPS = 3


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("refuses"))


def start(lab: Lab, name: str) -> tuple[Run, RefusingDisk]:
    """A run that lasts, with a checkpoint every four steps, on a disk that can refuse."""
    disk = RefusingDisk(lab.root, lab.layout(name).root)
    run_file = lab.run_file(name, run=ENDLESS, data=SLOW, checkpoint={"every_steps": 4})
    return Run(run_file, lab.layout(name), environment=disk.environment), disk


def refuse(run: Run, disk: RefusingDisk, number: int, kinds: Sequence[str], seconds: float) -> None:
    """For so long; then the run does further steps, in the same attempt."""
    with disk.refuses(number, kinds):
        time.sleep(seconds)
    run.wait_for_step(run.status()["step"] + FURTHER_STEPS)
    assert len(run.layout.attempts.read_text().splitlines()) == 1, run.story()


def test_a_second_in_which_everything_fails_ends_no_run_and_costs_no_attempt(lab: Lab) -> None:
    chance = random.Random(time.time_ns())
    run, disk = start(lab, "second")
    with run:
        for number in (errno.EIO, errno.ESTALE, errno.EACCES):
            run.wait_for_step(2)
            time.sleep(chance.uniform(0.0, 1.0))
            refuse(run, disk, number, KINDS, 1.0)
        assert disk.num_refused


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[] if number in (errno.ESTALE, errno.EACCES) else pytest.mark.soak)
        for number in ERRORS
    ],
    ids=errno.errorcode.get,
)
def test_no_kind_of_call_that_fails_for_ten_seconds_ends_a_run(lab: Lab, number: int) -> None:
    chance = random.Random(number)
    run, disk = start(lab, f"ten-{number}")
    with run:
        run.wait_for_step(2)
        for kind in chance.sample(KINDS, 3):
            time.sleep(chance.uniform(0.0, 2.0))
            refuse(run, disk, number, (kind,), 10.0)
        refuse(run, disk, number, KINDS, 10.0)


def test_a_run_whose_disk_is_read_only_is_stopped_by_a_signal(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    run, disk = start(lab, "read-only")
    with run:
        run.wait_for_step(2)
        for name, value in disk.environment.items():
            monkeypatch.setenv(name, value)
        with disk.refuses(errno.EROFS, READ_ONLY):
            stopped = run_command("stop", str(run.layout.root), "--now")
        assert "by SIGINT" in stopped.stdout, stopped
        assert "STOP" not in stopped.stderr, stopped
        run.finish()
        run.assert_nothing_is_left()
