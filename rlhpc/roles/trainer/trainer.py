"""The trainer: one process per rank, executing the controller's commands in order.

    controller ──commands──▶ rank 0 ──▶ all ranks        over the trainer's own process group
               ──rows──────▶ every rank                  ahead, while the step before is trained

Every rank sees the same commands in the same order, as collectives require, and receives only the rows that it trains.
Rows wait in this process until their command comes: ZeroMQ's thread receives them.

Input: PackedBatch, joined from a TrainBatch and this rank's rows.  Output: StepReport; on command it also forms weight
groups, publishes weights and saves.  It decides nothing itself: the controller chooses the batch, and when to publish
and save.  A checkpoint is written in the background: only its completion is reported out of order.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.algorithms.guard import refusal
from rlhpc.algorithms.policy_loss import loss_of_run
from rlhpc.base.patience import Deadline, patiently
from rlhpc.protocol.contracts import BlockingClientChannel, TrainerBackend, WeightPublisher
from rlhpc.protocol.errors import ChannelError, ChannelTimeout, ProtocolError, RlhpcError, RoleFailed, WeightsError
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
    ScoreBatch,
    ScoreReport,
    SnapshotTaken,
    StepReport,
    StopRole,
    TrainBatch,
    TrainerReady,
)
from rlhpc.protocol.types import (
    Float32,
    Int32,
    PackedBatch,
    PackedMicrobatch,
    PackedMinibatch,
    StepLimits,
    WeightManifest,
)
from rlhpc.roles.lifecycle import RoleContext, hello, leave_at_once
from rlhpc.roles.trainer.models import BatchFigures, Critic, means_of, open_models, own_host
from rlhpc.training.checkpoint_directory import policy_version_of
from rlhpc.training.checkpoint_export import REFERENCE_DIRECTORY, save_reference
from rlhpc.training.logprob import of_row, plain_row, token_row
from rlhpc.training.ranks import open_gloo_group
from rlhpc.transport.codec import Codec, Frame
from rlhpc.transport.open import connect_blocking
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher
from rlhpc.weights.memory import device_id

# ---------------------------------------------------------------------------------------------------------- end request
#
# Signals that end a trainer, and signals that do not.
#
# It ignores Slurm's signals, which reach every process of a job step, because only the controller knows which step to
# finish and what to save.  A trainer whose parent has died exits.


FROM_SLURM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_STDERR = 2


class EndRequest:
    """Listens for signals; created in the main thread, where KeyboardInterrupt is raised."""

    def __init__(self) -> None:
        """Install the signal handlers."""
        self._is_requested = False
        self._was_told = False
        self._parent_pid = os.getppid()
        for number in FROM_SLURM:
            signal.signal(number, self._stay)
            signal.siginterrupt(number, False)  # a signal must not interrupt system calls of libraries
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C

    def is_made(self) -> bool:
        """Whether a signal has asked this process to leave."""
        return self._is_requested

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True
        raise KeyboardInterrupt  # an interrupted blocking call keeps its state

    def _stay(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent_pid:  # the kernel sent it because the parent is dead (lifecycle.py)
            self._leave(number, frame)
        if not self._was_told:
            self._was_told = True
            # Not through logging: the interrupted code may hold the lock of its stream.
            name = signal.Signals(number).name
            line = f"{time.strftime('%F %T')} trainer {name}: signal from Slurm: the controller decides when to stop\n"
            os.write(_STDERR, line.encode())


# ------------------------------------------------------------------------------------------------------------ heartbeat
#
# The trainer's heartbeat, from its own thread: the main thread is busy for whole steps.
#
# The same connection carries the messages of other threads of the trainer, since a socket belongs to one thread.  Over
# it the controller also stops a rank that is not ready for commands yet: one that loads its model, waits for other
# ranks or for the channel of commands has nothing to finish, and leaves at once.


log = logging.getLogger("rlhpc.trainer")
LOOK_S = 0.2  # between two checks for a message of the controller


class TrainerHeartbeat:
    """Sends Hello, then heartbeats until closed.

    Any thread may call `tell`, the main thread `now`; a separate thread sends.
    """

    def __init__(self, context: RoleContext, interval_s: float, leave: Callable[[int], object] = leave_at_once) -> None:
        """leave: exits with a status; called when the controller stops this process before its first command."""
        self._context, self._interval_s, self._leave = context, interval_s, leave
        self._current = Heartbeat("starting", "", -1)
        self._told: queue.SimpleQueue[SaveReport | None] = queue.SimpleQueue()  # None: stop
        self._failure: RlhpcError | OSError | None = None  # of the sending thread, raised by `now`
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        """Start beating."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the messages that are queued, and stop."""
        self._told.put(None)
        self._thread.join(timeout=5.0)

    def now(self, state: str, waits_for: str, policy_version: int) -> None:
        """Replace the content of the next heartbeats.  Raises RoleFailed if the sending thread has failed."""
        if self._failure is not None:
            raise RoleFailed(f"heartbeats have ended: {self._failure}") from self._failure
        self._current = Heartbeat(state, waits_for, policy_version)

    def tell(self, message: SaveReport) -> None:
        """Send a message to the controller at once, between heartbeats."""
        self._told.put(message)

    def _beat(self) -> None:
        try:
            control = connect_blocking(
                CONTROL,
                **self._context.caller,
                timeout_s=self._context.meet_timeout_s,
            )
        except (RlhpcError, OSError) as error:  # e.g. keys or an address that could not be read for too long
            self._failure = error
            return
        try:
            control.send(hello(self._context))
            control.send(self._current)
            while self._speak_until_next_beat(control):
                control.send(self._current)
            control.close()
        except ChannelError:
            return  # the controller is gone; the main thread finds out at its next message
        except (RlhpcError, OSError) as error:
            self._failure = error

    def _speak_until_next_beat(self, control: BlockingClientChannel) -> bool:
        """Send queued messages until the next heartbeat is due.  False when asked to stop."""
        next_beat = Deadline(self._interval_s)
        while not next_beat.is_over:
            self._obey(control)
            try:
                message = self._told.get(timeout=min(LOOK_S, next_beat.left_s))
            except queue.Empty:
                continue
            if message is None:
                return False
            control.send(message)
        return True

    def _obey(self, control: BlockingClientChannel) -> None:
        """Leave if the controller tells so; here it tells only ranks that are not ready for commands yet."""
        with suppress(ChannelTimeout):
            message = control.receive(0.0)
            if isinstance(message, StopRole):
                log.info("asked to stop: %s", message.reason)
                self._leave(0)


