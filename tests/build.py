"""Values that tests build again and again: settings, prompts, requests, leases, rollouts, groups.

Each function has small defaults, so that a test names only what it is about; `changes` are fields of the type by name.
Import the module (`from tests import build`): `build.config(run={"seed": 2})` leaves `config` to variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhpc.config.rules import Config
from rlhpc.protocol.types import (
    FinishReason,
    Lease,
    Prefix,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    ScoredRollout,
    Verdict,
)

SMALLEST: dict[str, dict[str, Any]] = {  # what a run file has to say
    "run": {"name": "small", "num_steps": 4},
    "model": {"path": "none"},
    "data": {"path": "none.jsonl", "task": "integer_arithmetic"},
    "generation": {"max_prompt_tokens": 4, "max_completion_tokens": 8},
    "admission": {"groups_per_step": 2, "group_size": 2},
    "trainer": {"token_budget": 64},
}


def config(**tables: Any) -> Config:
    """Settings of a small run: two groups of two a step, nothing on disk.

    tables: by name of the section, keys that are put over those of SMALLEST; a list takes the section's place.
    """
    settings: dict[str, Any] = dict(SMALLEST)
    for name, table in tables.items():
        settings[name] = settings.get(name, {}) | table if isinstance(table, dict) else table
    return Config.model_validate(settings)


def prompt(
    prompt_id: int = 0, token_ids: Sequence[int] = (9, 9), *, task: str = "any", reference: str = "42"
) -> Prompt:
    return Prompt(prompt_id, task, np.array(token_ids, np.int32), reference)


def prefix(length: int = 2, version: int = 0, *, first_token: int = 5) -> Prefix:
    """The first tokens of `rollout`, all of one version."""
    token_ids = np.arange(first_token, first_token + length, dtype=np.int32)
    return Prefix(token_ids, np.full(length, -1, np.float32), np.full(length, version, np.int32))


def request(
    group_id: int = 0, sample_index: int = 0, *, max_tokens: int = 8, prefix: Prefix | None = None, **changes: Any
) -> RolloutRequest:
    fields = {"prompt": prompt(group_id), "sampling": SamplingParams(max_tokens), "prefix": prefix}
    return RolloutRequest(group_id, sample_index, **(fields | changes))


def lease(group_id: int = 0, sample_indices: Sequence[int] = (0, 1), *, max_tokens: int = 8, **changes: Any) -> Lease:
    """The first lease of a group of two."""
    fields = {
        "attempt": 0,
        "prompt": prompt(group_id),
        "group_size": 2,
        "sampling": SamplingParams(max_tokens),
        "admitted_version": 0,
    }
    return Lease(group_id=group_id, sample_indices=tuple(sample_indices), **(fields | changes))


def rollout(group_id: int = 0, sample_index: int = 0, *, length: int = 3, version: int = 0, **changes: Any) -> Rollout:
    """Tokens 5, 6, … of one version, each with log-probability −1 and part of the loss."""
    fields: dict[str, Any] = {
        "prompt_id": group_id,
        "token_ids": np.arange(5, 5 + length, dtype=np.int32),
        "behaviour_logprobs": np.full(length, -1, np.float32),
        "versions": np.full(length, version, np.int32),
        "loss_mask": np.ones(length, np.bool_),
        "finish_reason": FinishReason.STOP,
    }
    return Rollout(group_id, sample_index, **(fields | changes))


def scored(member: Rollout, reward: float | None = None, **changes: Any) -> ScoredRollout:
    """By default the members of a group get 0, 1, 0, …, so that it has spread; a reward above 0 is a correct answer."""
    reward = float(member.sample_index % 2) if reward is None else reward
    verdict = Verdict.CORRECT if reward > 0 else Verdict.WRONG
    return ScoredRollout(**({"rollout": member, "reward": reward, "verdict": verdict} | changes))


def group(
    group_id: int = 0, rewards: Sequence[float] = (0.0, 1.0), *, admitted_version: int = 0, **changes: Any
) -> RolloutGroup:
    """A member for each reward; `changes` are those of `rollout`."""
    members = [scored(rollout(group_id, index, **changes), reward) for index, reward in enumerate(rewards)]
    return RolloutGroup(group_id, prompt(members[0].rollout.prompt_id), admitted_version, tuple(members))
