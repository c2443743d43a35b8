"""Ctrl-C and `rlhpc stop --now` when no controller runs that would hear of it: between two attempts, and at the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launch.supervisor import controller_job
from tests.unit.launch.test_local_run import COMPLETE, STUBBORN, TRAINS, Lab, assert_gone

pytestmark = pytest.mark.starts
DEAF = STUBBORN.replace("time.sleep(600)", "(root / 'deaf').touch(); time.sleep(600)")
ONCE_DEAF = "import time\nwhile not (root / 'deaf').exists(): time.sleep(0.02)\n"
FAILS = TRAINS + "time.sleep(1)\n" + ONCE_DEAF + TRAINS.replace("step=3", "step=4") + "sys.exit(1)"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.parametrize("is_asked", ["SIGINT", "ABORT"])
def test_what_is_asked_for_between_two_attempts_ends_everything_as_soon(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, is_asked: str
) -> None:
    monkeypatch.setattr(controller_job, "INTERRUPT_S", 0.5)
    monkeypatch.setattr(controller_job, "FINISH_GRACE_S", 1000.0)
    sent: list[str] = []

    def ask() -> None:
        if not sent and lab.told and "another attempt in" in lab.told[-1]:
            sent.append(is_asked)
            if is_asked == "ABORT":
                lab.layout.abort_request.touch()
            else:
                os.kill(os.getpid(), signal.SIGINT)

    assert lab.run(ask, controller_0=FAILS, generator_0=DEAF) == 0  # what is lost, the failed attempt has lost
    assert_gone(lab.pids)


def test_an_interrupt_while_a_complete_run_ends_kills_what_is_left(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_job, "FINISH_GRACE_S", 1000.0)
    ended = lab.layout.exit_record("controller", 0, 0)
    looks: list[int] = []

    def interrupt() -> None:
        if ended.exists():
            looks.append(signal.SIGINT)
            if len(looks) == 20:  # and no look at the controller sees it run
                os.kill(os.getpid(), signal.SIGINT)

    assert lab.run(interrupt, controller_0=ONCE_DEAF + COMPLETE, generator_0=DEAF) == 0
    assert_gone(lab.pids)
