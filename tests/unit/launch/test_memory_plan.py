"""Parameter counts are exact; bytes follow from them; what cannot fit is refused with a change that does."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.checks.memory_plan import GIB, NF4_BYTES, RankMemory, fullest, plan_engine, plan_memory, rows_in_flight
from launch.checks.memory_verdict import advise, describe_memory, judge_host, judge_memory, memory_report
from launch.cli import main
from launch.plan.site_file import GPU_MEMORY_GIB, Site, load_site
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config, with_values
from rlhpc.models.shape import FAMILIES, ModelShape, ParallelLayout, layers_of_stage
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from rlhpc.weights.four_bits import in_four_bits
from tests import build
from tests.unit.launch.public_models import (
    CONFIGS,
    LARGE_RUNS,
    LORA_RUNS,
    NUM_PARAMETERS,
    ODD_CONFIGS,
    ODD_OTHERS,
    OTHER_CONFIGS,
    RECIPES,
    make_model_directory,
    part_of,
)

# -------------------- Parameter counts are exact; bytes follow from them; what cannot fit is refused with a change that

ROOT = Path(__file__).parents[3]
EXAMPLE_SITE = ROOT / "slurm" / "sites" / "example.toml"
H100 = Site.model_validate({"trainer": {"gpu": "h100"}, "generation": {"gpu": "h100"}})


def config_of(backend: str = "megatron", *, dtype: str = "bfloat16", **trainer: Any) -> Config:
    """A run that nothing but the trainer's keys matters of; samples of up to 1024 + 3072 tokens."""
    return build.config(
        model={"dtype": dtype},
        generation={"max_prompt_tokens": 1024, "max_completion_tokens": 3072, "tensor_parallel": 4},
        admission={"groups_per_step": 8, "group_size": 8},
        trainer={"backend": backend, "token_budget": 8192, **trainer},
    )


def shape_of(model: dict[str, Any]) -> ModelShape:
    shape = ModelShape.of(model)
    assert shape is not None
    return shape


def plan_of(model: str, backend: str = "megatron", *, dtype: str = "bfloat16", **trainer: Any) -> tuple[Any, ...]:
    return plan_memory(config_of(backend, dtype=dtype, **trainer), shape_of(CONFIGS[model]))


# ---------------------------------------------------------------------------------------------------- parameter counts


