"""Drafts of completions, and pieces of them, for tests of partial rollouts."""

from __future__ import annotations

import numpy as np

from rlhpc.buffer.prefixes import PartialRollout, id_checksum
from rlhpc.protocol.types import Prefix


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
