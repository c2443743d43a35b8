"""The default process group of the trainer's ranks, opened the same way by every backend.

Eats where the ranks meet, makes the group, and says which device a rank computes on.
Promises: when open_process_group returns, every rank is connected to every other.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlhpc.training.step_vote import all_ranks_agree

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank may wait this long for the lead to read or write a checkpoint
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by the words of model.dtype


def open_process_group(rank: int, world_size: int, store_address: str, device: torch.device) -> None:
    """Meet the other ranks at store_address; NCCL on CUDA, gloo on CPU.  A collective.

    store_address: "file:///path" (of a file that does not exist yet) or "tcp://host:port".  A single rank may open a
    group too (Megatron and DeepSpeed need one); an empty address, legal then only, stands for one within the process.
    """
    where = {"init_method": store_address} if store_address or world_size > 1 else {"store": HashStore()}
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        **where,
    )
    # All wait for all: a rank that closes before another has finished connecting would make that one fail.
    all_ranks_agree(True, device)


def close_process_group() -> None:
    """Leave the default group and every group made from it.  Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device_of(wish: str, rank: int) -> torch.device:
    """Return the device of a rank and make it torch's current one; wish: "cpu", "cuda" or "auto"."""
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    # A launcher that shows each rank one GPU gives device 0; one that shows all of a node gives one to each rank.
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
