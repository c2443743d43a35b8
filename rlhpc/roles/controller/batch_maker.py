"""Make the batch of a step, ask the trainer for the step, and record what came of it.

In this file: the record of a step; the link to the trainer; the batch maker; batches of supervised fine-tuning.

Rows go to the ranks that train them, as a rule while the step before is trained:

    groups finished ──▶ samples, rows, in a thread ──▶ BatchRows to every rank ──▶ … batch taken ──▶ TrainBatch

A step that begins with a part of its batch (train_loop.py) gets the rows of that, and later those of the other groups.
Input: RolloutGroup.  Output: MadeBatch.  A batch made ahead is a guess: the ledger decides which groups a step trains
when its batch is taken, and checks their staleness then.  If it decides otherwise, rows are made and sent again under a
new number, and the old ones are never trained.  Rows are a pure function of groups and step, so that a batch made
ahead, made late or made again after a restart is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import numpy as np

from rlhpc.algorithms.packing import FlopCost, batch_slowdown, joined, pack
from rlhpc.algorithms.samples import SampleMaker, optimiser_steps
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.data.demonstrations import Demonstration, Demonstrations
from rlhpc.protocol.contracts import ServerChannel
from rlhpc.protocol.errors import ChannelTimeout, ProtocolError
from rlhpc.protocol.messages import BatchRows, StepReport, TrainerReady
from rlhpc.protocol.types import PackedBatch, PackedMinibatch, RolloutGroup, TrainingSample
from rlhpc.roles.controller.guarding import NOTHING, GuardNote

# ---------------------------------------------------------------------------------------------------------- step record
#
# The record of one step, which the train loop fills and the metrics recorder writes.


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything the recorder needs about one step."""

    report: StepReport
    batch: PackedBatch
    groups: tuple[RolloutGroup, ...]
    trained_version: int  # the version before the step: staleness is counted against it
    lockstep_slowdown: float  # work of the slowest rank / mean of all
    pack_s: float
    wait_for_groups_s: float = 0.0
    until_live_s: float = 0.0  # for the version before this step
    checkpoint_s: float = 0.0  # in which the last checkpoint blocked training
    checkpoint_write_s: float = 0.0  # from the snapshot of the last complete checkpoint until it was complete
    longest_save_s: float = 0.0  # of all complete checkpoints, from the request on
    guard: GuardNote = NOTHING


# --------------------------------------------------------------------------------------------------------- trainer link
#
# The controller's requests to the trainer and its replies, one at a time.
#
# Only the train loop asks.  The trainer answers in order, so that an answer of another kind than expected is a bug.
# The one message out of order, the completion of a checkpoint, comes over the control channel.  The rows of a batch go
# straight to the ranks that train them, each its own, and may be sent while another request is answered.

Answer = TypeVar("Answer")
RANK_0 = "trainer-0"
SEND_S = 60.0  # for a rank to receive a message


class TrainerLink:
    """Sends requests to rank 0 and waits for its replies."""

    def __init__(self, batches: ServerChannel) -> None:
        self._batches = batches
        self._replicas: tuple[int, ...] = (0,)  # data-parallel replica of each rank
        self.obeys = False  # whether the ranks have loaded everything, and wait for commands

    async def ready(self, meet_timeout_s: float, missing: Callable[[], Collection[str]]) -> TrainerReady:
        """Wait, without a limit, until the trainer has loaded its model.

        Raises ChannelTimeout if some ranks are still `missing` after meet_timeout_s, and names them.
        """
        try:
            ready = await self.answer(TrainerReady, meet_timeout_s)
        except ChannelTimeout:
            if names := missing():
                raise ChannelTimeout(
                    f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} not connected after "
                    f"{meet_timeout_s:g} s; see logs/trainer-*/, or whether the job that starts it is still queued"
                ) from None
            ready = await self.answer(TrainerReady)
        self._replicas, self.obeys = ready.replicas, True
        return ready

    async def tell(self, command: object) -> None:
        """Queue a command that has no answer, or whose answer is awaited later."""
        await self._batches.send(RANK_0, command, timeout_s=SEND_S)

    async def send_rows(self, number: int, minibatches: Sequence[PackedMinibatch]) -> None:
        """Queue the rows of a batch for all ranks: for each the rows of its replica."""
        for rank, replica in enumerate(self._replicas):
            mine = tuple(_of_replica(minibatch, replica) for minibatch in minibatches)
            await self._batches.send(f"trainer-{rank}", BatchRows(number, mine), timeout_s=SEND_S)
            await asyncio.sleep(0)  # encoding takes milliseconds

    async def ask(self, command: object, kind: type[Answer]) -> Answer:
        """Queue a command and wait for its answer.  Raises ProtocolError for an answer of another kind."""
        await self.tell(command)
        return await self.answer(kind)

    async def answer(self, kind: type[Answer], timeout_s: float | None = None) -> Answer:
        """Wait for the next answer.  As a rule without a limit: the registry of processes notices a dead trainer.

        Raises ChannelTimeout if a limit is set and passes, ProtocolError for an answer of another kind.
        """
        peer, message = await self._batches.receive(timeout_s)
        if not isinstance(message, kind):
            raise ProtocolError(peer, type(message).__name__, f"expected {kind.__name__}")
        return message


