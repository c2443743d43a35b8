"""Gated DeltaNet layers of a packed row: each segment as if it were alone, by the rule as it is written down."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, OlmoHybridConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from rlhpc.protocol.errors import ConfigError
from rlhpc.training.hf_model import load_causal_lm
from rlhpc.training.packed_attention import SegmentPlan
from rlhpc.training.packed_delta_net import CHUNK_TOKENS, DeltaPlan, packed_convolution, packed_delta_rule
from tests.tiny_models import make_tiny_checkpoint

CPU = torch.device("cpu")
ROWS = [(1,), (3, 1, 2), (CHUNK_TOKENS,), (CHUNK_TOKENS + 1, 1, CHUNK_TOKENS - 1), (150, 5, 2 * CHUNK_TOKENS, 70)]


def plan_of(lengths: tuple[int, ...]) -> SegmentPlan:
    return SegmentPlan.of(np.cumsum([0, *lengths], dtype=np.int32), CPU)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def recurrence(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The rule token by token, in the order of the head of packed_delta_net.py; [L, A, …] of one segment."""
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    state = value.new_zeros(value.shape[1], key.shape[-1], value.shape[-1])
    outputs = []
    for q, k, v, g, b in zip(query, key, value, log_decay, beta, strict=True):
        state = g.exp()[:, None, None] * state
        written = b[:, None] * (v - torch.einsum("akv,ak->av", state, k))
        state = state + k[:, :, None] * written[:, None]
        outputs.append(torch.einsum("akv,ak->av", state, q) / q.shape[-1] ** 0.5)
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", ROWS)
def test_the_delta_rule_in_chunks_is_the_rule_token_by_token_in_each_segment(lengths: tuple[int, ...]) -> None:
    tokens, heads = sum(lengths), 2
    inputs = [
        drawn(tokens, heads, 8, seed=0),
        drawn(tokens, heads, 8, seed=1),
        drawn(tokens, heads, 6, seed=2),
        -drawn(tokens, heads, seed=3).exp() / 8,
        drawn(tokens, heads, seed=4).sigmoid(),
    ]
    alone = [each.clone().requires_grad_() for each in inputs]
    packed = [each.float().requires_grad_() for each in inputs]
    found = packed_delta_rule(*packed, plan_of(lengths))
    expected = torch.cat([recurrence(*parts) for parts in zip(*(each.split(lengths) for each in alone), strict=True)])
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
    weights = drawn(*found.shape, seed=5)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(packed, alone, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-5, rtol=1e-5)


def test_strong_decay_leaves_finite_numbers() -> None:
    """As exp(−cumulated decay) would not: a chunk of 64 tokens that each forget all but e^−20."""
    tokens = 2 * CHUNK_TOKENS
    inputs = [drawn(tokens, 1, 4, seed=seed).float().requires_grad_() for seed in range(3)]
    decay = torch.full((tokens, 1), -20.0).requires_grad_()
    output = packed_delta_rule(*inputs, decay, torch.full((tokens, 1), 0.5), plan_of((tokens,)))
    output.sum().backward()
    assert all(bool(each.isfinite().all()) for each in (output, *(each.grad for each in (*inputs, decay))))


@pytest.mark.parametrize("lengths", ROWS)
def test_the_convolution_sees_no_other_segment(lengths: tuple[int, ...]) -> None:
    channels, width = 5, 4
    module = nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1, bias=False)
    row = drawn(sum(lengths), channels, seed=0).float().requires_grad_()
    found = packed_convolution(module, row, functional.silu, plan_of(lengths))
    alone = [functional.silu(module(part.t()[None])[0, :, : len(part)].t()) for part in row.split(lengths)]
    torch.testing.assert_close(found, torch.cat(alone))
    weights = drawn(*found.shape, seed=1).float()
    gradients = [
        torch.autograd.grad((each * weights).sum(), (row, module.weight)) for each in (found, torch.cat(alone))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("lengths", ROWS)
def test_every_token_has_one_place_and_a_scan_is_as_long_as_the_longest_segment(lengths: tuple[int, ...]) -> None:
    plan = DeltaPlan.of(plan_of(lengths))
    tokens = torch.arange(sum(lengths))
    assert torch.equal(plan.gather[plan.scatter], tokens)
    assert len(plan.scatter.unique()) == len(tokens)
    assert len(plan.steps) == -(-max(lengths) // plan.chunk_tokens)
    assert sum(plan.steps) == sum(-(-length // plan.chunk_tokens) for length in lengths)
    assert list(plan.steps) == sorted(plan.steps, reverse=True)


def test_the_trial_needs_no_kernels_of_another_device(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where flash-linear-attention is installed, transformers calls it on a CPU, too."""

    def on_a_gpu_only(function: Any) -> Any:
        @functools.wraps(function)
        def kernel(*args: Any, **options: Any) -> Any:
            raise AssertionError("a kernel for GPUs was called")

        return kernel

    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        monkeypatch.setattr(modeling_qwen3_5, name, on_a_gpu_only(inspect.unwrap(getattr(modeling_qwen3_5, name))))
    model = load_causal_lm(make_tiny_checkpoint(tmp_path, "qwen3_5", hidden=32), device=CPU)
    with pytest.raises(AssertionError, match="for GPUs"):
        model.module(input_ids=torch.arange(5)[None], use_cache=False)


def test_a_recurrent_layer_of_another_kind_is_refused(tmp_path: Any) -> None:
    """Its state would run across the borders of samples."""
    config = OlmoHybridConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path="):
        load_causal_lm(tmp_path, device=CPU)
