"""The record of one step, which the train loop fills and the metrics recorder writes."""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.messages import StepReport
from rlhpc.roles.controller.guarding import NOTHING, GuardNote
from rlhpc.types import PackedBatch, RolloutGroup


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything the recorder needs about one step."""

    report: StepReport
    batch: PackedBatch
    groups: tuple[RolloutGroup, ...]
    trained_version: int  # the version that was trained: staleness is counted against it
    lockstep_slowdown: float  # work of the slowest rank over the mean
    pack_s: float
    wait_for_groups_s: float = 0.0
    until_live_s: float = 0.0  # of the version before this step
    checkpoint_s: float = 0.0  # of the last checkpoint: training was blocked
    checkpoint_write_s: float = 0.0  # of the last complete checkpoint: it was written meanwhile
    longest_save_s: float = 0.0  # of all complete checkpoints, from their requests on
    guard: GuardNote = NOTHING
