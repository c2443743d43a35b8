"""What the server that ranks are forked from has loaded: see rank_context.py."""

from __future__ import annotations

import importlib

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")  # that tests train

for module in ("rlhpc.training.factory", "rlhpc.training.reference", "rlhpc.training.megatron.backend"):
    importlib.import_module(module)
for family in FAMILIES:
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    get_checkpoint_conversion_mapping(family)  # the first call compiles 650 regular expressions
