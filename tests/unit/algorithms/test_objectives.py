"""Every objective and every importance weight is that of its paper, gradients included."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import papers
import pytest
import torch
from algorithm_rows import ragged_row, token_row
from papers import POLICY_VERSION, Sequence
from torch import Tensor

from rlhpc.algorithms.objectives import PreferenceLoss, supervised_loss
from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.contracts import TokenRow

Objective = Callable[[Sequence], list[Tensor]]
OBJECTIVES: dict[str, tuple[dict[str, Any], Objective]] = {
    "ppo": ({"loss": "ppo", "clip_low": 0.2, "clip_high": 0.28}, partial(papers.ppo, low=0.2, high=0.28)),
    "ppo, dual clip": (
        {"loss": "ppo", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.4},
        partial(papers.ppo, low=0.1, high=0.1, dual=1.4),
    ),
    "reinforce": ({"loss": "reinforce"}, papers.reinforce),
    "gspo": ({"loss": "gspo", "clip_low": 0.03, "clip_high": 0.04}, partial(papers.gspo, low=0.03, high=0.04)),
    "cispo": ({"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3}, partial(papers.cispo, low=1.0, high=0.3)),
    "cispo, both bounds": (
        {"loss": "cispo", "clip_low": 0.2, "clip_high": 0.3},
        partial(papers.cispo, low=0.2, high=0.3),
    ),
    "sapo": ({"loss": "sapo"}, partial(papers.sapo, positive=1.0, negative=1.05)),
    "sapo, steep": (
        {"loss": "sapo", "sapo_tau_positive": 3.0, "sapo_tau_negative": 5.0},
        partial(papers.sapo, positive=3.0, negative=5.0),
    ),
    "gmpo": ({"loss": "gmpo", "clip_low": 0.33, "clip_high": 0.49}, partial(papers.gmpo, low=0.33, high=0.49)),
    "dppo": ({"loss": "dppo", "clip_low": 0.05, "clip_high": 0.08}, partial(papers.dppo, low=0.05, high=0.08)),
    "gmpo, tight": ({"loss": "gmpo", "clip_low": 0.1, "clip_high": 0.1}, partial(papers.gmpo, low=0.1, high=0.1)),
}
WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"importance_cap": "off"}, {}),
    "truncated tokens": ({"importance_cap": 1.2}, {"cap": 1.2}),
    "truncated sequences": ({"importance_cap": 1.5, "importance_level": "sequence"}, {"cap": 1.5, "level": "sequence"}),
    "geometric mean": ({"importance_cap": 1.05, "importance_level": "geometric"}, {"cap": 1.05, "level": "geometric"}),
    "masked on both sides": (
        {"importance_cap": 2.0, "mask_below": 0.7, "mask_above": 1.4},
        {"cap": 2.0, "low": 0.7, "high": 1.4},
    ),
    "masked sequences": (
        {"importance_cap": "off", "importance_level": "geometric", "mask_below": 0.95, "mask_above": 1.05},
        {"level": "geometric", "low": 0.95, "high": 1.05},
    ),
    "veto": ({"importance_cap": 2.0, "veto_below": 0.45}, {"cap": 2.0, "veto": 0.45}),
    "drift": ({"importance_cap": 2.0, "veto_drift_above": 0.02}, {"cap": 2.0, "drift": 0.02}),
    "by age": ({"importance_cap": 2.0, "max_token_age": 2}, {"cap": 2.0, "max_age": 2}),
}
SEEDS = range(3)


def ours(current: Tensor, row: TokenRow, **settings: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    config = AlgorithmConfig.model_validate({"proximal": "recompute", **settings})
    leaf = current.clone().requires_grad_()
    loss, metrics = make_policy_loss(config, POLICY_VERSION)(leaf, row)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, metrics


def of_the_paper(
    current: Tensor, row: TokenRow, objective: Objective, anchor: Tensor, **weight: Any
) -> tuple[Tensor, Tensor]:
    leaf = current.double().requires_grad_()
    loss = papers.loss(leaf, anchor, row, objective, partial(papers.token_weights, **weight))
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    for ours_, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradient_are_those_of_the_paper(objective: str, weight: str) -> None:
    settings, formula = OBJECTIVES[objective]
    weight_settings, weight_formula = WEIGHTS[weight]
    for seed in SEEDS:
        current, row = ragged_row(seed)
        loss, gradient, _ = ours(current, row, **settings, **weight_settings)
        assert_same((loss, gradient), of_the_paper(current, row, formula, row.proximal, **weight_formula), 1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_float32_is_as_exact_as_it_can_be(objective: str) -> None:
    settings, formula = OBJECTIVES[objective]
    for seed in SEEDS:
        current, row = ragged_row(seed, dtype=torch.float32)
        loss, gradient, _ = ours(current, row, **settings, importance_cap=1.2)
        expected = of_the_paper(current, row, formula, row.proximal.double(), cap=1.2)
        assert loss.dtype == gradient.dtype == torch.float32
        assert_same((loss, gradient), expected, 2e-5)


def test_the_rows_of_these_tests_reach_every_bound() -> None:
    """Or the tests above would compare what no bound touches."""
    for name, (settings, _) in OBJECTIVES.items():
        totals: dict[str, float] = {}
        for seed in SEEDS:
            current, row = ragged_row(seed)
            for key, value in ours(current, row, **settings, importance_cap=1.2)[2].items():
                totals[key] = totals.get(key, 0.0) + value.item()
        assert totals["importance_capped"] > 0
        if settings["loss"] in ("ppo", "gspo", "gmpo", "dppo"):
            assert totals["clip_low"] > 0, name
            assert totals["clip_high"] > 0, name
    for name, (settings, _) in WEIGHTS.items():
        masked = [ours(*ragged_row(seed), **settings)[2]["importance_masked"].item() for seed in SEEDS]
        num_tokens = sum(int(ragged_row(seed)[1].loss_mask.sum()) for seed in SEEDS)
        is_masking = bool({"mask_below", "veto_below", "veto_drift_above", "max_token_age"} & set(settings))
        assert (0 < sum(masked) < num_tokens) == is_masking, name


@pytest.mark.parametrize("loss", ["ppo", "cispo", "reinforce", "sapo", "gspo", "gmpo", "dppo"])
def test_at_the_anchor_every_objective_pushes_by_the_advantage(loss: str) -> None:
    """Ratio 1: REINFORCE with the importance weight, for losses over sequences divided by their length."""
    current, row = ragged_row(0)
    _, gradient, metrics = ours(current, row, loss=loss, proximal="current", importance_cap="off")
    expected = torch.where(row.loss_mask, -row.weights * row.advantages, 0.0)
    torch.testing.assert_close(gradient, expected)
    assert metrics["ratio"].item() == pytest.approx(int(row.loss_mask.sum()))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_sequences_in_rows_of_their_own_give_the_same(objective: str) -> None:
    """What packing puts side by side does not mix."""
    current, row = ragged_row(1)
    settings = OBJECTIVES[objective][0] | {"importance_level": "sequence", "importance_cap": 1.5, "veto_below": 0.4}
    loss, gradient, metrics = ours(current, row, **settings)
    parts = []
    for index in range(row.num_sequences):
        here = row.sequence == index
        one = token_row(
            row.behaviour[here], proximal=row.proximal[here], advantages=row.advantages[here],
            loss_mask=row.loss_mask[here], versions=row.versions[here], weights=row.weights[here],
        )  # fmt: skip
        parts.append(ours(current[here], one, **settings))
    torch.testing.assert_close(torch.stack([part[0] for part in parts]).sum(), loss)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
    for name, value in metrics.items():
        torch.testing.assert_close(torch.stack([part[2][name] for part in parts]).sum(), value)


def test_decoupled_ppo_with_the_sampler_as_anchor_is_ppo() -> None:
    current, row = ragged_row(2)
    plain = ours(current, row, proximal="behaviour", importance_cap="off")
    same = token_row(
        row.behaviour, advantages=row.advantages, loss_mask=row.loss_mask, versions=row.versions, weights=row.weights,
        lengths=torch.bincount(row.sequence).tolist(),
    )  # fmt: skip
    decoupled = ours(current, same, proximal="recompute", importance_cap=2.0)
    assert torch.equal(plain[0], decoupled[0])
    assert torch.equal(plain[1], decoupled[1])


def test_only_what_was_bad_is_vetoed_for_its_drift() -> None:
    """What the policy should do less of, and would not do any more; what it should do more of stays."""
    behaviour, proximal = torch.full((6,), -1.0).double(), torch.tensor([-2.0, -1.2, -2.0, -1.2, -0.1, -0.1]).double()
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]).double()
    row = token_row(behaviour, proximal=proximal, advantages=advantages, lengths=[2, 2, 2])
    _, gradient, metrics = ours(proximal, row, loss="reinforce", importance_cap="off", veto_drift_above=0.5)
    assert gradient.tolist() == [0, 0, -1, -1, 1, 1]
    assert metrics["importance_masked"].item() == 2
    _, gradient, _ = ours(proximal, row, loss="reinforce", importance_cap="off", veto_drift_above=0.7)
    assert gradient.all()


def test_dppo_trusts_a_rare_token_whose_ratio_is_large_and_not_a_likely_one_whose_ratio_is_small() -> None:
    anchor, current = torch.tensor([0.001, 0.6, 0.6]).log().double(), torch.tensor([0.01, 0.9, 0.3]).log().double()
    row = token_row(anchor, advantages=torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64))
    settings = {"proximal": "behaviour", "importance_cap": "off", "clip_low": 0.2, "clip_high": 0.2}
    _, dppo, _ = ours(current, row, loss="dppo", **settings)
    torch.testing.assert_close(dppo, torch.tensor([-10.0, 0.0, -0.5], dtype=torch.float64), rtol=1e-6, atol=1e-9)
    _, ppo, _ = ours(current, row, loss="ppo", **settings)
    assert ppo[0] == 0  # the ratio of 10 that changes the distribution by less than a hundredth


def test_a_sequence_that_is_masked_is_a_zero_and_not_a_smaller_denominator() -> None:
    current, row = ragged_row(3)
    loss, gradient, metrics = ours(current, row, veto_below=0.999, importance_cap="off")
    assert metrics["importance_masked"].item() == int(row.loss_mask.sum())
    assert loss.item() == 0
    assert not gradient.any()


@pytest.mark.parametrize("loss", ["ppo", "cispo", "reinforce", "sapo", "gspo", "gmpo", "dppo"])
def test_nothing_pushes_a_token_that_is_masked(loss: str) -> None:
    """A ratio of a whole sequence would, from the other tokens of it, if the masked one were a part of that."""
    for seed in SEEDS:
        current, row = ragged_row(seed)
        _, gradient, _ = ours(current, row, loss=loss, clip_low=0.9, clip_high=9.0, max_token_age=2)
        is_masked = row.loss_mask & (row.versions < POLICY_VERSION - 2)
        assert is_masked.any()
        assert not gradient[is_masked].any()
        assert gradient[row.loss_mask & ~is_masked].any()


def test_what_a_mask_cuts_out_may_be_absurd_but_not_infinite() -> None:
    """A masked token that is infinite still skips the step: something is wrong with the trainer."""
    current, row = ragged_row(4)
    place = int(row.loss_mask.nonzero()[5])
    current[place] = -1e4
    loss, gradient, _ = ours(current, row, max_token_age=0, proximal="behaviour")
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    current[place] = float("nan")
    loss, _, _ = ours(current, row, max_token_age=0, proximal="behaviour")
    assert torch.isnan(loss)


def test_figures_of_all_ages_together_are_those_of_all_tokens() -> None:
    current, row = ragged_row(5)
    _, _, metrics = ours(current, row, importance_cap=1.2)
    for name in ("importance_weight", "importance_weight_squared", "mismatch_kl", "kl_k3"):
        by_age = sum(metrics[f"age_{name}/{age}"].item() for age in range(5))
        assert by_age == pytest.approx(metrics[name].item(), rel=1e-5)
    ages = torch.where(row.loss_mask, POLICY_VERSION - row.versions, -1)
    for age in range(5):
        assert metrics[f"age_tokens/{age}"].item() == int((ages == age).sum() if age < 4 else (ages >= 4).sum())


def test_supervised_loss_is_cross_entropy_of_what_is_learnt_whatever_stands_elsewhere() -> None:
    current, row = ragged_row(0)
    leaf = torch.where(row.loss_mask, current, torch.nan).requires_grad_()
    loss, metrics = supervised_loss(leaf, replace(row, weights=torch.where(row.loss_mask, 0.5, torch.nan)))
    (gradient,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(loss.detach(), -0.5 * current[row.loss_mask].sum())
    assert gradient.tolist() == (-0.5 * row.loss_mask).tolist()
    assert not metrics


def test_preference_loss_is_that_of_dpo_in_pairs_of_sequences_whatever_stands_elsewhere() -> None:
    """Rafailov et al. 2023, eq. 7, pair by pair; a fifth sequence is a row's filling, without loss tokens."""
    current, row = ragged_row(0)
    mask = row.loss_mask & (row.sequence < 4)
    signs = torch.where(row.sequence % 2 == 0, 1.0, -1.0).double()
    reference = torch.where(mask, row.behaviour, torch.nan).requires_grad_()
    shares = torch.where(mask, (1 + row.sequence // 2).double(), torch.nan)
    leaf = torch.where(mask, current, torch.nan).requires_grad_()
    row = replace(row, loss_mask=mask, reference=reference, advantages=signs, weights=shares)
    loss, metrics = PreferenceLoss(0.3)(leaf, row)
    gradient, of_reference = torch.autograd.grad(loss, [leaf, reference], allow_unused=True)
    assert of_reference is None
    wanted, expected = 0.0, torch.zeros_like(current)
    right = margins = 0.0
    for pair in (0, 1):
        here = [mask & (row.sequence == 2 * pair + place) for place in (0, 1)]
        gains = [float((current - row.behaviour)[each].sum()) for each in here]
        margin, weight = 0.3 * (gains[0] - gains[1]), (1 + pair) * int((here[0] | here[1]).sum())
        wanted += weight * math.log1p(math.exp(-margin))
        expected[here[0]], expected[here[1]] = (sign * weight * 0.3 / (1 + math.exp(margin)) for sign in (-1, 1))
        right, margins = right + weight * (margin > 0), margins + weight * margin
    torch.testing.assert_close(loss.item(), wanted)
    torch.testing.assert_close(gradient, expected)
    found = {name: each.item() for name, each in metrics.items()}
    assert found == pytest.approx({"preference_accuracy": right, "preference_margin": margins})
    broken = replace(row, reference=torch.where(mask, torch.nan, 0.0))
    assert math.isnan(PreferenceLoss(0.3)(leaf, broken)[0].item())  # so that the step is skipped
