"""Pack the samples of a minibatch into rows for each rank, so that all ranks have about the same work.

In this file: the cost of a sequence, in floating-point operations of one forward pass; the planner; the rows.

Only ratios of costs matter: the planner compares rows, and the backward pass costs twice as much for all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.base.native import compiled
from rlhpc.protocol.errors import ConfigError, PackingError
from rlhpc.protocol.types import PackedBatch, PackedMicrobatch, PackedMinibatch, Routes, TrainingSample

# ----------------------------------------------------------------------------------------------------------------- cost


@dataclass(frozen=True, slots=True)
class FlopCost:
    """linear · L + quadratic · L² for a sequence of L tokens that attends to itself alone."""

    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        if not (self.linear > 0 and self.quadratic >= 0):  # also refuses NaN
            raise ValueError(f"FlopCost(linear={self.linear}, quadratic={self.quadratic}): linear > 0, quadratic >= 0")

    def __call__(self, lengths: NDArray[Any]) -> NDArray[np.float64]:
        """lengths [N] → cost float64 [N]."""
        tokens = lengths.astype(np.float64)
        return tokens * (self.linear + self.quadratic * tokens)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> FlopCost:
        """Cost of a Llama-like model (Llama, Mistral, Qwen2, Qwen3, and their mixtures of experts).

        linear = 2 · (weights of the matrices that one token passes): per layer the four attention projections and the
        gated MLP's three matrices, or those of the active and shared experts and the router's; and the output layer
        once.  quadratic = 2 · layers · heads · head_dim: QKᵀ and the sum over V take 2·L²·heads·head_dim each, and the
        causal half of both is computed.  Counting as in Narayanan et al. 2021, appendix (arXiv:2104.04473), with the
        triangle left out; biases, norms and rotary embeddings are below a percent, the input embedding is a look-up.
        A sliding window is not taken into account, so that long sequences then count too much: less balance, never a
        wrong result.
        Raises ConfigError naming the key that is missing.
        """
        hidden, layers = _count(config, "hidden_size"), _count(config, "num_hidden_layers")
        heads = _count(config, "num_attention_heads")
        key_heads = _count(config, "num_key_value_heads", default=heads)
        head_dim = _count(config, "head_dim", default=hidden // heads)
        attention = 2 * hidden * head_dim * (heads + key_heads)
        mlp = sum(_mlp_weights(config, layer, hidden) for layer in range(layers))
        recurrent = _recurrent_layers(config, layers)
        attention += hidden * head_dim * heads * bool(recurrent)  # such models gate the output of their attention
        attending = layers - recurrent
        weights = attending * attention + (recurrent * _recurrent_weights(config, hidden) if recurrent else 0)
        weights += mlp + hidden * _count(config, "vocab_size")
        return cls(linear=2.0 * weights, quadratic=2.0 * attending * heads * head_dim)


def _recurrent_layers(config: Mapping[str, Any], layers: int) -> int:
    """Number of Gated DeltaNet layers."""
    if "linear_num_value_heads" not in config:
        return 0
    kinds: Sequence[str] | None = config.get("layer_types")
    return (
        kinds.count("linear_attention") if kinds else layers - layers // int(config.get("full_attention_interval", 4))
    )


def _recurrent_weights(config: Mapping[str, Any], hidden: int) -> int:
    """Weights of a Gated DeltaNet that one token passes, and what it costs to read and write its state."""
    if "linear_num_value_heads" not in config:
        return 0
    heads, size = _count(config, "linear_num_value_heads"), _count(config, "linear_value_head_dim")
    keys = _count(config, "linear_num_key_heads") * (key_size := _count(config, "linear_key_head_dim"))
    width = _count(config, "linear_conv_kernel_dim", default=4)
    convolution, state = (2 * keys + heads * size) * width, 3 * heads * key_size * size
    return hidden * (2 * keys + 3 * heads * size + 2 * heads) + convolution + state


def _mlp_weights(config: Mapping[str, Any], layer: int, hidden: int) -> int:
    """Weights of one layer's MLP that one token passes."""
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
    # Qwen's mixtures keep some layers dense: each that is listed, and all but every decoder_sparse_step-th.
    is_dense = layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % config.get("decoder_sparse_step", 1) != 0
    if not num_experts or is_dense:
        return 3 * hidden * _count(config, "intermediate_size")
    expert = _count(config, "moe_intermediate_size", default=config.get("intermediate_size"))
    shared = config.get("shared_expert_intermediate_size") or 0
    shared_gate = hidden if shared else 0
    active = _count(config, "num_experts_per_tok")
    return 3 * hidden * (active * expert + shared) + hidden * int(num_experts) + shared_gate


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive whole number of the model's config; an absent key and null take the default."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"model config.json: {key}={value!r}; a cost model needs a positive whole number")
    return value


