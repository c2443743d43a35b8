"""Give a Megatron model of the tests its share of a transformers model, the plainest way that can be read at a glance.

Input: a state dict of transformers.  Output: the parameters of a PolicyModel, filled.  Kept apart from the trainer's
own loading, so that a mistake there and a mistake in the model cannot cancel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from torch import Tensor


@torch.no_grad()
def give_weights(chunk, weights: dict[str, Tensor]) -> None:
    """Fill every parameter of this chunk, or fail."""
    for name, parameter in chunk.named_parameters():
        share = share_of(chunk, name, weights)
        assert share.shape == parameter.shape, (name, share.shape, parameter.shape)
        parameter.copy_(share)


def share_of(chunk, name: str, weights: dict[str, Tensor]) -> Tensor:
    """What this rank's parameter `name` must hold; `weights` may as well be gradients."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if name == "embedding.word_embeddings.weight":
        return _rows(weights["model.embed_tokens.weight"], tensor, rank)
    if name == "output_layer.weight":
        tied = "lm_head.weight" not in weights or chunk.share_embeddings_and_output_weights
        return _rows(weights["model.embed_tokens.weight" if tied else "lm_head.weight"], tensor, rank)
    if name == "decoder.final_layernorm.weight":
        return weights["model.norm.weight"]
    _, _, index, part = name.split(".", 3)
    layer = f"model.layers.{chunk.decoder.layers[int(index)].layer_number - 1}."
    return _in_layer(part, {key.removeprefix(layer): value for key, value in weights.items() if layer in key}, chunk)


def _in_layer(part: str, weights: dict[str, Tensor], chunk) -> Tensor:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    kind = part.rsplit(".", 1)[1]
    if part.startswith("self_attention.linear_qkv"):
        parts = [weights[f"self_attn.{x}_proj.{kind}"].unflatten(0, (2, -1)) for x in "qkv"]  # 2 heads of keys
        return torch.cat(parts, 1).flatten(0, 1).chunk(tensor)[rank]
    if part.startswith("self_attention.linear_proj"):
        return weights["self_attn.o_proj.weight"].chunk(tensor, 1)[rank]
    if part.startswith("mlp.experts"):
        local_index, linear = part.split(".")[3:5]
        expert = next(_experts_of_rank(chunk)) + int(local_index)
        return weights["mlp.experts.gate_up_proj" if linear == "linear_fc1" else "mlp.experts.down_proj"][expert]
    if part == "mlp.linear_fc1.weight":
        return torch.cat([weights[f"mlp.{x}_proj.weight"].chunk(tensor)[rank] for x in ("gate", "up")])
    if part == "mlp.linear_fc2.weight":
        return weights["mlp.down_proj.weight"].chunk(tensor, 1)[rank]
    return weights[
        {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "mlp.router.weight": "mlp.gate.weight",
        }[part]
    ]


def _experts_of_rank(chunk) -> Iterator[int]:
    size = parallel_state.get_expert_model_parallel_world_size()
    yield parallel_state.get_expert_model_parallel_rank() * chunk.config.num_moe_experts // size


def _rows(weight: Tensor, tensor: int, rank: int) -> Tensor:
    padding = -len(weight) % tensor
    return torch.cat([weight, weight.new_zeros(padding, weight.shape[1])]).chunk(tensor)[rank]
