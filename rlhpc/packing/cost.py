"""What a sequence costs a trainer, in floating-point operations of one forward pass.

Input: lengths.  Output: costs.  Only ratios matter: the planner compares rows, and a backward pass doubles all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.errors import ConfigError


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
        weights = layers * attention + mlp + hidden * _count(config, "vocab_size")
        return cls(linear=2.0 * weights, quadratic=2.0 * layers * heads * head_dim)


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
