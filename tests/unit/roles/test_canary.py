"""Generators whose weights are wrong, however they came to be, are found, kept from leases, healed and counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from launch.demo.task import write_dataset
from rlhpc.config.rules import Config
from rlhpc.data.curriculum import open_curriculum
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.messages import CanaryTaken, WeightsLive
from rlhpc.protocol.types import HeldChecksum
from rlhpc.roles.controller.weight_sync import MAX_FAILURES, MAX_TOKENS, Canary, canary_row, differing, open_canary
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.roles.small_ring import FakeGenerator, SmallRing, logprobs_of, small_config, small_ring

TRAINED = 50  # far beyond the run


async def until(is_so, *, during: asyncio.Task[None]) -> None:
    """Let the ring turn until the condition holds, as long as the run goes on."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            if during.done():
                await during
            await asyncio.sleep(0)


async def whole_run(ring: SmallRing) -> None:
    await asyncio.wait_for(ring.start_training(), PATIENCE_S)


# ------------------------------------------------------------------------------------------------------- when it is due


async def test_all_take_it_at_the_start_and_every_so_many_versions(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=12), tmp_path, canary_every=5) as ring:
        generator = await ring.add_generator()
        await whole_run(ring)
        assert generator.canaries == [0, 5, 10]
        assert [version for version, scored in enumerate(ring.trainer.scored) if scored] == [0, 5, 10]


async def test_with_every_zero_it_is_taken_by_those_that_come(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=8), tmp_path, canary_every=0) as ring:
        early = await ring.add_generator("generator-0")
        gate = early.hold(2)
        training = ring.start_training()
        await early.until_received(2)
        late = await ring.add_generator("generator-1")
        gate.set()
        await asyncio.wait_for(training, PATIENCE_S)
        assert (early.canaries, late.canaries) == ([0], [3])


async def test_a_generator_that_comes_is_given_no_lease_before_it_has_passed(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=30), tmp_path, canary_every=0) as ring:
        await ring.add_generator("generator-0")
        late = await ring.add_generator("generator-1")
        late.may_score.clear()
        training = ring.start_training()
        await until(lambda: ring.weight_sync.live_version >= 3, during=training)
        assert ring.weight_sync.ready_members == {"generator-0"}  # and nobody waits for the other one
        late.may_score.set()
        await until(lambda: "generator-1" in ring.weight_sync.ready_members, during=training)


async def test_an_answer_under_other_weights_says_nothing_and_another_is_due(tmp_path: Path) -> None:
    canary = Canary(np.arange(4, dtype=np.int32), every=0, tolerance=0.1)
    canary.joined("generator-0", "first")
    for version in (0, 1):
        row = canary.begins(version, ["generator-0"])
        assert row is not None
        asked = canary.acknowledged("generator-0", version)
        assert asked is not None
        assert canary.acknowledged("generator-0", version) is None  # once
        assert canary.by_trainer(logprobs_of(row, version)) == []
        scored_by = version - 1 if version == 0 else version
        verdicts = canary.answered("generator-0", CanaryTaken(asked.number, scored_by, logprobs_of(row, version)))
        assert [verdict.has_passed for verdict in verdicts] == ([] if version == 0 else [True])
        assert canary.trusts("generator-0") == (version == 1)
    late = CanaryTaken(asked.number - 1, 0, np.full(4, np.nan, np.float32))
    assert canary.answered("generator-0", late) == []


def test_a_member_that_was_lost_while_its_epoch_was_formed_is_not_waited_for() -> None:
    canary = Canary(np.arange(4, dtype=np.int32), every=1, tolerance=0.1)
    for name in ("generator-0", "generator-1"):
        canary.joined(name, "first")
    canary.lost("generator-1")
    canary.begins(0, ["generator-0", "generator-1"])
    assert [canary.is_waiting_for(name) for name in ("generator-0", "generator-1")] == [True, False]
    assert canary.acknowledged("generator-1", 0) is None


# ---------------------------------------------------------------------------------------------------- what follows


async def test_one_of_two_that_deviates_is_quarantined_healed_by_the_next_version_and_counted(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=12), tmp_path, canary_every=3) as ring:
        await ring.add_generator("generator-0")
        damaged = await ring.add_generator("generator-1")
        damaged.damage = lambda version: 0.5 * (version == 3)
        ready: dict[int, frozenset[str]] = {}
        ring.on_record = lambda record: ready.update({record.report.policy_version: ring.weight_sync.ready_members})
        await whole_run(ring)
        assert damaged.canaries == [0, 3, 4, 6, 9, 12]
        (quarantine,) = damaged.quarantines
        assert (quarantine.newest_good, quarantine.must_restart) == (0, False)
        assert "version 3 differs from the trainer's by 0.5 nats" in quarantine.reason
        assert ring.weight_sync.take_failed_canaries() == 1
        assert ring.weight_sync.take_failed_canaries() == 0
        assert ring.weight_sync.ready_members == {"generator-0", "generator-1"}


