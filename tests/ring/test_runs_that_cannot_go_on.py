"""Runs that must end by themselves, soon, with the reason and the remedy in a line; and some that need not."""

from __future__ import annotations

import re
import signal

import pytest

from rlhpc.protocol.errors import EXIT_CONFIG
from rlhpc.training.checkpoint_directory import latest_complete
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once, rollouts_on_disk
from tests.ring.run_kit import Lab, Run, run_to_the_end, summary_of, within

pytestmark = pytest.mark.ring
HOPELESS = {"task": "tests.ring.ring_rewards:nothing"}


def test_a_run_of_zero_variance_ends_with_advice_instead_of_starving(lab: Lab) -> None:
    run_file = lab.run_file("starved", data=HOPELESS, admission={"max_zero_variance_groups": 12})
    with Run(run_file, lab.layout("starved")) as run:
        assert run.finish() == EXIT_CONFIG, run.story()
        run.assert_nothing_is_left()
        assert run.status()["is_ending"]  # or its supervisor would interrupt it for its trainer's leaving
    lines = [line for line in run.output.splitlines() if "StarvedError" in line]
    assert len(lines) == 1, run.output
    for word in ("12 consecutive groups", "data.task", "warm-start", "admission.active_sampling=false"):
        assert word in lines[0]
    assert "Traceback" not in run.output
    dropped = rollouts_on_disk(lab.layout("starved").rollouts)  # what it did sample is not lost
    assert {rollout.drop_reason for rollout in dropped} == {"zero_variance"}


@pytest.mark.long
def test_the_same_run_goes_to_its_end_when_it_may_train_on_zero_variance(lab: Lab) -> None:
    admission = {"max_zero_variance_groups": 12, "active_sampling": False}
    layout = run_to_the_end(lab, "not-starved", run={"num_steps": 4}, data=HOPELESS, admission=admission)
    assert_full_batches_trained_once(layout.rollouts, 4, 4, 4)
    summary = summary_of(layout)
    assert summary["reward_last_tenth"] == 0
    assert summary["zero_variance_groups"] >= 16


def test_a_verifier_that_always_fails_stops_the_run_and_says_why(lab: Lab) -> None:
    rewards = {"error_patience_s": 1.0}
    run_file = lab.run_file("unjudged", data={"task": "tests.ring.ring_rewards:fail_after_the_trial"}, rewards=rewards)
    with Run(run_file, lab.layout("unjudged")) as run:
        assert run.finish() == EXIT_CONFIG, run.story()
        run.assert_nothing_is_left()
    assert "rewards.max_error_share" in run.output
    assert "no compiler to judge" in run.output
    assert "Traceback" not in run.output
    assert all(rollout.consumed_step == -1 for rollout in rollouts_on_disk(lab.layout("unjudged").rollouts))


@pytest.mark.long
@pytest.mark.parametrize("role", ["trainer", "controller"])
def test_a_run_without_retries_that_loses_trainer_or_controller_ends_at_once_and_says_what(lab: Lab, role: str) -> None:
    name = f"without-{role}"
    with Run(lab.run_file(name, run={"num_steps": 100_000}), lab.layout(name), "--max-retries", "0") as run:
        run.wait_for_step(2)
        run.role(role).kill()
        with within(12.0, "giving up"):
            assert run.finish() == 128 + signal.SIGKILL, run.story()
        run.assert_nothing_is_left()
    assert run.output.count(f"{role}-0 on ") == 1
    assert "ended with signal SIGKILL" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("role", ["trainer", pytest.param("controller", marks=pytest.mark.long)])
def test_a_run_that_loses_trainer_or_controller_goes_on_by_itself(lab: Lab, role: str) -> None:
    name, num_steps = f"regained-{role}", 48
    settings = {"run": {"num_steps": num_steps}, "data": {"task": "tests.ring.ring_rewards:slow_parity"}}
    run_file, layout = lab.run_file(name, **settings), lab.layout(name)
    with Run(run_file, layout) as run:
        run.wait_until(lambda status: status["step"] >= 6 and latest_complete(layout.checkpoints) is not None)
        generator, reward = run.role("generator").pid, run.role("reward").pid
        run.role(role).kill()
        run.wait_until(lambda _: len(layout.attempts.read_text().splitlines()) == 2)
        assert run.role("generator").pid == generator  # with its engine
        assert run.role("reward").pid == reward
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert f"{role}-0 on " in run.output
    assert "another attempt in 2 s" in run.output
    [begun_at] = re.findall(r"attempt 1 begins from step (\d+)\n", run.output)
    assert int(begun_at) in range(4, num_steps, 4)  # some save later than it is killed
    assert_full_batches_trained_once(layout.rollouts, num_steps, 4, 4)
    assert summary_of(layout)["steps"] == num_steps
