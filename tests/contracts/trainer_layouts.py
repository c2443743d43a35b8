"""Layouts and models that the trainer contract is tested in.  A new backend or layout is a new row of LAYOUTS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.protocol.types import PackedMicrobatch, TrainingSample
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import pack_row

MEGATRON_2: dict[str, Any] = {"backend": "megatron", "num_ranks": 2}
MEGATRON_4: dict[str, Any] = {"backend": "megatron", "num_ranks": 4}
DEEPSPEED_2: dict[str, Any] = {"backend": "deepspeed", "num_ranks": 2}

# Test id → keys of [trainer].  Rows that share backend and number of ranks stand together: they share processes.
LAYOUTS: dict[str, dict[str, Any]] = {
    "reference-dp1": {"backend": "reference", "num_ranks": 1},
    "reference-dp2": {"backend": "reference", "num_ranks": 2},
    "megatron-dp1": {"backend": "megatron", "num_ranks": 1},
    "megatron-dp2": MEGATRON_2,
    "megatron-dp2_replicated": MEGATRON_2 | {"distributed_optimizer": False},
    "megatron-tp2": MEGATRON_2 | {"tensor_parallel": 2},
    "megatron-sp": MEGATRON_2 | {"tensor_parallel": 2, "sequence_parallel": True},
    "megatron-pp2": MEGATRON_2 | {"pipeline_parallel": 2},
    "megatron-vpp2": MEGATRON_2 | {"pipeline_parallel": 2, "chunks_per_stage": 2},
    "megatron-cp2": MEGATRON_2 | {"context_parallel": 2},
    "megatron-ep2": MEGATRON_2 | {"expert_parallel": 2},
    "megatron-sp_ep2": MEGATRON_2 | {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    "megatron-tp2_pp2": MEGATRON_4 | {"tensor_parallel": 2, "pipeline_parallel": 2},
    "megatron-tp2_dp2": MEGATRON_4 | {"tensor_parallel": 2},
    "deepspeed-zero1": DEEPSPEED_2 | {"zero_stage": 1},
    "deepspeed-zero2": DEEPSPEED_2 | {"zero_stage": 2},
    "deepspeed-zero2_offload": DEEPSPEED_2 | {"zero_stage": 2, "optimizer_offload": True},  # DeepSpeed does on CPU too
    "deepspeed-zero3": DEEPSPEED_2 | {"zero_stage": 3},
}
# Layouts that only the tests of checkpoints, and families with windows and sinks, need besides.
MORE_LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron-pp2_dp2": MEGATRON_4 | {"pipeline_parallel": 2},
    "megatron-cp2_tp2": MEGATRON_4 | {"context_parallel": 2, "tensor_parallel": 2},
    "megatron-sp_ep2_dp2": MEGATRON_4 | {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
}

# Tied and untied heads, odd vocabularies, query heads that share key heads or do not.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"family": "qwen2", "tied": True, "vocabulary": 100, "heads": 2},
    "qwen3-untied": {"family": "qwen3", "tied": False, "vocabulary": 203, "heads": 4},
    "llama-odd": {"family": "llama", "tied": True, "vocabulary": 117, "heads": 4},
    "qwen3_moe": {"family": "qwen3_moe", "tied": False, "vocabulary": 117, "heads": 4},
    "mistral": {"family": "mistral", "tied": False, "vocabulary": 117, "heads": 4},
    "olmo3": {"family": "olmo3", "tied": False, "vocabulary": 203, "heads": 4},
    "gemma3": {"family": "gemma3_text", "tied": True, "vocabulary": 117, "heads": 4},
    "gpt_oss": {"family": "gpt_oss", "tied": False, "vocabulary": 117, "heads": 4},
}
PLAIN_MODELS = ("qwen2-tied", "qwen3-untied", "llama-odd", "qwen3_moe")
# Windows, other norms, YaRN, sinks: every four ranks that can hold them.
WINDOWED_LAYOUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mistral", "olmo3", "gemma3"), ("megatron-tp2_pp2", "megatron-tp2_dp2", "megatron-cp2_tp2")),
    "gpt_oss": ("megatron-sp_ep2_dp2",),
}
MIXTURE = "qwen3_moe"
MIXTURE_LAYOUTS = (
    "reference-dp1",
    "reference-dp2",
    "megatron-dp2",
    "megatron-ep2",
    "megatron-sp_ep2",
    "deepspeed-zero2",
    "deepspeed-zero3",
)
ADAPTER_LAYOUTS = tuple(name for name, keys in LAYOUTS.items() if "expert_parallel" not in keys)
LENGTHS = (5, 31, 12, 2, 47, 12, 20, 33, 9)  # too long and too short for one bucket of padding


def has_experts(layout: str) -> bool:
    """True where only a mixture of experts can be laid out like this."""
    return "expert_parallel" in layout_keys(layout)


def layout_keys(layout: str) -> dict[str, Any]:
    """The [trainer] keys of a row of either table."""
    return {**LAYOUTS, **MORE_LAYOUTS}[layout]


def _holds(layout: str, model: str) -> bool:
    """Whether the contract of a model is tested in a layout."""
    if model in WINDOWED_LAYOUTS:
        return layout in WINDOWED_LAYOUTS[model]
    return layout in (MIXTURE_LAYOUTS if model == MIXTURE else LAYOUTS) and (
        model == MIXTURE or not has_experts(layout)
    )


PAIRS = [(layout, model) for layout in LAYOUTS | MORE_LAYOUTS for model in MODELS if _holds(layout, model)]

# What `make test` holds of the table: every backend and model, every axis but the pipeline (unit/training/megatron has
# that); the rest is long.
EVERYDAY: dict[str, tuple[str, ...]] = {
    "reference-dp1": PLAIN_MODELS,
    "megatron-cp2": ("qwen3-untied",),
    "megatron-sp_ep2": (MIXTURE,),
    "megatron-tp2_dp2": ("llama-odd", "olmo3"),
    "deepspeed-zero3": ("qwen2-tied",),
}
# One of each way in which weights and gradients are kept, for claims that do not hang on who holds which part.
EACH_WAY = (
    "reference-dp2",
    "megatron-vpp2",
    "megatron-sp_ep2",
    "deepspeed-zero1",
    "deepspeed-zero2_offload",
    "deepspeed-zero3",
)
EVERYDAY_ACROSS = [("megatron-tp2_dp2", "deepspeed-zero3"), ("deepspeed-zero3", "megatron-tp2")]


def marks_of(is_everyday: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a parameter of the trainer contract."""
    return () if is_everyday else (pytest.mark.long,)


