"""What follows in a run when figures of its steps are out of bounds: admission, skipped steps, entries, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from rlhpc.algorithms.guard import AS_BEFORE, Action
from rlhpc.buffer.history import RecordedStep, Replay, Trained
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import AlgorithmConfig, GuardConfig
from rlhpc.protocol.errors import GuardStop, TrainingError
from rlhpc.roles.controller.guard import MAX_REFUSED_STEPS, GuardEntry, GuardFile, read_guard_file
from rlhpc.roles.controller.recorder import training_figures
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import SmallRing, small_config, small_ring

FINE = {"loss": 0.5, "entropy": 0.5, "grad_norm": 1.0}
BAD = FINE | {"entropy": 0.0}


def guarded(action: str, num_steps: int = 8, **settings: Any) -> Config:
    """An action a step, from the first one out of bounds."""
    guard = GuardConfig.model_validate({"action": action, "patience_steps": 1, "calm_steps": 3, **settings})
    return small_config(num_steps, max_staleness=3).model_copy(update={"guard": guard})


async def train(ring: SmallRing, bad_steps: Collection[int]) -> None:
    ring.trainer.metrics = lambda step: BAD if step in bad_steps else FINE
    await ring.add_generator()
    await asyncio.wait_for(ring.start_training(), PATIENCE_S)


async def test_a_step_out_of_bounds_is_trained_noted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "guard.jsonl"
    async with small_ring(guarded("warn", 4), tmp_path, guard_file=GuardFile(file)) as ring:
        await train(ring, {1})
        assert ring.trainer.version == 4
    (entry,) = read_guard_file(file)
    assert (entry.step, entry.version, entry.action, entry.groups) == (1, 1, "warn", [2, 3])
    assert entry.figures == {"entropy": [0.0, 0.001, 5.0]}
    assert "step 1: trainer/entropy 0 is below 0.001; 1 step out of bounds" in caplog.text
    assert entry.text in caplog.text
    figures = [training_figures(record, 64) for record in ring.records]
    assert [each["guard/action"] for each in figures] == [0, 1, 0, 0]
    assert [each["guard/alarm_steps"] for each in figures] == [0, 1, 1, 1]


async def test_switched_off_nothing_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "guard.jsonl"
    async with small_ring(guarded("off"), tmp_path, guard_file=GuardFile(file)) as ring:
        await train(ring, range(8))
    assert not file.exists()


async def test_a_tightened_run_admits_for_half_the_staleness_until_it_is_calm(tmp_path: Path) -> None:
    async with small_ring(guarded("tighten", 12), tmp_path) as ring:
        at_most: list[int] = []

        def look(record: Any) -> None:
            ring.records.append(record)
            counts = ring.ledger.counts()
            at_most.append(counts["in_flight"] + counts["finished"] + counts["taken"] + counts["free_slots"])

        ring.on_record = look
        await train(ring, {2, 3})
        all_slots, half = ring.ledger.num_slots, ring.config.admission.groups_per_step * 2
        assert [record.guard.action for record in ring.records[2:4]] == [Action.WARN, Action.TIGHTEN]
        assert at_most[3 + 2] == half  # its groups of before have left
        assert at_most[-1] == all_slots
        ages = [record.trained_version - group.admitted_version for record in ring.records for group in record.groups]
        assert max(ages) <= 3
        ring.ledger.conservation()


async def test_a_step_that_is_refused_is_skipped_recorded_as_such_and_the_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "guard.jsonl"
    async with small_ring(guarded("skip"), tmp_path, guard_file=GuardFile(file)) as ring:
        await train(ring, {1, 2, 3, 4})
        assert [record.report.applied for record in ring.records] == [True] * 3 + [False] * 2 + [True] * 3
        assert [record.report.refused for record in ring.records[3:5]] == ["entropy", "entropy"]
        assert ring.trainer.version == 6
        assert ring.ledger.counts()["released"] == 16
    assert [entry.action for entry in read_guard_file(file)] == ["warn", "tighten", "skip", "skip"]


async def test_a_run_of_which_every_step_is_refused_ends_with_advice(tmp_path: Path) -> None:
    async with small_ring(guarded("skip", 100), tmp_path) as ring:
        with pytest.raises(TrainingError, match=r"20 steps in a row were refused because of entropy: .*learning_rate"):
            await train(ring, range(100))
        assert len(ring.records) == 2 + MAX_REFUSED_STEPS - 1


async def test_a_run_that_is_to_end_ends_when_its_step_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "guard.jsonl"
    async with small_ring(guarded("stop", 20), tmp_path, guard_file=GuardFile(file)) as ring:
        with pytest.raises(GuardStop, match=r"step 5: trainer/entropy 0 is .*the run ends; .*--step N.*step 2$"):
            await train(ring, range(2, 20))
        assert [record.report.step for record in ring.records] == [0, 1, 2, 3, 4, 5]
        assert [record.report.applied for record in ring.records] == [True] * 4 + [False] * 2
    assert [entry.action for entry in read_guard_file(file)] == ["warn", "tighten", "skip", "stop"]


async def test_steps_that_are_not_finite_are_no_concern_of_the_guard(tmp_path: Path) -> None:
    async with small_ring(guarded("stop", 3), tmp_path) as ring:
        ring.trainer.is_finite = False
        await train(ring, range(3))
        assert ring.guard.num_bad_steps == 0


# ------------------------------------------------------------------------------------------------------------ replay


async def repeat(ring: SmallRing, trained: dict[int, Trained], num_steps: int) -> None:
    """Repeat steps of which some are recorded; their groups are there."""
    await ring.add_generator()
    await ring.loop.begin()
    ring.generate()
    steps = tuple(RecordedStep(step, (2 * step, 2 * step + 1), trained.get(step)) for step in range(num_steps))
    await asyncio.wait_for(ring.loop.replay(Replay(steps), ring.stop, lambda _: None, ring.record), PATIENCE_S)


async def test_a_repeated_step_is_skipped_or_applied_as_it_was_and_noted_once(tmp_path: Path) -> None:
    file = tmp_path / "guard.jsonl"
    async with small_ring(guarded("skip"), tmp_path, guard_file=GuardFile(file)) as ring:
        ring.trainer.metrics = lambda step: FINE if step == 2 else BAD
        recorded = {0: Trained(0, 0, True), 1: Trained(1, 1, True), 2: Trained(2, 2, False, FINE, "entropy")}
        await repeat(ring, recorded, 4)
        assert [record.report.applied for record in ring.records] == [True, True, False, False]
        assert ring.records[2].report.refused == AS_BEFORE
    assert [(entry.step, entry.action) for entry in read_guard_file(file)] == [(3, "skip")]  # of which nothing is known


async def test_the_same_optimiser_steps_of_a_batch_are_refused_when_it_is_repeated(tmp_path: Path) -> None:
    config = guarded("skip")
    algorithm = AlgorithmConfig(proximal="recompute", minibatches=3)
    async with small_ring(config.model_copy(update={"algorithm": algorithm}), tmp_path) as ring:
        ring.trainer.metrics = lambda _: FINE
        recorded = {
            0: Trained(0, 0, True),
            1: Trained(1, 1, True, FINE, "entropy", (0, 2)),
            2: Trained(2, 2, False, FINE, "entropy"),  # as versions before had it: all of them
        }
        await repeat(ring, recorded, 3)
        assert [batch.limits.skip for batch in ring.trainer.batches] == [(), (0, 2), (0, 1, 2)]


async def test_an_alarm_says_which_optimiser_steps_were_refused(tmp_path: Path) -> None:
    file = tmp_path / "guard.jsonl"
    async with small_ring(guarded("skip"), tmp_path, guard_file=GuardFile(file)) as ring:
        ring.trainer.metrics = lambda _: BAD
        ring.trainer.refuses = (1,)  # of every batch, and no more
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
    texts = [entry.text for entry in read_guard_file(file)]
    assert any("its optimiser steps 1, counted from 0, skipped on all ranks" in text for text in texts), texts


async def test_an_end_that_was_reached_before_is_not_reached_again_by_repeating(tmp_path: Path) -> None:
    async with small_ring(guarded("stop"), tmp_path) as ring:
        ring.trainer.metrics = lambda _: BAD
        refused = {step: Trained(step, 2, False, BAD, "entropy") for step in (2, 3)}
        await repeat(ring, {0: Trained(0, 0, True), 1: Trained(1, 1, True)} | refused, 4)
        assert [record.guard.action for record in ring.records] == [1, 2, 3, 4]


# -------------------------------------------------------------------------------------------------------------- file


def entry(step: int) -> GuardEntry:
    return GuardEntry(0, step, step, "warn", {"ess": (0.1, 0.3, None)}, (1, 2), "step", 1.0)


def test_a_torn_line_costs_itself_and_what_comes_after_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "guard.jsonl"
    assert read_guard_file(path) == []
    GuardFile(path).append(entry(0))
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        GuardFile(path).append(entry(1))
        assert [found.step for found in read_guard_file(path)][-1] == 1
        assert len(read_guard_file(path)) == (2 if cut >= len(whole) - 1 else 1)


def test_what_a_disk_refuses_is_written_with_the_next_entry(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "guard.jsonl"
    file = GuardFile(path)
    file.append(entry(0))
    path.parent.mkdir()
    file.append(entry(1))
    assert [found.step for found in read_guard_file(path)] == [0, 1]
