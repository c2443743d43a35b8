"""Figures of an optimiser step that can forbid it, known before parameters change.

Input: metrics and gradient norm of a step.  Output: figures under their short names; which of them break the limits
that came with the batch.  No torch.  The same on every rank: metrics are summed over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from rlhpc.algorithms.diagnostics import effective_sample_share
from rlhpc.types import StepLimits

FIGURES: Mapping[str, str] = MappingProxyType(
    {  # short name → metric
        "mismatch_kl": "policy/mismatch_kl",
        "ess": "policy/ess",
        "entropy": "trainer/entropy",
        "grad_norm": "trainer/grad_norm",
    }
)
AS_BEFORE = "as before"  # why a step is skipped that was skipped when it was first done


def guarded_figures(means: Mapping[str, float]) -> dict[str, float]:
    """Figures of a step; one that is not there, or not finite, is left out.

    means: metrics as the trainer reports them, over loss tokens, and "grad_norm".
    """
    figures = {name: means[name] for name in ("mismatch_kl", "entropy", "grad_norm") if name in means}
    if "importance_weight_squared" in means:
        figures["ess"] = effective_sample_share(means, 1)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def broken(limits: StepLimits, figures: Mapping[str, float]) -> tuple[str, ...]:
    """Names of the figures outside their limits, in alphabetical order."""
    too_low = {name for name, low in limits.lows.items() if figures.get(name, low) < low}
    too_high = {name for name, high in limits.highs.items() if figures.get(name, high) > high}
    return tuple(sorted(too_low | too_high))


def refusal(limits: StepLimits, means: Mapping[str, float], place: int = 0) -> str:
    """Why an optimiser step must not be applied; "": it may be.  means: as for guarded_figures; place: in the batch."""
    return AS_BEFORE if place in limits.skip else ", ".join(broken(limits, guarded_figures(means)))
