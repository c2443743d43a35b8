"""A disk that takes no segments for a while costs nothing: groups wait in memory."""

from __future__ import annotations

import pytest

from launch.view.status import render_status
from tests.ring.ring_rewards import GATE, GATE_AFTER, open_gate
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import Lab, Run, make_lab

pytestmark = pytest.mark.ring
GROUPS, GROUP_SIZE, NUM_STEPS = 4, 4, 12


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("full-disk"))


@pytest.mark.long
def test_a_run_whose_segments_are_refused_for_a_while_loses_no_rollout(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = lab.root / "gate"
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setenv(GATE_AFTER, str(6 * GROUPS * GROUP_SIZE))  # six steps at most until the disk refuses
    layout = lab.layout("refused")
    run_file = lab.run_file(
        "refused",
        run={"num_steps": NUM_STEPS},
        data={"task": "tests.ring.ring_rewards:gated_parity"},
        rewards={"timeout_s": 600.0},
        buffer={"segment_groups": 2},
        checkpoint={"every_steps": 1000},
    )
    aside = layout.root / "out-of-reach"
    with Run(run_file, layout) as run:
        run.wait_for_step(2)
        layout.rollouts.rename(aside)
        open_gate(gate, up_to=9 * GROUPS * GROUP_SIZE)  # nine at most: the run cannot end while the disk refuses
        run.wait_until(lambda status: any("trying again for" in each for each in status["disk_troubles"]))
        assert "trying again for" in layout.log("controller", 0, 0).read_text()
        assert "\ndisk    " in render_status(layout)
        run.wait_until(lambda _: "the disk refuses: " in run.output)
        aside.rename(layout.rollouts)
        open_gate(gate)
        assert run.finish() == 0, run.story()
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, GROUPS, GROUP_SIZE)
