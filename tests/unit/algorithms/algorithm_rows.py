"""Groups of rollouts, and rows of tokens for losses: of the plainest values where a test says nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.protocol.contracts import TokenRow
from rlhpc.protocol.types import FinishReason, Prompt, Rollout, RolloutGroup, ScoredRollout, Verdict

# ------------------------------------------------------------------ Groups of rollouts for the tests of this directory


def rollout(index: int = 0, *, length: int = 3, **changed: Any) -> Rollout:
    fields: dict[str, Any] = {
        "group_id": 5,
        "sample_index": index,
        "prompt_id": 7,
        "token_ids": np.arange(length, dtype=np.int32) + 10 * index,
        "behaviour_logprobs": -np.arange(1, length + 1, dtype=np.float32),
        "versions": np.full(length, 4, np.int32),
        "loss_mask": np.ones(length, np.bool_),
        "finish_reason": FinishReason.STOP,
    }
    return Rollout(**(fields | changed))


def scored(member: Rollout, reward: float, verdict: Verdict | None = None, **parts: float) -> ScoredRollout:
    return ScoredRollout(member, reward, verdict or (Verdict.CORRECT if reward > 0 else Verdict.WRONG), parts)


def group(*members: ScoredRollout, admitted_version: int = 3, prompt_length: int = 2) -> RolloutGroup:
    prompt = Prompt(7, "math", np.arange(100, 100 + prompt_length, dtype=np.int32), "42")
    return RolloutGroup(5, prompt, admitted_version, members)


# ------------------------------------ Rows of tokens for losses, of the plainest values where a test says nothing else


def token_row(
    behaviour: Tensor,
    *,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    advantages: Tensor | None = None,
    loss_mask: Tensor | None = None,
    versions: Tensor | None = None,
    weights: Tensor | None = None,
    lengths: list[int] | None = None,
) -> TokenRow:
    """One sequence, or sequences of `lengths`; every token counts once, has advantage 1 and is of version 0."""
    size = len(behaviour)
    lengths = lengths or [size]
    return TokenRow(
        behaviour=behaviour,
        proximal=behaviour if proximal is None else proximal,
        reference=behaviour if reference is None else reference,
        entropy=torch.zeros_like(behaviour) if entropy is None else entropy,
        advantages=torch.ones_like(behaviour) if advantages is None else advantages,
        loss_mask=torch.ones(size, dtype=torch.bool) if loss_mask is None else loss_mask,
        versions=torch.zeros(size, dtype=torch.int32) if versions is None else versions,
        weights=torch.ones_like(behaviour) if weights is None else weights,
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
    )


def ragged_row(seed: int, *, dtype: torch.dtype = torch.float64, spread: float = 0.3) -> tuple[Tensor, TokenRow]:
    """Current log-probabilities and a row of five sequences: prompts, a tool's tokens, four ages, odd weights.

    The three policies differ enough to clip, to cap and to mask; an advantage is one of a sequence.
    """
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 30, (5,), generator=draw).tolist()
    size = sum(lengths)

    def normal() -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    base = -3 * torch.rand(size, generator=draw, dtype=torch.float64) - 0.1
    loss_mask = torch.rand(size, generator=draw) < 0.8
    starts = torch.tensor([sum(lengths[:i]) for i in range(5)])
    for start in starts.tolist():
        loss_mask[start : start + 3] = torch.tensor([False, False, True])  # a prompt of two tokens, then at least one
    versions = torch.where(loss_mask, torch.randint(3, 8, (size,), generator=draw), -1).to(torch.int32)
    row = token_row(
        (base + spread * normal()).to(dtype),
        proximal=(base + spread * normal()).to(dtype),
        advantages=(torch.randn(5, generator=draw, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))).to(
            dtype
        ),
        loss_mask=loss_mask,
        versions=versions,
        weights=(0.5 + torch.rand(5, generator=draw, dtype=torch.float64))
        .repeat_interleave(torch.tensor(lengths))
        .to(dtype),
        lengths=lengths,
    )
    return (base + spread * normal()).to(dtype), row
