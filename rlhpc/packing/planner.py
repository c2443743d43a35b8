"""Decide which sample goes into which micro-batch of which rank.

Input: lengths.  Output: a Plan.  Guarantees: no row above the token budget; the same number of micro-batches on every
rank; every sample in exactly one row; the same plan for the same arguments on every machine.

What is minimised.  Ranks run their m-th micro-batch together (every layer of FSDP is a collective; so is every pipeline
flush), so micro-step m lasts as long as its costliest row and a batch lasts Σ_m max_r cost(r, m).  For given rows that
sum is smallest when rows sorted by cost are cut into runs of num_ranks.  So what counts is not that all rows cost the
same, which a few long sequences make impossible, but that each costs the same as its neighbours in that order.

How.  N samples, K = num_ranks · num_microbatches rows; planning starts from a sort, O(N log N).
(1) Number of rows: the fewest, in steps of num_ranks, into which (2) fits everything.  Rarely more than three tries.
(2) Balance, O(N log K): longest first, each into the cheapest row that still holds it (LPT under a budget).
(3) Peel, O(N · num_ranks) a micro-step at worst: if the longest sequence alone costs more than the average row, its
    row sets the pace of a micro-step whatever is done, so fill that whole micro-step up to its cost with the next
    longest sequences, and so on while the condition holds; then balance the rest.  The deepest peels are tried,
    MAX_PEELED at most and one for a large batch, O(N log K) each; the shortest duration stands, plain (2) included,
    so that peeling never loses.
(4) Order, O(K · (log K + num_ranks)): sort rows and cut into micro-steps, costliest first so that memory peaks at once;
    within one, the costliest row goes to the rank with the least cost so far.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.compiled import compiled
from rlhpc.errors import PackingError
from rlhpc.packing.cost import FlopCost

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

MAX_PEELED = 8  # micro-steps
MAX_BALANCED_SAMPLES = 16_384  # samples × depths tried; bounds time by a count, since a clock is not reproducible


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Indices of samples, row by row: all micro-batches of rank 0, then those of rank 1, and so on."""

    num_ranks: int
    num_microbatches: int  # of every rank
    indices: Int64  # [N] each of 0 … N−1 once; ascending within a row
    borders: Int64  # [num_ranks · num_microbatches + 1] row k holds indices[borders[k] : borders[k + 1]]

    def row(self, rank: int, microbatch: int) -> Int64:
        """Indices of one micro-batch's samples; may be empty."""
        k = rank * self.num_microbatches + microbatch
        return self.indices[self.borders[k] : self.borders[k + 1]]

    def row_sums(self, values: NDArray[Any]) -> Float64:
        """values [N] per sample → their sum per row, float64 [num_ranks, num_microbatches]."""
        running = np.concatenate(([0.0], np.cumsum(values[self.indices], dtype=np.float64)))
        return np.diff(running[self.borders]).reshape(self.num_ranks, self.num_microbatches)


def plan(lengths: NDArray[Any], *, token_budget: int, num_ranks: int, cost: FlopCost) -> Plan:
    """Plan one batch.

    lengths: tokens of every sample, any integer dtype [N], N ≥ 1, each ≥ 1.
    Raises PackingError if a sample is longer than the budget; ValueError for an empty batch, an empty sample or
    num_ranks < 1.
    """
    _check(lengths, token_budget, num_ranks)
    tokens = lengths.astype(np.int64)
    order = _stable_order(token_budget - tokens, token_budget)
    slot = np.empty(len(tokens), np.int64)
    slot[order], num_rows = _assign(tokens[order], cost(tokens[order]), token_budget, num_ranks)
    counts = np.bincount(slot, minlength=num_rows)
    return Plan(
        num_ranks=num_ranks,
        num_microbatches=num_rows // num_ranks,
        indices=_stable_order(slot, num_rows),
        borders=np.concatenate(([0], np.cumsum(counts))),
    )


