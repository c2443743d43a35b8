"""A run directory has one owner: what an earlier start has left behind ends, and writes nothing when it wakes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_FENCED
from rlhpc.training.checkpoint_directory import latest_complete
from tests.faults.attempts_kit import Attempts
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import CEILING_S, GONE_S, Lab, Run, make_lab, rlhpc, summary_of

pytestmark = pytest.mark.ring
SOAK = (pytest.mark.long, pytest.mark.soak)
SLOW = {"task": "tests.ring.ring_rewards:slow_parity"}
ENDLESS = {"num_steps": 100_000}
EVERYBODY = ("controller-0", "trainer-0", "generator-0", "reward-0")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end if it is still there."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "delay_s", [0.8, *(pytest.param(delay_s, marks=pytest.mark.long) for delay_s in (0.0, 0.3, 1.5))]
)
def test_a_launcher_that_is_killed_while_roles_start_leaves_nothing_behind(lab: Lab, delay_s: float) -> None:
    name = f"orphaned-{delay_s:g}".replace(".", "-")
    layout = lab.layout(name)
    with Run(lab.run_file(name, run=ENDLESS), layout) as run:
        run.wait_for_file(layout.log("controller", 0, 0))  # the first process of four is being started
        time.sleep(delay_s)
        run.interrupt(signal.SIGKILL)
        run.process.wait()
        run.assert_nothing_is_left(within_s=GONE_S)


@pytest.mark.parametrize("name", ["controller-0", pytest.param("trainer-0", marks=SOAK)])
def test_a_resume_ends_what_stands_still_of_the_start_before(lab: Lab, name: str) -> None:
    run_file, layout = lab.run_file(f"left-{name}", run=ENDLESS, data=SLOW), lab.layout(f"left-{name}")
    with Run(run_file, layout) as first:
        first.wait_for_step(6)
        role = name.partition("-")[0]
        stale = first.role(role).pid
        with standing_still(stale):
            first.interrupt(signal.SIGKILL)
            first.process.wait()
            num_steps = first.status()["step"] + 24  # more than it can have done since it said so
            with Run(run_file, layout, "--resume", f"run.num_steps={num_steps}") as second:
                assert second.finish() == 0, second.story()
            assert f"pid {stale} ({role})" in second.output
        first.assert_nothing_is_left(within_s=GONE_S)
    assert_full_batches_trained_once(layout.rollouts, num_steps, 4, 4)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SOAK)])
def test_a_controller_that_wakes_in_its_successors_timeline_writes_nothing_and_ends(lab: Lab, seed: int) -> None:
    """As on another machine, whose processes nobody here can end: a node that hung, a cable that was cut."""
    num_steps, chance = 40, random.Random(seed)
    settings = {"run": {"num_steps": num_steps}, "data": SLOW, "checkpoint": {"every_steps": 4}}
    with Attempts(lab, f"woken-{seed}", **settings) as run:
        run.begin()
        run.start(*EVERYBODY)
        run.wait_until(
            lambda: (found := latest_complete(run.layout.checkpoints)) is not None and found[0] >= 4, "saved"
        )
        time.sleep(chance.random())
        os.kill(run.pid("controller-0"), signal.SIGSTOP)
        stale = run.abandon("controller-0")["controller-0"]
        try:
            run.kill("trainer-0", "generator-0", "reward-0")
            run.begin()
            run.start(*EVERYBODY)
            time.sleep(4 * chance.random())
            os.kill(stale.pid, signal.SIGCONT)
            assert stale.wait(CEILING_S) in (EXIT_FENCED, -signal.SIGKILL), run.story()
            assert run.status_of("controller-0") == 0, run.story()
        finally:
            stale.kill()
            stale.wait()
    assert_full_batches_trained_once(run.layout.rollouts, num_steps, 4, 4)
    assert summary_of(run.layout)["steps"] == num_steps


@pytest.mark.long
def test_of_two_resumes_at_once_one_goes_on_and_one_is_refused(lab: Lab) -> None:
    run_file, layout = lab.run_file("twice", run={"num_steps": 4}), lab.layout("twice")
    with Run(run_file, layout) as run:
        assert run.finish() == 0, run.story()
    words = ("--resume", "run.num_steps=30")
    with Run(run_file, layout, *words) as one, Run(run_file, layout, *words) as other:
        statuses = sorted((one.finish(), other.finish()))
        assert statuses == [0, 2], one.output + other.output
    refused = one if "a run is active here" in one.output else other
    assert "a run is active here (launcher pid" in refused.output
    assert len(layout.attempts.read_text().splitlines()) == 2
    assert_full_batches_trained_once(layout.rollouts, 30, 4, 4)


@pytest.mark.long
def test_many_stops_at_once_save_as_one_does(lab: Lab) -> None:
    name = "stopped-by-many"
    settings = {"run": ENDLESS, "data": SLOW, "checkpoint": {"every_steps": 1000}}
    run_file, layout = lab.run_file(name, **settings), lab.layout(name)
    with Run(run_file, layout) as run:
        run.wait_for_step(3)
        run.interrupt(signal.SIGTERM)
        run.interrupt(signal.SIGTERM)  # a batch system is not content with one
        said = [rlhpc("stop", str(layout.root)) for _ in range(2)]
        assert run.finish() == 0, run.story()
    assert all(done.returncode == 0 for done in said), said
    assert saved_step(layout) == run.status()["step"] >= 3


@pytest.mark.long
def test_a_run_that_is_taken_over_from_elsewhere_ends_and_says_why(lab: Lab) -> None:
    run_file, layout = lab.run_file("taken", run=ENDLESS, data=SLOW), lab.layout("taken")
    with Run(run_file, layout) as run:
        run.wait_for_step(2)
        successor = Fence.take(layout, 1)  # as on a machine that takes this one for dead
        assert run.finish(GONE_S) == EXIT_FENCED, run.story()
        run.assert_nothing_is_left(within_s=GONE_S)
    assert f"was taken over by {successor.owner}" in run.output
    successor.check()


def saved_step(layout: RunLayout) -> int:
    found = latest_complete(layout.checkpoints)
    assert found is not None
    return found[0]


@pytest.mark.long
def test_a_second_launcher_waits_for_nothing_of_a_living_run(lab: Lab) -> None:
    run_file, layout = lab.run_file("lived-in", run=ENDLESS, data=SLOW), lab.layout("lived-in")
    with Run(run_file, layout) as run:
        run.wait_for_step(1)
        refused = rlhpc("run", str(run_file), "--resume")
        assert refused.returncode == 2
        assert "a run is active here" in refused.stderr
        assert run.process.poll() is None
        run.interrupt()
        run.finish()
