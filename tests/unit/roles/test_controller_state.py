"""What survives a controller: checkpoints, and where a run goes on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.algorithms.packing import tokens_trained
from rlhpc.base.ownership import Fence
from rlhpc.base.patience import DISK_PATIENCE_S
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.history import Admitted, Began, GroupEventLog, Position, RecordedStep, Replay, Trained, read_history
from rlhpc.buffer.journal import JournalFiles, journal_paths
from rlhpc.buffer.prefixes import PartialLog
from rlhpc.buffer.rollout_journal import RolloutJournal, open_journal
from rlhpc.buffer.segments import read_rollouts_directory, read_segment
from rlhpc.config.rules import Config, with_values
from rlhpc.config.tables_algorithm import AlgorithmConfig, CriticConfig
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import CheckpointError, OwnershipLost
from rlhpc.protocol.messages import BATCHES, SaveCheckpoint, SaveReport, SnapshotTaken
from rlhpc.protocol.types import PackedBatch, PackedMinibatch
from rlhpc.roles.controller.batch_maker import RANK_0, TrainerLink
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.persistence import LONGEST_CHECKPOINT_PAUSE_S, DiskWriter
from rlhpc.roles.controller.state import (
    ControllerState,
    LearningRates,
    RunProgress,
    SavedState,
    StatePart,
    Totals,
    _restore,
    progress_of,
    read_saved_state,
    sampling_of,
    set_aside_later_segments,
)
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.training.checkpoint_directory import latest_complete
from rlhpc.weights.choice import Membership
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.buffer.rollout_samples import ManualClock, make_draft, piece_of
from tests.unit.data.checkpoints import CHATML, make_tokenizer_files
from tests.unit.launch.audit_kit import CountedPrompts
from tests.unit.roles.small_ring import SmallRing, make_buffer, prompt, scored, small_config, small_ring
from tests.unit.roles.test_train_loop import record_of
from tests.unit.training.packed_rows import draw_samples, pack_row

# ---------------------------------------------------------------------------------------------------------- checkpoints
#
# A checkpoint is begun at a boundary and completed while the run goes on; being killed meanwhile loses nothing.


class NoPrompts:
    """A cursor that stands still."""

    def state(self) -> dict[str, Any]:
        return {"cursor": 0}


@dataclass
class Desk:
    """A writer, what it writes of, and a trainer that takes snapshots at once and writes when told to."""

    layout: RunLayout
    buffer: RolloutBuffer
    writer: CheckpointWriter
    asked: list[SaveCheckpoint]
    totals: Totals
    clock: ManualClock
    state: ControllerState

    def trainer_has_written(self, step: int, error: str = "") -> None:
        directory = Path(next(command.directory for command in self.asked if command.step == step)) / "trainer"
        directory.mkdir()
        (directory / "state").write_text(f"after {step} steps")
        self.writer.reported(SaveReport(step, 0.5, error))

    async def complete_one(self, step: int) -> None:
        await asyncio.wait_for(self.writer.write(step, step), PATIENCE_S)
        self.trainer_has_written(step)
        await asyncio.wait_for(self.writer.finish(), PATIENCE_S)

    def train_on_groups(self, *group_ids: int, step: int) -> None:
        """Admit, sample and consume these groups; their segment is sealed with the next checkpoint."""
        for group_id in group_ids:
            assert self.buffer.admit(prompt(group_id), step) == group_id
            for index in (0, 1):
                self.buffer.ledger.grant("somebody", 1)
                self.buffer.deliver("somebody", scored(group_id, index))
        groups = self.buffer.take(len(group_ids), step)
        assert groups is not None
        self.buffer.consume(groups, step, trained_version=step, applied=True)
        self.buffer.release(group_ids)

    @property
    def everything_on_disk(self) -> list[str]:
        return sorted(path.name for path in self.layout.checkpoints.iterdir())

    @property
    def steps_on_disk(self) -> list[str]:
        return sorted(path.name for path in self.layout.checkpoints.glob("step_*"))


@asynccontextmanager
async def desk(root: Path, keep: int = 2, fence: Fence | None = None) -> AsyncIterator[Desk]:
    layout, batches = RunLayout(root), MemoryServer(BATCHES)
    layout.rollouts.mkdir(exist_ok=fence is not None)
    buffer = make_buffer(small_config(), layout.rollouts)
    totals, clock = Totals(), ManualClock()
    state: Any = ControllerState(NoPrompts(), None, buffer.segments, buffer.journal, buffer, Membership(), totals, 0, 0)
    asked: list[SaveCheckpoint] = []
    client = batches.connect(RANK_0)

    async def take_snapshots() -> None:
        while True:
            command = await client.receive()
            asked.append(command)
            await client.send(SnapshotTaken(command.step, 0.01))

    trainer = asyncio.create_task(take_snapshots())
    try:
        own = StatePart(state, layout)
        writer = CheckpointWriter(layout, keep, TrainerLink(batches), own, DiskWriter(), clock=clock, fence=fence)
        yield Desk(layout, buffer, writer, asked, totals, clock, state)
    finally:
        trainer.cancel()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)


async def test_a_checkpoint_holds_how_far_the_run_was_when_it_was_taken(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        it.state.progress.num_tokens = 640
        await asyncio.wait_for(it.writer.write(1, 1), PATIENCE_S)
        it.state.progress.num_tokens = 700
        it.trainer_has_written(1)
        await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        assert read_saved_state(it.layout, 1).progress == {"num_tokens": 640, "seconds": 0.0}


async def test_training_goes_on_as_soon_as_the_snapshot_is_taken(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await asyncio.wait_for(it.writer.write(1, PATIENCE_S), PATIENCE_S)
        assert it.writer.awaits_trainer
        assert latest_complete(it.layout.checkpoints) is None
        assert not it.writer.has_failed
        it.trainer_has_written(1)
        assert not it.writer.awaits_trainer
        await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        assert latest_complete(it.layout.checkpoints) == (1, it.layout.checkpoint(1))
        assert (it.layout.checkpoint(1) / "trainer" / "state").read_text() == "after 1 steps"
        assert it.writer.write_s > 0


async def test_the_longest_save_counts_from_the_request_until_it_is_complete(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await it.writer.write(1, 1)
        assert it.writer.longest_s == 0  # it is not complete yet
        await asyncio.sleep(0.2)
        it.trainer_has_written(1)
        await it.writer.finish()
        slow = it.writer.longest_s
        assert slow >= 0.2
        began = time.monotonic()
        await it.complete_one(2)
        longest = it.writer.longest_s
        assert slow <= longest <= max(slow, time.monotonic() - began)
        await it.writer.write(3, 3)
        it.trainer_has_written(3, error="the disk is full")
        with pytest.raises(CheckpointError):
            await it.writer.finish()
        assert it.writer.longest_s == longest  # one that failed took no time to become complete


async def test_a_second_checkpoint_begins_when_the_first_is_complete(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await it.writer.write(1, 1)
        second = asyncio.create_task(it.writer.write(2, 2))
        await asyncio.sleep(0.02)
        assert [command.step for command in it.asked] == [1]
        it.trainer_has_written(1)
        await asyncio.wait_for(second, PATIENCE_S)
        assert [command.step for command in it.asked] == [1, 2]
        assert it.steps_on_disk == ["step_000001"]


@pytest.mark.parametrize(
    ("is_trainers_fault", "says"),
    [(True, "step_000003: the trainer could not save: the disk is full"), (False, "cannot be completed")],
)
async def test_a_checkpoint_that_cannot_be_written_is_left_out_and_older_ones_stay(
    tmp_path: Path, is_trainers_fault: bool, says: str
) -> None:
    async with desk(tmp_path) as it:
        for step in (1, 2):
            await it.complete_one(step)
        await it.writer.write(3, 3)
        if not is_trainers_fault:
            it.layout.checkpoint(3).write_text("a file in the way")
        it.trainer_has_written(3, error="the disk is full" if is_trainers_fault else "")
        with pytest.raises(CheckpointError, match=says):
            await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        assert it.totals.checkpoints_failed == 1
        if is_trainers_fault:
            assert it.everything_on_disk == ["step_000001", "step_000002"]
            await it.complete_one(4)
            assert it.steps_on_disk == ["step_000002", "step_000004"]


async def test_after_a_failure_another_attempt_is_due_after_a_pause_that_grows(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        waited = []
        for step in (1, 2, 3):
            await it.writer.write(step, step)
            it.trainer_has_written(step, error="the disk is full")
            await until(lambda: it.writer.has_failed)
            before = it.clock.now_s
            while not it.writer.is_overdue:
                it.clock.advance(0.25)
            waited.append(it.clock.now_s - before)
            it.writer.raise_failure()  # it is not time for that
        assert waited[0] < waited[1] < waited[2] <= LONGEST_CHECKPOINT_PAUSE_S
        await it.complete_one(4)
        assert not it.writer.is_overdue


async def test_failures_for_longer_than_the_patience_are_an_error(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        for step in (1, 2):
            await it.writer.write(step, step)
            it.trainer_has_written(step, error="the disk is full")
            await until(lambda: it.writer.has_failed)
            if step == 1:
                it.writer.raise_failure()
            it.clock.advance(DISK_PATIENCE_S + 1)
        with pytest.raises(CheckpointError, match="the disk is full"):
            it.writer.raise_failure()


async def test_a_controllers_part_that_the_disk_refuses_is_left_out_and_loses_no_group(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        it.train_on_groups(0, 1, step=0)
        it.layout.rollouts.rename(tmp_path / "out-of-reach")
        await asyncio.wait_for(it.writer.write(1, PATIENCE_S), PATIENCE_S)
        assert it.writer.has_failed
        assert it.asked == []
        assert not it.layout.checkpoints.exists()
        assert it.buffer.segments.num_pending == 2
        (tmp_path / "out-of-reach").rename(it.layout.rollouts)
        await it.complete_one(2)
        assert [r.group.group_id for r in read_rollouts_directory(it.layout.rollouts)] == [0, 1]


async def test_the_event_loop_goes_on_while_a_slow_disk_takes_the_controllers_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is as of its beginning, whatever is delivered and dropped while it is written."""
    may_sync = threading.Event()
    real_fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        assert may_sync.wait(PATIENCE_S), "the event loop stood still"
        real_fsync(descriptor)

    async with desk(tmp_path) as it:
        it.train_on_groups(0, 1, step=0)
        assert it.buffer.admit(prompt(2), 1) == 2
        monkeypatch.setattr(os, "fsync", slow_fsync)
        writing = asyncio.create_task(it.writer.write(1, 1))
        await asyncio.sleep(0.05)
        for index in (0, 1):
            it.buffer.deliver("somebody", scored(2, index))
        it.buffer.drop(2, DropReason.ZERO_VARIANCE)
        may_sync.set()
        await asyncio.wait_for(writing, PATIENCE_S)
        it.trainer_has_written(1)
        await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        it.buffer.segments.seal_all()
        state = read_saved_state(it.layout, 1)
        assert [group["group_id"] for group in state.buffer["ledger"]["groups"]] == [2]
        assert state.buffer["next_segment_index"] == 1
        assert [r.group.group_id for r in read_segment(it.layout.segment(0))] == [0, 1]
        assert [r.group.group_id for r in read_segment(it.layout.segment(1))] == [2]


