from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig, GraniteConfig, MixtralConfig

from rlhpc.errors import ConfigError
from rlhpc.training.hf_model import load_causal_lm
from rlhpc.training.logprob import chunked_logprobs
from rlhpc.training.packed_attention import SegmentPlan
from tests.tiny_models import NUM_EXPERTS, make_tiny_checkpoint

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


def gradients_of_packed(model, segments):
    """Of the sum of log-probabilities of all tokens that have one before them."""
    row = torch.cat(segments)
    borders = np.cumsum([0, *map(len, segments)], dtype=np.int32)
    positions = torch.cat([torch.arange(len(segment)) for segment in segments])
    hidden = model.hidden_states(row, positions, SegmentPlan.of(borders, CPU))
    predicted = torch.from_numpy(np.setdiff1d(np.arange(len(row)), borders))
    logprobs, _ = chunked_logprobs(
        hidden[predicted - 1], model.head_weight, row[predicted], temperature=1.0, chunk_tokens=4
    )
    logprobs.sum().backward()
    return {name: parameter.grad for name, parameter in model.parameters.items()}


def gradients_of_plain(directory, segments):
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    for segment in segments:
        logits = hf(input_ids=segment[None], use_cache=False).logits[0]
        logits.log_softmax(-1)[:-1].gather(1, segment[1:, None]).sum().backward()
    return {name: parameter.grad for name, parameter in hf.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_mixture_of_experts_has_the_gradients_of_plain_hf(recompute, tmp_path):
    directory = make_tiny_checkpoint(tmp_path, family="qwen3_moe", hidden=32, tied=False)
    segments = [torch.arange(3, 3 + length) for length in (9, 2, 30)]
    found = gradients_of_packed(load_causal_lm(directory, device=CPU, recompute_activations=recompute), segments)
    expected = gradients_of_plain(directory, segments)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)


def test_exactly_the_experts_that_got_tokens_learn_from_them(tmp_path):
    directory = make_tiny_checkpoint(tmp_path, family="qwen3_moe", hidden=32, layers=1)
    model = load_causal_lm(directory, device=CPU)
    chosen = []
    model.module.model.layers[0].mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    segments = [torch.tensor([5, 6, 90, 17]), torch.tensor([7])]
    found = gradients_of_packed(model, segments)
    expected = set(chosen[0][:3].flatten().tolist())  # the last token of a segment predicts nothing
    assert 2 <= len(expected) < NUM_EXPERTS
    for matrix in ("gate_up_proj", "down_proj"):
        per_expert = found[f"model.layers.0.mlp.experts.{matrix}"].flatten(1).abs().sum(1)
        assert set(per_expert.nonzero()[:, 0].tolist()) == expected
    assert found["model.layers.0.mlp.gate.weight"].abs().sum() > 0


def test_router_logits_are_not_kept_even_where_the_checkpoint_asks_for_them(tmp_path):
    directory = make_tiny_checkpoint(tmp_path, family="qwen3_moe", hidden=32)
    config = AutoConfig.from_pretrained(directory)
    config.output_router_logits = True
    config.save_pretrained(directory)
    model = load_causal_lm(directory, device=CPU)
    segments = SegmentPlan.of(np.array([0, 3], dtype=np.int32), CPU)
    output = model.trunk(input_ids=torch.tensor([[1, 2, 3]]), segments=segments, use_cache=False)
    assert output.router_logits is None


def test_experts_that_nobody_would_know_by_the_names_we_give_are_refused(tmp_path):
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        num_local_experts=4,
    )
    with pytest.raises(ConfigError, match=r"model\.path=.*Mixtral.*names on disk"):
        load_causal_lm(save_other(tmp_path, config), device=CPU)