# -------------------------------------------------------------------------------------------------------------- planner
#
# Decide which sample goes into which micro-batch of which rank.
#
# Input: lengths.  Output: a Plan.  Guarantees: no row above the token budget; the same number of micro-batches on every
# rank; every sample in exactly one row; the same plan for the same arguments on every machine.
#
# What is minimised.  Ranks run their m-th micro-batch together (every layer of FSDP is a collective; so is every
# pipeline flush), so micro-step m lasts as long as its costliest row and a batch lasts Σ_m max_r cost(r, m).  For
# given rows that sum is smallest when rows sorted by cost are cut into runs of num_ranks.  So what counts is not that
# all rows cost the same, which a few long sequences make impossible, but that each costs the same as its neighbours in
# that order.
#
# How.  N samples, K = num_ranks · num_microbatches rows; planning starts from a sort, O(N log N).
# (1) Number of rows: the fewest, in steps of num_ranks, into which (2) fits everything.  Rarely more than three tries.
# (2) Balance, O(N log K): longest first, each into the cheapest row that still holds it (LPT under a budget).
# (3) Peel, O(N · num_ranks) a micro-step at worst: if the longest sequence alone costs more than the average row, its
#     row sets the pace of a micro-step whatever is done, so fill that whole micro-step up to its cost with the next
#     longest sequences, and so on while the condition holds; then balance the rest.  The deepest peels are tried,
#     MAX_PEELED at most and one for a large batch, O(N log K) each; the shortest duration stands, plain (2) included,
#     so that peeling never loses.
# (4) Order, O(K · (log K + num_ranks)): sort rows and cut into micro-steps, costliest first so that memory peaks at
#     once; within one, the costliest row goes to the rank with the least cost so far.

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
    _check_lengths(lengths, token_budget, num_ranks)
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


def _check_lengths(lengths: NDArray[Any], token_budget: int, num_ranks: int) -> None:
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
    return np.argsort(-row_costs, kind="mergesort")  # stable


# --------------------------------------------------------------------------------------------------------------- layout
#
# Pack the samples of one minibatch into rows for each rank: plan them, then lay them end to end.
#
# Input: TrainingSample.  Output: PackedMinibatch.  A pure function of its arguments: no clock, no randomness, no
# state, so that the same samples in the same order give the same batch after a restart.  No token is dropped, doubled
# or padded.


def pack(
    samples: Sequence[TrainingSample], *, token_budget: int, num_ranks: int, cost: FlopCost, together: int = 1
) -> PackedMinibatch:
    """Plan a minibatch and lay it out.  together: so many samples, one after the other, stand side by side in a row.

    Raises PackingError if a sample is longer than the budget; ValueError if there is no sample or one is malformed.
    """
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
    lengths = lengths.reshape(-1, together).sum(axis=1)
    planned = plan(lengths, token_budget=token_budget, num_ranks=num_ranks, cost=cost)
    indices = (planned.indices[:, None] * together + np.arange(together)).reshape(-1)
    return lay_out(samples, replace(planned, indices=indices, borders=planned.borders * together))


