"""Decide what to do about steps whose figures are out of bounds: first little, then more, and as much as is permitted.

    warn ─▶ tighten ─▶ skip ─▶ rollback ─▶ stop          a rung every patience_steps steps that are out of bounds
      ▲──────────────────────────────────────┘           after calm_steps within bounds

Input: the figures of each step, in order.  Output: Judgement.  Pure; all that it remembers is in state().
Guarantees: one step out of bounds has no consequence but a warning; the same figures lead to the same judgements, also
over a restart that repeats steps; a step is refused only under limits that were known before it.

The gradient norm has no bound that suits every model: it is held against the median of those before it, in units of
their median absolute deviation, of logarithms since norms are heavy-tailed (modified z-score, Iglewicz & Hoaglin 1993;
ZClip, arXiv:2504.02507, does the same by mean and variance, which one spike shifts).  Going back and dropping batches:
Chowdhery et al. 2022 (arXiv:2204.02311), §5.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from statistics import median
from typing import Any

from rlhpc.algorithms.step_limits import broken
from rlhpc.config_guard import GuardConfig
from rlhpc.types import StepLimits

NUM_NORMS = 50  # the reference: long enough for a median, short enough to follow a policy that changes
MIN_NORMS = 10  # with fewer there is no reference yet
MIN_DEVIATION = 0.2  # of the logarithm: norms that hardly vary would make every change an outlier
MAX_REMEMBERED = 500  # steps of an alarm: with "warn" it may last as long as the run
TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution, over its median absolute deviation


class Action(IntEnum):
    """By strength; the names are those of guard.action."""

    OFF = 0
    WARN = 1
    TIGHTEN = 2
    SKIP = 3
    ROLLBACK = 4
    STOP = 5

    @property
    def word(self) -> str:
        """As in a run file, and in guard.jsonl."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step whose figures were out of bounds."""

    step: int
    version: int  # that it began with
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from a step."""

    action: Action = Action.OFF  # OFF: nothing
    broken: tuple[str, ...] = ()  # names of figures
    is_news: bool = False  # whether it is worth a line: not every step of a long alarm is


@dataclass(slots=True)
class StepGuard:
    """Bounds, and the memory of an alarm."""

    settings: GuardConfig
    may_roll_back: bool = True  # whether a rollback is left, and possible
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_NORMS))  # logarithms, of steps applied
    _alarm: list[BadStep] = field(default_factory=list)  # its first steps
    _num_bad: int = 0  # all of them
    _num_calm: int = 0  # consecutive steps since the last one of the alarm

    @property
    def permitted(self) -> Action:
        """The strongest action."""
        return Action[self.settings.action.upper()]

    @property
    def alarm(self) -> tuple[BadStep, ...]:
        """Steps out of bounds, oldest first, as long as it lasts; at most MAX_REMEMBERED."""
        return tuple(self._alarm)

    @property
    def num_bad_steps(self) -> int:
        """Of the alarm; 0: there is none."""
        return self._num_bad

    @property
    def may_lead_back(self) -> bool:
        """Whether the checkpoint before the alarm may be needed."""
        return bool(self._alarm) and self.may_roll_back and self.permitted >= Action.ROLLBACK

    @property
    def rung(self) -> Action:
        """What was reached; OFF: no alarm."""
        return self._rung(self._num_bad)

    def bounds(self) -> StepLimits:
        """Of the next step."""
        settings = self.settings
        highs = {"mismatch_kl": settings.max_mismatch_kl, "entropy": settings.max_entropy}
        if len(self._norms) >= MIN_NORMS:
            highs["grad_norm"] = self._highest_norm()
        return StepLimits({"ess": settings.min_ess, "entropy": settings.min_entropy}, highs)

    def limits(self) -> StepLimits:
        """Outside which the next step is to be skipped."""
        return self.bounds() if self._rung(self._num_bad + 1) >= Action.SKIP else StepLimits()

    def judge(self, bad_if: BadStep, figures: Mapping[str, float], *, applied: bool) -> Judgement:
        """Take note of a step that was finite.  bad_if: what to remember of it if it is out of bounds.

        applied: False: it was refused.
        """
        names = broken(self.bounds(), figures) if self.permitted else ()
        if applied and figures.get("grad_norm", 0.0) > 0:
            self._norms.append(math.log(figures["grad_norm"]))
        if not names and applied:
            self._num_calm += 1
            if self._num_calm >= self.settings.calm_steps:
                self._alarm, self._num_bad = [], 0
            return Judgement()
        self._num_calm = 0
        before = self.rung
        self._num_bad += 1
        self._alarm += [bad_if] if len(self._alarm) < MAX_REMEMBERED else []
        action, number = self.rung, self._num_bad
        is_news = action is not before or action >= Action.SKIP or number & (number - 1) == 0  # 1, 2, 4, 8, …
        return Judgement(action, names, is_news)

    def state(self) -> dict[str, Any]:
        """JSON that load_state takes."""
        return {
            "norms": list(self._norms),
            "alarm": [asdict(bad) for bad in self._alarm],
            "num_bad": self._num_bad,
            "num_calm": self._num_calm,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from state(); from {}: as a new one.  Raises KeyError, TypeError."""
        self._norms = deque(state["norms"] if state else (), maxlen=NUM_NORMS)
        self._alarm = [BadStep(bad["step"], bad["version"], tuple(bad["groups"])) for bad in state.get("alarm", ())]
        self._num_bad, self._num_calm = state.get("num_bad", 0), state.get("num_calm", 0)

    def _rung(self, number: int) -> Action:
        """What follows from the `number`th step of an alarm."""
        if not number:
            return Action.OFF
        reached = min(1 + (number - 1) // self.settings.patience_steps, Action.STOP, self.permitted)
        if reached == Action.ROLLBACK and not self.may_roll_back:
            return Action.SKIP
        return Action(reached)

    def _highest_norm(self) -> float:
        middle = median(self._norms)
        deviation = TO_STANDARD_DEVIATION * median(abs(norm - middle) for norm in self._norms)
        return math.exp(middle + self.settings.grad_norm_deviations * max(deviation, MIN_DEVIATION))


def all_groups(alarm: Sequence[BadStep]) -> tuple[int, ...]:
    """Of the batches of all steps of an alarm."""
    return tuple(sorted({group for bad in alarm for group in bad.groups}))
