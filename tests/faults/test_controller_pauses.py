"""The controller stands still for a while, as under a debugger, a suspended machine or a hanging filesystem."""

from __future__ import annotations

import time

import pytest

from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab

pytestmark = [pytest.mark.long, pytest.mark.ring]
NUM_STEPS = 12
DEAD_AFTER_S = 6.0  # on a busy machine a role that loads its libraries is silent for some seconds


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("pauses"))


def test_a_controller_that_stands_still_for_longer_than_peers_may_be_silent_loses_none_of_them(lab: Lab) -> None:
    layout = lab.layout("paused")
    run_file = lab.run_file(
        "paused",
        run={"num_steps": NUM_STEPS},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        admission={"lease_deadline_s": 2 * DEAD_AFTER_S},
        transport={"dead_after_s": DEAD_AFTER_S},
    )
    with Run(run_file, layout) as run:
        run.wait_for_step(2)
        controller = run.role("controller")
        controller.suspend()
        time.sleep(2 * DEAD_AFTER_S)
        controller.resume()
        assert run.finish() == 0, run.story()
    _, _, afterwards = layout.log("controller", 0, 0).read_text().partition("this process was paused for")
    assert afterwards
    assert "is silent" not in afterwards
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
