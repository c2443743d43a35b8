"""The rates that a batch is given, where the run is; and where it is after a checkpoint and a replay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlhpc.algorithms.packing import tokens_trained
from rlhpc.buffer.history import RecordedStep, Replay, Trained
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import AlgorithmConfig, CriticConfig
from rlhpc.protocol.errors import CheckpointError
from rlhpc.protocol.types import PackedBatch, PackedMinibatch
from rlhpc.roles.controller.state import LearningRates, RunProgress, SavedState, progress_of
from tests.patience import PATIENCE_S
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.roles.small_ring import SmallRing, small_config, small_ring
from tests.unit.roles.test_train_loop import record_of
from tests.unit.training.packed_rows import draw_samples, pack_row


def falling(num_steps: int = 6, critic: dict[str, Any] | None = None, **trainer: Any) -> Config:
    """From 1 to 0, linearly."""
    config = small_config(num_steps)
    keys = {"learning_rate": 1.0, "lr_schedule": "linear", **trainer}
    tables: dict[str, Any] = {"trainer": config.trainer.model_copy(update=keys)}
    if critic is not None:
        tables |= {"algorithm": AlgorithmConfig(advantage="gae"), "critic": CriticConfig(**critic)}
    return config.model_copy(update=tables)


def batch(step: int, num_tokens: int = 10, order: tuple[int, ...] = (0,)) -> PackedBatch:
    return PackedBatch(step, step, (PackedMinibatch(((pack_row(draw_samples((num_tokens,))),),), 1, 1),), order)


def test_a_batch_is_given_the_rate_of_the_tokens_that_were_trained_before_it() -> None:
    rates = LearningRates(falling(decay_tokens=100), RunProgress())
    found = []
    for step, (num_tokens, order) in enumerate([(10, (0,)), (20, (0, 0)), (60, (0,)), (10, (0,))]):
        given = rates.give(batch(step, num_tokens, order), None)
        rates.trained(given)
        found.append(given.learning_rate)
    assert found == pytest.approx([1.0, 0.9, 0.5, 0.0])


def test_hours_are_those_in_which_the_run_trains_and_a_step_that_is_repeated_has_its_own() -> None:
    clock = ManualClock()
    rates = LearningRates(falling(decay_hours=1.0), RunProgress(clock, 0, 360.0))
    clock.advance(1000.0)  # it starts, and repeats steps
    assert rates.give(batch(3), Trained(3, 3, True, began_s=720.0)).learning_rate == pytest.approx(0.8)
    clock.advance(1000.0)
    rates.start()
    clock.advance(360.0)
    assert rates.give(batch(5), None).learning_rate == pytest.approx(0.7)
    assert rates.began_s == pytest.approx(1080.0)


def test_progress_goes_on_from_a_checkpoint() -> None:
    clock = ManualClock()
    progress = RunProgress(clock)
    rates = LearningRates(falling(), progress)
    rates.start()
    rates.trained(batch(0, 30))
    clock.advance(12.5)
    saved = progress.state()
    clock.advance(500.0)
    again = RunProgress.from_state(saved, clock)
    assert (again.num_tokens, again.seconds) == (30, 12.5)
    again.start()
    clock.advance(1.0)
    assert again.seconds == 13.5


def test_a_checkpoint_that_does_not_say_how_far_the_run_is_is_refused() -> None:
    found = progress_of(SavedState(3, 3, {}, {}, {}, {}, {}, {"num_tokens": 60, "seconds": 7.0}), ManualClock())
    assert (found.num_tokens, found.seconds) == (60, 7.0)
    assert progress_of(None, ManualClock()).state() == {"num_tokens": 0, "seconds": 0.0}
    with pytest.raises(CheckpointError, match="seconds"):
        progress_of(SavedState(3, 3, {}, {}, {}, {}, {}, {"num_tokens": 60}), ManualClock())


def test_a_critic_has_its_own_rate_and_a_head_start_and_follows_the_schedule_if_it_is_asked_to() -> None:
    for follows, expected in ((False, [0.4, 0.4, 0.4, 0.4]), (True, [0.4, 0.3, 0.2, 0.1])):
        critic = {"learning_rate": 0.4, "head_start_steps": 2, "follows_schedule": follows}
        rates = LearningRates(falling(5, critic, learning_rate=0.2), RunProgress())
        given = [rates.give(batch(step), None) for step in range(4)]
        assert [each.learning_rate for each in given] == pytest.approx([0.0, 0.0, 0.1, 0.05])
        assert [each.critic_learning_rate for each in given] == pytest.approx(expected)


async def run_on(ring: SmallRing, replay: Replay | None = None) -> list[float]:
    if replay is not None:
        await asyncio.wait_for(ring.loop.replay(replay, ring.stop, list, ring.record), PATIENCE_S)
    await ring.add_generator()
    await asyncio.wait_for(ring.start_training(), PATIENCE_S)
    return [batch.learning_rate for batch in ring.trainer.batches]


async def test_a_run_falls_over_its_tokens_through_a_replay_as_without_one(tmp_path: Path) -> None:
    config, found = falling(num_steps=4, decay_tokens=80), []
    for name in ("whole", "repeated"):
        async with small_ring(config, tmp_path / name) as ring:
            found.append(await run_on(ring, record_of(ring, 2) if name == "repeated" else None))
            counted = [tokens_trained(batch) for batch in ring.trainer.batches]
    assert found[0] == found[1] == pytest.approx([1 - sum(counted[:step]) / 80 for step in range(4)])


async def test_replayed_steps_have_the_hours_that_were_recorded(tmp_path: Path) -> None:
    async with small_ring(falling(num_steps=3, decay_hours=1.0), tmp_path) as ring:
        plain = record_of(ring, 2)
        seconds = (900.0, 1800.0)
        steps = [
            RecordedStep(each.step, each.groups, Trained(each.step, each.step, True, {"loss": 0.5}, began_s=began_s))
            for each, began_s in zip(plain.steps, seconds, strict=True)
        ]
        assert await run_on(ring, Replay(tuple(steps), plain.restored)) == pytest.approx([0.75, 0.5, 0.5])
