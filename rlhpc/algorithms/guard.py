"""The limits of a step, and the guard, which sets them from the figures of earlier steps.

In this file: limits that can forbid an optimiser step; the step guard.

The guard escalates, up to the permitted action:

    warn ─▶ tighten ─▶ skip ─▶ stop          a rung every patience_steps steps that are out of bounds
      ▲─────────────────────────┘            after calm_steps within bounds

Input: the figures of each step, in order.  Output: GuardDecision.  Pure; its whole memory is in state().
Guarantees: one step out of bounds leads only to a warning; the same figures lead to the same decisions, also
over a restart that repeats steps; a step is refused only under limits that were known before it.

The gradient norm has no bound that suits every model: it is compared with the median of earlier norms, in units of
their median absolute deviation, of logarithms since norms are heavy-tailed (modified z-score, Iglewicz & Hoaglin 1993;
ZClip, arXiv:2504.02507, does the same by mean and variance, which one spike shifts).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median
from types import MappingProxyType
from typing import Any

from rlhpc.algorithms.figures import effective_sample_share
from rlhpc.config.tables_algorithm import GuardConfig
from rlhpc.protocol.types import StepLimits

# ---------------------------------------------------------------------------------------------------------- step limits
#
# Figures of an optimiser step that can forbid it, known before parameters change.
#
# Input: metrics and gradient norm of a step.  Output: figures under their short names; the figures that break the
# limits that came with the batch.  No torch.  The same on every rank: metrics are summed over ranks.

FIGURES: Mapping[str, str] = MappingProxyType(
    {  # short name → metric
        "mismatch_kl": "policy/mismatch_kl",
        "ess": "policy/ess",
        "entropy": "trainer/entropy",
        "grad_norm": "trainer/grad_norm",
    }
)
AS_BEFORE = "as before"  # reason for skipping a repeated step that was skipped the first time


def guarded_figures(means: Mapping[str, float]) -> dict[str, float]:
    """Figures of a step; those missing or not finite are left out.

    means: metrics as the trainer reports them, over loss tokens, and "grad_norm".
    """
    figures = {name: means[name] for name in ("mismatch_kl", "entropy", "grad_norm") if name in means}
    if "importance_weight_squared" in means:
        figures["ess"] = effective_sample_share(means, 1)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def broken(limits: StepLimits, figures: Mapping[str, float]) -> tuple[str, ...]:
    """Names of the figures outside their limits, in alphabetical order."""
    too_low = {name for name, low in limits.lows.items() if figures.get(name, low) < low}
    too_high = {name for name, high in limits.highs.items() if figures.get(name, high) > high}
    return tuple(sorted(too_low | too_high))


def refusal(limits: StepLimits, means: Mapping[str, float], place: int = 0) -> str:
    """Reason for not applying an optimiser step; "": apply it.  means: as for guarded_figures; place: in the batch."""
    return AS_BEFORE if place in limits.skip else ", ".join(broken(limits, guarded_figures(means)))


# ----------------------------------------------------------------------------------------------------------- step guard

NUM_NORMS = 50  # the reference: long enough for a median, short enough to follow a policy that changes
MIN_NORMS = 10  # with fewer there is no reference yet
MIN_DEVIATION = 0.2  # of the logarithm: norms that hardly vary would make every change an outlier
TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution, over its median absolute deviation


class Action(IntEnum):
    """Actions by strength; the names are those of guard.action."""

    OFF = 0
    WARN = 1
    TIGHTEN = 2
    SKIP = 3
    STOP = 4

    @property
    def word(self) -> str:
        """The action's name in a run file, and in guard.jsonl."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class GuardDecision:
    """The guard's decision on a step."""

    action: Action = Action.OFF  # OFF: nothing
    broken: tuple[str, ...] = ()  # names of figures
    is_news: bool = False  # worth a log line: not every step of a long alarm is


@dataclass(slots=True)
class StepGuard:
    """Bounds, and the memory of an alarm."""

    settings: GuardConfig
    num_bad_steps: int = 0  # of the alarm; 0: there is none
    first_bad_step: int = -1  # that the alarm began with
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_NORMS))  # logarithms, of steps applied
    _num_calm: int = 0  # consecutive steps since the last one of the alarm

    @property
    def permitted(self) -> Action:
        """The strongest action."""
        return Action[self.settings.action.upper()]

    @property
    def may_end_the_run(self) -> bool:
        """True during an alarm that may end in STOP: a checkpoint from before the alarm may be wanted."""
        return self.num_bad_steps > 0 and self.permitted is Action.STOP

    @property
    def rung(self) -> Action:
        """The action reached in the current alarm; OFF: no alarm."""
        return self._rung(self.num_bad_steps)

    def bounds(self) -> StepLimits:
        """Limits of the next step."""
        settings = self.settings
        highs = {"mismatch_kl": settings.max_mismatch_kl, "entropy": settings.max_entropy}
        if len(self._norms) >= MIN_NORMS:
            highs["grad_norm"] = self._highest_norm()
        return StepLimits({"ess": settings.min_ess, "entropy": settings.min_entropy}, highs)

    def limits(self) -> StepLimits:
        """Limits outside which the next step is to be skipped."""
        return self.bounds() if self._rung(self.num_bad_steps + 1) >= Action.SKIP else StepLimits()

    def judge(self, step: int, figures: Mapping[str, float], *, applied: bool) -> GuardDecision:
        """Record a finite step and decide on it.  applied: False: the step was refused."""
        names = broken(self.bounds(), figures) if self.permitted else ()
        if applied and figures.get("grad_norm", 0.0) > 0:
            self._norms.append(math.log(figures["grad_norm"]))
        if not names and applied:
            self._num_calm += 1
            if self._num_calm >= self.settings.calm_steps:
                self.num_bad_steps, self.first_bad_step = 0, -1
            return GuardDecision()
        self._num_calm = 0
        before = self.rung
        if not self.num_bad_steps:
            self.first_bad_step = step
        self.num_bad_steps += 1
        action, number = self.rung, self.num_bad_steps
        is_news = action is not before or action >= Action.SKIP or number & (number - 1) == 0  # 1, 2, 4, 8, …
        return GuardDecision(action, names, is_news)

    def state(self) -> dict[str, Any]:
        """JSON for load_state."""
        return {
            "norms": list(self._norms),
            "num_bad": self.num_bad_steps,
            "first_bad": self.first_bad_step,
            "num_calm": self._num_calm,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from state().  Raises KeyError, TypeError."""
        self._norms = deque(state["norms"], maxlen=NUM_NORMS)
        self.num_bad_steps, self.first_bad_step = state["num_bad"], state["first_bad"]
        self._num_calm = state["num_calm"]

    def _rung(self, number: int) -> Action:
        """The action at the `number`th step of an alarm."""
        if not number:
            return Action.OFF
        return Action(min(1 + (number - 1) // self.settings.patience_steps, Action.STOP, self.permitted))

    def _highest_norm(self) -> float:
        middle = median(self._norms)
        deviation = TO_STANDARD_DEVIATION * median(abs(norm - middle) for norm in self._norms)
        return math.exp(middle + self.settings.grad_norm_deviations * max(deviation, MIN_DEVIATION))
