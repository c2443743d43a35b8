"""Which models the layers of rlhpc/training/megatron compute as transformers does, by config.json alone.

Input: the content of config.json, as it stands there or with transformers' defaults filled in.  Models that would be
computed otherwise are refused.  Needs no torch, so that `rlhpc check` and the trainer share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhpc.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3")  # others rescale attention or depend on the length of the row
# The only value of keys that may be missing or null, which means the same.
_ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
}
_ONLY_WITH_EXPERTS: Mapping[str, object] = {"mlp_only_layers": [], "decoder_sparse_step": 1}  # in every layer


def refuse_unsupported(model: Mapping[str, Any], place: object) -> None:
    """place: what the error begins with.  Raises ConfigError naming the key, its value and what is legal."""
    for key, value, legal in _unsupported(model):
        raise ConfigError(
            f"{place}: {key}={value!r}, which trainer.backend='megatron' does not compute; legal: {legal}, or "
            "trainer.backend='deepspeed', which trains any model of transformers"
        )


def _unsupported(model: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Key, value and what is supported instead."""
    family = model.get("model_type")
    if family not in FAMILIES:
        yield "model_type", family, ", ".join(FAMILIES)
        return
    for key, only in {**_ONLY, **(_ONLY_WITH_EXPERTS if family == "qwen3_moe" else {})}.items():
        if (value := model.get(key)) is not None and value != only:
            yield key, value, f"{only!r}"
    if others := {*(model.get("layer_types") or ())} - {"full_attention"}:
        yield "layer_types", sorted(others), "'full_attention' in every layer"
    yield from _unsupported_rotation(model)
    if family == "qwen3_moe" and model.get("num_experts_per_tok") == 1 and model.get("norm_topk_prob"):
        yield "num_experts_per_tok", 1, "2 or more where norm_topk_prob is true"


def _unsupported_rotation(model: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """transformers 4 wrote rope_scaling, with "type" at first; 5 writes rope_parameters."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(table := model.get(name), Mapping):
            continue
        key = "rope_type" if "rope_type" in table else "type"
        if table.get(key, "default") not in ROPE_TYPES:
            yield f"{name}.{key}", table[key], ", ".join(map(repr, ROPE_TYPES))
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            yield f"{name}.partial_rotary_factor", table["partial_rotary_factor"], "1.0"
