"""A reward service stops answering, alive: another one judges for both, or it is started again; nothing is lost."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Run, make_lab, rlhpc


@pytest.mark.ring
@pytest.mark.long
def test_a_reward_service_that_is_frozen_holds_up_nobody_and_loses_nothing(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    run_file = lab.run_file(
        "frozen",
        run={"num_steps": 100_000},  # stopped once everything has been seen
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        rewards={"num_replicas": 2, "timeout_s": 1.0},
        transport={"dead_after_s": 900.0},  # it is not taken for dead: generators find out by themselves
    )
    layout = lab.layout("frozen")
    with Run(run_file, layout) as run:
        run.wait_for_step(2)
        frozen = run.role("reward", 0).pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            step = run.status()["step"]
            status = run.wait_for_step(step + 20)  # more than what was judged, or in hand, at that moment
            assert {role["name"] for role in status["roles"]} >= {"reward-0", "reward-1"}
            assert run.role("reward", 0).pid == frozen
        finally:
            os.kill(frozen, signal.SIGCONT)
        run.wait_for_step(run.status()["step"] + 4)
        assert rlhpc("stop", str(layout.root)).returncode == 0
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        num_steps = run.status()["step"]
    assert_full_batches_trained_once(layout.rollouts, num_steps, 4, 4)


@pytest.mark.ring
@pytest.mark.long
def test_the_only_reward_service_runs_out_of_memory_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop survives that in its callbacks, and heartbeats need little memory."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", f"{1 << 16}")  # glibc keeps no memory for what a pipe is read into
    lab = make_lab(tmp_path)
    run_file = lab.run_file(
        "starved",
        run={"num_steps": 100_000},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        transport={"dead_after_s": 900.0},
    )
    layout = lab.layout("starved")
    with Run(run_file, layout) as run:
        run.wait_for_step(2)
        starved = run.role("reward").pid
        resource.prlimit(starved, resource.RLIMIT_AS, (1 << 20, 1 << 20))  # what it has stays; it gets no more
        status = run.wait_until(lambda s: any(r["name"] == "reward-0" and r["pid"] != starved for r in s["roles"]))
        run.wait_for_step(status["step"] + 4)
        assert rlhpc("stop", str(layout.root)).returncode == 0
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        num_steps = run.status()["step"]
    assert_full_batches_trained_once(layout.rollouts, num_steps, 4, 4)
