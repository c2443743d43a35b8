"""Engines of neighbouring runs and replicas have nothing in common."""

from __future__ import annotations

from rlhpc.generation.factory import engine_seed


def test_no_two_replicas_of_neighbouring_runs_share_a_seed() -> None:
    seeds = {engine_seed(run_seed, replica) for run_seed in range(100) for replica in range(64)}
    assert len(seeds) == 6400
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_seed_never_changes_with_a_release() -> None:
    assert engine_seed(1, 0) == 282334712
