"""Tensors and tokens of a checkpoint as transformers sees them, for checks in processes without torch.

`python -m rlhpc.training.hf_view` reads {"directory": …, "texts": […]} and prints one JSON line: "tokens" of each text
by AutoTokenizer, with its special tokens and without, and "tokenizer", its class; without texts "tensors", the shapes
that AutoModelForCausalLM expects by their names on disk, {} if transformers renames tensors on loading.  No weights are
read.  Output of libraries goes to stderr, and their exceptions end the process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def tokens_of(directory: Path, texts: Sequence[str]) -> dict[str, Any]:
    """The tokens of texts as a serving engine or an evaluation harness reads them."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tokens = [[tokenizer.encode(text, add_special_tokens=each) for each in (True, False)] for text in texts]
    return {"tokens": tokens, "tokenizer": type(tokenizer).__name__}


def tensors_of(directory: Path) -> dict[str, Any]:
    """Shapes of the tensors on disk, without allocating any."""
    import torch  # takes seconds, and is not needed for tokens
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if get_model_conversion_mapping(model, add_legacy=False):
        return {"tensors": {}}
    model.tie_weights()
    return {"tensors": {name: tuple(each.shape) for name, each in model.named_parameters()}}


def main() -> None:
    """Answer the question on stdin."""
    asked = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    directory, texts = Path(asked["directory"]), asked["texts"]
    found = tokens_of(directory, texts) if texts else tensors_of(directory)
    out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