# ------------------------------------------------------------------------------------------------------- command stream


ROWS_S = 60.0  # for rows, which are sent before their command
# KeyboardInterrupt of a signal handler is lost if Python runs a destructor: seconds between checks for the request.
_LOOK_S = 0.5
_PATIENCE = timedelta(days=30)  # ranks wait for commands as long as the controller takes
_FIRST_BYTES = 1 << 16  # of a command, in the first broadcast: almost all commands fit
_LENGTH = struct.Struct("<Q")


class CommandStream:
    """Yields each command on every rank."""

    def __init__(self, channel: BlockingClientChannel, rank: int, num_ranks: int) -> None:
        """channel: this rank's.  Collective over all ranks."""
        self._channel, self._rank, self._num_ranks = channel, rank, num_ranks
        self._codec = Codec(*BATCHES.from_server)
        self._group = open_gloo_group(_PATIENCE) if num_ranks > 1 else None
        self._rows: BatchRows | None = None  # the newest
        self._sequence = 0

    def replicas(self, mine: int) -> tuple[int, ...]:
        """Data-parallel replica of each rank, by rank; mine: this rank's.  Collective over all ranks."""
        if self._group is None:
            return (mine,)
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self._num_ranks)]
        dist.all_gather(found, torch.tensor([mine]), group=self._group)
        return tuple(int(replica) for replica in found)

    def next(self, interrupted: Callable[[], bool]) -> Any:
        """Return the next command: for TrainBatch with this replica's rows, for ScoreBatch the rows themselves.

        interrupted: returns whether this process has been asked to leave.
        Raises KeyboardInterrupt if so; ProtocolError; RoleFailed when rank 0 is gone, or rows are lost.
        """
        command = self._next_command(interrupted) if self._rank == 0 else None
        if self._group is not None:
            try:
                command = self._share(command)
            except RuntimeError as error:
                if interrupted():
                    raise KeyboardInterrupt from None
                raise RoleFailed(f"the trainer's ranks lost each other while waiting for a command: {error}") from error
        match command:
            case TrainBatch(number, batch):
                return replace(batch, minibatches=self._rows_of(number, f", of step {batch.step},").minibatches)
            case ScoreBatch(number):
                return self._rows_of(number)
        return command

    def _next_command(self, interrupted: Callable[[], bool]) -> Any:
        while not interrupted():
            with suppress(ChannelTimeout):
                message = self._channel.receive(_LOOK_S)
                if not isinstance(message, BatchRows):
                    return message
                self._rows = message
        raise KeyboardInterrupt

    def _rows_of(self, number: int, step: str = "") -> BatchRows:
        """Return the rows with this number, sent before their command.  step: their step, for messages."""
        while self._rows is None or self._rows.number < number:
            try:
                message = self._channel.receive(ROWS_S)
            except ChannelTimeout as error:
                raise RoleFailed(
                    f"rank {self._rank} has not received rows {number}{step} within {ROWS_S:g} s; "
                    f"{self._channel.statistics.messages_lost} messages of its channel were lost"
                ) from error
            if not isinstance(message, BatchRows):
                raise ProtocolError("controller", type(message).__name__, f"rows {number} are due")
            self._rows = message
        rows, self._rows = self._rows, None
        if rows.number != number:
            raise RoleFailed(f"rank {self._rank} has rows {rows.number}, and is told of rows {number}")
        return rows

    def _share(self, command: object) -> Any:
        """Send rank 0's command to all ranks: one broadcast, two for a long one."""
        self._sequence += 1
        whole = _joined(self._codec.encode(command, self._sequence)) if self._rank == 0 else b""
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        _fill(first, whole[:_FIRST_BYTES])
        dist.broadcast(first, src=0, group=self._group)
        num_left = max(0, _LENGTH.unpack_from(first.numpy().data)[0] - _FIRST_BYTES)
        rest = torch.zeros(num_left, dtype=torch.uint8)
        if num_left:
            _fill(rest, whole[_FIRST_BYTES:])
            dist.broadcast(rest, src=0, group=self._group)
        if self._rank == 0:
            return command
        _, received = self._codec.decode(_parted(first.numpy().tobytes() + rest.numpy().tobytes()), "trainer-0")
        return received


