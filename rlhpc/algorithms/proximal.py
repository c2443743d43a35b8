"""The proximal policy by interpolation: A-3PO, without a forward pass.

log π_proximal ≈ log π_behaviour + α · (log π_current − log π_behaviour),
α = (v_proximal − v_behaviour) / (v_current − v_behaviour), clamped to [0, 1]   (Li et al. 2025, arXiv:2512.06547)

v_behaviour is the version that sampled the token, v_current the one that is trained, v_proximal = v_current − 1.  So a
token one version old has α = 0 (its sampler is the proximal policy), one d versions old α = 1 − 1/d.
A token that the trained version itself sampled has no step in between and the quotient is undefined; α = 1 then: what
current and behaviour log-probabilities differ by is the engine's arithmetic, which belongs in the importance weight and
not in the clipped ratio.

α is known before the step, the current log-probabilities only within it.  So the role computes α per token with
current_share and passes it where other losses take proximal log-probabilities; the loss (losses.py) interpolates.
Backends pass the tensor through and need to know about neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlhpc.types import Float32, Int32

if TYPE_CHECKING:
    from torch import Tensor


def current_share(versions: Int32, policy_version: int) -> Float32:
    """α of every token; versions int32 [T], −1 where there is no loss → float32 [T] in [0, 1], 1 where no loss.

    Raises ValueError if a token is newer than policy_version, the version that is trained.
    """
    if versions.size and int(versions.max()) > policy_version:
        raise ValueError(f"a token of version {int(versions.max())} in a batch for policy version {policy_version}")
    age = np.where(versions < 0, 0, policy_version - versions)
    return np.where(age == 0, 1.0, 1.0 - 1.0 / np.maximum(age, 1)).astype(np.float32)


def loglinear_proximal(behaviour: Tensor, current: Tensor, share: Tensor) -> Tensor:
    """Interpolated proximal log-probabilities; all float32 [T], `share` being α.  Carries no gradient."""
    return behaviour.lerp(current.detach(), share)
