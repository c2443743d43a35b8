"""Lay groups out as flat columns, and read them back: a rollout segment without the file around it.

Input: ResolvedGroup.  Output: named numpy arrays; and the reverse.  docs/rollout_format.md is the description for
people; it changes with this file.  Ragged columns are values end to end with offsets, since HDF5's own variable-length
types are slow, are not compressed and do not survive a torn write.  Text is UTF-8 bytes in the same manner, so that NUL
and lone surrogates in a model's output are no special case.
Every row carries a CRC32 of its content.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.buffer.resolved import DropReason, ResolvedGroup
from rlhpc.crc import crc32
from rlhpc.errors import SegmentError
from rlhpc.types import FinishReason, Prompt, Rollout, RolloutGroup, ScoredRollout, Verdict

Columns = dict[str, NDArray[Any]]

SCHEMA = 1
ROLLOUT_TEXTS = ("detail", "reward_parts", "token_rewards")
TEXT_COLUMNS = ("groups/task", "groups/reference", *(f"rollouts/{name}" for name in ROLLOUT_TEXTS))
WORD_COLUMNS = ("groups/drop_reason", "rollouts/verdict", "rollouts/finish_reason")  # fixed-length ASCII

_TOKEN_COLUMNS: dict[str, np.dtype[Any]] = {
    "rollouts/token_ids": np.dtype("<i4"),
    "rollouts/behaviour_logprobs": np.dtype("<f4"),
    "rollouts/versions": np.dtype("<i4"),
    "rollouts/loss_mask": np.dtype("u1"),
}
_GROUP_SCALARS: dict[str, np.dtype[Any]] = {
    "group_id": np.dtype("<i8"),
    "prompt_id": np.dtype("<i8"),
    "admitted_version": np.dtype("<i8"),
    "consumed_step": np.dtype("<i8"),
    "attempts": np.dtype("<i4"),
    "drop_reason": np.dtype("S16"),
    "trained_version": np.dtype("<i8"),
    "applied": np.dtype("<i1"),
    "group_size": np.dtype("<i4"),
}
_ROLLOUT_SCALARS: dict[str, np.dtype[Any]] = {
    "group_id": np.dtype("<i8"),
    "sample_index": np.dtype("<i4"),
    "reward": np.dtype("<f8"),
    "verdict": np.dtype("S16"),
    "finish_reason": np.dtype("S16"),
}


@dataclass(frozen=True, slots=True)
class _GroupRow:
    """One row of groups/, as it is stored."""

    group_id: int
    prompt_id: int
    admitted_version: int
    consumed_step: int
    attempts: int
    drop_reason: bytes
    num_rollouts: int
    prompt_token_ids: NDArray[Any]
    task: bytes
    reference: bytes
    trained_version: int
    applied: int
    group_size: int

    def crc32(self) -> int:
        numbers = (self.group_id, self.prompt_id, self.admitted_version, self.consumed_step, self.attempts)
        crc = crc32(struct.pack("<7q", *numbers, self.num_rollouts, len(self.prompt_token_ids)))
        crc = crc32(self.prompt_token_ids.data, crc)
        crc = _crc_of_texts(crc, self.drop_reason, self.task, self.reference)
        return crc32(struct.pack("<3q", self.trained_version, self.applied, self.group_size), crc)


@dataclass(frozen=True, slots=True)
class _RolloutRow:
    """One row of rollouts/, as it is stored."""

    group_id: int
    sample_index: int
    reward: float
    verdict: bytes
    finish_reason: bytes
    detail: bytes
    reward_parts: bytes
    token_rewards: bytes
    tokens: tuple[NDArray[Any], ...]  # in the order of _TOKEN_COLUMNS

    def crc32(self) -> int:
        crc = crc32(struct.pack("<3qd", self.group_id, self.sample_index, len(self.tokens[0]), self.reward))
        for values in self.tokens:
            crc = crc32(values.data, crc)
        texts = (self.verdict, self.finish_reason, self.detail, self.reward_parts, self.token_rewards)
        return _crc_of_texts(crc, *texts)


def to_columns(groups: Sequence[ResolvedGroup]) -> Columns:
    """Return the columns "groups/…" and "rollouts/…" of these groups, in their order.

    Raises SegmentError when the arrays of a rollout differ in length.
    """
    group_rows = [_group_row(resolved) for resolved in groups]
    rows = [_rollout_row(member) for resolved in groups for member in resolved.group.members]
    columns: Columns = {
        f"groups/{name}": np.array([getattr(row, name) for row in group_rows], dtype=dtype)
        for name, dtype in _GROUP_SCALARS.items()
    }
    columns["groups/rollout_offsets"] = _offsets(row.num_rollouts for row in group_rows)
    columns["groups/prompt_offsets"] = _offsets(len(row.prompt_token_ids) for row in group_rows)
    columns["groups/prompt_token_ids"] = _concatenate([row.prompt_token_ids for row in group_rows], np.dtype("<i4"))
    columns["groups/crc32"] = np.array([row.crc32() for row in group_rows], dtype="<u4")
    for name, dtype in _ROLLOUT_SCALARS.items():
        columns[f"rollouts/{name}"] = np.array([getattr(row, name) for row in rows], dtype=dtype)
    columns["rollouts/token_offsets"] = _offsets(len(row.tokens[0]) for row in rows)
    for position, (name, dtype) in enumerate(_TOKEN_COLUMNS.items()):
        columns[name] = _concatenate([row.tokens[position] for row in rows], dtype)
    columns["rollouts/crc32"] = np.array([row.crc32() for row in rows], dtype="<u4")
    for column in TEXT_COLUMNS:
        table, name = column.split("/")
        texts = [getattr(row, name) for row in (group_rows if table == "groups" else rows)]
        columns[column] = np.frombuffer(b"".join(texts), dtype=np.uint8)
        columns[f"{column}_offsets"] = _offsets(map(len, texts))
    return columns


def from_columns(columns: Columns, source: str) -> list[ResolvedGroup]:
    """Undo to_columns, verifying the CRC32 of every row; arrays of the result are views of the columns.

    Raises SegmentError naming `source` and the row.
    """
    members = list(_read_rollouts(columns, source))
    texts = {name: texts_of(columns, f"groups/{name}") for name in ("task", "reference")}
    prompts = _slices(columns["groups/prompt_token_ids"], columns["groups/prompt_offsets"])
    borders = pairwise(columns["groups/rollout_offsets"].tolist())
    resolved = []
    for index, (prompt_token_ids, (first, last)) in enumerate(zip(prompts, borders, strict=True)):
        row = _GroupRow(
            num_rollouts=last - first,
            prompt_token_ids=prompt_token_ids,
            **_row_fields(columns, "groups", _GROUP_SCALARS, texts, index),
        )
        if row.crc32() != columns["groups/crc32"][index]:
            raise SegmentError(f"{source}: groups row {index} (group {row.group_id}): checksum differs")
        resolved.append(_to_resolved(row, members[first:last]))
    return resolved


def texts_of(columns: Columns, name: str) -> list[bytes]:
    """The entries of a text column, as UTF-8 bytes."""
    return [values.tobytes() for values in _slices(columns[name], columns[f"{name}_offsets"])]


def decode_text(text: bytes) -> str:
    """Undo encode_text."""
    return text.decode("utf-8", "surrogatepass")


def encode_text(text: str) -> bytes:
    """UTF-8, as in text columns; lone surrogates are allowed."""
    return text.encode("utf-8", "surrogatepass")


def encode_token_rewards(token_rewards: Mapping[int, float]) -> bytes:
    """JSON, token → reward, every number to its last bit; nothing if there are none."""
    return json.dumps(token_rewards).encode() if token_rewards else b""


def decode_token_rewards(text: bytes) -> dict[int, float]:
    """Undo encode_token_rewards."""
    return {int(place): value for place, value in json.loads(text).items()} if text else {}


def _group_row(resolved: ResolvedGroup) -> _GroupRow:
    group, prompt = resolved.group, resolved.group.prompt
    return _GroupRow(
        group_id=group.group_id,
        prompt_id=prompt.prompt_id,
        admitted_version=group.admitted_version,
        consumed_step=resolved.consumed_step,
        attempts=resolved.attempts,
        drop_reason=(resolved.drop_reason or "").encode(),
        num_rollouts=len(group.members),
        prompt_token_ids=np.ascontiguousarray(prompt.token_ids, dtype="<i4"),
        task=encode_text(prompt.task),
        reference=encode_text(prompt.reference),
        trained_version=resolved.trained_version,
        applied=-1 if resolved.applied is None else int(resolved.applied),
        group_size=resolved.group_size,
    )


def _rollout_row(scored: ScoredRollout) -> _RolloutRow:
    rollout = scored.rollout
    arrays = (rollout.token_ids, rollout.behaviour_logprobs, rollout.versions, rollout.loss_mask)
    if len({len(array) for array in arrays}) != 1:
        raise SegmentError(
            f"rollout {rollout.group_id}:{rollout.sample_index}: token_ids, behaviour_logprobs, versions and loss_mask "
            f"have lengths {[len(array) for array in arrays]}"
        )
    return _RolloutRow(
        group_id=rollout.group_id,
        sample_index=rollout.sample_index,
        reward=float(scored.reward),
        verdict=scored.verdict.encode(),
        finish_reason=rollout.finish_reason.encode(),
        detail=encode_text(scored.detail),
        reward_parts=encode_text(json.dumps(scored.reward_parts)),
        token_rewards=encode_token_rewards(scored.token_rewards),
        tokens=tuple(np.ascontiguousarray(a, dtype=t) for a, t in zip(arrays, _TOKEN_COLUMNS.values(), strict=True)),
    )


def _read_rollouts(columns: Columns, source: str) -> Iterable[_RolloutRow]:
    texts = {name: texts_of(columns, f"rollouts/{name}") for name in ROLLOUT_TEXTS}
    offsets = columns["rollouts/token_offsets"]
    tokens = zip(*(_slices(columns[name], offsets) for name in _TOKEN_COLUMNS), strict=True)
    for index, arrays in enumerate(tokens):
        row = _RolloutRow(tokens=arrays, **_row_fields(columns, "rollouts", _ROLLOUT_SCALARS, texts, index))
        if row.crc32() != columns["rollouts/crc32"][index]:
            where = f"rollout {row.group_id}:{row.sample_index}"
            raise SegmentError(f"{source}: rollouts row {index} ({where}): checksum differs")
        yield row


def _row_fields(
    columns: Columns, table: str, scalars: Iterable[str], texts: dict[str, list[bytes]], index: int
) -> dict[str, Any]:
    numbers = {name: columns[f"{table}/{name}"][index].item() for name in scalars}
    return numbers | {name: values[index] for name, values in texts.items()}


def _to_resolved(row: _GroupRow, members: Sequence[_RolloutRow]) -> ResolvedGroup:
    prompt = Prompt(row.prompt_id, decode_text(row.task), row.prompt_token_ids, decode_text(row.reference))
    return ResolvedGroup(
        group=RolloutGroup(
            group_id=row.group_id,
            prompt=prompt,
            admitted_version=row.admitted_version,
            members=tuple(_to_scored(member, prompt) for member in members),
        ),
        consumed_step=row.consumed_step,
        drop_reason=DropReason(row.drop_reason.decode()) if row.drop_reason else None,
        attempts=row.attempts,
        trained_version=row.trained_version,
        applied=None if row.applied < 0 else bool(row.applied),
        group_size=row.group_size,
    )


def _to_scored(row: _RolloutRow, prompt: Prompt) -> ScoredRollout:
    token_ids, behaviour_logprobs, versions, loss_mask = row.tokens
    return ScoredRollout(
        rollout=Rollout(
            group_id=row.group_id,
            sample_index=row.sample_index,
            prompt=prompt,
            token_ids=token_ids,
            behaviour_logprobs=behaviour_logprobs,
            versions=versions,
            loss_mask=loss_mask.view(np.bool_),
            finish_reason=FinishReason(row.finish_reason.decode()),
        ),
        reward=row.reward,
        verdict=Verdict(row.verdict.decode()),
        reward_parts=json.loads(row.reward_parts),
        detail=decode_text(row.detail),
        token_rewards=decode_token_rewards(row.token_rewards),
    )


def _crc_of_texts(crc: int, *texts: bytes) -> int:
    for text in texts:  # the length first: "ab", "c" is not "a", "bc"
        crc = crc32(text, crc32(struct.pack("<q", len(text)), crc))
    return crc


def _offsets(lengths: Iterable[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(list(lengths), dtype=np.int64)]).astype("<i8")


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _slices(values: NDArray[Any], offsets: NDArray[Any]) -> list[NDArray[Any]]:
    """Cut a ragged column up.  Raises ValueError when the offsets are not a partition of the values."""
    borders = offsets.tolist()
    if borders[:1] != [0] or borders[-1] != len(values) or any(a > b for a, b in pairwise(borders)):
        raise ValueError("offsets do not partition the values without gap or overlap")
    return [values[first:last] for first, last in pairwise(borders)]
