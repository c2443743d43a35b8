"""Which samples lie in which row, and what a row costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.algorithms import packing
from rlhpc.algorithms.packing import (
    FlopCost,
    Plan,
    joined,
    lay_out,
    lockstep_slowdown,
    pack,
    packing_fill,
    plan,
    tokens_trained,
    unpack,
)
from rlhpc.protocol.errors import ConfigError, PackingError
from rlhpc.protocol.types import PackedBatch, PackedMinibatch, TrainingSample

# ------------------------------------------------------------------------------------------------------------- planner

COST = FlopCost(linear=24576.0, quadratic=1.0)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Lengths that may be long-tailed or all alike, a budget that holds the longest, and a number of ranks."""
    budget = draw(st.integers(1, 20) | st.integers(1, 400))  # small ones: rows that are one token too full
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


def test_rows_may_be_filled_to_the_last_token_and_long_sequences_are_neighbours() -> None:
    planned = plan(np.array([6, 4, 7, 3, 5, 5]), token_budget=10, num_ranks=3, cost=COST)
    assert planned.num_microbatches == 1
    assert planned.row_sums(np.array([6, 4, 7, 3, 5, 5])).tolist() == [[10], [10], [10]]
    # Four sequences that fill a row: spread over four micro-steps they would set the pace of all of them.
    lengths = np.array([32768] * 4 + [1024] * (12 * 28))
    planned = plan(lengths, token_budget=32768, num_ranks=4, cost=COST)
    steps_with_a_long_one = [
        any(lengths[planned.row(rank, m)].max(initial=0) == 32768 for rank in range(4))
        for m in range(planned.num_microbatches)
    ]
    assert sum(steps_with_a_long_one) == 1
    # Just over a third of the budget each: tokens alone suggest 3 a row, 2 fit.
    lengths = np.full(6000, 342)
    planned = plan(lengths, token_budget=1024, num_ranks=8, cost=COST)
    assert planned.num_microbatches == 3000 // 8


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


# -------------------------------------------------------------------------------------------------------------- layout


def sample(index: int, num_prompt: int, num_completion: int) -> TrainingSample:
    """A sample whose every value is recognisable."""
    length = num_prompt + num_completion
    loss_mask = np.arange(length) >= num_prompt
    marks = 1000 * index + np.arange(length)
    return TrainingSample(
        group_id=index,
        sample_index=0,
        token_ids=marks.astype(np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=np.where(loss_mask, -marks / 7, 0).astype(np.float32),
        advantages=np.where(loss_mask, index + 0.5, 0).astype(np.float32),
        versions=np.where(loss_mask, index, -1).astype(np.int32),
    )


def packed(samples: list[TrainingSample], token_budget: int = 64, num_ranks: int = 3) -> PackedMinibatch:
    return pack(samples, token_budget=token_budget, num_ranks=num_ranks, cost=COST)


shapes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40)