def lay_out(samples: Sequence[TrainingSample], plan: Plan) -> PackedMinibatch:
    """Build every rank's micro-batches.

    Raises ValueError if the plan is for another number of samples, or if a sample has fewer than two tokens, arrays of
    different lengths, or a first token, which nothing precedes, that counts in the loss.
    """
    if len(plan.indices) != len(samples):
        raise ValueError(f"a plan for {len(plan.indices)} samples and {len(samples)} samples")
    for sample in samples:
        _check_sample(sample)
    ranks = tuple(
        tuple(_row([samples[i] for i in plan.row(rank, m)]) for m in range(plan.num_microbatches))
        for rank in range(plan.num_ranks)
    )
    return PackedMinibatch(
        ranks=ranks,
        # At least 1, since losses are divided by it: the loss of a batch without any is 0.
        num_loss_tokens=max(1, sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples)),
        num_samples=len(samples),
    )


def joined(parts: Sequence[PackedMinibatch]) -> PackedMinibatch:
    """Join the parts of one optimiser step: every rank's rows of all parts, one part after the other."""
    num_loss_tokens = sum(int(np.count_nonzero(row.loss_mask)) for part in parts for row in part.rows)
    return PackedMinibatch(
        ranks=tuple(
            tuple(row for rows in of_rank for row in rows) for of_rank in zip(*(p.ranks for p in parts), strict=True)
        ),
        num_loss_tokens=max(1, num_loss_tokens),  # not the sum of theirs: a part without any says 1
        num_samples=sum(part.num_samples for part in parts),
    )


def unpack(minibatch: PackedMinibatch) -> list[PackedMicrobatch]:
    """Return every segment as a row of its own, rank by rank, without filler rows."""
    return [
        _segment(row, index) for row in minibatch.rows if not _is_filler(row) for index in range(len(row.loss_weights))
    ]


def packing_fill(batch: PackedBatch, token_budget: int) -> float:
    """Share of the budget of all rows that holds tokens of samples, 0–1."""
    rows = batch.rows
    return sum(len(row.token_ids) for row in rows if not _is_filler(row)) / (len(rows) * token_budget)


def tokens_trained(batch: PackedBatch) -> int:
    """Tokens of the samples of all minibatches, prompts included, counted once for each pass over them."""
    sizes = [
        sum(len(row.token_ids) for row in minibatch.rows if not _is_filler(row)) for minibatch in batch.minibatches
    ]
    return sum(sizes[place] for place in batch.order)


def lockstep_slowdown(plan: Plan, lengths: NDArray[Any], cost: FlopCost) -> float:
    """Time of a batch whose ranks wait for each other at every micro-batch, over that of a perfectly balanced one; ≥ 1.

    Σ_m max_r cost(r, m) · num_ranks / Σ cost, lengths [N] being those that were planned.
    """
    row_costs = plan.row_sums(cost(lengths))
    return float(row_costs.max(axis=0).sum() * plan.num_ranks / row_costs.sum())


def batch_slowdown(minibatches: Sequence[PackedMinibatch], cost: FlopCost) -> float:
    """lockstep_slowdown of a batch that is already laid out: ranks wait for each other in every minibatch."""
    slowest = mean = 0.0
    for minibatch in minibatches:
        row_costs = np.array([[cost(np.diff(row.cu_seqlens)).sum() for row in rows] for rows in minibatch.ranks])
        slowest += float(row_costs.max(axis=0).sum())
        mean += float(row_costs.sum()) / len(row_costs)
    return slowest / mean


def _check_sample(sample: TrainingSample) -> None:
    arrays = [sample.loss_mask, sample.behaviour_logprobs, sample.advantages, sample.versions]
    if sample.teacher_logprobs is not None:
        arrays.append(sample.teacher_logprobs)
    name = f"sample {sample.sample_index} of group {sample.group_id}" + (f", row {sample.row}" if sample.row else "")
    if any(array.shape != sample.token_ids.shape for array in arrays):
        raise ValueError(f"{name}: arrays of shapes {[a.shape for a in arrays]} for {sample.token_ids.shape} tokens")
    if len(sample.token_ids) < 2:
        raise ValueError(f"{name}: {len(sample.token_ids)} tokens; a prompt token and a completion token at least")
    if sample.loss_mask[0]:
        raise ValueError(f"{name}: its first token counts in the loss, but has no log-probability")


