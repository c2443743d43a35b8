"""run.deterministic: weights wait for all that the ones before them have to sample, and are not saved before that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlhpc.algorithms.samples import RewardShaping
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.history import RecordedStep, Replay, Trained
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import RoleFailed
from rlhpc.roles.controller.train_loop import Lockstep
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import SmallRing, prompt, scored, small_config, small_ring
from tests.unit.roles.test_train_loop import settle_down, until


def in_lockstep(max_staleness: int, num_steps: int = 4) -> Config:
    """Two groups of two a step."""
    config = small_config(num_steps, max_staleness=max_staleness)
    return config.model_copy(update={"run": config.run.model_copy(update={"deterministic": True})})


def sample(ring: SmallRing, *, rewards: tuple[float, float] = (0.0, 1.0)) -> int:
    """Admit a prompt under the live version and finish its group."""
    group_id = ring.ledger.admit(prompt(ring.ledger.counts()["admitted"]), max(0, ring.weight_sync.live_version))
    for index, reward in enumerate(rewards):
        ring.ledger.grant("somebody", 1)
        ring.buffer.deliver("somebody", scored(group_id, index, reward))
    ring.loop.groups_changed()
    return group_id


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
async def test_every_step_trains_what_one_version_has_sampled(tmp_path: Path, max_staleness: int) -> None:
    async with small_ring(in_lockstep(max_staleness, num_steps=8), tmp_path) as ring:
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        admitted = [{group.admitted_version for group in record.groups} for record in ring.records]
        assert admitted == [{max(0, step - max_staleness)} for step in range(8)]
        groups = [group.group_id for record in ring.records for group in record.groups]
        assert groups == list(range(16))


async def test_weights_wait_for_the_last_group_that_the_ones_before_them_sample(tmp_path: Path) -> None:
    async with small_ring(in_lockstep(1), tmp_path) as ring:
        generator = await ring.add_generator()
        ring.is_generating = False
        training = ring.start_training()
        await until(lambda: ring.weight_sync.live_version == 0)
        for _ in range(3):  # the two of step 0, and one of step 1
            sample(ring)
        await until(lambda: len(ring.trainer.batches) == 1)
        await settle_down()
        assert [version for _, version in generator.received] == [0]
        useless = sample(ring, rewards=(1.0, 1.0))  # teaches nothing, so that another one takes its place
        await settle_down()
        assert [version for _, version in generator.received] == [0]
        ring.buffer.drop(useless, DropReason.NO_SPREAD)
        sample(ring)
        await generator.until_received(1)
        ring.is_generating = True
        await until(lambda: ring.weight_sync.live_version == 1)
        ring.generate()
        await asyncio.wait_for(training, PATIENCE_S)


async def test_a_stop_before_that_saves_nothing_and_after_it_does(tmp_path: Path) -> None:
    for num_sampled, saved in ((3, []), (4, [(1, 1)])):
        async with small_ring(in_lockstep(1), tmp_path) as ring:
            generator = await ring.add_generator()
            ring.is_generating = False
            gate = generator.hold(1)
            training = ring.start_training()
            await until(lambda ring=ring: ring.weight_sync.live_version == 0)
            for _ in range(num_sampled):
                sample(ring)
            await until(lambda ring=ring: len(ring.trainer.batches) == 1)
            ring.stop.set()
            await asyncio.wait_for(training, PATIENCE_S)
            gate.set()
            assert ring.saving.begun == saved
            assert ring.trainer.published in ([0], [0, 1])


async def test_weights_that_nobody_has_any_more_end_the_attempt(tmp_path: Path) -> None:
    """The trainer has gone on, so that a generator that comes now cannot get the weights that are to sample."""
    async with small_ring(in_lockstep(1), tmp_path) as ring:
        first = await ring.add_generator()
        ring.is_generating = False
        training = ring.start_training()
        await until(lambda: ring.weight_sync.live_version == 0)
        for _ in range(3):
            sample(ring)
        await until(lambda: len(ring.trainer.batches) == 1)
        await ring.lose(first)
        await settle_down()
        assert not training.done()
        await ring.add_generator("generator-1")
        with pytest.raises(RoleFailed, match=r"every generator with weights 0 is gone.*weights 1"):
            await asyncio.wait_for(training, PATIENCE_S)


async def test_with_staleness_zero_a_generator_may_be_lost_at_any_time(tmp_path: Path) -> None:
    async with small_ring(in_lockstep(0), tmp_path) as ring:
        first = await ring.add_generator()
        training = ring.start_training()
        await first.until_received(1)
        await ring.lose(first)
        second = await ring.add_generator("generator-1")
        await second.until_received(2)
        await asyncio.wait_for(training, PATIENCE_S)


@pytest.mark.parametrize(("num_sampled", "num_repeated"), [(5, 1), (6, 2)])
async def test_a_step_is_repeated_only_if_the_weights_after_it_may_go_out(
    tmp_path: Path, num_sampled: int, num_repeated: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two steps were trained, with a staleness of one: after the second one six groups have to be finished."""
    async with small_ring(in_lockstep(1), tmp_path) as ring:
        ring.is_generating = False
        for _ in range(num_sampled):
            if not ring.ledger.has_slot:
                ring.ledger.admit(prompt(ring.ledger.counts()["admitted"]), 1, again=True)
                group_id = ring.ledger.counts()["admitted"] - 1
                for index in (0, 1):
                    ring.ledger.grant("somebody", 1)
                    ring.buffer.deliver("somebody", scored(group_id, index))
            else:
                sample(ring)
        steps = tuple(
            RecordedStep(step, (2 * step, 2 * step + 1), Trained(step, step, True, {"loss": 0.5 - step}))
            for step in (0, 1)
        )
        await ring.loop.replay(Replay(steps), asyncio.Event(), lambda groups: None, ring.record)
        assert ring.loop.step == len(ring.records) == num_repeated
        await ring.add_generator()
        ring.is_generating = True
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert [batch.step for batch in ring.trainer.batches] == [0, 1, 2, 3]
        # Also a step that had to wait is held against its record, to the last bit.
        said = [record.getMessage() for record in caplog.records if "went differently" in record.getMessage()]
        assert said == ["step 1, repeated, went differently: loss -0.5 then, 0.5 now"]


def test_groups_that_came_back_without_spread_do_not_count(tmp_path: Path) -> None:
    """They are about to be dropped: which a crash may have prevented."""

    async def count() -> tuple[bool, bool]:
        async with small_ring(in_lockstep(1), tmp_path) as ring:
            lockstep = Lockstep(ring.buffer, ring.config.admission, RewardShaping())
            sample(ring)
            sample(ring, rewards=(0.0, 0.0))
            before = lockstep.is_settled(0)
            sample(ring)
            return before, lockstep.is_settled(0)

    assert asyncio.run(count()) == (False, True)
