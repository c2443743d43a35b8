"""The measured broadcast: between two processes, by NCCL where there is a GPU, and on nodes with several GPUs, by
torch's rule for the device of a barrier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.figures import tell
from launch.doctor import broadcast_probe
from tests.gpu.one_card import environment_of, place, why_not
from tests.patience import PATIENCE_S

NUM_GPUS = 4  # of each node
NOT_NCCL = why_not(2) if place() == "cuda" else "gloo in its place"
ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(bool(NOT_NCCL), reason=NOT_NCCL))


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


@pytest.mark.starts
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=ON_A_GPU)])
def test_two_probes_measure_the_broadcast_between_them(backend: str, tmp_path: Path) -> None:
    """As doctor starts them, each on a node."""
    probes = []
    for rank in range(2):
        own = environment_of(rank, 2) if backend == "nccl" else {}
        if backend == "nccl" and not own:
            own = {"CUDA_VISIBLE_DEVICES": str(rank)}
        words = [broadcast_probe.__file__, str(tmp_path / "store"), "127.0.0.1", str(rank), backend]
        environment = os.environ | own | {"OMP_NUM_THREADS": "1"}
        probes.append(subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, env=environment))
    try:
        said = [probe.communicate(timeout=2 * PATIENCE_S)[0] for probe in probes]
    finally:
        for probe in probes:
            probe.kill()
            probe.wait()
    for text in said:
        found = json.loads(text.splitlines()[-1])
        assert found["backend"] == backend
        assert found["gbit_per_s"] > 0
    tell(f"broadcast by {backend}, Gbit/s", found["gbit_per_s"])
