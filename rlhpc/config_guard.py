"""[guard]: what follows when training leaves its bounds; see config_sections.py.  Loads without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhpc.config_sections import Positive, PositiveFloat, Section, Share


class GuardConfig(Section):
    """[guard]: what follows when the figures of optimiser steps leave their bounds."""

    action: Literal["off", "warn", "tighten", "skip", "stop"] = "warn"
    """The strongest permitted action. Each includes those before it: "warn"; "tighten": admit with half of
    max_staleness, unless run.deterministic; "skip": all ranks skip steps that are out of bounds; "stop": end the
    run."""
    patience_steps: Positive = 3
    """Out-of-bounds steps before the next stronger action is taken, as long as fewer than calm_steps lie between
    them."""
    calm_steps: Positive = 20
    """Consecutive steps within bounds that end an alarm: admission returns to normal, and the next action is a
    warning."""
    max_mismatch_kl: PositiveFloat = 0.1
    """Bound of policy/mismatch_kl, nats: KL divergence of the sampler from the proximal policy."""
    min_ess: Share = 0.3
    """Bound of policy/ess, the effective sample size of the importance weights as a fraction."""
    min_entropy: Annotated[float, Field(ge=0)] = 0.001
    """Bound of trainer/entropy, nats: below it the policy always samples the same answer."""
    max_entropy: PositiveFloat = 5.0
    """Bound of trainer/entropy, nats: above it the policy samples noise, as if 150 tokens were equally likely
    everywhere."""
    grad_norm_deviations: PositiveFloat = 8.0
    """Bound of trainer/grad_norm: standard deviations of its logarithm over the last 50 steps, robustly estimated and
    at least 0.2, above their median; with 8 that is 5 times the median or more."""

    @model_validator(mode="after")
    def _entropy_has_a_range(self) -> Self:
        if self.min_entropy >= self.max_entropy:
            raise ValueError(f"guard.min_entropy={self.min_entropy:g} is not below max_entropy={self.max_entropy:g}")
        return self
