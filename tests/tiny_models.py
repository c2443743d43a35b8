"""Make a tiny HF checkpoint with a character tokenizer on disk, without the hub.

Input: a directory.  Output: config.json, model.safetensors and tokenizer files that transformers and vLLM load.
The vocabulary is <pad>, <bos>, <eos>, <unk>, newline and printable ASCII: 100 tokens, one per character.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
VOCABULARY = {
    token: index for index, token in enumerate([*SPECIAL_TOKENS, "\n", *(chr(code) for code in range(32, 127))])
}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
NUM_EXPERTS = 8


def make_tiny_checkpoint(
    directory: Path | str,
    family: str = "qwen2",
    hidden: int = 64,
    layers: int = 2,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocabulary: int = len(VOCABULARY),
    heads: int | None = None,
) -> Path:
    """Write a randomly drawn model and its tokenizer into `directory`; the same arguments give the same bytes.

    hidden: a multiple of 32 (heads of 32, unless their number is given); family: one of FAMILIES; vocabulary: rows of
    the embedding, of which the tokenizer knows the first 100.  Two heads of keys; the mixture takes 2 of 8 experts.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads or max(2, hidden // 32),
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.1,  # large enough that tokens are clearly not equally likely
        tie_word_embeddings=tied,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        **_particular_to(family, hidden),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(dtype)
    model.save_pretrained(directory)
    make_character_tokenizer().save_pretrained(directory)
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


def _particular_to(family: str, hidden: int) -> dict[str, Any]:
    if family == "qwen3":
        return {"head_dim": 32}
    if family == "qwen3_moe":
        return {
            "head_dim": 32,
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": hidden,
        }
    return {}


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
