"""Micro-batches through the stages of the model, forward alone or forward and backward, by Megatron's schedules.

Input: packed micro-batches.  Output: the log-probabilities of whole rows, handed to the caller on the last pipeline
stage, and gradients summed over micro-batches and ranks in the chunks' buffers.
Guarantees: gradients are sums, never means; the loss of each micro-batch is computed exactly once on every rank of the
last stage, in order; rows that only fill up the schedule are not shown to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.parallel_layout import ParallelLayout
from rlhpc.training.megatron.local_row import LocalRow, whole_row
from rlhpc.training.megatron.model import HeadRequest
from rlhpc.types import PackedMicrobatch

# (index of the micro-batch, log-probabilities and entropies float32 [T] with 0 where not wanted)
# → the loss to differentiate, a scalar
LossCallback = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch and the tokens whose log-probabilities are wanted, bool [T]."""

    microbatch: PackedMicrobatch
    wanted: NDArray[np.bool_]


class Schedule:
    """Runs one rank's part of forward and backward."""

    def __init__(self, chunks: Sequence[Any], layout: ParallelLayout, device: torch.device) -> None:
        """chunks: wrapped in DistributedDataParallel, in the order of this stage."""
        self._chunks, self._layout, self._device = list(chunks), layout, device
        self._context_rank: int = parallel_state.get_context_parallel_rank()
        self._context_group = parallel_state.get_context_parallel_group()
        config = self._chunks[0].config
        config.finalize_model_grads_func = _finish_sums
        if self._chunks[0].ddp_config.overlap_grad_reduce:
            # Only the last micro-batch's backward may send: until then sums are incomplete.
            pauses = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]

    def forward_backward(self, work: Sequence[Work], request: HeadRequest, loss_callback: LossCallback) -> None:
        """Add the gradients of the losses that `loss_callback` returns, then sum the buffers over ranks.  A collective;
        buffers hold nothing but what accumulate has added.
        """
        self._run(work, request, loss_callback, forward_only=False)

    def accumulate(self, work: Sequence[Work], request: HeadRequest, loss_callback: LossCallback) -> None:
        """Add the gradients to the buffers and sum nothing over ranks: forward_backward follows.  A collective."""
        with self._summing_nothing():
            self._run(work, request, loss_callback, forward_only=False)

    @contextmanager
    def _summing_nothing(self) -> Iterator[None]:
        """A block in which every micro-batch's backward is one that others follow."""
        config = self._chunks[0].config
        kept = config.no_sync_func, config.finalize_model_grads_func
        # Megatron's own pause ends before the last micro-batch, and takes this one with it.
        config.no_sync_func = config.finalize_model_grads_func = None
        try:
            with ExitStack() as pauses:
                for chunk in self._chunks:
                    pauses.enter_context(chunk.no_sync())
                yield
        finally:
            config.no_sync_func, config.finalize_model_grads_func = kept

    @torch.no_grad()
    def forward(self, work: Sequence[Work], request: HeadRequest, loss_callback: LossCallback) -> None:
        """Forward alone; what `loss_callback` returns is ignored.  A collective."""
        self._run(work, request, loss_callback, forward_only=True)

    def _run(
        self, work: Sequence[Work], request: HeadRequest, loss_callback: LossCallback, *, forward_only: bool
    ) -> None:
        rows = self._filled_up(work)
        local_rows = [
            LocalRow.of(row.microbatch, row.wanted, self._layout, self._context_rank, self._device) for row in rows
        ]
        step = partial(self._step, request, partial(self._loss_of, work, request.has_entropy_gradient, loss_callback))
        iterators = [iter(enumerate(local_rows)) for _ in self._chunks]
        is_interleaved = self._layout.chunks > 1
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if is_interleaved else iterators[0],
            model=self._chunks if is_interleaved else self._chunks[0],
            num_microbatches=len(rows),
            seq_length=1,  # rows differ: every stage announces the shape of what it sends
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _filled_up(self, work: Sequence[Work]) -> list[Work]:
        """Interleaved stages want a multiple of their number; rows of one token without loss fill up the rest."""
        if self._layout.chunks == 1:
            return list(work)
        missing = -len(work) % self._layout.pipeline
        return [*work, *[Work(_one_token(), np.zeros(1, dtype=bool))] * missing]

    @staticmethod
    def _step(
        request: HeadRequest, loss_of: Callable[..., Any], rows: Iterator[tuple[int, LocalRow]], chunk: Any
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Megatron's forward_step_func: the chunk's output, and what to do with it if it is the last chunk's."""
        index, row = next(rows)
        return chunk(row, request), partial(loss_of, index)

    def _loss_of(
        self,
        work: Sequence[Work],
        has_entropy_gradient: bool,
        loss_callback: LossCallback,
        index: int,
        output: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, None]:
        """Loss, number of tokens (not used: the caller has divided already), nothing to report."""
        logprobs, entropy = output
        no_tokens = torch.zeros((), dtype=torch.int, device=self._device)
        if index >= len(work):
            return logprobs.sum() * 0.0, no_tokens, None
        num_tokens = len(work[index].wanted)
        row, entropies = (
            whole_row(part, self._layout, self._context_rank, self._context_group, num_tokens)
            for part in (logprobs, entropy if has_entropy_gradient else entropy.detach())
        )
        loss = loss_callback(index, row, entropies)
        # Earlier stages wait for a gradient, even of a loss that does not depend on the model.
        return loss if loss.requires_grad or not row.requires_grad else loss + row.sum() * 0.0, no_tokens, None


def _finish_sums(chunks: list[Any], num_tokens: Tensor | None, **keywords: Any) -> None:
    """Sum gradients over ranks; without a number of tokens Megatron does not divide."""
    finalize_model_grads(chunks, None, **keywords)


def _one_token() -> PackedMicrobatch:
    none = np.zeros(1, dtype=np.float32)
    return PackedMicrobatch(
        token_ids=np.zeros(1, dtype=np.int32),
        position_ids=np.zeros(1, dtype=np.int32),
        cu_seqlens=np.array([0, 1], dtype=np.int32),
        loss_mask=np.zeros(1, dtype=np.bool_),
        behaviour_logprobs=none,
        advantages=none,
        versions=np.full(1, -1, dtype=np.int32),
        loss_weights=np.ones(1, dtype=np.float32),
    )
