"""Figures that say whether learning is healthy, the limits of a step, and the guard, which acts on them.

In this file: diagnostics of a batch; limits that can forbid an optimiser step; the step guard.

The guard does little at first, then more, and as much as is permitted:

    warn ─▶ tighten ─▶ skip ─▶ stop          a rung every patience_steps steps that are out of bounds
      ▲─────────────────────────┘            after calm_steps within bounds

Its input: the figures of each step, in order.  Output: GuardDecision.  Pure; all that it remembers is in state().
Guarantees: one step out of bounds has no consequence but a warning; the same figures lead to the same judgements, also
over a restart that repeats steps; a step is refused only under limits that were known before it.

The gradient norm has no bound that suits every model: it is held against the median of those before it, in units of
their median absolute deviation, of logarithms since norms are heavy-tailed (modified z-score, Iglewicz & Hoaglin 1993;
ZClip, arXiv:2504.02507, does the same by mean and variance, which one spike shifts).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np

from rlhpc.algorithms.estimators import have_reward_variance
from rlhpc.config.tables_algorithm import GuardConfig
from rlhpc.protocol.types import (
    Bool,
    FinishReason,
    Float32,
    Int32,
    Rollout,
    RolloutGroup,
    ScoredRollout,
    StepLimits,
    Verdict,
)

# ---------------------------------------------------------------------------------------------------------- diagnostics
#
# Figures of a batch that say whether learning is healthy.
#
# Input: RolloutGroup and the summed metrics of a step.  Output: numbers under their names of rlhpc/metrics/names.py,
# and arrays for histograms.  No torch.  When to worry: docs/metrics.md.


def reward_figures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards and verdicts; `groups` may be those of a batch or all groups finished since the last one.

    correct_share is over members; mean, std and parts over members with a reward; the shares of groups over groups with
    a reward.  Empty without groups.
    """
    members = _members(groups)
    if not members:
        return {}
    figures = {"reward/correct_share": _share([m.verdict is Verdict.CORRECT for m in members])} | _part_means(members)
    if len(values := rewards(groups)):
        figures |= {"reward/mean": float(values.mean()), "reward/std": float(values.std())}
        are_alike, are_right = _groups_without_variance(groups, values)
        figures["reward/zero_spread_share"] = _share(are_alike)
        figures["group/all_correct_share"] = _share(are_alike & are_right)
        figures["group/all_wrong_share"] = _share(are_alike & ~are_right)
    return figures


