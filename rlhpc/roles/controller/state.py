"""The persistent state of a run: prompts, ledger, rollouts, counters, membership; new or from a checkpoint.

In this file: learning rates, and the progress that they follow; the controller's part of a checkpoint; the whole state.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhpc.algorithms.guard import StepGuard
from rlhpc.algorithms.packing import tokens_trained
from rlhpc.algorithms.schedule import ScheduleProgress, learning_rate, rate_factor_by_age
from rlhpc.base.files import write_atomically
from rlhpc.base.patience import patiently
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.buffer import FrozenBuffer, RolloutBuffer
from rlhpc.buffer.history import (
    START,
    Began,
    History,
    Position,
    Replay,
    Trained,
    delete_old_journals,
    make_durable,
    read_history,
    recorded_steps,
    timeline_of,
    version_after,
)
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases
from rlhpc.buffer.prefixes import PartialIntake, read_partials
from rlhpc.buffer.rollout_journal import RolloutJournal, open_journal
from rlhpc.buffer.segments import SegmentWriter, set_aside_lost_segments
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import GuardConfig
from rlhpc.data.prompts import open_prompt_source
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.contracts import Clock, PromptSource
from rlhpc.protocol.errors import CheckpointError, JournalError
from rlhpc.protocol.types import PackedBatch, SamplingParams
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.weights.choice import Membership

# ------------------------------------------------------------------------------------------------------- learning rates
#
# The learning rates of every batch, and the progress of the run by which schedules decay.
#
# Input: batches in the order in which they are trained, and the records of repeated ones.  Output: the same batches
# with their rates, which the trainer applies.  Guarantees: a step that is trained again starts at its first start's
# tokens and seconds; both count all attempts, less the steps that a resume has undone.  Seconds count while the run
# trains: not in a queue, while it starts or repeats steps, or between the start of its last step and a crash.


@dataclass(slots=True)
class RunProgress:
    """Tokens and seconds that a run has trained; part of its checkpoints."""

    clock: Clock = lambda: 0.0
    num_tokens: int = 0
    _seconds: float = 0.0
    _since_s: float | None = None  # start on the clock; None: training has not begun

    @property
    def seconds(self) -> float:
        """Seconds trained so far."""
        return self._seconds if self._since_s is None else self._seconds + self.clock() - self._since_s

    def start(self) -> None:
        """Count seconds by the clock from now on: training begins or continues."""
        self._seconds, self._since_s = self.seconds, self.clock()

    def go_on_from(self, seconds: float) -> None:
        """Set the seconds to a recorded value, unless they are beyond it."""
        self._seconds += max(0.0, seconds - self.seconds)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"num_tokens": self.num_tokens, "seconds": self.seconds}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], clock: Clock) -> RunProgress:
        """Read a checkpoint's state.  Raises KeyError, TypeError, ValueError if it is malformed."""
        return cls(clock, int(state["num_tokens"]), float(state["seconds"]))


class LearningRates:
    """Computes the learning rates of each batch."""

    def __init__(self, config: Config, run: RunProgress) -> None:
        self._config, self._run = config, run
        self.began_s = 0.0  # seconds that the run had trained before the last batch

    def start(self) -> None:
        """Call when repeated steps are done: batches are trained for the first time from now on."""
        self._run.start()

    def give(self, batch: PackedBatch, recorded: Trained | None) -> PackedBatch:
        """Return the batch with its rates.  recorded: of a repeated step, its first result if known."""
        at = self._progress(batch.step, recorded)
        self.began_s = at.seconds
        trainer, critic = self._config.trainer, self._config.critic
        scheduled = rate = learning_rate(at, self._config.stepped, self._config.run.num_steps)
        if self._config.algorithm.scale_rate_by_age:
            rate *= rate_factor_by_age((row.versions for row in batch.rows), batch.policy_version)
        if not self._config.has_critic:
            return replace(batch, learning_rate=rate)
        rate = 0.0 if at.step < critic.head_start_steps else rate
        share = scheduled / trainer.learning_rate if critic.follows_schedule else 1.0
        return replace(batch, learning_rate=rate, critic_learning_rate=share * critic.learning_rate)

    def trained(self, batch: PackedBatch) -> None:
        """Count a batch that was trained or skipped."""
        self._run.num_tokens += tokens_trained(batch)

    def _progress(self, step: int, recorded: Trained | None) -> ScheduleProgress:
        if recorded is not None:
            self._run.go_on_from(recorded.began_s)
            return ScheduleProgress(step, self._run.num_tokens, recorded.began_s)
        return ScheduleProgress(step, self._run.num_tokens, self._run.seconds)


