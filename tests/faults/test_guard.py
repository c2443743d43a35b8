"""The guard ends a whole run whose steps are out of bounds; a person goes on from a checkpoint before the alarm."""

from __future__ import annotations

import json

import pytest

from launch.verify.files import check_run
from launch.verify.report import FileVerdict
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.protocol.errors import EXIT_CONFIG
from rlhpc.roles.controller.guarding import read_guard_file
from tests.ring.run_kit import Run, make_lab

pytestmark = pytest.mark.ring
NUM_STEPS = 8


@pytest.mark.long
def test_a_run_that_the_guard_stopped_goes_on_from_a_checkpoint_before_the_alarm(tmp_path_factory) -> None:
    """It was trained to step 4; from then on every step is out of bounds: two are trained, one is skipped."""
    lab = make_lab(tmp_path_factory.mktemp("lab"))
    run_file = lab.run_file(
        "guarded", run={"num_steps": NUM_STEPS}, checkpoint={"every_steps": 2, "keep": 2}, guard={"action": "off"}
    )
    layout = lab.layout("guarded")
    with Run(run_file, layout, "run.num_steps=4") as run:
        assert run.finish() == 0, run.story()
    guard = ("guard.action=stop", "guard.patience_steps=1", "guard.min_entropy=90.0", "guard.max_entropy=99.0")
    with Run(run_file, layout, "--resume", *guard) as run:
        assert run.finish() == EXIT_CONFIG, run.story()
        assert "resume with --step N, a checkpoint from before the alarm, which began with step 4" in run.story()
    acted = [(entry.attempt, entry.step, entry.action) for entry in read_guard_file(layout.guard)]
    assert acted == [(1, 4, "warn"), (1, 5, "tighten"), (1, 6, "skip"), (1, 7, "stop")]
    assert layout.checkpoint(6).exists()  # of the alarm
    with Run(run_file, layout, "--resume", "--step", "4") as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    attempts = [json.loads(line) for line in layout.attempts.read_text().splitlines()]
    assert [attempt["resume_step"] for attempt in attempts] == [None, 4, 4]
    trained = [group for group in read_rollouts_directory(layout.rollouts) if group.consumed_step >= 0]
    assert sorted(group.consumed_step for group in trained) == [step for step in range(NUM_STEPS) for _ in range(4)]
    assert all(group.applied for group in trained)
    assert [row for row in check_run(layout, lambda _: None) if row.verdict is FileVerdict.DAMAGED] == []
