"""The pull towards a reference and the bonus for entropy are their formulas, and their gradients what the page says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import papers
import pytest
import torch
from papers import POLICY_VERSION
from token_rows import ragged_row, token_row
from torch import Tensor

from rlhpc.algorithms.policy_loss import AnchoredLoss, divergence, make_policy_loss
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.contracts import TokenRow

ESTIMATORS = ("k1", "k2", "k3")
COEFFICIENTS = [(0.3, 0.0), (0.0, 0.2), (0.7, 0.05)]
SEEDS = range(4)


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, TokenRow]:
    """A ragged row with a reference and entropies; both mean something off the loss mask, too."""
    current, row = ragged_row(seed, dtype=dtype)
    draw = torch.Generator().manual_seed(100 + seed)
    distance, entropy = torch.randn(2, len(current), generator=draw, dtype=torch.float64)
    return current, replace(row, reference=current + 0.5 * distance.to(dtype), entropy=entropy.abs().to(dtype))


def evaluate(current: Tensor, row: TokenRow, **settings: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss, its gradients by log-probability and by entropy; metrics."""
    config = AlgorithmConfig.model_validate({"proximal": "recompute", **settings})
    leaves = [values.detach().clone().requires_grad_() for values in (current, row.entropy)]
    loss, metrics = make_policy_loss(config, POLICY_VERSION)(leaves[0], replace(row, entropy=leaves[1]))
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *gradients], metrics


def of_the_formula(current: Tensor, row: TokenRow, estimator: str, beta: float, eta: float) -> list[Tensor]:
    leaves = [values.double().clone().requires_grad_() for values in (current, row.entropy)]
    total = papers.added(*leaves, row, (estimator, beta), eta)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [total.detach(), *gradients]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "reinforce"])
