"""The controller's train loop among fakes: a trainer and generators that do what a test wants, over channels in memory.

Rollouts are made on the spot for every admitted group; no process, no model, no time passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.algorithms.guard import StepGuard, refusal
from rlhpc.algorithms.packing import FlopCost
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.lost_leases import LostLeases
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import CheckpointError
from rlhpc.protocol.messages import (
    BATCHES,
    CONTROL,
    BatchRows,
    CanaryTaken,
    FormGroup,
    GroupOpened,
    JoinGroup,
    PartReport,
    PublishReport,
    PublishWeights,
    Quarantine,
    ReceiveWeights,
    Reregister,
    StepReport,
    TakeCanary,
    TrainBatch,
    WeightsLive,
)
from rlhpc.protocol.types import (
    Float32,
    HeldChecksum,
    Int32,
    PackedBatch,
    SamplingParams,
    ScoredRollout,
    TensorSpec,
    WeightManifest,
)
from rlhpc.roles.controller.batch_maker import RANK_0, StepRecord, TrainerLink
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.guarding import GuardFile, Guarding
from rlhpc.roles.controller.train_loop import TrainLoop
from rlhpc.roles.controller.weight_sync import Canary, WeightSync, WeightSyncLimits, transport_choice
from rlhpc.weights.choice import Membership
from tests import build
from tests.build import prompt
from tests.engines.memory_channel import MemoryServer

MANIFEST = WeightManifest(0, 0, (TensorSpec("w", "float32", (1,)),), (1,))
CANARY = np.arange(9, dtype=np.int32)
LIMITS = WeightSyncLimits(first_member_s=5.0, ack_timeout_s=5.0)


def small_config(num_steps: int = 4, **admission: Any) -> Config:
    """Two groups of two a step."""
    return build.config(
        run={"num_steps": num_steps},
        admission={"max_staleness": 2, "window_groups": 1, **admission},
        trainer={"backend": "reference"},
        transport={"kind": "tcp"},
    )


def scored(group_id: int, sample_index: int, reward: float | None = None, **changes: Any) -> ScoredRollout:
    """A member of three tokens; without `reward` the group has spread."""
    return build.scored(build.rollout(group_id, sample_index), reward, **changes)


def make_ledger(
    config: Config, clock: Callable[[], float] = lambda: 0.0, lost_leases: LostLeases | None = None
) -> AdmissionLedger:
    """With the settings that the controller would give it."""
    admission = config.admission
    return AdmissionLedger(
        num_slots=admission.num_slots,
        window_groups=config.window_groups,
        groups_per_step=admission.groups_per_step,
        group_size=admission.group_size,
        sampling=lambda _: SamplingParams(max_tokens=8),
        lease_deadline_s=admission.lease_deadline_s,
        max_attempts=admission.max_attempts,
        clock=clock,
        lost_leases=lost_leases,
    )


def make_buffer(config: Config, directory: Path, ledger: AdmissionLedger | None = None) -> RolloutBuffer:
    """Keeps all segments in memory until sealed into `directory`."""
    segments = SegmentWriter(
        directory, 0, run_name="small", run_attempt=0, max_groups=1000, max_s=1e9,
        clock=lambda: 0.0,
    )  # fmt: skip
    return RolloutBuffer(ledger or make_ledger(config), segments)


def logprobs_of(row: Int32, version: int) -> Float32:
    """What the policy of this version gives to a row."""
    return (-(row % 7) - 0.01 * version).astype(np.float32)


class FakeTrainer:
    """Applies every batch and publishes at once, unless told otherwise."""

    def __init__(self) -> None:
        self.version = 0
        self.batches: list[PackedBatch] = []
        self.parts: list[PackedBatch] = []
        self.formed: list[tuple[str, ...]] = []  # members of each epoch
        self.transports: list[str] = []  # of each epoch
        self.published: list[int] = []
        self.scored: list[bool] = []  # whether the canary was, in each publication
        self.is_finite = True
        self.refuses: tuple[int, ...] = ()  # optimiser steps of a batch that are out of bounds; the others are not
        self.metrics: Callable[[int], dict[str, float]] = lambda step: {"loss": 0.5}  # of a step
        self.failing_broadcasts = 0

    async def obey(self, client: Any) -> None:
        while True:
            match await client.receive():
                case BatchRows() as rows:
                    self._rows = rows
                case TrainBatch(number, batch):
                    assert number == self._rows.number
                    await client.send(self._answer(replace(batch, minibatches=self._rows.minibatches)))
                case command:
                    await client.send(self._answer(command))

    def _answer(self, command: object) -> object:
        match command:
            case PackedBatch(is_part=True):
                self.parts.append(command)
                return PartReport(command.step, command.num_parts_before)
            case PackedBatch():
                self.batches.append(command)
                metrics = self.metrics(command.step)
                refused = refusal(command.limits, metrics) if self.is_finite else ""
                applied = self.is_finite and (not refused or bool(self.refuses))
                self.version += applied
                return StepReport(command.step, self.version, applied, metrics, refused, self.refuses)
            case FormGroup():
                self.formed.append(command.group.members)
                self.transports.append(command.group.transport)
                return GroupOpened(replace(command.group, address="memory"))
            case PublishWeights():
                self.published.append(command.policy_version)
                self.failing_broadcasts -= 1
                error = "" if self.failing_broadcasts < 0 else "a member is gone"
                logprobs = None if command.canary is None else logprobs_of(command.canary, command.policy_version)
                self.scored.append(logprobs is not None)
                return PublishReport(command.epoch, command.policy_version, 0.001, error, logprobs)
        raise AssertionError(f"the trainer is told {command}")


class FakeCheckpoints:
    """Notes what is saved; on a slow disk the writing ends when a test sets `written`, else at once."""

    write_s = longest_s = 0.0

    def __init__(self, weight_sync: WeightSync) -> None:
        self._weight_sync = weight_sync
        self.begun: list[tuple[int, int]] = []  # (step, version)
        self.live_versions: list[int] = []  # at each of them
        self.written = asyncio.Event()
        self.written.set()
        self.is_disk_slow = False
        self.failure: CheckpointError | None = None
        self.is_patience_over = False
        self.is_pausing = False  # after a failure

    @property
    def has_failed(self) -> bool:
        return self.failure is not None

    @property
    def is_overdue(self) -> bool:
        return self.has_failed and not self.is_pausing

    async def write(self, step: int, policy_version: int) -> None:
        await self.written.wait()
        self.failure = None
        self.begun.append((step, policy_version))
        self.live_versions.append(self._weight_sync.live_version)
        if self.is_disk_slow:
            self.written.clear()

    def raise_failure(self) -> None:
        if self.failure is not None and self.is_patience_over:
            raise self.failure

    async def has_succeeded(self) -> bool:
        await self.written.wait()
        return not self.has_failed

    write_surely = CheckpointWriter.write_surely

    async def finish(self) -> None:
        await self.written.wait()
        if self.failure is not None:
            raise self.failure


class FakeGenerator:
    """Acknowledges every version at once, unless it is told to hold or refuse it."""

    def __init__(self, name: str, control: MemoryServer) -> None:
        self.name, self.client = name, control.connect(name)
        self.received: list[tuple[int, int]] = []  # (epoch, version)
        self.epochs: list[int] = []
        self.refuses: set[int] = set()
        self.canaries: list[int] = []  # versions of the canaries that it took
        self.quarantines: list[Quarantine] = []
        self.damage: Callable[[int], float] = lambda version: 0.0  # nats by which its canary of a version is wrong
        self.held: Callable[[int], HeldChecksum | None] = lambda version: None  # under a version
        self.may_score = asyncio.Event()
        self.may_score.set()
        self.version = -1
        self._scoring: asyncio.Future[None] | None = None
        self._gates: dict[int, asyncio.Event] = {}
        self._arrivals: dict[int, asyncio.Event] = {}

    def hold(self, version: int) -> asyncio.Event:
        """Do not acknowledge this version before the event that is returned is set."""
        return self._gates.setdefault(version, asyncio.Event())

    async def until_received(self, version: int) -> None:
        """Wait until it was told to receive this version."""
        await self._arrivals.setdefault(version, asyncio.Event()).wait()

    async def obey(self) -> None:
        while True:
            match await self.client.receive():
                case JoinGroup(group, _):
                    self.epochs.append(group.epoch)
                case ReceiveWeights(manifest):
                    await self._receive(manifest)
                case TakeCanary(number, token_ids):
                    self._scoring = asyncio.ensure_future(self._score(number, token_ids))  # beside all else
                case Quarantine() as quarantine:
                    self.quarantines.append(quarantine)
                case Reregister():
                    pass

    async def _score(self, number: int, token_ids: Int32) -> None:
        await self.may_score.wait()
        self.canaries.append(self.version)
        logprobs = logprobs_of(token_ids, self.version) + np.float32(self.damage(self.version))
        await self.client.send(CanaryTaken(number, self.version, logprobs))

    async def _receive(self, manifest: WeightManifest) -> None:
        version = manifest.policy_version
        self.received.append((manifest.epoch, version))
        self._arrivals.setdefault(version, asyncio.Event()).set()
        if version in self._gates:
            await self._gates[version].wait()
        error = "torn" if version in self.refuses else ""
        self.refuses.discard(version)
        self.version = self.version if error else version
        await self.client.send(WeightsLive(manifest.epoch, version, 0.0, 0.0, error, self.held(version)))


class SmallRing:
    """All parts, wired as the controller wires them; use small_ring()."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        limits: WeightSyncLimits,
        guard_file: GuardFile | None = None,
        canary_every: int | None = None,
    ) -> None:
        self.config = config
        self.control, batches = MemoryServer(CONTROL), MemoryServer(BATCHES)
        self.trainer, self.membership = FakeTrainer(), Membership()
        link = TrainerLink(batches)
        row = None if canary_every is None else CANARY
        self.weight_sync = WeightSync(
            self.control, link, self.membership, choose=transport_choice(config), limits=limits,
            canary=Canary(row, every=canary_every or 0, tolerance=0.1),
        )  # fmt: skip
        self.weight_sync.describe(MANIFEST, "")
        self.ledger = make_ledger(config)
        self.buffer = make_buffer(config, directory, self.ledger)
        self.is_generating = True
        self.records: list[StepRecord] = []
        self.on_record: Callable[[StepRecord], None] = self.records.append
        self.record: Callable[[StepRecord], Awaitable[None]] = self._call_on_record
        self.saving = FakeCheckpoints(self.weight_sync)
        self.stop = asyncio.Event()
        self.guard = StepGuard(config.guard)
        self.guarding = Guarding(self.guard, self.ledger, config.admission, file=guard_file)
        self.loop = TrainLoop(
            config, self.buffer, link, self.weight_sync, FlopCost(1.0, 0.0),
            step=0, version=0, wake=self.generate, guarding=self.guarding,
        )  # fmt: skip
        self._trainer_client = batches.connect(RANK_0)
        self._tasks: list[asyncio.Task[None]] = []

    def generate(self) -> None:
        """Fill every slot and finish every group, as generators do that sample in no time."""
        while self.is_generating and self.ledger.has_slot and self.weight_sync.ready_members:
            group_id = self.ledger.admit(prompt(self.ledger.counts()["admitted"]), self.weight_sync.live_version)
            for index in range(self.config.admission.group_size):
                self.ledger.grant("somebody", 1)
                self.buffer.deliver("somebody", scored(group_id, index))
        self.loop.groups_changed()

    async def add_generator(
        self, name: str = "generator-0", incarnation: str = "first", devices: tuple[str, ...] = ("",)
    ) -> FakeGenerator:
        """Start one and greet it as the controller does."""
        generator = FakeGenerator(name, self.control)
        self._start(generator.obey())
        await self.weight_sync.joined(name, devices, incarnation)
        self.loop.groups_changed()
        return generator

    async def lose(self, generator: FakeGenerator) -> None:
        """It died, and the registry has noticed."""
        await generator.client.close()
        await self.weight_sync.lost(generator.name)
        self.loop.groups_changed()

    def start_training(self) -> asyncio.Task[None]:
        """Begin and run in a task of its own."""
        return self._start(self._train())

    async def _train(self) -> None:
        await self.loop.begin()
        self.generate()
        await self.loop.run(self.stop, self.record, self.saving)

    async def _call_on_record(self, record: StepRecord) -> None:
        self.on_record(record)

    async def _hear(self) -> None:
        while True:
            name, message = await self.control.receive()
            if isinstance(message, CanaryTaken):
                await self.weight_sync.scored(name, message)
                self.loop.groups_changed()
                self.generate()
            else:
                await self.weight_sync.acknowledge(name, message)

    def open(self) -> None:
        self._start(self.trainer.obey(self._trainer_client))
        self._start(self._hear())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Any) -> asyncio.Task[None]:
        self._tasks.append(asyncio.ensure_future(work))
        return self._tasks[-1]


@asynccontextmanager
async def small_ring(
    config: Config,
    directory: Path,
    limits: WeightSyncLimits = LIMITS,
    guard_file: GuardFile | None = None,
    canary_every: int | None = None,
) -> AsyncIterator[SmallRing]:
    """The parts without a generator yet; everything is ended on the way out.  canary_every: None for no canary."""
    ring = SmallRing(config, directory, limits, guard_file, canary_every)
    ring.open()
    try:
        yield ring
    finally:
        await ring.close()
