"""GAE and the value loss beside the formulas written out, token by token, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhpc.algorithms.estimators import packed_gae
from rlhpc.algorithms.objectives import ValueLoss
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.logprob import token_row
from tests.unit.training.packed_rows import draw_samples, dummy_row, pack_row


def gae_of(row: PackedMicrobatch, values: np.ndarray, discount: float, trace: float) -> tuple[np.ndarray, np.ndarray]:
    return packed_gae(row.advantages, values, row.loss_mask, row.cu_seqlens, discount=discount, trace=trace)


def drawn_row(seed: int, longest: int = 30) -> tuple[PackedMicrobatch, np.ndarray]:
    """Ragged sequences with rewards at random tokens, holes in the loss mask, one without any; and values."""
    rng = np.random.default_rng(seed)
    samples = draw_samples([int(n) for n in rng.integers(3, longest, 7)], seed=seed)
    for place, sample in enumerate(samples):
        mask = sample.loss_mask & (rng.random(len(sample.loss_mask)) < (0.7 if place else 0.0))
        rewards = np.where(mask & (rng.random(len(mask)) < 0.3), rng.normal(0, 1, len(mask)), 0)
        samples[place] = replace(sample, loss_mask=mask, advantages=rewards.astype(np.float32))
    row = pack_row(samples)
    return row, rng.normal(0, 1, len(row.token_ids)).astype(np.float32)


def textbook(row: PackedMicrobatch, values: np.ndarray, discount: float, trace: float) -> np.ndarray:
    """Equation 16 as a double sum."""
    advantages = np.zeros(len(row.token_ids))
    for first, last in zip(row.cu_seqlens, row.cu_seqlens[1:], strict=False):
        tokens = [t for t in range(first, last) if row.loss_mask[t]]
        v = [float(values[t]) for t in tokens] + [0.0]
        delta = [float(row.advantages[t]) + discount * v[n + 1] - v[n] for n, t in enumerate(tokens)]
        for n, t in enumerate(tokens):
            advantages[t] = sum((discount * trace) ** k * delta[n + k] for k in range(len(tokens) - n))
    return advantages


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize(("seed", "longest"), [(0, 30), (1, 30), (2, 30), (3, 400), (4, 400)])
def test_advantages_are_the_double_sum_of_the_paper(seed: int, longest: int, discount: float, trace: float) -> None:
    row, values = drawn_row(seed, longest)
    advantages, returns = gae_of(row, values, discount, trace)
    expected = textbook(row, values, discount, trace)
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    np.testing.assert_allclose(returns, np.where(row.loss_mask, expected + values, 0), atol=1e-12)


def test_without_decay_returns_are_the_rewards_that_are_still_to_come_whatever_the_values() -> None:
    row, values = drawn_row(7)
    _, returns = gae_of(row, values, 1.0, 1.0)
    _, others = gae_of(row, values * 0 - 3, 1.0, 1.0)
    np.testing.assert_allclose(returns, others, atol=1e-5)


def test_a_perfect_critic_leaves_no_advantage() -> None:
    (sample,) = draw_samples([12])
    rewards = np.zeros(12, np.float32)
    rewards[-1] = 1.0
    row = pack_row([replace(sample, advantages=rewards)])
    advantages, returns = gae_of(row, np.where(row.loss_mask, 1, 99).astype(np.float32), 1.0, 0.95)
    assert not advantages.any()
    assert returns.tolist() == row.loss_mask.astype(float).tolist()


def test_a_row_without_a_loss_token_has_none() -> None:
    advantages, returns = gae_of(dummy_row(), np.ones(1, np.float32), 1.0, 1.0)
    assert not advantages.any()
    assert not returns.any()


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_the_value_loss_and_its_gradient_are_the_formula(seed: int, clip: float | None) -> None:
    row, old = drawn_row(seed)
    rng = np.random.default_rng(seed)
    row = replace(row, loss_weights=rng.uniform(0.5, 2, len(row.loss_weights)).astype(np.float32))
    values = torch.tensor(old + rng.normal(0, 0.3, len(old)), dtype=torch.float32, requires_grad=True)
    loss, metrics = ValueLoss(clip)(values, token_row(row, torch.zeros(len(old)), proximal=torch.from_numpy(old)))
    loss.backward()
    expected, slopes, clipped = 0.0, np.zeros(len(old)), 0
    weights = np.repeat(row.loss_weights, np.diff(row.cu_seqlens)).astype(np.float64)
    for t in np.flatnonzero(row.loss_mask):
        v, v_old, r = float(values[t]), float(old[t]), float(row.advantages[t])
        plain, slope = (v - r) ** 2, v - r
        if clip is not None:
            bounded = v_old + min(max(v - v_old, -clip), clip)
            if (bounded - r) ** 2 > plain:
                clipped += 1
                plain, slope = (bounded - r) ** 2, 0.0 if abs(v - v_old) > clip else bounded - r
        expected += 0.5 * weights[t] * plain
        slopes[t] = weights[t] * slope
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(values.grad.numpy(), slopes, atol=2e-6)
    assert metrics["clipped"].item() == clipped


def test_what_is_not_finite_behind_the_mask_stays_there_and_before_it_shows() -> None:
    row, old = drawn_row(1)
    for where, is_finite in ((np.flatnonzero(~row.loss_mask)[0], True), (np.flatnonzero(row.loss_mask)[0], False)):
        values = torch.zeros(len(old))
        values[int(where)] = torch.nan
        values.requires_grad_()
        loss, _ = ValueLoss(None)(values, token_row(row, torch.zeros(len(old)), proximal=None))
        loss.backward()
        assert bool(loss.isfinite()) is bool(values.grad.isfinite().all()) is is_finite
