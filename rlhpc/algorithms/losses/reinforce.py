"""REINFORCE: A · log π, for the importance weight to correct.

Williams 1992.  As PipelineRL uses it (Piché et al. 2025, arXiv:2509.19128): with algorithm.proximal = "current" the
weight is π_current / π_behaviour, truncated at importance_cap, and no gradient flows through it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.algorithms.losses.objective import TokenObjective, log_ratio
from rlhpc.contracts import TokenRow


def reinforce(current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
    """An Objective without bounds."""
    nothing = torch.zeros_like(row.loss_mask)
    return TokenObjective(row.advantages * current, log_ratio(current.detach(), anchor).exp(), nothing, nothing)