def length_figures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Tokens of completions and prompts, turns, and the share of completions cut by a limit.  Empty without groups."""
    if not groups:
        return {}
    lengths, rollouts = completion_lengths(groups), _rollouts(groups)
    num_sampled = [np.count_nonzero(rollout.loss_mask) for rollout in rollouts]
    pairs = zip(rollouts, num_sampled, strict=True)
    num_turns = [1 if count == len(rollout.loss_mask) else _num_turns(rollout) for rollout, count in pairs]
    return {
        "length/prompt_mean": float(np.mean([len(group.prompt.token_ids) for group in groups])),
        "length/completion_mean": float(lengths.mean()),
        "length/completion_max": float(lengths.max()),
        "length/truncated_share": _share([r.finish_reason is FinishReason.LENGTH for r in rollouts]),
        "length/turns_mean": float(np.mean(num_turns)),
        "length/read_share": 1 - sum(num_sampled) / max(1, lengths.sum()),
    }


def _num_turns(rollout: Rollout) -> int:
    """Stretches of tokens that the policy sampled."""
    return int(np.count_nonzero(np.diff(rollout.loss_mask.astype(np.int8), prepend=0) == 1))


def staleness_figures(groups: Sequence[RolloutGroup], policy_version: int) -> dict[str, float]:
    """How old a batch is that policy_version is about to be trained on.  Empty without groups.

    staleness/mean and max: versions since admission, per rollout: what admission.max_staleness bounds.
    staleness/token_mean: since each token was sampled.  rollout/*: weights changed in flight.
    """
    if not groups:
        return {}
    ages, versions = staleness(groups, policy_version), [rollout.versions for rollout in _rollouts(groups)]
    are_one = [each.item(0) == each.item(-1) for each in versions]  # of most: they never decrease
    pairs = list(zip(versions, are_one, strict=True))
    num_versions = np.array([1 if is_one else len(np.unique(each)) for each, is_one in pairs])
    total = sum(each.item(0) * len(each) if is_one else int(each.sum(dtype=np.int64)) for each, is_one in pairs)
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/token_mean": policy_version - total / sum(map(len, versions)),
        "rollout/spanning_update_share": _share(num_versions > 1),
        "rollout/num_versions_max": float(num_versions.max()),
    }


def effective_sample_share(metrics: Mapping[str, float], num_loss_tokens: float) -> float:
    """(Σw)² / (n · Σw²) of the importance weights, 0–1: 1 when all are equal (Kish 1965; Owen 2013, §9.3).

    metrics: as a policy loss sums them, over all micro-batches and ranks.  0 when there is no weight at all.
    """
    squares = num_loss_tokens * metrics["importance_weight_squared"]
    return metrics["importance_weight"] ** 2 / squares if squares > 0 else 0.0


def age_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """What tokens of each age are like; sums: "age_FIGURE/AGE" of algorithms/policy_loss.py, over one denominator.

    Nothing for an age that no token has.
    """
    figures: dict[str, float] = {}
    for age in sorted(name.partition("/")[2] for name in sums if name.startswith("age_tokens/")):
        share = sums[f"age_tokens/{age}"]
        if share <= 0:
            continue
        figures[f"age_tokens_share/{age}"] = share
        of_age = {name.partition("/")[0]: value for name, value in sums.items() if name.endswith(f"/{age}")}
        weights = {name: of_age[f"age_{name}"] for name in ("importance_weight", "importance_weight_squared")}
        figures[f"age_ess/{age}"] = effective_sample_share(weights, share)
        for name, shown in (("importance_weight", "importance_weight"), ("mismatch_kl", "mismatch_kl"),
                            ("kl_k3", "kl_k3"), ("clipped", "clipped_share")):  # fmt: skip
            figures[f"age_{shown}/{age}"] = of_age[f"age_{name}"] / share
    return figures


# Arrays for histograms.


def rewards(groups: Sequence[RolloutGroup]) -> Float32:
    """Reward of every member that has one, float32."""
    judged = [m.reward for m in _members(groups) if m.verdict is not Verdict.VERIFIER_ERROR]
    return np.array(judged, np.float32)


def completion_lengths(groups: Sequence[RolloutGroup]) -> Int32:
    """Tokens of every completion, int32."""
    return np.array([len(rollout.token_ids) for rollout in _rollouts(groups)], np.int32)


def staleness(groups: Sequence[RolloutGroup], policy_version: int) -> Int32:
    """policy_version − version at admission of every rollout, int32."""
    ages = [policy_version - group.admitted_version for group in groups for _ in group.members]
    return np.array(ages, np.int32)


def _members(groups: Sequence[RolloutGroup]) -> list[ScoredRollout]:
    return [member for group in groups for member in group.members]


def _rollouts(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    return [member.rollout for member in _members(groups)]


def _part_means(members: Sequence[ScoredRollout]) -> dict[str, float]:
    judged = [member.reward_parts for member in members if member.verdict is not Verdict.VERIFIER_ERROR]
    names = sorted({name for parts in judged for name in parts})
    return {f"reward_part/{name}": float(np.mean([parts[name] for parts in judged if name in parts])) for name in names}


def _groups_without_variance(groups: Sequence[RolloutGroup], values: Float32) -> tuple[Bool, Bool]:
    """Tell of each group that has a reward whether they are all alike, and whether the first answer is correct.

    values: of all members that have one.  Their size says nothing: a reward for parts of an answer is above 0 too.
    """
    verdicts = [[m.verdict for m in group.members if m.verdict is not Verdict.VERIFIER_ERROR] for group in groups]
    judged = [each for each in verdicts if each]
    starts = np.cumsum([0, *(len(each) for each in judged)])[:-1]
    are_correct = np.array([each[0] is Verdict.CORRECT for each in judged], np.bool_)
    return ~have_reward_variance(values, starts), are_correct


def _share(truths: Sequence[bool] | Bool) -> float:
    """Share that is true; at least one."""
    return float(np.mean(truths))


# ---------------------------------------------------------------------------------------------------------- step limits
#
# Figures of an optimiser step that can forbid it, known before parameters change.
#
# Input: metrics and gradient norm of a step.  Output: figures under their short names; which of them break the limits
# that came with the batch.  No torch.  The same on every rank: metrics are summed over ranks.

FIGURES: Mapping[str, str] = MappingProxyType(
    {  # short name → metric
        "mismatch_kl": "policy/mismatch_kl",
        "ess": "policy/ess",
        "entropy": "trainer/entropy",
        "grad_norm": "trainer/grad_norm",
    }
)
AS_BEFORE = "as before"  # why a step is skipped that was skipped when it was first done


def guarded_figures(means: Mapping[str, float]) -> dict[str, float]:
    """Figures of a step; one that is not there, or not finite, is left out.

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
    """Why an optimiser step must not be applied; "": it may be.  means: as for guarded_figures; place: in the batch."""
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
    """What follows from a step."""

    action: Action = Action.OFF  # OFF: nothing
    broken: tuple[str, ...] = ()  # names of figures
    is_news: bool = False  # whether it is worth a line: not every step of a long alarm is


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
        """Whether an alarm may end in STOP: then somebody may want a checkpoint from before it."""
        return self.num_bad_steps > 0 and self.permitted is Action.STOP

    @property
    def rung(self) -> Action:
        """What was reached; OFF: no alarm."""
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
        """Take note of a step that was finite.  applied: False: it was refused."""
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
        """JSON that load_state takes."""
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
        """What follows from the `number`th step of an alarm."""
        if not number:
            return Action.OFF
        return Action(min(1 + (number - 1) // self.settings.patience_steps, Action.STOP, self.permitted))

    def _highest_norm(self) -> float:
        middle = median(self._norms)
        deviation = TO_STANDARD_DEVIATION * median(abs(norm - middle) for norm in self._norms)
        return math.exp(middle + self.settings.grad_norm_deviations * max(deviation, MIN_DEVIATION))
