"""Log-probabilities of given tokens from hidden states, without ever holding a [N, V] matrix of logits.

Input: hidden states and the head's weight, or this rank's rows of it.  Output: log-probabilities (and entropies),
differentiable once.  Logits are float32 products, whatever the dtype of the model.
Legend: N tokens, H hidden size, V vocabulary (rows that this rank holds), C tokens of a chunk.

Memory beyond inputs and results, in float32 numbers, and a few for every token on top:
    forward             C·V, with entropy C·V + ⌈C/8⌉·V
    backward, float32   C·V + V·H          (V·H is the gradient itself)
    backward, bfloat16  ¼·C·V + 1½·V·H     (the gradient in both dtypes)
    with the gradient of entropy, backward has ⅛ more of its C·V
With capped logits, backward has another C·V (⅛ of it in bfloat16).
Soft targets, k tokens of a row with weights, add a product of k numbers a token, and in bfloat16 ⅛·C·V to backward.
On CUDA logits are read by kernels of our own, logit_kernels.py, where Triton works: C·V suffices for everything.
On CPU a bfloat16 model adds V·H to both: a float32 copy of the head, since only CUDA multiplies into a wider type.
The cost is one more multiplication by the head in backward: logits are recomputed, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """A model's answer on the wanted tokens of a row, float32 [T] each, 0 elsewhere."""

    logprobs: Tensor
    entropy: Tensor
    entropy_sum: Tensor  # without gradient
    soft: Tensor | None = None  # of the soft targets; None: there are none

    @classmethod
    def scattered(
        cls, logprobs: Tensor, entropy: Tensor | None, soft: Tensor | None, places: Tensor, num_tokens: int
    ) -> FoundTokens:
        """Put values, [N] each, at `places`."""
        row = logprobs.new_zeros(num_tokens)
        found, of_soft = (None if each is None else row.index_copy(0, places, each) for each in (entropy, soft))
        total = row.new_zeros(()) if entropy is None else entropy.detach().sum()
        return cls(row.index_copy(0, places, logprobs), row if found is None else found, total, of_soft)


def token_row(
    microbatch: PackedMicrobatch,
    entropy: Tensor,
    *,
    proximal: Tensor | None,
    reference: Tensor | None = None,
    soft: Tensor | None = None,
) -> TokenRow:
    """Make the input of a loss, float32 [T] on the device of `entropy`; see TokenRow, and TrainerBackend.step.

    soft: log-probabilities of the soft targets, 0 off the loss mask.
    """
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
        teacher_divergence=None if soft is None else on_device(_negative_entropies(microbatch), device) - soft,
    )


def _negative_entropies(microbatch: PackedMicrobatch) -> NDArray[np.float32]:
    """Σ p · log p over the teacher's most likely tokens, float32 [T], 0 off the loss mask."""
    assert microbatch.teacher_top_logprobs is not None
    logprobs = microbatch.teacher_top_logprobs.astype(np.float64)
    terms = np.where(logprobs > LOWEST_LOGPROB, np.exp(logprobs) * logprobs, 0.0)
    found = np.zeros(len(microbatch.token_ids), np.float32)
    if num_tokens := np.count_nonzero(microbatch.loss_mask):
        found[microbatch.loss_mask] = terms.reshape(num_tokens, -1).sum(1)
    return found


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


