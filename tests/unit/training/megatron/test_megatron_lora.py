"""Adapters beside Megatron's layers: where A and B lie, what is trained and what is not, what is refused."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from rlhpc.config.tables_algorithm import LoraConfig
from rlhpc.models.adapter import adapter_specs, chosen_layers
from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.errors import ConfigError
from rlhpc.training.megatron.hf_layout import exported, parameter_maps, specs_of, to_hf, to_local
from rlhpc.training.megatron.lora import adapter_maps
from tests.contracts.trainer_cluster import Rank, RankProcesses
from tests.contracts.trainer_scenarios import train, weights_of
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import draw_samples, pack_row

RANK = 3
DENSE = {"rank": RANK, "alpha": 6.0, "targets": ["attention", "mlp", "output"]}
LAYOUTS = {
    "one": ParallelLayout(1, 1, 1, 1, 1, 1, is_sequence_parallel=False),
    "tp2": ParallelLayout(2, 1, 2, 1, 1, 1, is_sequence_parallel=True),
    "vpp": ParallelLayout(2, 1, 2, 2, 2, 1, is_sequence_parallel=False),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Four layers, four heads that share two keys, a vocabulary that needs padding, an untied head."""
    directory = tmp_path_factory.mktemp("model")
    return make_tiny_checkpoint(directory, "qwen3", hidden=32, layers=4, tied=False, vocabulary=117, heads=4)


# ----------------------------------------------------------------------------------------------------------------- maps


def layers_of(config: Any, targets: list[str]) -> dict[str, tuple[int, int]]:
    """The layers that these targets choose of a model of transformers."""
    matrices = {
        tensor.name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for place in parameter_maps(config, LAYOUTS["one"])[1:]
        for tensor in place.tensors
        if len(tensor.shape) == 2
    }
    return chosen_layers(LoraConfig(rank=RANK, targets=tuple(targets)), matrices)


