"""The loss on plain numbers, and what is added to it: a pull towards a reference, a bonus for entropy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import papers
import pytest
import torch
from algorithm_rows import ragged_row, token_row
from papers import POLICY_VERSION
from torch import Tensor

from rlhpc.algorithms.policy_loss import current_share, divergence, loglinear_anchor, make_policy_loss
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.contracts import TokenRow

# -------------------------------------------------------------------------------------------------------------- losses

NUM_TOKENS = 64


def tokens(seed: int = 0, spread: float = 0.4) -> dict[str, Tensor]:
    """Log-probabilities of three policies that differ enough to clip and to cap."""
    draw = torch.Generator().manual_seed(seed)
    base = -3 * torch.rand(NUM_TOKENS, generator=draw)
    noise = [spread * torch.randn(NUM_TOKENS, generator=draw) for _ in range(3)]
    loss_mask = torch.rand(NUM_TOKENS, generator=draw) < 0.7
    advantages = torch.where(loss_mask, torch.randn(NUM_TOKENS, generator=draw), torch.zeros(NUM_TOKENS))
    return {
        "current": base + noise[0],
        "behaviour": base + noise[1],
        "proximal": base + noise[2],
        "advantages": advantages,
        "loss_mask": loss_mask,
    }


def evaluate(batch: dict[str, Tensor], **settings: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, its gradient with respect to the current log-probabilities, and metrics."""
    current = batch["current"].clone().requires_grad_()
    row = token_row(**{name: values for name, values in batch.items() if name != "current"})
    loss, metrics = make_policy_loss(AlgorithmConfig(**({"proximal": "recompute"} | settings)), POLICY_VERSION)(
        current, row
    )
    (gradient,) = torch.autograd.grad(loss, current)
    return loss.detach(), gradient, {name: value.item() for name, value in metrics.items()}


def one(**values: float) -> dict[str, Tensor]:
    """A single loss token; log-probabilities default to −1, the advantage to 1."""
    defaults = {"current": -1.0, "behaviour": -1.0, "proximal": -1.0, "advantages": 1.0}
    return {name: torch.tensor([value]) for name, value in (defaults | values).items()} | {
        "loss_mask": torch.tensor([True])
    }


def test_gradient_equals_that_of_the_formula_written_out_token_by_token() -> None:
    batch = tokens()
    current = batch["current"].clone().requires_grad_()
    total = torch.zeros(())
    for t in range(NUM_TOKENS):
        if not batch["loss_mask"][t]:
            continue
        ratio = torch.exp(current[t] - batch["proximal"][t])
        weight = min(float(torch.exp(batch["proximal"][t] - batch["behaviour"][t])), 1.5)
        advantage = batch["advantages"][t]
        total = total - weight * torch.min(ratio * advantage, torch.clip(ratio, 0.9, 1.3) * advantage)
    (expected,) = torch.autograd.grad(total, current)
    loss, gradient, metrics = evaluate(batch, clip_low=0.1, clip_high=0.3, importance_cap=1.5)
    torch.testing.assert_close(loss, total.detach())
    torch.testing.assert_close(gradient, expected)
    assert metrics["clip_low"] > 0
    assert metrics["clip_high"] > 0
    assert metrics["importance_capped"] > 0


def test_the_first_on_policy_step_is_reinforce_with_the_group_s_baseline() -> None:
    batch = tokens()
    batch["behaviour"] = batch["proximal"] = batch["current"]
    loss, gradient, metrics = evaluate(batch)
    torch.testing.assert_close(gradient, -batch["advantages"])
    torch.testing.assert_close(loss, -batch["advantages"].sum())
    num_loss_tokens = int(batch["loss_mask"].sum())
    assert metrics["ratio"] == metrics["importance_weight"] == num_loss_tokens
    assert metrics["kl_k1"] == metrics["kl_k3"] == metrics["mismatch_abs"] == metrics["clip_high"] == 0


