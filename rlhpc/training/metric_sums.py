"""Metrics of a step as sums over tokens, accumulated over micro-batches and ranks in float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def sums_over_ranks(
    figures: Mapping[str, float], device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Sum each figure over the ranks of `group`, by default of all, in float64.  A collective."""
    sums = MetricSums()
    sums.add({name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()})
    return sums.over_ranks(device, group)


class MetricSums:
    """Scalars of one step by name; every rank has the same names and at least one micro-batch, a dummy if need be."""

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Tensor]] = []

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Keep those of one micro-batch, detached scalars; nothing waits for the device."""
        self._rows.append(metrics)

    def over_ranks(self, device: torch.device, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Sums over micro-batches and ranks of `group`, by default of all.  A collective, where there is a group."""
        names = sorted(self._rows[0])
        table = torch.stack([torch.stack([row[name].detach().double() for name in names]) for row in self._rows])
        totals = table.sum(0).to(device)
        if dist.is_initialized():
            dist.all_reduce(totals, group=group)
        return dict(zip(names, totals.tolist(), strict=True))
