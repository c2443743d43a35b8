from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig, GraniteConfig

from rlhpc.errors import ConfigError
from rlhpc.training.hf_model import load_causal_lm
from tests.tiny_models import make_tiny_checkpoint

CPU = torch.device("cpu")


def save_other(directory, config):
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_a_tied_head_is_the_embedding_and_listed_once(tmp_path):
    model = load_causal_lm(make_tiny_checkpoint(tmp_path, hidden=32, tied=True), device=CPU)
    assert "lm_head.weight" not in model.parameters
    assert model.head_weight is model.parameters["model.embed_tokens.weight"]


def test_a_head_of_its_own_comes_last(tmp_path):
    model = load_causal_lm(make_tiny_checkpoint(tmp_path, hidden=32, tied=False), device=CPU)
    assert model.head_weight is model.parameters["lm_head.weight"]
    assert list(model.parameters)[-1] == "lm_head.weight"


def test_weights_are_float32_whatever_the_checkpoint_is(tmp_path):
    make_tiny_checkpoint(tmp_path, hidden=32, dtype=torch.bfloat16)
    model = load_causal_lm(tmp_path, device=CPU)
    assert {spec.dtype for spec in model.tensor_specs()} == {"float32"}


def test_another_architecture_that_honours_the_interface_is_welcome(tmp_path):
    config = GPTNeoXConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    config.attention_dropout = config.hidden_dropout = 0.5  # must not act
    model = load_causal_lm(save_other(tmp_path, config), device=CPU)
    assert model.module.training
    assert not any(part.p for part in model.module.modules() if isinstance(part, torch.nn.Dropout))


def test_logits_that_are_not_a_plain_product_are_refused(tmp_path):
    config = GraniteConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        logits_scaling=8.0,
        initializer_range=0.3,
    )
    with pytest.raises(ConfigError, match=r"model\.path=.*Granite.*transforms its logits"):
        load_causal_lm(save_other(tmp_path, config), device=CPU)


def test_sliding_windows_are_refused(tmp_path):
    make_tiny_checkpoint(tmp_path, hidden=32)
    config = AutoConfig.from_pretrained(tmp_path)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.use_sliding_window, config.sliding_window = True, 8
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path=.*sliding_attention"):
        load_causal_lm(tmp_path, device=CPU)


def test_a_directory_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_causal_lm(tmp_path, device=CPU)
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_causal_lm(tmp_path / "absent", device=CPU)
