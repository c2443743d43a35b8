"""Megatron's description of a model and of how it is trained, from the model's config.json and the run file.

Input: a model's configuration and the [trainer] table.  Output: a TransformerConfig.  Families: qwen2, qwen3,
qwen3_moe, llama (3 and older).  Guarantees: a model that Megatron would compute differently from transformers is
refused with ConfigError, never trained wrongly.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from rlhpc.config_sections import TrainerConfig
from rlhpc.errors import ConfigError
from rlhpc.megatron_models import refuse_unsupported
from rlhpc.parallel_layout import ParallelLayout, num_experts
from rlhpc.training.megatron.grouped_experts import has_grouped_kernel
from rlhpc.training.megatron.model_file import ModelConfig


def transformer_config(model: ModelConfig, trainer: TrainerConfig, dtype: torch.dtype) -> TransformerConfig:
    """dtype: of parameters and of activations between pipeline stages.

    Raises ConfigError naming model.path and the key of config.json whose value is not supported, or the key of
    [trainer] that does not fit the model.
    """
    refuse_unsupported(model.to_dict(), "model.path: config.json")
    layout = ParallelLayout.of(trainer)
    layout.refuse_unfit(model.to_dict())
    has_cuda = torch.cuda.is_available()
    if has_cuda and trainer.device == "cpu":
        raise ConfigError("trainer.device=cpu, but Megatron uses any GPU that it sees; hide it, or choose auto")
    return TransformerConfig(
        **_shape(model),
        **_experts(model, dtype),
        **_layout(layout),
        **_recomputation(trainer),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,  # the sampled policy has none
        attention_dropout=0.0,
        # Weights are loaded: initialising them first would cost minutes on a large model.
        perform_initialization=False,
        use_cpu_initialization=not has_cuda,
        calculate_per_token_loss=True,  # sums over micro-batches and ranks; the backend divides, once
        # Rows differ in length.  Megatron allows that with this dispatcher only, and checks it for dense models too.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # gloo may still be sending what this would free.
        deallocate_pipeline_outputs=has_cuda,
        use_te_activation_func=True,  # whatever module a layer's MLPSubmodules name: layers.GatedSilu
        # Megatron's fused kernels need TransformerEngine, Apex or a compiler.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),  # run.deterministic
    )


def rotary_frequencies(model: ModelConfig) -> Tensor:
    """float32 [head size / 2] radians per token, as transformers computes them, of one of ROPE_TYPES."""
    parameters = model.rope_parameters
    if parameters["rope_type"] != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # slow: see model_file.py

        scaled: Tensor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](model, device=torch.device("cpu"))[0]
        return scaled
    head_size = _head_size(model)
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / torch.pow(parameters["rope_theta"], exponents)


def _shape(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": _head_size(model),
        "ffn_hidden_size": model.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": model.model_type == "qwen2",
        "qk_layernorm": model.model_type in ("qwen3", "qwen3_moe"),
    }


def _experts(model: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    if model.model_type != "qwen3_moe":
        return {}
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return {
        "num_moe_experts": num_experts(model.to_dict()),
        "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_router_load_balancing_type": "none",
        # Softmax of the chosen logits is the softmax of all, normalised over the chosen.
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": has_grouped_kernel(capability, dtype, (model.hidden_size, model.moe_intermediate_size)),
    }


def _layout(layout: ParallelLayout) -> dict[str, Any]:
    is_interleaved = layout.chunks > 1
    # Of two interleaved stages each is before and behind the other, and messages of both directions would be confused
    # in one batch.  With more, single messages hang on NCCL (NVIDIA/Megatron-LM#5240): it connects pair by pair.
    is_sent_alone = is_interleaved and layout.pipeline == 2
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.chunks if is_interleaved else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.is_sequence_parallel,
        "overlap_p2p_comm": is_sent_alone,
        "batch_p2p_comm": not is_sent_alone,
    }


def _recomputation(trainer: TrainerConfig) -> dict[str, Any]:
    if trainer.recompute_activations == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if trainer.recompute_activations == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {}


def _head_size(model: ModelConfig) -> int:
    return int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)
