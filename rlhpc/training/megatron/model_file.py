"""A model's configuration for Megatron, read from its config.json.

`import transformers` reads the sources of all its models: 3,000 files and half a second of CPU for each rank of a
trainer, and longer on a shared file system.  A config.json of a known family that leaves nothing to defaults needs none
of them.  Any other is read by transformers, which knows its defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlhpc.errors import ConfigError

ModelConfig = Any  # of read_model: transformers' PretrainedConfig, or a ModelFile with the same names

_EVERY_MODEL = {
    "hidden_size": int,
    "intermediate_size": int,
    "max_position_embeddings": int,
    "num_attention_heads": int,
    "num_hidden_layers": int,
    "num_key_value_heads": int,
    "vocab_size": int,
    "rms_norm_eps": float,
    "hidden_act": str,
    "tie_word_embeddings": bool,
}
_EXPERTS = {
    "num_experts_per_tok": int,
    "moe_intermediate_size": int,
    "decoder_sparse_step": int,
    "norm_topk_prob": bool,
    "mlp_only_layers": list,
}
# What the layers of each family look at, besides keys whose absence means no: biases, pad_token_id, layer_types.
_KEYS: Mapping[str, Mapping[str, type]] = {
    "llama": _EVERY_MODEL,
    "qwen2": {**_EVERY_MODEL, "use_sliding_window": bool},
    "qwen3": {**_EVERY_MODEL, "use_sliding_window": bool, "head_dim": int},
    "qwen3_moe": {**_EVERY_MODEL, **_EXPERTS, "use_sliding_window": bool, "head_dim": int, "num_experts": int},
}


class ModelFile(SimpleNamespace):
    """What config.json says, under the names that transformers gives it."""

    pad_token_id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As PretrainedConfig.to_dict."""
        return dict(vars(self))


def read_model(path: Path) -> ModelConfig:
    """The configuration of the model in a directory.  Raises ConfigError naming model.path."""
    try:
        document = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        document = None  # transformers says what is wrong with it
    rotation = _plain_rotation(document) if _says_everything(document) else None
    if rotation is not None:
        return ModelFile(**{**document, "rope_parameters": rotation})

    from transformers import AutoConfig  # see the top of the file

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path}: unknown to transformers: {error}") from error


def _says_everything(document: Any) -> bool:
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        return False
    keys = _KEYS.get(document["model_type"])
    return keys is not None and all(type(document.get(key)) is kind for key, kind in keys.items())


def _plain_rotation(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """rope_parameters of an unscaled rotation, as transformers 5 writes it or as 4 did; None: it is another."""
    if document.get("rope_scaling") or "partial_rotary_factor" in document:
        return None
    parameters = document.get("rope_parameters")
    if parameters is None and "rope_theta" in document:
        parameters = {"rope_type": "default", "rope_theta": document["rope_theta"]}
    if not isinstance(parameters, dict) or parameters.keys() != {"rope_type", "rope_theta"}:
        return None
    if parameters["rope_type"] != "default" or type(parameters["rope_theta"]) not in (int, float):
        return None
    return {**parameters, "rope_theta": float(parameters["rope_theta"])}
