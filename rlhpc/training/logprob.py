"""Log-probabilities of given tokens from hidden states, without ever holding a [N, V] matrix of logits.

Input: hidden states and the head's weight, or this rank's rows of it.  Output: log-probabilities (and entropies),
differentiable once.  Logits are float32 products, whatever the dtype of the model.
Legend: N tokens, H hidden size, V vocabulary (rows that this rank holds), C tokens of a chunk.

Memory beyond inputs and results, in float32 numbers, and a few for every token on top:
    forward             C·V, with entropy C·V + ⌈C/8⌉·V
    backward, float32   C·V + V·H          (V·H is the gradient itself)
    backward, bfloat16  ¼·C·V + 1½·V·H     (the gradient in both dtypes)
    with the gradient of entropy, backward has ⅛ more of its C·V
On CUDA logits are read by kernels of our own, logit_kernels.py, where Triton works: C·V suffices for everything.
On CPU a bfloat16 model adds V·H to both: a float32 copy of the head, since only CUDA multiplies into a wider type.
The cost is one more multiplication by the head in backward: logits are recomputed, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.protocol.contracts import TokenRow
from rlhpc.protocol.types import Int32, PackedMicrobatch
from rlhpc.training.triton_kernels import kernels_for

# ---------------------------------------------------------------------------------------------------------- metric sums
#
# Metrics of a step as sums over tokens, accumulated over micro-batches and ranks in float64.


def sums_over_ranks(
    figures: Mapping[str, float], device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Sum each figure over the ranks of `group`, by default of all, in float64.  A collective."""
    sums = MetricSums()
    sums.add({name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()})
    return sums.over_ranks(device, group)


