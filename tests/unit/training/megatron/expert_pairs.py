"""Experts twice with the same weights: as Megatron computes them, one after the other, and all at once."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor
from transformers import Qwen3MoeConfig

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout
from rlhpc.training.megatron.backend import open_groups
from rlhpc.training.megatron.model_config import GatedSilu, GroupedExperts, transformer_config

SPREAD = 0.1  # of weights


def expert_pair(
    device: torch.device, dtype: torch.dtype, *, num_experts: int, hidden: int, width: int
) -> tuple[SequentialMLP, GroupedExperts]:
    """In the only rank of the default process group; Megatron's groups are opened, and the caller's to close.

    Drawn from torch's generator.  hidden: H; width: of the experts between their two matrices.
    """
    trainer = TrainerConfig(backend="megatron", token_budget=4096, device="auto")
    open_groups(ParallelLayout.of(trainer), rank=0, device=device)
    model = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=width, num_experts=num_experts, num_experts_per_tok=2
    )
    config = transformer_config(model, trainer, dtype)
    submodules = get_moe_module_spec(use_te=False, num_experts=num_experts).submodules.experts.submodules
    submodules.activation_func = GatedSilu
    made: list[Any] = [
        kind(num_experts, config, deepcopy(submodules), get_default_pg_collection()).to(device)
        for kind in (SequentialMLP, GroupedExperts)
    ]
    for parameter in made[0].parameters():
        torch.nn.init.normal_(parameter, std=SPREAD)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def draw_tokens(counts: list[int], hidden: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens [T, H], and probabilities [T] in float32, as Megatron's router makes them; both want gradients."""
    tokens = torch.randn(sum(counts), hidden, device=device).to(dtype)
    return tokens.requires_grad_(), torch.rand(sum(counts), device=device).requires_grad_()


def through(experts: SequentialMLP, counts: list[int], tokens: Tensor, probabilities: Tensor) -> dict[str, Tensor]:
    """Output, and gradients by name of a weighted sum of it: of the tokens, the probabilities, every parameter."""
    output, bias = experts(tokens, torch.tensor(counts), probabilities)
    assert bias is None
    factors = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=output.dtype).view_as(output)
    parameters = dict(experts.named_parameters())
    gradients = torch.autograd.grad(output, [tokens, probabilities, *parameters.values()], factors)
    return {"output": output.detach(), **dict(zip(("tokens", "probabilities", *parameters), gradients, strict=True))}
