"""Metrics of a policy loss: sums over loss tokens, and the same by age of the tokens.

Input: log-probabilities, weights, objective.  Output: scalars under names that the metrics of a run know.

k1, k2 and k3 estimate KL(π_behaviour ‖ ·) as in Schulman's note "Approximating KL divergence" (2020).
drift: from the sampler to the policy that is trained.  mismatch: from the sampler to the anchor; with proximal =
"recompute" or "current" that is what separates the engine's arithmetic and the rollout's age from the trainer; with
"behaviour" it is 0 by definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.algorithms.losses.importance import Weights
from rlhpc.algorithms.losses.objective import TokenObjective, log_ratio, sequence_mean
from rlhpc.contracts import TokenRow

NUM_AGES = 5  # 0, 1, 2, 3 and all above
BY_AGE = ("tokens", "importance_weight", "importance_weight_squared", "mismatch_kl", "kl_k3", "clipped")


@torch.no_grad()
def loss_figures(
    current: Tensor, anchor: Tensor, row: TokenRow, weights: Weights, objective: TokenObjective, policy_version: int
) -> dict[str, Tensor]:
    """Scalars float32, summed over loss tokens; the names "age_FIGURE/AGE" are sums over tokens of that age."""
    drift, mismatch = log_ratio(current, row.behaviour), log_ratio(anchor, row.behaviour)
    per_token = {
        "ratio": objective.ratio,
        "clip_low": objective.at_low,
        "clip_high": objective.at_high,
        "importance_weight": weights.capped,
        "importance_weight_squared": weights.capped**2,
        "importance_capped": weights.is_capped,
        "importance_masked": weights.masked,
        "kl_k1": -drift,
        "kl_k2": 0.5 * drift**2,
        "kl_k3": torch.expm1(drift) - drift,
        "mismatch_abs": mismatch.abs(),
        "mismatch_k1": -mismatch,
        "mismatch_kl": torch.expm1(mismatch) - mismatch,
        "mismatch_chi2": torch.expm1(mismatch) ** 2,
        "mismatch_log_perplexity": sequence_mean(mismatch, row).abs(),
    }
    per_token = {name: torch.where(row.loss_mask, values, 0).float() for name, values in per_token.items()}
    sums = {name: values.sum() for name, values in per_token.items()}
    per_token |= {"tokens": row.loss_mask.float(), "clipped": per_token["clip_low"] + per_token["clip_high"]}
    ages = torch.where(row.loss_mask, policy_version - row.versions, 0).clamp(0, NUM_AGES - 1).long()
    table = torch.zeros(NUM_AGES, len(BY_AGE), device=ages.device)
    table = table.index_add(0, ages, torch.stack([per_token[name] for name in BY_AGE], dim=1))
    return sums | {f"age_{name}/{age}": table[age, i] for i, name in enumerate(BY_AGE) for age in range(NUM_AGES)}
