"""What transformers makes of a model, beside what a run makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MistralConfig

from launch.checks.model_files import other_tokens, refuse_made_up_tensors
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import ConfigError
from tests.tiny_models import make_tiny_checkpoint

pytestmark = pytest.mark.starts
LOST = "model.layers.1.self_attn.k_proj.weight"


def test_words_that_the_library_parts_otherwise_are_told(tmp_path: Path) -> None:
    """Of qwen2, transformers takes its own class whatever tokenizer_config.json names."""
    model = make_tiny_checkpoint(tmp_path, "qwen2")
    tokenizer = PromptTokenizer(model)
    (line,) = other_tokens(model, tokenizer, ["1+1=", "a b"])
    assert "AutoTokenizer takes Qwen2Tokenizer for this model, and reads the prompt 'a b' as 2 tokens" in line
    assert "by tokenizer.json, as a run reads it, it is 3" in line
    (line,) = other_tokens(model, tokenizer, ["1+1="])
    assert 'reads the text "The answer is 12345' in line


def test_a_family_whose_class_is_respected_is_read_alike(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "llama")
    assert other_tokens(model, PromptTokenizer(model), ["1+1=", "a b"]) == []


def test_a_tokenizer_that_the_library_does_not_load_is_told(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "llama")
    document = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(document | {"hidden_size": "wide"}))
    (line,) = other_tokens(model, PromptTokenizer(model))
    assert "does not load it: " in line
    assert "hidden_size" in line


def test_a_tensor_that_the_library_would_make_up_is_refused_in_any_family(tmp_path: Path) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(**sizes, num_key_value_heads=2, intermediate_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    refuse_made_up_tensors(tmp_path, document)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if name != LOST}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"no tensor {LOST}, for which loaders would make up numbers"):
        refuse_made_up_tensors(tmp_path, document)
