"""Counters of a whole run, all attempts together: what the summary and the axes need."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Totals:
    """Grows from step to step; part of the checkpoint."""

    steps: int = 0  # trained or skipped
    skipped_steps: int = 0
    rollouts_trained: int = 0
    rollouts_spanning_update: int = 0  # of those trained: tokens of two or more versions
    staleness_max: int = 0
    tokens_generated: int = 0  # completion tokens that reached the controller
    tokens_trained: int = 0  # prompt and completion tokens
    groups_dropped: int = 0
    groups_without_spread: int = 0
    leases_regranted: int = 0
    packing_fill_sum: float = 0.0
    trainer_idle_s: float = 0.0
    generator_idle_s: float = 0.0  # summed over generators
    generator_s: float = 0.0  # summed over generators
    training_s: float = 0.0  # from the first live version to the last step
    wall_s: float = 0.0  # of the controllers, start-up included
    checkpoints_failed: int = 0  # skipped because they could not be written

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @property
    def packing_fill(self) -> float:
        """Mean over steps."""
        return self.packing_fill_sum / max(1, self.steps)

    @property
    def trainer_idle_ratio(self) -> float:
        """Share of training time in which the trainer had no batch."""
        return self.trainer_idle_s / self.training_s if self.training_s else 0.0

    @property
    def generator_idle_ratio(self) -> float:
        """Share of training time in which a generator had nothing to sample, mean over generators."""
        return self.generator_idle_s / self.generator_s if self.generator_s else 0.0
