"""The way of every tensor into the shards of every rank and back, without ranks."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.megatron.hf_layout import exported, parameter_maps, tensor_specs, to_hf, to_local
from tests.tiny_models import FAMILIES, NUM_EXPERTS, make_tiny_checkpoint

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
        for expert in ((1, 2, 4) if family == "qwen3_moe" else (1,))
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
