"""A config.json that leaves nothing to defaults is read as transformers reads it, without loading transformers."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.errors import ConfigError
from rlhpc.training.megatron.hf_layout import critic_of, parameter_maps
from rlhpc.training.megatron.model_config import ModelFile, read_model, rotary_frequencies, transformer_config
from tests.tiny_models import FAMILIES, make_tiny_checkpoint

TRAINER = TrainerConfig(token_budget=64)
# As hubs have them: of transformers 4, whose rotation is two keys of the model's own.
PUBLISHED = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5632, "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 22, "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen2": {
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
        "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_moe": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


def written(directory, document):
    """A directory with this config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def assert_alike(found, theirs):
    """Everything that the backend derives from a configuration is the same."""
    layout = ParallelLayout.of(TRAINER)
    # Some of its fields are functools.partial, which are equal only to themselves.
    assert repr(transformer_config(found, TRAINER, torch.float32)) == repr(
        transformer_config(theirs, TRAINER, torch.float32)
    )
    assert parameter_maps(found, layout) == parameter_maps(theirs, layout)
    assert parameter_maps(critic_of(found), layout) == parameter_maps(critic_of(theirs), layout)
    assert torch.equal(rotary_frequencies(found), rotary_frequencies(theirs))
    for key in ("max_position_embeddings", "tie_word_embeddings", "vocab_size", "pad_token_id"):
        assert getattr(found, key) == getattr(theirs, key), key


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_published_configuration_is_read_as_transformers_reads_it(tmp_path, family):
    path = written(tmp_path, PUBLISHED[family])
    found = read_model(path)
    assert isinstance(found, ModelFile)
    assert_alike(found, AutoConfig.from_pretrained(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_this_release_is_read_as_transformers_reads_it(tmp_path, family):
    make_tiny_checkpoint(tmp_path, family)
    assert_alike(read_model(tmp_path), AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *((family, {key: ...}) for family in PUBLISHED for key in ("num_key_value_heads", "rms_norm_eps")),
        *((family, {"rope_theta": ...}) for family in PUBLISHED),
        ("llama", {"num_key_value_heads": None}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen2", {"use_sliding_window": ...}),
        ("qwen3", {"head_dim": ...}),
        ("qwen3_moe", {"norm_topk_prob": ...}),
        ("qwen3_moe", {"head_dim": ...}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_left_to_a_default_or_scaled_is_asked_of_transformers(tmp_path, family, change):
    document = {key: value for key, value in {**PUBLISHED[family], **change}.items() if value is not ...}
    path = written(tmp_path, document)
    found = read_model(path)
    assert not isinstance(found, ModelFile)
    assert_alike(found, AutoConfig.from_pretrained(path))


@pytest.mark.parametrize("key", ["partial_rotary_factor", "pad_token_id"])
def test_a_key_that_few_models_have_counts_as_it_does_in_transformers(tmp_path, key):
    path = written(tmp_path, {**PUBLISHED["llama"], key: 1})
    assert_alike(read_model(path), AutoConfig.from_pretrained(path))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"model_type": "martian"}', '{"model_type": 3}', '{"hidden_size": 8}']
)
def test_a_file_that_is_none_is_refused_by_its_key(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.path="):
        read_model(tmp_path)


@pytest.mark.starts
def test_a_trainer_of_megatron_loads_no_transformers_for_a_published_model(tmp_path):
    path = written(tmp_path, PUBLISHED["qwen2"])
    script = (
        "import sys, pathlib, rlhpc.training.megatron.backend\n"
        "from rlhpc.training.megatron.model_config import read_model\n"
        f"print(read_model(pathlib.Path({str(path)!r})).num_hidden_layers, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["24", "False"]
