"""The persistent state of a run: prompts, ledger, rollouts, counters, membership; new or from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.algorithms.step_guard import StepGuard
from rlhpc.buffer.event_log import Began
from rlhpc.buffer.history import (
    START,
    History,
    Position,
    Replay,
    make_durable,
    read_history,
    recorded_steps,
    timeline_of,
    version_after,
)
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases
from rlhpc.buffer.partial_files import read_partials
from rlhpc.buffer.partial_intake import PartialIntake
from rlhpc.buffer.rollout_buffer import RolloutBuffer
from rlhpc.buffer.rollout_journal import RolloutJournal, open_journal
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.config import Config
from rlhpc.config_guard import GuardConfig
from rlhpc.contracts import Clock, PromptSource
from rlhpc.data.mixture import open_prompt_source
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import CheckpointError, JournalError
from rlhpc.patience import patiently
from rlhpc.roles.common.lifecycle import RoleContext
from rlhpc.roles.controller.learning_rates import RunProgress
from rlhpc.roles.controller.saved_state import SavedState, Totals, read_saved_state, set_aside_later_segments
from rlhpc.run_layout import RunLayout
from rlhpc.types import SamplingParams
from rlhpc.weights.membership import Membership

log = logging.getLogger("rlhpc.state")
SEGMENT_S = 60.0  # a group waits no longer for its segment: a reader beside the run is a minute behind


@dataclass(frozen=True, slots=True)
class ControllerState:
    """What a checkpoint holds, and where the run continues."""

    prompts: PromptSource
    tokenizer: PromptTokenizer
    segments: SegmentWriter
    journal: RolloutJournal
    buffer: RolloutBuffer
    membership: Membership
    totals: Totals
    step: int  # the step to begin with
    policy_version: int
    replay: Replay = field(default_factory=Replay)  # what has to be done again before the run goes on
    attempt: int = 0  # of the run
    lost_leases: LostLeases = field(default_factory=LostLeases)  # not part of a checkpoint: no resume undoes it
    guard: StepGuard = field(default_factory=lambda: StepGuard(GuardConfig()))
    progress: RunProgress = field(default_factory=RunProgress)


def open_controller_state(context: RoleContext, clock: Clock) -> ControllerState:
    """Open a run's state, from the checkpoint to resume from if there is one.  Raises CheckpointError, ConfigError."""
    config, layout = context.config, context.layout
    saved = read_saved_state(layout, context.resume_step) if context.resume_step is not None else None
    tokenizer = PromptTokenizer.of(config.model)
    prompts, membership = open_prompt_source(config), Membership()
    if saved is not None:
        prompts.load_state(saved.prompts)  # refuses another dataset, before anything is set aside
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
    """Bring back from the journal what was sampled since the checkpoint; return what to do again, and a new journal."""
    directory = context.layout.rollouts
    position = saved.position if saved is not None else START
    try:
        make_durable(directory)
        history = _whole_history(directory, position)
    except (JournalError, OSError) as error:
        raise CheckpointError(f"the journal of rollouts cannot be read: {error}") from error
    for problem in history.problems:
        log.warning("%s: its rollouts are sampled again", problem)
    # Without a checkpoint, rollouts of late policies would be trained on by an early one if the early ones are gone.
    goes_on = saved is not None or not history.lost_beginning
    first_group = buffer.counts()["admitted"]
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
        if group_id >= first_group:  # else the checkpoint knows it
            journal.note(history.implied[group_id])
    buffer.journal = journal
    return Replay(steps, restored, timeline, version, history.num_tokens), journal


def _whole_history(directory: Path, position: Position) -> History:
    """All that counts after a position.  A file that cannot be read for five minutes is a problem of it."""

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
    """Give members that were being sampled what is known of them; version: that the repeated steps lead to."""
    try:
        partials, problems = read_partials(context.layout.rollouts, first_attempt)
    except OSError as error:
        raise CheckpointError(f"the partial rollouts cannot be read: {error}") from error
    for problem in problems:
        log.warning("%s: its rollouts are sampled again", problem)
    restored = PartialIntake(buffer, context.config.generation.max_completion_tokens).restore(partials, version)
    if restored:
        log.info("%d rollouts go on from %d tokens", len(restored), sum(each.end for each in restored))


def _open_segments(context: RoleContext, saved: SavedState | None, clock: Clock) -> SegmentWriter:
    """Set aside the segments that a resume undoes, and go on after the others.  Raises OwnershipLost."""
    if context.fence is not None:
        context.fence.check()  # what is set aside next may be a successor's otherwise
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
    )


def _read_lost_leases(layout: RunLayout, prompts: PromptSource) -> LostLeases:
    try:
        return LostLeases(LostLeaseFile(layout.strikes).read(), prompts.record_of)
    except OSError as error:
        raise CheckpointError(f"{layout.strikes}: cannot be read: {error}") from error


def _open_guard(context: RoleContext, saved: SavedState | None) -> StepGuard:
    guard = StepGuard(context.config.guard)
    try:
        if saved is not None:
            guard.load_state(saved.guard)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the guard's state is malformed: {error!r}") from error
    return guard


def progress_of(saved: SavedState | None, clock: Clock) -> RunProgress:
    """How far the run is.  Raises CheckpointError if its checkpoint says it in another form."""
    if saved is None:
        return RunProgress(clock)
    try:
        return RunProgress.from_state(saved.progress, clock)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"how far the run is, in its checkpoint, is malformed: {error!r}") from error


def sampling_of(config: Config, tokenizer: PromptTokenizer) -> Callable[[int], SamplingParams]:
    """How completions of a prompt are drawn, by its number."""
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
