"""Make a tiny HF checkpoint with a character tokenizer on disk, without the hub.

Input: a directory.  Output: config.json, model.safetensors and tokenizer files that transformers and vLLM load.
The vocabulary is <pad>, <bos>, <eos>, <unk>, newline and printable ASCII: 100 tokens, one per character.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
VOCABULARY = {
    token: index for index, token in enumerate([*SPECIAL_TOKENS, "\n", *(chr(code) for code in range(32, 127))])
}
PLAIN = ("qwen2", "qwen3", "llama", "qwen3_moe")
# Of these biases, norms and the like are drawn, too: transformers begins with zeros and ones.
OTHERS = ("mistral", "olmo3", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # a Gated DeltaNet in every layer but each second
WRAPPED = ("qwen3_5", "qwen3_5_moe")  # the last two inside a model that also sees; the mixture's experts stacked
FAMILIES = PLAIN + OTHERS + HYBRIDS + WRAPPED
# Whose tiny models vLLM 0.32 serves on a CPU in float32 as transformers does.  For OLMo 3 it changes
# transformers' own class, so that engine and trainer are in processes of their own: test_families_run.py.
SERVED = ("mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
# All others can share head and embedding, and do by default.
UNTIED = ("olmo3", "mistral", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "qwen3_next")
NUM_EXPERTS = 8
WINDOW = 8  # tokens of sliding windows, in every second layer; Mistral in every layer
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
# vLLM's kernels for CPUs know heads of 64 and of 128.
DELTA_NET = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64,
             "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_position_embeddings": 16,
          "patch_size": 4}  # fmt: skip
# 512 + 64 are the only sizes of latents that vLLM's kernel for CPUs knows.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 48}


def make_tiny_checkpoint(
    directory: Path | str,
    family: str = "qwen2",
    hidden: int = 64,
    layers: int = 2,
    tied: bool | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocabulary: int = len(VOCABULARY),
    heads: int | None = None,
    **settings: Any,
) -> Path:
    """Write a randomly drawn model and its tokenizer into `directory`; the same arguments give the same bytes.

    hidden: a multiple of 32 (heads of 32, unless their number is given); family: one of FAMILIES; tied: by default if
    the family knows that; vocabulary: rows of the embedding, of which the tokenizer knows the first 100; settings: of
    config.json, over the family's.  Two heads of keys, but with latents; mixtures take 2 of 8 experts.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads or max(2, hidden // 32),
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,  # large enough that tokens are clearly not equally likely
        "tie_word_embeddings": family not in UNTIED if tied is None else tied,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    sizes |= _particular_to(family, hidden, layers, sizes["num_attention_heads"]) | settings
    if family in WRAPPED:
        whole = {key: sizes[key] for key in ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")}
        sizes = whole | {"text_config": sizes, "vision_config": VISION | {"out_hidden_size": hidden}}
    config = AutoConfig.for_model(family, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (AutoModelForImageTextToText if family in WRAPPED else AutoModelForCausalLM).from_config(config)
        if family not in PLAIN:
            _draw_constants(model)
    for name, parameter in model.named_parameters():
        # Not buffers, nor decays of Gated DeltaNets: corrections of routers, and they, are float32 in every checkpoint.
        if not name.endswith(".A_log"):
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(directory, save_original_format=family not in WRAPPED)
    make_character_tokenizer().save_pretrained(directory)
    return directory


def pack_experts(directory: Path, seed: int = 0) -> Path:
    """Give a gpt-oss checkpoint experts in MXFP4, as it is published: drawn anew, about as large as those it had."""
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.randint(
            120, 124, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator
        )
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_bytes())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_tiny_classifier(
    directory: Path | str, *, num_labels: int = 1, per_token: bool = False, seed: int = 0, hidden: int = 64
) -> Path:
    """Write a randomly drawn reward model of the family qwen2, and its tokenizer; the same arguments, the same bytes.

    per_token: a process reward model, whose head has a bias.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        num_labels=num_labels,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (Qwen2ForTokenClassification if per_token else Qwen2ForSequenceClassification)(config)
        if per_token:
            torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(directory)
    make_character_tokenizer().save_pretrained(directory)
    return directory


def _draw_constants(model: torch.nn.Module) -> None:
    """Move weights of norms, biases, and corrections of routers off ones and zeros: what ignores them shows."""
    of_model = dict(model.state_dict(keep_vars=True))
    with torch.no_grad():
        for tensor in of_model.values():
            if tensor.is_floating_point() and bool((tensor == tensor.flatten()[0]).all()):
                tensor += 0.1 * torch.randn_like(tensor)


def _particular_to(family: str, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    windows = {
        "sliding_window": WINDOW,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)],
    }
    experts = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": hidden}
    many = experts | {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "routed_scaling_factor": 1.5}
    latent = LATENT | {"num_key_value_heads": heads} | many
    kinds = [("linear_attention", "full_attention")[layer % 2] for layer in range(layers)]
    hybrid = DELTA_NET | {"head_dim": 32, "layer_types": kinds}
    mixed = experts | {"num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": hidden}
    of_family: dict[str, dict[str, Any]] = {
        "qwen3": {"head_dim": 32},
        "qwen3_moe": {"head_dim": 32, "num_experts": NUM_EXPERTS} | experts,
        "mistral": {"head_dim": 32, "sliding_window": WINDOW},
        "olmo3": windows | {"rope_parameters": _by_kind(YARN)},
        "gemma2": windows | {"head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.0,
                             "final_logit_softcapping": 2.0},
        "gemma3_text": windows | {"head_dim": 32, "query_pre_attn_scalar": 24},
        "gpt_oss": windows | {"head_dim": 32, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
                              "rope_parameters": YARN | {"truncate": False}},
        "deepseek_v2": latent | {"q_lora_rank": None, "first_k_dense_replace": 1, "norm_topk_prob": False,
                                 "n_group": 1, "topk_group": 1,
                                 "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        "deepseek_v3": latent | {"q_lora_rank": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
                                 "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                                 "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "glm4_moe_lite": latent | {"q_lora_rank": 32, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
                                   "first_k_dense_replace": 1},
        "qwen3_next": hybrid | mixed,
        "qwen3_5_text": hybrid,
        "qwen3_5_moe_text": hybrid | mixed,
        "qwen3_5": hybrid,
        "qwen3_5_moe": hybrid | mixed,
    }  # fmt: skip
    return of_family.get(family, {})


def _by_kind(rope: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 stretches only the layers that see everything."""
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}


def make_character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; decoding joins them without spaces."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast
