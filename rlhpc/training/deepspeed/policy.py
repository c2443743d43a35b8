"""A causal language model as one module whose parameters may be sharded over ranks.

Input: a packed row and the tokens wanted of it.  Output: their log-probabilities or values.  ZeRO-3 gathers a parameter
when the module that owns it is called, so the head is a module of its own here, tied to the embedding or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rlhpc.training.hf_model import CausalLM
from rlhpc.training.packed_attention import SegmentPlan


class ZeroPolicy(nn.Module):
    """Trunk and head of a CausalLM, called as a whole."""

    def __init__(self, model: CausalLM, *, temperature: float, chunk_tokens: int) -> None:
        """Share the model's parameters; its module is not to be called any more."""
        super().__init__()
        assert isinstance(model.trunk, nn.Module)
        self.trunk = model.trunk
        self.head = _Head(model.head, model.head_weight, temperature, chunk_tokens)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        segments: SegmentPlan,
        tokens: Tensor,
        want_entropy: bool,
        has_entropy_gradient: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the tokens at the places `tokens` [N], and their entropies if wanted, float32 [N].

        temperature: None for that of the run.

        token_ids, position_ids and tokens int64; tokens may be empty, but never holds the first place of a row.
        """
        # use_cache: with a cache, HF believes that the row is one sequence.
        output: Any = self.trunk(
            input_ids=token_ids[None], position_ids=position_ids[None], segments=segments, use_cache=False
        )
        # The state before a token predicts it; only wanted tokens pass through the head.
        before = output.last_hidden_state[0].index_select(0, tokens - 1)
        targets = token_ids.index_select(0, tokens)
        logprobs, entropy = self.head(before, targets, want_entropy, has_entropy_gradient, temperature)
        return logprobs, entropy


class _Head(nn.Module):
    def __init__(
        self, function: Callable[..., Any], weight: nn.Parameter, temperature: float, chunk_tokens: int
    ) -> None:
        super().__init__()
        self.weight, self._function = weight, function
        self._temperature, self._chunk_tokens = temperature, chunk_tokens

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        want_entropy: bool,
        has_entropy_gradient: bool,
        temperature: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = self._function(
            hidden,
            self.weight,
            targets,
            temperature=self._temperature if temperature is None else temperature,
            chunk_tokens=self._chunk_tokens,
            want_entropy=want_entropy,
            has_entropy_gradient=has_entropy_gradient,
        )
        return result
