"""Compact encoding of the tokens of running rollouts since the last report, for wire and disk.

    PartialRollout, several  ⇄  bytes: a table with a row each, runs of versions, token ids, log-probabilities; deflated

A partial rollout states the number of tokens before its own, and their checksum: it continues only those, so that the
receiver detects lost, duplicate or late reports, and two drafts of the same sample are never joined.  The four bytes of
a number are stored separately (shuffled), as in segments.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from rlhpc.crc import crc32
from rlhpc.types import Int32, Prefix

LEVEL = 2  # 5.3 bytes a token instead of 6.3 at level 1; higher ones gain nothing
MAX_BYTES = 1 << 28  # of a report before deflating, at most
_ROW_FIELDS = 7  # group, sample, prompt, start, tokens, checksum of those before, runs of versions
_HEAD = np.dtype("<i8")
_NOT_DEFLATED: Any = zlib_ng.error  # whose type the stub states wrongly


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A part of a completion that is still being sampled."""

    group_id: int
    sample_index: int
    prompt_id: int
    start: int  # tokens of the completion before this piece; 0: it replaces whatever is known
    before: int  # id_checksum of these
    tokens: Prefix  # from `start` on; none: it has grown, and which tokens is not known

    @property
    def end(self) -> int:
        """Tokens of the completion with this piece."""
        return self.start + len(self.tokens.token_ids)

    def follows(self, known: Prefix | None) -> bool:
        """Whether it continues what is known, or replaces it."""
        if self.start == 0:
            return True
        return known is not None and len(known.token_ids) == self.start and id_checksum(known.token_ids) == self.before


def id_checksum(token_ids: Int32, before: int = 0) -> int:
    """CRC32 of token ids that follow those with checksum `before`; the same however a completion is cut into pieces."""
    return crc32(np.ascontiguousarray(token_ids, "<i4").data, before)


def joined(known: Prefix | None, partial: PartialRollout) -> Prefix:
    """What is known with a piece that follows it."""
    if partial.start == 0 or known is None:
        return partial.tokens
    return Prefix(
        np.concatenate([known.token_ids, partial.tokens.token_ids]),
        np.concatenate([known.behaviour_logprobs, partial.tokens.behaviour_logprobs]),
        np.concatenate([known.versions, partial.tokens.versions]),
    )


def up_to_version(prefix: Prefix, newest: int) -> Prefix | None:
    """The tokens before the first one that a version above `newest` sampled; None: there are none."""
    newer = np.flatnonzero(prefix.versions > newest)
    if not len(newer):
        return prefix if len(prefix.token_ids) else None
    end = int(newer[0])
    return Prefix(prefix.token_ids[:end], prefix.behaviour_logprobs[:end], prefix.versions[:end]) if end else None


def encode_partials(partials: Sequence[PartialRollout]) -> tuple[bytes, int]:
    """Return (bytes, number of bytes before they were deflated)."""
    runs = [_runs_of(each.tokens.versions) for each in partials]
    table = [
        (
            each.group_id,
            each.sample_index,
            each.prompt_id,
            each.start,
            len(each.tokens.token_ids),
            each.before,
            len(own),
        )
        for each, (own, _) in zip(partials, runs, strict=True)
    ]
    numbers = [len(partials), *(number for row in table for number in row)]
    parts = [
        np.asarray(numbers, _HEAD).tobytes(),
        _joined(values for values, _ in runs).astype("<i4").tobytes(),
        _joined(lengths for _, lengths in runs).astype("<i4").tobytes(),
        _shuffled(_joined(each.tokens.token_ids for each in partials).astype("<i4")),
        _shuffled(_joined((each.tokens.behaviour_logprobs for each in partials), np.float32).astype("<f4")),
    ]
    plain = b"".join(parts)
    return zlib_ng.compress(plain, LEVEL), len(plain)


