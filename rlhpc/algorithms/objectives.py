"""The objectives that algorithm.loss can name, user-defined losses, and the loss of a critic.

In this file: user-defined losses, and their trial; the critic's loss; that of supervised fine-tuning; the contract of
an objective, and parts that several share; CISPO; DPPO; GMPO; PPO; GSPO; REINFORCE; SAPO.

Input of an objective: log-probabilities of the sampled tokens.  Output: a number per token, to be maximised.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from rlhpc.base.user_code import bound, load, try_out
from rlhpc.protocol.contracts import PolicyLoss, TokenRow
from rlhpc.protocol.errors import ConfigError

# ------------------------------------------------------------------------------------------------------------------ own
#
# A user-defined loss: algorithm.loss = "package.module:name", any PolicyLoss.
#
# Tried when loaded, on two tiny sequences, for faults that a run would show late: the loss must be a sum with a
# gradient, its metrics scalars without one; it must leave its arguments unchanged, ignore tokens off the loss mask
# (also if that is all of them), use row.weights, stay finite for ratios beyond float32, and not hide values that are
# not finite.  Checked at each use, as far as that costs nothing.

LOSS_KEY = "algorithm.loss"
FAMILY = "own_loss"  # of its metrics in TensorBoard
PAGE = "docs/algorithms.md, A loss of your own"
TRIAL = "a row of four tokens"
# A failed device raises in whatever code uses it next, as do a full disk and exhausted memory.
OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError, OSError, MemoryError)
IDLE_TRIAL = "a row without loss tokens, as a rank without samples has"
FAR = 100.0  # nats between two policies: the ratio is beyond float32
FAR_TRIAL = f"a row of four tokens, of which one has become e^{FAR:g} times as likely, or as unlikely"


@cache
def load_own_loss(path: str, arguments: tuple[tuple[str, object], ...] = ()) -> OwnLoss:
    """Import and try a loss.  Raises ConfigError if it cannot be imported, raises, or breaks the contract.

    arguments: names and values of algorithm.loss_arguments.
    """
    loss, names = bound(LOSS_KEY, path, load(LOSS_KEY, path), ("current", "row"), dict(arguments)), set[str]()
    for trial, on in (
        (partial(_loss_problem, loss, names), TRIAL),
        (partial(_problem_when_idle, loss), IDLE_TRIAL),
        (partial(_problem_when_far, loss), FAR_TRIAL),
    ):
        if problem := try_out(LOSS_KEY, path, on, trial):
            raise ConfigError(f"{LOSS_KEY}={path!r}, tried on {on}: {problem} ({PAGE})")
    return OwnLoss(path, loss, tuple(sorted(names)))


def doubts_of_loss(own: OwnLoss) -> list[str]:
    """Return warnings about a loss that has passed its trial: legal behaviour that is seldom intended."""
    current, row = _trial_row()
    gradient = _value_and_gradient(own.loss, current, row)[1:]
    if torch.dot(gradient, row.advantages) <= 0:
        return []
    return [
        f"{LOSS_KEY}={own.path!r}, tried on {TRIAL}: it grows with the likelihood of tokens of positive advantage, and "
        f"is minimised: better answers would become rarer; usual: the other sign, -(row.weights * …).sum() ({PAGE})"
    ]


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A PolicyLoss; metrics get names that no other metric has, of one family: "a/0" becomes "own_loss/a_0".

    names: of all metrics in its trial.  They are summed over rows and ranks, so that every row needs all of them: a
    missing one counts as 0.
    """

    path: str
    loss: PolicyLoss
    names: tuple[str, ...]

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss.  Raises ConfigError: the loss raised, or returned other things than in its trial."""
        on = f"a row of {len(current)} tokens of a run"
        returned = try_out(LOSS_KEY, self.path, on, partial(self.loss, current, row), unless=OF_THE_MACHINE)
        if problem := _loss_misfit(returned) or _news(returned[1], self.names):
            raise ConfigError(f"{LOSS_KEY}={self.path!r} in a run: {problem} ({PAGE})")
        value, metrics = returned
        all_of_them = {name: metrics[name] if name in metrics else current.new_zeros(()) for name in self.names}
        return value, {f"{FAMILY}/{name.replace('/', '_')}": metric for name, metric in all_of_them.items()}


def _loss_misfit(returned: object) -> str:
    """Fault of a loss's return value, "" if none."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        return f"it returned {type(returned).__name__}; legal: the loss and its metrics, a pair"
    value, metrics = returned
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        return f"the loss is {got}; legal: one number, as a tensor: the sum over loss tokens"
    if not isinstance(metrics, Mapping) or not all(map(_is_metric, metrics.values())):
        return "metrics are not scalars without gradient, tensors by name; legal: {'name': value.detach().sum()}, or {}"
    return ""


