"""An exponential moving average of float32 master weights, shared out over ranks as a checkpoint's are.

Input: this rank's live shards of masters, as its backend keeps them.  Output: float32 shards of the average, for a
checkpoint.  With weights w_v after version v and decay d: e_v = d · e_(v−1) + (1 − d) · w_v, and e = w where it begins
(Polyak & Juditsky 1992; Tarvainen & Valpola 2017, arXiv:1703.01780), so that there is no bias to correct.
Guarantees: each number of the average is on one rank, even if replicas keep the same masters; no communication; the
same bits in every layout that has the same masters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.training.sharded_tensors import ShardedTensorSpec

log = logging.getLogger("rlhpc.training")
AVERAGE = "average"  # kind of tensors in a checkpoint, beside optimizer.STATE_KINDS


class WeightAverage:
    """Nothing at first, then a copy of this rank's shards that follows them."""

    def __init__(self, items: Sequence[ShardedTensorSpec], own: Callable[[int], Sequence[Tensor]]) -> None:
        """own(index): this rank's live float32 masters of items[index], as for a BackgroundSaver."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._live = own
        self._mine = [i for i, item in enumerate(items) if any(shard.rank == rank for shard in item.shards)]
        self._held: dict[int, list[Tensor]] = {}
        self.is_held = False

    def hold(self, memory: str) -> None:
        """Begin at the weights as they are now; memory: where, "device" (theirs) or "host"."""
        self._held = {
            index: [
                live.detach().to("cpu" if memory == "host" else live.device, copy=True) for live in self._live(index)
            ]
            for index in self._mine
        }
        self.is_held = True

    @torch.no_grad()
    def move(self, decay: float) -> None:
        """Update the average with the current weights."""
        assert self.is_held, "no average is held"
        for held, live in self._pairs():
            held.lerp_(live.to(held.device), 1 - decay)

    def own(self, index: int) -> Sequence[Tensor]:
        """This rank's live shards."""
        return self._held[index]

    def restore(self, kinds: Collection[str], read_weights: Callable[[str], None]) -> None:
        """Go on from a checkpoint with these kinds of tensors, if there is an average.

        read_weights(kind): fill this rank's masters from tensors of a kind.  At the end the masters are the
        checkpoint's weights, whatever they were before.
        """
        if self.is_held and AVERAGE in kinds:
            read_weights(AVERAGE)
            self._begin()
        read_weights("weights")
        if self.is_held and AVERAGE not in kinds:
            log.info("the checkpoint has no weight average: the average begins at the weights of this checkpoint")
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        for held, live in self._pairs():
            held.copy_(live)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [pair for i in self._mine for pair in zip(self._held[i], self._live(i), strict=True)]