ALL_CONFIGS = CONFIGS | ODD_CONFIGS | OTHER_CONFIGS | ODD_OTHERS


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_the_count_is_that_of_the_model_that_transformers_builds(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = dict(ALL_CONFIGS[name])
    config = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(ALL_CONFIGS[name]).num_parameters == sum(p.numel() for p in model.parameters())


LAYOUTS = [
    {"num_ranks": 1},
    {"num_ranks": 2, "tensor_parallel": 2, "sequence_parallel": True},
    {"num_ranks": 4, "pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    {"num_ranks": 4, "pipeline_parallel": 2, "chunks_per_stage": 2, "expert_parallel": 2},
    {"num_ranks": 4, "expert_parallel": 4},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda keys: "-".join(f"{k}{v}" for k, v in keys.items()))
@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen3-0.6B", *ODD_CONFIGS])
def test_the_parts_of_all_ranks_sum_to_the_model(name, layout):
    """What is replicated or padded is known by name: norms, router, biases behind a sum, vocabulary, tied head."""
    numbers = (CONFIGS | ODD_CONFIGS)[name]
    shape = shape_of(numbers)
    if not shape.num_experts:
        layout = {**layout, "expert_parallel": 1}
    parallel = ParallelLayout.of(config_of(**layout).trainer)
    parallel.refuse_unfit(numbers)
    parts = [shape.on_rank(parallel, stage) for stage in range(parallel.pipeline)]
    held = parallel.tensor * sum(p.shared for p in parts) + parallel.expert * sum(p.experts for p in parts)
    hidden, family = shape.hidden, FAMILIES[shape.family]
    replicated = hidden + sum(
        len(family.norms) * hidden
        + 2 * shape.head_size * (family.head_norm == "head")
        + hidden * shape.has_output_bias
        + shape.num_experts * ((layer in shape.expert_layers) * hidden + family.has_fused_experts)
        + hidden * shape.has_mlp_bias
        for layer in range(shape.num_layers)
    )
    num_embeddings = 1 if shape.is_tied and parallel.pipeline == 1 else 2
    padding = num_embeddings * (parallel.padded_vocabulary(shape.vocabulary) - shape.vocabulary) * hidden
    tied_again = shape.vocabulary * hidden if shape.is_tied and parallel.pipeline > 1 else 0
    assert held == shape.num_parameters + (parallel.tensor - 1) * replicated + padding + tied_again


def test_interleaved_stages_take_blocks_in_turn():
    layout = ParallelLayout.of(config_of(num_ranks=2, pipeline_parallel=2, chunks_per_stage=2).trainer)
    assert [layers_of_stage(layout, 8, stage) for stage in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


# --------------------------------------------------------------------------------------------------------------- bytes


def test_megatron_in_bfloat16_holds_6_bytes_a_parameter_and_12_shared_by_replicas():
    num = NUM_PARAMETERS["Qwen2.5-7B"]
    (alone,) = plan_of("Qwen2.5-7B", num_ranks=1)
    assert (alone.parameters, alone.gradients, alone.optimizer) == (2 * num, 4 * num, 12 * num)
    (shared,) = plan_of("Qwen2.5-7B", num_ranks=8)
    assert shared.optimizer == pytest.approx(12 * num / 8, abs=12)
    assert shared.host_snapshot == shared.optimizer
    (split_rows,) = plan_of("Qwen2.5-7B", num_ranks=8, context_parallel=2)
    assert split_rows.optimizer == shared.optimizer
    (replicated,) = plan_of("Qwen2.5-7B", num_ranks=8, distributed_optimizer=False)
    assert replicated.optimizer == alone.optimizer


def test_in_float32_megatrons_parameters_are_their_own_masters():
    num = NUM_PARAMETERS["Qwen2.5-0.5B"]
    (rank,) = plan_of("Qwen2.5-0.5B", num_ranks=1, dtype="float32")
    assert (rank.parameters, rank.gradients, rank.optimizer) == (4 * num, 4 * num, 8 * num)


def test_the_optimiser_of_an_expert_is_shared_by_its_own_replicas_only():
    shape = shape_of(CONFIGS["Qwen3-30B-A3B"])
    (rank,) = plan_of("Qwen3-30B-A3B", num_ranks=16, expert_parallel=8)
    experts = 3 * 2048 * 768 * 128 * 48
    assert rank.optimizer == 12 * ((shape.num_parameters - experts) // 16 + experts // 8 // 2)


def test_zero_stages_divide_one_term_more_each():
    num = NUM_PARAMETERS["Qwen2.5-7B"]
    terms = {}
    for stage in (1, 2, 3):
        (rank,) = plan_of("Qwen2.5-7B", "deepspeed", num_ranks=8, zero_stage=stage)
        terms[stage] = tuple(round(8 * term / num) for term in (rank.parameters, rank.gradients, rank.optimizer))
    assert terms == {1: (16, 32, 12), 2: (16, 4, 12), 3: (2, 4, 12)}


def test_offload_moves_bytes_from_the_gpu_to_the_host():
    keys = {"num_ranks": 8, "zero_stage": 3}
    (here,) = plan_of("Qwen2.5-7B", "deepspeed", **keys)
    (there,) = plan_of("Qwen2.5-7B", "deepspeed", **keys, optimizer_offload=True, parameter_offload=True)
    assert (there.parameters, there.gradients, there.optimizer) == (0, 0, 0)
    assert there.host_optimizer == here.parameters + here.gradients + here.optimizer
    (near,), (far,) = (plan_of("Qwen2.5-7B", num_ranks=8, optimizer_offload=offload) for offload in (False, True))
    assert far.optimizer * 3 == near.optimizer  # the float32 master stays
    assert far.host_optimizer == 2 * near.optimizer, "master and gradient twice, pinned in powers of two, and moments"
    assert near.host_optimizer == 0


def test_the_reference_shares_nothing():
    plans = [plan_of("Qwen2.5-0.5B", "reference", num_ranks=n) for n in (1, 8)]
    assert plans[0] == plans[1]
    num = NUM_PARAMETERS["Qwen2.5-0.5B"]
    assert plans[0][0].resident == (2 + 4 + 12) * num


def with_reference(config: Config, memory: str) -> Config:
    return with_values(config, {"algorithm.kl_coefficient": 0.1, "trainer.reference_memory": memory})


@pytest.mark.parametrize(
    ("backend", "keys", "divisor"),
    [
        ("megatron", {"num_ranks": 8}, 1),
        ("megatron", {"num_ranks": 8, "distributed_optimizer": False}, 1),
        ("deepspeed", {"num_ranks": 8, "zero_stage": 2}, 1),
        ("deepspeed", {"num_ranks": 8, "zero_stage": 3}, 8),
        ("reference", {"num_ranks": 8}, 1),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_frozen_reference_is_one_copy_more_of_the_parameters_where_it_was_asked_for(backend, keys, divisor, dtype):
    shape, config = shape_of(CONFIGS["Qwen2.5-7B"]), config_of(backend, dtype=dtype, **keys)
    (plain,) = plan_memory(config, shape)
    copy = {"bfloat16": 2, "float32": 4}[dtype] * -(-NUM_PARAMETERS["Qwen2.5-7B"] // divisor)
    (near,), (far,) = (plan_memory(with_reference(config, memory), shape) for memory in ("device", "host"))
    assert (near.resident - plain.resident, near.host_training) == (copy, plain.host_training)
    assert (far.host_training - plain.host_training, far.resident) == (copy, plain.resident)
    assert near.peak - plain.peak == pytest.approx(1.05 * copy, abs=2)
    assert far.peak == plain.peak


def test_a_reference_beside_offloaded_parameters_lies_where_they_do():
    keys = {"num_ranks": 8, "zero_stage": 3, "optimizer_offload": True, "parameter_offload": True}
    (rank,) = plan_memory(with_reference(config_of("deepspeed", **keys), "host"), shape_of(CONFIGS["Qwen2.5-7B"]))
    assert rank.reference == 0 < rank.host_reference


def test_preferences_hold_the_model_that_they_begin_with_and_adapters_none():
    shape, config = shape_of(CONFIGS["Qwen2.5-7B"]), config_of("megatron", num_ranks=8)
    keys = {"run.stage": "sft", "trainer.reference_memory": "device"}
    held = [
        plan_memory(with_values(config, {**keys, "sft.loss": loss, "lora.rank": rank}), shape)[0].reference
        for loss, rank in (("cross_entropy", 0), ("dpo", 0), ("dpo", 8))
    ]
    assert held == [0, 2 * NUM_PARAMETERS["Qwen2.5-7B"], 0]


def test_a_reference_that_does_not_fit_the_gpu_is_sent_to_the_host():
    model, shape = CONFIGS["Qwen2.5-7B"], shape_of(CONFIGS["Qwen2.5-7B"])
    config = with_reference(config_of(num_ranks=8, recompute_activations="full"), "device")
    (near,), (far,) = (plan_memory(with_reference(config, memory), shape) for memory in ("device", "host"))
    assert "reference" in describe_memory((near,))
    assert advise(config, model, shape, (near.peak - 1) / GIB).startswith("would fit: trainer.reference_memory=host")
    assert far.peak < near.peak


@pytest.mark.parametrize(
    ("backend", "keys", "divisor"),
    [("megatron", {"num_ranks": 4}, 4), ("deepspeed", {"zero_stage": 1, "num_ranks": 2}, 2), ("reference", {}, 1)],
)
def test_an_average_of_weights_is_four_bytes_for_what_a_rank_keeps_and_once_more_in_a_checkpoint(
    backend, keys, divisor
):
    (plain,) = plan_of("Qwen2.5-7B", backend, **keys)
    (far,) = plan_of("Qwen2.5-7B", backend, ema_decay=0.99, **keys)
    (near,) = plan_of("Qwen2.5-7B", backend, ema_decay=0.99, ema_memory="device", **keys)
    average = 4 * -(-NUM_PARAMETERS["Qwen2.5-7B"] // divisor)
    assert (far.resident - plain.resident, far.host_training - plain.host_training) == (0, 2 * average)
    assert (near.resident - plain.resident, near.host_training - plain.host_training) == (average, average)
    assert "average of weights" in describe_memory((near,))


@pytest.mark.parametrize(
    ("backend", "keys", "divisor", "of_adapters"),
    [
        ("reference", {}, 1, 16),
        ("megatron", {"num_ranks": 2}, 1, 16),
        ("deepspeed", {"zero_stage": 1, "num_ranks": 2}, 1, 2 + 4 + 12 / 2),
        ("deepspeed", {"zero_stage": 3, "num_ranks": 2}, 2, (2 + 4 + 12) / 2),
    ],
)
def test_adapters_are_beside_one_frozen_model_which_is_their_reference(backend, keys, divisor, of_adapters):
    """Rank 8 on every matrix of Qwen2.5-7B: 8 · (in + out) numbers each, worked out by hand."""
    config = with_values(config_of(backend, **keys), {"lora.rank": 8, "algorithm.kl_coefficient": 0.1})
    hidden, keys_wide, mlp = 3584, 512, 18944
    of_layer = [(hidden, hidden), (hidden, keys_wide), (hidden, keys_wide), (hidden, hidden), *[(hidden, mlp)] * 3]
    number = 28 * sum(8 * sum(sizes) for sizes in of_layer)
    (rank,) = plan_memory(config, shape_of(CONFIGS["Qwen2.5-7B"]))
    frozen = 2 * NUM_PARAMETERS["Qwen2.5-7B"] / divisor
    assert rank.parameters + rank.gradients + rank.optimizer == pytest.approx(frozen + of_adapters * number, rel=1e-6)
    assert (rank.reference, rank.host_reference) == (0, 0)
    assert rank.host_snapshot == pytest.approx(12 * number / (2 if backend == "deepspeed" else 1), rel=1e-6)
    assert rank.export < 3 * 4 * number
    (merged,) = plan_memory(with_values(config, {"weights.form": "merged"}), shape_of(CONFIGS["Qwen2.5-7B"]))
    assert merged.export > 10 * rank.export


@pytest.mark.parametrize(
    ("backend", "keys", "of_adapters"),
    [
        ("reference", {}, 16),
        ("deepspeed", {"zero_stage": 3, "num_ranks": 2}, (2 + 4 + 12) / 2),
        ("megatron", {"num_ranks": 4, "expert_parallel": 4}, 16 / 4),
        ("megatron", {"num_ranks": 8, "expert_parallel": 4}, (8 + 8 / 2) / 4),
        ("megatron", {"num_ranks": 8, "expert_parallel": 4, "distributed_optimizer": False}, 16 / 4),
        ("megatron", {"num_ranks": 4, "expert_parallel": 2, "pipeline_parallel": 2}, 16 / 4),
    ],
)
def test_adapters_of_experts_lie_where_their_experts_do(backend, keys, of_adapters):
    """Rank 8 on all three matrices of 128 experts in each of the 48 layers of Qwen3-30B-A3B."""
    config = with_values(config_of(backend, **keys), {"lora.rank": 8, "lora.targets": ("experts",)})
    shape, number = shape_of(CONFIGS["Qwen3-30B-A3B"]), 48 * 128 * 3 * 8 * (2048 + 768)
    frozen = 2 * shape.on_rank(ParallelLayout.of(config.trainer), 0).total / (2 if backend == "deepspeed" else 1)
    rank, *_ = plan_memory(config, shape)
    assert rank.parameters + rank.gradients + rank.optimizer == pytest.approx(frozen + of_adapters * number, rel=1e-6)
    weights = 2 * shape.num_parameters // config.generation.tensor_parallel
    for each in (config, with_values(config, {"lora.rank": 5})):
        assert plan_engine(each, shape).weights == weights + 2 * number, "vLLM has room for 8"


def test_a_base_in_four_bits_is_counted_as_it_is_packed():
    """7.0 of the 7.6 billion numbers of Qwen2.5-7B stand in attention and MLP."""
    plain = with_values(config_of("reference"), {"lora.rank": 8, "weights.form": "merged"})
    packed, shape = with_values(plain, {"lora.quantization": "nf4"}), shape_of(CONFIGS["Qwen2.5-7B"])
    (whole,), (small,) = (plan_memory(config, shape) for config in (plain, packed))
    number = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert whole.parameters - small.parameters == pytest.approx((2 - 0.516) * number, rel=1e-4)
    assert small.buckets - whole.buckets == 2 * 3584 * 18944  # a matrix that is unpacked
    pytest.importorskip("bitsandbytes")
    weight = torch.randn(512, 1024)
    numbers, scales = in_four_bits(weight)
    held = [numbers, scales.absmax, scales.state2.absmax]
    assert sum(each.nbytes for each in held) == pytest.approx(NF4_BYTES * weight.numel(), rel=1e-3)


def test_the_page_on_adapters_says_what_is_planned():
    config = config_of("reference", recompute_activations="full")
    plans = [plan_memory(with_values(config, {"lora.rank": rank}), shape_of(CONFIGS["Qwen2.5-7B"])) for rank in (0, 32)]
    figures = " | ".join(f"{fullest(plan).peak / GIB:.0f} GiB" for plan in plans)
    assert f"as `rlhpc check` plans it | {figures} |" in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("keys", [{}, {"zero_stage": 3, "num_ranks": 4}, {"zero_stage": 2, "optimizer_offload": True}])
def test_a_critic_is_a_second_model_with_its_own_optimiser_and_no_second_row(keys):
    config, shape = config_of("deepspeed", **keys), shape_of(CONFIGS["Qwen2.5-0.5B"])
    (alone,), (both,) = (
        plan_memory(each, shape) for each in (config, with_values(config, {"algorithm.advantage": "gae"}))
    )
    assert both.resident == 2 * alone.resident
    assert both.host_training == 2 * alone.host_training
    assert both.host_loading == alone.host_loading + alone.host_optimizer, "loaded beside what is offloaded"
    assert both.moment == alone.moment


def test_the_first_stage_holds_one_row_more_than_each_after_it():
    layout = ParallelLayout.of(config_of(num_ranks=4, pipeline_parallel=4).trainer)
    assert [rows_in_flight(layout, stage) for stage in range(4)] == [4, 3, 2, 1]
    plan = plan_of("Qwen2.5-32B", num_ranks=4, pipeline_parallel=4)
    steps = [a.activations - b.activations for a, b in itertools.pairwise(plan)]
    assert steps[0] == steps[1] == steps[2] > 0


def test_interleaving_costs_the_first_stage_the_published_factor():
    """1 + (p − 1) / (p · v) times the p rows of 1F1B: Korthikanti et al. 2022, §4.2.3."""
    layout = ParallelLayout.of(config_of(num_ranks=4, pipeline_parallel=4, chunks_per_stage=2).trainer)
    assert rows_in_flight(layout, 0) == pytest.approx(4 * (1 + 3 / (4 * 2)))


def test_only_the_ends_of_the_pipeline_hold_an_embedding_and_only_the_last_the_logits():
    plan = plan_of("Qwen2.5-72B", num_ranks=32, tensor_parallel=8, pipeline_parallel=4, sequence_parallel=True)
    embedding = 152064 // 8 * 8192
    assert plan[0].parameters - plan[1].parameters == 2 * embedding
    assert plan[3].parameters - plan[1].parameters == 2 * (embedding + 8192)
    assert [rank.head > 0 for rank in plan] == [False, False, False, True]


def test_activations_of_a_dense_layer_are_those_of_the_table():
    """Written out once by hand for Qwen2.5-7B, bfloat16, one rank, 8192 tokens, full recompute left out."""
    (rank,) = plan_of("Qwen2.5-7B", num_ranks=1)
    norms = 2 * 2 * 3584
    inputs = 2 * 2 * 3584
    attention = 2 * 2 * (28 + 4) * 128 + 4 * 28
    in_backward = 2 * 2 * 3584 + 3 * 2 * 18944
    per_token = 28 * (norms + inputs + attention + 3 * 2 * 18944) + in_backward
    assert rank.activations == 8192 * per_token


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_the_last_norm_keeps_its_share_of_the_row_however_many_tensor_ranks_share_it(tensor):
    """Qwen2.5-72B, bfloat16: 8192 tokens of 8192 numbers before the norm, in shares or on every rank whole."""
    shared, whole = (
        plan_of("Qwen2.5-72B", num_ranks=tensor, tensor_parallel=tensor, sequence_parallel=is_shared)[0].head
        for is_shared in (True, False)
    )
    row = 8192 * 8192 * 2
    assert whole - shared == row - row // tensor


def test_matrices_of_experts_lie_side_by_side_once_a_rank_in_megatrons_bfloat16():
    """Twice the experts, of which each token takes as many: but for that, the router's 12 bytes a token and expert."""
    shape = shape_of(CONFIGS["Qwen3-30B-A3B"])
    larger = replace(shape, num_experts=2 * shape.num_experts)

    def growth(backend: str, dtype: str, **trainer: Any) -> int:
        few, many = (
            plan_memory(config_of(backend, dtype=dtype, **trainer), each)[0].activations for each in (shape, larger)
        )
        return int(many - few)

    router = growth("megatron", "float32", num_ranks=8, expert_parallel=8)
    assert router == growth("deepspeed", "bfloat16", num_ranks=8) > 0
    matrices = 2 * 2 * 2048 * 768 * 128
    assert growth("megatron", "bfloat16", num_ranks=8, expert_parallel=8) == router + matrices // 8
    assert growth("megatron", "bfloat16", num_ranks=1) == router + matrices


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"num_ranks": 1, "recompute_activations": "full"}, {"num_ranks": 1}),
        ({"num_ranks": 1, "token_budget": 4096}, {"num_ranks": 1}),
        ({"num_ranks": 2, "tensor_parallel": 2}, {"num_ranks": 1}),
        ({"num_ranks": 2, "tensor_parallel": 2, "sequence_parallel": True}, {"num_ranks": 2, "tensor_parallel": 2}),
        ({"num_ranks": 2, "context_parallel": 2}, {"num_ranks": 1}),
        (
            {"num_ranks": 4, "context_parallel": 4, "recompute_activations": "selective"},
            {"num_ranks": 4, "context_parallel": 4},
        ),
    ],
)
def test_what_saves_activations_saves_them(less, more):
    (small,), (large,) = plan_of("Llama-3.1-8B", **less), plan_of("Llama-3.1-8B", **more)
    assert small.activations < large.activations


def test_chunks_and_tensor_ranks_bound_the_logits():
    (alone,), (shared,) = (plan_of("Qwen2.5-0.5B", num_ranks=2, **keys) for keys in ({}, {"tensor_parallel": 2}))
    whole = 8192 * 151936 * 4
    assert alone.head < whole / 4
    assert shared.head < 0.6 * alone.head


def test_on_cpu_nothing_is_put_aside_for_a_gpu():
    (rank,) = plan_of("Qwen2.5-0.5B", "reference", device="cpu")
    assert rank.allowance == 0
    assert rank.peak == rank.resident + rank.activations + rank.head


# ------------------------------------------------------------------------------------------------------------- verdict


def refusal(model: str, config: Config, site: Site = H100) -> str:
    with pytest.raises(ConfigError) as refused:
        judge_memory(config, CONFIGS[model], shape_of(CONFIGS[model]), site, Path("site.toml"))
    return str(refused.value)


CANNOT_FIT = [
    ("Qwen2.5-7B", {"num_ranks": 8, "tensor_parallel": 2, "sequence_parallel": True, "token_budget": 32768}),
    ("Qwen2.5-7B", {"num_ranks": 8, "distributed_optimizer": False}),
    ("Qwen2.5-32B", {"num_ranks": 8, "tensor_parallel": 4}),
    ("Qwen2.5-72B", {"num_ranks": 8, "tensor_parallel": 8}),
    ("Qwen3-30B-A3B", {"num_ranks": 8, "expert_parallel": 8}),
    ("Llama-3.1-70B", {"num_ranks": 4, "pipeline_parallel": 4}),
    ("Llama-3.1-8B", {"backend": "deepspeed", "num_ranks": 4, "zero_stage": 1}),
    ("Llama-3.1-70B", {"backend": "deepspeed", "num_ranks": 8}),
    ("Qwen2.5-7B", {"backend": "reference"}),
]


@pytest.mark.parametrize(("model", "trainer"), CANNOT_FIT)
def test_a_layout_that_cannot_fit_is_refused_with_a_change_that_fits(model, trainer):
    """The change is taken at its word: applied to the run, it passes."""
    config = config_of(**trainer)
    said = refusal(model, config)
    assert f"num_ranks={config.trainer.num_ranks}" in said
    assert "token_budget=" in said
    assert "(estimate)" in said
    need, over, limit = (float(n) for n in re.findall(r"([\d.]+) GiB", said)[:3])
    assert need - limit == pytest.approx(over, abs=0.11)
    assert limit == GPU_MEMORY_GIB["h100"]
    changes = dict(re.findall(r"trainer\.(\w+)=(\S+)", said.partition("would fit: ")[2]))
    assert changes
    parsed = {key: {"true": True, "false": False}.get(v) if v in ("true", "false") else v for key, v in changes.items()}
    parsed = {key: int(v) if isinstance(v, str) and v.isdigit() else v for key, v in parsed.items()}
    better = config_of(**{**trainer, **parsed})
    assert "to spare" in judge_memory(better, CONFIGS[model], shape_of(CONFIGS[model]), H100, Path("site.toml"))
    for key in parsed:  # and nothing in it is superfluous
        rest = {name: value for name, value in parsed.items() if name != key}
        try:
            without = config_of(**{**trainer, **rest})
            ParallelLayout.of(without.trainer).refuse_unfit(CONFIGS[model])
        except (ConfigError, ValueError):
            continue
        assert fullest(plan_memory(without, shape_of(CONFIGS[model]))).peak > limit * GIB


def test_where_nothing_helps_nothing_is_promised():
    tiny_gpu = Site.model_validate({"trainer": {"gpu": "x", "gpu_memory_gib": 1.0}, "generation": {"gpu": "h100"}})
    assert "no layout that was tried fits" in refusal("Qwen2.5-72B", config_of(num_ranks=8), tiny_gpu)


def test_an_engine_whose_weights_alone_fill_its_gpus_is_refused():
    config = config_of(num_ranks=64, tensor_parallel=8, pipeline_parallel=4, sequence_parallel=True)
    config = config.model_copy(update={"generation": config.generation.model_copy(update={"tensor_parallel": 1})})
    said = refusal("Qwen2.5-72B", config)
    assert "generation.tensor_parallel=1: an engine needs at least" in said
    assert "(weights 135.4," in said
    assert "generation.gpu='h100' (79.1 GiB) in site.toml" in said
    assert "would fit: generation.tensor_parallel=" in said


def test_the_table_shows_both_ends_of_the_pipeline_and_the_fullest_between():
    ends = describe_memory(plan_of("Qwen2.5-72B", num_ranks=8, pipeline_parallel=8)).splitlines()
    assert re.findall(r"stage \d", ends[0]) == ["stage 0", "stage 7"]
    assert "estimate" in ends[0]
    lines = {line[2:36].strip(): line[36:].split() for line in ends[1:]}
    for row in ("parameters", "gradients", "optimiser", "in a step: activations", "in a step: logits, head"):
        assert len(lines[row]) == 2
    for row in ("in an export: buckets", "CUDA, NCCL, fragments", "fullest moment", "host: checkpoint"):
        assert len(lines[row]) == 2
    assert "ZeRO buckets" not in lines


def test_nothing_is_judged_without_a_site_a_gpu_or_a_known_family():
    model, config = CONFIGS["Qwen2.5-0.5B"], config_of(num_ranks=1)
    (line,) = memory_report(config, model, shape_of(model), None).splitlines()  # no page about GPUs that are not there
    assert "--site SITE.toml shows the estimate" in line
    on_cpu = config_of("reference", device="cpu")
    assert "trainer.device='cpu'" in memory_report(on_cpu, model, shape_of(model), EXAMPLE_SITE)
    assert "model_type='gemma9'" in memory_report(on_cpu, {"model_type": "gemma9"}, None, EXAMPLE_SITE)


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_hybrids_and_models_with_latents_are_planned_and_judged_also_inside_one_that_sees(name):
    model, config = OTHER_CONFIGS[name], config_of("deepspeed", num_ranks=64, zero_stage=3)
    config = with_values(config, {"generation.tensor_parallel": 1})
    said = memory_report(config, model, shape_of(model), None)
    need = fullest(plan_memory(config, shape_of(model))).peak
    assert f"about {need / GIB:.1f} GiB a rank" in said
    if (family := model["model_type"]).endswith("_text"):
        inside = {"model_type": family.removesuffix("_text"), "text_config": model, "vision_config": {"depth": 27}}
        if not shape_of(model).num_experts:  # stacked on disk, which makes larger buckets
            assert memory_report(config, inside, shape_of(inside), None) == said
        assert shape_of(inside).num_parameters == shape_of(model).num_parameters
    small = Site.model_validate({"trainer": {"gpu": "x", "gpu_memory_gib": 1.0}, "generation": {"gpu": "b200"}})
    if shape_of(model).num_parameters < 50e9:  # one GPU holds the engine
        with pytest.raises(ConfigError, match=r"trainer\.gpu='x'"):
            judge_memory(config, model, shape_of(model), small, Path("site.toml"))


@pytest.mark.parametrize(
    ("trainer", "generation", "said"),
    [({}, {}, ["not judged: site.toml lacks trainer.gpu and generation.gpu, so that"]),
     ({"gpu": "h100"}, {}, ["79.1 GiB of trainer.gpu='h100': ", "not judged: site.toml lacks generation.gpu, so that"]),
     ({}, {"gpu": "h100"}, ["not judged: site.toml lacks trainer.gpu, so that"]),
     ({"gpu_memory_gib": 80.0}, {"gpu": "h100"}, ["80 GiB of trainer.gpu_memory_gib=80: "])],
    ids=["neither", "the engine's", "the trainer's", "by its memory"],
)  # fmt: skip
def test_a_gpu_that_the_site_file_does_not_name_is_not_judged(trainer, generation, said):
    site, model = Site.model_validate({"trainer": trainer, "generation": generation}), CONFIGS["Qwen2.5-0.5B"]
    lines = judge_memory(config_of(num_ranks=1), model, shape_of(model), site, Path("site.toml")).splitlines()
    assert [line.startswith(f"fits        {start}") for line, start in zip(lines, said, strict=True)] == [True] * len(
        said
    )
    if "not judged" in said[-1]:
        assert lines[-1].endswith("legal: a100-40, a100-80, a40, a6000, b200, gh200, h100, h100-94, h200, l4, l40s, "
                                  "rtx4090, v100-16, v100-32, or gpu_memory_gib")  # fmt: skip


# --------------------------------------------------------------------------------------------------- site file, configs


def test_the_example_of_a_site_file_names_every_gpu_that_is_known():
    assert load_site(EXAMPLE_SITE).trainer.memory_gib == GPU_MEMORY_GIB["h100"]
    text = EXAMPLE_SITE.read_text(encoding="utf-8")
    assert [name for name in GPU_MEMORY_GIB if not re.search(rf"[ :]{name}[,.]", text)] == []


def test_a_gpu_of_unknown_name_is_taken_with_its_memory():
    site = Site.model_validate({"trainer": {"gpu": "mi300", "gpu_memory_gib": 191.0}, "generation": {"gpu": "h100"}})
    assert site.trainer.memory_gib == 191.0


# On one card are those of test_device_memory.py.
PLANNED_RUNS = LARGE_RUNS | RECIPES | {name: LORA_RUNS[name] for name in ("lora/lora-32b", "lora/lora-30b-a3b")}


def check_words(name: str, tmp_path: Path) -> list[str]:
    """`rlhpc check` of a shipped run, on a model directory with its real config.json and a small dataset."""
    model = make_model_directory(tmp_path / "model", CONFIGS[PLANNED_RUNS[name]])
    (tmp_path / "train.jsonl").write_text('{"question": "add", "answer": "2"}\n')
    run_file = ROOT / "configs" / f"{name}.toml"
    paths = [f"model.path={str(model)!r}", f"data.path={str(tmp_path / 'train.jsonl')!r}"]
    return ["check", str(run_file), *paths, f"run.directory={str(tmp_path / 'run')!r}", "--site", str(EXAMPLE_SITE)]


@pytest.mark.starts
@pytest.mark.parametrize("name", PLANNED_RUNS)
def test_a_run_for_h100s_passes_check(name, tmp_path, capsys):
    assert main(check_words(name, tmp_path)) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    (line,) = re.findall(r"^fits .*$", printed, re.MULTILINE)
    spare = float(re.findall(r": ([\d.]+) GiB to spare", line)[0])
    assert spare > 0.1 * GPU_MEMORY_GIB["h100"], "a plan that is this tight does not survive its own errors"
    assert f"trainer     {'deepspeed' if name in LORA_RUNS else 'megatron'}, " in printed
    if name not in LARGE_RUNS:
        fullest = max(map(float, re.findall(r"^  fullest moment (.*)$", printed, re.MULTILINE)[0].split()))
        (engine,) = re.findall(r"^  all, at least +(.*)$", printed, re.MULTILINE)
        said = part_of(ROOT / "configs" / f"{name}.toml", "Memory")
        assert said == (
            f"estimate, GiB of a GPU's {GPU_MEMORY_GIB['h100']}: trainer {fullest:.1f} at its fullest, "
            f"engine {float(engine):.1f} at least, {spare} to spare."
        ), "the head of the recipe says something else than is printed"


def test_two_runs_of_one_size_say_the_same_of_their_memory():
    """`rlhpc check` of the second needs a library for its problems, which not every machine has."""
    files = [ROOT / "configs" / f"{name}.toml" for name in ("gsm8k", "reasoning_gym")]
    shape = shape_of(CONFIGS[RECIPES["gsm8k"]])
    plans = [(plan_memory(config, shape), plan_engine(config, shape)) for config in map(load_config, files)]
    assert plans[0] == plans[1]
    assert part_of(files[0], "Memory") == part_of(files[1], "Memory")


@pytest.mark.parametrize("name", LARGE_RUNS)
def test_a_large_run_is_refused_on_small_gpus(name, tmp_path, capsys):
    site = tmp_path / "small.toml"
    site.write_text('[trainer]\ngpu = "rtx4090"\n[generation]\ngpu = "b200"\n')
    assert main([*check_words(name, tmp_path)[:-1], str(site)]) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "23.5 GiB of trainer.gpu='rtx4090'" in captured.err


def test_every_run_for_h100s_is_checked():
    files = [ROOT / "configs" / "gsm8k.toml", *(ROOT / "configs").glob("*/*.toml")]
    assert {str(path.relative_to(ROOT / "configs").with_suffix("")) for path in files} == set(
        LARGE_RUNS | RECIPES | LORA_RUNS
    )
    for path in files:
        assert load_config(path).run.name == path.stem


def test_the_bucket_that_the_plan_counts_is_deepspeeds():
    """Read as text: importing it would need DeepSpeed and its environment."""
    source = (ROOT / "rlhpc" / "training" / "deepspeed" / "engine.py").read_text(encoding="utf-8")
    (bucket,) = re.findall(r"^BUCKET_ELEMENTS = (\d+) << (\d+)", source, re.MULTILINE)
    (rank,) = plan_of("Qwen2.5-7B", "deepspeed", num_ranks=8, zero_stage=2)
    assert rank.buckets == (2 + 2 + 4) * (int(bucket[0]) << int(bucket[1]))


def test_the_page_on_memory_says_which_gpus_a_model_needs():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (7B|32B) \| (\d+ \| \d+ \| .*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for model, said in rows:
        name = {"7B": "large/qwen2.5-7b-tp2", "32B": "large/qwen2.5-32b-tp4-pp2"}[model]
        shape, config = shape_of(CONFIGS[LARGE_RUNS[name]]), load_config(ROOT / "configs" / f"{name}.toml")
        ranks, tensor, *_ = said.split(" | ")
        layout = {"num_ranks": int(ranks), "tensor_parallel": int(tensor), "pipeline_parallel": 1}
        more = {"sequence_parallel": True, "recompute_activations": "full"}
        config = with_values(config, {f"trainer.{key}": value for key, value in (layout | more).items()})
        (kept,) = plan_memory(config, shape)
        (moved,) = plan_memory(with_values(config, {"trainer.optimizer_offload": True}), shape)
        figures = f"{kept.peak / GIB:.1f} | {moved.peak / GIB:.1f}, {moved.host / GIB:.0f}"
        engine = f"{config.generation.tensor_parallel} | {plan_engine(config, shape).total / GIB:.1f}"
        assert said == f"{ranks} | {tensor} | {figures} | {engine}"


@pytest.mark.starts
@pytest.mark.parametrize("name", ["large/qwen2.5-72b-tp8-pp4", "large/qwen2.5-7b-tp2"])
def test_the_page_on_memory_shows_what_is_printed(name, tmp_path, capsys, monkeypatch):
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (command, output) = re.findall(rf"^\$ rlhpc check configs/{name}.toml (.*)\n((?:.*\n)*?)```", page, re.MULTILINE)[0]
    monkeypatch.chdir(ROOT)
    words = check_words(name, tmp_path)[: -len(["--site", str(EXAMPLE_SITE)])]
    main([*words, *command.split()])
    captured = capsys.readouterr()
    printed = captured.out[captured.out.find("memory      ") :] if captured.out else captured.err
    assert printed == output


# --------------------- Host memory of a trainer rank: what it needs while it loads and trains, and whether its task may

SEVEN, LARGE = NUM_PARAMETERS["Qwen2.5-7B"], NUM_PARAMETERS["Qwen2.5-32B"]


def rank_of(model: str, backend: str, **trainer: Any) -> RankMemory:
    (rank,) = plan_of(model, backend, **trainer)
    assert isinstance(rank, RankMemory)
    return rank


@pytest.mark.parametrize(("model", "num"), [("Qwen2.5-7B", SEVEN), ("Qwen2.5-32B", LARGE)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_of_deepspeed_loads_the_whole_model_in_float32_and_once_more_in_bfloat16(model, num, stage):
    rank = rank_of(model, "deepspeed", num_ranks=8, zero_stage=stage)
    assert rank.host == 6 * num > rank.host_training, "nothing is cut yet: ranks do not matter"
    assert rank_of(model, "deepspeed", num_ranks=8, zero_stage=stage, dtype="float32").host_loading == 4 * num
    assert "host, while loading: whole model" in describe_memory((rank,))


def test_what_deepspeed_offloads_comes_while_the_float32_model_is_still_there():
    rank = rank_of("Qwen2.5-7B", "deepspeed", num_ranks=2, zero_stage=3, optimizer_offload=True)
    assert rank.host_loading == 4 * SEVEN + rank.host_optimizer
    assert rank.host_optimizer == 16 * SEVEN // 2


def test_the_larger_of_loading_and_training_counts():
    rank = rank_of("Qwen2.5-7B", "deepspeed", num_ranks=1)
    assert rank.host == rank.host_training == 12 * SEVEN > rank.host_loading == 6 * SEVEN


def test_megatron_reads_slices_and_the_reference_a_whole_model():
    assert rank_of("Qwen2.5-7B", "megatron", num_ranks=8).host_loading == 0
    assert rank_of("Qwen2.5-7B", "reference").host_loading == 4 * SEVEN
    assert rank_of("Qwen2.5-7B", "reference", device="cpu").host_loading == 0, "they are its masters"


@pytest.mark.parametrize(
    ("backend", "whole", "parts", "copies"),
    [
        ("megatron", {"num_ranks": 2}, {"num_ranks": 2, "tensor_parallel": 2}, 1),
        ("deepspeed", {"num_ranks": 2, "zero_stage": 2}, {"num_ranks": 2, "zero_stage": 3}, 1),
        ("megatron", {"num_ranks": 2}, {"num_ranks": 2, "pipeline_parallel": 2}, 0),
    ],
)
def test_parts_of_the_largest_tensor_lie_beside_the_whole_while_they_are_joined_for_an_export(
    backend, whole, parts, copies
):
    one, cut = plan_of("Qwen2.5-7B", backend, **whole)[0], plan_of("Qwen2.5-7B", backend, **parts)[0]
    assert cut.export - one.export == copies * 2 * 152064 * 3584


# ------------------------------------------------------------------------------------------------------------- verdict


def test_the_sending_rank_keeps_what_it_sent_where_only_changes_travel():
    base = config_of(num_ranks=8, pipeline_parallel=2)

    def images(**weights: Any) -> list[int]:
        changed = with_values(base, {f"weights.{key}": value for key, value in weights.items()})
        return [rank.host_image for rank in plan_memory(changed, shape_of(CONFIGS["Qwen2.5-7B"]))]

    whole = 2 * NUM_PARAMETERS["Qwen2.5-7B"]
    assert images(transport="gloo") == [whole, 0]
    assert images() == images(transport="nccl") == images(transport="gloo", delta="off") == [0, 0]
    assert images(transport="gloo", staging="paused") == [0, 0]  # engines have nothing to apply a change to
    wider = plan_memory(with_values(base, {"weights.transport": "gloo"}), shape_of(CONFIGS["Qwen2.5-7B"]))[0]
    assert wider.host_training == whole + plan_memory(base, shape_of(CONFIGS["Qwen2.5-7B"]))[0].host_training
    assert "host: weights as sent" in describe_memory((wider,))


def said(given: int | None, model: str = "Qwen2.5-32B", backend: str = "deepspeed", **trainer: Any) -> list[str]:
    site = Site.model_validate({"trainer": {"gpu": "b200", "memory_gib_per_gpu": given}, "generation": {"gpu": "b200"}})
    return judge_host(config_of(backend, **trainer), shape_of(CONFIGS[model]), site, Path("site.toml"))


def test_host_memory_that_is_too_small_is_refused_with_key_value_and_what_is_needed():
    with pytest.raises(ConfigError) as refused:
        said(96, num_ranks=8, zero_stage=3)
    need = 6 * LARGE / GIB + 8
    assert str(refused.value) == (
        f"trainer.memory_gib_per_gpu=96 in site.toml: a rank of stage 0 needs {need:.1f} GiB of host memory while it "
        f"loads the whole model (estimate; 8 of them the process), {need - 96:.1f} GiB more; "
        "would fit: memory_gib_per_gpu=192"
    )
    assert f"rlhpc: {refused.value}\n" in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (fits,) = said(192, num_ranks=8, zero_stage=3)
    assert fits == f"host        192 GiB of trainer.memory_gib_per_gpu: {192 - need:.1f} GiB to spare (an estimate)"
    with pytest.raises(ConfigError, match="while it trains and saves"):
        said(96, backend="megatron", num_ranks=2, optimizer_offload=True)


def test_a_stage_in_the_middle_is_looked_at_too():
    config = config_of(num_ranks=4, pipeline_parallel=4)
    hosts = [rank.host for rank in plan_memory(config, ModelShape.of(CONFIGS["Qwen2.5-7B"]))]  # type: ignore[arg-type]
    fullest = hosts.index(max(hosts))
    with pytest.raises(ConfigError, match=f"a rank of stage {fullest} needs "):
        said(1, "Qwen2.5-7B", "megatron", num_ranks=4, pipeline_parallel=4)


def test_what_the_default_of_the_partition_must_be_is_said_where_much_is_needed():
    (warning,) = said(None, num_ranks=8, zero_stage=3)
    assert warning.startswith(
        "warning     trainer.memory_gib_per_gpu is not in site.toml: the partition's default must be 192 GiB a GPU; "
    )
    assert said(None, "Qwen2.5-0.5B", "megatron", num_ranks=8) == []
    (whole_node,) = said(0, num_ranks=8, zero_stage=3)
    assert whole_node.startswith(
        "host        trainer.memory_gib_per_gpu=0, all of a node: a rank of stage 0 needs 191.1"
    )


def test_a_small_model_is_not_refused_for_a_guess():
    (line,) = said(1, "Qwen2.5-0.5B", "megatron", num_ranks=8)
    assert line.startswith(
        "host        1 GiB of trainer.memory_gib_per_gpu: not judged: a rank of stage 0 needs 8.7 GiB"
    )
    with pytest.raises(ConfigError, match="would fit: memory_gib_per_gpu=11"):
        said(1, "Qwen2.5-0.5B", "deepspeed", num_ranks=8)


def test_a_large_model_is_warned_of_for_the_guess_and_refused_for_what_is_counted():
    need = 6 * LARGE / GIB
    (warning,) = said(math.ceil(need), num_ranks=8, zero_stage=3)
    assert warning.startswith("warning     trainer.memory_gib_per_gpu=")
    assert warning.endswith("; would fit: 192")
    with pytest.raises(ConfigError, match="would fit: memory_gib_per_gpu=192"):
        said(math.floor(need), num_ranks=8, zero_stage=3)


def test_check_refuses_it_in_one_line(tmp_path, capsys):
    site = tmp_path / "site.toml"
    site.write_text('[trainer]\ngpu = "h100"\nmemory_gib_per_gpu = 16\n[generation]\ngpu = "h100"\n')
    words = check_words("large/qwen2.5-32b-tp4-pp2", tmp_path)
    assert main([*words[:-1], str(site)]) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"trainer\.memory_gib_per_gpu=16 in .*: a rank of stage \d needs [\d.]+ GiB", line)