def _joined(frames: Sequence[Frame]) -> bytes:
    """Join frames: total length with this head, their number, the length of each, then their bytes."""
    lengths = [len(frame) for frame in frames]
    head = b"".join([_LENGTH.pack(length) for length in (len(lengths), *lengths)])
    return b"".join([_LENGTH.pack(_LENGTH.size + len(head) + sum(lengths)), head, *frames])


def _parted(whole: bytes) -> list[Frame]:
    """Split the result of _joined into frames again; trailing zeros are ignored."""
    count = _LENGTH.unpack_from(whole, _LENGTH.size)[0]
    start, parts = (2 + count) * _LENGTH.size, list[Frame]()
    for place in range(count):
        end = start + _LENGTH.unpack_from(whole, (2 + place) * _LENGTH.size)[0]
        parts.append(memoryview(whole)[start:end])
        start = end
    return parts


def _fill(tensor: torch.Tensor, data: bytes) -> None:
    tensor.numpy()[: len(data)] = np.frombuffer(data, np.uint8)


# --------------------------------------------------------------------------------------------------------------- saving
#
# Several parts of a checkpoint that are written at the same time, as one future.


class Together(Future[dict[str, int]]):
    """Future that is done when all its parts are: with the first exception in their order, or the files of all.

    Cancelling it cancels the parts; it counts as cancelled if one of them was.
    """

    def __init__(self, parts: Sequence[Future[dict[str, int]]]) -> None:
        super().__init__()
        self._parts, self._num_left, self._lock = parts, len(parts), Lock()
        for part in parts:
            part.add_done_callback(self._one_is_done)

    def cancel(self) -> bool:
        """Cancel all parts that have not been written."""
        cancelled = [part.cancel() for part in self._parts]
        return any(cancelled)

    def _one_is_done(self, _: Future[dict[str, int]]) -> None:
        with self._lock:
            self._num_left -= 1
            if self._num_left:
                return
        if any(part.cancelled() for part in self._parts):
            super().cancel()
            return
        failure = next((error for part in self._parts if (error := part.exception()) is not None), None)
        if failure is not None:
            self.set_exception(failure)
        else:
            self.set_result({name: size for part in self._parts for name, size in part.result().items()})