def _stable_order(keys: Int64, largest: int) -> Int64:
    """Indices that sort keys in [0, largest]; ten times as fast when they fit 16 bits, which numpy sorts by radix."""
    return np.argsort(keys.astype(np.min_scalar_type(largest)), kind="stable")


def warm_up() -> None:
    """Compile the planner, or load it from numba's cache: seconds once per installation, a tenth of one later."""
    plan(np.ones(1, np.int64), token_budget=1, num_ranks=1, cost=FlopCost(1.0, 0.0))


def _check(lengths: NDArray[Any], token_budget: int, num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}; legal: 1 or more")
    if lengths.ndim != 1 or len(lengths) == 0 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"lengths: {lengths.dtype} {lengths.shape}; legal: whole numbers [N], N ≥ 1")
    if lengths.min() < 1:
        raise ValueError(f"sample {int(lengths.argmin())} has no tokens")
    longest = int(lengths.argmax())
    if lengths[longest] > token_budget:
        raise PackingError(
            f"sample {longest} has {int(lengths[longest])} tokens, trainer.token_budget={token_budget}; raise the "
            "budget, or lower generation.max_prompt_tokens or max_completion_tokens"
        )


# Below, tokens int64 [N] and costs float64 [N] are sorted, longest first; row int64 [N] is where each sample lies.


