"""Datasets and the tokenizer part of an HF checkpoint, for tests of data/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<turn>", "</turn>")
CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% generation %}\n"
    "<turn>{{ message['role'] }}: {{ message['content'] | trim }}</turn>\n"
    "    {% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


def make_tokenizer_files(directory: Path, *, adds_bos: bool = False, **config: Any) -> Path:
    """A tokenizer of one token per character, as transformers would save it."""
    directory.mkdir(parents=True, exist_ok=True)
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sums(count: int) -> list[dict[str, Any]]:
    """Records in the manner of GSM8K."""
    return [{"question": f"{i}+{i}=?", "answer": f"{i} and {i}.\n#### {2 * i}"} for i in range(count)]
