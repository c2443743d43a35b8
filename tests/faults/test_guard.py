"""Steps of a whole run are out of bounds: the guard acts on them, in every process that it concerns."""

from __future__ import annotations

import json

import pytest

from launch.checks.run_check import check_run
from launch.checks.run_rows import Verdict
from rlhpc.buffer.resolved import DropReason
from rlhpc.buffer.segment_reader import read_rollouts_directory
from rlhpc.roles.controller.guard_file import read_guard_file
from tests.ring.run_kit import Run, make_lab

pytestmark = pytest.mark.ring
NUM_STEPS = 8


@pytest.mark.long
def test_a_run_that_the_guard_rolls_back_drops_the_batches_and_trains_others(tmp_path_factory) -> None:
    """Every step is out of bounds: two are trained, the third is skipped, the fourth leads back to the first."""
    lab = make_lab(tmp_path_factory.mktemp("lab"))
    run_file = lab.run_file(
        "guarded",
        run={"num_steps": NUM_STEPS},
        checkpoint={"every_steps": 2, "keep": 2},
        guard={"action": "rollback", "patience_steps": 1, "min_entropy": 90.0, "max_entropy": 99.0, "max_rollbacks": 1},
    )
    layout = lab.layout("guarded")
    with Run(run_file, layout) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        story = run.story()
    entries = read_guard_file(layout.guard)
    assert [(entry.attempt, entry.step, entry.action) for entry in entries] == [
        (0, 0, "warn"), (0, 1, "tighten"), (0, 2, "skip"), (0, 3, "rollback"),
        (1, 0, "warn"), (1, 1, "tighten"), *((1, step, "skip") for step in range(2, NUM_STEPS)),
    ]  # fmt: skip
    assert "the run goes back to before step 0" in story
    attempts = [json.loads(line) for line in layout.attempts.read_text().splitlines()]
    assert [attempt["resume_step"] for attempt in attempts] == [None, None]
    groups = list(read_rollouts_directory(layout.rollouts))
    dropped = {group.group.group_id for group in groups if group.drop_reason is DropReason.GUARD}
    assert dropped >= set(entries[0].groups)  # admitted before anything was trained; later ones may have other numbers
    trained = [group for group in groups if group.consumed_step >= 0]
    assert len(trained) == NUM_STEPS * 4
    assert sorted(group.group.group_id for group in trained) == sorted(
        {group.group.group_id for group in trained} - dropped
    )
    assert [max(m.rollout.versions.max() for m in g.group.members) <= g.trained_version for g in trained] == [
        True
    ] * len(trained)
    assert {group.applied for group in trained if group.consumed_step >= 2} == {False}
    assert [row for row in check_run(layout, lambda _: None) if row.verdict is Verdict.DAMAGED] == []
    assert json.loads(layout.summary.read_bytes())["skipped_steps"] == NUM_STEPS - 2
