"""HF tensors and Megatron's parameters: the layout, the way there and back on ranks, and layouts of large models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from launch.checks.memory_plan import bucket_sizes
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import FAMILIES, ModelShape, ParallelLayout
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_tensors import TensorSource, gather_stream
from rlhpc.training.megatron.backend import close_groups, open_groups
from rlhpc.training.megatron.hf_layout import (
    ParameterMap,
    exported,
    fill_local,
    parameter_maps,
    tensor_specs,
    to_hf,
    to_local,
)
from rlhpc.training.megatron.hf_weights import (
    ModelSource,
    OwnedRange,
    load_weights,
    local_shard,
    own_shards,
    parameters_of_rank,
    sharded_float32_state,
    sharded_weights,
)
from rlhpc.training.megatron.model import build_chunks
from rlhpc.training.megatron.model_config import transformer_config
from rlhpc.weights.buckets import buckets_of, make_manifest, manifest_bytes
from rlhpc.weights.hf_names import on_disk
from tests.tiny_models import NUM_EXPERTS, make_tiny_checkpoint, pack_experts
from tests.unit.launch.public_models import CONFIGS, LARGE_RUNS, RECIPES
from tests.unit.training.megatron.policy_ranks import share_of
from tests.unit.training.rank_processes import run_ranks

# --------------------------------------- The way of every tensor into the shards of every rank and back, without ranks

ODD_VOCABULARY = 117
LAYERS = 4


def layout_of(*, tensor=1, context=1, data=1, pipeline=1, chunks=1, expert=1):
    """Any layout, each axis 1 unless told otherwise."""
    return ParallelLayout(tensor, context, data, pipeline, chunks, expert, is_sequence_parallel=tensor > 1)


def random_checkpoint(directory, family, *, tied=False, dtype=torch.float32):
    """A tiny model whose every tensor is drawn, norms included: fresh ones are all ones, and alike."""
    make_tiny_checkpoint(directory, family, layers=LAYERS, heads=4, tied=tied, vocabulary=ODD_VOCABULARY, dtype=dtype)
    file = directory / "model.safetensors"
    draw = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(t.shape, generator=draw).to(dtype) for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return AutoConfig.from_pretrained(directory), tensors


def reader(tensors, seen=None):
    """Read by index; `seen` collects (name, index)."""

    def read(name, index):
        if seen is not None:
            seen.append((name, index))
        return tensors[name][index]

    return read


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(left, right)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_maps_name_exactly_the_tensors_of_the_checkpoint(tmp_path, family, tied):
    model, tensors = random_checkpoint(tmp_path, family, tied=tied)
    specs = tensor_specs(parameter_maps(model, layout_of()), "float32")
    assert len({spec.name for spec in specs}) == len(specs)
    assert set(specs) == {TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_gives_the_checkpoint_back_bit_for_bit(tmp_path, family, tied, dtype):
    model, tensors = random_checkpoint(tmp_path, family, tied=tied, dtype=dtype)
    layouts = [
        layout_of(tensor=tensor, pipeline=pipeline, chunks=chunks, expert=expert, data=2)
        for tensor in (1, 2)
        for pipeline, chunks in ((1, 1), (2, 1), (2, 2))
        for expert in ((1, 2, 4) if family in ("qwen3_moe", "gpt_oss") else (1,))
        if expert <= 2 * tensor
    ]
    for layout in layouts:
        memory = {rank: {} for rank in range(layout.num_ranks)}
        for place in parameter_maps(model, layout):
            for shard, rank in enumerate(place.ranks):
                memory[rank][place.name] = to_local(place, reader(tensors), shard, dtype)
        found = {}
        for place in exported(parameter_maps(model, layout)):
            whole = to_hf(place, [memory[rank][place.name].view(-1) for rank in place.ranks])
            found |= dict(zip([tensor.name for tensor in place.tensors], whole, strict=True))
        assert found.keys() == tensors.keys()
        assert all(same_bits(found[name], tensors[name]) for name in tensors), layout


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_is_the_models_and_the_same_in_every_layout(tmp_path, family):
    model, _ = random_checkpoint(tmp_path, family)
    one, other = (
        [spec.name for spec in tensor_specs(parameter_maps(model, layout), "float32")]
        for layout in (layout_of(), layout_of(tensor=2, pipeline=2, chunks=2))
    )
    assert one == other
    assert one[0] == "model.embed_tokens.weight"
    assert one[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in one[1:-2]]
    assert layers == sorted(layers)


def test_all_ranks_together_read_every_number_of_a_cut_tensor_once(tmp_path):
    model, tensors = random_checkpoint(tmp_path, "qwen2")
    for place in parameter_maps(model, layout_of(tensor=2)):
        counts = {tensor.name: torch.zeros(tensor.shape) for tensor in place.tensors}
        for shard in range(place.num_shards):
            seen = []
            to_local(place, reader(tensors, seen), shard, torch.float32)
            for name, index in seen:
                counts[name][index] += 1
        assert all((count == 1).all() for count in counts.values()), place.name


def test_rows_beyond_the_vocabulary_are_zero_and_are_not_exported(tmp_path):
    model, tensors = random_checkpoint(tmp_path, "llama")
    embedding = parameter_maps(model, layout_of(tensor=2))[0]
    last = to_local(embedding, reader(tensors), 1, torch.float32)
    assert last.shape == (59, 64)
    assert torch.equal(last[:58], tensors["model.embed_tokens.weight"][59:])
    assert (last[58:] == 0).all()
    (whole,) = to_hf(embedding, [to_local(embedding, reader(tensors), 0, torch.float32), last + 1])
    assert torch.equal(whole[59:], tensors["model.embed_tokens.weight"][59:] + 1)
    assert len(whole) == ODD_VOCABULARY


def test_a_vocabulary_smaller_than_the_padding_leaves_the_last_rank_zeros(tmp_path):
    model, _ = random_checkpoint(tmp_path, "llama")
    model.vocab_size = 5
    tensors = {"model.embed_tokens.weight": torch.ones(5, 64)}
    embedding = parameter_maps(model, layout_of(tensor=4))[0]  # 2 rows each: 2, 2, 1, 0
    shards = [to_local(embedding, reader(tensors), shard, torch.float32) for shard in range(4)]
    assert [int(shard[:, 0].sum()) for shard in shards] == [2, 2, 1, 0]
    assert torch.equal(to_hf(embedding, shards)[0], tensors["model.embed_tokens.weight"])


def test_a_group_of_heads_lies_together_with_its_keys_and_values(tmp_path):
    model, tensors = random_checkpoint(tmp_path, "qwen3")  # 4 heads of queries, 2 of keys, 32 wide
    qkv = next(place for place in parameter_maps(model, layout_of(tensor=2)) if "layers.1.self_attention" in place.name)
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(to_local(qkv, reader(tensors), 1, torch.float32), torch.cat([q[64:128], k[32:64], v[32:64]]))
    one_rank = next(p for p in parameter_maps(model, layout_of()) if p.name == qkv.name)
    assert torch.equal(
        to_local(one_rank, reader(tensors), 0, torch.float32),
        torch.cat([q[:64], k[:32], v[:32], q[64:128], k[32:64], v[32:64]]),
    )


def test_fused_experts_are_owned_by_consecutive_ranks_of_their_stage(tmp_path):
    model, _ = random_checkpoint(tmp_path, "gpt_oss")
    layout = layout_of(tensor=2, data=2, pipeline=2, expert=4)
    place = {place.name: place for place in parameter_maps(model, layout)}["decoder.layers.2.mlp.experts.down_proj"]
    assert (place.ranks, place.shard_shape[0]) == ((4, 5, 6, 7), NUM_EXPERTS // 4)
    assert [place.shard_of(rank) for rank in place.ranks] == [0, 1, 2, 3]


def test_experts_in_four_bits_are_read_as_transformers_unpacks_them(tmp_path):
    make_tiny_checkpoint(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    pack_experts(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    with ModelSource.of_model(tmp_path) as source:
        for name in (name for name in theirs if name.endswith(("gate_up_proj", "down_proj"))):
            source.require(name, tuple(theirs[name].shape))
            assert same_bits(source.read(name), theirs[name])
            assert same_bits(source.read(name, index=(slice(2, 4),)), theirs[name][2:4])
            with pytest.raises(ConfigError, match=r"in MXFP4, not \(8, 1, 1\)"):
                source.require(name, (8, 1, 1))


def test_owners_follow_the_rank_order_tensor_context_data_pipeline(tmp_path):
    model, _ = random_checkpoint(tmp_path, "qwen2")
    layout = layout_of(tensor=2, context=2, data=2, pipeline=2, chunks=2)  # stages of 8 ranks
    ranks = {place.name: place.ranks for place in parameter_maps(model, layout)}
    assert ranks["embedding.word_embeddings.weight"] == (0, 1)
    of_layer = [ranks[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] for layer in range(LAYERS)]
    assert of_layer == [(0, 1), (8, 9), (0, 1), (8, 9)]  # interleaved
    assert ranks["decoder.layers.3.input_layernorm.weight"] == (8,)
    assert ranks["output_layer.weight"] == (8, 9)


def test_experts_are_owned_whole_by_consecutive_ranks_of_their_stage(tmp_path):
    model, _ = random_checkpoint(tmp_path, "qwen3_moe")
    layout = layout_of(tensor=2, data=2, pipeline=2, expert=4)  # stages of 4 ranks, 2 experts each
    ranks = {place.name: place.ranks for place in parameter_maps(model, layout)}
    owners = [ranks[f"decoder.layers.2.mlp.experts.local_experts.{e}.linear_fc2.weight"] for e in range(NUM_EXPERTS)]
    assert owners == [(4,), (4,), (5,), (5,), (6,), (6,), (7,), (7,)]
    assert ranks["decoder.layers.2.mlp.router.weight"] == (4,)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_tied_head_is_a_copy_where_stages_part_it_from_the_embedding_and_is_never_exported(tmp_path, pipeline):
    model, _ = random_checkpoint(tmp_path, "qwen2", tied=True)
    maps = parameter_maps(model, layout_of(pipeline=pipeline))
    copies = [place for place in maps if place.is_copy]
    assert [(place.name, place.ranks) for place in copies] == ([("output_layer.weight", (1,))] if pipeline > 1 else [])
    assert all(place.tensors[0].name == "model.embed_tokens.weight" for place in copies)
    assert not any(place.is_copy for place in exported(maps))


def test_without_tensor_ranks_joining_copies_nothing_but_interleaved_heads(tmp_path):
    model, tensors = random_checkpoint(tmp_path, "qwen2")
    for place in parameter_maps(model, layout_of()):
        shard = to_local(place, reader(tensors), 0, torch.float32)
        is_view = all(
            tensor.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
            for tensor in to_hf(place, [shard])
        )
        assert is_view == ("linear_qkv" not in place.name)


# ---------------------------------------- HF weights into the ranks of real Megatron models and out again, bit for bit

CPU = torch.device("cpu")
TIMEOUT_S = 240  # for several models one after the other, on a machine with other work


class CountedSource(TensorSource):
    """Counts the numbers that are handed out."""

    num_read = 0

    def read(self, name, dtype=None, index=None):
        part = super().read(name, dtype, index)
        self.num_read += part.numel()
        return part


@dataclass(frozen=True)
class Case:
    """One model on one layout."""

    checkpoint: Path
    model: Any  # its configuration
    weights: dict[str, torch.Tensor]  # as transformers keeps them in memory
    trainer: dict[str, Any]
    dtype: torch.dtype


def make_case(checkpoint, family, tied, dtype, **trainer):
    """Draw a model.  What ranks would import transformers' models for is done here, once."""
    model, _ = random_checkpoint(checkpoint, family, tied=tied, dtype=dtype)
    weights = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).state_dict()
    return Case(checkpoint, model, dict(weights), trainer, dtype)


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    wrong_parameters: list[str]  # that differ from the plain way of policy_ranks
    num_read: int
    num_held: int  # numbers of its parameters, padding included
    exported: list[tuple[str, torch.Tensor]]  # all, and again after an export that was closed early
    state: list[tuple[str, torch.Tensor]]  # gathered from ranges that data-parallel ranks keep
    reread: bool  # local_shard gives every parameter


