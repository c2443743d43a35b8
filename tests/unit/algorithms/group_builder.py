"""Groups of rollouts for the tests of this directory."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhpc.protocol.types import FinishReason, Prompt, Rollout, RolloutGroup, ScoredRollout, Verdict


def rollout(index: int = 0, *, length: int = 3, prompt_length: int = 2, **changed: Any) -> Rollout:
    prompt = Prompt(7, "math", np.arange(100, 100 + prompt_length, dtype=np.int32), "42")
    fields: dict[str, Any] = {
        "group_id": 5,
        "sample_index": index,
        "prompt": prompt,
        "token_ids": np.arange(length, dtype=np.int32) + 10 * index,
        "behaviour_logprobs": -np.arange(1, length + 1, dtype=np.float32),
        "versions": np.full(length, 4, np.int32),
        "loss_mask": np.ones(length, np.bool_),
        "finish_reason": FinishReason.STOP,
    }
    return Rollout(**(fields | changed))


def scored(member: Rollout, reward: float, verdict: Verdict | None = None, **parts: float) -> ScoredRollout:
    return ScoredRollout(member, reward, verdict or (Verdict.CORRECT if reward > 0 else Verdict.WRONG), parts)


def group(*members: ScoredRollout, admitted_version: int = 3) -> RolloutGroup:
    return RolloutGroup(5, members[0].rollout.prompt, admitted_version, members)
