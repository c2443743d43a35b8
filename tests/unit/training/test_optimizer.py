from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlhpc.training.trainer_state import NORM_RUN, FlatAdamW


def draw() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm": (3,), "matrix": (4, 3), "bias": (4,), "cube": (2, 3, 2)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def loss_of(parameters: dict[str, nn.Parameter]) -> torch.Tensor:
    return sum((p.float() ** 3).sum() for p in parameters.values())


def test_steps_are_those_of_adamw_with_decay_on_matrices():
    ours, theirs = draw(), draw()
    flat = FlatAdamW(ours, betas=(0.9, 0.95), eps=1e-8)
    groups = [
        {"params": [theirs["matrix"], theirs["cube"]], "weight_decay": 0.1},
        {"params": [theirs["norm"], theirs["bias"]], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(4):
        learning_rate = 0.01 * (step + 1)
        flat.zero_gradients()
        loss_of(ours).backward()
        flat.step(learning_rate=learning_rate, weight_decay=0.1)
        adamw.zero_grad()
        loss_of(theirs).backward()
        for group in adamw.param_groups:
            group["lr"] = learning_rate
        adamw.step()
    assert flat.num_steps_applied == 4
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], atol=1e-6, rtol=0)
        torch.testing.assert_close(flat.state("exp_avg")[name], adamw.state[theirs[name]]["exp_avg"])
        torch.testing.assert_close(flat.state("exp_avg_sq")[name], adamw.state[theirs[name]]["exp_avg_sq"])


def test_gradients_of_several_backward_passes_are_summed():
    parameters = draw()
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    loss_of(parameters).backward()
    once = flat.gradients.clone()
    loss_of(parameters).backward()
    assert torch.equal(flat.gradients, 2 * once)
    assert all(parameter.grad is None for parameter in parameters.values())
    flat.zero_gradients()
    assert flat.gradient_norm() == 0


def test_clipping_scales_to_the_norm_and_leaves_smaller_gradients_alone():
    parameters = draw()
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    loss_of(parameters).backward()
    norm, before = flat.gradient_norm(), flat.gradients.clone()
    flat.clip(norm, norm + 1)
    assert torch.equal(flat.gradients, before)
    flat.clip(norm, 0.5)
    assert flat.gradient_norm() == pytest.approx(0.5)


@pytest.mark.parametrize("size", [1, NORM_RUN - 1, NORM_RUN, 2 * NORM_RUN + 3])
def test_the_norm_is_that_of_all_gradients(size: int):
    parameters = {"only": nn.Parameter(torch.zeros(size))}
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    (parameters["only"] * torch.arange(1, size + 1)).sum().backward()
    assert flat.gradient_norm() == pytest.approx(math.sqrt(sum(n * n for n in range(1, size + 1))))


def test_masters_keep_what_bfloat16_parameters_round_away():
    parameters = {"matrix": nn.Parameter(torch.ones(2, 2))}
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    # As in the backend: masters are taken in float32, then the parameters are cast.
    parameters["matrix"].data = parameters["matrix"].data.bfloat16()
    for _ in range(40):
        flat.zero_gradients()
        parameters["matrix"].sum().backward()
        flat.step(learning_rate=1e-4, weight_decay=0.0)
    master = flat.state("weights")["matrix"]
    assert master[0, 0].item() == pytest.approx(1 - 40e-4, abs=1e-5)
    assert parameters["matrix"].dtype == torch.bfloat16
    assert torch.equal(parameters["matrix"].detach(), master.bfloat16())


def test_a_model_without_vectors_or_without_matrices_is_fine():
    for shape in [(3, 3), (3,)]:
        parameters = {"only": nn.Parameter(torch.ones(shape))}
        flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
        parameters["only"].sum().backward()
        flat.step(learning_rate=0.1, weight_decay=0.0)
        assert parameters["only"].detach().flatten()[0].item() == pytest.approx(0.9)


def test_a_norm_that_is_not_finite_is_seen():
    parameters = draw()
    flat = FlatAdamW(parameters, betas=(0.9, 0.95), eps=1e-8)
    (parameters["bias"].sum() * math.inf).backward()
    assert not math.isfinite(flat.gradient_norm())