def rank_results(rank: int, world_size: int, cases: list[Case]) -> list[Seen]:
    """One case after the other."""
    return [_one_case(rank, world_size, case) for case in cases]


def _one_case(rank: int, world_size: int, case: Case) -> Seen:
    trainer = TrainerConfig(backend="megatron", token_budget=4096, num_ranks=world_size, **case.trainer)
    layout = ParallelLayout.of(trainer)
    open_groups(layout, rank=rank, device=CPU)
    model = case.model
    chunks = build_chunks(model, transformer_config(model, trainer, case.dtype), trainer, CPU)
    with CountedSource.of_model(case.checkpoint) as source:
        load_weights(chunks, source, model, layout)
        num_read = source.num_read
        parameters = parameters_of_rank(chunks, model, layout)
        maps = {place.name: place for place in parameter_maps(model, layout)}
        reread = all(
            same_bits(local_shard(maps[name], source, layout, dtype=case.dtype), parameter.detach())
            for name, parameter in parameters.items()
        )
    seen = Seen(
        wrong_parameters=_wrong_parameters(chunks, case),
        num_read=num_read,
        num_held=sum(parameter.numel() for parameter in parameters.values()),
        exported=_exported_twice(chunks, model, layout, case.dtype),
        state=_gathered_state(parameters, model, layout),
        reread=reread,
    )
    close_groups()
    return seen


