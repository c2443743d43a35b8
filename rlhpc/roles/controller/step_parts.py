"""Steps that begin with a part of their batch: what is finished is trained while the rest is still being sampled.

    some groups finished, trainer waits ──▶ BatchRows, TrainBatch(is_part) ──▶ gradients summed ──▶ PartReport ──▶ …
    all groups finished ─────────────────▶ the rest, as any batch ─────────────────────────────▶ one optimiser step

Input: finished RolloutGroup, from the buffer, which keeps them until the batch is taken with them in it.  Output: none;
the ranks hold gradients until the step's last part.  The same step as on the whole batch at once: no weight changes in
between.  A part is begun only where the ledger can still complete the batch without making others late
(buffer/batch_choice.py).  StreamRL (Zhong et al. 2025, arXiv:2504.15930) calls it stream generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from rlhpc.buffer.rollout_buffer import RolloutBuffer
from rlhpc.config import Config
from rlhpc.errors import LedgerError
from rlhpc.messages import PartReport, TrainBatch
from rlhpc.roles.controller.batch_maker import BatchMaker
from rlhpc.roles.controller.trainer_link import TrainerLink
from rlhpc.types import RolloutGroup

LOOK_AGAIN_AT = 8  # when this part of the groups has come in addition: a look takes as long as there are groups


class StepParts:
    """Of one train loop."""

    def __init__(self, config: Config, buffer: RolloutBuffer, trainer: TrainerLink, batches: BatchMaker) -> None:
        self._config, self._buffer, self._trainer, self._batches = config, buffer, trainer, batches
        self._smallest = config.smallest_part
        self._least = self._smallest.groups  # more, if by the last look these do not fill the rows
        self._pack_s = 0.0  # of the step's parts so far

    async def train(self, step: int, version: int) -> float:
        """Train what is finished, if that is a part of the step's batch; returns seconds, 0 where it is not.

        A batch that has become whole meanwhile is left to the caller.
        """
        num_groups, began = self._config.admission.groups_per_step, time.monotonic()
        if self._smallest.groups == num_groups or self._buffer.upcoming(num_groups) is not None:
            return 0.0
        groups = self._buffer.part(num_groups, self._least)
        num_tokens = sum(group.num_tokens for group in groups)
        if not groups:
            return 0.0
        if num_tokens < self._smallest.tokens:
            # As many as would be enough if those to come were as long; but short ones are finished first.
            enough = -(-len(groups) * self._smallest.tokens // num_tokens)
            self._least = min(enough, len(groups) + max(1, len(groups) // LOOK_AGAIN_AT))
            return 0.0
        self._least = self._smallest.groups
        refuse_stale(groups, version, self._buffer.staleness_bound)
        self._buffer.begin(groups)
        packing = time.monotonic()
        made = await self._batches.part(groups, step, num_groups)
        self._pack_s += time.monotonic() - packing
        batch = made.packed(step, version, self._config.algorithm, is_part=True)
        await self._trainer.tell(TrainBatch(made.number, replace(batch, minibatches=())))
        self._batches.begin(step)
        await self._trainer.answer(PartReport)
        return time.monotonic() - began

    def end(self) -> float:
        """The step has its last part: returns seconds in which those before it were packed."""
        packed_s, self._pack_s, self._least = self._pack_s, 0.0, self._smallest.groups
        return packed_s


def refuse_stale(groups: Sequence[RolloutGroup], version: int, bound: int) -> None:
    """The bound holds by construction; if it does not, there is a bug and nothing may be trained: LedgerError."""
    for group in groups:
        if version - group.admitted_version > bound:
            raise LedgerError(
                f"group {group.group_id}, admitted under version {group.admitted_version}, would be trained at "
                f"version {version}: staler than the bound of {bound}"
            )
