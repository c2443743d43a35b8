"""Batches that are made ahead, and steps that begin with a part of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from rlhpc.algorithms.packing import FlopCost
from rlhpc.algorithms.samples import SampleMaker
from rlhpc.buffer.batches import DropReason
from rlhpc.config.rules import Config, SmallestPart
from rlhpc.protocol.errors import LedgerError
from rlhpc.protocol.messages import BATCHES, BatchRows, StepReport
from rlhpc.protocol.types import PackedBatch, RolloutGroup
from rlhpc.roles.controller import batch_maker
from rlhpc.roles.controller.batch_maker import RANK_0, BatchMaker, MadeBatch, TrainerLink
from tests.engines.memory_channel import MemoryClient, MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import FakeGenerator, SmallRing, make_buffer, prompt, scored, small_config, small_ring
from tests.unit.roles.test_train_loop import settle_down, until

# ---------------------------------------------------------------------------------------------------------------- parts
#
# Steps that begin with a part of their batch: the same step, sooner, and nothing lost where it never ends.


def in_parts(num_steps: int = 1, step_parts: int | str = 2, **admission: Any) -> Config:
    return small_config(num_steps, **{"window_groups": None, "max_staleness": 1, "step_parts": step_parts, **admission})


def admit(ring: SmallRing, num_groups: int, version: int = 0) -> None:
    for _ in range(num_groups):
        ring.ledger.admit(prompt(ring.ledger.counts()["admitted"]), version)


def finish(ring: SmallRing, *group_ids: int) -> None:
    while ring.ledger.grant("somebody", 2) is not None:
        pass
    for group_id in group_ids:
        for index in (0, 1):
            ring.buffer.deliver("somebody", scored(group_id, index))
    ring.loop.groups_changed()


@asynccontextmanager
async def waiting_ring(
    config: Config, directory: Path, num_groups: int, version: int = 0
) -> AsyncIterator[tuple[SmallRing, FakeGenerator]]:
    """A ring, not yet training, and its generator, which has been given so many groups and finished none."""
    async with small_ring(config, directory) as ring:
        ring.is_generating = False
        generator = await ring.add_generator()
        admit(ring, num_groups, version)
        yield ring, generator


def groups_in(batch: PackedBatch) -> int:
    return sum(minibatch.num_samples for minibatch in batch.minibatches) // 2


async def test_what_is_finished_is_trained_while_the_trainer_would_wait_and_the_rest_later(tmp_path: Path) -> None:
    async with waiting_ring(in_parts(groups_per_step=3, step_parts=3), tmp_path, 3) as (ring, _):
        training = ring.start_training()
        for group_id in (1, 0):
            finish(ring, group_id)
            await until(lambda: len(ring.trainer.parts) == 2 - group_id)  # noqa: B023
        await settle_down()
        assert ring.trainer.batches == []
        assert ring.ledger.counts()["finished"] == 2  # a checkpoint has them as such
        finish(ring, 2)
        await asyncio.wait_for(training, PATIENCE_S)
        [last] = ring.trainer.batches
        assert [(part.num_parts_before, part.is_part) for part in [*ring.trainer.parts, last]] == [
            (0, True),
            (1, True),
            (2, False),
        ]
        rows = [[len(row.loss_weights) for row in part.rows] for part in [*ring.trainer.parts, last]]
        assert rows == [[2], [2], [2]]  # each group's members once
        [record] = ring.records
        assert [group.group_id for group in record.groups] == [0, 1, 2]
        assert (groups_in(record.batch), len(record.batch.rows)) == (3, 3)
        tokens = [part.minibatches[0].num_loss_tokens for part in [*ring.trainer.parts, last]]
        assert tokens == [18, 18, 18]  # an estimate, here exact
        assert record.batch.minibatches[0].num_loss_tokens == 18
        assert ring.ledger.counts()["released"] == 3


async def test_packing_a_part_counts_as_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer waits for it, and wait_for_groups_s and step_s leave it out."""
    async with waiting_ring(in_parts(), tmp_path, 2) as (ring, _):
        make_part = BatchMaker.part

        async def make_slowly(*arguments: Any) -> MadeBatch:
            await asyncio.sleep(0.3)
            return await make_part(*arguments)

        monkeypatch.setattr(BatchMaker, "part", make_slowly)
        training = ring.start_training()
        finish(ring, 0)
        await until(lambda: len(ring.trainer.parts) == 1)
        finish(ring, 1)
        await asyncio.wait_for(training, PATIENCE_S)
        [record] = ring.records
        assert record.pack_s >= 0.3


