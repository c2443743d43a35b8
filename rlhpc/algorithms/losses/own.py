"""A loss of the user's own: algorithm.loss = "package.module:name", any PolicyLoss.

Tried on two tiny sequences when it is loaded, for what a run would find out late: that it is a sum, that its metrics
are scalars without gradient, that what stands off the loss mask counts nothing, and that what is not finite is not
hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from rlhpc.contracts import PolicyLoss, TokenRow
from rlhpc.errors import ConfigError
from rlhpc.user_code import load, try_out

KEY = "algorithm.loss"
FAMILY = "own_loss"  # of its metrics in TensorBoard
TRIAL = "a row of four tokens"


@cache
def load_own_loss(path: str) -> PolicyLoss:
    """Import it and try it.  Raises ConfigError if it cannot be imported, raises, or breaks the contract."""
    loss = OwnLoss(load(KEY, path))
    if problem := try_out(KEY, path, TRIAL, partial(_problem, loss)):
        raise ConfigError(f"{KEY}={path!r}, tried on {TRIAL}: {problem} (rlhpc/contracts.py, PolicyLoss)")
    return loss


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A PolicyLoss; metrics get names that no other metric has, of one family: "a/0" becomes "own_loss/a_0"."""

    loss: PolicyLoss

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss."""
        value, metrics = self.loss(current, row)
        return value, {f"{FAMILY}/{name.replace('/', '_')}": number for name, number in metrics.items()}


def _problem(loss: PolicyLoss) -> str:
    """What is wrong with it, "" if nothing."""
    current = torch.tensor([-1.2, -1.8, -0.4, -1.6])
    row = TokenRow(
        behaviour=torch.tensor([-1.0, -2.0, -0.5, -1.5]),
        proximal=torch.tensor([-1.1, -1.9, -0.6, -1.4]),
        reference=torch.tensor([-0.9, -2.1, -0.7, -1.3]),
        entropy=torch.tensor([1.2, 0.3, 0.8, 2.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        loss_mask=torch.ones(4, dtype=torch.bool),
        versions=torch.tensor([1, 2, 2, 2], dtype=torch.int32),
        weights=torch.ones(4),
        sequence=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
    )
    whole, metrics = _value_and_gradient(loss, current, row)
    if not isinstance(metrics, Mapping) or any(value.dim() or value.requires_grad for value in metrics.values()):
        return "metrics are not scalars without gradient"
    if not torch.isfinite(whole).all():
        return "loss or gradient is not finite for finite numbers"
    apart = sum(_value_and_gradient(loss, *_sequence(current, row, index))[0][0] for index in (0, 1))
    if not torch.isclose(torch.as_tensor(apart), whole[0], rtol=1e-3, atol=1e-5):
        return f"two sequences apart give {float(apart):.6g}, together {float(whole[0]):.6g}: not a sum over sequences"
    last, nan = torch.tensor([3]), torch.nan
    masked = replace(row, loss_mask=row.loss_mask.index_fill(0, last, False))
    noisy = replace(masked, **{n: getattr(row, n).index_fill(0, last, nan) for n in ("behaviour", "reference")})
    plain, _ = _value_and_gradient(loss, current, masked)
    found, _ = _value_and_gradient(loss, current.index_fill(0, last, nan), noisy)
    if not torch.equal(found[:4], plain[:4]) or found[4] != 0:
        return "nan off the loss mask changes loss or gradient"
    broken, _ = _value_and_gradient(loss, current.index_fill(0, last, nan), row)
    return "" if torch.isnan(broken[0]) else "a log-probability of nan gives a finite loss, so that no step is skipped"


def _value_and_gradient(loss: PolicyLoss, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
    """[1 + T]: the loss, and its gradient."""
    leaf = current.clone().requires_grad_()
    value, metrics = loss(leaf, row)
    (gradient,) = torch.autograd.grad(value, leaf)
    return torch.cat([value.detach().reshape(1), gradient]), metrics


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
