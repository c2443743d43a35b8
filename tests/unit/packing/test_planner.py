from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.algorithms import packing
from rlhpc.algorithms.packing import FlopCost, Plan, lockstep_slowdown, plan
from rlhpc.protocol.errors import PackingError

COST = FlopCost(linear=24576.0, quadratic=1.0)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Lengths that may be long-tailed or all alike, a budget that holds the longest, and a number of ranks."""
    budget = draw(st.integers(1, 400))
    shortest = draw(st.integers(1, budget))
    lengths = draw(st.lists(st.integers(shortest, budget), min_size=1, max_size=120))
    return np.array(lengths), budget, draw(st.integers(1, 9))


@given(batches())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_every_sample_lies_in_one_row_and_no_row_breaks_the_budget(batch: tuple[np.ndarray, int, int]) -> None:
    lengths, budget, num_ranks = batch
    planned = plan(lengths, token_budget=budget, num_ranks=num_ranks, cost=FlopCost(10.0, 1.0))
    assert sorted(planned.indices) == list(range(len(lengths)))
    assert planned.borders[0] == 0
    assert planned.borders[-1] == len(lengths)
    assert len(planned.borders) == num_ranks * planned.num_microbatches + 1
    assert planned.row_sums(lengths).max() <= budget


@given(batches())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_never_twice_the_rows_that_any_plan_needs(batch: tuple[np.ndarray, int, int]) -> None:
    """A row is added only when all others are at least half full, or to complete a micro-step."""
    lengths, budget, num_ranks = batch
    planned = plan(lengths, token_budget=budget, num_ranks=num_ranks, cost=COST)
    fewest = -(-lengths.sum() // budget)
    assert planned.num_microbatches <= -(-2 * fewest // num_ranks) + 1


@given(batches())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_rows_of_a_micro_step_are_neighbours_in_cost(batch: tuple[np.ndarray, int, int]) -> None:
    lengths, budget, num_ranks = batch
    planned = plan(lengths, token_budget=budget, num_ranks=num_ranks, cost=COST)
    row_costs = planned.row_sums(COST(lengths))
    for m in range(planned.num_microbatches - 1):
        assert row_costs[:, m].min() >= row_costs[:, m + 1].max() * (1 - 1e-12)


@pytest.mark.starts
def test_the_same_lengths_give_the_same_plan_in_another_process() -> None:
    program = (
        "import numpy as np; from rlhpc.algorithms.packing import FlopCost; from rlhpc.algorithms.packing import plan;"
        "p = plan(np.random.default_rng(3).integers(1, 900, 200), token_budget=1000, num_ranks=4, cost=FlopCost(9, 1));"
        "print(p.indices.tolist(), p.borders.tolist())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    lengths = np.random.default_rng(3).integers(1, 900, 200)
    here = plan(lengths, token_budget=1000, num_ranks=4, cost=FlopCost(9, 1))
    assert there.strip() == f"{here.indices.tolist()} {here.borders.tolist()}"


def test_an_oversize_sample_is_named_with_its_length_and_the_budget() -> None:
    with pytest.raises(PackingError, match=r"sample 2 has 11 tokens, trainer.token_budget=10"):
        plan(np.array([3, 10, 11, 4]), token_budget=10, num_ranks=2, cost=COST)


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "why"),
    [([], 1, "whole numbers"), ([3, 0], 1, "sample 1 has no tokens"), ([3], 0, "num_ranks=0"), ([1.5], 1, "whole")],
)
def test_nonsense_is_refused(lengths: list[float], num_ranks: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plan(np.array(lengths), token_budget=10, num_ranks=num_ranks, cost=COST)


def test_ranks_without_samples_have_an_empty_row() -> None:
    planned = plan(np.array([5, 7]), token_budget=10, num_ranks=4, cost=COST)
    assert planned.num_microbatches == 1
    assert sorted(len(planned.row(rank, 0)) for rank in range(4)) == [0, 0, 1, 1]


def test_rows_that_exactly_fill_the_budget_are_found() -> None:
    planned = plan(np.array([6, 4, 7, 3, 5, 5]), token_budget=10, num_ranks=3, cost=COST)
    assert planned.num_microbatches == 1
    assert planned.row_sums(np.array([6, 4, 7, 3, 5, 5])).tolist() == [[10], [10], [10]]


def test_long_sequences_are_neighbours_instead_of_slowing_every_micro_step() -> None:
    """Four sequences that fill a row: spread over four micro-steps they would set the pace of all of them."""
    lengths = np.array([32768] * 4 + [1024] * (12 * 28))
    planned = plan(lengths, token_budget=32768, num_ranks=4, cost=COST)
    steps_with_a_long_one = [
        any(lengths[planned.row(rank, m)].max(initial=0) == 32768 for rank in range(4))
        for m in range(planned.num_microbatches)
    ]
    assert sum(steps_with_a_long_one) == 1


def skewed(seed: int, num_samples: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(2725), 1.0, num_samples)
    return np.clip(drawn, 16, 32768).astype(np.int64)


@pytest.mark.parametrize("seed", range(3))
def test_peeling_is_never_worse_than_balancing_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = skewed(seed, 512)
    planned = plan(lengths, token_budget=32768, num_ranks=8, cost=COST)
    order = np.argsort(-lengths, kind="stable")
    row, num_rows = np.empty(512, np.int64), planned.num_ranks * planned.num_microbatches
    tokens, costs = lengths[order], COST(lengths[order])
    assert packing._balance(tokens, costs, np.arange(512), 32768, num_rows, 0, row) == num_rows
    balanced = packing._duration(row, costs, 8, num_rows) * 8 / costs.sum()
    assert lockstep_slowdown(planned, lengths, COST) < balanced
    assert lockstep_slowdown(planned, lengths, COST) < 1.035


def test_lengths_that_fit_in_pairs_are_not_tried_for_every_number_of_rows() -> None:
    """Just over a third of the budget each: tokens alone suggest 3 a row, 2 fit."""
    lengths = np.full(6000, 342)
    planned = plan(lengths, token_budget=1024, num_ranks=8, cost=COST)
    assert planned.num_microbatches == 3000 // 8


def test_row_sums_add_up() -> None:
    lengths = skewed(1, 64)
    planned = plan(lengths, token_budget=32768, num_ranks=3, cost=COST)
    sums = planned.row_sums(lengths)
    for rank in range(3):
        for m in range(planned.num_microbatches):
            assert sums[rank, m] == lengths[planned.row(rank, m)].sum()
    assert isinstance(planned, Plan)


@pytest.mark.starts
def test_an_installation_that_cannot_be_written_to_still_plans(tmp_path: Path) -> None:
    """numba refuses to decorate where it finds no place for its cache; the planner then does without one."""
    program = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"  # no directory can be written
        "from rlhpc.base.native import compiled\n"
        "@compiled\n"
        "def double(x: int) -> int:\n"
        "    return 2 * x\n"
        "print(double(21))"
    )
    script = tmp_path / "read_only.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "42"


@pytest.mark.starts
def test_a_changed_source_is_compiled_again_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    """As in an image whose files all have one time, or where the code before was left under the index of the new."""
    script = tmp_path / "times.py"
    told = [_told_by(script, factor) for factor in (2, 2, 3)]
    assert told == ["42 hits 0", "42 hits 1", "63 hits 0"]


def _told_by(script: Path, factor: int) -> str:
    script.write_text(
        "from rlhpc.base.native import compiled\n"
        "@compiled\n"
        "def times(x: int) -> int:\n"
        f"    return {factor} * x\n"
        "print(times(21), 'hits', sum(times.stats.cache_hits.values()))"
    )
    os.utime(script, (1e9, 1e9))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout.strip()
