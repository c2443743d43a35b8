from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from rlhpc.models.shape import INNER, OTHERS, ModelShape
from rlhpc.models.weights import read_header
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training import hf_model
from rlhpc.training.hf_model import PACKED_ATTENTION, cast_parameters, load_causal_lm
from rlhpc.training.logprob import head_logprobs
from rlhpc.training.packed_attention import SegmentPlan, packed_attention
from rlhpc.weights.hf_names import name_as_stored, name_of, on_disk, views_on_disk
from tests.tiny_models import FAMILIES, NUM_EXPERTS, make_tiny_checkpoint
from tests.unit.launch.public_models import ODD_CONFIGS, ODD_OTHERS
from tests.unit.training.packed_rows import gradients_of_packed, gradients_of_plain, logprobs_of_packed

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


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_model_that_is_loaded_narrow_is_the_one_that_is_loaded_wide_and_cast(tmp_path, family):
    make_tiny_checkpoint(tmp_path, family=family, hidden=32)
    narrow, wide = (load_causal_lm(tmp_path, device=CPU, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    cast_parameters(wide, torch.bfloat16)
    for parts in ("named_parameters", "named_buffers"):
        found, expected = (dict(getattr(model.module, parts)()) for model in (narrow, wide))
        assert found.keys() == expected.keys()
        assert all(found[name].dtype == expected[name].dtype for name in found)
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in narrow.module.modules())


def test_another_architecture_that_honours_the_interface_is_welcome(tmp_path):
    config = GPTNeoXConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    config.attention_dropout = config.hidden_dropout = 0.5  # must not act
    model = load_causal_lm(save_other(tmp_path, config), device=CPU)
    assert model.module.training
    assert not any(part.p for part in model.module.modules() if isinstance(part, torch.nn.Dropout))


SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WITH_FUNCTIONAL_DROPOUT = {
    "starcoder2": Starcoder2Config(
        **SIZES, num_key_value_heads=2, intermediate_size=64, residual_dropout=0.5, embedding_dropout=0.5
    ),
    "opt": OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, layerdrop=0.5),
}


@pytest.mark.parametrize("family", WITH_FUNCTIONAL_DROPOUT)
def test_nothing_is_dropped_where_layers_call_dropout_as_a_function(family, tmp_path):
    model = load_causal_lm(save_other(tmp_path, WITH_FUNCTIONAL_DROPOUT[family]), device=CPU)
    row, plan = torch.arange(1, 13), SegmentPlan.of(np.array([0, 12], np.int32), CPU)
    positions = torch.arange(12)
    assert model.module.training
    trained = model.hidden_states(row, positions, plan)
    model.module.eval()
    torch.testing.assert_close(trained, model.hidden_states(row, positions, plan), rtol=0, atol=0)


def test_layers_that_draw_random_numbers_in_training_are_refused(tmp_path, monkeypatch):
    make_tiny_checkpoint(tmp_path, hidden=32)
    plain = Qwen2MLP.forward

    def noisy(self, hidden):
        """As a router with jitter."""
        return plain(self, hidden * torch.empty_like(hidden).uniform_(0.5, 1.5) if self.training else hidden)

    monkeypatch.setattr(Qwen2MLP, "forward", noisy)
    with pytest.raises(ConfigError, match=r"model\.path=.*draws random numbers in training"):
        load_causal_lm(tmp_path, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_not_a_plain_product_are_refused(tmp_path, dtype):
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
        load_causal_lm(save_other(tmp_path, config), device=CPU, dtype=dtype)


SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "initializer_range": 0.3}  # fmt: skip
MIXED = ["full_attention", "sliding_attention"]
WINDOW = 8
WITH_WINDOWS = {
    "mistral": MistralConfig(**SMALL, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=16),
}


