"""HF weights into the ranks of real Megatron models and out again, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.errors import ConfigError
from rlhpc.training.checkpoint_tensors import TensorSource, gather_stream
from rlhpc.training.megatron.backend import close_groups, open_groups
from rlhpc.training.megatron.hf_layout import exported, parameter_maps, to_local
from rlhpc.training.megatron.hf_weights import (
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
from tests.unit.training.megatron.test_hf_layout import layout_of, random_checkpoint, reader, same_bits
from tests.unit.training.megatron.weights_of_rank import share_of
from tests.unit.training.rank_processes import run_ranks

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

    wrong_parameters: list[str]  # that differ from the plain way of weights_of_rank
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
        items = sharded_weights(model, layout, dtype)
        own = own_shards(chunks, model, layout)
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
            shard = place.shard_of(parallel_state.get_tensor_model_parallel_rank())
            mine[place.name] = OwnedRange(place.name, shard, dist.get_rank(), cuts[number], cuts[number + 1])
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, list(mine.values()))
    items = sharded_float32_state(model, layout, [each for ranges in everyones for each in ranges])
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
    for name, item in zip(names, sharded_float32_state(model, layout, ranges), strict=True):
        joined = item.join([held[name, piece.rank] for piece in item.shards])
        for spec, tensor in zip(item.specs, joined, strict=True):
            assert spec.dtype == "float32"
            assert same_bits(tensor, tensors[spec.name])


def test_ranges_with_a_gap_are_our_own_mistake(tmp_path):
    model, _ = random_checkpoint(tmp_path, "qwen2")
    layout = layout_of()
    ranges = [OwnedRange(place.name, 0, 0, 0, place.shard_elements - 1) for place in parameter_maps(model, layout)]
    with pytest.raises(AssertionError, match=r"word_embeddings.weight: no rank keeps shard 0 from \d+ on"):
        sharded_float32_state(model, layout, ranges)


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