def test_loss_and_metrics_add_up_over_micro_batches() -> None:
    batch = tokens()
    whole_loss, whole_gradient, whole_metrics = evaluate(batch)
    parts = [evaluate({name: values[half] for name, values in batch.items()}) for half in (slice(20), slice(20, None))]
    torch.testing.assert_close(sum(loss for loss, _, _ in parts), whole_loss)
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in parts]), whole_gradient)
    for name, value in whole_metrics.items():
        assert sum(metrics[name] for _, _, metrics in parts) == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("filling", [0.0, 1e30, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_what_stands_behind_the_mask_changes_nothing(filling: float, proximal: str) -> None:
    batch = tokens()
    batch["versions"] = torch.where(batch["loss_mask"], torch.arange(NUM_TOKENS) % 6, -1).to(torch.int32)
    changed = {
        name: values if name in ("loss_mask", "versions") else torch.where(batch["loss_mask"], values, filling)
        for name, values in batch.items()
    }
    loss, gradient, metrics = evaluate(batch, proximal=proximal)
    changed_loss, changed_gradient, changed_metrics = evaluate(changed, proximal=proximal)
    assert torch.equal(changed_loss, loss)
    assert torch.equal(changed_gradient, gradient)
    assert changed_metrics == metrics
    assert not gradient[~batch["loss_mask"]].any()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [
        (0.22, 1.0, True),  # ratio 1.246: above 1 + clip_low, below 1 + clip_high
        (0.30, 1.0, False),  # ratio 1.35: a good token has gone up enough
        (0.30, -1.0, True),  # a bad token that went up is still pushed down
        (-0.22, -1.0, True),  # ratio 0.803: above 1 − clip_low
        (-0.30, -1.0, False),  # ratio 0.741: a bad token has gone down enough
        (-0.30, 1.0, True),  # a good token that went down is still pulled up
    ],
)
def test_good_tokens_may_rise_further_than_bad_ones_may_fall(log_ratio: float, advantage: float, moves: bool) -> None:
    batch = one(current=-1.0 + log_ratio, advantages=advantage)
    _, gradient, metrics = evaluate(batch, clip_low=0.2, clip_high=0.28)
    assert bool(gradient.any()) == moves
    assert metrics["clip_high"] == float(not moves and advantage > 0)
    assert metrics["clip_low"] == float(not moves and advantage < 0)


def test_without_a_cap_there_is_no_weight_but_its_figures_remain() -> None:
    _, gradient, metrics = evaluate(one(behaviour=-4.0), importance_cap="off")
    assert gradient.item() == -1.0
    assert metrics["importance_weight"] == pytest.approx(np.exp(3.0))
    assert metrics["importance_capped"] == 0


def test_no_gradient_flows_through_weight_behaviour_or_proximal() -> None:
    batch = tokens()
    leaves = {name: batch[name].clone().requires_grad_() for name in ("current", "behaviour", "proximal", "advantages")}
    row = token_row(**{name: leaves[name] for name in leaves if name != "current"}, loss_mask=batch["loss_mask"])
    loss, metrics = make_policy_loss(AlgorithmConfig(proximal="recompute"), 0)(leaves["current"], row)
    loss.backward()
    assert leaves["current"].grad is not None
    assert all(leaves[name].grad is None for name in ("behaviour", "proximal", "advantages"))
    assert not any(value.requires_grad for value in metrics.values())


def test_kl_figures_estimate_the_divergence_of_known_distributions() -> None:
    """Expectation over the sampler's distribution, written as a weighted sum of two outcomes."""
    behaviour, current = torch.tensor([0.7, 0.3]), torch.tensor([0.6, 0.4])
    exact = float((behaviour * (behaviour / current).log()).sum())
    k1 = k3 = 0.0
    for share, new in zip(behaviour.tolist(), current.tolist(), strict=True):
        _, _, metrics = evaluate(one(behaviour=np.log(share), proximal=np.log(share), current=np.log(new)))
        k1 += share * metrics["kl_k1"]
        k3 += share * metrics["kl_k3"]
        assert metrics["kl_k3"] >= 0
    assert k1 == pytest.approx(exact, rel=1e-5)
    assert k3 == pytest.approx(exact, rel=1e-4)


def test_mismatch_is_between_sampler_and_proximal_policy() -> None:
    _, _, metrics = evaluate(one(behaviour=-1.5, proximal=-1.25, current=-9.0))
    assert metrics["mismatch_abs"] == pytest.approx(0.25)
    assert metrics["mismatch_kl"] == pytest.approx(np.exp(0.25) - 1.25, rel=1e-5)


def test_an_absurd_but_finite_token_stays_finite() -> None:
    for batch in (one(current=-1e4), one(behaviour=-1e4), one(proximal=-1e4, advantages=-1.0)):
        loss, gradient, metrics = evaluate(batch, importance_cap="off")
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["current", "behaviour", "proximal", "advantages"])
def test_one_number_that_is_not_finite_makes_loss_and_gradient_nan_so_that_the_step_is_skipped(
    name: str, bad: float
) -> None:
    batch = tokens()
    first = int(batch["loss_mask"].nonzero()[0])
    batch[name] = batch[name].clone()
    batch[name][first] = bad
    loss, gradient, _ = evaluate(batch)
    assert torch.isnan(loss)
    assert torch.isnan(gradient).any()


def test_a_row_without_loss_tokens_gives_zero_and_not_nan() -> None:
    batch = tokens() | {"loss_mask": torch.zeros(NUM_TOKENS, dtype=torch.bool)}
    loss, gradient, metrics = evaluate(batch)
    assert loss == 0
    assert not gradient.any()
    assert set(metrics.values()) == {0.0}


def test_the_share_of_the_current_policy_grows_with_the_token_s_age() -> None:
    versions = torch.tensor([-1, 7, 6, 5, 4, 2], dtype=torch.int32)
    torch.testing.assert_close(current_share(versions, 6), torch.tensor([0, 0, 0, 0, 0.5, 0.75]))


@pytest.mark.parametrize("proximal", ["recompute", "loglinear", "behaviour"])
@pytest.mark.parametrize("age", [0, 1])
def test_several_steps_on_a_batch_clip_what_its_own_version_sampled(proximal: str, age: int) -> None:
    """The sampler is the policy at the start of the batch; a step later a good token has risen by exp(0.5)."""
    batch = one(current=-0.5, behaviour=-1.0, proximal=-1.0, advantages=1.0, versions=POLICY_VERSION - age)
    _, gradient, metrics = evaluate(batch, proximal=proximal)
    assert not gradient.any()
    assert metrics["clip_high"] == 1.0