async def test_a_part_is_not_begun_with_fewer_groups_than_it_should_have(tmp_path: Path) -> None:
    async with waiting_ring(in_parts(groups_per_step=4), tmp_path, 4) as (ring, _):
        ring.start_training()
        finish(ring, 3)
        await settle_down()
        assert ring.trainer.parts == []
        finish(ring, 0)
        await until(lambda: len(ring.trainer.parts) == 1)
        assert len(ring.trainer.parts[0].minibatches[0].rows[0].loss_weights) == 4


async def test_by_default_a_part_fills_a_row_of_every_rank(tmp_path: Path) -> None:
    config = in_parts(groups_per_step=4, step_parts="auto")
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"token_budget": 12})})
    async with waiting_ring(config, tmp_path, 4) as (ring, _):
        ring.start_training()
        finish(ring, 3)  # ten tokens, prompts included
        await settle_down()
        assert ring.trainer.parts == []
        finish(ring, 0)
        await until(lambda: len(ring.trainer.parts) == 1)
        assert sum(len(row.token_ids) for row in ring.trainer.parts[0].rows) == 20


async def test_groups_are_looked_at_again_when_an_eighth_more_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes a microsecond for each group, at each that is finished."""
    config = in_parts(groups_per_step=64, step_parts="auto")
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"token_budget": 300})})
    async with waiting_ring(config, tmp_path, 64) as (ring, _):
        looks = []
        part = ring.buffer.part

        def looked(num_groups: int, least: int) -> list[RolloutGroup]:
            if found := part(num_groups, least):
                looks.append(len(found))
            return found

        monkeypatch.setattr(ring.buffer, "part", looked)
        ring.start_training()
        for group_id in range(30):
            finish(ring, group_id)
            await settle_down()
        await until(lambda: len(ring.trainer.parts) == 1)
        assert looks == [16, 18, 20, 22, 24, 27, 30]


async def test_a_long_group_after_short_ones_is_enough_for_a_part(tmp_path: Path) -> None:
    """Short completions are finished first: by their length, only more groups than a batch has would fill the rows."""
    async with waiting_ring(in_parts(groups_per_step=6, step_parts="auto"), tmp_path, 6) as (ring, _):
        ring.start_training()  # a row is of 64 tokens
        finish(ring, 0, 1)
        await settle_down()
        assert ring.trainer.parts == []
        for index in (0, 1):
            short = scored(2, index)
            tokens = np.arange(28, dtype=np.int32)
            rollout = replace(
                short.rollout,
                token_ids=tokens,
                behaviour_logprobs=np.full(28, -1, np.float32),
                versions=np.zeros(28, np.int32),
                loss_mask=np.ones(28, np.bool_),
            )
            ring.buffer.deliver("somebody", replace(short, rollout=rollout))
        ring.loop.groups_changed()
        await until(lambda: len(ring.trainer.parts) == 1)
        assert groups_in(ring.trainer.parts[0]) == 3


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({}, SmallestPart(2, tokens=64)),
        ({"admission": {"groups_per_step": 3}}, SmallestPart(1, tokens=64)),
        ({"trainer": {"num_ranks": 4, "tensor_parallel": 2}}, SmallestPart(2, tokens=2 * 64)),
        ({"trainer": {"num_ranks": 2, "pipeline_parallel": 2}}, SmallestPart(8)),
        ({"trainer": {"num_ranks": 2, "pipeline_parallel": 2}, "admission": {"step_parts": 2}}, SmallestPart(4)),
        ({"algorithm": {"aggregation": "sequence"}}, SmallestPart(8)),
        ({"algorithm": {"advantage": "reinforce_pp_baseline"}}, SmallestPart(8)),
        ({"run": {"deterministic": True}}, SmallestPart(8)),
        ({"admission": {"step_parts": 1}}, SmallestPart(8)),
    ],
)
def test_how_small_a_part_may_be(change: dict[str, dict[str, Any]], parts: SmallestPart) -> None:
    tables = small_config(groups_per_step=8, window_groups=None).model_dump(exclude_unset=True)
    tables["trainer"] |= {"backend": "megatron"}
    for name, keys in change.items():
        tables[name] = tables.get(name, {}) | keys
    assert Config.model_validate(tables).smallest_part == parts


async def test_a_part_leaves_places_for_all_that_are_due_in_its_batch(tmp_path: Path) -> None:
    """S = 1: four groups due in batch 1 are in flight; when that is the next, no younger one may take their places."""
    async with waiting_ring(in_parts(num_steps=2), tmp_path, 4) as (ring, _):
        ring.start_training()
        finish(ring, 0, 1)
        await until(lambda: len(ring.records) == 1)  # 2 and 3 are due in the next batch
        await until(lambda: ring.ledger.has_slot)
        admit(ring, 2, version=1)
        finish(ring, 4, 5)
        await settle_down()
        assert ring.trainer.parts == []
        finish(ring, 3)
        await until(lambda: len(ring.trainer.parts) == 1)
        finish(ring, 2)
        await until(lambda: len(ring.records) == 2)
        assert [group.group_id for group in ring.records[1].groups] == [2, 3]


async def test_what_has_begun_stays_in_its_batch_though_older_groups_are_finished_later(tmp_path: Path) -> None:
    async with waiting_ring(in_parts(), tmp_path, 4) as (ring, _):
        training = ring.start_training()
        finish(ring, 3)
        await until(lambda: len(ring.trainer.parts) == 1)
        finish(ring, 0, 1, 2)
        await asyncio.wait_for(training, PATIENCE_S)
        assert [group.group_id for group in ring.records[0].groups] == [0, 3]


async def test_a_run_that_stops_within_a_step_keeps_what_was_trained_of_it(tmp_path: Path) -> None:
    async with waiting_ring(in_parts(), tmp_path, 2) as (ring, _):
        training = ring.start_training()
        finish(ring, 0)
        await until(lambda: len(ring.trainer.parts) == 1)
        ring.stop.set()
        await asyncio.wait_for(training, PATIENCE_S)
        assert ring.records == []
        frozen = ring.buffer.freeze(0)
        assert [resolved.group.group_id for resolved in frozen.groups] == [0]
        assert (ring.ledger.counts()["taken"], ring.ledger.counts()["finished"]) == (0, 1)


async def test_no_part_is_begun_once_the_run_is_to_stop(tmp_path: Path) -> None:
    """It was publishing to a generator that came back when it was asked to, and groups were finished meanwhile."""
    async with waiting_ring(in_parts(), tmp_path, 2) as (ring, generator):
        training = ring.start_training()
        await until(lambda: ring.trainer.published == [0])
        await settle_down()
        await ring.lose(generator)
        await ring.add_generator("generator-1", "second")
        await until(lambda: ring.trainer.published == [0, 0])
        finish(ring, 0)
        ring.stop.set()
        await asyncio.wait_for(training, PATIENCE_S)
        assert ring.trainer.parts == []


async def test_generators_that_come_back_within_a_step_get_its_weights_and_it_goes_on(tmp_path: Path) -> None:
    async with waiting_ring(in_parts(), tmp_path, 2) as (ring, generator):
        training = ring.start_training()
        finish(ring, 0)
        await until(lambda: len(ring.trainer.parts) == 1)
        await ring.lose(generator)
        await ring.add_generator("generator-1", "second")
        await until(lambda: ring.trainer.published == [0, 0])
        finish(ring, 1)
        await asyncio.wait_for(training, PATIENCE_S)
        assert [batch.num_parts_before for batch in ring.trainer.batches] == [1]


async def test_a_part_that_is_too_stale_after_all_is_never_trained_on(tmp_path: Path) -> None:
    async with waiting_ring(in_parts(), tmp_path, 2, version=-3) as (ring, _):
        finish(ring, 0)
        with pytest.raises(LedgerError, match=r"admitted under version -3.*bound of 1"):
            await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert ring.trainer.parts == []


async def test_a_reference_is_renewed_before_the_first_part_and_only_there(tmp_path: Path) -> None:
    config = in_parts(groups_per_step=3, step_parts=3)
    config = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"kl_coefficient": 0.1, "reference_every": 1})}
    )
    async with waiting_ring(config, tmp_path, 3, version=1) as (ring, _):
        ring.loop.version = ring.trainer.version = 1  # of the model itself, 0, there is nothing to renew
        training = ring.start_training()
        for group_id in range(3):
            finish(ring, group_id)
            await until(lambda: len(ring.trainer.parts) == min(2, group_id + 1))  # noqa: B023
        await asyncio.wait_for(training, PATIENCE_S)
        [last] = ring.trainer.batches
        assert [part.renews_reference for part in [*ring.trainer.parts, last]] == [True, False, False]


# --------------------------------------------------------------------------------------------------- batches made ahead
#
# A batch made while the step before it is trained: the same as one made late, and trained only if it is taken.


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
        while self.buffer.ledger.grant("somebody", 2) is not None:
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
