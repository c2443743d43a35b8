"""Act on the figures of optimiser steps as [guard] permits: StepGuard decides, Guarding carries it out.

    batch ─▶ limit ─▶ trainer ─▶ report ─▶ judge ─▶ admission, guard.jsonl, log ─▶ … step recorded … ─▶ enforce

Guarantees: an action is on disk before its step counts as done; a step that is repeated is applied or skipped as the
first time, without a second entry.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlhpc.algorithms.guard import FIGURES, Action, GuardDecision, StepGuard, guarded_figures
from rlhpc.base.ownership import Fence
from rlhpc.buffer.history import Trained
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.lost_leases import LineFile
from rlhpc.config.tables import AdmissionConfig
from rlhpc.protocol.errors import GuardStop, TrainingError
from rlhpc.protocol.messages import StepReport
from rlhpc.protocol.types import PackedBatch, RolloutGroup, StepLimits
from rlhpc.roles.controller.persistence import DiskLane

# ----------------------------------------------------------------------------------------------------------- guard file
#
# Actions of the guard, a line each, in the run directory: `rlhpc audit` and `rlhpc status` read them.
#
#     guard.jsonl      {"attempt": 0, "step": 12, "action": "skip", "figures": {"grad_norm": [35.1, null, 4.2]}, …}
#
# Input: entries.  Output: lines that are on disk.  The file belongs to the run: no resume undoes it, so that a step
# that was done again after `--step` may have two lines, of different attempts.


@dataclass(frozen=True, slots=True)
class GuardEntry:
    """One action of the guard."""

    attempt: int
    step: int
    version: int  # policy version before the step
    action: str  # "warn", "tighten", "skip", "stop"
    figures: dict[str, Sequence[float | None]]  # those out of bounds: [value, lower bound, upper bound]
    groups: Sequence[int]  # of the step's batch
    text: str  # for people
    unix_time_s: float = field(default_factory=time.time)


def read_guard_file(path: Path) -> list[GuardEntry]:
    """Return all entries, oldest first; none without a file.  Skips a line that a crash cut off.  Raises OSError."""
    return LineFile(path, GuardEntry).read()


class GuardFile:
    """Appends entries; one thread at a time."""

    def __init__(self, path: Path, fence: Fence | None = None) -> None:
        """fence: checked before each change."""
        self._lines = LineFile(path, GuardEntry, fence)
        self._unwritten: list[GuardEntry] = []

    def append(self, entry: GuardEntry) -> None:
        """Write an entry, and those that could not be written before, to disk.

        A failed write is a warning: the next call tries again.  Raises OwnershipLost.
        """
        self._unwritten.append(entry)
        if self._lines.append(self._unwritten):
            self._unwritten.clear()


# ------------------------------------------------------------------------------------------------------------- guarding

log = logging.getLogger("rlhpc.step_guard")

# So many consecutive non-finite steps end the run: one may be a batch's fault, five are the weights' or the rate's.
MAX_SKIPPED_STEPS = 5
# A run whose batches are all refused learns nothing: so many consecutive refused steps end it.
MAX_REFUSED_STEPS = 20

ADVICE = {
    "mismatch_kl": "sampler and trainer do not compute the same policy: lower admission.max_staleness or "
    "trainer.learning_rate; out of bounds from the first step on, compare temperature, template and weights",
    "ess": "rollouts are too far from the policy: lower admission.max_staleness or trainer.learning_rate",
    "entropy": "the policy collapses or dissolves: lower trainer.learning_rate, look at samples in TensorBoard",
    "grad_norm": "lower trainer.learning_rate, or look at the batch of this step",
}


@dataclass(frozen=True, slots=True)
class GuardNote:
    """The guard's action on a step, for the progress line and the log."""

    action: Action = Action.OFF
    num_bad_steps: int = 0  # in the current alarm
    text: str = ""  # for the log; "": nothing to report


NOTHING = GuardNote()


