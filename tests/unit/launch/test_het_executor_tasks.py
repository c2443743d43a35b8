"""Tasks and their supervisor as real processes, without Slurm: results, signals, restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission, pickle_load

from launch.submitit_hetjob.executor import Component, NativeComponent, plan_text
from launch.submitit_hetjob.step import LEAVES_VARIABLE
from launch.submitit_hetjob.supervisor import read_plan
from rlhpc.base.patience import Deadline
from tests.patience import PATIENCE_S
from tests.slurm.het_callables import Counts, FailsFirst, fail, sleep_long

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "5"}


def begin(folder: Path, function: Callable[[], Any], **variables: str) -> subprocess.Popen[bytes]:
    """One task of job 5, once it has spoken."""
    submission = DelayedSubmission(function)
    submission.set_timeout(60, 3)
    submission.dump(folder / "5_submitted.pkl")
    words = [sys.executable, "-u", "-m", "launch.submitit_hetjob.task", str(folder)]
    out = (folder / "out").open("wb")
    process = subprocess.Popen(words, env={**ENVIRONMENT, **variables}, stdout=out, stderr=subprocess.DEVNULL)
    deadline = Deadline(PATIENCE_S)
    while not {"counts 3", "asleep"} & set((folder / "out").read_text().replace("life 1 ", "").splitlines()):
        assert process.poll() is None
        assert not deadline.is_over
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGTERM])
def test_rank_0_stores_its_checkpoint_and_leaves_a_note(tmp_path: Path, signum: signal.Signals) -> None:
    process = begin(tmp_path, Counts(900))
    process.send_signal(signum)
    process.send_signal(signal.SIGUSR2)  # Slurm and the supervisor may both send one; the second does no harm
    assert process.wait(PATIENCE_S) == 255
    assert json.loads((tmp_path / "5_requeue.json").read_text()) == {"remaining_timeouts": 3}
    assert pickle_load(tmp_path / "5_submitted.pkl").function.lives == 2
    assert not (tmp_path / "5_0_result.pkl").exists()


def test_another_rank_stays_until_rank_0_has_stored(tmp_path: Path) -> None:
    process = begin(tmp_path, Counts(900), SLURM_PROCID="1")
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    (tmp_path / "5_requeue.json").write_text("{}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_every_task_leaves_in_good_order_when_told_to(tmp_path: Path) -> None:
    process = begin(tmp_path, sleep_long)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGUSR1
    assert "leaves in good order" in (tmp_path / "out").read_text()


def test_a_task_without_a_checkpoint_notes_that_it_was_taken_away(tmp_path: Path) -> None:
    process = begin(tmp_path, sleep_long, **{LEAVES_VARIABLE: "1"})
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert (tmp_path / "5_requeue.json").exists()


def supervise(
    folder: Path,
    function: Callable[[], Any],
    essential: bool,
    restarts: int = 0,
    before: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """Run a job of one component in the batch step; returns exit status and log."""
    component = Component("work", function, essential=essential, restarts=restarts)
    directory = folder / "5" / "work"
    directory.mkdir(parents=True)
    DelayedSubmission(function).dump(directory / "5_submitted.pkl")
    text = plan_text([NativeComponent(component, {})], python=sys.executable, has_checkpoint=[False])
    (folder / "5" / "plan.json").write_text(text)
    before()
    words = [sys.executable, "-m", "launch.submitit_hetjob.supervisor", "--folder", str(folder)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_component_in_the_batch_step_leaves_its_result_where_submitit_looks(tmp_path: Path) -> None:
    status, log = supervise(tmp_path, Counts(1), essential=True)
    assert status == 0, log
    assert pickle_load(tmp_path / "5" / "work" / "5_0_result.pkl") == ("success", (1, 0, 1))
    assert "counts 1" in (tmp_path / "5" / "work" / "5_0_log.out").read_text()


def test_a_kill_in_the_middle_of_a_checkpoint_costs_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "5" / "work"

    def cut_short() -> None:
        (directory / "5_submitted.pkl").rename(directory / "5_submitted.pkl.save_tmp")
        (directory / "5_0_result.pkl.save_tmp").write_text("half")

    status, log = supervise(tmp_path, Counts(1), essential=True, before=cut_short)
    assert status == 0, log
    assert pickle_load(directory / "5_0_result.pkl") == ("success", (1, 0, 1))
    assert not list(directory.glob("*.save_tmp"))


def test_an_essential_component_that_fails_fails_the_job(tmp_path: Path) -> None:
    status, log = supervise(tmp_path, fail, essential=True)
    assert status == 1
    assert "work: failed (exit status 1); it is essential" in log


def test_another_is_begun_again_as_often_as_allowed(tmp_path: Path) -> None:
    status, log = supervise(tmp_path, FailsFirst(tmp_path / "tally", times=2), essential=False, restarts=2)
    assert (status, log.count("restarted")) == (0, 2), log
    assert pickle_load(tmp_path / "5" / "work" / "5_0_result.pkl") == ("success", 3)


def test_only_success_lasts_into_the_next_life(tmp_path: Path) -> None:
    for name, function, recorded in (("good", Counts(1), True), ("bad", fail, False)):
        status, log = supervise(tmp_path / name, function, essential=False)
        assert status == 0, log
        assert (tmp_path / name / "5" / "finished.json").exists() == recorded


def test_a_plan_that_does_not_turn_up_or_is_of_another_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does this node see"):
        read_plan(tmp_path, patience_s=0.0)
    (tmp_path / "plan.json").write_text('{"schema": 2}')
    with pytest.raises(SystemExit, match="schema=2: legal: 1"):
        read_plan(tmp_path)


@pytest.mark.starts
def test_a_log_that_takes_no_more_ends_no_job(tmp_path: Path) -> None:
    job = tmp_path / "7"
    (job / "task").mkdir(parents=True)
    command = ["sh", "-c", 'touch "$1/7_0_result.pkl"', "task"]
    part = {"name": "task", "is_essential": True, "stores_checkpoint": False, "restarts": 0, "group": None}
    part |= {"in_batch_step": True, "num_tasks": 1, "command": command, "stderr_to_stdout": True}
    plan = {"schema": 1, "warning": "USR2", "warn_s": 60, "components": [part]}
    (job / "plan.json").write_text(json.dumps(plan))
    words = [sys.executable, "-u", "-m", "launch.submitit_hetjob.supervisor", "--folder", str(tmp_path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, env={**os.environ, "SLURM_JOB_ID": "7"}, stdout=full, check=False)
    assert done.returncode == 0