@pytest.mark.parametrize("family", WITH_WINDOWS)
def test_sliding_windows_are_those_of_transformers_longer_than_which_segments_are(family, tmp_path):
    model = load_causal_lm(save_other(tmp_path, WITH_WINDOWS[family]), device=CPU)
    segments = [torch.arange(3, 3 + length) % 61 for length in (20, WINDOW, 33)]
    found = logprobs_of_packed(model, segments)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = [plain(input_ids=segment[None]).logits[0].log_softmax(-1) for segment in segments]
        plain.config.sliding_window = 1000
        for part in plain.modules():
            if getattr(part, "sliding_window", None):
                part.sliding_window = 1000
        without = plain(input_ids=segments[2][None]).logits[0].log_softmax(-1)
    expected = torch.cat(
        [each[:-1].gather(1, segment[1:, None])[:, 0] for each, segment in zip(logits, segments, strict=True)]
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (logits[2] - without)[WINDOW:].abs().max() > 0.01  # the window does something here


@pytest.mark.parametrize(("max_tokens", "are_long"), [(8, False), (9, True)])
def test_long_frequencies_turn_every_row_if_the_engine_may_sample_a_long_one(max_tokens, are_long, tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
    config = Phi3Config(
        **{key: size for key, size in SMALL.items() if key != "head_dim"},
        max_position_embeddings=64, original_max_position_embeddings=8, rope_parameters=rope | factors, pad_token_id=0,
    )  # fmt: skip
    model = load_causal_lm(save_other(tmp_path, config), device=CPU, max_tokens=max_tokens)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    segment = torch.arange(3, 9)
    with torch.no_grad():  # by transformers, what follows turns what stands before
        alone, in_a_long_row = (plain(input_ids=row[None]).logits[0].log_softmax(-1) for row in
                                (segment, torch.arange(3, 20)))  # fmt: skip
    short, long = (each[: len(segment) - 1].gather(1, segment[1:, None])[:, 0] for each in (alone, in_a_long_row))
    assert (short - long).abs().max() > 0.01
    torch.testing.assert_close(logprobs_of_packed(model, [segment]), long if are_long else short, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", {"softcap": None}),
        ("gemma2", {"scaling": 1.0}),
        ("gemma2", {"sliding_window": None}),
        ("gpt_oss", {"s_aux": None}),
    ],
)
def test_attention_whose_scores_are_others_than_its_layers_ask_for_is_refused(family, change, tmp_path, monkeypatch):
    make_tiny_checkpoint(tmp_path, family, hidden=32)

    def deaf(*args, **options):
        return packed_attention(*args, **options | change)

    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED_ATTENTION, deaf)
    with pytest.raises(ConfigError, match=r"packed log-probabilities that differ.*changes attention scores"):
        load_causal_lm(tmp_path, device=CPU)


def test_logits_that_are_capped_elsewhere_than_in_the_configuration_are_refused(tmp_path, monkeypatch):
    make_tiny_checkpoint(tmp_path, "gemma2", hidden=32)
    monkeypatch.setattr(hf_model, "head_logprobs", lambda *args, softcap, **options: head_logprobs(*args, **options))
    with pytest.raises(ConfigError, match=r"Gemma2.*transforms its logits"):
        load_causal_lm(tmp_path, device=CPU)


def test_layers_that_lose_the_borders_of_samples_are_refused(tmp_path):
    sizes = {key: size for key, size in SMALL.items() if key != "head_dim"}
    with pytest.raises(ConfigError, match=r"model\.path=.*StableLm.*borders of packed samples.*segments"):
        load_causal_lm(save_other(tmp_path, StableLmConfig(**sizes)), device=CPU)


def test_layers_of_another_kind_are_refused(tmp_path):
    make_tiny_checkpoint(tmp_path, hidden=32)
    config = AutoConfig.from_pretrained(tmp_path)
    config.layer_types = ["full_attention", "chunked_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path=.*chunked_attention"):
        load_causal_lm(tmp_path, device=CPU)


MISTRAL = MistralConfig(**SIZES, num_key_value_heads=2, intermediate_size=64)
OF_LAYER = "model.layers.1.self_attn.k_proj.weight"


