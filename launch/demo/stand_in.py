"""Write a tiny stand-in for a real model, to try a run file on a machine without a GPU.

Input: a directory, and for a stand-in of a particular model its checkpoint directory, of which config.json and the
tokenizer's files are enough.  Output: an HF checkpoint of random weights.  By default it is a Llama whose tokenizer
encodes every text (a token a byte) and whose chat template supports system messages, turns and tools; else it has the
architecture of that model with two narrow layers, and its tokenizer and template, so that prompts have the same tokens.
Guarantees: the same arguments give the same weights; nothing is downloaded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from launch.demo.warm_start import save_checkpoint, save_model
from rlhpc.protocol.errors import ConfigError

HEAD_SIZE, NUM_HEADS = 32, 2  # the smallest head that vLLM's CPU attention has
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; then the bytes
PAD_ID, _, END_ID = range(len(MARKS))
# ChatML as in Qwen's models; calls as in rlhpc's environment "tools".
CHAT_TEMPLATE = (
    "{% set given = messages[0].content if messages and messages[0].role == 'system' else '' %}"
    "{% if given or tools %}{{ '<|im_start|>system\\n' + given }}"
    "{% if tools %}{{ '\\nTools, each a JSON schema; to call one, write ' }}"
    """{{ '<tool_call>{"name": …, "arguments": {…}}</tool_call>:' }}"""
    "{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{% if not (loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Files of a tokenizer in a checkpoint directory.
_TOKENIZER_FILES = (
    "tokenizer*", "chat_template*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json"
)  # fmt: skip
# Settings that are made small if the model has them; the vocabulary stays.
_SMALL = {
    "hidden_size": NUM_HEADS * HEAD_SIZE,
    "intermediate_size": 2 * NUM_HEADS * HEAD_SIZE,
    "moe_intermediate_size": NUM_HEADS * HEAD_SIZE,
    "num_attention_heads": NUM_HEADS,
    "head_dim": HEAD_SIZE,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def make_stand_in(directory: Path, like: Path | None = None, *, seed: int = 0) -> int:
    """Write the checkpoint into an empty or new directory; return its number of parameters.

    like: checkpoint directory of the real model.
    Raises ConfigError: the directory is not empty, or `like` is no causal language model; OSError.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"--model-only {directory}: is there already; legal: a new or empty directory")
    if like is not None and not (like / "config.json").is_file():  # transformers would look for it on a hub
        lacks = "holds no config.json" if like.is_dir() else "no such directory"
        raise ConfigError(f"--like {like}: {lacks}; legal: a checkpoint directory of a model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_byte_config()) if like is None else _small(like)
    directory.mkdir(parents=True, exist_ok=True)
    if like is None:
        save_checkpoint(model, make_byte_tokenizer(), directory)
    else:
        save_model(model, directory)
        for pattern in (*_TOKENIZER_FILES, "generation_config.json"):
            for file in sorted(like.glob(pattern)):
                shutil.copyfile(file, directory / file.name)
    return int(model.num_parameters())


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte of UTF-8, ChatML's marks, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate((*MARKS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, begin, end = MARKS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=pad, additional_special_tokens=[begin]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_config() -> LlamaConfig:
    num_tokens = len(MARKS) + len(pre_tokenizers.ByteLevel.alphabet())
    return LlamaConfig(
        vocab_size=-(-num_tokens // 8) * 8,
        hidden_size=_SMALL["hidden_size"],
        intermediate_size=_SMALL["intermediate_size"],
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )


def _small(like: Path) -> Any:
    """The architecture of a checkpoint, narrow and with two layers, or one layer of each kind."""
    try:
        config = AutoConfig.from_pretrained(like, local_files_only=True)
        for key, value in _SMALL.items():
            if getattr(config, key, None) is not None:
                setattr(config, key, value)
        if getattr(config, "num_key_value_heads", None):
            config.num_key_value_heads = min(config.num_key_value_heads, NUM_HEADS)
        kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        config.num_hidden_layers = max(2, len(kinds))
        if kinds:
            config.layer_types = (kinds * 2)[: config.num_hidden_layers]
        config.dtype = "float32"
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, KeyError, OSError, AttributeError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"--like {like}: no small model can be made of it: {what}") from error
