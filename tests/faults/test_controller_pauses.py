"""A role stands still: with its task for a while, as on a suspended machine, or alone for good, stopped by a signal."""

from __future__ import annotations

import time

import pytest

from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab, rlhpc, within

pytestmark = pytest.mark.ring
FOUND_S = 5.0
DEAD_AFTER_S = 6.0  # on a busy machine a role that loads its libraries is silent for some seconds


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("pauses"))


def stopped_after_more_steps(run: Run) -> int:
    """It goes on, and is whole when it is stopped then; returns its steps."""
    run.wait_for_step(run.status()["step"] + 6)
    assert rlhpc("stop", str(run.layout.root)).returncode == 0
    assert run.finish() == 0, run.story()
    step: int = run.status()["step"]
    return step


@pytest.mark.long
def test_a_controller_that_stands_still_for_longer_than_peers_may_be_silent_loses_none_of_them(lab: Lab) -> None:
    layout = lab.layout("paused")
    run_file = lab.run_file(
        "paused",
        run={"num_steps": 100_000},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        admission={"lease_deadline_s": 2 * DEAD_AFTER_S},
        transport={"dead_after_s": DEAD_AFTER_S},
    )
    with Run(run_file, layout) as run:
        run.wait_for_step(2)
        controller = run.role("controller")
        task = controller.parent()
        assert task is not None
        task.suspend()  # it would kill what stands still alone
        controller.suspend()
        time.sleep(2 * DEAD_AFTER_S)
        controller.resume()
        task.resume()
        num_steps = stopped_after_more_steps(run)
    _, _, afterwards = layout.log("controller", 0, 0).read_text().partition("this process was paused for")
    assert afterwards
    assert "is silent" not in afterwards
    assert_full_batches_trained_once(layout.rollouts, num_steps, 4, 4)


@pytest.mark.parametrize(
    "role", ["generator", *(pytest.param(role, marks=pytest.mark.long) for role in ("controller", "trainer", "reward"))]
)
def test_a_role_that_a_signal_has_stopped_is_started_again(lab: Lab, role: str) -> None:
    """Found within dead_after_s and some seconds, by its task or by others' silence."""
    layout = lab.layout(f"stopped-{role}")
    run_file = lab.run_file(
        f"stopped-{role}",
        run={"num_steps": 100_000},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        transport={"dead_after_s": DEAD_AFTER_S},
    )
    with Run(run_file, layout) as run:
        run.wait_for_step(3)
        stopped = run.role(role)
        stopped.suspend()
        with within(DEAD_AFTER_S + FOUND_S, f"the end of the {role} that was stopped"):
            stopped.wait()
        num_steps = stopped_after_more_steps(run)
    assert_full_batches_trained_once(layout.rollouts, num_steps, 4, 4)
