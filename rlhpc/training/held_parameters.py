"""A frozen copy of a model's parameters (the reference), swapped with them while it computes.

Input: this rank's tensors, as its backend keeps them.  Output: the same tensors, holding the copy's numbers meanwhile.
Guarantees: extra memory besides model and copy is one tensor of the largest size; it is allocated before anything
changes, so that swapping back cannot run out of memory; after swapping back every bit is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from rlhpc.training.pinned_memory import pin, unpin

ALIGNMENT = 512  # bytes at which a tensor begins in the copy


class HeldParameters:
    """Nothing at first, then copies of all tensors in one buffer."""

    def __init__(
        self,
        live: Callable[[], Sequence[Tensor]],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """live: the tensors, each once, always in the same order.  around: context in which to write to them."""
        self._live, self._around = live, around
        self._held: list[Tensor] = []
        self._pinned: int | None = None  # address

    @torch.no_grad()
    def hold(self, memory: str) -> None:
        """Copy the parameters as they are now; memory: "device" (theirs) or "host".  Replaces an earlier copy."""
        live = self._live()
        device = torch.device("cpu") if memory == "host" else live[0].device
        if not self._held or self._held[0].device != device:
            self._allocate(live, device)
        for tensor, held in zip(live, self._held, strict=True):
            held.copy_(tensor)

    def _allocate(self, live: Sequence[Tensor], device: torch.device) -> None:
        self.release()
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in live]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._held = [_like(tensor, part) for tensor, part in zip(live, buffer.split_with_sizes(sizes), strict=True)]
        if device.type == "cpu" and live[0].is_cuda:
            self._pinned = pin(buffer)

    @contextmanager
    def in_place(self, is_wanted: bool = True) -> Iterator[None]:
        """Swap the copy in if that is wanted, and out again at the end, whatever is raised."""
        if not is_wanted:
            yield
            return
        assert self._held, "no reference is held"
        live = self._live()
        largest = max(live, key=lambda tensor: tensor.nbytes)
        spare = torch.empty(largest.nbytes, dtype=torch.uint8, device=largest.device)
        self._exchange(spare)
        try:
            yield
        finally:
            self._exchange(spare)

    @torch.no_grad()
    def _exchange(self, spare: Tensor) -> None:
        """The copies run in order on the device's stream; the host waits for none of them."""
        with self._around():
            for tensor, held in zip(self._live(), self._held, strict=True):
                between = _like(tensor, spare).copy_(tensor)
                tensor.copy_(held, non_blocking=True)
                held.copy_(between, non_blocking=True)

    def release(self) -> None:
        """Forget the copy.  Idempotent."""
        if self._pinned is not None:
            torch.cuda.synchronize()
            unpin(self._pinned)
        self._held, self._pinned = [], None


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """The beginning of uint8 memory, as a tensor of the same dtype and shape."""
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
