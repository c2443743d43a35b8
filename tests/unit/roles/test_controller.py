"""What the controller does about processes, its trainer and figures out of bounds; what is in memory at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.controller import context_of, settings
from rlhpc.algorithms.guard import AS_BEFORE, Action
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.history import RecordedStep, Replay, Trained
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.config.file import config_hash, write_resolved
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import AlgorithmConfig, GuardConfig
from rlhpc.protocol.errors import ChannelTimeout, GuardStop, TrainingError
from rlhpc.protocol.messages import BATCHES, CONTROL, LEASES, Heartbeat, Hello, Reregister, TrainerReady
from rlhpc.protocol.types import RolloutGroup
from rlhpc.roles.controller.batch_maker import RANK_0, TrainerLink
from rlhpc.roles.controller.controller import RunProcesses, assemble
from rlhpc.roles.controller.guarding import MAX_REFUSED_STEPS, GuardEntry, GuardFile, read_guard_file
from rlhpc.roles.controller.leases import ProcessRegistry
from rlhpc.roles.controller.persistence import DiskLane
from rlhpc.roles.controller.recorder import training_figures
from rlhpc.roles.controller.state import ControllerState, Totals
from rlhpc.roles.controller.weight_sync import FIRST_MEMBER_S, WeightSyncLimits
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.weights.choice import Membership
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.roles.small_ring import MANIFEST, SmallRing, prompt, scored, small_config, small_ring

# -------------------------------------------------------------------------------------------------------- run processes
#
# What the loss of a process costs, and that it is counted.


def hello(incarnation: str, role: str = "generator") -> Hello:
    settings, devices = config_hash(small_config()), ("",) if role == "generator" else ()
    return Hello(role, 0, incarnation, settings, 100, "here", num_weight_ranks=len(devices), weight_devices=devices)


@dataclass
class Stand:
    """A small ring, its registry, and what the controller does about processes."""

    ring: SmallRing
    clock: ManualClock
    registry: ProcessRegistry
    state: Any
    processes: RunProcesses

    @property
    def buffer(self) -> Any:
        return self.ring.buffer

    async def fall_silent(self) -> bool:
        self.clock.advance(16.0)
        return await self.processes.lose_silent()


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    config, clock = small_config(), ManualClock()
    async with small_ring(config, tmp_path) as ring:
        context = RoleContext("controller", 0, 1, 0, None, "first", RunLayout(tmp_path), config, config_hash(config))
        registry = ProcessRegistry(config_hash(config), 15.0, clock)
        buffer: Any = ring.buffer
        state: Any = ControllerState(Any, None, buffer.segments, buffer.journal, buffer, Membership(), Totals(), 0, 0)
        processes = RunProcesses(context, ring.control, registry, ring.weight_sync, state, DiskLane("notes"))
        yield Stand(ring, clock, registry, state, processes)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_what_a_generator_had_not_reported_when_it_was_lost_is_counted(stand: Stand, is_silent: bool) -> None:
    await stand.processes.greet("generator-0", hello("0.0.0-first"))
    for unreported in (900.0, 70.0):
        await stand.processes.beat("generator-0", Heartbeat("running", "", 3, 8, {"tokens_unreported": unreported}))
    if is_silent:
        await stand.fall_silent()
    else:
        await stand.processes.greet("generator-0", hello("0.0.1-second"))
    assert stand.state.totals.tokens_lost == 70


async def test_a_generator_that_connects_again_has_lost_nothing(stand: Stand) -> None:
    """One of its channels had failed; its process goes on with what it samples."""
    stand.buffer.admit(prompt(0), 0)
    await stand.processes.greet("generator-0", hello("0.0.0-first"))
    lease = stand.buffer.ledger.grant("generator-0", 2)
    await stand.processes.beat("generator-0", Heartbeat("running", "", 3, 8, {"tokens_unreported": 70.0}))
    assert await stand.processes.greet("generator-0", hello("0.0.0-second"))
    totals = stand.state.totals
    assert (totals.tokens_lost, totals.leases_regranted, stand.buffer.ledger.outstanding("generator-0")) == (0, 0, 0)
    record = stand.buffer.ledger.open_record(lease.group_id)
    assert record.attempts == 1
    assert all(member.is_free for member in record.members)


@pytest.mark.parametrize("role", ["generator", "reward"])
async def test_who_was_taken_for_dead_and_is_heard_again_is_asked_to_register(stand: Stand, role: str) -> None:
    """Else `rlhpc status` never shows it again, and nobody tells it that the run is over."""
    name = f"{role}-0"
    client = stand.ring.control.connect(name)
    await stand.processes.greet(name, hello("0.0.0-first", role))
    await stand.fall_silent()
    assert stand.registry.names() == []
    await stand.processes.beat(name, Heartbeat("running", "", -1))
    assert await client.receive(1.0) == Reregister()
    await stand.processes.greet(name, hello("0.0.0-first", role))
    await stand.processes.beat(name, Heartbeat("running", "", -1))
    assert stand.registry.names() == [name]


@pytest.mark.parametrize("state_of_it", ["running", "draining"])
async def test_a_lease_on_its_way_to_one_that_leaves_is_nobodys_fault(stand: Stand, state_of_it: str) -> None:
    """It is granted again; only of one that died the prompt may be the cause."""
    stand.buffer.admit(prompt(0), 0)
    await stand.processes.greet("generator-0", hello("0.0.0-first"))
    lease = stand.buffer.ledger.grant("generator-0", 2)
    await stand.processes.beat("generator-0", Heartbeat(state_of_it, "", 3, 0, {}))
    assert await stand.fall_silent()
    record = stand.buffer.ledger.open_record(lease.group_id)
    assert all(member.is_free for member in record.members)
    assert stand.state.totals.leases_regranted == 1
    assert {member.lost_leases for member in record.members} == {int(state_of_it == "running")}


# --------------------------------------------------------------------------------------------------------- trainer link
#
# How long the controller waits for its trainer, and what it says when it does not come.


READY = TrainerReady(0, MANIFEST, "")


async def test_ranks_that_do_not_come_are_named() -> None:
    link = TrainerLink(MemoryServer(BATCHES))
    with pytest.raises(ChannelTimeout, match=r"trainer-0, trainer-3 have not connected after 0\.02 s"):
        await link.ready(0.02, lambda: ["trainer-0", "trainer-3"])


async def test_a_trainer_that_is_there_may_load_for_as_long_as_it_takes() -> None:
    batches = MemoryServer(BATCHES)
    waiting = asyncio.create_task(TrainerLink(batches).ready(0.01, list))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await batches.connect(RANK_0).send(READY)
    assert await asyncio.wait_for(waiting, PATIENCE_S) == READY


def test_generators_may_turn_up_as_late_as_anybody_and_load_for_minutes() -> None:
    assert WeightSyncLimits.of(120.0, 5.0) == WeightSyncLimits(FIRST_MEMBER_S, 5.0)
    assert WeightSyncLimits.of(1800.0, 5.0).first_member_s == 1800.0


# ---------------------------------------------------------------------------------------------------- controller closes
#
# What a controller has in memory when it ends reaches the disk.


async def refuse() -> None:
    raise OSError("the disk of metrics hangs")


async def test_metrics_that_cannot_be_written_keep_no_rollouts_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layout = settings(tmp_path, num_tokens=8, num_generators=1), RunLayout(tmp_path / "run")
    for path in (layout.root, layout.rollouts, layout.checkpoints):
        path.mkdir()
    write_resolved(config, layout, "")
    channels = [MemoryServer(spec) for spec in (CONTROL, LEASES, BATCHES)]
    controller = assemble(context_of("controller", 0, layout, config), *channels)
    member = scored(7, 0)
    group = RolloutGroup(7, prompt(7), 0, (member,))
    controller.state.segments.add(ResolvedGroup(group, consumed_step=0, trained_version=0, applied=True))
    monkeypatch.setattr(controller.recorder, "close", refuse)
    with pytest.raises(OSError, match="metrics hangs"):
        await controller.close()
    assert [resolved.group.group_id for resolved in read_rollouts_directory(layout.rollouts)] == [7]


# ---------------------------------------------------------------------------------------------------------------- guard
#
# What follows in a run when figures of its steps are out of bounds: admission, skipped steps, entries, the end.


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
