"""The controller of supervised fine-tuning: demonstrations become batches, and the trainer takes steps.

    hear control ─▶ registry                           who is there
    train ─▶ rows of step n + 1, while n is trained    batches are a function of settings and step: no journal
          ─▶ held-out rows, forward alone              the lowest loss decides what is kept, and when it is enough
          ─▶ checkpoint ─▶ … ─▶ RUN_DIR/model

Nothing is sampled or judged, and no weights are published.  A restart continues from its checkpoint, with the same
batches, and repeats the steps after it.  A run is complete when its model is written as an HF checkpoint: the last
weights, or with sft.early_stop those with the lowest held-out loss.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhpc.algorithms.guard import StepGuard
from rlhpc.algorithms.packing import FlopCost, warm_up
from rlhpc.base.files import rename, sync_directory, write_atomically
from rlhpc.base.hf_config import language_model
from rlhpc.base.patience import patiently, patiently_awaited
from rlhpc.config.rules import Config
from rlhpc.data.demonstrations import open_demonstrations
from rlhpc.protocol.contracts import Clock, ServerChannel
from rlhpc.protocol.errors import ChannelError, CheckpointError, ConfigError, RoleFailed
from rlhpc.protocol.messages import (
    BATCHES,
    CONTROL,
    Heartbeat,
    Hello,
    SaveReport,
    ScoreBatch,
    ScoreReport,
    StepReport,
    StopRole,
    TrainBatch,
)
from rlhpc.protocol.types import PackedBatch, PackedMinibatch
from rlhpc.roles.controller.batch_maker import StepRecord, SupervisedBatches, TrainerLink
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.frame import (
    ANSWER_S,
    PAUSE_COUNTS_FOR,
    WATCH_INTERVAL_S,
    ControllerFrame,
    run_controller,
)
from rlhpc.roles.controller.guarding import GuardFile, Guarding
from rlhpc.roles.controller.leases import AwakeClock, ProcessRegistry
from rlhpc.roles.controller.persistence import DiskWriter
from rlhpc.roles.controller.recorder import StageRecorder
from rlhpc.roles.controller.run_status import HeldOutLoss, StatusBoard
from rlhpc.roles.controller.state import STATE_FILE, LearningRates, RunProgress, Totals
from rlhpc.roles.lifecycle import RoleContext, run_loop

log = logging.getLogger("rlhpc.controller")


def run(context: RoleContext) -> None:
    """Train to the last step, or until asked to stop; then stop the trainer."""
    run_loop(run_controller(context, (CONTROL, BATCHES), assemble))


# ---------------------------------------------------------------------------------------------------------------- state
#
# The controller's part of a checkpoint: where the run is, and its lowest held-out loss.


@dataclass(slots=True)
class StageState:
    """The controller's state: saved in checkpoints, restored by a restart."""

    step: int = 0  # the step to begin with
    policy_version: int = 0
    totals: Totals = field(default_factory=Totals)
    guard: StepGuard = field(default_factory=lambda: StepGuard(Config.model_fields["guard"].default))
    progress: RunProgress = field(default_factory=RunProgress)
    held_out: HeldOutLoss = field(default_factory=HeldOutLoss)
    loss: float | None = None  # of the last step, nats a token
    preferences: dict[str, float] = field(default_factory=dict)  # of the last step: accuracy and margin of pairs


