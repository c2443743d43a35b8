"""A checkpoint is begun at a boundary and completed while the run goes on; being killed meanwhile loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.buffer.rollout_buffer import RolloutBuffer
from rlhpc.errors import CheckpointError
from rlhpc.messages import SaveCheckpoint, SaveReport, SnapshotTaken
from rlhpc.roles.books import Books
from rlhpc.roles.checkpoint_writer import CheckpointWriter
from rlhpc.roles.run_state import read_run_state, set_aside_later_segments
from rlhpc.roles.totals import Totals
from rlhpc.roles.trainer_link import LEAD, TrainerLink
from rlhpc.run_layout import RunLayout
from rlhpc.topology import BATCHES
from rlhpc.training.checkpoint_directory import latest_complete
from rlhpc.transport.memory import MemoryServer
from rlhpc.weights.membership import Membership
from tests.unit.roles.small_ring import make_buffer, prompt, scored, small_config

PATIENCE_S = 10.0


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

    def trainer_has_written(self, step: int, error: str = "") -> None:
        directory = Path(next(command.directory for command in self.asked if command.step == step)) / "trainer"
        directory.mkdir()
        (directory / "state").write_text(f"after {step} steps")
        self.writer.hear(SaveReport(step, 0.5, error))

    async def complete_one(self, step: int) -> None:
        await asyncio.wait_for(self.writer.write(step, step), PATIENCE_S)
        self.trainer_has_written(step)
        await asyncio.wait_for(self.writer.finish(), PATIENCE_S)

    def train_on_groups(self, *group_ids: int, step: int) -> None:
        """Admit, sample and consume these groups; their segment is sealed with the next checkpoint."""
        for group_id in group_ids:
            assert self.buffer.ledger.admit(prompt(group_id), step) == group_id
            for index in (0, 1):
                self.buffer.ledger.grant("somebody", 1)
                self.buffer.deliver("somebody", scored(group_id, index))
        groups = self.buffer.take(len(group_ids), step)
        assert groups is not None
        self.buffer.consume(groups, step)
        self.buffer.release(group_ids)

    @property
    def steps_on_disk(self) -> list[str]:
        return sorted(path.name for path in self.layout.checkpoints.glob("step_*"))


@asynccontextmanager
async def desk(root: Path, keep: int = 2) -> AsyncIterator[Desk]:
    layout, batches = RunLayout(root), MemoryServer(BATCHES)
    layout.rollouts.mkdir()
    buffer = make_buffer(small_config(), layout.rollouts)
    books: Any = Books(NoPrompts(), None, buffer.ledger, buffer.segments, buffer, Membership(), Totals(), 0, 0)
    asked: list[SaveCheckpoint] = []
    client = batches.connect(LEAD)

    async def take_snapshots() -> None:
        while True:
            command = await client.receive()
            asked.append(command)
            await client.send(SnapshotTaken(command.step, 0.01))

    trainer = asyncio.create_task(take_snapshots())
    try:
        yield Desk(layout, buffer, CheckpointWriter(layout, keep, TrainerLink(batches), books), asked)
    finally:
        trainer.cancel()


async def test_training_goes_on_as_soon_as_the_snapshot_is_taken(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await asyncio.wait_for(it.writer.write(1, 1), PATIENCE_S)
        assert it.writer.awaits_trainer
        assert latest_complete(it.layout.checkpoints) is None
        it.writer.raise_failure()  # there is none
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
        await it.complete_one(2)
        assert it.writer.longest_s == slow
        await it.writer.write(3, 3)
        it.trainer_has_written(3, error="the disk is full")
        with pytest.raises(CheckpointError):
            await it.writer.finish()
        assert it.writer.longest_s == slow  # one that failed took no time to become complete


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


async def test_a_checkpoint_that_the_trainer_could_not_write_is_an_error_and_older_ones_stay(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        for step in (1, 2):
            await it.complete_one(step)
        await it.writer.write(3, 3)
        it.trainer_has_written(3, error="the disk is full")
        with pytest.raises(CheckpointError, match="step_000003: the trainer could not save: the disk is full"):
            await asyncio.wait_for(it.writer.finish(), PATIENCE_S)
        with pytest.raises(CheckpointError, match="the disk is full"):
            it.writer.raise_failure()
        with pytest.raises(CheckpointError, match="the disk is full"):
            await it.writer.write(4, 4)
        assert it.steps_on_disk == ["step_000001", "step_000002"]


async def test_a_checkpoint_that_cannot_be_completed_is_an_error(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await it.writer.write(1, 1)
        it.layout.checkpoint(1).write_text("a file in the way")
        it.trainer_has_written(1)
        with pytest.raises(CheckpointError, match="cannot be completed"):
            await asyncio.wait_for(it.writer.finish(), PATIENCE_S)


async def test_a_report_of_another_step_completes_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        it.writer.hear(SaveReport(0, 0.5))
        await it.writer.write(1, 1)
        it.writer.hear(SaveReport(0, 0.5))
        assert it.writer.awaits_trainer
        it.trainer_has_written(1)
        it.writer.hear(SaveReport(1, 0.5))  # once more
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
        assert set_aside_later_segments(it.layout, read_run_state(it.layout, 1), attempt=1) == 1
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
