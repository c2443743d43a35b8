"""The layout of the tensors of an HF checkpoint in a Megatron model that is sharded over ranks.

Input: a model's configuration and a ParallelLayout.  Output: one ParameterMap for each parameter of the whole
model.  Pure: every rank computes the same for all ranks.  Families: those of models/shape.py.

A parameter is cut into shards, one for each tensor rank; replicated parameters and matrices of an expert are one shard.
A shard is a pile of slabs, runs of rows (or columns) of HF tensors:

    REPLICATED   the tensor
    VOCABULARY   rows; the last shards are filled up with rows of zeros
    COLUMNS      columns: the inputs of a row-parallel linear layer
    ROWS         rows
    QKV          for each group of heads that shares keys: rows of q, of k, of v
    GATE_UP      rows of gate, then the same rows of up
    EXPERTS      whole experts of a tensor that has all of them; one shard for each expert rank
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from rlhpc.models.shape import FAMILIES, ParallelLayout, num_experts
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.logprob import VALUE_HEAD

Read = Callable[[str, tuple[slice, ...]], Tensor]  # (HF name, index) → that part of the tensor

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def critic_of(model: Any) -> Any:
    """The configuration of a model whose head has one output; see logprob.py."""
    critic = copy.deepcopy(model)
    critic.tie_word_embeddings, critic.has_value_head = False, True
    return critic


def has_value_head(model: Any) -> bool:
    """True for a configuration made by critic_of."""
    return bool(getattr(model, "has_value_head", False))


class Kind(Enum):
    """Ways to cut and join a parameter; see the top of the file."""

    REPLICATED = auto()
    VOCABULARY = auto()
    COLUMNS = auto()
    ROWS = auto()
    QKV = auto()
    GATE_UP = auto()
    EXPERTS = auto()


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterMap:
    """A parameter of the whole model, and its shards."""

    name: str  # Megatron's, with layers and experts counted over the whole model
    kind: Kind
    tensors: tuple[HfTensor, ...]
    shard_shape: tuple[int, ...]
    ranks: tuple[int, ...]  # of the first replica: the ranks that hold shards 0, 1, …
    num_key_groups: int  # of the whole model
    is_copy: bool  # the head of a tied model on a stage that does not have the embedding

    @property
    def num_shards(self) -> int:
        """1, or one per tensor rank or rank of experts."""
        return len(self.ranks)

    @property
    def shard_elements(self) -> int:
        """Numbers of one shard, padding included."""
        return torch.Size(self.shard_shape).numel()

    def shard_of(self, rank: int) -> int:
        """Index of a rank's shard, if it holds this parameter: tensor and expert ranks are each the fastest axis."""
        return rank % self.num_shards


@dataclass(frozen=True, slots=True)
class _Slab:
    tensor: int  # index among the HF tensors
    start: int  # row or column there
    end: int


def parameter_maps(model: Any, layout: ParallelLayout) -> tuple[ParameterMap, ...]:
    """Return the maps of all parameters in the order of export: embedding, layers, norm, head.

    model: of read_model, a configuration that layout.refuse_unfit accepts.
    """
    return tuple(_MapMaker(model, layout).all())


def exported(maps: Sequence[ParameterMap]) -> tuple[ParameterMap, ...]:
    """The parameters that are exported to a checkpoint: all but copies."""
    return tuple(each for each in maps if not each.is_copy)


def tensor_specs(maps: Sequence[ParameterMap], dtype: str) -> tuple[TensorSpec, ...]:
    """Specs of all HF tensors, in the order of export."""
    return tuple(spec for each in exported(maps) for spec in specs_of(each, dtype))


def specs_of(parameter: ParameterMap, dtype: str) -> tuple[TensorSpec, ...]:
    """Specs of the HF tensors that one parameter holds; dtype: "float32", "bfloat16", …"""
    return tuple(TensorSpec(tensor.name, dtype, tensor.shape) for tensor in parameter.tensors)


def to_local(parameter: ParameterMap, read: Read, shard: int, dtype: torch.dtype) -> Tensor:
    """Return one shard, on the CPU, reading only its parts."""
    local = torch.empty(parameter.shard_shape, dtype=dtype)
    fill_local(parameter, read, shard, local)
    return local


def fill_local(parameter: ParameterMap, read: Read, shard: int, out: Tensor) -> None:
    """Write one shard to `out`, of shard_shape, slab by slab; padding becomes zero."""
    cut = _cut_dim(parameter.kind)
    filled = 0
    for slab in _slabs(parameter, shard):
        length = slab.end - slab.start
        index = (slice(None),) * cut + (slice(slab.start, slab.end),)
        out.narrow(cut, filled, length).copy_(read(parameter.tensors[slab.tensor].name, index))
        filled += length
    out.narrow(cut, filled, out.shape[cut] - filled).zero_()


