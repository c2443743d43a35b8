"""Copies of a row to the GPU do not wait for what the GPU is doing, or the host would fall behind at every row.

The meta device stands for a GPU: torch dispatches the same copies, and nothing else is needed of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.contracts import TokenRow
from rlhpc.training.logprob import all_but_first, on_device, token_row
from rlhpc.training.megatron.attention import LocalRow, RowPlan, row_order
from rlhpc.training.packed_attention import SegmentPlan
from tests.unit.training.packed_rows import draw_samples, pack_row

GPU = torch.device("meta")
CPU = torch.device("cpu")
BORDERS = np.array([0, 5, 16], dtype=np.int32)
ROW = pack_row(draw_samples([5, 11, 4], seed=1))


class Copies(TorchDispatchMode):
    """Every copy from host memory to the device: whether its source is pinned, and whether it waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []
        self._pinned: set[int] = set()

        def pin(tensor: Tensor) -> Tensor:
            self._pinned.add(tensor.data_ptr())
            return tensor

        monkeypatch.setattr(Tensor, "pin_memory", pin)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == GPU and args[0].device == CPU:
            self.seen.append((args[0].data_ptr() in self._pinned, bool(kwargs.get("non_blocking"))))
        return func(*args, **kwargs)


def loss_on_gpu() -> None:
    def loss(current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        return current.sum(), {}

    current = torch.zeros(len(ROW.token_ids), device=GPU)
    loss(current, token_row(ROW, current, proximal=None))


def padded_attention() -> None:
    plan = SegmentPlan.of(BORDERS, GPU)
    assert plan.gather.device == plan.scatter.device == GPU


def megatron_row() -> None:
    layout = ParallelLayout(1, 2, 1, 1, 1, 1, is_sequence_parallel=False)
    LocalRow.of(ROW, all_but_first(ROW), layout, 0, GPU)


PATHS: dict[str, Callable[[], object]] = {
    "loss": loss_on_gpu,
    "attention": padded_attention,
    "megatron's row": megatron_row,
    "one context rank": lambda: RowPlan.of(BORDERS, 1, 0, GPU),
    "two context ranks": lambda: RowPlan.of(BORDERS, 2, 1, GPU),
    "order": lambda: row_order(16, 2, GPU),
}


@pytest.mark.parametrize("path", PATHS)
def test_no_copy_of_a_row_to_the_gpu_waits_for_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Copies(monkeypatch) as copies:
        PATHS[path]()
    assert copies.seen
    assert set(copies.seen) == {(True, True)}, "(pinned, does not wait)"


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.bool_])
def test_what_is_copied_is_what_was_there(dtype: type[np.generic]) -> None:
    array = np.arange(7).astype(dtype)
    array.flags.writeable = False  # as those of a message are
    copied = on_device(array, CPU)
    assert copied.numpy().dtype == array.dtype
    np.testing.assert_array_equal(copied.numpy(), array)
    copied.zero_()
    assert array.any()