def _wrong_parameters(chunks, case):
    return [
        name
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if not same_bits(parameter.detach(), share_of(chunk, name, case.weights))
    ]


def _exported_twice(chunks, model, layout, dtype):
    def weights():
        maps = parameter_maps(model, layout)
        items, own = sharded_weights(maps, dtype), own_shards(parameters_of_rank(chunks, model, layout), maps)
        return gather_stream(items, own, to_rank=0, dtype=dtype, device=CPU, bucket_elements=10_000)

    early = weights()
    next(early, None)
    early.close()
    return [(name, tensor.clone()) for name, tensor in weights()]


def _gathered_state(parameters, model, layout):
    """Every rank of a data-parallel group keeps a range, as in a distributed optimiser; uneven ones, some empty."""
    maps = parameter_maps(model, layout)
    mine = {}
    for place in maps:
        if place.name in parameters:
            is_expert = ".experts." in place.name
            group = (
                parallel_state.get_expert_data_parallel_group()
                if is_expert
                else parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
            size, number = place.shard_elements, group.rank()
            cuts = [size * (cut * cut) // group.size() ** 2 for cut in range(group.size() + 1)]
            shard = place.shard_of(dist.get_rank())
            mine[place.name] = OwnedRange(place.name, shard, dist.get_rank(), cuts[number], cuts[number + 1])
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, list(mine.values()))
    items = sharded_float32_state(maps, [each for ranges in everyones for each in ranges])
    names = [place.name for place in exported(maps)]

    def own(index):
        kept = mine[names[index]]
        return [parameters[kept.name].detach().float().view(-1)[kept.start : kept.end]]

    stream = gather_stream(items, own, to_rank=0, dtype=torch.float32, device=CPU, bucket_elements=10_000)
    return [(name, tensor.clone()) for name, tensor in stream]


def check(results, checkpoint, number=0):
    """Of case `number`: every rank holds what it should, and rank 0's exports are the file."""
    tensors = load_file(checkpoint / "model.safetensors")
    seen = [of_rank[number] for of_rank in results]
    assert [rank.wrong_parameters for rank in seen] == [[]] * len(seen)
    assert all(rank.reread for rank in seen)
    assert all(rank.num_read <= rank.num_held for rank in seen)
    assert [rank.exported or rank.state for rank in seen[1:]] == [[]] * (len(seen) - 1), "only the lead yields"
    assert [name for name, _ in seen[0].exported] == [name for name, _ in seen[0].state]
    for name, tensor in seen[0].exported:
        assert same_bits(tensor, tensors[name]), name
    for name, tensor in seen[0].state:
        assert same_bits(tensor, tensors[name].float()), name
    assert len(seen[0].exported) == len(tensors)


@pytest.mark.starts
def test_two_ranks_load_and_export_interleaved_stages_and_experts_bit_for_bit(tmp_path):
    bf16, fp32 = torch.bfloat16, torch.float32
    wide = {"tensor_parallel": 2, "sequence_parallel": True}
    cases = [
        make_case(tmp_path / "0", "qwen3", False, fp32, **wide),
        make_case(tmp_path / "1", "qwen2", True, bf16, pipeline_parallel=2, chunks_per_stage=2),
        make_case(tmp_path / "2", "qwen3_moe", False, bf16, expert_parallel=2),
        make_case(tmp_path / "3", "qwen3_moe", True, fp32, expert_parallel=2, **wide),
        make_case(tmp_path / "4", "qwen3_moe", False, fp32, **wide),
        make_case(tmp_path / "5", "gpt_oss", False, bf16, expert_parallel=2),
        make_case(tmp_path / "6", "gpt_oss", False, bf16, **wide),
        make_case(tmp_path / "7", "olmo3", False, bf16, **wide),
    ]
    results = run_ranks(2, rank_results, tmp_path, cases, timeout_s=TIMEOUT_S)
    for number, case in enumerate(cases):
        check(results, case.checkpoint, number)
    whole = sum(tensor.numel() for tensor in load_file(cases[0].checkpoint / "model.safetensors").values())
    assert all(of_rank[0].num_read < 0.51 * whole for of_rank in results)


@pytest.mark.long
def test_four_ranks_load_and_export_every_mixture_of_axes_bit_for_bit(tmp_path):
    cases = [
        make_case(tmp_path / "0", "llama", True, torch.bfloat16, tensor_parallel=2, pipeline_parallel=2),
        make_case(tmp_path / "1", "qwen2", False, torch.float32, tensor_parallel=2, context_parallel=2),
        make_case(tmp_path / "2", "qwen2", False, torch.float32, tensor_parallel=2),
        make_case(tmp_path / "3", "qwen3_moe", False, torch.float32, pipeline_parallel=2, expert_parallel=2),
    ]
    results = run_ranks(4, rank_results, tmp_path, cases, timeout_s=TIMEOUT_S)
    for number, case in enumerate(cases):
        check(results, case.checkpoint, number)


def test_state_in_ranges_of_any_cut_comes_back_whole(tmp_path):
    """Replicas may be cut at different places, in any order, and some ranges may be empty."""
    model, tensors = random_checkpoint(tmp_path, "qwen2")
    layout = layout_of(tensor=2, data=2, pipeline=2)
    shards, ranges = {}, []
    for place in parameter_maps(model, layout):
        for tensor_rank in range(2):
            shard = place.shard_of(tensor_rank)
            shards[place.name, shard] = to_local(place, reader(tensors), shard, torch.float32).view(-1)
            size, stage = place.shard_elements, place.ranks[0] // 4 * 4
            cut = {0: size // 3, 1: size - 1}[tensor_rank]
            ranges += [
                OwnedRange(place.name, shard, stage + tensor_rank + 2, cut, size),
                OwnedRange(place.name, shard, stage + tensor_rank, 0, cut),
            ]
    held = {(each.name, each.rank): shards[each.name, each.shard][each.start : each.end] for each in ranges}
    names = [place.name for place in exported(parameter_maps(model, layout))]
    for name, item in zip(names, sharded_float32_state(parameter_maps(model, layout), ranges), strict=True):
        joined = item.join([held[name, piece.rank] for piece in item.shards])
        for spec, tensor in zip(item.specs, joined, strict=True):
            assert spec.dtype == "float32"
            assert same_bits(tensor, tensors[spec.name])


def test_ranges_with_a_gap_are_our_own_mistake(tmp_path):
    model, _ = random_checkpoint(tmp_path, "qwen2")
    layout = layout_of()
    ranges = [OwnedRange(place.name, 0, 0, 0, place.shard_elements - 1) for place in parameter_maps(model, layout)]
    with pytest.raises(AssertionError, match=r"word_embeddings.weight: no rank keeps shard 0 from \d+ on"):
        sharded_float32_state(parameter_maps(model, layout), ranges)


def failures(rank: int, world_size: int, checkpoints: list[Path]) -> list[str]:
    """What loading each of them says."""
    trainer = TrainerConfig(backend="megatron", token_budget=4096)
    layout = ParallelLayout.of(trainer)
    open_groups(layout, rank=rank, device=CPU)
    model = AutoConfig.from_pretrained(checkpoints[0])
    chunks = build_chunks(model, transformer_config(model, trainer, torch.float32), trainer, CPU)
    said = []
    for checkpoint in checkpoints:
        try:
            load_weights(chunks, TensorSource.of_model(checkpoint), model, layout)
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    for name, parameter in chunks[0].named_parameters():
        if name == "decoder.layers.0.mlp.linear_fc1.weight":
            del parameter.tensor_model_parallel
    try:
        load_weights(chunks, TensorSource.of_model(checkpoints[0]), model, layout)
    except AssertionError as error:
        said.append(str(error))
    close_groups()
    return said


@pytest.mark.starts
def test_a_missing_tensor_and_one_of_another_shape_are_named_and_so_is_a_mark_that_megatron_needs(tmp_path):
    sound, missing, other = (tmp_path / name for name in ("sound", "missing", "other"))
    for checkpoint in (sound, missing, other):
        random_checkpoint(checkpoint, "qwen2")
    victim = "model.layers.3.mlp.up_proj.weight"
    tensors = load_file(sound / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != victim}, missing / "model.safetensors")
    save_file(tensors | {victim: torch.zeros(128, 63)}, other / "model.safetensors")
    ((nothing, of_missing, of_other, of_mark),) = run_ranks(1, failures, tmp_path, [sound, missing, other])
    assert nothing == ""
    assert of_missing == f"model.path={missing}: there is no tensor {victim}"
    assert of_other.startswith(f"model.path={other}: ")
    assert f"{victim} is (128, 63), not (128, 64)" in of_other
    assert of_mark == "decoder.layers.0.mlp.linear_fc1.weight is marked wrongly for the gradient norm"


# ------------------------------------------------------------ layouts of run files for published models, without memory

# Everything is on the meta device: names and shapes, no numbers.  Megatron's own modules are built for ranks of the
# real world size; its process groups are torch's "fake" backend, which connects to nobody.

ROOT = Path(__file__).parents[4]
META = torch.device("meta")
RUNS = LARGE_RUNS | RECIPES


def run_of(name: str) -> tuple[Config, Any, ParallelLayout]:
    """Run file, transformers configuration of its model, and layout."""
    config = load_config(ROOT / "configs" / f"{name}.toml")
    numbers = dict(CONFIGS[RUNS[name]])
    return config, AutoConfig.for_model(numbers.pop("model_type"), **numbers), ParallelLayout.of(config.trainer)


def maps_of(name: str) -> tuple[ParameterMap, ...]:
    _, model, layout = run_of(name)
    return parameter_maps(model, layout)


def expected_by_engines(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an HF checkpoint of this model, which is what engines read."""
    with META:
        module = AutoModelForCausalLM.from_config(run_of(name)[1])
    specs = (TensorSpec(key, "bfloat16", tuple(tensor.shape)) for key, tensor in module.named_parameters())
    return {each.name: each.shape for spec in specs for each in on_disk(spec)}


def test_every_run_file_is_looked_at() -> None:
    files = (path for path in (ROOT / "configs").glob("*/*.toml") if path.parent.name != "lora")
    assert {str(path.relative_to(ROOT / "configs").with_suffix("")) for path in files} == set(RUNS) - {"gsm8k"}


@pytest.mark.parametrize("name", RUNS)
def test_every_tensor_that_an_engine_expects_leaves_the_trainer_and_no_other(name: str) -> None:
    config, model, layout = run_of(name)
    items = sharded_weights(parameter_maps(model, layout), torch.bfloat16)
    left: dict[str, tuple[int, ...]] = {}
    for item in items:
        shards = [torch.empty(shard.num_elements, dtype=torch.bfloat16, device=META) for shard in item.shards]
        for spec, tensor in zip(item.specs, item.join(shards), strict=True):
            assert (spec.shape, spec.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert spec.name not in left
            left[spec.name] = tuple(tensor.shape)
        assert all(0 <= shard.rank < config.trainer.num_ranks for shard in item.shards)
    assert left == expected_by_engines(name)


@pytest.mark.parametrize("name", RUNS)
def test_shards_are_filled_from_the_checkpoint_and_every_number_of_it_is_read_once(name: str) -> None:
    """Rows and columns counted: slabs of all shards of a parameter together are its tensors, nothing twice."""
    for place in exported(maps_of(name)):
        shapes = {tensor.name: tensor.shape for tensor in place.tensors}
        read = dict.fromkeys(shapes, 0)

        def reader(name: str, index: tuple[slice, ...], shapes: Any = shapes, read: Any = read) -> Tensor:
            part = torch.empty(shapes[name], device=META)[index]
            read[name] += part.numel()
            return part

        for shard in range(place.num_shards):
            fill_local(place, reader, shard, torch.empty(place.shard_shape, device=META))
        assert read == {tensor.name: torch.Size(tensor.shape).numel() for tensor in place.tensors}


@pytest.mark.parametrize("name", RUNS)
def test_the_memory_plan_counts_buckets_as_large_as_those_that_are_sent(name: str) -> None:
    """It knows sizes and not the order within a layer, so that a border may lie a tensor further."""
    config, _, _ = run_of(name)
    manifest = make_manifest(1, 1, tensor_specs(maps_of(name), "bfloat16"), config.weights.bucket_bytes)
    shape = ModelShape.of(CONFIGS[RUNS[name]])
    assert shape is not None
    assert manifest_bytes(manifest) == 2 * shape.num_parameters
    sent, counted = [bucket.num_bytes for bucket in buckets_of(manifest)], bucket_sizes(config, shape)
    assert (len(sent), sum(sent)) == (len(counted), sum(counted))
    assert counted == pytest.approx(sent, rel=1e-3)


@pytest.mark.vllm
@pytest.mark.starts
@pytest.mark.long
def test_vllms_own_models_take_every_tensor_and_are_whole_then() -> None:
    """In a process of its own; the engine's ranks cut what they take by vLLM's own rules."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.training.megatron.engine_on_meta", *LARGE_RUNS],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["large/')]
    assert [name for name, *_ in answers] == list(LARGE_RUNS)
    for name, missing, missing_without_the_last in answers:
        assert missing == [], name
        assert len(missing_without_the_last) == 1, name


# ------------------------------------------------------------------------------------------------ Megatron's own ranks


def held_by(rank: int, maps: tuple[ParameterMap, ...], layout: ParallelLayout) -> dict[str, tuple[int, ...]]:
    """By the plan: parameters of a rank and their shapes.  Tensor ranks are the fastest axis, stages the slowest."""
    in_stage = layout.num_ranks // layout.pipeline
    stage, place_in_stage = divmod(rank, in_stage)
    return {
        place.name: place.shard_shape
        for place in maps
        if place.ranks[0] // in_stage == stage
        and (".local_experts." not in place.name or place.ranks[0] % in_stage == place_in_stage % layout.expert)
    }


def ranks_to_build(layout: ParallelLayout) -> list[int]:
    """Of every stage the first and the last rank."""
    in_stage = layout.num_ranks // layout.pipeline
    return [stage * in_stage + place for stage in range(layout.pipeline) for place in (0, in_stage - 1)]


def build(rank: int, world_size: int, names: list[str]) -> dict[str, int]:
    """In a process of its own: build Megatron's modules as these ranks do.  Returns how many of each run."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlhpc.training.megatron.backend import close_groups, open_groups
    from rlhpc.training.megatron.hf_weights import parameters_of_rank
    from rlhpc.training.megatron.model import build_chunks
    from rlhpc.training.megatron.model_config import transformer_config

    built: dict[str, int] = {}
    for name in names:
        config, model, layout = run_of(name)
        maps = parameter_maps(model, layout)
        for each in ranks_to_build(layout):
            if distributed.is_initialized():
                distributed.destroy_process_group()
            distributed.init_process_group("fake", store=FakeStore(), rank=each, world_size=layout.num_ranks)
            open_groups(layout, rank=each, device=torch.device("cpu"))
            with META:
                settings = transformer_config(model, config.trainer, torch.bfloat16)
                found = parameters_of_rank(build_chunks(model, settings, config.trainer, META), model, layout)
            assert all(parameter.is_meta for parameter in found.values())
            assert {key: tuple(p.shape) for key, p in found.items()} == held_by(each, maps, layout), (name, each)
            built[name] = built.get(name, 0) + len(found)
            close_groups()
    return built


@pytest.mark.starts
def test_megatron_builds_on_every_kind_of_rank_what_the_plan_says(tmp_path: Path) -> None:
    (built,) = run_ranks(1, build, tmp_path, list(RUNS), timeout_s=600)
    assert set(built) == set(RUNS)