def token_values(hidden: Tensor, head_weight: Tensor, *_: Tensor, **__: object) -> tuple[Tensor, Tensor, None]:
    """Values float32 [N] of hidden [N, H] by head_weight [1, H], in float32, entropies of 0, and no soft targets.

    Takes the arguments of head_logprobs, and ignores all but the first two.
    """
    values = (hidden.float() @ head_weight.float().t())[:, 0]
    return values, torch.zeros_like(values), None


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


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """Tokens of each row with weights: a teacher's most likely ones in a place, and their probabilities."""

    ids: Tensor  # int64 [N, k] different ones in a row; those beyond the vocabulary add nothing
    weights: Tensor  # float32 [N, k] their sum need not be 1

    @classmethod
    def of(
        cls, microbatch: PackedMicrobatch, wanted: NDArray[np.bool_], device: torch.device, *, places: Any = slice(None)
    ) -> SoftTargets | None:
        """Return those of the wanted tokens, or of `places` among them; None unless they are the loss tokens."""
        ids, logprobs = microbatch.teacher_top_ids, microbatch.teacher_top_logprobs
        if ids is None or logprobs is None or not np.array_equal(wanted, microbatch.loss_mask):
            return None
        num_tokens = int(np.count_nonzero(wanted))
        shape = (num_tokens, len(ids) // num_tokens if num_tokens else 0)
        return cls(
            on_device(ids.reshape(shape)[places].astype(np.int64), device),
            on_device(np.exp(logprobs.reshape(shape)[places], dtype=np.float32), device),
        )

    def logits_of(self, logits: Tensor, rows: slice, first: int, temperature: float) -> Tensor:
        """Σ weight · logit / temperature of rows over those whose logits are here [C, V], from token `first` on."""
        is_here, places = _find(self.ids[rows] - first, logits.shape[1])
        products = self.weights[rows] * logits.gather(1, places).div(temperature)
        return products.masked_fill_(~is_here | (self.weights[rows] == 0), 0.0).sum(1)

    def add_to_gradient(
        self, gradient: Tensor, rows: slice, first: int, targets: Tensor, factors: Tensor, sums: Tensor
    ) -> Tensor:
        """Correct a gradient [C, V], float32, whose rows were multiplied by row_factors + factors · sums, in place.

        factors [C] of the soft log-probabilities; sums [C] of all weights; targets [C] count from `first`.
        """
        is_here, places = _find(targets[:, None], gradient.shape[1])
        gradient.scatter_add_(1, places, (is_here * (factors * sums)[:, None]).neg_())
        is_here, places = _find(self.ids[rows] - first, gradient.shape[1])
        return gradient.scatter_add_(1, places, is_here * self.weights[rows] * factors[:, None])


def chunked_logprobs(hidden: Tensor, head_weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """Log-probabilities and entropies of head_logprobs."""
    logprobs, entropy, _ = head_logprobs(hidden, head_weight, targets, **options)
    return logprobs, entropy


def head_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    want_entropy: bool = False,
    has_entropy_gradient: bool = False,
    shard: VocabularyShard | None = None,
    soft: SoftTargets | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Natural log of softmax(hidden · head_weightᵀ / temperature) at `targets`, and the entropy if wanted.

    hidden [N, H] and head_weight [V, H] of one dtype, targets int64 [N] in [0, V).
    Returns float32 [N], float32 [N] or None, and with soft targets Σ_k weight · log-probability, float32 [N], which is
    differentiable.  The softmax is float32 whatever the dtype; the head's gradient is summed over chunks in float32.
    has_entropy_gradient: entropy is differentiable, too.  N = 0 is allowed.  A target outside [0, V) gives nan.
    softcap: logits z are softcap · tanh(z / softcap) before they are divided by the temperature (Gemma 2).

    With `shard`, all ranks of its group call with the same hidden and targets (tokens of the whole vocabulary), each
    with its own rows of the head.  Results are the same bits on all ranks; forward reduces 5·N numbers (4·N without
    entropy, N more for soft targets), backward nothing.  So THE GRADIENT OF HIDDEN IS A PARTIAL SUM, over this rank's
    tokens: hidden must come out of a function whose backward adds it up over the group.
    """
    logprobs, entropy, of_soft = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden,
        head_weight,
        targets,
        temperature,
        chunk_tokens,
        want_entropy,
        has_entropy_gradient,
        shard,
        soft,
        softcap,
    )
    return logprobs, entropy if want_entropy else None, None if soft is None else of_soft


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps log Σ exp of every row, so that backward can work on any part of the vocabulary alone.

    With logits z, p = softmax(z), and H the entropy over the whole vocabulary, known after forward:
        ∂ log p_target / ∂z_j = [j = target] − p_j            ∂H / ∂z_j = −p_j · (log p_j + H)
        ∂ Σ_k w_k · log p_k / ∂z_j = w_j − p_j · Σ_k w_k
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
        soft: SoftTargets | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, first = _own_rows(head_weight, shard)
        maximum = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        sums = maximum.new_zeros(WEIGHTED + want_entropy, len(hidden))
        of_soft = maximum.new_zeros(0 if soft is None else len(hidden))
        for rows in _slices(len(hidden), chunk_tokens):
            # Logits live inside the call: a name for them here would keep them beside the next chunk's.
            found = _row_statistics(
                _operand(hidden[rows]),
                head,
                targets[rows] - first,
                temperature,
                maximum[rows],
                sums[:, rows],
                None if soft is None else partial(soft.logits_of, rows=rows, first=first, temperature=temperature),
                softcap,
            )
            if found is not None:
                of_soft[rows] = found
        if shard is not None and len(maximum):
            maximum = _reduce(maximum, sums, shard.group)
            if soft is not None:
                dist.all_reduce(of_soft, group=shard.group)
        log_sum = sums[EXP].log()
        log_partition = maximum + log_sum
        logprobs = (sums[TARGET] - log_partition).masked_fill_(sums[HOLDERS] == 0, torch.nan)
        entropy = log_sum - sums[WEIGHTED] / sums[EXP] if want_entropy else logprobs.new_empty(0)
        if soft is not None:
            of_soft -= soft.weights.sum(1) * log_partition
        ctx.save_for_backward(hidden, head_weight, targets, log_partition, entropy if has_entropy_gradient else None)
        ctx.temperature, ctx.chunk_tokens, ctx.shard, ctx.soft = temperature, chunk_tokens, shard, soft
        ctx.softcap = softcap
        constant = [] if has_entropy_gradient else [entropy]
        ctx.mark_non_differentiable(*constant, *([of_soft] if soft is None else []))
        return logprobs, entropy, of_soft

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, targets, log_partition, entropy = ctx.saved_tensors
        head, first = _own_rows(head_weight, ctx.shard)
        row_factors, soft = gradients[0] / ctx.temperature, ctx.soft
        if soft is not None:
            soft_factors, soft_sums = gradients[2] / ctx.temperature, soft.weights.sum(1)
            row_factors = row_factors + soft_factors * soft_sums
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
                    None if soft is None else partial(
                        soft.add_to_gradient, rows=rows, first=first + tokens.start,
                        factors=soft_factors[rows], sums=soft_sums[rows],
                    ),
                    ctx.softcap,
                )  # fmt: skip
                _add_product(partial_sum, logit_gradient, head[tokens])
                if head_gradient is not None:
                    _add_product(head_gradient[tokens], logit_gradient.t(), states)
                del logit_gradient  # before the next block's is made
            hidden_gradient[rows] = partial_sum
        of_head = None if head_gradient is None else head_gradient.to(head_weight.dtype)
        return hidden_gradient, of_head, *[None] * 8


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
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    maximum: Tensor,
    sums: Tensor,
    of_soft: Callable[[Tensor], Tensor] | None = None,
    softcap: float | None = None,
) -> Tensor | None:
    """Write the maximum m [C] and the sums [3 or 4, C] of a chunk; return what of_soft makes of its logits.

    EXP: Σ exp(z − m); TARGET: the target's logit, or 0; HOLDERS: whether it is here; WEIGHTED: Σ (z − m)·exp(z − m).
    `targets` count from the first row of `head`.
    """
    if not len(head):
        maximum.fill_(LOWEST)
        return None
    logits = _capped(_product(hidden, head.t()), softcap)
    found = None if of_soft is None else of_soft(logits)
    if (kernels := kernels_for("logit_kernels", logits)) is not None:
        want_entropy = len(sums) > WEIGHTED
        maximum[:], sums[:] = kernels.logit_statistics(logits, targets, temperature, want_entropy=want_entropy)
        return found
    logits.div_(temperature)
    is_here, places = _find(targets[:, None], len(head))
    sums[TARGET] = logits.gather(1, places).masked_fill_(~is_here, 0.0)[:, 0]
    sums[HOLDERS] = is_here[:, 0]
    # The bound is for a shard on which a row has nothing but −inf: −inf − −inf would be nan.
    torch.clamp(logits.amax(1), min=LOWEST, out=maximum)
    shifted = logits.sub_(maximum[:, None])
    if len(sums) == WEIGHTED:
        sums[EXP] = shifted.exp_().sum(1)
        return found
    for block in _slices(len(shifted), -(-len(shifted) // NUM_BLOCKS)):
        sums[EXP, block], sums[WEIGHTED, block] = _exponential_sums(shifted[block])
    return found


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Write softcap · tanh(logits / softcap) over logits."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _exponential_sums(shifted: Tensor) -> tuple[Tensor, Tensor]:
    """Σ exp(z) and Σ z·exp(z) of every row; writes over `shifted`."""
    exponentials = shifted.exp()
    exp_sum = exponentials.sum(1)
    # A logit of −inf (a token the model rules out) adds nothing, but −inf · 0 would be nan.
    return exp_sum, exponentials.mul_(shifted.clamp_(min=LOWEST)).sum(1)


def _find(targets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Mask of targets that are rows of the head, bool [C, n], and the row of each, [C, n]; for others any row."""
    return (targets >= 0) & (targets < num_rows), targets.clamp(0, num_rows - 1)


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
    add_soft: Callable[..., Tensor] | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Gradient of the logits over the rows of `head`, [C, V] in the dtype of the operands.

    (onehot − softmax) · row_factors.  entropy: (entropies, factors), [C] each; adds factor · gradient of the entropy.
    add_soft: SoftTargets.add_to_gradient, before anything is rounded; softcap: the product's gradient is this one's
    times 1 − tanh², for which there is another [C, V].
    """
    logits = _capped(_product(hidden, head.t()), softcap)
    slope = None if softcap is None else logits.div(softcap).square_().neg_().add_(1)
    if len(head) and (kernels := kernels_for("logit_kernels", logits)) is not None:
        dtype = hidden.dtype if add_soft is None and slope is None else torch.float32
        gradient: Tensor = kernels.logit_gradient(
            logits, targets, temperature, log_partition, row_factors, dtype, entropy
        )
    else:
        is_here, places = _find(targets[:, None], len(head))
        logits.div_(temperature).sub_(log_partition[:, None])
        if entropy is None:
            gradient = logits.exp_().neg_()
            gradient.scatter_add_(1, places, is_here.float()).mul_(row_factors[:, None])
        else:
            for rows in _slices(len(logits), -(-len(logits) // NUM_BLOCKS)):
                _subtract_both(logits[rows], row_factors[rows], entropy[0][rows], entropy[1][rows])
            gradient = logits.scatter_add_(1, places, is_here * row_factors[:, None])
    if add_soft is not None and len(head):
        add_soft(gradient, targets=targets)
    return (gradient if slope is None else gradient.mul_(slope)).to(hidden.dtype)


def _subtract_both(log_probabilities: Tensor, row_factors: Tensor, entropy: Tensor, entropy_factors: Tensor) -> None:
    """Write −p · (row_factors + (log p + H) · entropy_factors) over log p, [rows, V]."""
    probabilities = log_probabilities.exp()
    slopes = log_probabilities.clamp_(min=LOWEST_LOGPROB).add_(entropy[:, None]).mul_(entropy_factors[:, None])
    slopes.add_(row_factors[:, None]).mul_(probabilities).neg_()
