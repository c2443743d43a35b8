"""The default process group of the trainer's ranks, opened the same way by every backend.

Input: the rendezvous of the ranks.  Output: the group, and the device that a rank computes on.
Guarantees: when open_process_group returns, every rank is connected to every other.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlhpc.errors import ConfigError
from rlhpc.host_address import interface_of
from rlhpc.training.rendezvous import connect_ranks
from rlhpc.training.step_vote import all_ranks_agree

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank may wait this long for others to read or write a checkpoint
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by the values of model.dtype
RENDEZVOUS, MEET_TIMEOUT_S, LOOPBACK = "rendezvous://", 120.0, "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankContext:
    """This process's rank in the trainer, and how it finds the others; one rank needs only the first two fields."""

    rank: int = 0
    world_size: int = 1
    store_address: str = ""
    """Where the ranks meet: "rendezvous:///path" of a file that rank 0 will write its address into, the only one that
    is right on several hosts (rendezvous.py); "file:///path" of one that does not exist yet, for torch's own FileStore;
    or "tcp://host:port"."""
    host: str = LOOPBACK
    """IPv4 address under which other ranks reach this one; only with rendezvous://."""
    meet_timeout_s: float = MEET_TIMEOUT_S
    """How long to wait for the others; only with rendezvous://."""


def open_process_group(context: RankContext, device: torch.device) -> None:
    """Connect the ranks; NCCL on CUDA, gloo on CPU.  A collective.  One rank may open a group too.

    Raises ChannelTimeout, which names the ranks that are missing.
    """
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=context.rank,
        world_size=context.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        **_rendezvous_of(context),
    )
    # Wait for all ranks: one that closes before another has finished connecting would make that one fail.
    all_ranks_agree(True, device)


def _rendezvous_of(context: RankContext) -> dict[str, Any]:
    """The rendezvous arguments of init_process_group."""
    if context.world_size == 1:
        return {"store": HashStore()}
    if not context.store_address.startswith(RENDEZVOUS):
        return {"init_method": context.store_address}
    _speak_from(context.host)
    store = connect_ranks(
        Path(context.store_address.removeprefix(RENDEZVOUS)),
        rank=context.rank,
        world_size=context.world_size,
        host=context.host,
        timeout_s=context.meet_timeout_s,
    )
    store.set_timeout(COLLECTIVE_TIMEOUT)
    return {"store": store}


def _speak_from(host: str) -> None:
    """Make every gloo group of this process listen at this address.

    By default gloo takes the address of the host's name, which many distributions map to 127.0.1.1; groups that are
    made later, by us or by a backend, get an address only through the environment.
    """
    name = interface_of(host)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def open_gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """A group of all ranks beside the default one, over the CPU; timeout: of each of its collectives.  A collective.

    Like the default group it is returned once all ranks are connected, so that any of them may leave at once.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    dist.barrier(group)
    return group


def close_process_group() -> None:
    """Leave the default group and every group made from it.  Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device_of(wish: str, rank: int) -> torch.device:
    """Return the device of a rank and make it torch's current one; wish: "cpu", "cuda" or "auto".

    Raises ConfigError if a GPU is wanted, or was given to this process, and torch sees none.
    """
    shown, has_cuda = os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.is_available()
    # Words such as "-1" and "NoDevFiles" hide GPUs.
    was_given_one = bool(torch.version.cuda) and (shown[:1].isdigit() or shown.startswith(("GPU-", "MIG-")))
    if wish == "cpu" or (wish == "auto" and not has_cuda and not was_given_one):
        return torch.device("cpu")
    if not has_cuda:
        # "auto", too: this rank would train on the CPU, beside others that wait for it on their GPUs.
        raise ConfigError(
            f"trainer.device={wish!r}: torch {torch.__version__} sees no GPU on {socket.gethostname()} "
            f"(CUDA_VISIBLE_DEVICES={shown!r}): none is there, one has failed, or the driver is too old; "
            "`nvidia-smi` tells; legal here: 'cpu'"
        )
    # A launcher that shows each rank one GPU gives device 0; one that shows all of a node gives one to each rank.
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