def _is_metric(value: object) -> bool:
    return isinstance(value, Tensor) and not value.dim() and not value.requires_grad


def _news(metrics: Mapping[str, Tensor], names: Collection[str]) -> str:
    """Error text for metrics that are not among these names, "" if none."""
    others = sorted(set(metrics) - set(names))
    return f"metric {others[0]!r} is new; legal, as when it was tried: {', '.join(names) or 'none'}" if others else ""


def _trial_row() -> tuple[Tensor, TokenRow]:
    """Two sequences of two tokens."""
    return torch.tensor([-1.2, -1.8, -0.4, -1.6]), TokenRow(
        behaviour=torch.tensor([-1.0, -2.0, -0.5, -1.5]),
        proximal=torch.tensor([-1.1, -1.9, -0.6, -1.4]),
        reference=torch.tensor([-0.9, -2.1, -0.7, -1.3]),
        entropy=torch.tensor([1.2, 0.3, 0.8, 2.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        loss_mask=torch.ones(4, dtype=torch.bool),
        versions=torch.tensor([1, 2, 2, 2], dtype=torch.int32),
        weights=torch.tensor([0.5, 0.5, 2.0, 2.0]),  # as algorithm.aggregation has them, one for each sequence
        sequence=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
    )


def _loss_problem(loss: PolicyLoss, names: set[str]) -> str:
    """Fault of a loss on the trial row, "" if none.  names: the names of its metrics are added."""
    current, row = _trial_row()
    passed = current.clone().requires_grad_() * 1.0  # no leaf, as in a run: torch lets it be changed in place
    returned = loss(passed, row)
    if problem := _loss_misfit(returned) or _changed(passed, row) or _without_gradient(returned[0], passed):
        return problem
    names |= set(returned[1])
    return _broken_promise(loss, current, row)


def _problem_when_idle(loss: PolicyLoss) -> str:
    current, row = _trial_row()
    idle = replace(row, loss_mask=torch.zeros(4, dtype=torch.bool))
    passed = current.clone().requires_grad_()
    returned = loss(passed, idle)
    if problem := _loss_misfit(returned) or _without_gradient(returned[0], passed):
        return problem
    found = _value_and_gradient(loss, current, idle)
    return "loss or gradient is not 0; legal: 0, from torch.where(row.loss_mask, …, 0.0).sum()" if found.any() else ""


def _problem_when_far(loss: PolicyLoss) -> str:
    current, row = _trial_row()
    for place in (0, 3):  # of a good and of a bad sequence
        token = torch.tensor([place])
        near, far = current.index_fill(0, token, -1e-3), current.index_fill(0, token, -FAR)
        for now, then in ((near, far), (far, near)):
            found = _value_and_gradient(loss, now, replace(row, behaviour=then, proximal=then, reference=then))
            if not torch.isfinite(found).all():
                return (
                    "loss or gradient is not finite, so that one token would have every step skipped; legal: a bound "
                    "before exp, as (current - row.behaviour).clamp(-20, 20).exp()"
                )
    return ""


def _without_gradient(value: Tensor, current: Tensor) -> str:
    """Return an error for a loss that does not depend on `current` for torch, "" if it does."""
    if value.requires_grad and torch.autograd.grad(value, current, allow_unused=True)[0] is not None:
        return ""
    return (
        "the loss carries no gradient; legal: a torch expression of `current`, without detach(), item(), numpy() or "
        "torch.no_grad(), also where no token is on the loss mask"
    )


def _changed(current: Tensor, row: TokenRow) -> str:
    """Return words that name an argument of the trial that was changed in place, "" if none was."""
    before, given = _trial_row()
    fields = [each.name for each in fields_of(given) if isinstance(getattr(given, each.name), Tensor)]
    names = [f"row.{name}" for name in fields if not torch.equal(getattr(row, name), getattr(given, name))]
    names += [] if torch.equal(current, before) else ["current"]
    return f"it changes {names[0]} in place; legal: to leave its arguments as they are" if names else ""


def _broken_promise(loss: PolicyLoss, current: Tensor, row: TokenRow) -> str:
    """Violation of the rules on sum, mask and nan, in words; "" if none."""
    whole = _value_and_gradient(loss, current, row)
    if not torch.isfinite(whole).all():
        return "loss or gradient is not finite for finite numbers; legal: finite ones"
    apart = sum(_value_and_gradient(loss, *_sequence(current, row, index))[0] for index in (0, 1))
    if not torch.isclose(torch.as_tensor(apart), whole[0], rtol=1e-3, atol=1e-5):
        return (
            f"two sequences apart give {float(apart):.6g}, together {float(whole[0]):.6g}: not a sum over sequences; "
            "legal: .sum() over loss tokens, each times row.weights; the caller divides"
        )
    last, nan = torch.tensor([3]), torch.nan
    masked = replace(row, loss_mask=row.loss_mask.index_fill(0, last, False))
    noisy = replace(masked, **{n: getattr(row, n).index_fill(0, last, nan) for n in ("behaviour", "reference")})
    plain = _value_and_gradient(loss, current, masked)
    found = _value_and_gradient(loss, current.index_fill(0, last, nan), noisy)
    if not torch.equal(found[:4], plain[:4]) or found[4] != 0:
        return (
            "nan off the loss mask changes loss or gradient; legal: torch.where(row.loss_mask, …, 0.0) of every "
            "argument first, since 0 · nan is nan"
        )
    broken = _value_and_gradient(loss, current.index_fill(0, last, nan), row)
    hidden = "a log-probability of nan gives a finite loss, so that no step is skipped; legal: nan, not nan_to_num()"
    return _without_weights(loss, current, row, whole) if torch.isnan(broken[0]) else hidden


def _without_weights(loss: PolicyLoss, current: Tensor, row: TokenRow, whole: Tensor) -> str:
    """Return an error for a loss that does not grow with row.weights, "" if it does.  whole: of the unchanged row."""
    doubled = _value_and_gradient(loss, current, replace(row, weights=2 * row.weights))
    if torch.allclose(doubled, 2 * whole, rtol=1e-3, atol=1e-5):
        return ""
    return (
        f"twice row.weights give {float(doubled[0]):.6g} in place of {2 * float(whole[0]):.6g}, twice the loss, so "
        "that algorithm.aggregation would not be what the run file says; legal: each loss token times row.weights, as "
        "(row.weights * …).sum()"
    )


def _value_and_gradient(loss: PolicyLoss, current: Tensor, row: TokenRow) -> Tensor:
    """[1 + T]: the loss, and its gradient."""
    leaf = current.clone().requires_grad_()
    value, _ = loss(leaf, row)
    (gradient,) = torch.autograd.grad(value, leaf)
    return torch.cat([value.detach().reshape(1), gradient])


def _sequence(current: Tensor, row: TokenRow, index: int) -> tuple[Tensor, TokenRow]:
    here = row.sequence == index
    return current[here], TokenRow(
        behaviour=row.behaviour[here],
        proximal=row.proximal[here],
        reference=row.reference[here],
        entropy=row.entropy[here],
        advantages=row.advantages[here],
        loss_mask=row.loss_mask[here],
        versions=row.versions[here],
        weights=row.weights[here],
        sequence=torch.zeros(2, dtype=torch.int64),
        num_sequences=1,
    )


# ---------------------------------------------------------------------------------------------------------------- value
#
# The critic's loss: the squared error of its values, clipped around those at the start of the batch.
#
#     L = ½ · Σ_t a_t · max((V_t − R_t)², (V_t^clip − R_t)²)      V^clip = V_old + clip(V − V_old, −c, c)
#
# Clipping as in the PPO of Schulman's baselines (Andrychowicz et al. 2020, arXiv:2006.05990, §B.1); without: ½ (V −
# R)². a is the share of the token in the loss, 1 for a mean over tokens; the caller divides by the number of loss
# tokens.


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """A PolicyLoss of values [T] in the place of log-probabilities; row.advantages are returns, row.proximal V_old."""

    clip: float | None

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss; not finite: as there."""
        values, returns, old = (
            torch.where(row.loss_mask, each, 0.0) for each in (current, row.advantages, row.proximal.detach())
        )
        errors = (values - returns).square()
        is_clipped = torch.zeros_like(row.loss_mask)
        if self.clip is not None:
            change = values - old
            bounded = (old + change.clamp(-self.clip, self.clip) - returns).square()
            # Inside the bounds both are the same, but for a last bit that must not count.
            is_clipped = (change.abs() > self.clip) & (bounded > errors)
            errors = torch.where(is_clipped, bounded, errors)
        weights = torch.where(row.loss_mask, row.weights, 0.0)
        return 0.5 * (weights * errors).sum(), {"clipped": is_clipped.detach().float().sum()}


# ----------------------------------------------------------------------------------------------------------- supervised


def supervised_loss(current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
    """A PolicyLoss: cross-entropy with the tokens that are learnt, −Σ_t a_t · log π(t), of supervised fine-tuning."""
    logprobs = torch.where(row.loss_mask, current, 0.0)
    return -(torch.where(row.loss_mask, row.weights, 0.0) * logprobs).sum(), {}


# ----------------------------------------------------------------------------------------------------------- preference


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """A PolicyLoss of pairs, −Σ_t a_t · log σ(m), of direct preference optimisation.

    Rafailov et al. 2023, eq. 7 (arXiv:2305.18290): m = β · (log π/π_reference of the preferred answer − that of the
    other), the same for every token of a pair.  Sequences 2k and 2k + 1 of a row are one; advantages are 1 and −1.
    """

    beta: float

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss."""
        current, reference, weights = (
            torch.where(row.loss_mask, each, 0.0) for each in (current, row.reference.detach(), row.weights)
        )
        gains = torch.where(row.loss_mask, row.advantages, 0.0) * (current - reference)
        pair = row.sequence // 2
        margins = gains.new_zeros(row.num_sequences).index_add(0, pair, gains).mul(self.beta).index_select(0, pair)
        is_right = margins.detach() > 0
        return -(weights * torch.nn.functional.logsigmoid(margins)).sum(), {
            "preference_accuracy": (weights * is_right).sum(),
            "preference_margin": (weights * margins.detach()).sum(),
        }


# ------------------------------------------------------------------------------------------------------------ objective

MAX_LOG_RATIO = 20.0  # e²⁰ ≈ 5·10⁸: far beyond any sensible ratio, and its square still fits a float32


@dataclass(frozen=True, slots=True)
class TokenObjective:
    """The terms of every token of a row, [T] each.  Values off the loss mask do not count."""

    values: Tensor  # to be maximised; carries the gradient
    ratio: Tensor  # compared with the bounds, without gradient
    at_low: Tensor  # bool: the lower bound was reached; for a bound that cuts the gradient off, only if it did
    at_high: Tensor  # bool


class Objective(Protocol):
    """Objective of every token.  Independent of the sampler, whose distance from the anchor is the weight's part."""

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """current, anchor: log-probabilities [T] by the trained policy and by the policy at which its ratio is 1.

        All of them 0 off the loss mask, as in `row`.  Only `current` carries a gradient.
        """


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Difference of log-probabilities, clamped: one absurd token gives a huge ratio, not infinity, and no gradient."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def one_if_finite(*tensors: Tensor) -> Tensor:
    """1, or nan if any element is not finite.  Used as a factor, not an addend, so that nan reaches the gradient."""
    return 1.0 + torch.stack([(values.detach() * 0.0).sum() for values in tensors]).sum()


def sequence_sum(values: Tensor, row: TokenRow) -> Tensor:
    """Sum over the loss tokens of its sequence, for every token [T]; differentiable."""
    return _sums(torch.where(row.loss_mask, values, 0.0), row).index_select(0, row.sequence)


def sequence_mean(values: Tensor, row: TokenRow) -> Tensor:
    """Mean over the loss tokens of its sequence, for every token [T]; differentiable.  0 where there is none."""
    lengths = _sums(row.loss_mask.to(values.dtype), row).clamp(min=1.0)
    return (_sums(torch.where(row.loss_mask, values, 0.0), row) / lengths).index_select(0, row.sequence)


def _sums(values: Tensor, row: TokenRow) -> Tensor:
    return values.new_zeros(row.num_sequences).index_add(0, row.sequence, values)


# ---------------------------------------------------------------------------------------------------------------- cispo
#
# CISPO: REINFORCE weighted by a clipped ratio, so that every token keeps a gradient.
#
#     sg(clip(u, 1 − clip_low, 1 + clip_high)) · A · log π_current            u = π_current / π_anchor
#
# MiniMax 2025 (arXiv:2506.13585), where only the upper bound is used: clip_low = 1.


@dataclass(frozen=True, slots=True)
class ClippedWeight:
    """An Objective."""

    clip_low: float
    clip_high: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Tokens at a bound have a smaller (upper one) or larger weight, never none."""
        ratio = log_ratio(current.detach(), anchor).exp()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        return TokenObjective(ratio.clamp(low, high) * row.advantages * current, ratio, ratio < low, ratio > high)


# ----------------------------------------------------------------------------------------------------------------- dppo
#
# DPPO: a bound on how far the probability of the sampled token moves, and not on its ratio.
#
#     u · A, or 0 where A > 0 and π_current − π_anchor > clip_high, or A < 0 and π_current − π_anchor < −clip_low
#
# Qi et al. 2026 (arXiv:2602.04879), with the binary approximation of total variation.  A ratio holds back rare tokens,
# which hardly change the distribution, and lets likely ones go far.  The paper's anchor is the sampler
# (algorithm.proximal = "behaviour").  prime-rl's default loss is this with 0.2 and 0.2, and a penalty of 1e-3 on the
# square of log(π_current / π_anchor), which is missing here.  Differs from verl's: u is not truncated at 20.


@dataclass(frozen=True, slots=True)
class DivergenceMask:
    """An Objective; bounds are differences of probabilities."""

    clip_low: float
    clip_high: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Tokens without gradient are those that have gone far enough the way that their advantage shows."""
        ratio = log_ratio(current, anchor).exp()
        change = current.detach().exp() - anchor.exp()
        at_low = (row.advantages < 0) & (change < -self.clip_low)
        at_high = (row.advantages > 0) & (change > self.clip_high)
        return TokenObjective(
            torch.where(at_low | at_high, 0.0, ratio * row.advantages), ratio.detach(), at_low, at_high
        )


# ----------------------------------------------------------------------------------------------------------------- gmpo
#
# GMPO: the geometric mean of a sequence's clipped ratios.
#
#     A · (Π_t v_t)^(1 / |y|)     v = min(u, 1 + clip_high) where A > 0, max(u, 1 − clip_low) where A < 0
#
# Zhao et al. 2025 (arXiv:2507.20673), whose min(u·A, clip(u)·A) is |A| times that v for tokens of one advantage; their
# bounds e^±0.4 are clip_low = 0.33, clip_high = 0.49.  Every token of a sequence has its value: algorithm.aggregation =
# "sequence" gives the paper's loss.


@dataclass(frozen=True, slots=True)
class GeometricMean:
    """An Objective."""

    clip_low: float
    clip_high: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """A token at its bound has no gradient; the others of its sequence keep theirs."""
        ratios, is_good = log_ratio(current, anchor), row.advantages > 0
        low = math.log1p(-self.clip_low) if self.clip_low < 1 else -math.inf
        high = math.log1p(self.clip_high)
        bounded = torch.where(is_good, ratios.clamp(max=high), ratios.clamp(min=low))
        fixed = ratios.detach()
        return TokenObjective(
            sequence_mean(bounded, row).exp() * row.advantages,
            fixed.exp(),
            (fixed < low) & (row.advantages < 0),
            (fixed > high) & is_good,
        )


# ------------------------------------------------------------------------------------------------------------------ ppo
#
# PPO's clipped surrogate.
#
#     min(u · A, clip(u, 1 − clip_low, 1 + clip_high) · A)            u = π_current / π_anchor
#     where A < 0, with dual_clip = c:  max(that, c · A)
#
# Schulman et al. 2017, eq. 7 (arXiv:1707.06347).  Two bounds, the upper one wider ("clip-higher"): DAPO, Yu et al.
# 2025, §3.1 (arXiv:2503.14476).  Dual clip, c > 1: Ye et al. 2020 (arXiv:1912.09729).


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """An Objective."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Tokens without gradient are those that have gone far enough the way that their advantage shows."""
        ratio = log_ratio(current, anchor).exp()
        return clipped(ratio, row.advantages, self.clip_low, self.clip_high, self.dual_clip)


def clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenObjective:
    """The clipped surrogate of any ratios; all [T]."""
    low, high = 1.0 - clip_low, 1.0 + clip_high
    values = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    fixed, is_bad = ratio.detach(), advantages < 0
    at_high = (fixed > high) & (advantages > 0)
    if dual_clip is not None:
        values = torch.where(is_bad, torch.maximum(values, dual_clip * advantages), values)
        at_high = at_high | ((fixed > dual_clip) & is_bad)
    return TokenObjective(values, fixed, (fixed < low) & is_bad, at_high)


# ----------------------------------------------------------------------------------------------------------------- gspo
#
# GSPO: one ratio for a whole sequence, the geometric mean of those of its tokens.
#
#     min(s · A, clip(s, 1 − clip_low, 1 + clip_high) · A)            s = (π_current(y) / π_anchor(y))^(1 / |y|)
#
# Zheng et al. 2025 (arXiv:2507.18071).  Every token of a sequence has its value, so that with algorithm.aggregation =
# "sequence" the loss is the paper's; with "token" long sequences count more.  Bounds are some 1e-4: theirs are 3e-4 and
# 4e-4.


@dataclass(frozen=True, slots=True)
class SequenceSurrogate:
    """An Objective."""

    clip_low: float
    clip_high: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Sequences beyond the bound for their advantage's sign have no gradient."""
        ratio = sequence_mean(log_ratio(current, anchor), row).exp()
        return clipped(ratio, row.advantages, self.clip_low, self.clip_high, None)


# ------------------------------------------------------------------------------------------------------------ reinforce
#
# REINFORCE: A · log π, for the importance weight to correct.
#
# Williams 1992.  As PipelineRL uses it (Piché et al. 2025, arXiv:2509.19128): with algorithm.proximal = "current" the
# weight is π_current / π_behaviour, truncated at importance_cap, and no gradient flows through it.


def reinforce(current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
    """An Objective without bounds."""
    nothing = torch.zeros_like(row.loss_mask)
    return TokenObjective(row.advantages * current, log_ratio(current.detach(), anchor).exp(), nothing, nothing)


# ----------------------------------------------------------------------------------------------------------------- sapo
#
# SAPO: a soft gate in the place of a clip.
#
#     f(u) · A        f(u) = 4/τ · sigmoid(τ · (u − 1))        τ = τ_positive where A > 0, else τ_negative
#
# Gao et al. 2025 (arXiv:2511.20347).  The gradient is sech²(τ/2 · (u − 1)) of that of u · A: all of it at u = 1, less
# to both sides.


@dataclass(frozen=True, slots=True)
class SoftGate:
    """An Objective without bounds."""

    tau_positive: float
    tau_negative: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Both temperatures in units of 1 / ratio."""
        ratio = log_ratio(current, anchor).exp()
        positive, negative = (ratio.new_full((), tau) for tau in (self.tau_positive, self.tau_negative))
        tau = torch.where(row.advantages > 0, positive, negative)
        gate = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
        nothing = torch.zeros_like(row.loss_mask)
        return TokenObjective(gate * row.advantages, ratio.detach(), nothing, nothing)
