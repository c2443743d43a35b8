"""Prompts, rollouts, groups and drafts of completions for tests of the buffer, drawn from their ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.buffer.journal import JournalRecord
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.prefixes import PartialRollout, id_checksum
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.models.routes import MixtureForm
from rlhpc.protocol.types import (
    FinishReason,
    Prefix,
    Prompt,
    Rollout,
    RolloutGroup,
    Routes,
    SamplingParams,
    ScoredRollout,
    TeacherScores,
    Verdict,
)


@dataclass
class ManualClock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def ledger_settings(clock: ManualClock, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_slots": 4,
        "window_groups": 2,
        "groups_per_step": 2,
        "group_size": 2,
        "sampling": lambda _: SamplingParams(max_tokens=16),
        "lease_deadline_s": 60.0,
        "max_attempts": 3,
        "clock": clock,
    }
    return settings | changes


def make_ledger(clock: ManualClock, **changes: Any) -> AdmissionLedger:
    return AdmissionLedger(**ledger_settings(clock, **changes))


def make_writer(directory: Path, first_index: int = 0) -> SegmentWriter:
    return SegmentWriter(
        directory, first_index, run_name="test", run_attempt=0, max_groups=8, max_s=60.0, clock=ManualClock()
    )


def make_prefix(length: int) -> Prefix:
    return Prefix(np.arange(length, dtype=np.int32), np.zeros(length, np.float32), np.zeros(length, np.int32))


def make_prompt(prompt_id: int) -> Prompt:
    token_ids = np.arange(prompt_id % 5 + 1, dtype=np.int32) + prompt_id
    return Prompt(prompt_id=prompt_id, task="integer", token_ids=token_ids, reference=f"#### {prompt_id}")


def make_scored(group_id: int, sample_index: int, *, length: int | None = None, **changes: Any) -> ScoredRollout:
    rng = np.random.default_rng([group_id, sample_index])
    num_tokens = int(rng.integers(1, 12)) if length is None else length
    rollout = Rollout(
        group_id=group_id,
        sample_index=sample_index,
        prompt_id=group_id,
        token_ids=rng.integers(0, 50_000, num_tokens, dtype=np.int32),
        behaviour_logprobs=-rng.random(num_tokens, dtype=np.float32),
        versions=np.sort(rng.integers(0, 4, num_tokens, dtype=np.int32)),
        loss_mask=rng.random(num_tokens) < 0.8,
        finish_reason=changes.pop("finish_reason", FinishReason.STOP),
        routes=changes.pop("routes", None),
        row_starts=np.array(changes.pop("row_starts", ()), np.int32),
    )
    reward = float(sample_index % 2)
    fields = {
        "reward": reward,
        "verdict": Verdict.CORRECT if reward else Verdict.WRONG,
        "reward_parts": {"answer": reward, "format": 0.25},
        "detail": f"extracted {group_id} – “é\0”",
    }
    return ScoredRollout(rollout=rollout, **(fields | changes))


def make_teacher(length: int, num_top: int = 0, seed: int = 0) -> TeacherScores:
    """Numbers of a teacher on a completion of `length` tokens."""
    rng = np.random.default_rng([length, num_top, seed])
    ids = rng.integers(0, 50_000, length * num_top, dtype=np.int32)
    return TeacherScores(-rng.random(length, dtype=np.float32), ids, -rng.random(len(ids), dtype=np.float32))


def make_routes(num_tokens: int) -> Routes:
    """Routes of a model with two mixtures of 8 experts, 2 a token."""
    experts = np.argsort(np.random.default_rng(num_tokens).random((num_tokens, 2, 8)), axis=2)[:, :, :2]
    return MixtureForm((0, 1), 8, 2).pack(experts)


def make_record(sequence: int, scored: ScoredRollout, admitted_version: int = 0) -> JournalRecord:
    return JournalRecord(sequence, scored, make_prompt(scored.rollout.prompt_id), admitted_version)


def make_group(group_id: int, num_members: int = 2, **changes: Any) -> RolloutGroup:
    members = tuple(make_scored(group_id, index, **changes) for index in range(num_members))
    return RolloutGroup(group_id, make_prompt(group_id), admitted_version=group_id // 2, members=members)


def assert_same_group(actual: RolloutGroup, expected: RolloutGroup) -> None:
    assert (actual.group_id, actual.admitted_version) == (expected.group_id, expected.admitted_version)
    assert_same_prompt(actual.prompt, expected.prompt)
    assert len(actual.members) == len(expected.members)
    for mine, theirs in zip(actual.members, expected.members, strict=True):
        assert_same_scored(mine, theirs)


def assert_same_scored(mine: ScoredRollout, theirs: ScoredRollout) -> None:
    assert (mine.verdict, mine.reward_parts, mine.detail) == (theirs.verdict, theirs.reward_parts, theirs.detail)
    assert mine.token_rewards == theirs.token_rewards
    assert np.float64(mine.reward).tobytes() == np.float64(theirs.reward).tobytes()
    _assert_same_rollout(mine.rollout, theirs.rollout)
    assert (mine.teacher is None) == (theirs.teacher is None)
    for name in ("logprobs", "flat_top_ids", "flat_top_logprobs") if theirs.teacher is not None else ():
        left, right = getattr(mine.teacher, name), getattr(theirs.teacher, name)
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()


def _assert_same_rollout(mine: Rollout, theirs: Rollout) -> None:
    for name in ("group_id", "sample_index", "prompt_id", "finish_reason"):
        assert getattr(mine, name) == getattr(theirs, name)
    for name in ("token_ids", "behaviour_logprobs", "versions", "loss_mask", "row_starts"):
        left, right = getattr(mine, name), getattr(theirs, name)
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()
    assert (mine.routes is None) == (theirs.routes is None)
    if mine.routes is not None and theirs.routes is not None:
        assert replace(mine.routes, packed=theirs.routes.packed) == theirs.routes
        assert mine.routes.packed.tobytes() == theirs.routes.packed.tobytes()


def assert_same_prompt(mine: Prompt, theirs: Prompt) -> None:
    assert (mine.prompt_id, mine.task, mine.reference) == (theirs.prompt_id, theirs.task, theirs.reference)
    assert mine.token_ids.tobytes() == theirs.token_ids.tobytes()


# -------------------------------------------- Drafts of completions, and pieces of them, for tests of partial rollouts


def make_draft(seed: int, length: int, shared: Prefix | None = None) -> Prefix:
    """A completion; shared: what it begins with."""
    rng = np.random.default_rng([seed, length])
    draft = Prefix(
        rng.integers(0, 150_000, length, dtype=np.int32),
        -rng.random(length, dtype=np.float32),
        np.sort(rng.integers(4, 7, length, dtype=np.int32)),
    )
    if shared is None:
        return draft
    own = part_of(draft, len(shared.token_ids), length)
    return Prefix(
        np.concatenate([shared.token_ids, own.token_ids]),
        np.concatenate([shared.behaviour_logprobs, own.behaviour_logprobs]),
        np.concatenate([shared.versions, own.versions]),
    )


def part_of(draft: Prefix, start: int, end: int) -> Prefix:
    return Prefix(draft.token_ids[start:end], draft.behaviour_logprobs[start:end], draft.versions[start:end])


def piece_of(draft: Prefix, start: int, end: int, *, member: tuple[int, int] = (0, 0)) -> PartialRollout:
    before = id_checksum(draft.token_ids[:start])
    return PartialRollout(member[0], member[1], member[0], start, before, part_of(draft, start, end))


def is_beginning_of(known: Prefix, draft: Prefix) -> bool:
    mine = part_of(draft, 0, len(known.token_ids))
    return all(
        getattr(known, name).tobytes() == getattr(mine, name).tobytes()
        and getattr(known, name).dtype == getattr(mine, name).dtype
        for name in ("token_ids", "behaviour_logprobs", "versions")
    )