def _of_replica(minibatch: PackedMinibatch, replica: int) -> PackedMinibatch:
    """The minibatch with the rows of this replica alone."""
    ranks = tuple(rows if place == replica else () for place, rows in enumerate(minibatch.ranks))
    return replace(minibatch, ranks=ranks)


# ---------------------------------------------------------------------------------------------------------- batch maker

LOOK_S = 0.05  # between checks for a whole batch: a check takes time proportional to the number of groups
SMALL_BATCH_TOKENS = 1 << 14  # packed on the event loop: handing it to a thread takes longer


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """A batch without its rates and limits, which earlier steps decide; its rows are sent, or on their way."""

    number: int  # of the rows
    minibatches: tuple[PackedMinibatch, ...]  # including the rows of earlier parts of the step
    order: tuple[int, ...]
    slowdown: float  # layout.batch_slowdown
    num_parts_before: int = 0

    def packed(self, step: int, version: int, algorithm: AlgorithmConfig, *, is_part: bool = False) -> PackedBatch:
        """Pack the batch as this step, without rates and limits; a reference is renewed by its first part."""
        return PackedBatch(
            step,
            version,
            self.minibatches,
            self.order,
            renews_reference=not self.num_parts_before and algorithm.renews_reference(version),
            num_parts_before=self.num_parts_before,
            is_part=is_part,
        )


