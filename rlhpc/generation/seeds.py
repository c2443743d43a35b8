"""Seeds of engines: one for each replica of each run, from the run's seed alone."""

from __future__ import annotations

import hashlib

SEED_BITS = 31  # the range that every library behind an engine accepts


def engine_seed(run_seed: int, replica: int) -> int:
    """Seed of one replica's engine, the same in every attempt.

    Hashed: with `run_seed + replica` runs of neighbouring seeds would share most of their random streams.
    """
    digest = hashlib.blake2b(f"rlhpc generator {run_seed} {replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
