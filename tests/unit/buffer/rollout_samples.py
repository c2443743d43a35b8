"""Prompts, rollouts and groups for tests of the buffer, drawn from their ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.protocol.types import FinishReason, Prompt, Rollout, RolloutGroup, SamplingParams, ScoredRollout, Verdict


@dataclass
class ManualClock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def make_ledger(clock: ManualClock, **changes: Any) -> AdmissionLedger:
    settings = {
        "num_slots": 4,
        "window_groups": 2,
        "groups_per_step": 2,
        "group_size": 2,
        "sampling": lambda _: SamplingParams(max_tokens=16),
        "lease_deadline_s": 60.0,
        "max_attempts": 3,
        "clock": clock,
    }
    return AdmissionLedger(**(settings | changes))


def make_prompt(prompt_id: int) -> Prompt:
    token_ids = np.arange(prompt_id % 5 + 1, dtype=np.int32) + prompt_id
    return Prompt(prompt_id=prompt_id, task="integer", token_ids=token_ids, reference=f"#### {prompt_id}")


def make_scored(group_id: int, sample_index: int, *, length: int | None = None, **changes: Any) -> ScoredRollout:
    rng = np.random.default_rng([group_id, sample_index])
    num_tokens = int(rng.integers(1, 12)) if length is None else length
    rollout = Rollout(
        group_id=group_id,
        sample_index=sample_index,
        prompt=make_prompt(group_id),
        token_ids=rng.integers(0, 50_000, num_tokens, dtype=np.int32),
        behaviour_logprobs=-rng.random(num_tokens, dtype=np.float32),
        versions=np.sort(rng.integers(0, 4, num_tokens, dtype=np.int32)),
        loss_mask=rng.random(num_tokens) < 0.8,
        finish_reason=changes.pop("finish_reason", FinishReason.STOP),
    )
    reward = float(sample_index % 2)
    fields = {
        "reward": reward,
        "verdict": Verdict.CORRECT if reward else Verdict.WRONG,
        "reward_parts": {"answer": reward, "format": 0.25},
        "detail": f"extracted {group_id} – “é\0”",
    }
    return ScoredRollout(rollout=rollout, **(fields | changes))


def make_group(group_id: int, num_members: int = 2, **changes: Any) -> RolloutGroup:
    members = tuple(make_scored(group_id, index, **changes) for index in range(num_members))
    return RolloutGroup(group_id, make_prompt(group_id), admitted_version=group_id // 2, members=members)


def assert_same_group(actual: RolloutGroup, expected: RolloutGroup) -> None:
    assert (actual.group_id, actual.admitted_version) == (expected.group_id, expected.admitted_version)
    _assert_same_prompt(actual.prompt, expected.prompt)
    assert len(actual.members) == len(expected.members)
    for mine, theirs in zip(actual.members, expected.members, strict=True):
        assert_same_scored(mine, theirs)


def assert_same_scored(mine: ScoredRollout, theirs: ScoredRollout) -> None:
    assert (mine.verdict, mine.reward_parts, mine.detail) == (theirs.verdict, theirs.reward_parts, theirs.detail)
    assert mine.token_rewards == theirs.token_rewards
    assert np.float64(mine.reward).tobytes() == np.float64(theirs.reward).tobytes()
    _assert_same_rollout(mine.rollout, theirs.rollout)


def _assert_same_rollout(mine: Rollout, theirs: Rollout) -> None:
    assert (mine.group_id, mine.sample_index, mine.finish_reason) == (
        theirs.group_id,
        theirs.sample_index,
        theirs.finish_reason,
    )
    _assert_same_prompt(mine.prompt, theirs.prompt)
    for name in ("token_ids", "behaviour_logprobs", "versions", "loss_mask"):
        left, right = getattr(mine, name), getattr(theirs, name)
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()


def _assert_same_prompt(mine: Prompt, theirs: Prompt) -> None:
    assert (mine.prompt_id, mine.task, mine.reference) == (theirs.prompt_id, theirs.task, theirs.reference)
    assert mine.token_ids.tobytes() == theirs.token_ids.tobytes()
