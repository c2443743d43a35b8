"""A checkpoint is begun at a boundary and completed while the run goes on; being killed meanwhile loses nothing."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.ownership import Fence, take_over
from rlhpc.base.patience import DISK_PATIENCE_S
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.history import GroupEventLog, Position, RolloutJournal, read_history
from rlhpc.buffer.journal import JournalFiles, journal_paths
from rlhpc.buffer.journal_layout import Sizes
from rlhpc.buffer.segments import read_rollouts_directory, read_segment
from rlhpc.protocol.errors import CheckpointError, OwnershipLost
from rlhpc.protocol.messages import BATCHES, SaveCheckpoint, SaveReport, SnapshotTaken
from rlhpc.roles.controller.batches import RANK_0, TrainerLink
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.persistence import LONGEST_CHECKPOINT_PAUSE_S, DiskWriter
from rlhpc.roles.controller.state import ControllerState, Totals, read_saved_state, set_aside_later_segments
from rlhpc.training.checkpoint_directory import latest_complete
from rlhpc.weights.choice import Membership
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.roles.small_ring import make_buffer, prompt, scored, small_config


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
                self.buffer.grant("somebody", 1)
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
        writer = CheckpointWriter(layout, keep, TrainerLink(batches), state, DiskWriter(), clock=clock, fence=fence)
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


async def test_older_checkpoints_are_deleted_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    async with desk(tmp_path, keep=2) as it:
        for step in (1, 2):
            await it.complete_one(step)
        await it.writer.write(3, 3)
        assert it.steps_on_disk == ["step_000001", "step_000002"]
        it.trainer_has_written(3)
        await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        assert it.steps_on_disk == ["step_000002", "step_000003"]


async def test_a_checkpoint_that_the_trainer_could_not_write_is_left_out_and_older_ones_stay(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        for step in (1, 2):
            await it.complete_one(step)
        await it.writer.write(3, 3)
        it.trainer_has_written(3, error="the disk is full")
        with pytest.raises(CheckpointError, match="step_000003: the trainer could not save: the disk is full"):
            await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        assert it.everything_on_disk == ["step_000001", "step_000002"]
        assert it.totals.checkpoints_failed == 1
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
        it.buffer.drop(2, DropReason.NO_SPREAD)
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
    async with desk(tmp_path, fence=take_over(RunLayout(tmp_path), 0)) as it:
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
    async with desk(tmp_path, fence=take_over(RunLayout(tmp_path), 0)) as it:
        await asyncio.wait_for(it.writer.write(1, 1), PATIENCE_S)
        it.layout.owner.write_text('{"owner": "1-another"}')
        it.trainer_has_written(1)
        with pytest.raises(OwnershipLost):
            await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        assert it.steps_on_disk == []


async def test_a_checkpoint_that_cannot_be_completed_is_an_error(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await it.writer.write(1, 1)
        it.layout.checkpoint(1).write_text("a file in the way")
        it.trainer_has_written(1)
        with pytest.raises(CheckpointError, match="cannot be completed"):
            await asyncio.wait_for(it.writer.finish(), PATIENCE_S)


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


async def test_a_checkpoint_left_half_written_is_no_obstacle_to_the_same_step_once_more(tmp_path: Path) -> None:
    async with desk(tmp_path) as killed:
        await killed.writer.write(1, 1)
        (Path(killed.asked[0].directory) / "trainer").mkdir()
        (Path(killed.asked[0].directory) / "trainer" / ".weights-00001.safetensors.tmp").write_text("half")
    (tmp_path / "rollouts").rmdir()
    async with desk(tmp_path) as again:
        await again.complete_one(1)
        assert latest_complete(again.layout.checkpoints) is not None
        assert not list((again.layout.checkpoint(1) / "trainer").glob(".*"))


async def test_journals_are_deleted_once_every_checkpoint_holds_what_they_hold(tmp_path: Path) -> None:
    async with desk(tmp_path, keep=3) as it:
        room = Sizes(rollouts=4, prompts=4, prompt_tokens=100, tokens=100, text_bytes=1000)  # of two groups
        files = JournalFiles(it.layout.rollouts, run_name="small", attempt=0, room=room)
        it.buffer.journal = journal = RolloutJournal(files, GroupEventLog(it.layout.rollouts, 0), 0)
        for step in range(4):
            it.train_on_groups(2 * step, 2 * step + 1, step=step)
            journal.commit()
            await it.complete_one(step + 1)
        assert it.steps_on_disk == ["step_000002", "step_000003", "step_000004"]
        # The first of them knows two steps; the files of the other two are needed to go on from it.
        assert [path.name for path in journal_paths(it.layout.rollouts)] == ["journal_000002.h5", "journal_000003.h5"]
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