# ---------------------------------------------------------------------------------------------------------- saved state
#
# The controller's part of a checkpoint: ledger, prompt cursor, counters of the run; and what a resume sets aside.
#
# Groups in flight are granted again after a resume, under the same ids; finished groups that were not trained on are in
# the checkpoint; segments sealed later are set aside, since their steps are repeated.

log = logging.getLogger("rlhpc.state")
STATE_FILE = "controller.json"


@dataclass(slots=True)
class Totals:
    """Counters of a whole run, all attempts together: they grow from step to step."""

    steps: int = 0  # trained or skipped
    skipped_steps: int = 0
    rollouts_trained: int = 0
    rollouts_spanning_update: int = 0  # trained rollouts with tokens of two or more versions
    staleness_max: int = 0
    tokens_generated: int = 0  # completion tokens that reached the controller
    tokens_trained: int = 0  # prompt and completion tokens
    groups_dropped: int = 0
    zero_variance_groups: int = 0
    leases_regranted: int = 0
    tokens_lost: int = 0  # with generators that died, by their last heartbeats; they are sampled again
    packing_fill_sum: float = 0.0
    trainer_idle_s: float = 0.0
    generator_idle_s: float = 0.0  # summed over generators
    generator_s: float = 0.0  # summed over generators
    training_s: float = 0.0  # from the first live version to the last step
    wall_s: float = 0.0  # of the controllers, start-up included
    checkpoints_failed: int = 0  # skipped because they could not be written
    canaries_failed: int = 0  # generators whose weights were found wrong
    last_reward: float = 0.0  # mean of the rollouts that arrived during the last step

    def to_json(self) -> dict[str, Any]:
        """The state as JSON, for a checkpoint."""
        return asdict(self)

    @property
    def packing_fill(self) -> float:
        """Fill of the packed rows, 0–1, mean over steps."""
        return self.packing_fill_sum / max(1, self.steps)

    @property
    def trainer_idle_ratio(self) -> float:
        """Share of training time in which the trainer had no batch."""
        return self.trainer_idle_s / self.training_s if self.training_s else 0.0

    @property
    def generator_idle_ratio(self) -> float:
        """Share of training time in which a generator had nothing to sample, mean over generators."""
        return self.generator_idle_s / self.generator_s if self.generator_s else 0.0


@dataclass(frozen=True, slots=True)
class SavedState:
    """The controller's part of a checkpoint."""

    step: int  # the step a resume begins with
    policy_version: int
    buffer: dict[str, Any]
    prompts: dict[str, Any]
    membership: dict[str, Any]
    totals: dict[str, Any]
    guard: dict[str, Any]
    progress: dict[str, Any]  # of schedules

    @property
    def position(self) -> Position:
        """Position in the journal up to which this checkpoint has everything."""
        return Position(**self.buffer["journal"])