@given(shapes, st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_no_token_is_dropped_doubled_or_changed(lengths: list[tuple[int, int]], num_ranks: int) -> None:
    samples = [sample(i, *shape) for i, shape in enumerate(lengths)]
    segments = {int(row.token_ids[0]) // 1000: row for row in unpack(packed(samples, num_ranks=num_ranks))}
    assert sorted(segments) == list(range(len(samples)))
    for index, original in enumerate(samples):
        for name in ("token_ids", "loss_mask", "behaviour_logprobs", "advantages", "versions"):
            np.testing.assert_array_equal(getattr(segments[index], name), getattr(original, name))


@given(shapes, st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_every_row_keeps_the_promises_of_its_type(lengths: list[tuple[int, int]], num_ranks: int) -> None:
    batch = packed([sample(i, *shape) for i, shape in enumerate(lengths)], num_ranks=num_ranks)
    assert len({len(rows) for rows in batch.ranks}) == 1
    assert batch.num_samples == len(lengths)
    assert batch.num_loss_tokens == sum(completion for _, completion in lengths)
    assert batch.num_loss_tokens == sum(row.loss_mask.sum() for row in batch.rows)
    for row in batch.rows:
        size = len(row.token_ids)
        assert size <= 64
        assert row.cu_seqlens[0] == 0
        assert row.cu_seqlens[-1] == size
        assert not row.loss_mask[row.cu_seqlens[:-1]].any()
        assert (row.position_ids[row.cu_seqlens[:-1]] == 0).all()
        assert (np.diff(row.position_ids) == 1).sum() == size - (len(row.cu_seqlens) - 1)
        assert (row.versions[~row.loss_mask] == -1).all()
        arrays = [getattr(row, name) for name in row.__slots__]
        dtypes = [array.dtype for array in arrays[:8]]
        assert dtypes == [np.int32, np.int32, np.int32, np.bool_, np.float32, np.float32, np.int32, np.float32]
        assert arrays[8:11] == [None] * 3  # of a teacher
        assert arrays[11:] == [()]  # routes
        assert len(row.loss_weights) == len(row.cu_seqlens) - 1


def test_a_rank_without_samples_gets_rows_of_one_token_that_count_for_nothing() -> None:
    batch = packed([sample(0, 2, 3)], num_ranks=4)
    filler = [row for row in batch.rows if len(row.token_ids) == 1]
    assert len(filler) == 3
    assert not any(row.loss_mask.any() for row in filler)
    assert batch.num_loss_tokens == 3
    assert len(unpack(batch)) == 1
    assert packing_fill(batch, 64) == 5 / (4 * 64)


def test_versions_of_tokens_the_policy_did_not_choose_are_hidden() -> None:
    tool = sample(1, 2, 4)
    tool.loss_mask[3] = False
    row = packed([tool], num_ranks=1).ranks[0][0]
    assert row.versions.tolist() == [-1, -1, 1, -1, 1, 1]


def test_parts_joined_count_what_the_whole_counts() -> None:
    masked, *others = [sample(index, 3, 4 + index) for index in range(5)]
    masked.loss_mask[:] = False
    whole, parts = packed([masked, *others]), [packed([masked]), packed(others[:1]), packed(others[1:])]
    one = joined(parts)
    assert (one.num_loss_tokens, one.num_samples) == (whole.num_loss_tokens, whole.num_samples) == (26, 5)
    assert len(one.rows) == sum(len(part.rows) for part in parts)
    assert joined([packed([masked]), packed([masked])]).num_loss_tokens == 1  # which losses are divided by
    # Schedules over tokens go by them, and what was trained in parts is repeated as a whole.
    samples = [sample(0, 4, 6), sample(1, 5, 7)]
    whole, parts = packed(samples), joined([packed([each]) for each in samples])
    assert [tokens_trained(PackedBatch(0, 0, (each,), (0, 0))) for each in (whole, parts)] == [44, 44]


def test_samples_that_cannot_be_packed_are_refused_by_name() -> None:
    with pytest.raises(PackingError, match="sample 1 has 70 tokens"):
        packed([sample(0, 5, 5), sample(1, 35, 35)])
    broken = sample(5, 1, 3)
    broken.loss_mask[0] = True
    with pytest.raises(ValueError, match="sample 0 of group 5: its first token"):
        packed([broken])
    whole = sample(5, 1, 3)
    broken = TrainingSample(5, 0, whole.token_ids, whole.loss_mask, whole.advantages[:2], *(whole.advantages,) * 2)
    with pytest.raises(ValueError, match="sample 0 of group 5: arrays of shapes"):
        packed([broken])
    with pytest.raises(ValueError, match="a prompt token and a completion token"):
        packed([sample(5, 1, 0)])
    planned = plan(np.array([4, 5]), token_budget=10, num_ranks=1, cost=COST)
    with pytest.raises(ValueError, match="a plan for 2 samples and 1 samples"):
        lay_out([sample(0, 2, 2)], planned)


def test_slowdown_is_one_for_even_rows_and_counts_the_wait_for_uneven_ones() -> None:
    even = np.array([10, 10])
    linear = FlopCost(1.0, 0.0)
    assert lockstep_slowdown(plan(even, token_budget=10, num_ranks=2, cost=linear), even, linear) == 1.0
    uneven = np.array([10, 5])
    planned = plan(uneven, token_budget=10, num_ranks=2, cost=linear)
    assert lockstep_slowdown(planned, uneven, linear) == pytest.approx(10 * 2 / 15)


# ----------------------------------------------------------------------------------------------------------- flop cost

DENSE = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 100,
}  # fmt: skip


def matrix_weights(model_type: str, **config: Any) -> int:
    """Weights of all matrices of the real model but its input embedding."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    settings = transformers.AutoConfig.for_model(model_type, **config, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    return sum(p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and "embed_tokens" not in name)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_linear_term_counts_every_matrix_of_a_dense_model(model_type: str) -> None:
    config = DENSE | ({"head_dim": 8} if model_type == "qwen2" else {})  # Qwen2 has no head_dim of its own
    assert FlopCost.from_hf_config(config).linear == 2 * matrix_weights(model_type, **config)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next"])
def test_a_gated_delta_net_costs_its_matrices_and_three_passes_over_its_state(model_type: str) -> None:
    sizes = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    experts = {
        "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    }  # fmt: skip
    config = DENSE | sizes | (experts if model_type == "qwen3_next" else {})
    states = 2 * 3 * (4 * 8 * 6)
    assert FlopCost.from_hf_config(config).linear == 2 * (matrix_weights(model_type, **config) + states)
    assert FlopCost.from_hf_config(config).quadratic == FlopCost.from_hf_config(DENSE).quadratic / 3
    kinds = {
        "layer_types": None,
        "full_attention_interval": 2,
    }  # as Qwen3-Next is published
    assert FlopCost.from_hf_config(config | kinds) == FlopCost.from_hf_config(config)


def test_cost_counts_active_experts_shared_ones_and_both_attention_products() -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    idle = 2 * (6 - 2) * 3 * 32 * 24  # layers with experts × idle experts × weights of one
    config = DENSE | experts
    assert FlopCost.from_hf_config(config).linear == 2 * (matrix_weights("qwen3_moe", **config) - idle)
    qwen = DENSE | {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
    assert FlopCost.from_hf_config(qwen).linear == 2 * matrix_weights("qwen2_moe", **qwen)
    mixtral = DENSE | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2}
    assert FlopCost.from_hf_config(mixtral).linear == 2 * matrix_weights("mixtral", **mixtral)
    length = 7
    products = 2 * (2 * length * length * 4 * 16) * 3  # QKᵀ and the sum over V, heads × head_dim, layers
    assert FlopCost.from_hf_config(DENSE).quadratic * length**2 == products / 2


def test_cost_has_defaults_for_missing_keys_and_names_one_that_has_none() -> None:
    config: dict[str, Any] = {key: value for key, value in DENSE.items() if key != "num_key_value_heads"}
    explicit = DENSE | {"num_key_value_heads": 4, "head_dim": 8}
    assert FlopCost.from_hf_config(config | {"head_dim": None}) == FlopCost.from_hf_config(explicit)
    config = {key: value for key, value in DENSE.items() if key != "vocab_size"}
    with pytest.raises(ConfigError, match="vocab_size=None"):
        FlopCost.from_hf_config(config)
    assert FlopCost(3.0, 2.0)(np.array([0, 1, 10])).tolist() == [0.0, 5.0, 230.0]
    with pytest.raises(ValueError, match="linear=0"):
        FlopCost(0.0, 1.0)
    with pytest.raises(ValueError, match="quadratic=nan"):
        FlopCost(1.0, float("nan"))
