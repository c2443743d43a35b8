"""A disk that is full when a checkpoint is due: a real one, of 64 MB, with a file that takes up all of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.view.report import read_report
from launch.view.run import RunView
from rlhpc.training.checkpoint_directory import latest_complete
from tests.full_disk import fill, small_disk
from tests.ring.run_kit import Lab, Run, make_lab

pytestmark = pytest.mark.ring
DISK_BYTES = 64 << 20
BARELY_BYTES = 100 << 10  # enough for the controller's part of a checkpoint, not for the trainer's


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("full-disk"))


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_full_disk_costs_checkpoints_while_it_is_full_and_the_run_only_at_its_end(lab: Lab) -> None:
    layout = lab.layout("full")
    run_file = lab.run_file(
        "full",
        run={"num_steps": 100_000},
        data={"task": "tests.ring.ring_rewards:slow_parity"},
        checkpoint={"every_steps": 2},
    )
    filler = layout.checkpoints / "filler"
    with Run(run_file, layout) as run:
        run.wait_for_step(1)
        with small_disk(layout.checkpoints, DISK_BYTES):
            log = layout.log("controller", 0, 0)
            run.wait_until(says_while_full(filler, 0, log, "the controller could not save"))
            run.wait_until(says_while_full(filler, BARELY_BYTES, log, "the trainer could not save"))
            filler.unlink()
            run.wait_until(lambda _: list(layout.checkpoints.glob("step_*/COMPLETE")))
            status = run.wait_until(lambda status: status["checkpoints_failed"] >= 2)
            run.wait_for_step(status["step"] + 2)
            run.wait_until(fails_while_full(filler, status["checkpoints_failed"]))
            run.interrupt(signal.SIGTERM)
            assert run.finish() != 0, run.story()
            assert "CheckpointError: " in run.output
            assert "ERROR CheckpointError: " in layout.log("controller", 0, 0).read_text().splitlines()[-1]
            told = [each.text for each in read_report(RunView(layout)).story.faults if each.kind == "checkpoint"]
            assert any("checkpoint could not be written" in text for text in told)
            assert latest_complete(layout.checkpoints) is not None  # verified: what is there is whole
        run.assert_nothing_is_left()


def says_while_full(filler: Path, but_bytes: int, log: Path, words: str) -> Callable[[object], bool]:
    """A condition: the log has it, on a disk that is filled again, all but `but_bytes`, at each look."""

    def condition(_: object) -> bool:
        fill(filler, but_bytes)
        return words in log.read_text(encoding="utf-8")

    return condition


def fails_while_full(filler: Path, failed_before: int) -> Callable[[dict], bool]:
    """A condition: one more checkpoint has failed, on a disk that is filled again whenever the run has freed some."""

    def condition(status: dict) -> bool:
        fill(filler, but_bytes=0)
        return status["checkpoints_failed"] > failed_before

    return condition