@pytest.mark.parametrize("targets", [["attention", "mlp", "output"], ["v_proj", "up_proj"]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_all_a_and_b_back_bit_for_bit_in_the_order_of_a_version(model, layout, targets):
    config = AutoConfig.from_pretrained(model)
    layers, axes = layers_of(config, targets), LAYOUTS[layout]
    specs = adapter_specs(layers, RANK)
    draw = torch.Generator().manual_seed(1)
    tensors = {spec.name: torch.randn(spec.shape, generator=draw) for spec in specs}
    maps = adapter_maps(parameter_maps(config, axes), layers, RANK)
    assert tuple(spec for place in maps for spec in specs_of(place, "float32")) == specs
    for place in exported(maps):
        shards = [
            to_local(place, lambda n, i: tensors[n][i], shard, torch.float32) for shard in range(place.num_shards)
        ]
        assert all(tuple(shard.shape) == place.shard_shape for shard in shards)
        assert torch.equal(to_hf(place, shards)[0], tensors[place.tensors[0].name])


def test_b_lies_where_the_rows_of_its_matrix_lie_and_a_where_its_columns(model):
    config = AutoConfig.from_pretrained(model)
    maps = {
        place.tensors[0].name.removeprefix("model.layers.1."): place
        for place in adapter_maps(
            parameter_maps(config, LAYOUTS["tp2"]), layers_of(config, ["attention", "mlp", "output"]), RANK
        )
    }
    whole, cut = (0,), (0, 1)
    of = {name: (place.ranks, place.shard_shape) for name, place in maps.items()}
    assert of["self_attn.q_proj.lora_A.weight"] == (whole, (RANK, 32))
    assert of["self_attn.q_proj.lora_B.weight"] == (cut, (config.num_attention_heads * config.head_dim // 2, RANK))
    assert of["self_attn.k_proj.lora_B.weight"] == (cut, (config.num_key_value_heads * config.head_dim // 2, RANK))
    assert of["self_attn.o_proj.lora_A.weight"] == (cut, (RANK, config.num_attention_heads * config.head_dim // 2))
    assert of["self_attn.o_proj.lora_B.weight"] == (whole, (32, RANK))
    assert of["mlp.up_proj.lora_B.weight"] == (cut, (32, RANK))
    assert of["mlp.down_proj.lora_A.weight"] == (cut, (RANK, 32))
    assert of["lm_head.lora_B.weight"] == (cut, (59, RANK))  # 117 rows and one of padding


# ---------------------------------------------------------------------------------------------------------------- ranks

TWO: dict[str, Any] = {"backend": "megatron", "num_ranks": 2}
ROWS = [pack_row(draw_samples((9, 14, 5), seed=seed)) for seed in range(4)]
SETTINGS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "replicated": {"distributed_optimizer": False},
    "overlapped": {"overlap_grad_reduce": True},
    "sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "vpp2": {"pipeline_parallel": 2, "chunks_per_stage": 2},
}


@pytest.fixture(scope="module")
def two_ranks():
    processes = RankProcesses(2)
    yield processes
    processes.close()


def what_is_held(rank: Rank, *, model: Path, **settings: Any) -> dict[str, Any]:
    """Numbers of gradients, masters and moments of this rank, and those of its parts of A, B and the base."""
    backend: Any = rank.open(model, **settings)
    train(rank, backend, ROWS)
    chunks = backend._schedule._chunks
    named = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    own = [p for name, p in named if "lora_" in name]
    base = [p for name, p in named if "lora_" not in name]
    found = {
        "gradients": sum(buffer.grad_data.numel() for chunk in chunks for buffer in chunk.buffers),
        "stepped": sum(shard.num_elements for shard in backend._optimizer.shards),
        "adapters": sum(p.numel() for p in own),
        "padding": 64 * len(own) + 256,  # at most: Megatron begins each at a multiple of 64, in shared buckets
        "dtypes": {str(p.dtype) for p in own} | {str(shard.main.dtype) for shard in backend._optimizer.shards},
        "frozen": all(not p.requires_grad and p.grad is None and not hasattr(p, "main_grad") for p in base),
        "base": {str(p.dtype) for p in base},
    }
    backend.close()
    return found


@pytest.mark.starts
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_but_a_and_b_has_gradients_masters_or_moments(two_ranks, model, name, tmp_path):
    settings = {**SETTINGS[name], "lora": DENSE, "dtype": "bfloat16"}
    answers = two_ranks.run(what_is_held, TWO, tmp_path, model=model, **settings)
    for held in answers:
        assert held["frozen"]
        assert held["base"] == {"torch.bfloat16"}
        assert held["dtypes"] == {"torch.float32"}
        assert 0 <= held["gradients"] - held["adapters"] <= held["padding"]
    shares_out = name in ("dp2", "overlapped")
    stepped, adapters = (sum(held[what] for held in answers) for what in ("stepped", "adapters"))
    assert stepped == (adapters // 2 if shares_out else adapters)


def course(rank: Rank, *, model: Path, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms of three steps, and the version after them."""
    backend = rank.open(model, **settings)
    norms = [train(rank, backend, ROWS).grad_norm for _ in range(3)]
    version = weights_of(backend)
    backend.close()
    return norms, version


@pytest.mark.starts
@pytest.mark.parametrize("recomputed", ["selective", "full"])
@pytest.mark.parametrize("name", ["dp2", "sp", "vpp2"])
def test_layers_that_are_computed_anew_train_their_adapters_alike(two_ranks, model, name, recomputed, tmp_path):
    """Beside a frozen embedding no input of the first layer would want a gradient, and its adapters get none."""
    settings = {**SETTINGS[name], "lora": DENSE}
    plain, _ = two_ranks.run(course, TWO, tmp_path / "a", model=model, **settings)
    anew, _ = two_ranks.run(course, TWO, tmp_path / "b", model=model, recompute_activations=recomputed, **settings)
    assert anew[0] == pytest.approx(plain[0], rel=1e-6)
    assert anew[1].keys() == plain[1].keys()
    for tensor_name, tensor in anew[1].items():
        torch.testing.assert_close(tensor, plain[1][tensor_name], atol=1e-6, rtol=1e-5)


@pytest.mark.starts
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"expert_parallel": 2}, id="ep2"),
        pytest.param({"tensor_parallel": 2, "sequence_parallel": True}, id="sp", marks=pytest.mark.long),
    ],
)
def test_experts_train_their_adapters_alike_wherever_their_tokens_are(two_ranks, layout, tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", "qwen3_moe", hidden=32, tied=False)
    settings = {"model": model, "lora": {"rank": RANK, "alpha": 6.0, "targets": ["experts"]}}
    (norms, version), _ = two_ranks.run(course, TWO, tmp_path / "a", **settings)
    found, _ = two_ranks.run(course, TWO, tmp_path / "b", **settings, **layout)
    assert found[0] == pytest.approx(norms, rel=1e-5)
    for name, tensor in version.items():
        assert (found[1][name] - tensor).norm() <= 1e-5 * tensor.norm(), name


@pytest.mark.starts
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gemma3_text", ["attention", "mlp"]),
        pytest.param("olmo3", ["attention", "mlp"], marks=pytest.mark.long),
        pytest.param("gpt_oss", ["attention"], marks=pytest.mark.long),
    ],
)
def test_adapters_of_other_families_train_alike_on_tensor_ranks(two_ranks, family, targets, tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", family, hidden=32)
    settings = {"model": model, "lora": {"rank": RANK, "alpha": 6.0, "targets": targets}}
    (norms, version), _ = two_ranks.run(course, TWO, tmp_path / "a", **settings)
    found, _ = two_ranks.run(course, TWO, tmp_path / "b", **settings, **SETTINGS["sp"])
    assert found[0] == pytest.approx(norms, rel=1e-5)
    for name, tensor in version.items():
        assert (found[1][name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def strides_of_the_first_layer(rank: Rank, *, model: Path, **settings: Any) -> list[tuple[int, ...]]:
    backend: Any = rank.open(model, **settings)
    seen: list[tuple[int, ...]] = []
    layer: nn.Module = backend._model.chunks[0].decoder.layers[0].self_attention.linear_qkv
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].stride()))
    backend.logprobs(ROWS)
    train(rank, backend, ROWS)
    backend.close()
    return seen


@pytest.mark.starts
def test_frozen_matrices_are_multiplied_by_all_tokens_at_once(two_ranks, model, tmp_path):
    """torch takes [L, 1, H] with the strides of a transposed [1, L, H] for a batch of L matrices of one row."""
    answers = two_ranks.run(strides_of_the_first_layer, TWO, tmp_path, model=model, lora=DENSE)
    assert {stride for each in answers for stride in each} == {(32, 32, 1)}


def is_freed(rank: Rank, *, model: Path, **settings: Any) -> bool:
    """Whether a frozen weight is gone once the backend, which is still there, is closed."""
    backend: Any = rank.open(model, **settings)
    train(rank, backend, ROWS)
    weight = weakref.ref(backend._model.chunks[0].decoder.layers[0].mlp.linear_fc1.weight)
    assert weight() is not None
    backend.close()
    return weight() is None


@pytest.mark.starts
def test_a_closed_backend_frees_the_frozen_weights(two_ranks, model, tmp_path):
    assert two_ranks.run(is_freed, TWO, tmp_path, model=model, lora=DENSE) == [True, True]


def refusal(rank: Rank, *, model: Path, **settings: Any) -> str:
    """Of these settings; afterwards others are taken in the same processes."""
    with pytest.raises(ConfigError) as refused:
        rank.open(model, **settings)
    return str(refused.value)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("targets", "more", "layers"),
    [
        (["output"], {}, "0 to 1"),
        (["model.layers.3.mlp.up_proj"], {}, "0 to 1"),
        (["model.layers.0.mlp.up_proj", "output"], {"chunks_per_stage": 2}, "1 to 1"),
    ],
)
def test_a_stage_without_adapters_is_refused_on_every_rank(two_ranks, model, targets, more, layers, tmp_path):
    settings = {"lora": DENSE | {"targets": targets}, "pipeline_parallel": 2, **more}
    for message in two_ranks.run(refusal, TWO, tmp_path, model=model, **settings):
        assert f"the stage of layers {layers} would have nothing to train" in message
        assert "trainer.pipeline_parallel=2" in message
        assert "legal" in message
