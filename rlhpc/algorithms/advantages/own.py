"""An estimator of the user's own: algorithm.advantage = "package.module:function".

Looked at on a tiny group when it is loaded, and each time that it is used: what does not fit would end in the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from rlhpc.contracts import AdvantageEstimator
from rlhpc.types import Float32, Int32
from rlhpc.user_code import load, try_out

KEY = "algorithm.advantage"


def load_own_estimator(path: str) -> AdvantageEstimator:
    """Import it and try it.  Raises ConfigError if it cannot be imported, raises, or returns what does not fit."""
    estimator = OwnEstimator(path, load(KEY, path))
    rewards, lengths = np.array([1.0, 0.0, 0.5], np.float32), np.array([3, 1, 2], np.int32)
    try_out(KEY, path, "rewards 1, 0, 0.5 of 3, 1, 2 tokens", partial(estimator.checked, rewards, lengths))
    return estimator


@dataclass(frozen=True, slots=True)
class OwnEstimator:
    """An AdvantageEstimator."""

    path: str
    function: AdvantageEstimator

    def __call__(self, rewards: Float32, lengths: Int32) -> Float32:
        """Raises ConfigError: the function raises, or returns something else than a finite number for each member."""
        return try_out(KEY, self.path, f"{len(rewards)} rewards of a run", partial(self.checked, rewards, lengths))

    def checked(self, rewards: Float32, lengths: Int32) -> Float32:
        """The same, but raises what the function raises, and ValueError."""
        advantages = np.asarray(self.function(rewards, lengths), np.float32)
        if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
            raise ValueError(
                f"{KEY}={self.path!r} returned {np.array2string(advantages, threshold=8)} for {len(rewards)} rewards; "
                "legal: one finite number for each"
            )
        return advantages
