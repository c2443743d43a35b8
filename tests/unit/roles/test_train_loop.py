"""What the step promises: full batches, slots released only under live weights, a run that outlives its generators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from rlhpc.algorithms.samples import RewardShaping
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.history import RecordedStep, Replay, Trained
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.errors import CheckpointError, LedgerError, RoleFailed, TrainingError
from rlhpc.protocol.messages import StepReport
from rlhpc.roles.controller.batch_maker import StepRecord
from rlhpc.roles.controller.train_loop import Lockstep, compare
from rlhpc.roles.controller.weight_sync import WeightSyncLimits
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import SmallRing, prompt, scored, small_config, small_ring

# ---------------------------------------------------------------------------------------------------------------- steps
#
# What the step promises: full batches, slots released only under live weights, a run that outlives its generators.


NUM_TURNS = 50  # of the event loop: more than any chain of messages here needs


async def settle_down() -> None:
    """Let everything happen that can happen without another event."""
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], bool]) -> None:
    """Turn the event loop until it is so."""
    while not is_so():  # noqa: ASYNC110  the fakes have no event for everything
        await asyncio.sleep(0)


async def test_slots_of_a_step_stay_taken_until_the_next_version_is_live(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path) as ring:
        generator = await ring.add_generator()
        live = generator.hold(1)
        ring.start_training()
        await generator.until_received(1)
        await settle_down()
        assert ring.ledger.counts()["released"] == 0
        assert ring.weight_sync.live_version == 0
        live.set()
        await generator.until_received(2)
        assert ring.ledger.counts()["released"] >= 2


async def test_a_version_that_settles_late_releases_nothing_of_the_step_after_it(tmp_path: Path) -> None:
    """Step 1 is trained while version 1 is still loading; its groups were trained into version 2, not version 1."""
    async with small_ring(small_config(), tmp_path) as ring:
        generator = await ring.add_generator()
        first, second = generator.hold(1), generator.hold(2)
        ring.start_training()
        await generator.until_received(1)
        await until(lambda: len(ring.trainer.batches) == 2)
        await settle_down()  # step 1 is reported; version 1 is not live
        assert ring.ledger.counts()["released"] == 0
        first.set()
        await generator.until_received(2)
        await settle_down()
        assert ring.weight_sync.live_version == 1
        assert ring.ledger.counts()["released"] == 2  # those of step 0 alone
        second.set()


async def test_a_group_that_is_too_stale_after_all_is_never_trained_on(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path) as ring:
        ring.is_generating = False
        await ring.add_generator()
        for group_id in (0, 1):
            ring.ledger.admit(prompt(group_id), -3)
            for index in (0, 1):
                ring.ledger.grant("somebody", 1)
                ring.buffer.deliver("somebody", scored(group_id, index))
        with pytest.raises(LedgerError, match=r"admitted under version -3.*bound of 2"):
            await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert ring.trainer.batches == []


# --------------------------------------------------------------------------------------- saving, stopping, skipping


def saving_every(num_steps: int, every_steps: int) -> Config:
    config = small_config(num_steps=num_steps)
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": every_steps})})


async def test_checkpoints_are_written_on_schedule_and_at_the_end_when_everything_is_live(tmp_path: Path) -> None:
    async with small_ring(saving_every(5, 2), tmp_path) as ring:
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert ring.saving.begun == [(2, 2), (4, 4), (5, 5)]
        assert ring.saving.live_versions == [2, 4, 5]


async def test_steps_go_on_while_a_checkpoint_is_written_and_the_run_ends_when_it_is(tmp_path: Path) -> None:
    async with small_ring(saving_every(3, 2), tmp_path) as ring:
        await ring.add_generator()
        ring.saving.is_disk_slow = True
        training = ring.start_training()
        await until(lambda: len(ring.trainer.batches) == 3)
        await settle_down()
        assert ring.saving.begun == [(2, 2)]  # one at a time
        ring.saving.written.set()
        await until(lambda: ring.saving.begun == [(2, 2), (3, 3)])
        await settle_down()
        assert not training.done()
        ring.saving.written.set()
        await asyncio.wait_for(training, PATIENCE_S)


@pytest.mark.parametrize(
    ("num_steps", "every_steps", "failing", "pause_ends", "steps"),
    [(8, 4, 5, 5, [4, 6, 8]), (9, 2, 2, 6, [2, 7, 8, 9])],
    ids=["at the next boundary", "when the pause has ended"],
)
async def test_a_checkpoint_that_fails_is_followed_by_another_as_soon_as_its_pause_has_ended(
    tmp_path: Path, num_steps: int, every_steps: int, failing: int, pause_ends: int, steps: list[int]
) -> None:
    async with small_ring(saving_every(num_steps, every_steps), tmp_path) as ring:
        await ring.add_generator()

        def fail_and_pause(record: StepRecord) -> None:
            if record.report.step == failing:
                ring.saving.failure = CheckpointError("the disk is full")
            ring.saving.is_pausing = failing <= record.report.step < pause_ends

        ring.on_record = fail_and_pause
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert [step for step, _ in ring.saving.begun] == steps


async def test_checkpoints_that_fail_for_too_long_end_the_run_at_the_next_boundary(tmp_path: Path) -> None:
    async with small_ring(saving_every(100, 2), tmp_path) as ring:
        await ring.add_generator()
        ring.saving.is_patience_over = True

        def fail_after_the_third(record: StepRecord) -> None:
            if record.report.step == 2:
                ring.saving.failure = CheckpointError("the disk is full")

        ring.on_record = fail_after_the_third
        with pytest.raises(CheckpointError, match="the disk is full"):
            await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert [batch.step for batch in ring.trainer.batches] == [0, 1, 2]


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_last_checkpoint_that_fails_is_written_again_until_patience_is_over(
    tmp_path: Path, is_over: bool
) -> None:
    async with small_ring(small_config(num_steps=2), tmp_path) as ring:
        await ring.add_generator()
        ring.saving.is_disk_slow = True
        training = ring.start_training()
        await until(lambda: ring.saving.begun == [(2, 2)])
        ring.saving.failure, ring.saving.is_patience_over = CheckpointError("the disk is full"), is_over
        ring.saving.is_disk_slow = False
        ring.saving.written.set()
        if is_over:
            with pytest.raises(CheckpointError, match="the disk is full"):
                await asyncio.wait_for(training, PATIENCE_S)
        else:
            await asyncio.wait_for(training, PATIENCE_S)
        assert ring.saving.begun == [(2, 2)] * (1 if is_over else 2)


async def test_stop_saves_at_once_when_every_generator_left_while_it_loaded(tmp_path: Path) -> None:
    """Slurm ends them at the same moment as us; nobody is left to publish to, or to wait for."""
    async with small_ring(small_config(num_steps=1000), tmp_path) as ring:
        leaving = await ring.add_generator()
        leaving.hold(2)
        training = ring.start_training()
        await leaving.until_received(2)
        await ring.lose(leaving)
        await settle_down()
        assert not training.done()  # it waits for a generator
        ring.stop.set()
        await ring.weight_sync.stop_waiting()
        await asyncio.wait_for(training, PATIENCE_S)
        assert ring.saving.begun == [(ring.loop.step, ring.loop.version)]
        assert ring.loop.step >= 2


async def test_stop_does_not_wait_for_generators_that_are_still_loading(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=1000), tmp_path) as ring:
        slow = await ring.add_generator()
        slow.hold(2)
        training = ring.start_training()
        await slow.until_received(2)
        ring.stop.set()
        await asyncio.wait_for(training, PATIENCE_S)
        assert ring.saving.begun == [(ring.loop.step, ring.loop.version)]


async def test_stop_while_waiting_for_groups_needs_no_further_group(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path) as ring:
        ring.is_generating = False
        await ring.add_generator()
        training = ring.start_training()
        await settle_down()
        ring.stop.set()
        await asyncio.wait_for(training, PATIENCE_S)
        assert ring.saving.begun == []  # there is nothing to save


async def test_a_step_that_is_not_finite_keeps_the_version_and_too_many_of_them_end_the_run(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=100), tmp_path) as ring:
        await ring.add_generator()
        ring.trainer.is_finite = False
        with pytest.raises(TrainingError, match=r"5 steps in a row were not finite; lower trainer.learning_rate"):
            await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert [record.report.applied for record in ring.records] == [False] * 4
        assert {record.report.policy_version for record in ring.records} == {0}


async def test_staleness_can_be_told_from_segments_after_skipped_steps(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=12), tmp_path) as ring:
        await ring.add_generator()
        ring.trainer.is_finite = False

        def every_fourth_is_finite(record: StepRecord) -> None:
            ring.trainer.is_finite = record.report.step % 4 == 2

        ring.on_record = every_fourth_is_finite
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        ring.buffer.segments.seal_all()
        used = list(read_rollouts_directory(tmp_path))
    bound = ring.ledger.staleness_bound
    assert [resolved.applied for resolved in used[::2]] == [step % 4 == 3 for step in range(12)]
    assert max(resolved.trained_version - resolved.group.admitted_version for resolved in used) <= bound
    assert max(resolved.consumed_step - resolved.group.admitted_version for resolved in used) > bound


# -------------------------------------------------------------------------------------------- generators come and go


async def test_a_generator_that_fails_to_load_gets_no_lease_until_it_has_the_next_version(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path) as ring:
        sound, weak = await ring.add_generator("generator-0"), await ring.add_generator("generator-1")
        weak.refuses.add(1)
        second = sound.hold(2)
        ring.start_training()
        await sound.until_received(2)
        assert ring.weight_sync.live_version == 1
        assert ring.weight_sync.ready_members == {"generator-0"}
        second.set()
        await weak.until_received(2)
        await settle_down()
        assert ring.trainer.formed[:2] == [("generator-0", "generator-1")] * 2
        assert "generator-1" in ring.weight_sync.ready_members


@pytest.mark.waits
async def test_a_generator_that_stays_silent_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path, WeightSyncLimits(5.0, ack_timeout_s=1.0)) as ring:
        await ring.add_generator("generator-0")
        silent = await ring.add_generator("generator-1")
        silent.hold(1)
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert ring.weight_sync.ready_members == {"generator-0"}
        assert ring.loop.step == 4


async def test_when_the_only_generator_fails_to_load_the_version_is_published_again(tmp_path: Path) -> None:
    async with small_ring(small_config(max_staleness=0), tmp_path) as ring:
        generator = await ring.add_generator()
        generator.refuses.add(1)
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert [version for _, version in generator.received] == [0, 1, 1, 2, 3, 4]
        assert ring.ledger.counts()["released"] == 8


@pytest.mark.parametrize("joins_before", [False, True])
async def test_when_all_die_between_two_updates_the_next_one_is_given_weights_at_once(
    tmp_path: Path, joins_before: bool
) -> None:
    """Nobody else would: without rollouts there is no step, and without a step no broadcast."""
    async with small_ring(small_config(), tmp_path) as ring:
        ring.is_generating = False
        doomed = await ring.add_generator("generator-0")
        training = ring.start_training()
        await settle_down()
        assert ring.weight_sync.live_version == 0
        if joins_before:
            newcomer = await ring.add_generator("generator-1")
            await settle_down()
            assert newcomer.received == []  # it has to wait for the next version
        ring.is_generating = True
        await ring.lose(doomed)
        if not joins_before:
            await settle_down()
            newcomer = await ring.add_generator("generator-1")
        await asyncio.wait_for(training, PATIENCE_S)
        assert newcomer.received[0] == (2, 0)
        assert ring.loop.step == 4


async def test_a_run_that_no_generator_joins_fails_and_says_where_to_look(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path, WeightSyncLimits(first_member_s=0.02)) as ring:
        with pytest.raises(RoleFailed, match="no generator for"):
            await asyncio.wait_for(ring.start_training(), PATIENCE_S)


async def test_a_trainer_that_cannot_broadcast_at_all_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhpc.roles.controller.weight_sync.PAUSE_S", 0.0)
    async with small_ring(small_config(), tmp_path) as ring:
        await ring.add_generator()
        ring.trainer.failing_broadcasts = 1000
        with pytest.raises(RoleFailed, match=r"broadcasts in a row failed, the last: a member is gone"):
            await asyncio.wait_for(ring.start_training(), PATIENCE_S)


# ------------------------------------------------------------------------------------------------------------- replay


def record_of(ring: SmallRing, num_steps: int, loss: float = 0.5) -> Replay:
    """A history of full batches, whose groups are finished in the buffer; every second one is newer than its batch."""
    for group_id in range(2 * num_steps):
        ring.ledger.admit(prompt(group_id), 0, again=True)
        for index in range(2):
            ring.buffer.deliver("journal", scored(group_id, index))
    steps = [
        RecordedStep(step, (2 * step + 1, 2 * step), Trained(step, step, applied=True, metrics={"loss": loss}))
        for step in range(num_steps)
    ]
    return Replay(tuple(steps), [ResolvedGroup(group) for group in ring.buffer.finished()])


async def test_recorded_steps_are_trained_on_their_own_batches_before_anything_is_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with small_ring(small_config(num_steps=5), tmp_path) as ring:
        replay, counted = record_of(ring, 3), list[list[int]]()

        def restored(groups: Iterable[ResolvedGroup]) -> None:
            counted.append([group.group.group_id for group in groups])

        await asyncio.wait_for(ring.loop.replay(replay, ring.stop, restored, ring.record), PATIENCE_S)
        assert [batch.step for batch in ring.trainer.batches] == [0, 1, 2]
        assert ring.trainer.published == []
        assert [[group.group_id for group in record.groups] for record in ring.records] == [[1, 0], [3, 2], [5, 4]]
        assert counted == [[0, 1], [2, 3], [4, 5], []]
        assert not replay.restored  # nothing keeps what was trained again in memory
        assert ring.ledger.counts()["released"] == 6
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        assert [batch.step for batch in ring.trainer.batches] == [0, 1, 2, 3, 4]
        assert ring.trainer.published[0] == 3
        assert ring.saving.begun == [(5, 5)]
    assert "went differently" not in caplog.text


async def test_a_repeated_step_that_goes_another_way_is_told_with_both_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with small_ring(small_config(num_steps=5), tmp_path) as ring:
        replay = record_of(ring, 1, loss=0.25)
        await asyncio.wait_for(ring.loop.replay(replay, ring.stop, list, ring.record), PATIENCE_S)
    assert "step 0, repeated, went differently: loss 0.25 then, 0.5 now" in caplog.text


async def test_a_replay_ends_at_a_stop_and_at_the_last_step(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=2), tmp_path) as ring:
        replay = record_of(ring, 3)
        await asyncio.wait_for(ring.loop.replay(replay, ring.stop, list, ring.record), PATIENCE_S)
        assert ring.loop.step == 2
    async with small_ring(small_config(num_steps=5), tmp_path) as ring:
        replay = record_of(ring, 3)
        ring.stop.set()
        await asyncio.wait_for(ring.loop.replay(replay, ring.stop, list, ring.record), PATIENCE_S)
        assert ring.loop.step == 0


async def test_weights_are_published_only_when_what_made_them_is_on_disk(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=3), tmp_path) as ring:
        is_on_disk, asked = asyncio.Event(), list[int]()

        async def durable() -> None:
            asked.append(len(ring.trainer.batches))
            if len(asked) > 1:  # the first weights come of no batch
                await is_on_disk.wait()

        ring.loop._durable = durable
        await ring.add_generator()
        ring.start_training()
        await until(lambda: len(ring.trainer.batches) == 1)
        await settle_down()
        assert asked == [0, 1]
        assert ring.trainer.published == [0]
        is_on_disk.set()
        await until(lambda: 3 in ring.trainer.published)


async def test_the_reference_is_renewed_every_so_many_versions_and_a_skipped_batch_is_none(tmp_path: Path) -> None:
    config = small_config(num_steps=9)
    algorithm = AlgorithmConfig(kl_coefficient=0.1, reference_every=3)
    async with small_ring(config.model_copy(update={"algorithm": algorithm}), tmp_path) as ring:

        def metrics(step: int) -> dict[str, float]:
            ring.trainer.is_finite = step not in (1, 4)
            return {"loss": 0.5}

        ring.trainer.metrics = metrics
        await ring.add_generator()
        await asyncio.wait_for(ring.start_training(), PATIENCE_S)
        versions = [0, 1, 1, 2, 3, 3, 4, 5, 6]
        assert [batch.policy_version for batch in ring.trainer.batches] == versions
        assert [batch.renews_reference for batch in ring.trainer.batches] == [v in (3, 6) for v in versions]


async def test_the_rate_of_a_batch_falls_with_the_age_of_its_tokens_if_that_is_asked_for(tmp_path: Path) -> None:
    config = small_config(num_steps=6, max_staleness=4)
    asked = config.model_copy(update={"algorithm": AlgorithmConfig(scale_rate_by_age=True)})
    for settings, is_scaled in ((config, False), (asked, True)):
        async with small_ring(settings, tmp_path / str(is_scaled)) as ring:
            await ring.add_generator()
            await asyncio.wait_for(ring.start_training(), PATIENCE_S)
            for batch in ring.trainer.batches:
                ages = np.concatenate([batch.policy_version - row.versions[row.loss_mask] for row in batch.rows])
                expected = 1 / max(1.0, float(ages.mean())) if is_scaled else 1.0
                assert batch.learning_rate == pytest.approx(1e-6 * expected)


# ------------------------------------------------------------------------------------------------------------- lockstep
#
# run.deterministic: weights wait for all that the ones before them have to finish_one, and are not saved before that.


def in_lockstep(max_staleness: int, num_steps: int = 4) -> Config:
    """Two groups of two a step."""
    config = small_config(num_steps, max_staleness=max_staleness)
    return config.model_copy(update={"run": config.run.model_copy(update={"deterministic": True})})


def finish_one(ring: SmallRing, *, rewards: tuple[float, float] = (0.0, 1.0)) -> int:
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
            finish_one(ring)
        await until(lambda: len(ring.trainer.batches) == 1)
        await settle_down()
        assert [version for _, version in generator.received] == [0]
        useless = finish_one(ring, rewards=(1.0, 1.0))  # teaches nothing, so that another one takes its place
        await settle_down()
        assert [version for _, version in generator.received] == [0]
        ring.buffer.drop(useless, DropReason.ZERO_VARIANCE)
        finish_one(ring)
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
                finish_one(ring)
            await until(lambda ring=ring: len(ring.trainer.batches) == 1)
            ring.stop.set()
            await asyncio.wait_for(training, PATIENCE_S)
            gate.set()
            assert ring.saving.begun == saved
            assert ring.trainer.published in ([0], [0, 1])


async def test_weights_that_nobody_has_any_more_end_the_attempt(tmp_path: Path) -> None:
    """The trainer has gone on, so that a generator that comes now cannot get the weights that are to finish_one."""
    async with small_ring(in_lockstep(1), tmp_path) as ring:
        first = await ring.add_generator()
        ring.is_generating = False
        training = ring.start_training()
        await until(lambda: ring.weight_sync.live_version == 0)
        for _ in range(3):
            finish_one(ring)
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
                finish_one(ring)
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


def test_groups_that_came_back_with_zero_variance_do_not_count(tmp_path: Path) -> None:
    """They are about to be dropped: which a crash may have prevented."""

    async def count() -> tuple[bool, bool]:
        async with small_ring(in_lockstep(1), tmp_path) as ring:
            lockstep = Lockstep(ring.buffer, ring.config.admission, RewardShaping())
            finish_one(ring)
            finish_one(ring, rewards=(0.0, 0.0))
            before = lockstep.is_settled(0)
            finish_one(ring)
            return before, lockstep.is_settled(0)

    assert asyncio.run(count()) == (False, True)


# -------------------------------------------------------------------------------------------------------- repeated step
#
# A step that is trained again is compared with what was recorded of it, as exactly as that can be repeated.


@pytest.mark.parametrize(
    ("grad_norm", "exact", "is_told"),
    [(0.8666, False, False), (0.8693, False, False), (0.88, False, True), (0.8666, True, False), (0.8667, True, True)],
)
def test_a_step_in_parts_may_have_another_rounding_when_it_is_repeated_as_a_whole(
    grad_norm: float, exact: bool, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    then = Trained(3, 3, True, {"loss": 0.01, "grad_norm": 0.8666}, "", (), None)
    now = StepReport(3, 4, True, {"loss": 0.01, "grad_norm": grad_norm})
    compare(RecordedStep(3, (1, 2), then), [1, 2], 3, now, exact=exact)
    assert ("went differently: grad_norm" in caplog.text) == is_told
