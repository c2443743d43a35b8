"""An agent of docs/environments.md: it asks the policy to say digits after it, three times, by OpenAI's client.

`agent.function = "echo_agent:play"` (examples/agent.toml) trains with it.  The policy learns from nothing:
`python examples/echo_agent.py echo` makes a tiny model of random weights, and a dataset.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI  # here: the module is imported once, and each call of play() is a fork

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789\n>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}>{{ message.content }}<eos>{% else %}{{ message.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


async def play(record: dict[str, Any]) -> float:
    """Called for every rollout, in a process of its own; what it returns is the reward: the share of right answers."""
    client, messages, num_right = AsyncOpenAI(), [], 0  # address and key are in its environment
    for digit in record["digits"]:
        messages.append({"role": "user", "content": digit})
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
        said = reply.choices[0].message.content or ""
        num_right += said == digit
        messages.append({"role": "assistant", "content": said})
    return num_right / len(record["digits"])


def make(directory: Path) -> None:
    """Write train.jsonl and model/, an ordinary HF checkpoint whose chat template begins with a special token."""
    tiny_model(directory / "model", tuple(CHARACTERS), pattern=r"[\s\S]")
    rng = random.Random(0)
    records = [{"digits": "".join(rng.choices("0123456789", k=3))} for _ in range(1000)]
    (directory / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def tiny_model(directory: Path, words: Sequence[str], pattern: str) -> None:
    """Write a checkpoint of random weights; pattern: how a text is cut into words, each one token."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    made.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
            initializer_range=0.06, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="float32",
        )
    )  # fmt: skip
    model.save_pretrained(directory)
    made.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a dataset of digits and a tiny model of random weights.")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where to write them, such as echo")
    make(parser.parse_args().directory)