@compiled
def _assign(tokens: Int64, costs: Float64, budget: int, num_ranks: int) -> tuple[Int64, int]:
    """Return slot [N], the final row of every sample in Plan's order, and the number of rows."""
    row = np.empty(len(tokens), np.int64)
    num_rows = _whole_microsteps(-(-tokens.sum() // budget), num_ranks)
    while True:
        needed = _balance(tokens, costs, np.arange(len(tokens)), budget, num_rows, 0, row)
        if needed == num_rows:
            break
        num_rows = _whole_microsteps(needed, num_ranks)
    row = _peel(tokens, costs, budget, num_ranks, num_rows, row)
    return _order_rows(_row_costs(row, costs, num_rows), num_ranks)[row], num_rows


@compiled
def _whole_microsteps(num_rows: int, num_ranks: int) -> int:
    return -(-num_rows // num_ranks) * num_ranks


@compiled
def _balance(
    tokens: Int64, costs: Float64, samples: Int64, budget: int, num_rows: int, first_row: int, row: Int64
) -> int:
    """Spread `samples` over rows from first_row on, each into the cheapest that holds it; fills in `row`.

    Returns the number of rows used, at least num_rows: a sample that fits nowhere opens another row.
    A row too full for this sample is parked until samples are short enough for it.  Samples come longest first, so a
    row is parked at most once between two samples that it takes: O(N log K), where stepping over full rows for every
    sample is O(N · K).
    """
    room = np.full(num_rows + len(samples), budget)
    cheapest = [(0.0, k) for k in range(num_rows)]
    parked = [(0, -1)]  # (−room, row): the roomiest first; one that never leaves gives the list its type
    parked.pop()
    costs_of_parked = np.zeros(len(room))
    for i in samples:
        while len(parked) > 0 and -parked[0][0] >= tokens[i]:
            k = heapq.heappop(parked)[1]
            heapq.heappush(cheapest, (costs_of_parked[k], k))
        while len(cheapest) > 0 and room[cheapest[0][1]] < tokens[i]:
            full_cost, k = heapq.heappop(cheapest)
            costs_of_parked[k] = full_cost
            heapq.heappush(parked, (-room[k], k))
        if len(cheapest) == 0:
            cheapest.append((0.0, num_rows))
            num_rows += 1
        row_cost, k = cheapest[0]
        heapq.heapreplace(cheapest, (row_cost + costs[i], k))
        room[k] -= tokens[i]
        row[i] = first_row + k
    return num_rows


@compiled
def _peel(tokens: Int64, costs: Float64, budget: int, num_ranks: int, num_rows: int, row: Int64) -> Int64:
    """Return the best of `row` and what peeling gives in the same number of rows, the deepest peel tried first."""
    peeled, rest = row.copy(), np.arange(len(tokens))
    left_over = [rest]  # at depth d: samples that d peeled micro-steps leave
    for depth in range(min(MAX_PEELED, num_rows // num_ranks - 1)):
        if len(rest) == 0 or costs[rest[0]] * (num_rows - depth * num_ranks) <= costs[rest].sum():
            break
        rest = _fill_microstep(tokens, costs, rest, budget, num_ranks, depth * num_ranks, peeled)
        left_over.append(rest)
    best, best_duration = row, _duration(row, costs, num_ranks, num_rows)
    deepest, num_tries = len(left_over) - 1, max(1, MAX_BALANCED_SAMPLES // len(tokens))
    for depth in range(deepest, max(0, deepest - num_tries), -1):
        first_row = depth * num_ranks
        num_needed = _balance(tokens, costs, left_over[depth], budget, num_rows - first_row, first_row, peeled)
        duration = _duration(peeled, costs, num_ranks, max(num_rows, first_row + num_needed))
        if first_row + num_needed == num_rows and duration < best_duration:
            best, best_duration = peeled.copy(), duration
    return best


@compiled
def _fill_microstep(
    tokens: Int64, costs: Float64, samples: Int64, budget: int, num_ranks: int, first_row: int, row: Int64
) -> Int64:
    """Fill num_ranks rows up to the cost of the longest sample, longest first; return the samples left over."""
    target = costs[samples[0]]
    row_costs, room = np.zeros(num_ranks), np.full(num_ranks, budget)
    most_room, num_left, left = budget, 0, np.empty(len(samples), np.int64)
    for i in samples:
        cheapest = -1
        if tokens[i] <= most_room:
            for k in range(num_ranks):
                fits = tokens[i] <= room[k] and row_costs[k] + costs[i] <= target
                if fits and (cheapest < 0 or row_costs[k] < row_costs[cheapest]):
                    cheapest = k
        if cheapest < 0:
            left[num_left] = i
            num_left += 1
        else:
            row_costs[cheapest] += costs[i]
            room[cheapest] -= tokens[i]
            most_room = room.max()
            row[i] = first_row + cheapest
    return left[:num_left]


@compiled
def _duration(row: Int64, costs: Float64, num_ranks: int, num_rows: int) -> float:
    """Sum over micro-steps of the costliest row, for the best order of rows."""
    row_costs, duration = _row_costs(row, costs, num_rows), 0.0
    for k in _costliest_first(row_costs)[::num_ranks]:
        duration += row_costs[k]
    return duration


@compiled
def _row_costs(row: Int64, costs: Float64, num_rows: int) -> Float64:
    row_costs = np.zeros(num_rows)
    for i in range(len(row)):
        row_costs[row[i]] += costs[i]
    return row_costs


@compiled
def _order_rows(row_costs: Float64, num_ranks: int) -> Int64:
    """Return place [K]: rank · num_microbatches + micro-batch of every row."""
    num_microbatches = len(row_costs) // num_ranks
    by_cost = _costliest_first(row_costs)
    place, rank_costs = np.empty(len(row_costs), np.int64), np.zeros(num_ranks)
    for m in range(num_microbatches):
        is_free = np.ones(num_ranks, np.bool_)
        for k in by_cost[m * num_ranks : (m + 1) * num_ranks]:
            rank = -1
            for r in range(num_ranks):
                if is_free[r] and (rank < 0 or rank_costs[r] < rank_costs[rank]):
                    rank = r
            is_free[rank] = False
            place[k] = rank * num_microbatches + m
            rank_costs[rank] += row_costs[k]
    return place


@compiled
def _costliest_first(row_costs: Float64) -> Int64:
    return np.argsort(-row_costs, kind="mergesort")  # the stable one