async def test_a_generator_in_quarantine_is_given_no_lease(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=100), tmp_path, canary_every=2) as ring:
        await ring.add_generator("generator-0")
        damaged = await ring.add_generator("generator-1")
        damaged.damage = lambda version: float(version >= 2)
        training = ring.start_training()
        await until(lambda: damaged.quarantines, during=training)
        for _ in range(200):
            await asyncio.sleep(0)
            assert ring.weight_sync.ready_members == {"generator-0"}


@pytest.mark.parametrize("nats", [0.11, -0.11, np.nan, np.inf])
async def test_what_is_not_within_the_tolerance_has_failed(nats: float, tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path, canary_every=1) as ring:
        await ring.add_generator("generator-0")
        damaged = await ring.add_generator("generator-1")
        damaged.damage = lambda version: nats if version == 1 else 0.0
        await whole_run(ring)
        assert len(damaged.quarantines) == 1


async def test_the_only_generator_is_sent_the_same_version_again(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=4, max_staleness=0), tmp_path, canary_every=2) as ring:
        generator = await ring.add_generator()
        outcomes = iter([0.0, 5.0, 5.0])
        generator.damage = lambda version: next(outcomes, 0.0)
        await whole_run(ring)
        assert len(generator.quarantines) == 2
        assert [version for _, version in generator.received] == [0, 1, 2, 2, 2, 3, 4]


async def test_after_three_failures_in_a_row_it_is_to_be_started_again_and_the_new_one_may_pass(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=100_000), tmp_path, canary_every=1) as ring:
        await ring.add_generator("generator-0")
        broken = await ring.add_generator("generator-1")
        broken.damage = lambda version: 1.0
        training = ring.start_training()
        await until(lambda: len(broken.quarantines) == MAX_FAILURES, during=training)
        assert [each.must_restart for each in broken.quarantines] == [False, False, True]
        await ring.lose(broken)
        await ring.add_generator("generator-1", incarnation="second")
        await until(lambda: "generator-1" in ring.weight_sync.ready_members, during=training)


async def test_generators_that_agree_with_each_other_and_not_with_the_trainer_end_the_run(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path, canary_every=0) as ring:
        for name in ("generator-0", "generator-1"):
            generator = await ring.add_generator(name)
            generator.damage = lambda version: 0.7
        with pytest.raises(RoleFailed, match=r"generator-0, generator-1 agree with each other.*by 0.7 nats"):
            await whole_run(ring)
        assert ring.trainer.published == [0]


async def test_one_that_fails_alone_ends_the_run_when_a_start_has_not_helped(tmp_path: Path) -> None:
    async with small_ring(small_config(), tmp_path, canary_every=0) as ring:
        first = await ring.add_generator()
        first.damage = lambda version: 1.0
        training = ring.start_training()
        await until(lambda: any(each.must_restart for each in first.quarantines), during=training)
        await ring.lose(first)
        second = await ring.add_generator(incarnation="second")
        second.damage = lambda version: 1.0
        with pytest.raises(RoleFailed, match="whatever is sent to them"):
            await asyncio.wait_for(training, PATIENCE_S)
        assert len(second.quarantines) == 1


# ---------------------------------------------------------------------------------------------------- held checksums


def held(value: int, layout: str = "cuda, 1 workers") -> HeldChecksum:
    return HeldChecksum(value, layout)


@pytest.mark.parametrize(
    ("checksums", "expected"),
    [
        ([held(5), held(5), held(5)], []),
        ([held(5), held(6), held(5)], ["generator-1"]),
        ([held(5), held(6)], ["generator-0", "generator-1"]),
        ([held(5), held(6), held(7)], ["generator-0", "generator-1", "generator-2"]),
        ([held(5), held(5), held(6), held(6), held(7)], [f"generator-{index}" for index in range(5)]),
        ([held(5), None], []),
        ([held(5), held(6, "cuda, 2 workers")], []),
        ([held(5), held(6, "other"), held(5), held(7, "other")], ["generator-1", "generator-3"]),
    ],
)
def test_who_holds_something_else_than_most_is_told_from_the_rest(
    checksums: list[HeldChecksum | None], expected: list[str]
) -> None:
    acks = {
        f"generator-{index}": WeightsLive(3, 7, 0.0, 0.0, held=checksum) for index, checksum in enumerate(checksums)
    }
    assert differing(acks, 3, 7) == expected
    assert differing(acks, 2, 7) == []  # those of another publication are not compared
    assert differing(acks, 3, 6) == []


