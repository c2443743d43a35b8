"""Reward shaping: the reward of a rollout as advantages are computed from it.

    r' = Σ weight · part                                    by part_weights; without any, the function's own reward
       − overlong_penalty · clip((|y| − (M − C)) / C, 0, 1)   C = overlong_tokens, M = max_completion_tokens
       + length_weight · |y| / M                            |y|: tokens of the completion

Soft overlong punishment, and completions that were cut off kept out of the loss ("overlong filtering"): DAPO, Yu et al.
2025, §3.4 (arXiv:2503.14476).

The journal keeps what the reward function said.  Shaping is a pure function of that: the same after a restart.
Input: RolloutGroup.  Output: a number per member.  Loads without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rlhpc.config import Config
from rlhpc.config_algorithm import ShapingConfig
from rlhpc.errors import RoleFailed
from rlhpc.types import FinishReason, Float32, Rollout, RolloutGroup, ScoredRollout


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """The rules of [shaping]; those of an empty table leave rewards as they are."""

    settings: ShapingConfig = field(default_factory=ShapingConfig)
    max_completion_tokens: Callable[[int], int] = lambda _: 1  # by the id of the prompt

    @classmethod
    def of(cls, config: Config) -> RewardShaping:
        """As the run file says."""
        return cls(config.shaping, config.max_completion_tokens)

    def rewards(self, group: RolloutGroup) -> Float32:
        """Shaped, float32 [G].  Raises RoleFailed if a verdict lacks a part that has a weight."""
        return np.array(
            [self._total(member) + self._for_length(member.rollout) for member in group.members], np.float32
        )

    def judged(self, group: RolloutGroup) -> Float32:
        """Those whose variance decides whether a group teaches anything, float32 [G]; all 0 if none is learnt from."""
        if self.is_all_masked(group):
            return np.zeros(len(group.members), np.float32)
        if self.settings.variance == "shaped":
            return self.rewards(group)
        return np.array([self._total(member) for member in group.members], np.float32)

    def is_masked(self, rollout: Rollout) -> bool:
        """Whether no token of it counts in the loss; its reward still counts for the others of its group."""
        return self.settings.truncated == "masked" and rollout.finish_reason is FinishReason.LENGTH

    def is_all_masked(self, group: RolloutGroup) -> bool:
        """Whether no rollout of a group counts in the loss."""
        return all(self.is_masked(member.rollout) for member in group.members)

    def check_token_rewards(self, group: RolloutGroup) -> None:
        """Raise RoleFailed for rewards of tokens beside part_weights: they are parts of a reward that is not used."""
        if self.settings.part_weights and any(member.token_rewards for member in group.members):
            raise RoleFailed(
                f"task {group.prompt.task!r} says by rewards_at which parts of its reward are earned before the end, "
                "but shaping.part_weights makes another reward; legal: no part_weights, or no rewards_at"
            )

    def _total(self, member: ScoredRollout) -> float:
        weights = self.settings.part_weights
        if not weights:
            return member.reward
        if missing := sorted(set(weights) - set(member.reward_parts)):
            raise RoleFailed(
                f"shaping.part_weights has a weight for {missing[0]!r}, which the reward function did not name; its "
                f"parts: {', '.join(sorted(member.reward_parts)) or 'none'}"
            )
        return sum(weight * member.reward_parts[name] for name, weight in weights.items())

    def _for_length(self, rollout: Rollout) -> float:
        length, longest = len(rollout.token_ids), self.max_completion_tokens(rollout.prompt.prompt_id)
        bonus = self.settings.length_weight * length / longest
        if not (cushion := self.settings.overlong_tokens):
            return bonus
        return bonus - self.settings.overlong_penalty * min(max((length - (longest - cushion)) / cushion, 0.0), 1.0)
