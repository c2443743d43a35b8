"""How a model is sharded over the ranks of the trainer, and which models allow it.

Input: the [trainer] table and a model's config.json.  Models that cannot be sharded this way are refused.  Needs no
torch, so that the planner on a login node and the trainer on its GPUs share it.

Rank order, fastest first: tensor, context, data, pipeline.  Experts are distributed over the ranks of one pipeline
stage, consecutive ones first; each expert is whole on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.config_sections import TrainerConfig
from rlhpc.errors import ConfigError

# Rows of logits that a rank holds at once.  Fewer would save little: with a bfloat16 model backward needs most, ¼ of a
# chunk's logits and 1⅝ times the head's gradient (training/logprob.py), which are 85 % of it at a hidden size of 896.
LOGPROB_CHUNK_TOKENS = 1024
LAYER_TYPES = {"full_attention", "sliding_attention"}  # supported layer_types of config.json


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Numbers of ranks along each axis; `chunks`: blocks of layers that one pipeline stage interleaves."""

    tensor: int
    context: int
    data: int
    pipeline: int
    chunks: int
    expert: int
    is_sequence_parallel: bool

    @classmethod
    def of(cls, trainer: TrainerConfig) -> ParallelLayout:
        """Read it from a validated run file."""
        return cls(
            tensor=trainer.tensor_parallel,
            context=trainer.context_parallel,
            data=trainer.data_parallel,
            pipeline=trainer.pipeline_parallel,
            chunks=trainer.chunks_per_stage,
            expert=trainer.expert_parallel,
            is_sequence_parallel=trainer.sequence_parallel,
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks along all axes."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def row_multiple(self) -> int:
        """A packed row is padded to a multiple of this many tokens."""
        halves = 2 * self.context if self.context > 1 else 1  # each context rank takes an early and a late part
        return halves * (self.tensor if self.is_sequence_parallel else 1)

    def padded_vocabulary(self, size: int) -> int:
        """Rows of the embedding, the same number on every tensor rank; rows from `size` on are padding."""
        return -(-size // self.tensor) * self.tensor

    def refuse_unfit(self, model: Mapping[str, Any]) -> None:
        """Raise ConfigError naming the key if `model`, the content of config.json, cannot be sharded like this."""
        heads = model["num_attention_heads"]
        key_heads = model.get("num_key_value_heads") or heads
        layers, blocks = model["num_hidden_layers"], self.pipeline * self.chunks
        experts = num_experts(model)
        _must_divide("tensor_parallel", self.tensor, key_heads, "num_key_value_heads")
        _must_divide("tensor_parallel", self.tensor, heads, "num_attention_heads")
        if self.is_sequence_parallel:
            _must_divide("tensor_parallel", self.tensor, model["hidden_size"], "hidden_size")
        _must_divide("pipeline_parallel × chunks_per_stage", blocks, layers, "num_hidden_layers")
        if experts:
            _must_divide("expert_parallel", self.expert, experts, "num_experts")
            if self.tensor > 1 and not self.is_sequence_parallel:
                raise ConfigError(
                    f"trainer.tensor_parallel={self.tensor} with a mixture of experts needs "
                    "trainer.sequence_parallel=true: without it every tensor rank would route every token"
                )
            return
        _must_divide("tensor_parallel", self.tensor, model["intermediate_size"], "intermediate_size")
        if self.expert > 1:
            raise ConfigError(f"trainer.expert_parallel={self.expert}, but the model has no experts; legal: 1")


def num_experts(model: Mapping[str, Any]) -> int:
    """Experts per layer, 0 in a dense model; transformers 4 and 5 use different keys."""
    return int(model.get("num_experts") or model.get("num_local_experts") or 0)


def _must_divide(key: str, value: int, number: int, name: str) -> None:
    if number % value:
        legal = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0 and n <= 64)
        raise ConfigError(f"trainer.{key} = {value} does not divide the model's {name} = {number}; legal: {legal}")
