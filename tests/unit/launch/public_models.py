"""Sizes of published models, as their config.json has them, and their exact numbers of parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from rlhpc.models.shape import ModelShape

_QWEN2_5: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
}
_1_5B: dict[str, Any] = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
}
_LLAMA_3_1: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _QWEN2_5
    | {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-Math-1.5B": _QWEN2_5 | _1_5B | {"tie_word_embeddings": True, "max_position_embeddings": 4096},
    "DeepSeek-R1-Distill-Qwen-1.5B": _QWEN2_5 | _1_5B | {"max_position_embeddings": 131072},
    "Qwen2.5-7B": _QWEN2_5
    | {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
    "Qwen2.5-14B": _QWEN2_5
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 13824,
        "vocab_size": 152064,
    },
    "Qwen2.5-32B": _QWEN2_5
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27648,
        "vocab_size": 152064,
    },
    "Qwen2.5-72B": _QWEN2_5
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
        "vocab_size": 152064,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
    },
    "Llama-3.1-8B": _LLAMA_3_1
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "Llama-3.1-70B": _LLAMA_3_1
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "Olmo-3-7B": {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 100278,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 65536,
        "sliding_window": 4096,
    },
}

_DELTA_NETS: dict[str, Any] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
}
_LATENTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
}
# Gated DeltaNets in three of four layers, and latents in place of keys and values.
OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": _DELTA_NETS
    | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
    },
    "Qwen3.5-9B": _DELTA_NETS
    | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "vocab_size": 248320,
        "mamba_ssm_dtype": "float32",
    },
    "Qwen3.5-35B-A3B": _DELTA_NETS
    | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248320,
        "mamba_ssm_dtype": "float32",
    },
    "DeepSeek-V2-Lite": _LATENTS
    | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "DeepSeek-V3": _LATENTS
    | {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "GLM-4.7-Flash": _LATENTS
    | {
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
    },
}

# Of the published weights, a tied head counted once.
NUM_PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Olmo-3-7B": 7_298_011_136,
}

# Small ones with what the published ones lack: every bias, layers without experts, heads wider than H / A.
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1003,
}
_MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ODD_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-all-biases": _TINY | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2-tied": _TINY | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3-wide-heads": _TINY | {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    "qwen3-default-heads": _TINY | {"model_type": "qwen3"},
    "mistral-wide-heads": _TINY | {"model_type": "mistral", "head_dim": 32},
    "olmo3": _TINY | {"model_type": "olmo3"},
    "gemma2": _TINY | {"model_type": "gemma2", "head_dim": 32},
    "gemma3-default-heads": _TINY | {"model_type": "gemma3_text"},
    "gpt-oss": _TINY | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-moe-one-dense": _TINY | _MOE | {"head_dim": 32, "mlp_only_layers": [1]},
    "qwen3-moe-every-other": _TINY | _MOE | {"decoder_sparse_step": 2},
}


_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_NETS = {"head_dim": 32, "layer_types": _LAYERS, "linear_num_key_heads": 1, "linear_num_value_heads": 3,
         "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3}  # fmt: skip
_SHARED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 40}  # fmt: skip
_SMALL = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20, "n_routed_experts": 8,
          "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
          "num_key_value_heads": 4}  # fmt: skip
ODD_OTHERS: dict[str, dict[str, Any]] = {
    "qwen3-next-one-dense": _TINY | _NETS | _SHARED | {"model_type": "qwen3_next", "mlp_only_layers": [1]},
    "qwen3.5-tied-biases": _TINY | _NETS
    | {"model_type": "qwen3_5_text", "tie_word_embeddings": True, "attention_bias": True},
    "qwen3.5-mixture": _TINY | _NETS | _SHARED | {"model_type": "qwen3_5_moe_text"},
    "deepseek-v2-without-query-latents": _TINY | _SMALL | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek-v3-all-biases": _TINY | _SMALL
    | {"model_type": "deepseek_v3", "q_lora_rank": 28, "attention_bias": True, "n_group": 2, "topk_group": 1},
    "glm4-kinds-of-layers": _TINY | _SMALL
    | {"model_type": "glm4_moe_lite", "q_lora_rank": 28, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
}  # fmt: skip


def make_model_directory(directory: Path, model: dict[str, Any]) -> Path:
    """Write what `rlhpc check` looks at: config.json, a tokenizer of single words, headers of safetensors."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(model))
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "add": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    shape = ModelShape.of(model)
    tensors = {} if shape is None else shape.tensors
    header = {name: {"dtype": "BF16", "shape": each, "data_offsets": [0, 0]} for name, each in tensors.items()}
    encoded = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    return directory


# Run files of configs that are for published models, and models with the sizes of those that they name.
LARGE_RUNS = {
    "large/qwen2.5-7b-tp2": "Qwen2.5-7B",
    "large/qwen2.5-32b-tp4-pp2": "Qwen2.5-32B",
    "large/qwen2.5-72b-tp8-pp4": "Qwen2.5-72B",
    "large/qwen3-30b-a3b-ep8": "Qwen3-30B-A3B",
}
RECIPES = {
    "gsm8k": "Qwen2.5-0.5B",
    "recipes/pipelinerl-7b": "Qwen2.5-7B",
    "recipes/pipelinerl-32b": "Qwen2.5-32B",
    "recipes/areal-1.5b": "DeepSeek-R1-Distill-Qwen-1.5B",
    "recipes/areal-7b": "Qwen2.5-7B",  # DeepSeek-R1-Distill-Qwen-7B: the same sizes
    "recipes/olmorl-7b-zero": "Qwen2.5-7B",
    "recipes/dapo-32b": "Qwen2.5-32B",
    "recipes/drgrpo-1.5b": "Qwen2.5-Math-1.5B",
    "recipes/gspo-30b-a3b": "Qwen3-30B-A3B",
}

# Adapters on one card, or a few: configs/lora/.
LORA_RUNS = {
    "lora/lora-7b": "Qwen2.5-7B",
    "lora/lora-14b": "Qwen2.5-14B",
    "lora/lora-32b": "Qwen2.5-32B",
    "lora/lora-30b-a3b": "Qwen3-30B-A3B",
}


def head_of(run_file: Path) -> str:
    """The comment that a run file begins with, without its marks."""
    (comment,) = re.findall(r"\A(?:#.*\n)+", run_file.read_text())
    return re.sub(r"^# ?", "", comment, flags=re.MULTILINE)


def part_of(run_file: Path, label: str) -> str:
    """What the head of a run file says after "LABEL: ", in one line."""
    (said,) = re.findall(rf"^{label}: (.*(?:\n  .*)*)", head_of(run_file), re.MULTILINE)
    return " ".join(said.split())