def read_saved_state(layout: RunLayout, step: int) -> SavedState:
    """Read the controller's part.  Raises CheckpointError."""
    path = layout.checkpoint(step) / STATE_FILE
    try:
        return SavedState(**json.loads(path.read_bytes()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def delete_needless_journals(layout: RunLayout, steps: Sequence[int]) -> None:
    """Delete the journal files that no checkpoint of these steps needs for a resume.

    Raises CheckpointError, JournalError, OSError.
    """
    positions = [read_saved_state(layout, step).position for step in steps]
    if positions:
        delete_old_journals(layout.rollouts, min(positions, key=lambda position: position.num_rollouts))


def set_aside_later_segments(layout: RunLayout, state: SavedState | None, attempt: int) -> int:
    """Set aside the segments that a resume undoes; return the number of the first segment to write."""
    first = int(state.buffer["next_segment_index"]) if state is not None else 0
    lost = set_aside_lost_segments(layout.rollouts, first, attempt)
    if lost:
        log.info("%d segments later than the checkpoint are set aside in %s", len(lost), lost[0].parent)
    return first


def write_saved_state(directory: Path, state: SavedState) -> None:
    """Write the controller's part.  Raises OSError."""
    document = {name: getattr(state, name) for name in SavedState.__slots__}
    write_atomically(directory / STATE_FILE, json.dumps(document).encode())


# ---------------------------------------------------------------------------------------------------------------- state

SEGMENT_S = 60.0  # longest wait of a group for its segment: readers beside the run are at most a minute behind


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The controller's state: saved in checkpoints, restored by a resume."""

    prompts: PromptSource
    tokenizer: PromptTokenizer
    segments: SegmentWriter
    journal: RolloutJournal
    buffer: RolloutBuffer
    membership: Membership
    totals: Totals
    step: int  # the step to begin with
    policy_version: int
    replay: Replay = field(default_factory=Replay)  # steps to repeat before the run goes on
    attempt: int = 0  # of the run
    lost_leases: LostLeases = field(default_factory=LostLeases)  # not part of a checkpoint: no resume undoes it
    guard: StepGuard = field(default_factory=lambda: StepGuard(GuardConfig()))
    progress: RunProgress = field(default_factory=RunProgress)

    @property
    def ledger(self) -> AdmissionLedger:
        """Slots and leases of the buffer's groups."""
        return self.buffer.ledger


@dataclass(slots=True)
class FrozenState:
    """The controller's part of one checkpoint (checkpoints.py)."""

    buffer: FrozenBuffer
    saved: SavedState  # without the buffer
    next_segment: int = 0

    def prepare(self) -> None:
        """Seal the segments that the checkpoint relies on.  Raises SegmentError."""
        self.next_segment = self.buffer.seal()

    def write(self, directory: Path) -> None:
        """Write the part.  Raises SegmentError, OSError."""
        own = self.buffer.write(directory, self.next_segment)
        write_saved_state(directory, replace(self.saved, buffer=own))


class StatePart:
    """The controller's side of saving (checkpoints.OwnPart) in reinforcement learning."""

    def __init__(self, state: ControllerState, layout: RunLayout, totals: Callable[[], Totals] | None = None) -> None:
        """totals: returns the present totals; None: those of the last recorded step are saved."""
        self._state, self._layout, self._totals = state, layout, totals or (lambda: state.totals)

    @property
    def attempt(self) -> int:
        """Number of this attempt of the run."""
        return self._state.attempt

    @property
    def keeps_all(self) -> bool:
        """True while the guard may end the run: a checkpoint from before the alarm must be left then."""
        return self._state.guard.may_end_the_run

    @property
    def spared(self) -> Sequence[int]:
        """None: the controller does not rate checkpoints."""
        return ()

    def freeze(self, step: int, policy_version: int) -> FrozenState:
        """Take a snapshot.  Raises LedgerError if a group was taken before this step and is not consumed."""
        state = self._state
        buffer = state.buffer.freeze(step)
        prompts, membership, totals = state.prompts.state(), state.membership.state(), self._totals().to_json()
        guard, progress = state.guard.state(), state.progress.state()
        return FrozenState(buffer, SavedState(step, policy_version, {}, prompts, membership, totals, guard, progress))

    def delete_needless(self, steps: Sequence[int]) -> None:
        """Delete the journal files that no checkpoint of these steps needs.

        Raises CheckpointError, JournalError, OSError.
        """
        delete_needless_journals(self._layout, steps)

    def left_out(self) -> None:
        """Count a checkpoint that could not be written."""
        self._state.totals.checkpoints_failed += 1


def open_controller_state(context: RoleContext, clock: Clock) -> ControllerState:
    """Open a run's state, new or from the checkpoint to resume from.  Raises CheckpointError, ConfigError."""
    config, layout = context.config, context.layout
    saved = read_saved_state(layout, context.resume_step) if context.resume_step is not None else None
    tokenizer = PromptTokenizer.of(config.model)
    prompts, membership = open_prompt_source(config), Membership()
    if saved is not None:
        prompts.load_state(saved.prompts)  # refuses another dataset, before segments are set aside
    lost_leases = _read_lost_leases(layout, prompts)
    settings = _ledger_settings(context, tokenizer, clock) | {"lost_leases": lost_leases}
    ledger = (
        AdmissionLedger(**settings) if not saved else AdmissionLedger.from_state(saved.buffer["ledger"], **settings)
    )
    segments = _open_segments(context, saved, clock)
    buffer = RolloutBuffer(ledger, segments)
    totals, step, policy_version = Totals(), 0, 0
    if saved is not None:
        buffer.load(layout.checkpoint(saved.step))
        membership.load_state(saved.membership)
        totals, step, policy_version = Totals(**saved.totals), saved.step, saved.policy_version
    guard = _open_guard(context, saved)
    replay, journal = _restore(context, saved, step, buffer, prompts)
    totals.tokens_generated += replay.num_tokens
    return ControllerState(
        prompts,
        tokenizer,
        segments,
        journal,
        buffer,
        membership,
        totals,
        step,
        policy_version,
        replay,
        context.attempt,
        lost_leases,
        guard,
        progress_of(saved, clock),
    )


def _restore(
    context: RoleContext, saved: SavedState | None, step: int, buffer: RolloutBuffer, prompts: PromptSource
) -> tuple[Replay, RolloutJournal]:
    """Restore rollouts sampled since the checkpoint from the journal; return steps to repeat, and a new journal."""
    directory = context.layout.rollouts
    position = saved.position if saved is not None else START
    try:
        make_durable(directory)
        history = _whole_history(directory, position)
    except (JournalError, OSError) as error:
        raise CheckpointError(f"the journal of rollouts cannot be read: {error}") from error
    for problem in history.problems:
        log.warning("%s: its rollouts are sampled again", problem)
    # Without a checkpoint, an early policy must not train on rollouts of late ones if the early rollouts are gone.
    goes_on = saved is not None or not history.lost_beginning
    first_group = buffer.ledger.next_group_id
    restored = buffer.restore(history, prompts.draw_again) if goes_on else []
    if restored:
        log.info("%d groups of %d rollouts come from the journal", len(restored), len(history.rollouts))
    steps = recorded_steps(history, step, buffer.is_finished) if goes_on else ()
    name, attempt = context.config.run.name, context.attempt
    version = version_after(steps, saved.policy_version if saved is not None else 0)
    if goes_on:
        _restore_partials(context, history.first_attempt, version, buffer)
    journal = open_journal(context.layout, name, attempt, history.num_rollouts, context.fence)
    timeline = timeline_of(history, attempt, step, steps) if goes_on else attempt
    journal.note(Began(step, history.num_rollouts, goes_on, timeline))
    for group_id in sorted(history.implied if goes_on else ()):
        if group_id >= first_group:  # else the checkpoint has it
            journal.note(history.implied[group_id])
    buffer.journal = journal
    return Replay(steps, restored, timeline, version, history.num_tokens), journal


def _whole_history(directory: Path, position: Position) -> History:
    """Read the history after a position.  A file that cannot be read for five minutes is noted among its problems."""

    def whole() -> History:
        found = read_history(directory, position)
        if found.unread is not None:
            raise found.unread
        return found

    try:
        return patiently(whole, directory)
    except JournalError:
        return read_history(directory, position)


def _restore_partials(context: RoleContext, first_attempt: int, version: int, buffer: RolloutBuffer) -> None:
    """Give members in flight their known tokens; version: the one after the repeated steps."""
    try:
        partials, problems = read_partials(context.layout.rollouts, first_attempt)
    except OSError as error:
        raise CheckpointError(f"the partial rollouts cannot be read: {error}") from error
    for problem in problems:
        log.warning("%s: its rollouts are sampled again", problem)
    restored = PartialIntake(buffer.ledger, context.config.generation.max_completion_tokens).restore(partials, version)
    if restored:
        log.info("%d rollouts go on from %d tokens", len(restored), sum(each.end for each in restored))


def _open_segments(context: RoleContext, saved: SavedState | None, clock: Clock) -> SegmentWriter:
    """Set aside the segments that a resume undoes, and continue after the rest.  Raises OwnershipLost."""
    if context.fence is not None:
        context.fence.check()  # without it, segments of a successor could be set aside
    config = context.config
    return SegmentWriter(
        context.layout.rollouts,
        set_aside_later_segments(context.layout, saved, context.attempt),
        run_name=config.run.name,
        run_attempt=context.attempt,
        max_groups=config.buffer.segment_groups,
        max_s=SEGMENT_S,
        clock=clock,
        fence=context.fence,
        keeps_routes=config.buffer.keep_routes,
    )


def _read_lost_leases(layout: RunLayout, prompts: PromptSource) -> LostLeases:
    try:
        return LostLeases(LostLeaseFile(layout.lost_leases).read(), prompts.record_of)
    except OSError as error:
        raise CheckpointError(f"{layout.lost_leases}: cannot be read: {error}") from error


def _open_guard(context: RoleContext, saved: SavedState | None) -> StepGuard:
    guard = StepGuard(context.config.guard)
    try:
        if saved is not None:
            guard.load_state(saved.guard)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the guard's state is malformed: {error!r}") from error
    return guard


def progress_of(saved: SavedState | None, clock: Clock) -> RunProgress:
    """The run's progress, new or from its checkpoint.  Raises CheckpointError if that is malformed."""
    if saved is None:
        return RunProgress(clock)
    try:
        return RunProgress.from_state(saved.progress, clock)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"how far the run is, in its checkpoint, is malformed: {error!r}") from error


def sampling_of(config: Config, tokenizer: PromptTokenizer) -> Callable[[int], SamplingParams]:
    """Return a function from a prompt's id to the sampling parameters of its completions."""
    ends = tokenizer.ends(config.generation.stop)

    def sampling(prompt_id: int) -> SamplingParams:
        return SamplingParams(config.max_completion_tokens(prompt_id), config.generation.temperature, *ends)

    return sampling


def _ledger_settings(context: RoleContext, tokenizer: PromptTokenizer, clock: Clock) -> dict[str, Any]:
    config, admission = context.config, context.config.admission
    return {
        "num_slots": admission.num_slots,
        "window_groups": config.window_groups,
        "groups_per_step": admission.groups_per_step,
        "group_size": admission.group_size,
        "sampling": sampling_of(config, tokenizer),
        "lease_deadline_s": admission.lease_deadline_s,
        "max_attempts": admission.max_attempts,
        "clock": clock,
    }
