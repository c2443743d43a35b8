"""Layers that keep no keys and values of every head: Gated DeltaNets, and attention to latents.

Input: the content of config.json.  Output: tensors of a layer by name, and what an engine keeps of tokens and requests.
Legend: H hidden size, A heads, K heads of keys, Dk and Dv sizes of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LINEAR = "linear_attention"  # in layer_types of config.json: a Gated DeltaNet
_EVERY = 4  # a layer attends where config.json has no layer_types
# Attributes of transformers' layers of Gated DeltaNet.
_DELTA_NET = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "num_k_heads", "num_v_heads", "head_k_dim",
              "head_v_dim")  # fmt: skip
_FLAT = (*_DELTA_NET, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # Qwen3.5, Qwen3.6
_BY_KEY_HEAD = (*_DELTA_NET, "in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")  # Qwen3-Next


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated DeltaNets of one model (Qwen3-Next, Qwen3.5, Qwen3.6; arXiv:2412.06464)."""

    layers: frozenset[int]  # the others attend to keys and values
    num_heads: int  # of values, and so of states
    num_key_heads: int
    key_size: int
    value_size: int
    width: int  # of the causal convolution
    is_by_key_head: bool  # its projections are two, each ordered by key heads (Qwen3-Next), not four
    has_float32_state: bool  # in engines, whatever the model's dtype

    @classmethod
    def of(cls, model: Mapping[str, Any], *, is_by_key_head: bool) -> DeltaNet:
        """Raises KeyError: a size is missing."""
        every, number = model.get("full_attention_interval") or _EVERY, range(model["num_hidden_layers"])
        kinds = model.get("layer_types") or [LINEAR if (layer + 1) % every else "" for layer in number]
        return cls(
            layers=frozenset(layer for layer in number if kinds[layer] == LINEAR),
            num_heads=model["linear_num_value_heads"],
            num_key_heads=model["linear_num_key_heads"],
            key_size=model["linear_key_head_dim"],
            value_size=model["linear_value_head_dim"],
            width=model["linear_conv_kernel_dim"],
            is_by_key_head=is_by_key_head,
            has_float32_state=model.get("mamba_ssm_dtype") == "float32",
        )

    @property
    def values(self) -> int:
        """Width of the values of all heads."""
        return self.num_heads * self.value_size

    @property
    def channels(self) -> int:
        """Width of queries, keys and values, which pass the convolution."""
        return 2 * self.num_key_heads * self.key_size + self.values

    def tensors(self, name: str, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in the model's order; name: of the layer's place, with a dot behind it."""
        heads, values = self.num_heads, self.values
        if self.is_by_key_head:
            projections = {"qkvz": self.channels + values, "ba": 2 * heads}
        else:
            projections = {"qkv": self.channels, "z": values, "b": heads, "a": heads}
        return {
            f"{name}dt_bias": (heads,),
            f"{name}A_log": (heads,),
            f"{name}conv1d.weight": (self.channels, 1, self.width),
            f"{name}norm.weight": (self.value_size,),
            f"{name}out_proj.weight": (hidden, values),
        } | {f"{name}in_proj_{part}.weight": (rows, hidden) for part, rows in projections.items()}

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of one request in one layer of an engine, however long it is: convolution and recurrent state."""
        state = self.num_heads * self.key_size * self.value_size
        return (
            element_bytes * self.channels * (self.width - 1) + (4 if self.has_float32_state else element_bytes) * state
        )


@dataclass(frozen=True, slots=True)
class Latents:
    """Attention to latents (DeepSeek V2 and V3, GLM-4.7-Flash; arXiv:2405.04434): one vector a token and layer."""

    num_heads: int
    query_rank: int | None  # of the latents that queries are made of; None: of the hidden states
    rank: int  # of the latents that keys and values are made of
    rope_size: int  # of the turned part of a key, which all heads share
    nope_size: int  # of its other part
    value_size: int
    has_bias: bool

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> Latents:
        """Raises KeyError: a size is missing."""
        return cls(
            num_heads=model["num_attention_heads"],
            query_rank=model["q_lora_rank"],
            rank=model["kv_lora_rank"],
            rope_size=model["qk_rope_head_dim"],
            nope_size=model["qk_nope_head_dim"],
            value_size=model["v_head_dim"],
            has_bias=bool(model.get("attention_bias", False)),
        )

    @property
    def token_width(self) -> int:
        """Numbers that an engine keeps of a token in one layer."""
        return self.rank + self.rope_size

    @property
    def queries(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * (self.nope_size + self.rope_size)

    def tensors(self, name: str, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in the model's order; name: of the layer's place, with a dot behind it."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.query_rank is None:
            shapes[f"{name}q_proj.weight"] = (self.queries, hidden)
        else:
            shapes |= self._with_bias(f"{name}q_a_proj", self.query_rank, hidden)
            shapes[f"{name}q_a_layernorm.weight"] = (self.query_rank,)
            shapes[f"{name}q_b_proj.weight"] = (self.queries, self.query_rank)
        shapes |= self._with_bias(f"{name}kv_a_proj_with_mqa", self.token_width, hidden)
        shapes[f"{name}kv_a_layernorm.weight"] = (self.rank,)
        shapes[f"{name}kv_b_proj.weight"] = (self.num_heads * (self.nope_size + self.value_size), self.rank)
        return shapes | self._with_bias(f"{name}o_proj", hidden, self.num_heads * self.value_size)

    def _with_bias(self, name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if self.has_bias else {})


def is_delta_net(layer: object) -> bool:
    """Whether a layer of transformers is a Gated DeltaNet; others with a state of their own are not known."""
    return any(all(hasattr(layer, name) for name in names) for names in (_FLAT, _BY_KEY_HEAD))
