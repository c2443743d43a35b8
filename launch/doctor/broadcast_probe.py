"""Measure the bandwidth of a weight broadcast between two nodes: torch.distributed with gloo or NCCL.

Runs as a plain file on both nodes:
    python broadcast_probe.py STORE_FILE ADDRESS RANK BACKEND
ADDRESS is rank 0's.  Prints {"gbit_per_s": …, "backend": …} as its last line.  Rank 0 writes the port of its store into
STORE_FILE, which lies on the shared filesystem.  As in a run, every job is a separate host to NCCL.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(seconds=40)
NUM_BYTES = {"gloo": 64 << 20, "nccl": 1 << 30}
ROUNDS = 3


def main(arguments: list[str]) -> int:
    """Connect to the other rank, broadcast ROUNDS buffers after a first one, and print the best bandwidth."""
    file, host, rank, backend = Path(arguments[0]), arguments[1], int(arguments[2]), arguments[3]
    name_host()
    tell_gloo()
    import torch  # this file runs on a node that has it
    import torch.distributed

    distributed: Any = torch.distributed  # its stores come from C++ and have no stubs
    store = _store(distributed, file, host, rank)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    device = "cuda:0" if backend == "nccl" else "cpu"
    buffer = torch.empty(NUM_BYTES[backend], dtype=torch.uint8, device=device)
    # As the first collective a barrier would take the GPU with the rank's number, in another communicator.
    on = {"device_ids": [0]} if backend == "nccl" else {}
    best_s = float("inf")
    for round_index in range(ROUNDS + 1):
        distributed.barrier(**on)
        began = time.monotonic()
        distributed.broadcast(buffer, 0)
        if device != "cpu":
            torch.cuda.synchronize()
        distributed.barrier(**on)  # the sender may finish before the receiver
        if round_index:  # the first one connects
            best_s = min(best_s, time.monotonic() - began)
    distributed.destroy_process_group()
    print(json.dumps({"gbit_per_s": 8e-9 * NUM_BYTES[backend] / best_s, "backend": backend}))
    return 0


def name_host() -> None:
    """Name the host to NCCL as launch/supervisor/role_task.py does for roles: a probe is a job of one component."""
    node, job = os.environ.get("SLURMD_NODENAME") or platform.node(), os.environ.get("SLURM_JOB_ID", "")
    if not os.environ.setdefault("NCCL_HOSTID", f"{node}.{job}"):
        del os.environ["NCCL_HOSTID"]


def tell_gloo() -> None:
    """Set gloo's interface, as host_address.py does for roles: the first of RLHPC_INTERFACE that exists here."""
    here = {name for _, name in socket.if_nameindex()}
    named = [name.strip() for name in os.environ.get("RLHPC_INTERFACE", "").split(",")]
    for name in (name for name in named if name in here):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _store(distributed: Any, file: Path, host: str, rank: int) -> Any:
    """The ranks' rendezvous store.  Rank 0 binds a free port and then announces it."""
    if rank == 0:
        store = distributed.TCPStore(host, 0, 2, True, TIMEOUT, wait_for_workers=False)
        partial = file.with_name(file.name + ".partial")
        partial.write_text(str(store.port), encoding="ascii")
        partial.replace(file)
        return store
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while file not in file.parent.iterdir():  # listing makes an NFS client look again
        if time.monotonic() > deadline:
            raise TimeoutError("the other node's store has not appeared")
        time.sleep(0.02)
    return distributed.TCPStore(host, int(file.read_text(encoding="ascii")), 2, False, TIMEOUT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