class MetricSums:
    """Scalars of one step by name; every rank has the same names and at least one micro-batch, a dummy if need be."""

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Tensor]] = []

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add one micro-batch's metrics, detached scalars; does not wait for the device."""
        self._rows.append(metrics)

    def over_ranks(self, device: torch.device, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Sums over micro-batches and ranks of `group`, by default of all.  A collective, where there is a group."""
        names = sorted(self._rows[0])
        table = torch.stack([torch.stack([row[name].detach().double() for name in names]) for row in self._rows])
        totals = table.sum(0).to(device)
        if dist.is_initialized():
            dist.all_reduce(totals, group=group)
        return dict(zip(names, totals.tolist(), strict=True))


# ---------------------------------------------------------------------------------------------------------- row tensors
#
# A packed micro-batch as tensors, and its predictable tokens: the input of every backend's loss.
#
# Input: PackedMicrobatch.  Output: tensors on a device.  T: tokens of the row.


def on_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to `device`, in the order of its current stream; the host does not wait for it.

    Through page-locked memory: a copy from other memory waits until the GPU has done everything before it, and the host
    could not prepare the next row meanwhile.  torch keeps the memory until the copy has ended.  The array itself is
    never shared: arrays of a message are read-only, which torch cannot express for tensors.
    """
    own = torch.from_numpy(array.copy())
    return own if device.type == "cpu" else own.pin_memory().to(device, non_blocking=True)


def all_but_first(microbatch: PackedMicrobatch) -> NDArray[np.bool_]:
    """bool [T]: tokens that have others before them in their segment."""
    wanted = np.ones(len(microbatch.token_ids), dtype=bool)
    wanted[microbatch.cu_seqlens[:-1]] = False
    return wanted


def plain_row(token_ids: Int32) -> PackedMicrobatch:
    """A row of one sequence without loss tokens."""
    length = len(token_ids)
    return PackedMicrobatch(
        token_ids=token_ids,
        position_ids=np.arange(length, dtype=np.int32),
        cu_seqlens=np.array([0, length], np.int32),
        loss_mask=np.zeros(length, np.bool_),
        behaviour_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        loss_weights=np.ones(1, np.float32),
    )


def scattered(
    logprobs: Tensor, entropy: Tensor | None, places: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T] with these values, [N] each, at `places` and 0 elsewhere; and the sum of entropies, detached."""
    row = logprobs.new_zeros(num_tokens)
    if entropy is None:
        return row.index_copy(0, places, logprobs), row, row.new_zeros(())
    return row.index_copy(0, places, logprobs), row.index_copy(0, places, entropy), entropy.detach().sum()


def token_row(
    microbatch: PackedMicrobatch, entropy: Tensor, *, proximal: Tensor | None, reference: Tensor | None = None
) -> TokenRow:
    """Make the input of a loss, float32 [T] on the device of `entropy`; see TokenRow, and TrainerBackend.step."""
    device = entropy.device
    loss_mask = on_device(microbatch.loss_mask, device)
    behaviour = on_device(microbatch.behaviour_logprobs, device)
    sequence = np.repeat(np.arange(len(microbatch.loss_weights)), np.diff(microbatch.cu_seqlens))
    return TokenRow(
        behaviour=behaviour,
        # current is 0 off the loss mask, so these must be too: exp(0 − (−100)) is inf, and inf · 0 is nan.
        proximal=behaviour if proximal is None else torch.where(loss_mask, proximal.to(device), 0.0),
        reference=behaviour if reference is None else torch.where(loss_mask, reference.to(device), 0.0),
        entropy=entropy,
        advantages=on_device(microbatch.advantages, device),
        loss_mask=loss_mask,
        versions=on_device(microbatch.versions, device),
        weights=on_device(microbatch.loss_weights[sequence], device),
        sequence=on_device(sequence, device),
        num_sequences=len(microbatch.loss_weights),
    )


def of_row(rows: Sequence[Tensor] | None, index: int) -> Tensor | None:
    """The row at this index; None if there are no rows."""
    return None if rows is None else rows[index]


# ------------------------------------------------------------------------------------------------------------ step vote
#
# A vote of all ranks on whether to apply a step: if one rank's loss or norm is not finite, all skip it.


def all_ranks_agree(answer: bool, device: torch.device) -> bool:
    """True if every rank votes True.  A collective of the default process group; without one, the vote itself.

    Ranks must not decide alone: one that steps while another skips trains a different model from then on.
    """
    if not dist.is_initialized():
        return answer
    vote = torch.tensor(int(answer), dtype=torch.int32, device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())


# ----------------------------------------------------------------------------------------------------------- value head
#
# The critic's value head: one output in place of the language model's head.
#
# Input: hidden states and the head's weight.  Output: a value per token, in the place of its log-probability.  Its
# weight begins as zeros, so that an untrained critic returns 0 everywhere; its name is that of HF's heads for
# classification with one label.

VALUE_HEAD = "score.weight"


def token_values(hidden: Tensor, head_weight: Tensor, *_: Tensor, **__: object) -> tuple[Tensor, Tensor]:
    """Values float32 [N] of hidden [N, H] by head_weight [1, H], in float32, and entropies of 0.

    Takes the arguments of chunked_logprobs, and ignores all but the first two.
    """
    values = (hidden.float() @ head_weight.float().t())[:, 0]
    return values, torch.zeros_like(values)


# -------------------------------------------------------------------------------------------------------------- logprob

NUM_BLOCKS = 8  # a second buffer beside a chunk's logits holds only a block of them
LOWEST = torch.finfo(torch.float32).min
LOWEST_LOGPROB = -128.0  # below it p is 0 in float32: clamped here, log p · p is 0, not inf · 0
EXP, TARGET, HOLDERS, WEIGHTED = range(4)  # sums of a row over the vocabulary, see _row_statistics; the last if wanted


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The rows of the head that this rank of `group` holds: its row i is token first + i.

    Rows from num_tokens on are padding without a token: they add nothing to any sum and get gradient zero.
    num_tokens may be 0.
    """

    group: dist.ProcessGroup
    first: int
    num_tokens: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, rows_per_rank: int, vocabulary: int) -> VocabularyShard:
        """Rows in order of rank, `rows_per_rank` on each; padding comes after token vocabulary − 1."""
        assert rows_per_rank * group.size() >= vocabulary, f"{group.size()} × {rows_per_rank} rows < {vocabulary}"
        first = group.rank() * rows_per_rank
        return cls(group, first, num_tokens=min(max(vocabulary - first, 0), rows_per_rank))