def _joined_or_none(parts: Sequence[NDArray[Any] | None]) -> Any:
    """The arrays end to end; None if the samples have none."""
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


def _row(samples: list[TrainingSample]) -> PackedMicrobatch:
    if not samples:
        return _FILLER
    lengths = np.array([len(sample.token_ids) for sample in samples])
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    loss_mask = np.concatenate([sample.loss_mask for sample in samples])
    versions = np.concatenate([sample.versions for sample in samples])
    return PackedMicrobatch(
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        position_ids=np.arange(borders[-1], dtype=np.int32) - np.repeat(borders[:-1], lengths),
        cu_seqlens=borders,
        loss_mask=loss_mask,
        behaviour_logprobs=np.concatenate([sample.behaviour_logprobs for sample in samples]),
        advantages=np.concatenate([sample.advantages for sample in samples]),
        versions=np.where(loss_mask, versions, np.int32(-1)),
        loss_weights=np.array([sample.loss_weight for sample in samples], np.float32),
        teacher_logprobs=_joined_or_none([sample.teacher_logprobs for sample in samples]),
        teacher_top_ids=_joined_or_none([sample.teacher_top_ids for sample in samples]),
        teacher_top_logprobs=_joined_or_none([sample.teacher_top_logprobs for sample in samples]),
        routes=_routes([sample.routes for sample in samples]),
    )


def _routes(of_samples: list[Routes | None]) -> tuple[Routes | None, ...]:
    """Return the routes of a row, packed as they came: only the trainer reads them."""
    return tuple(of_samples) if any(each is not None for each in of_samples) else ()


def _segment(row: PackedMicrobatch, index: int) -> PackedMicrobatch:
    start, end = (int(border) for border in row.cu_seqlens[index : index + 2])
    top_ids, top_logprobs = row.teacher_top_ids, row.teacher_top_logprobs
    if top_ids is not None and top_logprobs is not None:
        counts = [int(np.count_nonzero(row.loss_mask[:place])) for place in (start, end, None)]
        first, last = (len(top_ids) // max(1, counts[2]) * count for count in counts[:2])
        top_ids, top_logprobs = top_ids[first:last], top_logprobs[first:last]
    return PackedMicrobatch(
        token_ids=row.token_ids[start:end],
        position_ids=row.position_ids[start:end],
        cu_seqlens=np.array([0, end - start], np.int32),
        loss_mask=row.loss_mask[start:end],
        behaviour_logprobs=row.behaviour_logprobs[start:end],
        advantages=row.advantages[start:end],
        versions=row.versions[start:end],
        loss_weights=row.loss_weights[index : index + 1],
        teacher_logprobs=None if row.teacher_logprobs is None else row.teacher_logprobs[start:end],
        teacher_top_ids=top_ids,
        teacher_top_logprobs=top_logprobs,
        routes=row.routes[index : index + 1],
    )


def _is_filler(row: PackedMicrobatch) -> bool:
    """A sample has a prompt token and a completion token at least, so a row of one token holds none."""
    return len(row.token_ids) == 1


# The row of a rank that has fewer samples than micro-batches: its forward and backward take part, its gradient is 0.
_FILLER = PackedMicrobatch(
    token_ids=np.zeros(1, np.int32),
    position_ids=np.zeros(1, np.int32),
    cu_seqlens=np.array([0, 1], np.int32),
    loss_mask=np.zeros(1, np.bool_),
    behaviour_logprobs=np.zeros(1, np.float32),
    advantages=np.zeros(1, np.float32),
    versions=np.full(1, -1, np.int32),
    loss_weights=np.ones(1, np.float32),
)