def in_bfloat16_everywhere_and_in_float32_once_each_way() -> pytest.MarkDecorator:
    """For tests that take cluster and dtype."""
    cases = [
        *(pytest.param(name, "bfloat16", marks=marks_of(name in EVERYDAY)) for name in LAYOUTS),
        *(pytest.param(name, "float32", marks=pytest.mark.long) for name in EACH_WAY),
    ]
    return pytest.mark.parametrize(("cluster", "dtype"), cases, indirect=["cluster"])


def usual_model(layout: str) -> str:
    """Return the model of claims that one model is enough for."""
    return MIXTURE if has_experts(layout) else "qwen2-tied"


def num_layers(layout: str) -> int:
    """Two, or as many as the pipeline has blocks."""
    keys = layout_keys(layout)
    return max(2, int(keys.get("pipeline_parallel", 1)) * int(keys.get("chunks_per_stage", 1)))


def make_model(directory: Path, model: str, layers: int = 2) -> Path:
    """Write one of MODELS to disk."""
    return make_tiny_checkpoint(directory, hidden=32, layers=layers, **MODELS[model])


def packed(samples: list[TrainingSample], per_row: int = 3) -> list[PackedMicrobatch]:
    """Samples in their order, so many to a row."""
    return [pack_row(samples[start : start + per_row]) for start in range(0, len(samples), per_row)]