def to_hf(parameter: ParameterMap, shards: Sequence[Tensor]) -> list[Tensor]:
    """Return the HF tensors, whole, on the device of the shards; shards flat or of shard_shape, in order.

    A tensor that is one unbroken run of a single shard is a view of it.
    """
    cut = _cut_dim(parameter.kind)
    shaped = [shard.view(parameter.shard_shape) for shard in shards]
    if parameter.num_shards == 1 and parameter.kind is not Kind.QKV:
        lengths = [tensor.shape[cut] for tensor in parameter.tensors]
        return list(shaped[0].narrow(cut, 0, sum(lengths)).split_with_sizes(lengths, cut))
    whole = [shaped[0].new_empty(tensor.shape) for tensor in parameter.tensors]
    for number, shard in enumerate(shaped):
        taken = 0
        for slab in _slabs(parameter, number):
            length = slab.end - slab.start
            whole[slab.tensor].narrow(cut, slab.start, length).copy_(shard.narrow(cut, taken, length))
            taken += length
    return whole


def _cut_dim(kind: Kind) -> int:
    return 1 if kind is Kind.COLUMNS else 0


def _slabs(parameter: ParameterMap, shard: int) -> Iterator[_Slab]:
    """The slabs of the shard; padding comes after them."""
    kind, count = parameter.kind, parameter.num_shards
    sizes = [tensor.shape[_cut_dim(kind)] for tensor in parameter.tensors]
    if kind is Kind.VOCABULARY:
        rows = parameter.shard_shape[0]
        yield _Slab(0, min(shard * rows, sizes[0]), min((shard + 1) * rows, sizes[0]))
        return
    groups = parameter.num_key_groups if kind is Kind.QKV else count
    per_shard = groups // count
    for group in range(shard * per_shard, (shard + 1) * per_shard):
        for tensor, size in enumerate(sizes):
            width = size // groups
            yield _Slab(tensor, group * width, (group + 1) * width)