class BatchMaker:
    """Makes the batches of one train loop."""

    def __init__(
        self, config: Config, buffer: RolloutBuffer, trainer: TrainerLink, cost: FlopCost, make_samples: SampleMaker
    ) -> None:
        self._config, self._buffer, self._trainer = config, buffer, trainer
        self._cost, self._make_samples = cost, make_samples
        self._changed = asyncio.Event()
        self._ahead: asyncio.Task[MadeBatch] | None = None
        self._guess: tuple[int, tuple[int, ...]] | None = None  # step and group ids of the batch made ahead
        self._begun: set[int] = set()  # ids of this step's groups whose rows are made
        self._parts: list[PackedMinibatch] = []  # the rows of those groups
        self._estimate = 1  # loss tokens of the whole step, estimated from its first part
        self._num_made = 0
        self.num_wasted = 0  # batches made ahead and not trained

    def look_again(self) -> None:
        """Call when a group is finished or dropped: the next batch may be whole, and can be made ahead."""
        self._changed.set()

    def begin(self, step: int) -> None:
        """Make the batch of this step as soon as its groups are finished."""
        self.give_up()
        self._ahead = asyncio.create_task(self._make_ahead(step))

    async def made(self, groups: Sequence[RolloutGroup], step: int) -> MadeBatch:
        """The batch of these groups, which were taken for the step; its rows are on their way.

        Raises ValueError for groups that must not be trained on, PackingError, ChannelError.
        """
        ahead, wanted = self._ahead, (step, tuple(group.group_id for group in groups))
        if ahead is not None and self._guess == wanted:
            self._ahead = self._guess = None
            made = await ahead
        else:
            self.give_up()
            made = await self._make(groups, step)
        self._parts, self._begun = [], set()
        return made

    async def part(self, groups: Sequence[RolloutGroup], step: int, num_groups: int) -> MadeBatch:
        """The next part of the batch of a step, which will have num_groups; its rows are on their way.

        Its loss tokens are an estimate for the whole batch.  Raises as `made`.
        """
        self.give_up()
        number, (part,), slowdown = await self._packed(groups, step)
        if not self._parts:
            self._estimate = max(1, part.num_loss_tokens * num_groups // len(groups))
        await self._trainer.send_rows(number, [replace(part, num_loss_tokens=self._estimate)])
        made = MadeBatch(number, (part,), (0,), slowdown, len(self._parts))
        self._parts.append(part)
        self._begun.update(group.group_id for group in groups)
        return made

    def give_up(self) -> None:
        """Cancel the batch that is being made ahead, and count it as wasted."""
        if self._ahead is not None:
            self.num_wasted += self._guess is not None
            self._ahead.cancel()
            self._ahead.add_done_callback(_ignore)
        self._ahead = self._guess = None

    # ------------------------------------------------------------------------------------------------------- internals

    async def _make_ahead(self, step: int) -> MadeBatch:
        while True:
            self._changed.clear()
            groups = self._buffer.upcoming(self._config.admission.groups_per_step)
            if groups is not None:
                self._guess = step, tuple(group.group_id for group in groups)
                return await self._make(groups, step)
            await self._changed.wait()
            await asyncio.sleep(LOOK_S)

    async def _make(self, groups: Sequence[RolloutGroup], step: int) -> MadeBatch:
        left = [group for group in groups if group.group_id not in self._begun]
        number, minibatches, slowdown = await self._packed(left, step)
        whole = minibatches
        if self._parts:
            (rest,) = minibatches
            slowdown = batch_slowdown([*self._parts, rest], self._cost)
            whole = (joined([*self._parts, rest]),)
            minibatches = (replace(whole[0], ranks=rest.ranks),)
        await self._trainer.send_rows(number, minibatches)
        algorithm = self._config.algorithm
        order = optimiser_steps(algorithm.minibatches, algorithm.epochs, (self._config.run.seed, step))
        return MadeBatch(number, whole, order, slowdown, len(self._parts))

    async def _packed(
        self, groups: Sequence[RolloutGroup], step: int
    ) -> tuple[int, tuple[PackedMinibatch, ...], float]:
        """Pack these groups; return the number of the rows, the minibatches and their slowdown."""
        self._num_made += 1
        number = self._num_made
        if sum(group.num_tokens for group in groups) < SMALL_BATCH_TOKENS:
            return number, *self._pack(groups, step)
        return number, *await asyncio.to_thread(self._pack, groups, step)

    def _pack(self, groups: Sequence[RolloutGroup], step: int) -> tuple[tuple[PackedMinibatch, ...], float]:
        """Pack these groups, on any thread; return minibatches and slowdown."""
        trainer = self._config.trainer
        minibatches = tuple(
            pack(part, token_budget=trainer.token_budget, num_ranks=trainer.data_parallel, cost=self._cost)
            for part in self._make_samples.minibatches(groups, step)
        )
        return minibatches, batch_slowdown(minibatches, self._cost)


def _ignore(task: asyncio.Task[MadeBatch]) -> None:
    """Retrieve the task's exception, which asyncio would otherwise report as never retrieved."""
    with suppress(asyncio.CancelledError):
        task.exception()


# ---------------------------------------------------------------------------------------------------------- supervised
#
# Batches of supervised fine-tuning: a pure function of settings, records and step.


class SupervisedBatches:
    """Packs the rows of each step and of the held-out loss."""

    def __init__(self, demonstrations: Demonstrations, config: Config, cost: FlopCost) -> None:
        """config: of the stage.  cost: the model's."""
        self._demonstrations, self._cost = demonstrations, cost
        self._size, self._trainer = config.sft.batch_size, config.trainer

    def rows(self, step: int) -> PackedMinibatch:
        """The batch of a step, from 0."""
        first = step * self._size
        return self._packed([self._demonstrations.learnt(number) for number in range(first, first + self._size)])

    def held_out_rows(self) -> Iterator[PackedMinibatch]:
        """Yield the rows of all held-out conversations, in batches of a step's size, the same each time."""
        conversations = self._demonstrations.held_out()
        while some := list(islice(conversations, self._size)):
            yield self._packed(some)

    def _packed(self, conversations: Sequence[Demonstration]) -> PackedMinibatch:
        trainer = self._trainer
        return pack_demonstrations(
            conversations, token_budget=trainer.token_budget, num_ranks=trainer.data_parallel, cost=self._cost
        )


def pack_demonstrations(
    conversations: Sequence[Demonstration], *, token_budget: int, num_ranks: int, cost: FlopCost
) -> PackedMinibatch:
    """Pack conversations into rows, each learnt token with the same weight; or pairs, each pair.  Raises as pack."""
    together = len(conversations[0].sequences)
    counts = [sum(int(np.count_nonzero(one.loss_mask)) for one in each.sequences) for each in conversations]
    mean = sum(counts) / len(counts)
    samples = [
        _sample(index, place, one, 1.0 if together == 1 else mean / count)
        for index, (each, count) in enumerate(zip(conversations, counts, strict=True))
        for place, one in enumerate(each.sequences)
    ]
    return pack(samples, token_budget=token_budget, num_ranks=num_ranks, cost=cost, together=together)


def _sample(index: int, place: int, demonstration: Demonstration, weight: float) -> TrainingSample:
    """place: 0, or 1 of an answer to which another is preferred."""
    mask = demonstration.loss_mask
    return TrainingSample(
        group_id=index,
        sample_index=place,
        token_ids=demonstration.token_ids,
        loss_mask=mask,
        behaviour_logprobs=np.zeros(len(mask), np.float32),
        advantages=mask.astype(np.float32) * (-1 if place else 1),
        versions=np.where(mask, 0, -1).astype(np.int32),
        loss_weight=weight,
    )