def decode_partials(data: bytes | memoryview, num_bytes: int) -> list[PartialRollout]:
    """Undo encode_partials.  num_bytes: size before deflating, as announced.  Raises ValueError, and nothing else."""
    plain = _inflated(data, num_bytes)
    (count,) = _take(plain, 0, _HEAD, 1)
    table = _take(plain, 8, _HEAD, int(count) * _ROW_FIELDS).reshape(-1, _ROW_FIELDS)
    if (table[:, :5] < 0).any() or (table[:, 5:] < 0).any() or table[:, 4:].max(initial=0) > MAX_BYTES << 4:
        raise ValueError("negative or impossible numbers")
    num_runs, num_tokens = int(table[:, 6].sum()), int(table[:, 4].sum())
    at = 8 + table.nbytes
    values, lengths = (
        _take(plain, at, np.dtype("<i4"), num_runs),
        _take(plain, at + 4 * num_runs, np.dtype("<i4"), num_runs),
    )
    at += 8 * num_runs
    token_ids = _unshuffled(_take(plain, at, np.dtype("u1"), 4 * num_tokens), np.dtype("<i4"))
    logprobs = _unshuffled(_take(plain, at + 4 * num_tokens, np.dtype("u1"), 4 * num_tokens), np.dtype("<f4"))
    if at + 8 * num_tokens != len(plain):
        raise ValueError("bytes are left over")
    found, token, run = [], 0, 0
    for group_id, sample_index, prompt_id, start, length, before, runs in table.tolist():
        versions = _versions(values[run : run + runs], lengths[run : run + runs], length)
        mine = slice(token, token + length)
        tokens = _checked(Prefix(token_ids[mine].copy(), logprobs[mine].copy(), versions))
        found.append(PartialRollout(group_id, sample_index, prompt_id, start, before, tokens))
        token, run = token + length, run + runs
    return found


def _checked(tokens: Prefix) -> Prefix:
    if len(tokens.token_ids) and tokens.token_ids.min() < 0:
        raise ValueError("a negative token id")
    if not np.isfinite(tokens.behaviour_logprobs).all():
        raise ValueError("a log-probability that is not finite")
    return tokens


def _runs_of(versions: Int32) -> tuple[Int32, Int32]:
    """(value of each run, length of each run)."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    return versions[starts], np.diff(starts, append=len(versions)).astype(np.int32)


def _versions(values: NDArray[Any], lengths: NDArray[Any], length: int) -> Int32:
    if (lengths < 1).any() or int(lengths.sum(dtype=np.int64)) != length:
        raise ValueError("runs of versions that do not fit their tokens")
    return np.repeat(values, lengths).astype(np.int32)


def _joined(arrays: Iterable[NDArray[Any]], kind: Any = np.int32) -> NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *arrays])


def _shuffled(values: NDArray[Any]) -> bytes:
    return values.view(np.uint8).reshape(-1, 4).T.tobytes()


def _unshuffled(data: NDArray[Any], kind: np.dtype[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(data.reshape(4, -1).T).reshape(-1).view(kind)


def _take(plain: bytes, offset: int, kind: np.dtype[Any], count: int) -> NDArray[Any]:
    if count < 0 or offset + count * kind.itemsize > len(plain):
        raise ValueError("cut off")
    return np.frombuffer(plain, kind, count, offset)


def _inflated(data: bytes | memoryview, num_bytes: int) -> bytes:
    if not 8 <= num_bytes <= MAX_BYTES:
        raise ValueError(f"{num_bytes} bytes, legal: 8 to {MAX_BYTES}")
    inflater = zlib_ng.decompressobj()
    try:
        plain = inflater.decompress(data, num_bytes + 1)
    except _NOT_DEFLATED as error:
        raise ValueError(f"not deflated: {error}") from error
    if len(plain) != num_bytes or not inflater.eof or inflater.unused_data:
        raise ValueError(f"not the {num_bytes} bytes that were announced")
    return plain
