"""Pieces of running rollouts as bytes: what goes in comes out, bit for bit, and what is damaged is refused."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from partial_samples import is_beginning_of, make_draft, part_of, piece_of

from rlhpc.buffer.prefixes import PartialRollout, decode_partials, encode_partials, joined, up_to_version
from rlhpc.protocol.types import Prefix

PIECES = [piece_of(make_draft(seed, 400), 3 * seed, 3 * seed + length) for seed, length in enumerate([0, 1, 7, 300])]


def with_tokens(**changes: object) -> PartialRollout:
    draft = make_draft(0, 5)
    fields = {name: getattr(draft, name) for name in Prefix.__slots__} | changes
    return PartialRollout(0, 0, 0, 0, 0, Prefix(**fields))  # type: ignore[arg-type]


def test_pieces_come_back_bit_for_bit() -> None:
    found = decode_partials(*encode_partials(PIECES))
    for mine, theirs in zip(found, PIECES, strict=True):
        names = ("group_id", "sample_index", "prompt_id", "start", "before")
        assert [getattr(mine, name) for name in names] == [getattr(theirs, name) for name in names]
        assert is_beginning_of(mine.tokens, theirs.tokens)
        assert len(mine.tokens.token_ids) == len(theirs.tokens.token_ids)
    assert decode_partials(*encode_partials([])) == []


def test_versions_that_change_and_change_back_come_back() -> None:
    versions = np.array([7, 7, 8, 8, 7], np.int32)
    (found,) = decode_partials(*encode_partials([with_tokens(versions=versions)]))
    assert found.tokens.versions.tolist() == versions.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"behaviour_logprobs": np.array([-1, -1, np.nan, -1, -1], np.float32)},
        {"behaviour_logprobs": np.array([-1, -1, -np.inf, -1, -1], np.float32)},
        {"token_ids": np.array([1, 2, 3, -4, 5], np.int32)},
    ],
)
def test_tokens_that_nobody_can_have_sampled_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"not finite|negative token"):
        decode_partials(*encode_partials([with_tokens(**changes)]))


def test_whatever_is_changed_is_refused_as_a_value_error_or_well_formed() -> None:
    rng, (data, num_bytes) = random.Random(0), encode_partials(PIECES)
    plain, num_refused = zlib.decompress(data), 0
    for _ in range(3000):
        changed = bytearray(plain)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = changed[: rng.choice((len(changed), rng.randrange(len(changed))))]
        try:
            decode_partials(zlib.compress(bytes(cut)), num_bytes)
        except ValueError:
            num_refused += 1
        changed = bytearray(data)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        try:
            decode_partials(bytes(changed), num_bytes)
        except ValueError:
            num_refused += 1
    assert num_refused > 3000


@pytest.mark.parametrize("told", [0, 100, (1 << 28) + 1, 1 << 40])
def test_a_few_bytes_that_would_become_many_are_refused(told: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        decode_partials(zlib.compress(bytes(1 << 22)), told)


def test_what_newer_versions_sampled_is_cut_off() -> None:
    prefix = with_tokens(versions=np.array([3, 3, 4, 5, 4], np.int32)).tokens
    for newest, length in ((9, 5), (5, 5), (4, 3), (3, 2)):
        kept = up_to_version(prefix, newest)
        assert kept is not None
        assert len(kept.token_ids) == len(kept.versions) == len(kept.behaviour_logprobs) == length
    assert up_to_version(prefix, 2) is None


def test_a_piece_follows_what_it_was_cut_from_and_nothing_else() -> None:
    draft, other = make_draft(1, 100), make_draft(2, 100)
    piece = piece_of(draft, 40, 60)
    assert piece.follows(part_of(draft, 0, 40))
    assert is_beginning_of(joined(part_of(draft, 0, 40), piece), draft)
    assert not piece.follows(part_of(draft, 0, 39))
    assert not piece.follows(part_of(draft, 0, 41))
    assert not piece.follows(part_of(other, 0, 40))
    assert not piece.follows(None)
    whole = piece_of(draft, 0, 50)
    assert whole.follows(part_of(other, 0, 80))
    assert is_beginning_of(joined(part_of(other, 0, 80), whole), draft)
