"""A rollout as bytes of a journal file, and back.

    ScoredRollout + admitted_version  ⇄  one row of `rollouts`, one of `prompts`, tokens, text

Pure.  A row's checksum is the CRC32 of the row's other bytes and then of everything that it refers to, in the order of
the columns: a row whose checksum holds is what was appended.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhpc.buffer.journal_layout import PROMPT_ROW, ROLLOUT_ROW, Sizes
from rlhpc.buffer.segment_columns import decode_text, decode_token_rewards, encode_text, encode_token_rewards
from rlhpc.crc import crc32
from rlhpc.types import FinishReason, Prompt, Rollout, ScoredRollout, Verdict

# The same bytes as the rows of journal_layout.py (a test compares them); struct is ten times as fast as a numpy row.
_ROLLOUT = struct.Struct("<5qd7i16s16s")
_PROMPT = struct.Struct("<4q3i")
_CRC = struct.Struct("<I")
_made = tuple.__new__  # makes a NamedTuple without its constructor's Python call


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """A delivered rollout, and what is needed of its group to continue it."""

    sequence: int  # number of the rollout in the run, from 1, in the order of arrival
    scored: ScoredRollout
    admitted_version: int  # of the group


class Encoded(NamedTuple):
    """What a prompt or a rollout adds to a file."""

    row: bytes
    text: bytes
    tokens: tuple[NDArray[Any], ...]  # one per token column; making a memoryview takes as long as a checksum
    used: Sizes  # of the file, including it


def encode_prompt(prompt: Prompt, group_id: int, used: Sizes) -> Encoded:
    """Encode a prompt that follows what the file holds already (`used`)."""
    task = encode_text(prompt.task)
    text = task + encode_text(prompt.reference)
    numbers = (len(prompt.token_ids), len(task), len(text) - len(task))
    row = _PROMPT.pack(group_id, prompt.prompt_id, used.prompt_tokens, used.text_bytes, *numbers)
    row += _CRC.pack(_crc_of(row, [prompt.token_ids], text))
    after = used.plus(Sizes(prompts=1, prompt_tokens=len(prompt.token_ids), text_bytes=len(text)))
    return Encoded(row, text, (prompt.token_ids,), after)


@lru_cache(maxsize=1024)  # few differ, and encoding one takes as long as the rest of a row
def _as_json(parts: tuple[tuple[str, float], ...]) -> bytes:
    return json.dumps(dict(parts)).encode()


def encode_rollout(record: JournalRecord, prompt_row: int, used: Sizes) -> Encoded:
    """Encode a rollout that follows what the file holds already; prompt_row: row of its prompt in the same file."""
    scored, rollout = record.scored, record.scored.rollout
    text = detail = encode_text(scored.detail)
    if scored.reward_parts:
        text += _as_json(tuple(scored.reward_parts.items()))
    token_rewards = encode_token_rewards(scored.token_rewards)
    num_parts, text = len(text) - len(detail), text + token_rewards
    num_tokens = len(rollout.token_ids)
    row = _ROLLOUT.pack(
        record.sequence,
        rollout.group_id,
        rollout.prompt.prompt_id,
        used.tokens,
        used.text_bytes,
        scored.reward,
        rollout.sample_index,
        record.admitted_version,
        num_tokens,
        prompt_row,
        len(detail),
        num_parts,
        len(token_rewards),
        scored.verdict.encode(),
        rollout.finish_reason.encode(),
    )
    tokens = (rollout.token_ids, rollout.behaviour_logprobs, rollout.versions, rollout.loss_mask)
    row += _CRC.pack(_crc_of(row, tokens, text))
    rollouts, prompts, prompt_tokens, before, text_bytes = used
    after = _made(Sizes, (rollouts + 1, prompts, prompt_tokens, before + num_tokens, text_bytes + len(text)))
    return _made(Encoded, (row, text, tokens, after))


def decode_prompt(
    row: bytes, token_ids: NDArray[np.int32], text: memoryview, kept: NDArray[np.int32]
) -> tuple[int, Prompt] | None:
    """(group_id, prompt), or None if the row's checksum does not hold.

    token_ids, text: the whole columns, as far as they were read.  kept: the array of token_ids of which the prompt
    keeps a view.
    """
    group_id, prompt_id, token_start, text_start, num_tokens, task_bytes, reference_bytes = _PROMPT.unpack(row[:-4])
    text_end = text_start + task_bytes + reference_bytes
    if not _is_within(len(token_ids), token_start, num_tokens) or min(task_bytes, reference_bytes) < 0:
        return None
    if not 0 <= text_start <= text_end <= len(text):
        return None
    mine, words = token_ids[token_start : token_start + num_tokens], bytes(text[text_start:text_end])
    if _CRC.pack(_crc_of(row[:-4], [mine], words)) != row[-4:]:
        return None
    mine = kept[token_start : token_start + num_tokens]
    return group_id, Prompt(prompt_id, decode_text(words[:task_bytes]), mine, decode_text(words[task_bytes:]))


def decode_rollout(
    row: bytes,
    prompts: Sequence[tuple[int, Prompt] | None],
    columns: Sequence[NDArray[Any]],
    text: memoryview,
    kept: Sequence[NDArray[Any]],
) -> JournalRecord | None:
    """The rollout of a row, or None if its checksum, or that of its prompt, does not hold.

    prompts: of all rows of `prompts`.  columns: the four of TOKEN_COLUMNS, whole, as far as they were read.  kept: the
    arrays of the same columns of which the rollout keeps views.
    """
    numbers = _ROLLOUT.unpack(row[:-4])
    sequence, group_id, prompt_id, token_start, text_start, reward, sample_index, admitted = numbers[:8]
    num_tokens, prompt_row, detail_bytes, parts_bytes, rewards_bytes, verdict, finish = numbers[8:]
    text_end = text_start + detail_bytes + parts_bytes + rewards_bytes
    if not _is_within(len(columns[0]), token_start, num_tokens) or min(detail_bytes, parts_bytes, rewards_bytes) < 0:
        return None
    if not 0 <= text_start <= text_end <= len(text) or not 0 <= prompt_row < len(prompts):
        return None
    mine = [column[token_start : token_start + num_tokens] for column in columns]
    words = bytes(text[text_start:text_end])
    if _CRC.pack(_crc_of(row[:-4], mine, words)) != row[-4:]:
        return None
    found = prompts[prompt_row]
    if found is None or found[0] != group_id or found[1].prompt_id != prompt_id:
        return None
    token_ids, behaviour_logprobs, versions, loss_mask = (
        column[token_start : token_start + num_tokens] for column in kept
    )
    rollout = Rollout(
        group_id=group_id,
        sample_index=sample_index,
        prompt=found[1],
        token_ids=token_ids,
        behaviour_logprobs=behaviour_logprobs,
        versions=versions,
        loss_mask=loss_mask.view(np.bool_),
        finish_reason=FinishReason(finish.rstrip(b"\0").decode()),
    )
    parts_end = detail_bytes + parts_bytes
    scored = ScoredRollout(
        rollout,
        reward,
        Verdict(verdict.rstrip(b"\0").decode()),
        json.loads(words[detail_bytes:parts_end]) if parts_bytes else {},
        decode_text(words[:detail_bytes]),
        decode_token_rewards(words[parts_end:]),
    )
    return JournalRecord(sequence, scored, admitted)


def _crc_of(row: bytes, tokens: Sequence[NDArray[Any]], text: bytes) -> int:
    crc = crc32(row)
    for values in tokens:
        crc = crc32(values, crc)
    return crc32(text, crc)


def _is_within(length: int, start: int, count: int) -> bool:
    return start >= 0 and count >= 0 and start + count <= length


assert ROLLOUT_ROW.itemsize == _ROLLOUT.size + _CRC.size
assert PROMPT_ROW.itemsize == _PROMPT.size + _CRC.size
