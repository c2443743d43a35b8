"""The estimator that a run file names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rlhpc.algorithms.advantages.group_relative import grpo, grpo_no_std, rloo
from rlhpc.algorithms.advantages.opo import opo
from rlhpc.algorithms.advantages.own import load_own_estimator
from rlhpc.algorithms.advantages.pass_at_k import PassAtK
from rlhpc.algorithms.advantages.reward_itself import reward_itself
from rlhpc.config_algorithm import OVER_BATCH, AlgorithmConfig
from rlhpc.contracts import AdvantageEstimator

BY_GROUP: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {
        "grpo": grpo,
        "grpo_no_std": grpo_no_std,
        "rloo": rloo,
        "opo": opo,
        "reinforce_pp": reward_itself,
        "gae": reward_itself,  # of which the trainer's critic makes advantages
        "reinforce_pp_baseline": grpo_no_std,
    }
)


def make_estimator(config: AlgorithmConfig, group_size: int | None = None) -> AdvantageEstimator:
    """Return what algorithm.advantage names.  Raises ConfigError for a function that is not there, or does not fit.

    group_size: members of the groups on which one of the user's own is tried; None: a few.
    """
    if config.advantage == "pass_at_k":
        return PassAtK(config.pass_k)
    of_ours = BY_GROUP.get(config.advantage)
    return of_ours or load_own_estimator(config.advantage, group_size, config.advantage_arguments)


def normalization(config: AlgorithmConfig) -> str:
    """Over what advantages are normalised before they are packed: "off", "batch", "task"."""
    if config.advantage == "gae":
        return "off"  # the trainer does it
    return "batch" if config.advantage in OVER_BATCH else config.advantage_normalization
