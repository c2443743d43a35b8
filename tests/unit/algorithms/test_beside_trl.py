"""The same numbers as TRL's trainer, by its own function, where TRL is installed (it is no dependency).

Its loss wants a whole trainer; it gets what it reads of one, and log-probabilities instead of a model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from papers import POLICY_VERSION
from token_rows import ragged_row
from torch import Tensor

from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.algorithms.samples import loss_weights
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.contracts import TokenRow

pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
from trl.trainer.grpo_trainer import GRPOTrainer

MAX_TOKENS = 64
# TRL's settings, ours, and how each takes the mean.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "grpo": ({"loss_type": "grpo"}, {"loss": "ppo"}, "sequence"),
    "dapo": ({"loss_type": "dapo"}, {"loss": "ppo"}, "token"),
    "bnpo": ({"loss_type": "bnpo"}, {"loss": "ppo"}, "token"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss": "ppo"}, "constant"),
    "two-sided": ({"loss_type": "dapo", "delta": 1.3}, {"loss": "ppo", "dual_clip": 1.3}, "token"),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.28}, {"loss": "cispo", "clip_low": 1.0}, "token"),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        {"loss": "gspo", "clip_low": 0.03, "clip_high": 0.04},
        "sequence",
    ),
    "sapo": ({"loss_type": "sapo"}, {"loss": "sapo"}, "sequence"),
}


class OneProcess:
    """TRL's accelerator, of one process."""

    num_processes, sync_gradients = 1, True

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


class FewMetrics(dict[str, dict[str, list[float]]]):
    def __missing__(self, mode: str) -> Any:
        class Anything(dict[str, list[float]]):
            def __missing__(self, name: str) -> list[float]:
                return []

        return Anything()


def trl_loss(
    padded: Tensor, anchor: Tensor, weights: Tensor, advantages: Tensor, mask: Tensor, **settings: Any
) -> Tensor:
    """All [B, T]; advantages [B]."""
    trainer = SimpleNamespace(
        **{
            "epsilon_low": 0.2, "epsilon_high": 0.28, "importance_sampling_level": "token", "beta": 0.0,
            "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "aux_loss_enabled": False,
            "use_vllm": True, "vllm_importance_sampling_correction": True, "max_completion_length": MAX_TOKENS,
            "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False,
        } | settings,
        args=SimpleNamespace(
            delta=settings.get("delta"), sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        _metrics=FewMetrics(),
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded, torch.zeros_like(padded), None),
    )  # fmt: skip
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask.long(),
        "advantages": advantages, "old_per_token_logps": anchor, "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def padded(values: Tensor, row: TokenRow) -> Tensor:
    """Loss tokens of every sequence, a sequence a line."""
    lines = [values[(row.sequence == index) & row.loss_mask] for index in range(row.num_sequences)]
    return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_trls(case: str) -> None:
    theirs, ours, how = CASES[case]
    for seed in range(4):
        current, row = ragged_row(seed)
        counts = torch.bincount(row.sequence[row.loss_mask], minlength=row.num_sequences).double()
        shares = loss_weights(counts.numpy(), row.sequence.unique().numpy(), how, MAX_TOKENS)
        row.weights.copy_(torch.from_numpy(shares)[row.sequence])
        config = AlgorithmConfig.model_validate({"proximal": "recompute", "importance_cap": 1.2, **ours})
        leaf = current.clone().requires_grad_()
        loss = make_policy_loss(config, POLICY_VERSION)(leaf, row)[0] / counts.sum()
        other = current.clone().requires_grad_()
        mask = padded(torch.ones_like(current), row) > 0
        weights = (row.proximal - row.behaviour).exp().clamp(max=1.2)
        advantages = torch.stack([row.advantages[row.sequence == index][0] for index in range(row.num_sequences)])
        expected = trl_loss(
            padded(other, row), padded(row.proximal, row), padded(weights, row), advantages, mask, **theirs
        )
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        gradient, expected_gradient = (torch.autograd.grad(x, y)[0] for x, y in ((loss, leaf), (expected, other)))
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
