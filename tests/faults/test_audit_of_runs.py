"""A run is audited while it goes on, killed, and resumed in every way: it is never accused."""

from __future__ import annotations

import pytest

from launch.verify.audit import as_table, audit_run
from launch.verify.evidence import Depth
from rlhpc.base.run_directory import RunLayout
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import GONE_S, Run, make_lab

pytestmark = [pytest.mark.ring, pytest.mark.long]
NUM_STEPS = 40


def assert_clean(layout: RunLayout) -> None:
    for depth in (Depth(is_quick=True), Depth()):
        audit = audit_run(layout, depth, lambda text: None)
        assert audit.is_clean, as_table(layout, audit)


def test_a_run_that_is_killed_and_resumed_in_every_way_is_never_accused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    lab = make_lab(tmp_path_factory.mktemp("lab"))
    run_file = lab.run_file(
        "audited",
        run={"num_steps": NUM_STEPS},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        checkpoint={"every_steps": 5},
    )
    layout = lab.layout("audited")
    for step, words in (
        (3, []),
        (7, ["--resume"]),
        (12, ["--resume", "--no-replay"]),
        (13, ["--resume", "--step", "5"]),
    ):
        with Run(run_file, layout, *words) as run:
            for reached in range(max(0, step - 2), step + 1):
                run.wait_for_step(reached)
                assert_clean(layout)
            run.process.kill()
            run.process.wait()
            assert_clean(layout)  # its processes are ending
            run.assert_nothing_is_left(within_s=GONE_S)
        assert_clean(layout)
    with Run(run_file, layout, "--resume") as run:
        assert run.finish() == 0, run.story()
    assert_clean(layout)
    assert_full_batches_trained_once(layout.rollouts, NUM_STEPS, 4, 4)