class Guarding:
    """The guard of one run's train loop."""

    def __init__(
        self,
        guard: StepGuard,
        ledger: AdmissionLedger | None,
        admission: AdmissionConfig,
        *,
        file: GuardFile | None = None,
        lane: DiskLane | None = None,
        attempt: int = 0,
        may_tighten: bool = True,
    ) -> None:
        """ledger: None where nothing is admitted.  file: records actions; None: they are not recorded.

        lane: writes the file; None: a lane of its own.

        may_tighten: False for a deterministic run, in which the staleness of every group is fixed in advance.
        """
        self._guard, self._ledger, self._attempt = guard, ledger, attempt
        self._file, self._lane = file, lane or DiskLane("guard")
        self._tight_staleness = admission.max_staleness // 2 if may_tighten else admission.max_staleness
        self._num_slots = admission.num_slots
        self._num_tight_slots = admission.model_copy(update={"max_staleness": self._tight_staleness}).num_slots
        self._num_refused_in_a_row = self._num_not_finite_in_a_row = 0
        self._ending: GuardStop | None = None
        self._set_admission()

    def limit(self, batch: PackedBatch, recorded: Trained | None) -> PackedBatch:
        """Return the batch with the limits of its step.  recorded: of a repeated step, its first result if known."""
        if recorded is None:
            return replace(batch, limits=self._guard.limits())
        everything = tuple(range(len(batch.order)))
        skipped = recorded.skipped or (everything if recorded.refused else ())
        return replace(batch, limits=StepLimits(skip=skipped))

    async def judge(
        self, report: StepReport, groups: Sequence[RolloutGroup], version: int, recorded: Trained | None
    ) -> GuardNote:
        """Decide, and do what can be done at once; `enforce` does the rest.  version: of the policy before the step.

        Raises TrainingError after too many skipped steps, OwnershipLost.
        """
        if not (report.applied or report.refused):
            self._count_skips(report)
            return NOTHING
        bounds, figures = self._guard.bounds(), guarded_figures(report.metrics)
        judgement = self._guard.judge(report.step, figures, applied=report.applied)
        self._set_admission()
        text = self._text(judgement, bounds, figures, report)
        is_told = judgement.is_news and recorded is None
        if is_told:
            log.warning("%s", text)
        if is_told and self._file is not None:
            lows, highs, ids = bounds.lows, bounds.highs, [group.group_id for group in groups]
            found: dict[str, Sequence[float | None]] = {
                name: (figures.get(name), lows.get(name), highs.get(name)) for name in judgement.broken
            }
            entry = GuardEntry(self._attempt, report.step, version, judgement.action.word, found, ids, text)
            await self._lane.run(self._file.append, entry)
        if recorded is None and judgement.action is Action.STOP:
            self._ending = self._stop(judgement, text)
        self._count_skips(report)
        return GuardNote(judgement.action, self._guard.num_bad_steps, text if judgement.is_news else "")

    def enforce(self) -> None:
        """End the run if the last step requires it; called when the step is recorded.  Raises GuardStop."""
        if self._ending is not None:
            raise self._ending

    # ------------------------------------------------------------------------------------------------------- internals

    def _stop(self, judgement: GuardDecision, text: str) -> GuardStop:
        advice = ADVICE[judgement.broken[0]] if judgement.broken else "look at the steps before"
        return GuardStop(
            f"guard.action: stop: {text}; {advice}; then resume with --step N, a checkpoint from before the alarm, "
            f"which began with step {self._guard.first_bad_step}"
        )

    def _set_admission(self) -> None:
        if self._ledger is not None:
            is_tight = self._guard.rung >= Action.TIGHTEN
            self._ledger.tighten(self._num_tight_slots if is_tight else self._num_slots)

    def _count_skips(self, report: StepReport) -> None:
        is_finite = report.applied or bool(report.refused)
        self._num_not_finite_in_a_row = 0 if is_finite else self._num_not_finite_in_a_row + 1
        is_refused = bool(report.refused) and not report.applied
        self._num_refused_in_a_row = self._num_refused_in_a_row + 1 if is_refused else 0
        if not is_finite:
            log.error("step %d skipped on all ranks: loss or gradient not finite", report.step)
        if self._num_not_finite_in_a_row >= MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"{self._num_not_finite_in_a_row} steps in a row were not finite; lower trainer.learning_rate or "
                "resume from an earlier checkpoint"
            )
        if self._num_refused_in_a_row >= MAX_REFUSED_STEPS:
            raise TrainingError(
                f"{self._num_refused_in_a_row} steps in a row were refused because of {report.refused}: "
                f"{ADVICE.get(report.refused.partition(', ')[0], 'look at guard.jsonl')}; or wider bounds in [guard]"
            )

    def _text(self, judgement: GuardDecision, bounds: StepLimits, figures: dict[str, float], report: StepReport) -> str:
        broken = ", ".join(
            f"{FIGURES[name]} {figures[name]:.4g} is {_outside(name, figures[name], bounds)}"
            for name in judgement.broken
        )
        number = self._guard.num_bad_steps
        done = {
            Action.TIGHTEN: f"; prompts are admitted for a staleness of {self._tight_staleness}",
            Action.SKIP: _skipped(report) if report.refused else "; the next such step is skipped",
            Action.STOP: "; the run ends",
        }
        return (
            f"step {report.step}: {broken or 'refused, as before'}; {number} "
            f"{'step' if number == 1 else 'steps'} out of bounds in this alarm{done.get(judgement.action, '')}"
        )


def _skipped(report: StepReport) -> str:
    """Words for the refused part of a step: all of it, or some of its optimiser steps."""
    if not report.applied:
        return "; skipped on all ranks"
    places = ", ".join(map(str, report.skipped))
    return f"; its optimiser steps {places}, counted from 0, skipped on all ranks"


def _outside(name: str, value: float, bounds: StepLimits) -> str:
    low = bounds.lows.get(name)
    return f"below {low:.4g}" if low is not None and value < low else f"above {bounds.highs[name]:.4g}"
