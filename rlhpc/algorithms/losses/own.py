"""A loss of the user's own: algorithm.loss = "package.module:name", any PolicyLoss.

Tried on two tiny sequences when it is loaded, for what a run would find out late: that it is a sum with a gradient,
that its metrics are scalars without one, that it leaves its arguments as they are, that tokens off the loss mask count
for nothing, also where all are, that row.weights count, that it stays finite for ratios beyond what float32 can hold,
and that it hides nothing that is not finite.  Checked each time that it is used, as far as that costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import cache, partial

import torch
from torch import Tensor

from rlhpc.contracts import PolicyLoss, TokenRow
from rlhpc.errors import ConfigError
from rlhpc.user_code import bound, load, try_out

KEY = "algorithm.loss"
FAMILY = "own_loss"  # of its metrics in TensorBoard
PAGE = "docs/algorithms.md, A loss of your own"
TRIAL = "a row of four tokens"
# A device that has failed says so to whoever uses it next, as do a full disk and memory that is used up.
OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError, OSError, MemoryError)
IDLE_TRIAL = "a row without loss tokens, as a rank without samples has"
FAR = 100.0  # nats between two policies: the ratio is beyond float32
FAR_TRIAL = f"a row of four tokens, of which one has become e^{FAR:g} times as likely, or as unlikely"


@cache
def load_own_loss(path: str, arguments: tuple[tuple[str, object], ...] = ()) -> OwnLoss:
    """Import it and try it.  Raises ConfigError if it cannot be imported, raises, or breaks the contract.

    arguments: names and values of algorithm.loss_arguments.
    """
    loss, names = bound(KEY, path, load(KEY, path), ("current", "row"), dict(arguments)), set[str]()
    for trial, on in (
        (partial(_problem, loss, names), TRIAL),
        (partial(_problem_when_idle, loss), IDLE_TRIAL),
        (partial(_problem_when_far, loss), FAR_TRIAL),
    ):
        if problem := try_out(KEY, path, on, trial):
            raise ConfigError(f"{KEY}={path!r}, tried on {on}: {problem} ({PAGE})")
    return OwnLoss(path, loss, tuple(sorted(names)))


def doubts_of(own: OwnLoss) -> list[str]:
    """Return warnings of a loss that has passed its trial: what is legal and seldom meant."""
    current, row = _trial_row()
    gradient = _value_and_gradient(own.loss, current, row)[1:]
    if torch.dot(gradient, row.advantages) <= 0:
        return []
    return [
        f"{KEY}={own.path!r}, tried on {TRIAL}: it grows with the likelihood of tokens of positive advantage, and is "
        f"minimised: better answers would become rarer; usual: the other sign, -(row.weights * …).sum() ({PAGE})"
    ]


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A PolicyLoss; metrics get names that no other metric has, of one family: "a/0" becomes "own_loss/a_0".

    names: of all metrics that it had when it was tried.  They are summed over rows and ranks, so that every row has to
    have all of them: one that it leaves out is 0 there.
    """

    path: str
    loss: PolicyLoss
    names: tuple[str, ...]

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss.  Raises ConfigError: it raised, or returned something else than when it was tried."""
        on = f"a row of {len(current)} tokens of a run"
        returned = try_out(KEY, self.path, on, partial(self.loss, current, row), unless=OF_THE_MACHINE)
        if problem := _misfit(returned) or _news(returned[1], self.names):
            raise ConfigError(f"{KEY}={self.path!r} in a run: {problem} ({PAGE})")
        value, metrics = returned
        all_of_them = {name: metrics[name] if name in metrics else current.new_zeros(()) for name in self.names}
        return value, {f"{FAMILY}/{name.replace('/', '_')}": metric for name, metric in all_of_them.items()}


def _misfit(returned: object) -> str:
    """What is wrong with what a loss has returned, "" if nothing."""
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
    """Metrics that are not among these, in words."""
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


def _problem(loss: PolicyLoss, names: set[str]) -> str:
    """What is wrong with it, "" if nothing.  names: gets those of its metrics."""
    current, row = _trial_row()
    passed = current.clone().requires_grad_() * 1.0  # no leaf, as in a run: torch lets it be changed in place
    returned = loss(passed, row)
    if problem := _misfit(returned) or _changed(passed, row) or _without_gradient(returned[0], passed):
        return problem
    names |= set(returned[1])
    return _broken_promise(loss, current, row)


def _problem_when_idle(loss: PolicyLoss) -> str:
    current, row = _trial_row()
    idle = replace(row, loss_mask=torch.zeros(4, dtype=torch.bool))
    passed = current.clone().requires_grad_()
    returned = loss(passed, idle)
    if problem := _misfit(returned) or _without_gradient(returned[0], passed):
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
    """Of sum, mask and nan, in words; "": none is broken."""
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
    """Return an error for a loss that does not grow with row.weights, "" if it does.  whole: of the row as it is."""
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
