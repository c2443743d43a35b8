"""The trainer: one process per rank, executing the controller's commands in order.

Input: PackedBatch, which command_stream.py joins from a TrainBatch and this rank's rows.  Output: StepReport; on
command it also forms weight groups, publishes weights and saves.  It decides nothing itself: the controller chooses the
batch, and when to publish and save.  A checkpoint is written in the background: only its completion is reported out of
order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock

from torch import Tensor

from rlhpc.algorithms.guard import refusal
from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.base.patience import patiently
from rlhpc.protocol.contracts import BlockingClientChannel, TrainerBackend, WeightPublisher
from rlhpc.protocol.errors import ProtocolError, WeightsError
from rlhpc.protocol.messages import (
    BATCHES,
    FormGroup,
    GroupOpened,
    PartReport,
    PublishReport,
    PublishWeights,
    SaveCheckpoint,
    SaveReport,
    SnapshotTaken,
    StepReport,
    StopRole,
    TrainerReady,
)
from rlhpc.protocol.types import Float32, Int32, PackedBatch, PackedMinibatch, StepLimits, WeightManifest
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.trainer.commands import CommandStream, EndRequest, TrainerHeartbeat
from rlhpc.roles.trainer.models import BatchFigures, Critic, means_of, open_models, own_host
from rlhpc.training.checkpoint_directory import policy_version_of
from rlhpc.training.checkpoint_export import REFERENCE_DIRECTORY, save_reference
from rlhpc.training.logprob import plain_row
from rlhpc.transport.open import connect_blocking
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher
from rlhpc.weights.memory import device_id

# --------------------------------------------------------------------------------------------------------------- saving
#
# Several parts of a checkpoint that are written at the same time, as one.


class Together(Future[dict[str, int]]):
    """Done when all of these are: with the first one's exception in their order, or the files of all.

    Cancelling it cancels them; it counts as cancelled where one of them was.
    """

    def __init__(self, parts: Sequence[Future[dict[str, int]]]) -> None:
        super().__init__()
        self._parts, self._num_left, self._lock = parts, len(parts), Lock()
        for part in parts:
            part.add_done_callback(self._one_is_done)

    def cancel(self) -> bool:
        """Abandon all that have not been written."""
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


log = logging.getLogger("rlhpc.trainer")
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
        make_policy_loss(self._config.algorithm, 0)  # one of the user's own is tried now, not at the first batch
        self._version = 0  # batches that changed the policy
        self._publisher: WeightPublisher | None = None
        self._transport = ""  # of the publisher
        self._manifest: WeightManifest | None = None  # of the broadcast; version and epoch are filled in each time
        self._saving: Future[dict[str, int]] | None = None  # the last checkpoint
        self._waiting_since = time.monotonic()
        self._times: list[tuple[float, float]] = []  # seconds waited and trained, of each part of the step so far

    def begin(self, replicas: tuple[int, ...] = (0,)) -> None:
        """Load the checkpoint to resume from, if any, and tell the controller what is broadcast.  replicas: by rank."""
        if self._config.algorithm.kl_coefficient:
            # Before the checkpoint: after a resume, too, the reference is the model that was opened.
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
        self._manifest = make_manifest(self._version, 0, specs, bucket_bytes)
        self._channel.send(TrainerReady(self._version, self._manifest, device_id(self._backend.device), replicas))
        self._heartbeat.now("running", "batch", self._version)

    def obey(self, command: object) -> bool:
        """Execute one command.  Returns False for StopRole."""
        match command:
            case PackedBatch(is_part=True):
                self._train_part(command)
            case PackedBatch():
                self._train(command)
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
        """Leave the weight group; in haste, abandon the checkpoint in progress: nobody will complete it."""
        if in_haste and self._saving is not None:
            self._saving.cancel()
        if self._publisher is not None:
            self._publisher.dissolve()

    # ------------------------------------------------------------------------------------------------------- training

    def _train_part(self, batch: PackedBatch) -> None:
        """Forward and backward for a part of a step; the gradients belong to its last part."""
        began = self._begin(batch)
        (minibatch,), (reference,) = batch.minibatches, self._of_reference(batch)
        self._backend.accumulate(
            minibatch.ranks[self._backend.dp_rank],
            make_policy_loss(self._config.algorithm, batch.policy_version),
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
        """Returns the present time.  Raises ProtocolError if other parts of the step were trained before."""
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
        """One optimiser step for each minibatch in the order of the batch; the version rises if any was applied."""
        began = self._begin(batch)
        waited_s = began - self._waiting_since
        judged, references = None, self._of_reference(batch)
        if self._critic is not None:
            judged = self._critic.judge(batch, references)
            batch = judged.batch
        loss = make_policy_loss(self._config.algorithm, batch.policy_version)
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
        """Log-probabilities at the start of the batch, where algorithm.proximal asks for a forward pass of its own."""
        if self._config.algorithm.proximal != "recompute":
            return None
        return self._backend.logprobs(minibatch.ranks[self._backend.dp_rank])

    def _of_reference(self, batch: PackedBatch) -> list[list[Tensor]] | list[None]:
        """Log-probabilities of every minibatch by the reference, if there is one; it takes the policy's place once."""
        if not self._config.algorithm.kl_coefficient:
            return [None] * len(batch.minibatches)
        mine = [minibatch.ranks[self._backend.dp_rank] for minibatch in batch.minibatches]
        logprobs = iter(self._backend.logprobs([row for rows in mine for row in rows], of_reference=True))
        return [list(islice(logprobs, len(rows))) for rows in mine]

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
        """Broadcast, and score the canary while generators load."""
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
        """Returns why it failed: then the epoch is dissolved, and the controller forms another."""
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
        """Log-probabilities of a row by the weights that are being published, at temperature 1.  Every rank does it."""
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


def _refusal(
    limits: StepLimits, place: int, num_loss_tokens: int, metrics: Mapping[str, float], grad_norm: float
) -> str:
    """Why an optimiser step must not be applied; "": it may be."""
    return refusal(limits, means_of(metrics, grad_norm, num_loss_tokens), place)
