"""The figures of a batch from those of its optimiser steps.

Input: StepResult of each.  Output: means over loss tokens, and what was skipped.  The same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhpc.contracts import StepResult


def means_of(metrics: Mapping[str, float], grad_norm: float, num_loss_tokens: int) -> dict[str, float]:
    """Sums of metrics over `num_loss_tokens` into means, with the gradient norm as "grad_norm"."""
    return {name: value / num_loss_tokens for name, value in metrics.items()} | {"grad_norm": grad_norm}


@dataclass(slots=True)
class BatchFigures:
    """Adds up optimiser steps."""

    is_applied: bool = False  # any of them
    refused: str = ""  # why the first one was that was refused
    skipped: tuple[int, ...] = ()  # places of those that were refused
    _parts: list[tuple[StepResult, int]] = field(default_factory=list)

    def add(self, result: StepResult, num_loss_tokens: int, refused: str) -> None:
        """The next one.  refused: "" if it was applied, or was not finite."""
        if refused:
            self.refused, self.skipped = self.refused or refused, (*self.skipped, len(self._parts))
        self.is_applied |= result.applied
        self._parts.append((result, num_loss_tokens))

    def means(self) -> dict[str, float]:
        """Over the loss tokens of all optimiser steps, and the mean gradient norm.

        One that was not finite counts only if none was: its figures would hide those of the others.
        """
        finite = [part for part in self._parts if math.isfinite(part[0].grad_norm)] or self._parts
        total = sum(count for _, count in finite)
        sums = {name: math.fsum(result.metrics[name] for result, _ in finite) for name in finite[0][0].metrics}
        grad_norm = math.fsum(result.grad_norm for result, _ in finite) / len(finite)
        return means_of(sums, grad_norm, total)
