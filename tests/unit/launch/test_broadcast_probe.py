"""The measured broadcast over NCCL, on nodes with several GPUs, by torch's rule for the device of a barrier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.checks.nodes import broadcast_probe

NUM_GPUS = 4  # of each node


class Nccl:
    """Takes down the GPU of each collective; a barrier's is chosen as the docstring of torch's barrier has it."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank = rank
        self.used: list[int] = []
        for name in ("init_process_group", "destroy_process_group"):
            monkeypatch.setattr(dist, name, lambda *args, **options: None)
        for name in ("barrier", "broadcast"):
            monkeypatch.setattr(dist, name, getattr(self, name))

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: list[int] | None = None) -> None:
        first = self.used[0] if self.used else self._rank % NUM_GPUS
        self.used.append(device_ids[0] if device_ids else first)

    def broadcast(self, buffer: _Buffer, source: int) -> None:
        self.used.append(buffer.device.index)


class _Buffer:
    def __init__(self, num_bytes: int, *, dtype: torch.dtype, device: str) -> None:
        self.device = torch.device(device)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_probe_of_nccl_meets_on_the_gpu_that_it_broadcasts_from(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On another GPU it would be another communicator, which one rank would make alone: it would wait for ever.
    nccl = Nccl(rank, monkeypatch)
    monkeypatch.setattr(torch, "empty", _Buffer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(broadcast_probe, "_store", lambda *args: None)
    for variable in ("NCCL_HOSTID", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "given")
    assert broadcast_probe.main([str(tmp_path / "store"), "127.0.0.1", str(rank), "nccl"]) == 0
    assert nccl.used
    assert set(nccl.used) == {0}