def tiny(directory, family):
    return make_tiny_checkpoint(directory) if family == "qwen2" else save_other(directory, MISTRAL)


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("qwen2", OF_LAYER),
        ("qwen2", "model.layers.0.self_attn.q_proj.bias"),
        ("mistral", OF_LAYER),
        ("mistral", "model.norm.weight"),
        ("mistral", "lm_head.weight"),
    ],
)
def test_a_checkpoint_without_one_of_its_tensors_is_refused(family, lost, tmp_path):
    file = tiny(tmp_path, family) / "model.safetensors"
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=f"no tensor {lost}.*up numbers"):
        load_causal_lm(tmp_path, device=CPU)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@pytest.mark.parametrize(
    ("other", "says"),
    [(lambda it: it.to(torch.int8), f"{OF_LAYER} is stored as I8"), (lambda it: it[:-1].clone(), "cannot load|shape")],
    ids=["integers", "another shape"],
)
def test_a_checkpoint_whose_tensor_is_another_is_refused(family, other, says, tmp_path):
    file = tiny(tmp_path, family) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {OF_LAYER: other(tensors[OF_LAYER])}, file)
    with pytest.raises(ConfigError, match=says):
        load_causal_lm(tmp_path, device=CPU)


def test_a_directory_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_causal_lm(tmp_path, device=CPU)
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_causal_lm(tmp_path / "absent", device=CPU)


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


# ------------------------------------------------------------------------------------------------------------ hf names


def spec_of(name, parameter):
    return TensorSpec(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_and_bits_are_those_that_transformers_writes(family, dtype, tmp_path):
    make_tiny_checkpoint(tmp_path, family=family, hidden=32, dtype=dtype)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    module.save_pretrained(tmp_path / "again")
    written = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    # Of a model that also sees: transformers 5.24 writes names as it read them, 5.19 does not.
    name_as_stored(module, written, INNER)
    found = {}
    for name, parameter in module.named_parameters():
        name = name_of(name, written)
        for spec, view in zip(on_disk(spec_of(name, parameter)), views_on_disk(name, parameter), strict=True):
            assert (spec.shape, spec.dtype) == (tuple(view.shape), str(view.dtype).removeprefix("torch."))
            found[spec.name] = view
    assert found.keys() == written.keys() - dict(module.named_buffers()).keys()
    assert [name for name in found if not torch.equal(found[name], written[name])] == []


def test_views_of_fused_experts_write_through_and_others_keep_their_name():
    fused = torch.zeros(3, 4, 5)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for number, view in enumerate(views_on_disk(name, fused)):
        view.fill_(number)
    assert fused[:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
        tensor = torch.zeros(2, 3)
        assert on_disk(spec_of(name, tensor)) == (spec_of(name, tensor),)
        assert [view.data_ptr() for view in views_on_disk(name, tensor)] == [tensor.data_ptr()]


@pytest.mark.parametrize("name", ODD_CONFIGS | ODD_OTHERS)
def test_the_tensors_that_a_check_expects_are_those_of_transformers(name):
    document = (ODD_CONFIGS | ODD_OTHERS)[name]
    settings = {key: value for key, value in document.items() if key != "model_type"}
    config = AutoConfig.for_model(document["model_type"], **settings)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    module.tie_weights()
    expected, found = {}, ModelShape.of(document).tensors
    for name, parameter in module.named_parameters():
        expected |= {spec.name: spec.shape for spec in on_disk(spec_of(name_of(name, found), parameter))}
    assert found == expected


@pytest.mark.parametrize("family", OTHERS)
def test_the_tensors_that_are_counted_of_hybrids_and_latents_are_those_on_disk(family, tmp_path):
    directory = make_tiny_checkpoint(tmp_path, family, layers=3)
    found = {name: tuple(tensor.shape) for name, tensor in read_header(directory / "model.safetensors").items()}
    language = {
        name: shape
        for name, shape in found.items()
        if ".visual." not in name and not name.endswith(".e_score_correction_bias")
    }
    assert ModelShape.of(json.loads((directory / "config.json").read_bytes())).tensors == language
