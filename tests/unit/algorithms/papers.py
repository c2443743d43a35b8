"""Losses as their papers write them: a loop over sequences, and one over tokens, in float64.

Independent of rlhpc/algorithms: nothing is imported from there, nothing is vectorised, nothing is clamped for safety.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from rlhpc.protocol.contracts import TokenRow

POLICY_VERSION = 7


@dataclass(frozen=True)
class Sequence:
    """Only its loss tokens."""

    current: Tensor  # [n], of the tensor that is differentiated
    anchor: Tensor
    behaviour: Tensor
    ages: list[int]
    advantage: float
    weight: float


def sequences(current: Tensor, anchor: Tensor, row: TokenRow) -> Iterator[Sequence]:
    """The completions of a row."""
    borders = [0, *(torch.bincount(row.sequence).cumsum(0).tolist())]
    for start, end in pairwise(borders):
        places = [t for t in range(start, end) if row.loss_mask[t]]
        yield Sequence(
            current=torch.stack([current[t] for t in places]),
            anchor=torch.tensor([anchor[t].item() for t in places], dtype=torch.float64),
            behaviour=torch.tensor([row.behaviour[t].item() for t in places], dtype=torch.float64),
            ages=[POLICY_VERSION - int(row.versions[t]) for t in places],
            advantage=float(row.advantages[places[0]]),
            weight=float(row.weights[places[0]]),
        )


# Objectives: one number per token of a sequence.


def ppo(one: Sequence, low: float, high: float, dual: float | None = None) -> list[Tensor]:
    values = []
    for t in range(len(one.current)):
        ratio = torch.exp(one.current[t] - one.anchor[t])
        value = torch.min(ratio * one.advantage, torch.clip(ratio, 1 - low, 1 + high) * one.advantage)
        if dual is not None and one.advantage < 0:
            value = torch.max(value, torch.tensor(dual * one.advantage, dtype=torch.float64))
        values.append(value)
    return values


def reinforce(one: Sequence) -> list[Tensor]:
    return [one.advantage * one.current[t] for t in range(len(one.current))]


def gspo(one: Sequence, low: float, high: float) -> list[Tensor]:
    quotient = torch.exp(one.current.sum()) / torch.exp(one.anchor.sum())  # of the probabilities of the whole sequence
    ratio = quotient ** (1 / len(one.current))
    value = torch.min(ratio * one.advantage, torch.clip(ratio, 1 - low, 1 + high) * one.advantage)
    return [value] * len(one.current)


def cispo(one: Sequence, low: float, high: float) -> list[Tensor]:
    values = []
    for t in range(len(one.current)):
        ratio = float(torch.exp(one.current[t].detach() - one.anchor[t]))
        values.append(min(max(ratio, 1 - low), 1 + high) * one.advantage * one.current[t])
    return values


def sapo(one: Sequence, positive: float, negative: float) -> list[Tensor]:
    tau = positive if one.advantage > 0 else negative
    values = []
    for t in range(len(one.current)):
        ratio = torch.exp(one.current[t] - one.anchor[t])
        values.append(4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * one.advantage)
    return values


def gmpo(one: Sequence, low: float, high: float) -> list[Tensor]:
    product = torch.ones((), dtype=torch.float64)
    for t in range(len(one.current)):
        ratio = torch.exp(one.current[t] - one.anchor[t])
        product = product * torch.min(ratio * one.advantage, torch.clip(ratio, 1 - low, 1 + high) * one.advantage).abs()
    sign = 1.0 if one.advantage > 0 else -1.0
    return [sign * product ** (1 / len(one.current))] * len(one.current)


def dppo(one: Sequence, low: float, high: float) -> list[Tensor]:
    values = []
    for t in range(len(one.current)):
        ratio = torch.exp(one.current[t]) / torch.exp(one.anchor[t])
        change = float(torch.exp(one.current[t]) - torch.exp(one.anchor[t]))
        is_trusted = change <= high if one.advantage > 0 else change >= -low
        values.append(ratio * one.advantage * is_trusted)
    return values


# Weights: one number per token, without gradient.


def token_weights(
    one: Sequence,
    *,
    level: str = "token",
    cap: float | None = None,
    low: float = 0.0,
    high: float = float("inf"),
    veto: float = 0.0,
    drift: float = float("inf"),
    max_age: int | None = None,
) -> list[float]:
    ratios = [float(torch.exp(a - b)) for a, b in zip(one.anchor, one.behaviour, strict=True)]
    product = 1.0
    for ratio in ratios:
        product *= ratio
    divergence = float((one.behaviour - one.anchor).mean())
    weights = []
    for ratio, age in zip(ratios, one.ages, strict=True):
        weight = {"token": ratio, "sequence": product, "geometric": product ** (1 / len(ratios))}[level]
        is_out = (
            weight < low
            or weight > high
            or min(ratios) < veto
            or (one.advantage < 0 and divergence > drift)
            or (max_age is not None and age > max_age)
        )
        used = 1.0 if cap is None else min(weight, cap)
        weights.append(0.0 if is_out else used)
    return weights


def loss(
    current: Tensor,
    anchor: Tensor,
    row: TokenRow,
    objective: Callable[[Sequence], list[Tensor]],
    weights: Callable[[Sequence], list[float]],
) -> Tensor:
    """Minus the sum over all tokens of share times weight times objective; what is masked is not there at all."""
    total = 0.0 * current.sum()
    for one in sequences(current, anchor, row):
        found = weights(one)
        kept = [t for t, weight in enumerate(found) if weight > 0]
        if not kept:
            continue
        rest = replace(one, current=one.current[kept], anchor=one.anchor[kept])
        for value, t in zip(objective(rest), kept, strict=True):
            total = total - one.weight * found[t] * value
    return total


# What is added to a loss: a pull towards a reference, a bonus for entropy.


def estimator(name: str, probability: Tensor, of_reference: float) -> Tensor:
    """Of one sampled token, as in Schulman's note, where r = of_reference / probability."""
    ratio = of_reference / probability
    if name == "k1":
        return -torch.log(ratio)
    if name == "k2":
        return torch.log(ratio) ** 2 / 2
    return (ratio - 1) - torch.log(ratio)


def added(current: Tensor, entropy: Tensor, row: TokenRow, kl: tuple[str, float], bonus: float) -> Tensor:
    """Sum over loss tokens.  kl: estimator and coefficient; bonus: coefficient of entropy."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(current)):
        if row.loss_mask[t]:
            of_reference = float(torch.exp(row.reference[t].double()))
            term = estimator(kl[0], torch.exp(current[t]), of_reference)
            total = total + float(row.weights[t]) * (kl[1] * term - bonus * entropy[t])
    return total