def holding(generator: FakeGenerator, other_at: int) -> None:
    """Hold what all hold, but for one version."""
    generator.held = lambda version: held(1000 + version + (version == other_at))


async def test_one_that_holds_other_bits_than_two_others_takes_the_canary_at_once(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=8), tmp_path, canary_every=0) as ring:
        generators = [await ring.add_generator(f"generator-{index}") for index in range(3)]
        for generator, other_at in zip(generators, (TRAINED, 4, TRAINED), strict=True):
            holding(generator, other_at)
        generators[1].damage = lambda version: 1.0 * (version == 4)
        await whole_run(ring)
        assert [generator.canaries for generator in generators][1] == [0, 4, 5]
        assert len(generators[1].quarantines) == 1
        assert not generators[0].quarantines
        assert ring.weight_sync.num_checksums_differed >= 1


async def test_of_two_that_hold_different_bits_both_take_the_canary_and_who_passes_goes_on(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=8), tmp_path, canary_every=0) as ring:
        generators = [await ring.add_generator(f"generator-{index}") for index in range(2)]
        holding(generators[0], TRAINED)
        holding(generators[1], 4)
        await whole_run(ring)
        assert [generator.canaries for generator in generators] == [[0, 4], [0, 4]]
        assert not any(generator.quarantines for generator in generators)
        assert ring.weight_sync.num_checksums_differed == 2


async def test_no_version_heals_one_that_holds_other_bits_before_its_verdict(tmp_path: Path) -> None:
    async with small_ring(small_config(num_steps=8), tmp_path, canary_every=0) as ring:
        slow, fast = [await ring.add_generator(f"generator-{index}") for index in range(2)]
        holding(slow, 4)
        slow.damage = lambda version: 1.0 * (version == 4)
        holding(fast, TRAINED)
        training = ring.start_training()
        await until(lambda: slow.version == 3, during=training)
        slow.may_score.clear()
        await until(lambda: fast.canaries == [0, 4], during=training)
        for _ in range(200):
            await asyncio.sleep(0)
        assert ring.weight_sync.ready_members == {"generator-1"}
        slow.may_score.set()
        await asyncio.wait_for(training, PATIENCE_S)
        assert slow.canaries == [0, 4, 5]
        assert [quarantine.newest_good for quarantine in slow.quarantines] == [0]


# -------------------------------------------------------------------------------------------------- the row of a run


def test_the_row_is_the_beginning_of_the_runs_prompts_and_leaves_them_undrawn(tmp_path: Path) -> None:
    data = {"path": tmp_path / "train.jsonl", "task": "integer_arithmetic"}
    model = {"path": make_tiny_checkpoint(tmp_path / "model")}
    write_dataset(tmp_path / "train.jsonl", 50, seed=0)
    generation = {"max_prompt_tokens": 12, "max_completion_tokens": 8}
    tables = small_config().model_dump() | {"data": data, "model": model, "generation": generation}
    prompts = open_curriculum(Config.model_validate(tables))
    row = canary_row(prompts, 20)
    assert row is not None
    drawn = np.concatenate([prompts.draw(0).token_ids for _ in range(20)])
    assert row.tolist() == drawn[:20].tolist()
    assert canary_row(prompts, 1) is None


def test_an_engine_without_a_model_takes_none(tmp_path: Path) -> None:
    scripted = small_config().model_copy(deep=True)
    generation = scripted.generation.model_copy(update={"engine": "scripted"})
    config = scripted.model_copy(update={"generation": generation})
    assert open_canary(config, None).begins(0, ["generator-0"]) is None  # type: ignore[arg-type]
    assert MAX_TOKENS <= 64


def test_a_run_can_do_without(tmp_path: Path) -> None:
    config = small_config()
    weights = config.weights.model_copy(update={"max_canary_logratio": "off"})
    config = config.model_copy(update={"weights": weights})
    assert config.generation.engine == "vllm"
    assert open_canary(config, None).trusts("generator-0")  # type: ignore[arg-type]
