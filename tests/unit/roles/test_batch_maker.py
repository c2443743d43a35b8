"""A batch made while the step before it is trained: the same as one made late, and trained only if it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from rlhpc.algorithms.packing import FlopCost
from rlhpc.algorithms.samples import SampleMaker
from rlhpc.buffer.batches import DropReason
from rlhpc.protocol.errors import LedgerError
from rlhpc.protocol.messages import BATCHES, BatchRows, StepReport
from rlhpc.roles.controller import batches as batch_maker
from rlhpc.roles.controller.batches import RANK_0, BatchMaker, TrainerLink
from tests.engines.memory_channel import MemoryClient, MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import make_buffer, prompt, scored, small_config, small_ring


class Stand:
    """A maker, its buffer, and what rank 0 receives."""

    def __init__(self, directory: Path, num_groups: int = 5) -> None:
        self.config = small_config(max_staleness=3, window_groups=2)
        self.buffer = make_buffer(self.config, directory)
        batches = MemoryServer(BATCHES)
        self.rank: MemoryClient = batches.connect(RANK_0)
        samples, cost = SampleMaker.of(self.config), FlopCost(1.0, 0.0)
        self.maker = BatchMaker(self.config, self.buffer, TrainerLink(batches), cost, samples)
        for group_id in range(num_groups):
            self.buffer.admit(prompt(group_id), 0)

    def finish(self, *group_ids: int) -> None:
        while self.buffer.grant("somebody", 2) is not None:
            pass
        for group_id in group_ids:
            for index in (0, 1):
                self.buffer.deliver("somebody", scored(group_id, index))
        self.maker.look_again()

    async def rows(self) -> BatchRows:
        message = await self.rank.receive(PATIENCE_S)
        assert isinstance(message, BatchRows)
        return message

    async def take(self, step: int = 0) -> tuple[list[int], batch_maker.MadeBatch]:
        groups = self.buffer.take(2, step)
        assert groups is not None
        return [group.group_id for group in groups], await self.maker.made(groups, step)


@pytest.fixture(params=["at once", "in a thread"])
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    with mock.patch.object(batch_maker, "SMALL_BATCH_TOKENS", 0 if request.param == "in a thread" else 1 << 14):
        yield Stand(tmp_path)


async def test_a_batch_is_made_and_sent_as_soon_as_its_groups_are_there_and_taken_as_it_is(
    stand: Stand, tmp_path: Path
) -> None:
    stand.maker.begin(0)
    stand.finish(0)
    stand.finish(1)
    rows = await stand.rows()  # before anybody takes it
    groups, made = await stand.take()
    assert (groups, made.number) == ([0, 1], rows.number)
    late = await Stand(tmp_path).maker.made([stand.buffer._groups[group_id] for group_id in groups], 0)
    for ahead, after in zip(made.minibatches[0].rows, late.minibatches[0].rows, strict=True):
        assert all(np.array_equal(getattr(ahead, name), getattr(after, name)) for name in ahead.__slots__)
    assert made.order == late.order


async def test_where_other_groups_are_taken_their_rows_are_made_and_sent_under_another_number(stand: Stand) -> None:
    stand.maker.begin(0)
    stand.finish(1, 2)  # the window of two lets 1 pass 0, but not 2
    await asyncio.sleep(0)
    stand.finish(0)
    ahead = await stand.rows()
    stand.buffer.drop(0, DropReason.CANCELLED)
    groups, made = await stand.take()
    assert groups == [1, 2]
    rows = await stand.rows()
    assert made.number == rows.number == ahead.number + 1
    assert stand.maker.num_wasted == 1


async def test_what_is_given_up_is_sent_to_nobody_later(stand: Stand) -> None:
    stand.maker.begin(0)
    await asyncio.sleep(0)
    stand.maker.give_up()
    stand.finish(0, 1)
    _, made = await stand.take()
    assert made.number == (await stand.rows()).number == 1


async def test_the_next_batch_is_on_its_way_while_the_step_before_it_is_trained(tmp_path: Path) -> None:
    """And what the trainer is told to train is what the buffer has taken, in every step."""
    async with small_ring(small_config(num_steps=6), tmp_path) as ring:
        heard: list[object] = []
        answer = ring.trainer._answer

        def noted(command: object) -> object:
            reply = answer(command)
            heard.append(reply)
            return reply

        with mock.patch.object(ring.trainer, "_answer", noted):
            await ring.add_generator()
            await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        steps = [report.step for report in heard if isinstance(report, StepReport)]
        assert steps == list(range(6))
        assert ring.loop._batches.num_wasted == 0
        assert ring.loop._batches._num_made == 6


async def test_a_batch_made_ahead_is_checked_under_the_version_that_it_is_trained_at(tmp_path: Path) -> None:
    """It was fresh enough when it was made."""
    async with small_ring(small_config(num_steps=4), tmp_path) as ring:
        ring.trainer.version = 3  # which step 0 raises to 4
        await ring.add_generator()
        with pytest.raises(LedgerError, match="admitted under version 0, would be trained at version 4"):
            await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert len(ring.trainer.batches) == 1
        assert ring.loop._batches._num_made == 2