def chunked_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    want_entropy: bool = False,
    has_entropy_gradient: bool = False,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Natural log of softmax(hidden · head_weightᵀ / temperature) at `targets`, and the entropy if wanted.

    hidden [N, H] and head_weight [V, H] of one dtype, targets int64 [N] in [0, V).
    Returns float32 [N] and float32 [N] or None.  The softmax is float32 whatever the dtype; the head's gradient is
    summed over chunks in float32.  has_entropy_gradient: entropy is differentiable, too.  N = 0 is allowed.  A target
    outside [0, V) gives nan.

    With `shard`, all ranks of its group call with the same hidden and targets (tokens of the whole vocabulary), each
    with its own rows of the head.  Results are the same bits on all ranks; forward reduces 5·N numbers (4·N without
    entropy), backward nothing.  So THE GRADIENT OF HIDDEN IS A PARTIAL SUM, over this rank's tokens: hidden must come
    out of a function whose backward adds it up over the group.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, targets, temperature, chunk_tokens, want_entropy, has_entropy_gradient, shard
    )
    return logprobs, entropy if want_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps log Σ exp of every row, so that backward can work on any part of the vocabulary alone.

    With logits z, p = softmax(z), and H the entropy over the whole vocabulary, known after forward:
        ∂ log p_target / ∂z_j = [j = target] − p_j            ∂H / ∂z_j = −p_j · (log p_j + H)
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
        has_entropy_gradient: bool,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        head, first = _own_rows(head_weight, shard)
        maximum = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        sums = maximum.new_zeros(WEIGHTED + want_entropy, len(hidden))
        for rows in _slices(len(hidden), chunk_tokens):
            # Logits live inside the call: a name for them here would keep them beside the next chunk's.
            _row_statistics(
                _operand(hidden[rows]), head, targets[rows] - first, temperature, maximum[rows], sums[:, rows]
            )
        if shard is not None and len(maximum):
            maximum = _reduce(maximum, sums, shard.group)
        log_sum = sums[EXP].log()
        log_partition = maximum + log_sum
        logprobs = (sums[TARGET] - log_partition).masked_fill_(sums[HOLDERS] == 0, torch.nan)
        entropy = log_sum - sums[WEIGHTED] / sums[EXP] if want_entropy else logprobs.new_empty(0)
        ctx.save_for_backward(hidden, head_weight, targets, log_partition, entropy if has_entropy_gradient else None)
        ctx.temperature, ctx.chunk_tokens, ctx.shard = temperature, chunk_tokens, shard
        if not has_entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, targets, log_partition, entropy = ctx.saved_tensors
        head, first = _own_rows(head_weight, ctx.shard)
        row_factors = gradients[0] / ctx.temperature
        entropy_factors = None if entropy is None else gradients[1] / ctx.temperature
        hidden_gradient = torch.empty_like(hidden)
        # A frozen head has no gradient, nor memory for one.
        head_gradient = torch.zeros_like(head_weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        # In float32 a product is added to its sum in place; else it is a second buffer, and so is the rounded factor.
        num_blocks = 1 if head_weight.dtype == torch.float32 else NUM_BLOCKS
        for rows in _slices(len(hidden), ctx.chunk_tokens):
            states = _operand(hidden[rows])
            partial_sum = torch.zeros_like(states, dtype=torch.float32)
            for tokens in _slices(len(head), -(-len(head) // num_blocks)):
                logit_gradient = _logit_gradient(
                    states,
                    head[tokens],
                    targets[rows] - (first + tokens.start),
                    ctx.temperature,
                    log_partition[rows],
                    row_factors[rows],
                    None if entropy_factors is None else (entropy[rows], entropy_factors[rows]),
                )
                _add_product(partial_sum, logit_gradient, head[tokens])
                if head_gradient is not None:
                    _add_product(head_gradient[tokens], logit_gradient.t(), states)
                del logit_gradient  # before the next block's is made
            hidden_gradient[rows] = partial_sum
        of_head = None if head_gradient is None else head_gradient.to(head_weight.dtype)
        return hidden_gradient, of_head, *[None] * 6


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step or 1))


def _own_rows(head_weight: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, int]:
    """The rows without padding, ready to be multiplied, and the first one's token."""
    if shard is None:
        return _operand(head_weight), 0
    return _operand(head_weight[: shard.num_tokens]), shard.first


def _operand(factor: Tensor) -> Tensor:
    """The tensor itself on CUDA, which can multiply bfloat16 into float32; a float32 copy elsewhere."""
    return factor if factor.is_cuda else factor.float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Fresh left @ right in float32, never rounded to a lesser type on the way."""
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the float32 total; left and right are float32, or on CUDA."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)


def _row_statistics(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, maximum: Tensor, sums: Tensor
) -> None:
    """Write the maximum m [C] and the sums [3 or 4, C] of a chunk.

    EXP: Σ exp(z − m); TARGET: the target's logit, or 0; HOLDERS: whether it is here; WEIGHTED: Σ (z − m)·exp(z − m).
    `targets` count from the first row of `head`.
    """
    if not len(head):
        maximum.fill_(LOWEST)
        return
    logits = _product(hidden, head.t())
    if (kernels := kernels_for("logit_kernels", logits)) is not None:
        want_entropy = len(sums) > WEIGHTED
        maximum[:], sums[:] = kernels.logit_statistics(logits, targets, temperature, want_entropy=want_entropy)
        return
    logits.div_(temperature)
    is_here, places = _find(targets, len(head))
    sums[TARGET] = logits.gather(1, places)[:, 0].masked_fill_(~is_here, 0.0)
    sums[HOLDERS] = is_here
    # The bound is for a shard on which a row has nothing but −inf: −inf − −inf would be nan.
    torch.clamp(logits.amax(1), min=LOWEST, out=maximum)
    shifted = logits.sub_(maximum[:, None])
    if len(sums) == WEIGHTED:
        sums[EXP] = shifted.exp_().sum(1)
        return
    for block in _slices(len(shifted), -(-len(shifted) // NUM_BLOCKS)):
        sums[EXP, block], sums[WEIGHTED, block] = _exponential_sums(shifted[block])


def _exponential_sums(shifted: Tensor) -> tuple[Tensor, Tensor]:
    """Σ exp(z) and Σ z·exp(z) of every row; writes over `shifted`."""
    exponentials = shifted.exp()
    exp_sum = exponentials.sum(1)
    # A logit of −inf (a token the model rules out) adds nothing, but −inf · 0 would be nan.
    return exp_sum, exponentials.mul_(shifted.clamp_(min=LOWEST)).sum(1)


def _find(targets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Mask of targets that are rows of the head, bool [C], and the row of each, [C, 1]; for others any row."""
    return (targets >= 0) & (targets < num_rows), targets.clamp(0, num_rows - 1)[:, None]


def _reduce(maximum: Tensor, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the maximum over the ranks; turn `sums` into sums over all ranks, relative to that maximum."""
    highest = maximum.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = maximum - highest
    scale = shift.exp()
    sums[EXP] *= scale
    if len(sums) > WEIGHTED:
        # The scaled sum: where the shift is huge it is 0, and 0 times a finite number is 0; unscaled it could overflow.
        sums[WEIGHTED] = sums[WEIGHTED] * scale + sums[EXP] * shift
    dist.all_reduce(sums, group=group)
    return highest


def _logit_gradient(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    log_partition: Tensor,
    row_factors: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Gradient of the logits over the rows of `head`, [C, V] in the dtype of the operands.

    (onehot − softmax) · row_factors.  entropy: (entropies, factors), [C] each; adds factor · gradient of the entropy.
    """
    logits = _product(hidden, head.t())
    if len(head) and (kernels := kernels_for("logit_kernels", logits)) is not None:
        gradient: Tensor = kernels.logit_gradient(
            logits, targets, temperature, log_partition, row_factors, hidden.dtype, entropy
        )
        return gradient
    is_here, places = _find(targets, len(head))
    logits.div_(temperature).sub_(log_partition[:, None])
    if entropy is None:
        gradient = logits.exp_().neg_()
        gradient.scatter_add_(1, places, is_here[:, None].float())
        return gradient.mul_(row_factors[:, None]).to(hidden.dtype)
    for rows in _slices(len(logits), -(-len(logits) // NUM_BLOCKS)):
        _subtract_both(logits[rows], row_factors[rows], entropy[0][rows], entropy[1][rows])
    return logits.scatter_add_(1, places, (is_here * row_factors)[:, None]).to(hidden.dtype)


def _subtract_both(log_probabilities: Tensor, row_factors: Tensor, entropy: Tensor, entropy_factors: Tensor) -> None:
    """Write −p · (row_factors + (log p + H) · entropy_factors) over log p, [rows, V]."""
    probabilities = log_probabilities.exp()
    slopes = log_probabilities.clamp_(min=LOWEST_LOGPROB).add_(entropy[:, None]).mul_(entropy_factors[:, None])
    slopes.add_(row_factors[:, None]).mul_(probabilities).neg_()
