"""The proximal policy by interpolation: A-3PO, without a forward pass.

log π_proximal ≈ log π_behaviour + α · (log π_current − log π_behaviour),
α = (v_proximal − v_behaviour) / (v_current − v_behaviour), clamped to [0, 1]   (Li et al. 2025, arXiv:2512.06547)

v_behaviour is the version that sampled the token, v_current the one that is trained, v_proximal = v_current − 1.  So a
token one version old has α = 0 (its sampler is the proximal policy), one d versions old α = 1 − 1/d.
A token that the trained version itself sampled has no version in between and the quotient is undefined; α = 0 then, as
in AReaL: its sampler is the policy at the start of the batch.  With α = 1 the ratio would be 1 in every optimiser step
on the batch, and nothing would clip it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def current_share(versions: Tensor, policy_version: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """α of every token in [0, 1]; versions int [T], −1 where there is no loss, and no α either: 0."""
    ages = torch.where(versions < 0, 0, policy_version - versions).to(dtype)
    return 1.0 - 1.0 / ages.clamp(min=1.0)


def loglinear_anchor(behaviour: Tensor, current: Tensor, versions: Tensor, policy_version: int) -> Tensor:
    """Interpolated proximal log-probabilities [T], without gradient."""
    return behaviour.lerp(current.detach(), current_share(versions, policy_version, current.dtype))