def test_loglinear_anchors_between_sampler_and_current_policy_without_gradient() -> None:
    batch = tokens()
    versions = torch.where(batch["loss_mask"], torch.arange(NUM_TOKENS) % 6, -1).to(torch.int32)
    share = current_share(versions, POLICY_VERSION)
    current = batch["current"].clone().requires_grad_()
    anchor = loglinear_anchor(batch["behaviour"], current, versions, POLICY_VERSION)
    assert not anchor.requires_grad
    torch.testing.assert_close(anchor, (1 - share) * batch["behaviour"] + share * batch["current"])
    by_age = evaluate(batch | {"versions": versions}, proximal="loglinear")
    by_anchor = evaluate(batch | {"proximal": anchor}, proximal="recompute")
    assert torch.equal(by_age[0], by_anchor[0])
    assert torch.equal(by_age[1], by_anchor[1])


def test_the_current_policy_as_proximal_gives_the_same_gradient_as_recomputing_it() -> None:
    rng = np.random.default_rng(0)
    behaviour, advantages = (torch.from_numpy(rng.normal(size=12).astype(np.float32)) for _ in range(2))
    start = torch.from_numpy(rng.normal(size=12).astype(np.float32))
    mask = torch.tensor([True] * 11 + [False])
    gradients = []
    for proximal in ("current", "recompute"):
        current = start.clone().requires_grad_()
        row = token_row(behaviour, proximal=start.clone(), advantages=advantages, loss_mask=mask)
        loss, _ = make_policy_loss(AlgorithmConfig(proximal=proximal), 0)(current, row)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(current.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


# -------------------------------------------- The pull towards a reference and the bonus for entropy are their formulas

ESTIMATORS = ("k1", "k2", "k3")
COEFFICIENTS = [(0.3, 0.0), (0.0, 0.2), (0.7, 0.05)]
SEEDS = range(2)


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, TokenRow]:
    """A ragged row with a reference and entropies; both mean something off the loss mask, too."""
    current, row = ragged_row(seed, dtype=dtype)
    draw = torch.Generator().manual_seed(100 + seed)
    distance, entropy = torch.randn(2, len(current), generator=draw, dtype=torch.float64)
    return current, replace(row, reference=current + 0.5 * distance.to(dtype), entropy=entropy.abs().to(dtype))


def evaluate_added(current: Tensor, row: TokenRow, **settings: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
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
        plain, _ = evaluate_added(current, row, loss=loss)
        with_both, metrics = evaluate_added(current, row, loss=loss, **added)
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
        _, metrics = evaluate_added(current, row, kl_coefficient=0.1, kl_estimator=estimator)
        assert metrics["kl_reference"].item() == pytest.approx(expected, rel=1e-9)
        assert not metrics["kl_reference"].requires_grad


def test_what_rewards_pay_for_is_measured_and_not_in_the_loss() -> None:
    current, row = drawn(0)
    (plain, gradient, _), _ = evaluate_added(current, row)
    (loss, same_gradient, _), metrics = evaluate_added(current, row, kl_coefficient=0.1, kl_in="reward")
    assert torch.equal(loss, plain)
    assert torch.equal(same_gradient, gradient)
    _, in_loss = evaluate_added(current, row, kl_coefficient=0.1)
    assert metrics["kl_reference"] == in_loss["kl_reference"] > 0


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
    (loss, gradient, _), metrics = evaluate_added(current, row, kl_coefficient=1.0, kl_estimator=estimator)
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
    sound, metrics = evaluate_added(current, row, **settings)
    wild = replace(row, **{name: torch.where(row.loss_mask, getattr(row, name), bad)})
    found, found_metrics = evaluate_added(current, wild, **settings)
    assert all(torch.equal(here, there) for here, there in zip(found, sound, strict=True))
    assert all(torch.equal(found_metrics[key], metrics[key]) for key in metrics)
    values = getattr(row, name).clone()
    values[int(row.loss_mask.nonzero()[2])] = bad
    (loss, gradient, _), _ = evaluate_added(current, replace(row, **{name: values}), **settings)
    assert torch.isnan(loss)
    assert torch.isnan(gradient).any()


def test_a_loss_of_ones_own_is_pulled_and_rewarded_too(tmp_path, monkeypatch) -> None:
    own = "import torch\ndef loss(current, row):\n    return (current * row.weights)[row.loss_mask].sum(), {}\n"
    (tmp_path / "likelihood.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    current, row = drawn(2)
    plain, _ = evaluate_added(current, row, loss="likelihood:loss")
    found, metrics = evaluate_added(current, row, loss="likelihood:loss", kl_coefficient=0.3, entropy_coefficient=0.2)
    for before, after, added in zip(plain, found, of_the_formula(current, row, "k3", 0.3, 0.2), strict=True):
        torch.testing.assert_close(after - before, added)
    assert metrics.keys() == {"kl_reference"}
