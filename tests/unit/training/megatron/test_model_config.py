"""Which models Megatron trains here, and what is said of the others."""

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, Qwen2Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlhpc.config.tables import TrainerConfig
from rlhpc.protocol.errors import ConfigError
from rlhpc.training.megatron.model_config import rotary_frequencies, transformer_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (GemmaConfig(**SIZES, head_dim=8), "model_type='gemma'"),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias=True"),
        (LlamaConfig(**SIZES, attention_bias=True), "attention_bias=True"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act='gelu'"),
        (LlamaConfig(**SIZES, rope_parameters=YARN), "rope_parameters.rope_type='yarn'"),
        (
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "use_sliding_window=True",
        ),
        (Qwen3MoeConfig(**SIZES, num_experts=4, mlp_only_layers=[0]), "mlp_only_layers=[0]"),
        (Qwen3MoeConfig(**SIZES, num_experts=4, decoder_sparse_step=2), "decoder_sparse_step=2"),
        (Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=1, norm_topk_prob=True), "num_experts_per_tok=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_would_be_computed_otherwise_is_refused_by_the_key_of_its_config(model, key):
    with pytest.raises(ConfigError) as caught:
        transformer_config(model, TrainerConfig(token_budget=64), torch.float32)
    assert "model.path" in str(caught.value)
    assert key in str(caught.value)


def test_a_layout_that_does_not_fit_is_refused():
    trainer = TrainerConfig(token_budget=64, num_ranks=3, tensor_parallel=3)
    with pytest.raises(ConfigError, match="tensor_parallel"):
        transformer_config(LlamaConfig(**SIZES), trainer, torch.float32)


def test_rotation_is_that_of_transformers_bit_for_bit():
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    for parameters in ({"rope_type": "default", "rope_theta": 1e6}, scaled):
        model = LlamaConfig(**SIZES, rope_parameters=parameters)
        assert torch.equal(rotary_frequencies(model), LlamaRotaryEmbedding(model).inv_freq)


@pytest.mark.parametrize(
    ("stages", "chunks", "is_batched"),
    [(2, 1, True), (4, 1, True), (2, 2, False), (3, 2, True), (4, 2, True)],
)
def test_messages_of_stages_go_one_by_one_only_between_two_that_interleave(stages, chunks, is_batched):
    """Between two a batch would confuse directions; between more, NCCL connects pair by pair and may wait for ever."""
    trainer = TrainerConfig(token_budget=64, num_ranks=stages, pipeline_parallel=stages, chunks_per_stage=chunks)
    model = LlamaConfig(**{**SIZES, "num_hidden_layers": stages * chunks})
    config = transformer_config(model, trainer, torch.float32)
    assert (config.batch_p2p_comm, config.overlap_p2p_comm) == (is_batched, not is_batched)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU a stream orders sending before freeing")
def test_a_stage_keeps_its_outputs_where_gloo_may_still_be_sending_them():
    """Freed too early they arrive as something else, now and then: too rarely for a test of numbers to rely on."""
    trainer = TrainerConfig(token_budget=64, num_ranks=2, pipeline_parallel=2)
    assert not transformer_config(LlamaConfig(**SIZES), trainer, torch.float32).deallocate_pipeline_outputs
