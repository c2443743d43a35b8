"""What Megatron's layers do not compute is found by `rlhpc check`, not by ranks that have waited for their GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.checks.preflight import preflight
from rlhpc.config.file import load_config
from rlhpc.protocol.errors import ConfigError
from tests.ring.run_kit import ROOT
from tests.unit.launch.public_models import CONFIGS, make_model_directory

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2.5-7B", {"rope_scaling": None}),
    ("Qwen2.5-7B", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("Qwen2.5-7B", {"layer_types": ["full_attention"] * 28, "hidden_act": "silu", "use_sliding_window": False}),
    ("Qwen2.5-7B", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("Llama-3.1-8B", {"rope_scaling": LLAMA3}),
    ("Qwen3-30B-A3B", {"norm_topk_prob": True}),
]
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen2.5-7B", {"rope_scaling": {"type": "yarn", **YARN}}, "rope_scaling.type='yarn'"),
    ("Qwen2.5-7B", {"rope_scaling": {"rope_type": "yarn", **YARN}}, "rope_scaling.rope_type='yarn'"),
    (
        "Qwen2.5-7B",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
        "rope_parameters.rope_type='yarn'",
    ),
    ("Qwen2.5-7B", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type='dynamic'"),
    (
        "Qwen2.5-7B",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor=0.5",
    ),
    ("Qwen2.5-7B", {"use_sliding_window": True, "max_window_layers": 28}, "use_sliding_window=True"),
    ("Llama-3.1-8B", {"attention_bias": True}, "attention_bias=True"),
    ("Llama-3.1-8B", {"mlp_bias": True}, "mlp_bias=True"),
    ("Llama-3.1-8B", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (
        "Qwen2.5-7B",
        {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]},
        r"layer_types=\['sliding_attention'\]",
    ),
    ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("Qwen3-30B-A3B", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok=1"),
]


def checked(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Raises what both `rlhpc check` and the trainer say; fails if one of them has no objection."""
    import torch

    from rlhpc.training.megatron.model_config import read_model, transformer_config

    model = make_model_directory(tmp_path / "model", CONFIGS[name] | changes)
    (tmp_path / "train.jsonl").write_text('{"question": "add", "answer": "2"}\n')
    paths = [f"model.path={str(model)!r}", f"data.path={str(tmp_path / 'train.jsonl')!r}"]
    config = load_config(ROOT / "configs" / "large" / "qwen2.5-7b-tp2.toml", paths)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"sequence_parallel": True})})
    refusals = []
    for ask in (
        lambda: transformer_config(read_model(model), config.trainer, torch.bfloat16),
        lambda: preflight(config, roles_run_here=False),
    ):
        try:
            ask()
        except ConfigError as error:
            refusals.append(error)
    assert len(refusals) != 1, refusals
    if refusals:
        raise refusals[1]


@pytest.mark.parametrize(("name", "changes"), SUPPORTED)
def test_check_and_trainer_take_the_same_models(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    checked(tmp_path, name, changes)


@pytest.mark.parametrize(("name", "changes", "why"), UNSUPPORTED)
def test_check_refuses_what_the_trainer_would_refuse(
    tmp_path: Path, name: str, changes: dict[str, Any], why: str
) -> None:
    legal = "which trainer.backend='megatron' does not compute; legal: .*trainer.backend='deepspeed'"
    with pytest.raises(ConfigError, match=rf"model/config\.json: {why}.*, {legal}"):
        checked(tmp_path, name, changes)
