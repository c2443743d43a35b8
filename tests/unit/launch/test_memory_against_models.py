"""The planner's numbers against real models on CPU: parameters of a rank, bytes that autograd keeps of a layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from launch.checks.memory_plan import ROUTING_IMBALANCE, RowMemory
from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ModelShape, ParallelLayout
from rlhpc.training.hf_model import cast_parameters, load_causal_lm
from rlhpc.training.megatron.attention import held
from rlhpc.training.packed_attention import SegmentPlan
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import draw_samples, pack_row
from tests.unit.training.rank_processes import run_ranks

NUM_TOKENS = 256
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SIZES: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


class KeptBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the storages that autograd keeps, each once, `others` left out."""

    def __init__(self, others: list[Tensor]) -> None:
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._kept: dict[int, Tensor] = {}  # alive, so that no address is given out twice
        super().__init__(self._keep, lambda tensor: tensor)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self._others:
            self._kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @property
    def total(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_layer_of_transformers_keeps_what_is_planned(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two depths, so that what is there once drops out; the planner leaves out a float32 a token and norm."""
    kept = []
    for layers in (1, 2):
        make_tiny_checkpoint(tmp_path / str(layers), family, hidden=128, layers=layers)
        model = load_causal_lm(tmp_path / str(layers), device=CPU)
        if dtype != torch.float32:
            cast_parameters(model, dtype)
        tokens = torch.arange(NUM_TOKENS)
        with KeptBytes([model.head_weight, *model.parameters.values()]) as hooks:
            hidden = model.hidden_states(
                tokens % 100, tokens, SegmentPlan.of(np.array([0, NUM_TOKENS], dtype=np.int32), CPU)
            )
        kept.append(hooks.total)
        assert hidden.requires_grad
    trainer = TrainerConfig(token_budget=NUM_TOKENS, backend="reference")
    shape = ModelShape.of(json.loads((tmp_path / "2" / "config.json").read_text()))
    assert shape is not None
    planned = RowMemory(shape, ParallelLayout.of(trainer), trainer, dtype.itemsize).of_layer(0)
    assert kept[1] - kept[0] == pytest.approx(planned, rel=0.01)


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen2", {"num_ranks": 2}),
    "head norms": ("qwen3", {"num_ranks": 2}),
    "full": ("qwen2", {"num_ranks": 2, "recompute_activations": "full"}),
    "selective": ("qwen2", {"num_ranks": 2, "recompute_activations": "selective"}),
    "tensor": ("llama", {"num_ranks": 2, "tensor_parallel": 2}),
    "sequence": ("qwen2", {"num_ranks": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    "context": ("qwen2", {"num_ranks": 2, "context_parallel": 2}),
    "mixture": ("qwen3_moe", {"num_ranks": 2}),
    "pipeline": ("qwen3", {"num_ranks": 2, "pipeline_parallel": 2}),
    "tied pipeline": ("qwen2", {"num_ranks": 2, "pipeline_parallel": 2, "chunks_per_stage": 2}),
    "experts": ("qwen3_moe", {"num_ranks": 2, "expert_parallel": 2}),
}


def measure(rank: int, world_size: int) -> dict[str, list[tuple[int, int]]]:
    """Of each layout and dtype: bytes kept of a layer, and the planner's word for it; parameters are counted here."""
    return {
        name: [_measure_layout(rank, family, keys, dtype) for dtype in DTYPES]
        for name, (family, keys) in LAYOUTS.items()
    }


def _measure_layout(rank: int, family: str, keys: dict[str, Any], dtype: torch.dtype) -> tuple[int, int]:
    from rlhpc.training.megatron.backend import close_groups, open_groups

    trainer = TrainerConfig(token_budget=NUM_TOKENS, backend="megatron", **keys)
    layout = ParallelLayout.of(trainer)
    stage = rank if layout.pipeline > 1 else 0
    open_groups(layout, rank=rank, device=CPU)
    kept = []
    for layers in (1, 2) if layout.pipeline == 1 else (4,):
        shape, chunks = _build(family, layers, trainer, dtype)
        held = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        assert held == shape.on_rank(layout, stage).total, (family, keys, stage)
        kept.append(_kept_bytes(chunks[0], layout) if layout.pipeline == 1 else 0)
    close_groups()
    kept_of_layer = kept[-1] - kept[0] - _mask_bytes(rank, layout, dtype)
    return kept_of_layer, RowMemory(shape, layout, trainer, dtype.itemsize).of_layer(0)


def _mask_bytes(rank: int, layout: ParallelLayout, dtype: torch.dtype) -> int:
    """Masks of a row of one segment that is cut up: on CPU alone, CUDA's kernel needs none."""
    if layout.context == 1:
        return 0
    chunk = NUM_TOKENS // (2 * layout.context)
    return sum(dtype.itemsize * chunk * chunk * (1 + index) for index in held(layout.context, rank) if index > 0)


def _build(family: str, layers: int, trainer: TrainerConfig, dtype: torch.dtype) -> tuple[ModelShape, list[Any]]:
    from transformers import AutoConfig

    from rlhpc.training.megatron.model import build_chunks
    from rlhpc.training.megatron.model_config import transformer_config

    extra = {**(EXPERTS if family == "qwen3_moe" else {}), "tie_word_embeddings": family == "qwen2"}
    if family.startswith("qwen3"):
        extra["head_dim"] = 32
    model = AutoConfig.for_model(family, num_hidden_layers=layers, **SIZES, **extra)
    chunks = build_chunks(model, transformer_config(model, trainer, dtype), trainer, CPU)
    for chunk in chunks:
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    shape = ModelShape.of(model.to_dict())
    assert shape is not None
    return shape, chunks


def _kept_bytes(chunk: Any, layout: ParallelLayout) -> int:
    from megatron.core import parallel_state

    from rlhpc.training.megatron.attention import LocalRow
    from rlhpc.training.megatron.model import HeadRequest

    row = LocalRow.of(
        pack_row(draw_samples([NUM_TOKENS])),
        np.zeros(NUM_TOKENS, dtype=bool),
        layout,
        parallel_state.get_context_parallel_rank(),
        CPU,
    )
    with KeptBytes(list(chunk.parameters())) as hooks:
        chunk(row, HeadRequest(temperature=1.0, chunk_tokens=64, want_entropy=False))
    return hooks.total


@pytest.mark.long
def test_megatrons_ranks_hold_and_keep_what_is_planned(tmp_path: Path) -> None:
    """Parameters to the last one (asserted by each rank); bytes within 1 %, and less where routing was even."""
    ranks = run_ranks(2, measure, tmp_path, timeout_s=180)
    for name in LAYOUTS:
        for kept, planned in (pair for rank in ranks for pair in rank[name]):
            if name == "experts":
                assert planned / ROUTING_IMBALANCE < kept < planned
            elif "pipeline" not in name:
                assert kept == pytest.approx(planned, rel=0.01), (name, kept, planned)
