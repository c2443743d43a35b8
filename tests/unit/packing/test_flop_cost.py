from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhpc.algorithms.packing import FlopCost
from rlhpc.protocol.errors import ConfigError

DENSE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 100,
}


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


def test_linear_term_counts_the_active_experts_only() -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    idle = 2 * (6 - 2) * 3 * 32 * 24  # layers with experts × idle experts × weights of one
    config = DENSE | experts
    assert FlopCost.from_hf_config(config).linear == 2 * (matrix_weights("qwen3_moe", **config) - idle)


def test_shared_experts_and_mixtral_keys_are_understood() -> None:
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


def test_quadratic_term_is_the_causal_half_of_both_attention_products() -> None:
    length = 7
    products = 2 * (2 * length * length * 4 * 16) * 3  # QKᵀ and the sum over V, heads × head_dim, layers
    assert FlopCost.from_hf_config(DENSE).quadratic * length**2 == products / 2


def test_missing_head_dim_and_key_heads_take_their_defaults() -> None:
    config: dict[str, Any] = {key: value for key, value in DENSE.items() if key != "num_key_value_heads"}
    explicit = DENSE | {"num_key_value_heads": 4, "head_dim": 8}
    assert FlopCost.from_hf_config(config | {"head_dim": None}) == FlopCost.from_hf_config(explicit)


def test_a_missing_key_is_named() -> None:
    config = {key: value for key, value in DENSE.items() if key != "vocab_size"}
    with pytest.raises(ConfigError, match="vocab_size=None"):
        FlopCost.from_hf_config(config)


def test_cost_of_lengths_and_illegal_coefficients() -> None:
    assert FlopCost(3.0, 2.0)(np.array([0, 1, 10])).tolist() == [0.0, 5.0, 230.0]
    with pytest.raises(ValueError, match="linear=0"):
        FlopCost(0.0, 1.0)
    with pytest.raises(ValueError, match="quadratic=nan"):
        FlopCost(1.0, float("nan"))
