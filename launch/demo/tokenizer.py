"""A character-level tokenizer, generated locally.

Output: tokenizer.json and tokenizer_config.json as in any HF checkpoint, so that the demo's model needs no network and
runs through the same code as a real one.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/=();\n "
PAD_ID, BOS_ID, EOS_ID, UNKNOWN_ID = range(len(SPECIAL_TOKENS))

_TOKENS = (*SPECIAL_TOKENS, *CHARACTERS)
_IDS = {token: i for i, token in enumerate(_TOKENS)}
VOCAB_SIZE = len(_TOKENS)  # 24: a multiple of 8, as matrix kernels like it, without rows that are no token


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; it adds no tokens to a text, and decodes to exactly the text that was encoded."""
    tokenizer = Tokenizer(models.WordLevel(_IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # not ".": that leaves out newlines
    tokenizer.decoder = decoders.Fuse()  # without it decode() puts a space between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write its files, under the name of its class that transformers 4 knows too."""
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    named = json.loads(file.read_bytes()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(named, indent=2), encoding="utf-8")


def encode(text: str) -> list[int]:
    """Encode a text of CHARACTERS as the tokenizer does, but faster.  Raises KeyError for other characters."""
    return [_IDS[character] for character in text]