@contextmanager
def owner_unknown(layout: RunLayout) -> Iterator[None]:
    """A file server that has nothing but an error for who reads whose the run is."""
    layout.owner.rename(layout.root / "owner-out-of-reach")
    layout.owner.mkdir()
    try:
        yield
    finally:
        layout.owner.rmdir()
        (layout.root / "owner-out-of-reach").rename(layout.owner)


async def test_while_nobody_can_tell_whose_the_run_is_checkpoints_are_left_out_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path, fence=Fence.take(RunLayout(tmp_path), 0)) as it:
        for step in (1, 2):
            await it.complete_one(step)
        with owner_unknown(it.layout):  # at its beginning
            await asyncio.wait_for(it.writer.write(3, 3), PATIENCE_S)
            assert "owner.json" in it.writer.disk_trouble
        await asyncio.wait_for(it.writer.write(4, 4), PATIENCE_S)
        with owner_unknown(it.layout):  # at its end
            it.trainer_has_written(4)
            await until(lambda: it.writer.has_failed)
            assert "owner.json" in it.writer.disk_trouble
        assert it.totals.checkpoints_failed == 2
        await it.complete_one(5)
        assert it.steps_on_disk == ["step_000002", "step_000005"]


async def test_a_run_that_another_has_taken_over_completes_no_checkpoint(tmp_path: Path) -> None:
    async with desk(tmp_path, fence=Fence.take(RunLayout(tmp_path), 0)) as it:
        await asyncio.wait_for(it.writer.write(1, 1), PATIENCE_S)
        it.layout.owner.write_text('{"owner": "1-another"}')
        it.trainer_has_written(1)
        with pytest.raises(OwnershipLost):
            await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        assert it.steps_on_disk == []


