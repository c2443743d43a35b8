"""The trainer, a script, and broadcasts of weights from it to generators.

What it was given to train is its weights, so that a checkpoint of it says what its timeline consists of.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rlhpc.algorithms.guard import refusal
from rlhpc.algorithms.packing import joined
from rlhpc.protocol.contracts import ClientChannel
from rlhpc.protocol.errors import TornWeights
from rlhpc.protocol.messages import (
    BATCHES,
    CONTROL,
    BatchRows,
    FormGroup,
    GroupOpened,
    Heartbeat,
    PartReport,
    PublishReport,
    PublishWeights,
    SaveCheckpoint,
    SaveReport,
    SnapshotTaken,
    StepReport,
    StopRole,
    TrainBatch,
    TrainerReady,
)
from rlhpc.protocol.types import (
    PackedBatch,
    PackedMinibatch,
    Prompt,
    ScoredRollout,
    TensorSpec,
    WeightGroup,
    WeightManifest,
)
from rlhpc.roles.lifecycle import RoleContext, beat, hello, run_until
from tests.simulator.network import SimulatedClient

MANIFEST = WeightManifest(0, 0, (TensorSpec("w", "float32", (1,)),), (1,))
BROADCAST_S = 5.0  # how long the trainer waits for receivers, and they for it
LOOK_S = 1.0  # between looks for another controller


class Simulation(Protocol):
    """What the roles see of the world."""

    rng: random.Random
    broadcasts: Broadcasts
    controller_incarnation: str  # of the one that is being served; "": there is none

    def connect(self, channel: str, context: RoleContext) -> SimulatedClient | None:
        """To the present controller; None: it is not there."""

    def tell(self, *words: object) -> None:
        """A line of the trace."""

    def delivered(self, prompt: Prompt, scored: ScoredRollout) -> None:
        """A generator has made a rollout for this prompt and begins to deliver it."""

    def trained(self, batch: PackedBatch, weights: Weights) -> None:
        """The trainer is about to do a step."""


async def connected(world: Simulation, channel: str, context: RoleContext) -> SimulatedClient:
    """Look for the controller until it is there, and connect to it."""
    while (client := world.connect(channel, context)) is None:  # noqa: ASYNC110  as the product looks at files
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(world.rng.random() * 0.05)  # the handshake
    return client


# ---------------------------------------------------------------------------------------------------------- broadcasts


class Broadcasts:
    """Weights on their way from the trainer to the members of an epoch: all get them, or some, or none."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: dict[tuple[int, int], dict[str, asyncio.Future[None]]] = {}  # (epoch, version) → member
        self._joined: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.newest = -1  # version that has reached a generator

    def join(self, group: WeightGroup, member: str) -> None:
        self._joined[member] = group.epoch

    async def receive(self, member: str, manifest: WeightManifest) -> None:
        """Raises TornWeights."""
        if self._joined.get(member) != manifest.epoch:
            raise TornWeights(f"{member} has not joined epoch {manifest.epoch}")
        arrival = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((manifest.epoch, manifest.policy_version), {})[member] = arrival
        self._changed.set()
        try:
            async with asyncio.timeout(BROADCAST_S):
                await arrival
        except TimeoutError:
            raise TornWeights(f"nothing came within {BROADCAST_S:g} s") from None

    async def publish(self, group: WeightGroup, version: int) -> str:
        """Return what went wrong; "": nothing."""
        loop = asyncio.get_running_loop()
        waiting, until_s = self._waiting.setdefault((group.epoch, version), {}), loop.time() + BROADCAST_S
        while set(waiting) != set(group.members):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()
            except TimeoutError:
                missing = sorted(set(group.members) - set(waiting))
                self._end(waiting, {name for name in sorted(waiting) if self._rng.random() < 0.3}, version)
                return f"{', '.join(missing)} did not come"
        await asyncio.sleep(self._rng.random() * 0.3)
        self._end(waiting, set(group.members), version)
        return ""

    def _end(self, waiting: dict[str, asyncio.Future[None]], who: set[str], version: int) -> None:
        """Some may have got everything although others have not."""
        if who:
            self.newest = max(self.newest, version)
        for name, arrival in waiting.items():
            if not arrival.done():
                if name in who:
                    arrival.set_result(None)
                else:
                    arrival.set_exception(TornWeights("the broadcast broke"))


# ------------------------------------------------------------------------------------------------------------- trainer


