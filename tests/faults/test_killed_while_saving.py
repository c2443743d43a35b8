"""Something dies while a checkpoint is written: what is complete afterwards, and what a resume goes on from."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from launch.demo.task import write_dataset
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_CONFIG, CheckpointError
from rlhpc.training.checkpoint_directory import COMPLETE, describe, latest_complete
from rlhpc.training.trainer_state import STATE_FILE, read_checkpoint
from tests.faults.switched_rewards import SWITCH
from tests.ring.rollouts_on_disk import assert_full_batches_trained_once
from tests.ring.run_kit import CEILING_S, Lab, Run, summary_of
from tests.tiny_models import make_tiny_checkpoint

pytestmark = pytest.mark.ring
EVERY_STEPS = 2
NUM_STEPS_AFTER_RESUME = 3
ENDLESS = {
    "run": {"num_steps": 100_000},
    "trainer": {"backend": "reference"},
    "checkpoint": {"every_steps": EVERY_STEPS},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """With a model whose checkpoint of 40 MB takes some time to write."""
    root = tmp_path_factory.mktemp("lab")
    model = make_tiny_checkpoint(root / "model", hidden=256, layers=4)
    write_dataset(root / "train.jsonl", 500, seed=0)
    return Lab(root, model, root / "train.jsonl")


@pytest.mark.long
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(lab: Lab) -> None:
    run_file = lab.run_file("halved", **ENDLESS, data={"task": "tests.ring.ring_rewards:slow_parity"})
    layout = lab.layout("halved")
    with Run(run_file, layout, "--max-retries", "0") as run:
        trainer = _trainer_of(run)
        unfinished = _stop_in_mid_write(run, trainer)
        os.kill(trainer.pid, signal.SIGKILL)
        assert run.finish() == 128 + signal.SIGKILL, run.story()
        run.assert_nothing_is_left()
    assert "ended with signal SIGKILL" in run.output

    assert list((unfinished / "trainer").iterdir()), "something was written"
    with pytest.raises(CheckpointError, match=STATE_FILE):
        read_checkpoint(unfinished / "trainer", None)
    saved = _saved_step(layout)
    assert saved == _step_of(unfinished) - EVERY_STEPS
    assert not [state.problem for state in describe(layout.checkpoints) if state.problem]

    num_steps = saved + NUM_STEPS_AFTER_RESUME
    with Run(run_file, layout, "--resume", f"run.num_steps={num_steps}") as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert_full_batches_trained_once(layout.rollouts, num_steps, 4, 4)
    assert summary_of(layout)["steps"] == num_steps
    attempts = [json.loads(line) for line in layout.attempts.read_text().splitlines()]
    assert [attempt["resume_step"] for attempt in attempts] == [None, saved]
    assert _saved_step(layout) == num_steps
    assert not unfinished.exists()


@pytest.mark.long
def test_a_run_that_fails_while_the_trainer_writes_completes_the_checkpoint_first(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopeless = tmp_path / "hopeless"
    monkeypatch.setenv(SWITCH, str(hopeless))
    run_file = lab.run_file(
        "starved",
        **ENDLESS,
        data={"task": "tests.faults.switched_rewards:parity_while_there_is_hope"},
        # Slots are never scarce, and the trainer is not taken for dead while it is stopped.
        admission={"max_staleness": 8, "max_zero_variance_groups": 10},
        transport={"dead_after_s": 60.0},
    )
    layout = lab.layout("starved")
    with Run(run_file, layout) as run:
        trainer = _trainer_of(run)
        unfinished = _stop_in_mid_write(run, trainer)
        hopeless.touch()
        _wait_for_words(run, "the run has failed; waiting for the trainer to finish writing a checkpoint")
        assert _saved_step(layout) == _step_of(unfinished) - EVERY_STEPS
        trainer.resume()
        assert run.finish() == EXIT_CONFIG, run.story()
        run.assert_nothing_is_left()
    assert "StarvedError" in run.output
    assert _saved_step(layout) == _step_of(unfinished)


def _trainer_of(run: Run) -> psutil.Process:
    status = run.wait_for_step(EVERY_STEPS + 1)
    return psutil.Process(next(role["pid"] for role in status["roles"] if role["name"] == "trainer-0"))


def _wait_for_words(run: Run, words: str) -> None:
    """Wait until the controller has said so in its log."""
    log = run.layout.log("controller", 0, 0)
    is_said = Deadline(CEILING_S).wait_for(lambda: words in log.read_text(), 0.05)
    assert is_said, f"{words!r} was never said\n{run.story()}"


def _step_of(unfinished: Path) -> int:
    return int(unfinished.name.removeprefix(".step_").removesuffix(".tmp"))


def _stop_in_mid_write(run: Run, trainer: psutil.Process) -> Path:
    """Stop the trainer while its part of a checkpoint is begun and not done; return the directory it writes into.

    It may be done sooner than it is stopped: then the next checkpoint is waited for.
    """
    for _ in Deadline(CEILING_S).polls(0.001):
        for file in run.layout.checkpoints.glob(".owner_*/.step_*.tmp/trainer/*"):
            trainer.suspend()
            directory = file.parents[1]
            has_older = latest_complete(run.layout.checkpoints) is not None
            if has_older and directory.exists() and not (directory / "trainer" / STATE_FILE).exists():
                assert not (directory / COMPLETE).exists()
                return directory
            trainer.resume()
        assert run.process.poll() is None, f"the run has ended\n{run.story()}"
    raise AssertionError(f"never caught while writing\n{run.story()}")


def _saved_step(layout: RunLayout) -> int:
    found = latest_complete(layout.checkpoints)
    assert found is not None
    return found[0]