# ----------------------------------------------------------------------------------------------------------------- role

TRAINER_DIRECTORY = "trainer"  # the trainer's part of a checkpoint directory


def run(context: RoleContext) -> None:
    """Execute commands until asked to stop."""
    end = EndRequest()
    with ExitStack() as stack:
        interval_s = context.config.transport.heartbeat_s
        heartbeat = stack.enter_context(TrainerHeartbeat(context, interval_s))  # before the model: loading may hang too
        backend, critic = open_models(context, stack)
        channel = connect_blocking(BATCHES, **context.caller, timeout_s=context.meet_timeout_s)
        stack.callback(channel.close)
        commands = CommandStream(channel, context.replica, context.num_ranks)
        trainer = Trainer(context, backend, channel if backend.is_rank_zero else None, heartbeat, critic)
        try:
            trainer.begin(commands.replicas(backend.dp_rank))
            while trainer.obey(commands.next(end.is_made)):
                pass
        finally:
            trainer.close(in_haste=end.is_made())


class Trainer:
    """The work of one rank.  The channel and the publisher exist on rank 0 only."""

    def __init__(
        self,
        context: RoleContext,
        backend: TrainerBackend,
        channel: BlockingClientChannel | None,
        heartbeat: TrainerHeartbeat,
        critic: Critic | None = None,
    ) -> None:
        self._critic = critic
        decay = context.config.trainer.ema_decay
        self._ema_decay = None if decay == "off" else decay
        self._context, self._config = context, context.config
        self._backend, self._channel, self._heartbeat = backend, channel, heartbeat
        loss_of_run(self._config, 0)  # so that a user's own loss fails now, not at the first batch
        self._version = 0  # number of batches that have changed the policy
        self._publisher: WeightPublisher | None = None
        self._transport = ""  # of the publisher
        self._manifest: WeightManifest | None = None  # of broadcasts; each fills in its version and epoch
        self._saving: Future[dict[str, int]] | None = None  # the last checkpoint
        self._waiting_since = time.monotonic()
        self._times: list[tuple[float, float]] = []  # seconds waited and trained, of each part of the step so far

    def begin(self, replicas: tuple[int, ...] = (0,)) -> None:
        """Load the checkpoint to resume from, if any, and send the controller the manifest.  replicas: by rank."""
        if self._config.has_reference:
            # Before the checkpoint is loaded: after a resume, too, the reference is the model of the run file.
            self._backend.hold_reference(self._config.trainer.reference_memory)
        if self._ema_decay is not None:
            self._backend.hold_average(self._config.trainer.ema_memory)
        step = self._context.resume_step
        if step is not None:
            checkpoint = self._context.layout.checkpoint(step)
            self._backend.load(checkpoint / TRAINER_DIRECTORY)
            if self._critic is not None:
                self._critic.load(checkpoint)
            self._version = patiently(lambda: policy_version_of(checkpoint), checkpoint)
        if self._channel is None:
            return
        specs, bucket_bytes = self._backend.tensor_specs(), self._config.weights.bucket_bytes
        self._manifest = make_manifest(self._version, 0, specs, bucket_bytes, self._backend.adapter_form)
        self._channel.send(TrainerReady(self._version, self._manifest, device_id(self._backend.device), replicas))
        self._heartbeat.now("running", "batch", self._version)

    def obey(self, command: object) -> bool:
        """Execute one command.  Returns False for StopRole."""
        match command:
            case PackedBatch(is_part=True):
                self._train_part(command)
            case PackedBatch():
                self._train(command)
            case BatchRows():
                self._score_rows(command)
            case FormGroup():
                self._form(command)
            case PublishWeights():
                self._publish(command)
            case SaveCheckpoint():
                self._save(command)
            case StopRole():
                log.info("asked to stop")
                return False
            case _:
                raise ProtocolError("controller", type(command).__name__, "not a command")
        self._waiting_since = time.monotonic()
        return True

    def close(self, *, in_haste: bool) -> None:
        """Leave the weight group; in haste, abandon the checkpoint in progress, which will not be completed."""
        if in_haste and self._saving is not None:
            self._saving.cancel()
        if self._publisher is not None:
            self._publisher.dissolve()

    # ------------------------------------------------------------------------------------------------------- training

    def _train_part(self, batch: PackedBatch) -> None:
        """Forward and backward for a part of a step; gradients accumulate until its last part."""
        began = self._begin(batch)
        (minibatch,), (reference,) = batch.minibatches, self._of_reference(batch)
        self._backend.accumulate(
            minibatch.ranks[self._backend.dp_rank],
            loss_of_run(self._config, batch.policy_version),
            proximal=self._proximal(minibatch),
            reference=reference,
            has_entropy_gradient=self._config.algorithm.entropy_coefficient > 0,
            num_loss_tokens=minibatch.num_loss_tokens,
            is_first=not batch.num_parts_before,
        )
        self._heartbeat.now("running", "batch", self._version)
        self._times.append((began - self._waiting_since, time.monotonic() - began))
        if self._channel is not None:
            self._channel.send(PartReport(batch.step, batch.num_parts_before))

    def _begin(self, batch: PackedBatch) -> float:
        """Begin a part; return the present time.  Raises ProtocolError if it is not the step's next part."""
        began = time.monotonic()
        self._heartbeat.now("training", "", self._version)
        if batch.is_part and not batch.num_parts_before:
            self._times = []  # of a step that was given up, whose gradients go now, too
        if len(self._times) != batch.num_parts_before:
            told = f"part {batch.num_parts_before} of step {batch.step} after {len(self._times)} parts"
            raise ProtocolError("controller", "TrainBatch", told)
        if batch.renews_reference:
            self._backend.hold_reference(self._config.trainer.reference_memory)
        return began

    def _train(self, batch: PackedBatch) -> None:
        """Take one optimiser step for each minibatch, in order; the version rises if any was applied."""
        began = self._begin(batch)
        waited_s = began - self._waiting_since
        judged, references = None, self._of_reference(batch)
        if self._critic is not None:
            judged = self._critic.judge(batch, references)
            batch = judged.batch
        loss = loss_of_run(self._config, batch.policy_version)
        anchors = [self._proximal(minibatch) for minibatch in batch.minibatches]
        done = BatchFigures()
        for place, index in enumerate(batch.order):
            minibatch = batch.minibatches[index]
            refused = partial(_refusal, batch.limits, place, minibatch.num_loss_tokens)
            result = self._backend.step(
                minibatch.ranks[self._backend.dp_rank],
                loss,
                proximal=anchors[index],
                reference=references[index],
                has_entropy_gradient=self._config.algorithm.entropy_coefficient > 0,
                num_loss_tokens=minibatch.num_loss_tokens,
                learning_rate=batch.learning_rate,
                weight_decay=self._config.trainer.weight_decay,
                max_grad_norm=self._config.trainer.max_grad_norm,
                may_apply=None if batch.limits.allow_all else lambda *step, refused=refused: not refused(*step),
            )
            done.add(
                result, minibatch.num_loss_tokens, "" if result.applied else refused(result.metrics, result.grad_norm)
            )
        of_critic = self._critic.learn(judged) if self._critic is not None and judged is not None else {}
        self._version += done.is_applied
        if done.is_applied and self._ema_decay is not None:
            self._backend.move_average(self._ema_decay)
        self._heartbeat.now("running", "batch", self._version)
        if self._channel is not None:
            figures = done.means() | of_critic
            figures |= {"learning_rate": batch.learning_rate}
            figures["wait_for_batch_s"] = waited_s + sum(waited for waited, _ in self._times)
            figures["step_s"] = time.monotonic() - began + sum(trained for _, trained in self._times)
            report = StepReport(batch.step, self._version, done.is_applied, figures, done.refused, done.skipped)
            self._channel.send(report)
        self._times = []

    def _proximal(self, minibatch: PackedMinibatch) -> list[Tensor] | None:
        """Log-probabilities at the start of the batch if algorithm.proximal = "recompute"; else None."""
        if self._config.algorithm.proximal != "recompute":
            return None
        return self._backend.logprobs(minibatch.ranks[self._backend.dp_rank])

    def _of_reference(self, batch: PackedBatch) -> list[list[Tensor]] | list[None]:
        """Log-probabilities of every minibatch by the reference, swapped in once; None each without a reference.

        Those of a teacher have come with the rows.
        """
        if self._config.algorithm.has_teacher_reference:
            return [
                [_of_teacher(row) for row in minibatch.ranks[self._backend.dp_rank]] for minibatch in batch.minibatches
            ]
        if not self._config.has_reference:
            return [None] * len(batch.minibatches)
        mine = [minibatch.ranks[self._backend.dp_rank] for minibatch in batch.minibatches]
        logprobs = iter(self._backend.logprobs([row for rows in mine for row in rows], of_reference=True))
        return [list(islice(logprobs, len(rows))) for rows in mine]

    def _score_rows(self, rows: BatchRows) -> None:
        """Run forward passes alone; report the loss and its metrics, summed in float64.  Collective over all ranks."""
        self._heartbeat.now("scoring", "", self._version)
        mine = [row for minibatch in rows.minibatches for row in minibatch.ranks[self._backend.dp_rank]]
        loss, sums = loss_of_run(self._config, self._version), Counter[str]()
        references = self._backend.logprobs(mine, of_reference=True) if self._config.has_reference else None
        for place, logprobs in enumerate(self._backend.logprobs(mine)):
            current, reference = logprobs.cpu().double(), of_row(references, place)
            value, metrics = loss(
                current, token_row(mine[place], torch.zeros_like(current), proximal=None, reference=reference)
            )
            counted = {"loss": value, "num_loss_tokens": mine[place].loss_mask.sum(), **metrics}
            sums.update({name: float(each) for name, each in counted.items()})
        total = self._backend.sum_over_replicas(sums)
        if self._channel is not None:
            num_loss_tokens, loss_sum = int(total.pop("num_loss_tokens")), total.pop("loss")
            self._channel.send(ScoreReport(rows.number, num_loss_tokens, loss_sum, total))
        self._heartbeat.now("running", "batch", self._version)

    # -------------------------------------------------------------------------------------------------------- weights

    def _form(self, command: FormGroup) -> None:
        if self._channel is None:
            return
        publisher = self._publisher_by(command.group.transport)
        try:
            group = publisher.open(command.group)
            self._channel.send(GroupOpened(group))
            publisher.form()
        except WeightsError as error:
            log.warning("epoch %d not formed: %s", command.group.epoch, error)
            publisher.dissolve()

    def _publisher_by(self, transport: str) -> WeightPublisher:
        """The publisher of earlier epochs, or a new one if the controller has chosen another transport."""
        if self._publisher is None or transport != self._transport:
            if self._publisher is not None:
                self._publisher.dissolve()
            self._publisher = make_publisher(
                self._config.weights.model_copy(update={"transport": transport}),
                directory=self._context.layout.weights,
                device=self._backend.device,
                host=own_host(self._config),
            )
            self._transport = transport
        return self._publisher

    def _publish(self, command: PublishWeights) -> None:
        """Broadcast the weights, and score the canary while generators load them."""
        began = time.monotonic()
        self._heartbeat.now("publishing", "generators", self._version)
        error = self._broadcast(command)
        canary = None if command.canary is None else self._score(command.canary)
        if self._channel is not None:
            seconds = time.monotonic() - began
            share = self._publisher.sent_share if self._publisher is not None else 1.0
            self._channel.send(PublishReport(command.epoch, command.policy_version, seconds, error, canary, share))
            self._heartbeat.now("running", "batch", self._version)

    def _broadcast(self, command: PublishWeights) -> str:
        """Broadcast the weights; on failure dissolve the epoch and return the reason, else return ""."""
        weights = self._backend.weights()
        if self._publisher is None or self._manifest is None:
            for _ in weights:
                pass  # all other ranks take part in the export, and every rank does if there is no receiver
            return f"epoch {command.epoch} is not formed"
        manifest = replace(self._manifest, policy_version=command.policy_version, epoch=command.epoch)
        try:
            self._publisher.publish(manifest, weights)
        except WeightsError as failure:
            log.warning("version %d not published: %s", command.policy_version, failure)
            self._publisher.dissolve()
            return str(failure)
        return ""

    def _score(self, token_ids: Int32) -> Float32:
        """Log-probabilities of a row, at temperature 1, by the published weights.  Collective over all ranks."""
        (logprobs,) = self._backend.logprobs([plain_row(token_ids)], temperature=1.0)
        return logprobs.float().cpu().numpy()

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _save(self, command: SaveCheckpoint) -> None:
        """Copy the state and go on; the writing thread reports completion."""
        began = time.monotonic()
        self._heartbeat.now("saving", "", self._version)
        directory = Path(command.directory)
        self._saving = self._backend.save(directory / TRAINER_DIRECTORY)
        if self._critic is not None:
            self._saving = Together([self._saving, self._critic.save(directory)])
        if self._config.algorithm.reference_every:
            written = save_reference(self._backend, self._config.model.path, directory / REFERENCE_DIRECTORY)
            self._saving = Together([self._saving, written])
        self._saving.add_done_callback(partial(self._saved, command.step, began))
        if self._channel is not None:
            self._channel.send(SnapshotTaken(command.step, time.monotonic() - began))
        self._heartbeat.now("running", "batch", self._version)

    def _saved(self, step: int, began: float, saving: Future[dict[str, int]]) -> None:
        if saving.cancelled():
            log.warning("the checkpoint of step %d is abandoned", step)
            return
        failure = saving.exception()
        if failure is not None:
            log.error("the checkpoint of step %d could not be written: %s", step, failure)
        if self._channel is not None:
            self._heartbeat.tell(SaveReport(step, time.monotonic() - began, "" if failure is None else str(failure)))


def _of_teacher(row: PackedMicrobatch) -> Tensor:
    """Log-probabilities float32 [T] by the teacher, on the CPU; 0 off the loss mask, and in rows without samples."""
    given = row.teacher_logprobs
    return torch.zeros(len(row.token_ids)) if given is None else torch.from_numpy(given.copy())


def _refusal(
    limits: StepLimits, place: int, num_loss_tokens: int, metrics: Mapping[str, float], grad_norm: float
) -> str:
    """Reason why an optimiser step must not be applied; "" if it may be."""
    return refusal(limits, means_of(metrics, grad_norm, num_loss_tokens), place)
