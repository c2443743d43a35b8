"""Log-probabilities of given tokens from hidden states, without ever holding a [N, V] matrix of logits.

Eats hidden states and the head's weight, makes log-probabilities (and entropies), differentiable once.
Legend: N tokens, H hidden size, V vocabulary, C tokens of a chunk.

Memory beyond inputs and results, in float32 numbers, whatever N is:
    forward   2·C·V            (1.5·C·V without entropy)
    backward  1.5·C·V + 2·V·H  (one V·H is the gradient itself)
The price is one more multiplication by the head in backward: logits are computed anew, chunk by chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def chunked_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Natural log of softmax(hidden · head_weightᵀ / temperature) at `targets`, and the entropy if wanted.

    hidden [N, H] and head_weight [V, H] of one dtype, targets int64 [N] in [0, V).
    Returns float32 [N] and float32 [N] or None.  The softmax is float32 whatever the dtype; the head's gradient is
    summed over chunks in float32.  Entropy carries no gradient.  N = 0 is allowed.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, targets, temperature, chunk_tokens, want_entropy
    )
    return logprobs, entropy if want_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    """A head that is split over the vocabulary would reduce only the row statistics of forward.

    These are maximum, sum of exponentials, target logit and entropy sum: see _row_statistics.  Backward needs nothing
    from the other shards but the sum of dL/dhidden.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        log_partition = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if want_entropy else logprobs.new_empty(0)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            # Logits live inside the call: a name for them here would keep them beside the next chunk's.
            maximum, exp_sum, target_logit, weighted_sum = _row_statistics(
                hidden[rows], head_weight, targets[rows], temperature, want_entropy
            )
            log_partition[rows] = maximum + exp_sum.log()
            logprobs[rows] = target_logit - log_partition[rows]
            if weighted_sum is not None:
                entropy[rows] = exp_sum.log() - weighted_sum / exp_sum
        ctx.save_for_backward(hidden, head_weight, targets, log_partition)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, targets, log_partition = ctx.saved_tensors
        row_factors = gradients[0] / ctx.temperature
        hidden_gradient = torch.empty_like(hidden)
        head_gradient = torch.zeros_like(head_weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            logit_gradient = _logit_gradient(
                hidden[rows], head_weight, targets[rows], ctx.temperature, log_partition[rows], row_factors[rows]
            )
            torch.mm(logit_gradient, head_weight, out=hidden_gradient[rows])
            _add_product(head_gradient, logit_gradient.t(), hidden[rows])
            del logit_gradient  # for the same reason
        return hidden_gradient, head_gradient.to(head_weight.dtype), None, None, None, None


def _scaled_logits(hidden: Tensor, head_weight: Tensor, temperature: float) -> Tensor:
    """Fresh float32 [C, V], free to be written over."""
    return functional.linear(hidden, head_weight).float().div_(temperature)


def _row_statistics(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Maximum m, Σ exp(z − m), target logit, and Σ (z − m)·exp(z − m) if wanted, each float32 [C]."""
    logits = _scaled_logits(hidden, head_weight, temperature)
    target_logit = logits.gather(1, targets[:, None])[:, 0]
    maximum = logits.amax(1)
    shifted = logits.sub_(maximum[:, None])
    if not want_entropy:
        return maximum, shifted.exp_().sum(1), target_logit, None
    exponentials = shifted.exp()
    exp_sum = exponentials.sum(1)
    # A logit of −inf (a token the model rules out) adds nothing, but −inf · 0 would be nan.
    weighted_sum = exponentials.mul_(shifted.clamp_(min=torch.finfo(torch.float32).min)).sum(1)
    return maximum, exp_sum, target_logit, weighted_sum


def _logit_gradient(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    log_partition: Tensor,
    row_factors: Tensor,
) -> Tensor:
    """(onehot − softmax) · row_factors, [C, V] in the dtype of hidden."""
    gradient = _scaled_logits(hidden, head_weight, temperature).sub_(log_partition[:, None]).exp_().neg_()
    gradient.scatter_add_(1, targets[:, None], torch.ones_like(row_factors[:, None]))
    return gradient.mul_(row_factors[:, None]).to(hidden.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the float32 total."""
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