def open_stage_state(context: RoleContext, clock: Clock) -> StageState:
    """The state of a run that begins, or that of its checkpoint.  Raises CheckpointError."""
    guard = StepGuard(context.config.guard)
    if context.resume_step is None:
        return StageState(guard=guard, progress=RunProgress(clock))
    path = context.layout.checkpoint(context.resume_step) / STATE_FILE
    try:
        saved = json.loads(path.read_bytes())
        guard.load_state(saved["guard"])
        progress, held_out = RunProgress.from_state(saved["progress"], clock), HeldOutLoss(**saved["held_out"])
        totals = Totals(**saved["totals"])
        step, version = int(saved["step"]), int(saved["policy_version"])
        return StageState(step, version, totals, guard, progress, held_out, saved["loss"], saved.get("preferences", {}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: {error!r}") from error


@dataclass(frozen=True, slots=True)
class FrozenStage:
    """The controller's part of one checkpoint (checkpoints.py)."""

    document: bytes

    def prepare(self) -> None:
        """Write nothing: a checkpoint relies on no other file."""

    def write(self, directory: Path) -> None:
        """Write the part.  Raises OSError."""
        write_atomically(directory / STATE_FILE, self.document)


class StagePart:
    """The controller's side of saving; the checkpoint with the lowest held-out loss is not deleted."""

    def __init__(self, state: StageState, attempt: int, *, keeps_best: bool) -> None:
        self._state, self.attempt, self._keeps_best = state, attempt, keeps_best

    @property
    def keeps_all(self) -> bool:
        """True while the guard may end the run: a checkpoint from before the alarm must be left then."""
        return self._state.guard.may_end_the_run

    @property
    def spared(self) -> Sequence[int]:
        """Steps whose checkpoints stay, however old they are."""
        return (self._state.held_out.best_step,) if self._keeps_best else ()

    def freeze(self, step: int, policy_version: int) -> FrozenStage:
        """Take a snapshot."""
        state = self._state
        document = {
            "step": step,
            "policy_version": policy_version,
            "totals": state.totals.to_json(),
            "guard": state.guard.state(),
            "progress": state.progress.state(),
            "held_out": asdict(state.held_out),
            "loss": state.loss,
            "preferences": state.preferences,
        }
        return FrozenStage(json.dumps(document).encode())

    def delete_needless(self, steps: Sequence[int]) -> None:
        """Delete nothing: checkpoints need no files besides their own."""

    def left_out(self) -> None:
        """Count a checkpoint that could not be written."""
        self._state.totals.checkpoints_failed += 1


# ----------------------------------------------------------------------------------------------------------- train loop


class SupervisedLoop:
    """Runs steps until the last one, until the held-out loss has not fallen for long, or until `stop`."""

    def __init__(
        self,
        config: Config,
        batches: SupervisedBatches,
        trainer: TrainerLink,
        state: StageState,
        guarding: Guarding,
        *,
        has_held_out: bool,
    ) -> None:
        self._config, self._batches, self._trainer, self._state = config, batches, trainer, state
        self._guarding, self._has_held_out = guarding, has_held_out
        self._rates = LearningRates(config, state.progress)
        self._num_made = 0
        self._ahead: asyncio.Task[tuple[int, PackedMinibatch]] | None = None  # the next step's
        self._saved = state.step  # of the last checkpoint
        self._checkpoint_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train."""
        return self._state.step >= self._config.run.num_steps or self._state.held_out.is_enough(
            self._config.sft.early_stop
        )

    async def run(
        self,
        stop: asyncio.Event,
        record: Callable[[StepRecord], Awaitable[None]],
        evaluated: Callable[[], Awaitable[None]],
        checkpoints: CheckpointWriter,
    ) -> None:
        """Train; save on schedule and at the end.  Returns when the last checkpoint is complete.

        evaluated: called where the held-out loss of the step before the first one had to be computed again.
        Raises CheckpointError if that fails, or none succeeds for long; TrainingError, GuardStop.
        """
        self._rates.start()
        try:
            known = self._state.held_out.step
            await self._hold_out(stop)  # a stop may have interrupted it
            if self._state.held_out.step != known:
                await evaluated()
            while not (self.is_over or stop.is_set()):
                await self._one_step(stop, record, checkpoints)
            self._give_up()
            if self._state.step > self._saved or checkpoints.has_failed:
                await checkpoints.write_surely(self._state.step, self._state.policy_version)
            await checkpoints.finish()
        finally:
            self._give_up()

    async def _one_step(
        self, stop: asyncio.Event, record: Callable[[StepRecord], Awaitable[None]], checkpoints: CheckpointWriter
    ) -> None:
        done, state = await self._train(), self._state
        has_best = await self._hold_out(stop)
        write_s, longest_s = checkpoints.write_s, checkpoints.longest_s
        await record(
            replace(done, checkpoint_s=self._checkpoint_s, checkpoint_write_s=write_s, longest_save_s=longest_s)
        )
        self._guarding.enforce()
        checkpoints.raise_failure()
        every = self._config.checkpoint.every_steps
        is_due = checkpoints.is_overdue if checkpoints.has_failed else state.step % every == 0
        is_kept = has_best and self._config.sft.early_stop != "off"
        if is_kept or (is_due and not self.is_over):
            clock = asyncio.get_running_loop().time
            began = clock()
            await checkpoints.write(state.step, state.policy_version)
            self._checkpoint_s, self._saved = clock() - began, state.step

    async def _train(self) -> StepRecord:
        clock, state = asyncio.get_running_loop().time, self._state
        began, step = clock(), state.step
        number, minibatch = await (self._ahead or self._made(step))
        self._ahead = None
        batch = PackedBatch(step, state.policy_version, (minibatch,))
        batch = self._guarding.limit(self._rates.give(batch, None), None)
        packed_s = clock() - began
        await self._trainer.tell(TrainBatch(number, replace(batch, minibatches=())))
        if step + 1 < self._config.run.num_steps and not self._is_evaluated(step + 1):
            self._ahead = asyncio.create_task(self._made(step + 1))  # rows to be scored would take its place
        report = await self._trainer.answer(StepReport)
        trained, state.policy_version = state.policy_version, report.policy_version
        note = await self._guarding.judge(report, (), trained, None)
        self._rates.trained(batch)
        state.step, state.loss = step + 1, report.metrics.get("loss")
        state.preferences = {name: value for name, value in report.metrics.items() if name.startswith("preference_")}
        return StepRecord(report, batch, (), trained, 1.0, packed_s, guard=note)

    async def _made(self, step: int) -> tuple[int, PackedMinibatch]:
        return await self._sent(await asyncio.to_thread(self._batches.rows, step))

    async def _sent(self, minibatch: PackedMinibatch) -> tuple[int, PackedMinibatch]:
        """Send rows; return their number, and the rows."""
        self._num_made += 1
        number = self._num_made
        await self._trainer.send_rows(number, (minibatch,))
        return number, minibatch

    def _give_up(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    # ------------------------------------------------------------------------------------------------- held-out loss

    def _is_evaluated(self, step: int) -> bool:
        is_last = step >= self._config.run.num_steps
        return self._has_held_out and step > 0 and (is_last or step % self._config.sft.evaluate_every == 0)

    async def _hold_out(self, stop: asyncio.Event) -> bool:
        """Compute the held-out loss if it is due; return whether it is the lowest.  After `stop` compute nothing."""
        step, held_out = self._state.step, self._state.held_out
        if not self._is_evaluated(step) or held_out.step == step:
            return False
        sums, weight, parts = Counter[str](), 0.0, self._batches.held_out_rows()
        part = await asyncio.to_thread(next, parts, None)
        while part is not None:
            if stop.is_set():
                return False
            number, _ = await self._sent(part)
            await self._trainer.tell(ScoreBatch(number))
            # Tokens count alike, or pairs, whose number a part of them is weighed by.
            scale = part.num_samples / part.num_loss_tokens if self._config.sft.loss == "dpo" else 1.0
            part = await asyncio.to_thread(next, parts, None)  # while that one is scored
            report = await self._trainer.answer(ScoreReport)
            weight += scale * report.num_loss_tokens
            sums.update({name: scale * value for name, value in ({"loss": report.loss} | report.metrics).items()})
        figures = {name: value / (weight or 1.0) for name, value in sums.items()}
        is_best = held_out.note(step, figures.pop("loss"), figures)
        log.info("held-out loss %.4f at step %d%s", held_out.loss, step, ", the lowest so far" if is_best else "")
        return is_best


# ----------------------------------------------------------------------------------------------------------- controller


def assemble(context: RoleContext, control: ServerChannel, batches: ServerChannel) -> SupervisedController:
    """Build every part once; blocks.  Raises CheckpointError, ConfigError, DataError, OwnershipLost."""
    config, layout, fence, clock = context.config, context.layout, context.fence, asyncio.get_running_loop().time
    awake, disk = AwakeClock(clock, longest_s=config.transport.dead_after_s / PAUSE_COUNTS_FOR), DiskWriter()
    state = patiently(partial(open_stage_state, context, awake), layout.root)
    demonstrations = patiently(partial(open_demonstrations, config), layout.root)
    path = config.model.path / "config.json"
    cost = FlopCost.from_hf_config(language_model(json.loads(patiently(path.read_bytes, path))))
    registry = ProcessRegistry(context.config_hash, config.transport.dead_after_s, clock=awake, code=context.code)
    trainer = TrainerLink(batches)
    guarding = Guarding(
        guard=state.guard, ledger=None, admission=config.admission, file=GuardFile(layout.guard, fence),
        lane=disk.notes, attempt=context.attempt,
    )  # fmt: skip
    loop = SupervisedLoop(
        config, SupervisedBatches(demonstrations, config, cost), trainer, state, guarding,
        has_held_out=demonstrations.num_held_out > 0,
    )  # fmt: skip
    own = StagePart(state, context.attempt, keeps_best=config.sft.early_stop != "off")
    checkpoints = CheckpointWriter(layout, config.checkpoint.keep, trainer, own, disk, fence=fence)
    board = StatusBoard(layout, config, registry, None, fence, writers=(checkpoints,))
    board.figures.step, board.figures.version, board.figures.loss = state.step, state.policy_version, state.loss
    open_recorder = partial(
        StageRecorder, context=context, totals=state.totals, live=board.figures, held_out=state.held_out,
        lane=disk.metrics, channels=(control, batches), clock=clock, num_conversations=demonstrations.num_conversations,
    )  # fmt: skip
    return SupervisedController(
        context=context, control=control, awake=awake, disk=disk, registry=registry, trainer=trainer,
        checkpoints=checkpoints, board=board, state=state, loop=loop,
        recorder=patiently(open_recorder, layout.tensorboard), num_conversations=demonstrations.num_conversations,
    )  # fmt: skip


@dataclass(kw_only=True, eq=False)
class SupervisedController(ControllerFrame):
    """Runs the parts that `assemble` has built, then exports the model."""

    state: StageState
    loop: SupervisedLoop
    recorder: StageRecorder
    num_conversations: int  # of an epoch

    def loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the endless loops, beside training."""
        return (self._hear(), self._watch(), self.recorder.run(), self.recorder.lag.run())

    async def stop_waiting(self) -> None:
        """Training waits for nobody but the trainer."""

    async def train(self, stop: asyncio.Event) -> None:
        """Train to the last step, or until the held-out loss has not fallen for long.  Waits for the trainer."""
        await asyncio.to_thread(warm_up)  # compiles the planner, or loads it, while the trainer starts
        await self.trainer_is_ready(self.state.policy_version)
        if stop.is_set():
            return
        self.recorder.training_begins()
        await self.loop.run(stop, self.recorder.record, self.recorder.evaluated, self.checkpoints)

    async def _hear(self) -> None:
        """Receive control messages of the trainer.  Waits for their channel."""
        while True:
            name, message = await self.control.receive()
            if isinstance(message, Hello):
                await self._greet(name, message)
            elif isinstance(message, Heartbeat):
                self.registry.record(name, message)
            elif isinstance(message, SaveReport):
                self.saved(message)

    async def _greet(self, name: str, message: Hello) -> None:
        """Register a rank, or tell it to stop.  Raises RoleFailed: it was started again, and its state is lost."""
        if self.registry.is_superseded(name, message):
            return
        known = self.registry.member(name)
        if known is not None and known.hello.incarnation != message.incarnation:
            raise RoleFailed(f"{name} was started again")
        if not self.registry.register(name, message):
            with suppress(ChannelError):  # the rank is gone already
                await self.control.send(name, StopRole("other settings than the run's"), timeout_s=ANSWER_S)

    async def _watch(self) -> None:
        """Check for silent ranks, and write the status.  Raises RoleFailed.  Waits for the clock and its writes."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if silent := self.registry.silent():
                raise RoleFailed(f"{silent[0]} is silent for {self.context.config.transport.dead_after_s:g} s")
            await self.show()

    async def close_run(self) -> None:
        """Export the model of a complete run, then write its summary; a stopped one has saved all there is."""
        if not self.loop.is_over:
            self.board.figures.phase = "stopped"
            return
        layout, lane = self.context.layout, self.disk.checkpoints
        step = await patiently_awaited(lambda: lane.run(self._export), layout.model)
        self.recorder.close_totals()
        await patiently_awaited(lambda: lane.run(self._summarise, step), layout.summary)
        self.board.figures.phase = "complete"

    def last_writes(self, *, is_complete: bool) -> Sequence[Coroutine[Any, Any, None]]:
        """Write metrics."""
        return (self.recorder.close(),)

    def _export(self) -> int:
        """Write RUN_DIR/model, whole or not at all; return the step of its checkpoint.  Raises CheckpointError."""
        # Loads torch only here, so that no step waits for it.
        from rlhpc.training.checkpoint_export import export_hf

        config, layout, state = self.context.config, self.context.layout, self.state
        step, best = state.step, state.held_out.best_step
        if config.sft.early_stop != "off" and best >= 0:
            if layout.checkpoint(best).is_dir():
                step = best
            else:
                log.warning(
                    "the checkpoint of step %d, with the lowest held-out loss, is gone: the last one counts", best
                )
        if (fence := self.context.fence) is not None:
            fence.check()
        fresh, old = layout.root / ".model.tmp", layout.root / ".model.removed"
        for place in (fresh, old):
            shutil.rmtree(place, ignore_errors=True)
        try:
            export_hf(layout.checkpoint(step), config.model.path, fresh)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        if layout.model.exists():  # of a run that was complete before it was told to go on
            rename(layout.model, old)
        rename(fresh, layout.model)
        sync_directory(layout.root)
        shutil.rmtree(old, ignore_errors=True)
        log.info("%s: the model after step %d", layout.model, step)
        return step

    def _summarise(self, step: int) -> None:
        """Write summary.json.  Raises OwnershipLost: only the owner may declare a run complete; OSError."""
        totals, held_out, config = self.state.totals, self.state.held_out, self.context.config
        document = {
            "stage": "sft",
            "steps": self.state.step,
            "skipped_steps": totals.skipped_steps,
            f"{config.sft.counts}s_trained": self.state.step * config.sft.batch_size,
            "epochs": self.state.step * config.sft.batch_size / self.num_conversations,
            "loss_last": self.state.loss,
            **{f"{name}_last": value for name, value in self.state.preferences.items()},
            "held_out_first": held_out.first,
            "held_out_best": held_out.best,
            "held_out_best_step": held_out.best_step if held_out.best is not None else None,
            "model_step": step,
            "stopped_early": self.state.step < config.run.num_steps,
            "packing_fill": totals.packing_fill,
            "trainer_tokens_per_s": totals.tokens_trained / (totals.training_s or 1.0),
            "trainer_idle_ratio": totals.trainer_idle_ratio,
            "training_s": totals.training_s,
            "wall_s": totals.wall_s,
        }
        content = json.dumps(document, indent=1).encode()
        if (fence := self.context.fence) is not None:
            fence.write(self.context.layout.summary, content)
        else:
            write_atomically(self.context.layout.summary, content)
