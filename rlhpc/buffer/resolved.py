"""A resolved group, trained or dropped: the unit of segments on disk.

Input: RolloutGroup.  A group is resolved once: consumed by an optimiser step, or dropped for a named reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhpc.types import RolloutGroup


class DropReason(StrEnum):
    """Why a group was dropped.  The values are part of the file format: none is ever renamed."""

    NO_SPREAD = "no_spread"  # all rewards equal, so that every advantage is zero
    VERIFIER_ERROR = "verifier_error"  # no reward could be computed
    POISON = "poison"  # every lease of one of its members was lost
    CANCELLED = "cancelled"  # on request


@dataclass(frozen=True, slots=True)
class ResolvedGroup:
    """A group and its end; neither step nor reason is set while it is only buffered (in a checkpoint)."""

    group: RolloutGroup  # may lack members if it was dropped, or buffered while incomplete
    consumed_step: int = -1  # the optimiser step that used it; -1: none
    drop_reason: DropReason | None = None
    attempts: int = 1  # 1 + the most leases lost by a member
    trained_version: int = -1  # the version that step trained: staleness is counted against it; -1: none
    applied: bool | None = None  # False: the step was skipped, the version stayed; None: no step
    group_size: int = 0  # rollouts that were wanted of it, if more than admission.group_size