class _MapMaker:
    """Walks through a model once."""

    def __init__(self, model: Any, layout: ParallelLayout) -> None:
        self._model, self._layout = model, layout
        self._family = FAMILIES[model.model_type]
        self._hidden: int = model.hidden_size
        self._head_size: int = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        self._key_groups: int = model.num_key_value_heads
        self._num_experts = num_experts(model.to_dict())
        self._stage_ranks = layout.tensor * layout.context * layout.data
        self._stage = 0  # the current layer of the walk

    def all(self) -> Iterator[ParameterMap]:
        vocabulary, layout = (self._model.vocab_size, self._hidden), self._layout
        embedding = HfTensor("model.embed_tokens.weight", vocabulary)
        yield self._map(EMBEDDING, Kind.VOCABULARY, embedding)
        per_chunk = self._model.num_hidden_layers // (layout.pipeline * layout.chunks)
        for index in range(self._model.num_hidden_layers):
            self._stage = index // per_chunk % layout.pipeline
            yield from self._layer(f"decoder.layers.{index}.", f"model.layers.{index}.")
        self._stage = layout.pipeline - 1
        yield self._map("decoder.final_layernorm.weight", Kind.REPLICATED, self._norm("model.norm", self._hidden))
        if has_value_head(self._model):
            yield self._map(HEAD, Kind.REPLICATED, HfTensor(VALUE_HEAD, (1, self._hidden)))
        elif not self._model.tie_word_embeddings:
            yield self._map(HEAD, Kind.VOCABULARY, HfTensor("lm_head.weight", vocabulary))
        elif layout.pipeline > 1:
            yield self._map(HEAD, Kind.VOCABULARY, embedding, is_copy=True)

    def _layer(self, name: str, hf: str) -> Iterator[ParameterMap]:
        queries = self._model.num_attention_heads * self._head_size
        keys = self._key_groups * self._head_size
        rows = {"q": queries, "k": keys, "v": keys}
        attention, theirs = f"{name}self_attention.", f"{hf}self_attn."
        yield from self._norms(name, hf, {"input_layernorm": self._family.norm_before_attention})
        weights = [HfTensor(f"{theirs}{x}_proj.weight", (size, self._hidden)) for x, size in rows.items()]
        yield self._map(f"{attention}linear_qkv.weight", Kind.QKV, *weights)
        if self._family.has_qkv_bias:
            biases = [HfTensor(f"{theirs}{x}_proj.bias", (size,)) for x, size in rows.items()]
            yield self._map(f"{attention}linear_qkv.bias", Kind.QKV, *biases)
        yield from self._head_norms(attention, theirs, rows)
        if self._family.has_sinks:
            sinks = HfTensor(f"{theirs}sinks", (self._model.num_attention_heads,))
            yield self._map(f"{attention}core_attention.sinks", Kind.ROWS, sinks)
        output = HfTensor(f"{theirs}o_proj.weight", (self._hidden, queries))
        yield self._map(f"{attention}linear_proj.weight", Kind.COLUMNS, output)
        if self._family.has_output_bias:
            bias = HfTensor(f"{theirs}o_proj.bias", (self._hidden,))
            yield self._map(f"{attention}linear_proj.bias", Kind.REPLICATED, bias)
        after, before = self._family.norm_after_attention, self._family.norm_before_mlp
        yield from self._norms(name, hf, {"self_attn_bda.norm": after, "pre_mlp_layernorm": before})
        if self._family.has_fused_experts:
            yield from self._fused_experts(f"{name}mlp.", f"{hf}mlp.")
        elif self._num_experts:
            yield from self._mixture(f"{name}mlp.", f"{hf}mlp.")
        else:
            yield from self._mlp(f"{name}mlp.", f"{hf}mlp.", self._model.intermediate_size)
        yield from self._norms(name, hf, {"mlp_bda.norm": self._family.norm_after_mlp})

    def _norms(self, name: str, hf: str, names: Mapping[str, str | None]) -> Iterator[ParameterMap]:
        """names: Megatron's → the checkpoint's, None where the family has no such norm."""
        for ours, theirs in names.items():
            if theirs is not None:
                yield self._map(f"{name}{ours}.weight", Kind.REPLICATED, self._norm(f"{hf}{theirs}", self._hidden))

    def _head_norms(self, attention: str, theirs: str, rows: Mapping[str, int]) -> Iterator[ParameterMap]:
        """rows: heads · head size of q and of k."""
        for x in "qk" if self._family.head_norm != "none" else "":
            is_whole = self._family.head_norm == "head"
            norm = self._norm(f"{theirs}{x}_norm", self._head_size if is_whole else rows[x])
            yield self._map(f"{attention}{x}_layernorm.weight", Kind.REPLICATED if is_whole else Kind.ROWS, norm)

    def _mixture(self, name: str, hf: str) -> Iterator[ParameterMap]:
        experts = self._num_experts
        router = HfTensor(f"{hf}gate.weight", (experts, self._hidden))
        yield self._map(f"{name}router.weight", Kind.REPLICATED, router)
        for expert in range(experts):
            owner = self._first_rank + expert // (experts // self._layout.expert)
            ours, theirs = f"{name}experts.local_experts.{expert}.", f"{hf}experts.{expert}."
            yield from self._mlp(ours, theirs, self._model.moe_intermediate_size, owner)

    def _fused_experts(self, name: str, hf: str) -> Iterator[ParameterMap]:
        experts, hidden, width = self._num_experts, self._hidden, self._model.intermediate_size
        for part, shape in {"weight": (experts, hidden), "bias": (experts,)}.items():
            yield self._map(f"{name}router.{part}", Kind.REPLICATED, HfTensor(f"{hf}router.{part}", shape))
        shapes = {
            "gate_up_proj": (hidden, 2 * width),
            "gate_up_proj_bias": (2 * width,),
            "down_proj": (width, hidden),
            "down_proj_bias": (hidden,),
        }
        for part, shape in shapes.items():
            tensor = HfTensor(f"{hf}experts.{part}", (experts, *shape))
            yield self._map(f"{name}experts.{part}", Kind.EXPERTS, tensor)

    def _mlp(self, name: str, hf: str, width: int, expert_rank: int | None = None) -> Iterator[ParameterMap]:
        gate_up = [HfTensor(f"{hf}{x}_proj.weight", (width, self._hidden)) for x in ("gate", "up")]
        yield self._map(f"{name}linear_fc1.weight", Kind.GATE_UP, *gate_up, expert_rank=expert_rank)
        down = HfTensor(f"{hf}down_proj.weight", (self._hidden, width))
        yield self._map(f"{name}linear_fc2.weight", Kind.COLUMNS, down, expert_rank=expert_rank)

    @property
    def _first_rank(self) -> int:
        """First rank of the stage: stages are the slowest axis, tensor ranks and ranks of experts the fastest."""
        return self._stage * self._stage_ranks

    @staticmethod
    def _norm(name: str, size: int) -> HfTensor:
        return HfTensor(f"{name}.weight", (size,))

    def _map(
        self, name: str, kind: Kind, *tensors: HfTensor, expert_rank: int | None = None, is_copy: bool = False
    ) -> ParameterMap:
        if expert_rank is not None:
            ranks: tuple[int, ...] = (expert_rank,)
        else:
            counts = {Kind.REPLICATED: 1, Kind.EXPERTS: self._layout.expert}
            num_shards = counts.get(kind, self._layout.tensor)
            ranks = tuple(range(self._first_rank, self._first_rank + num_shards))
        cut, shape = _cut_dim(kind), list(tensors[0].shape)
        size = sum(tensor.shape[cut] for tensor in tensors)
        if kind is Kind.VOCABULARY:
            size = self._layout.padded_vocabulary(size)
        shape[cut] = size // len(ranks)
        return ParameterMap(name, kind, tensors, tuple(shape), ranks, self._key_groups, is_copy)