@dataclass(frozen=True)
class Weights:
    """What has been trained, step by step: each step's prompts, with the number of samples of each."""

    step: int = 0
    version: int = 0
    lineage: tuple[dict[str, int], ...] = ()

    def after(self, batch: PackedBatch, applied: bool) -> Weights:
        return Weights(self.step + 1, self.version + applied, (*self.lineage, prompts_of(batch)))


def prompts_of(batch: PackedBatch) -> dict[str, int]:
    """How many samples of each prompt are in a batch; a prompt is named by its tokens."""
    found: dict[str, int] = {}
    for row in batch.rows:
        for start, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
            mask = row.loss_mask[start:end]
            if mask.any():
                name = " ".join(map(str, row.token_ids[start : start + int(mask.argmax())]))
                found[name] = found.get(name, 0) + 1
    return found


class ScriptedTrainer:
    """Serves one controller, until it is told to stop."""

    def __init__(self, world: Simulation, context: RoleContext, step_s: float) -> None:
        self._world, self._context, self._step_s = world, context, step_s
        self.weights = Weights()
        if context.resume_step is not None:
            path = context.layout.checkpoint(context.resume_step) / "trainer" / "weights.json"
            saved = json.loads(path.read_bytes())
            self.weights = Weights(saved["step"], saved["version"], tuple(saved["lineage"]))
        self._group: WeightGroup | None = None
        self._parts: list[PackedMinibatch] = []  # of a step that has begun

    async def run(self) -> None:
        batches = await connected(self._world, BATCHES.name, self._context)
        control = await connected(self._world, CONTROL.name, self._context)
        over = asyncio.Event()
        await control.send(hello(self._context))
        await batches.send(TrainerReady(self.weights.version, MANIFEST, ""))

        def heartbeat() -> Heartbeat:
            return Heartbeat("running", "", self.weights.version)

        beats = beat(control, self._context.config.transport.heartbeat_s, heartbeat)
        await run_until(over, self._obey(batches, control, over), beats)

    async def _obey(self, batches: ClientChannel, control: ClientChannel, over: asyncio.Event) -> None:
        rng, rows = self._world.rng, dict[int, BatchRows]()
        while True:
            match await batches.receive():
                case BatchRows(number) as message:
                    rows = {number: message}
                case TrainBatch(number, batch):
                    await asyncio.sleep(rng.random() * self._step_s)
                    await batches.send(self._train(replace(batch, minibatches=rows[number].minibatches)))
                case FormGroup(group):
                    self._group = replace(group, address="memory")
                    await batches.send(GroupOpened(self._group))
                case PublishWeights(epoch, version):
                    assert self._group is not None
                    assert (epoch, version) == (self._group.epoch, self.weights.version)
                    error = await self._world.broadcasts.publish(self._group, version)
                    await batches.send(PublishReport(epoch, version, 0.1, error))
                case SaveCheckpoint(step, directory):
                    self._saving = asyncio.create_task(self._save(self.weights, step, Path(directory), control))
                    await batches.send(SnapshotTaken(step, 0.1))
                case StopRole():
                    over.set()
                    return

    def _train(self, batch: PackedBatch) -> StepReport | PartReport:
        assert batch.num_parts_before == len(self._parts) or not batch.num_parts_before
        self._parts = [*self._parts[: batch.num_parts_before], *batch.minibatches]
        if batch.is_part:
            return PartReport(batch.step, batch.num_parts_before)
        if batch.num_parts_before:
            batch = replace(batch, minibatches=(joined(self._parts),))
        self._parts = []
        self._world.trained(batch, self.weights)
        metrics = {"loss": batch.step / 10, "grad_norm": 1.0}
        refused = refusal(batch.limits, metrics)
        applied = batch.step % 5 != 3 and not refused  # by the step alone: a repeated step goes as it went
        self.weights = self.weights.after(batch, applied)
        return StepReport(batch.step, self.weights.version, applied, metrics, refused)

    async def _save(self, weights: Weights, step: int, directory: Path, control: ClientChannel) -> None:
        await asyncio.sleep(self._world.rng.random() * 2 * self._step_s)
        error = ""
        try:
            (directory / "trainer").mkdir()
            content = {"step": weights.step, "version": weights.version, "lineage": weights.lineage}
            (directory / "trainer" / "weights.json").write_text(json.dumps(content))
        except OSError as refused:
            error = str(refused)
        await asyncio.sleep(self._world.rng.random() * 2 * self._step_s)
        await control.send(SaveReport(step, 0.1, error))