@pytest.mark.parametrize(("beta", "eta"), COEFFICIENTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_what_is_added_is_the_formula_gradients_included(loss, beta, eta, estimator, dtype, tolerance) -> None:
    added = {"kl_coefficient": beta, "kl_estimator": estimator, "entropy_coefficient": eta}
    for seed in SEEDS:
        current, row = drawn(seed, dtype)
        plain, _ = evaluate(current, row, loss=loss)
        with_both, metrics = evaluate(current, row, loss=loss, **added)
        for before, after, expected in zip(plain, with_both, of_the_formula(current, row, estimator, beta, eta),
                                           strict=True):  # fmt: skip
            torch.testing.assert_close((after - before).double(), expected, rtol=tolerance, atol=tolerance)
        assert ("kl_reference" in metrics) == (beta > 0)


def test_the_figure_is_k3_whatever_the_loss_uses() -> None:
    current, row = drawn(0)
    expected = sum(
        float(papers.estimator("k3", torch.exp(current[t]), float(torch.exp(row.reference[t]))))
        for t in range(len(current))
        if row.loss_mask[t]
    )
    for estimator in ESTIMATORS:
        _, metrics = evaluate(current, row, kl_coefficient=0.1, kl_estimator=estimator)
        assert metrics["kl_reference"].item() == pytest.approx(expected, rel=1e-9)
        assert not metrics["kl_reference"].requires_grad


def test_what_rewards_pay_for_is_measured_and_not_in_the_loss() -> None:
    current, row = drawn(0)
    (plain, gradient, _), _ = evaluate(current, row)
    (loss, same_gradient, _), metrics = evaluate(current, row, kl_coefficient=0.1, kl_in="reward")
    assert torch.equal(loss, plain)
    assert torch.equal(same_gradient, gradient)
    _, in_loss = evaluate(current, row, kl_coefficient=0.1)
    assert metrics["kl_reference"] == in_loss["kl_reference"] > 0


def test_without_coefficients_the_loss_is_the_one_that_it_was() -> None:
    config = AlgorithmConfig(kl_coefficient=0.0, kl_estimator="k2", entropy_coefficient=0.0)
    assert isinstance(make_policy_loss(config, 3), AnchoredLoss)


@pytest.mark.parametrize(("estimator", "pulls"), [("k1", "nowhere"), ("k2", "reverse"), ("k3", "forward")])
def test_the_mean_gradient_over_a_policys_own_samples_is_that_of_a_divergence(estimator: str, pulls: str) -> None:
    """Enumerated over all tokens of a vocabulary; docs/algorithms.md says so."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=draw, dtype=torch.float64).requires_grad_()
    reference = torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0)
    current = logits.log_softmax(0)
    mean = (current.exp().detach() * divergence(reference - current, estimator)).sum()
    divergences = {
        "nowhere": 0.0 * logits.sum(),
        "reverse": (current.exp() * (current - reference)).sum(),
        "forward": (reference.exp() * (reference - current)).sum(),
    }
    (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
    gradients = {name: torch.autograd.grad(value, logits, retain_graph=True)[0] for name, value in divergences.items()}
    torch.testing.assert_close(found, gradients.pop(pulls), rtol=0, atol=1e-12)
    assert all((found - other).abs().max() > 0.01 for other in gradients.values())


@pytest.mark.parametrize(("estimator", "pulls"), [("k2", "reverse"), ("k3", "forward")])
def test_with_importance_it_is_that_divergence_whoever_has_sampled(estimator: str, pulls: str) -> None:
    """A row of every token of a vocabulary, each as often as another policy samples it."""
    draw = torch.Generator().manual_seed(1)
    logits, sampler, reference = torch.randn(3, 7, generator=draw, dtype=torch.float64)
    behaviour, reference = sampler.log_softmax(0), reference.log_softmax(0)
    logits.requires_grad_()
    current = logits.log_softmax(0)
    row = token_row(behaviour, reference=reference, weights=behaviour.exp(), advantages=torch.zeros_like(behaviour))
    found = {}
    for cap in ("off", 1.0):
        config = AlgorithmConfig(
            proximal="recompute", importance_cap=cap, kl_coefficient=1.0, kl_estimator=estimator, kl_importance=True
        )
        loss, _ = make_policy_loss(config, POLICY_VERSION)(current, row)
        (found[cap],) = torch.autograd.grad(loss, logits, retain_graph=True)
    divergences = {
        "reverse": (current.exp() * (current - reference)).sum(),
        "forward": (reference.exp() * (reference - current)).sum(),
    }
    (expected,) = torch.autograd.grad(divergences[pulls], logits)
    torch.testing.assert_close(found["off"], expected, rtol=0, atol=1e-12)
    assert (found[1.0] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("distance", [-1e4, -30.0, -1.0, 1.0, 30.0, 1e4])
def test_an_absurd_token_is_pulled_the_right_way_by_a_finite_number(estimator: str, distance: float) -> None:
    current = torch.tensor([-3.0])
    row = token_row(torch.tensor([-3.0]), reference=torch.tensor([-3.0 + distance]), advantages=torch.zeros(1))
    (loss, gradient, _), metrics = evaluate(current, row, kl_coefficient=1.0, kl_estimator=estimator)
    assert torch.isfinite(loss)
    assert torch.isfinite(metrics["kl_reference"])
    assert torch.isfinite(gradient).all()
    assert gradient.item() * distance < 0  # a step down the gradient goes towards the reference


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["reference", "entropy"])
def test_one_number_that_is_not_finite_skips_the_step_and_off_the_mask_anything_may_stand(
    name: str, bad: float
) -> None:
    settings = {"kl_coefficient": 0.1, "entropy_coefficient": 0.1}
    current, row = drawn(1)
    sound, metrics = evaluate(current, row, **settings)
    wild = replace(row, **{name: torch.where(row.loss_mask, getattr(row, name), bad)})
    found, found_metrics = evaluate(current, wild, **settings)
    assert all(torch.equal(here, there) for here, there in zip(found, sound, strict=True))
    assert all(torch.equal(found_metrics[key], metrics[key]) for key in metrics)
    values = getattr(row, name).clone()
    values[int(row.loss_mask.nonzero()[2])] = bad
    (loss, gradient, _), _ = evaluate(current, replace(row, **{name: values}), **settings)
    assert torch.isnan(loss)
    assert torch.isnan(gradient).any()


def test_a_loss_of_ones_own_is_pulled_and_rewarded_too(tmp_path, monkeypatch) -> None:
    own = "import torch\ndef loss(current, row):\n    return (current * row.weights)[row.loss_mask].sum(), {}\n"
    (tmp_path / "likelihood.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    current, row = drawn(2)
    plain, _ = evaluate(current, row, loss="likelihood:loss")
    found, metrics = evaluate(current, row, loss="likelihood:loss", kl_coefficient=0.3, entropy_coefficient=0.2)
    for before, after, added in zip(plain, found, of_the_formula(current, row, "k3", 0.3, 0.2), strict=True):
        torch.testing.assert_close(after - before, added)
    assert metrics.keys() == {"kl_reference"}
