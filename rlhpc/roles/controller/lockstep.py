"""Weights change only while nothing is being sampled: the order of events that run.deterministic asks for.

Then every rollout is sampled by one version, and which one does not depend on how long anything takes: the groups of
step t are those that were admitted, in the order of prompts, under version max(0, t − max_staleness).  With a staleness
of 1 or more the trainer still works while generators sample; each waits for the other once a step.

Input: the groups of the buffer.  Output: whether the weights of a step may go out.  Pure but for that; no clock.
"""

from __future__ import annotations

from rlhpc.algorithms.advantages.spread import has_reward_variance
from rlhpc.algorithms.shaping import RewardShaping
from rlhpc.buffer.rollout_buffer import RolloutBuffer
from rlhpc.config_sections import AdmissionConfig
from rlhpc.types import RolloutGroup


class Lockstep:
    """Says when all is sampled that belongs to the weights which are live."""

    def __init__(self, buffer: RolloutBuffer, admission: AdmissionConfig, shaping: RewardShaping) -> None:
        self._buffer, self._admission, self._shaping = buffer, admission, shaping

    def is_settled(self, num_steps: int) -> bool:
        """Whether the weights after this many steps may go out: all groups are finished that come before them.

        While step t is trained, the groups of the steps up to t + max_staleness have slots.  A group that teaches
        nothing does not count: another one is sampled in its place, by the same weights.
        """
        return self._num_settled() >= (num_steps + self._admission.max_staleness) * self._admission.groups_per_step

    def _num_settled(self) -> int:
        """Groups of the run that are trained, being trained, or finished and fit for it."""
        counts = self._buffer.counts()
        return counts["released"] + counts["taken"] + sum(map(self._is_fit, self._buffer.finished()))

    def _is_fit(self, group: RolloutGroup) -> bool:
        return not self._admission.active_sampling or has_reward_variance(self._shaping.judged(group))