async def test_a_report_of_another_step_completes_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        it.writer.reported(SaveReport(0, 0.5))
        await it.writer.write(1, 1)
        it.writer.reported(SaveReport(0, 0.5))
        assert it.writer.awaits_trainer
        it.trainer_has_written(1)
        it.writer.reported(SaveReport(1, 0.5))  # once more
        await asyncio.wait_for(it.writer.finish(), PATIENCE_S)


async def test_a_run_killed_while_it_writes_finds_all_segments_of_the_checkpoint_before(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        it.train_on_groups(0, 1, step=0)
        await it.complete_one(1)
        it.train_on_groups(2, 3, step=1)
        await it.writer.write(2, 2)  # seals step 1's groups; and here it is killed
        segments = sorted(path.name for path in it.layout.rollouts.glob("segment_*.h5"))
        assert segments == ["segment_000000.h5", "segment_000001.h5"]
        found = latest_complete(it.layout.checkpoints)
        assert found is not None
        assert found[0] == 1
        assert set_aside_later_segments(it.layout, read_saved_state(it.layout, 1), attempt=1) == 1
        assert sorted(path.name for path in it.layout.rollouts.glob("segment_*.h5")) == ["segment_000000.h5"]
        assert (it.layout.rollouts / "lost_attempt_1" / "segment_000001.h5").exists()


async def test_journals_are_deleted_once_every_checkpoint_holds_what_they_hold(tmp_path: Path) -> None:
    async with desk(tmp_path, keep=3) as it:
        files = JournalFiles(it.layout.rollouts, run_name="small", attempt=0, file_bytes=1)  # one each
        it.buffer.journal = journal = RolloutJournal(files, GroupEventLog(it.layout.rollouts, 0), 0)
        for step in range(4):
            it.train_on_groups(2 * step, 2 * step + 1, step=step)
            journal.commit()
            await it.complete_one(step + 1)
        assert it.steps_on_disk == ["step_000002", "step_000003", "step_000004"]
        # The first of them knows two steps; the files of the other two are needed to go on from it.
        assert [path.name for path in journal_paths(it.layout.rollouts)] == [
            f"journal_{number:06d}.log" for number in range(8, 16)
        ]
        saved = read_saved_state(it.layout, 2)
        assert saved.position == Position(0, journal.position.num_events - 8, 8)
        assert [r.sequence for r in read_history(it.layout.rollouts, saved.position).rollouts] == [*range(9, 17)]


async def test_a_checkpoint_is_complete_only_when_the_journal_has_what_it_knows(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        is_durable = asyncio.Event()
        it.writer._durable = is_durable.wait
        await it.writer.write(1, 1)
        it.trainer_has_written(1)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert latest_complete(it.layout.checkpoints) is None
        is_durable.set()
        await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        assert latest_complete(it.layout.checkpoints) == (1, it.layout.checkpoint(1))


# ------------------------------------------------------------------------------------------------------- learning rates
#
# The rates that a batch is given, where the run is; and where it is after a checkpoint and a replay.


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


def test_adapters_follow_the_schedule_from_a_rate_of_their_own() -> None:
    config = with_values(falling(5, learning_rate=0.2), {"lora.rank": 8, "lora.learning_rate": 2.0})
    rates = LearningRates(config, RunProgress())
    assert [rates.give(batch(step), None).learning_rate for step in range(4)] == pytest.approx([2.0, 1.5, 1.0, 0.5])
    plain = LearningRates(with_values(config, {"lora.learning_rate": 0.0}), RunProgress())
    assert plain.give(batch(0), None).learning_rate == pytest.approx(0.2)


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


# ---------------------------------------------------------------------------------------------------- restored partials
#
# Which partial rollouts of earlier attempts a controller goes on from when it begins again.


@pytest.mark.parametrize(("goes_on", "num_tokens"), [(True, 6), (False, 0)])
def test_what_was_sampled_before_the_run_started_over_is_not_gone_on_from(
    tmp_path: Path, goes_on: bool, num_tokens: int
) -> None:
    layout = RunLayout(tmp_path)
    layout.rollouts.mkdir()
    for attempt, began in enumerate((Began(0, 0, True, 0), Began(0, 0, goes_on, 0))):
        journal = open_journal(layout, "small", attempt, 0, None)
        journal.note(began)
        journal.note(Admitted(0, 0, 0))
        journal.commit()
        journal.close()
    draft = replace(make_draft(0, 6), versions=np.zeros(6, np.int32))
    PartialLog(layout.rollouts, 0).begin([piece_of(draft, 0, 6)])
    config = small_config()
    buffer = make_buffer(config, tmp_path / "new")
    context = RoleContext("controller", 0, 1, 2, None, "third", layout, config, "")
    _restore(context, None, 0, buffer, CountedPrompts(1))  # type: ignore[arg-type]
    prefix = buffer.ledger.open_record(0).members[0].prefix
    assert (0 if prefix is None else len(prefix.token_ids)) == num_tokens


# -------------------------------------------------------------------------------------------------- sampling of prompts
#
# How completions of a prompt are drawn.


def test_a_completion_ends_where_the_chat_template_ends_an_answer(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path, chat_template=CHATML))
    config = small_config(1)
    assert sampling_of(config, tokenizer)(0).stop_token_ids == (2, 5)
