"""The default process group of the trainer's ranks, opened the same way by every backend.

Input: the rendezvous of the ranks.  Output: the group, and the device that a rank computes on.
Guarantees: when open_process_group returns, every rank is connected to every other.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from rlhpc.base.files import is_listed, write_atomically
from rlhpc.base.host_address import interface_of
from rlhpc.base.patience import Deadline, patiently, seen
from rlhpc.base.processes import allow_many_connections
from rlhpc.protocol.errors import ChannelTimeout, ConfigError, RoleFailed
from rlhpc.training.logprob import all_ranks_agree

# ----------------------------------------------------------------------------------------------------------- rendezvous
#
# Rendezvous of ranks on several hosts that share only a directory: rank 0 listens, a file holds its address.
#
# Input: the path of that file.  Output: a torch store that all ranks are connected to.  torch's own FileStore would
# need only the file, but it locks it, and many shared filesystems have no locks or only pretend to. Guarantees: a port
# is bound before its number is written, never searched for first; the stale address of a dead rank 0 or of another
# start is replaced as soon as the new one appears; a time-out names the ranks that are missing.

POLL_S, LONGEST_POLL_S = 0.02, 0.5  # increasing: hundreds of ranks may poll one file server
PROBE_S = 10.0  # for rank 0's host to answer
# torch looks up the name of the other end when it connects, which takes about ten seconds without a name server.
CALL_TIMEOUT = timedelta(seconds=60)
_ALL_HERE = "all here"


@dataclass(frozen=True, slots=True)
class Place:
    """Content of the file."""

    address: str  # "tcp://IPv4:port"
    nonce: str  # of this start of rank 0: readers of an older file use another store
    host: str  # for people
    pid: int

    @property
    def endpoint(self) -> tuple[str, int]:
        """IPv4 address and port."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)


def connect_ranks(file: Path, *, rank: int, world_size: int, host: str, timeout_s: float) -> Store:
    """Connect this rank to all others; returns when each of them has connected, or is certain to.

    file: the same for all ranks and for no other start; it is made by rank 0, with its directory, and gone afterwards.
    host: IPv4 address under which the other ranks reach rank 0; the others' is not used.
    Raises ChannelTimeout that names missing ranks, RoleFailed if rank 0 cannot listen at `host` or write the file.
    """
    deadline = Deadline(timeout_s)
    if rank == 0:
        return _receive_others(file, world_size, host, deadline)
    return _go_to_rank_0(file, rank, world_size, deadline)


def _receive_others(file: Path, world_size: int, host: str, deadline: Deadline) -> Store:
    try:
        place, room = _open(file, host, world_size)
    except (OSError, RuntimeError) as error:
        raise RoleFailed(f"rank 0 of the trainer cannot listen at {host} and announce it in {file}: {error}") from error
    try:
        missing, pause_s = _missing(room, range(1, world_size)), POLL_S
        while missing:
            if deadline.is_over:
                raise ChannelTimeout(_who_is_missing(missing, deadline.limit_s, place))
            pause_s = _pause(pause_s)
            missing = _missing(room, missing)
        room.set(_ALL_HERE, "")
    finally:
        seen(lambda: file.unlink(missing_ok=True), None)  # a hint, and of this start alone
    return room


def _open(file: Path, host: str, world_size: int) -> tuple[Place, Store]:
    """Listen, then write the address."""
    patiently(lambda: file.unlink(missing_ok=True), file)
    listener = socket.create_server((host, 0), backlog=max(128, world_size))
    port = listener.getsockname()[1]
    # The store takes the socket over: it is bound to one address, while torch itself would listen on all of them.
    server = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=CALL_TIMEOUT, master_listen_fd=listener.detach()
    )
    place = Place(f"tcp://{host}:{port}", secrets.token_hex(8), socket.gethostname(), os.getpid())
    patiently(lambda: _announce(place, file), file)
    return place, PrefixStore(place.nonce, server)


def _announce(place: Place, file: Path) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asdict(place)).encode(), mode=0o600)


def _go_to_rank_0(file: Path, rank: int, world_size: int, deadline: Deadline) -> Store:
    place: Place | None = None
    room: Store | None = None  # store at the current address
    pause_s = POLL_S
    why = f"rank 0 of the trainer has not appeared after {deadline.limit_s:g} s: no {file}; see its log"
    while True:
        told = _read(file)
        if told is not None and (told != place or room is None):  # rank 0 is new, or was not reachable before
            place, room = told, _enter(told, rank)
            if room is None:
                why = (
                    f"rank 0 of the trainer (process {told.pid} on {told.host}) has not replied at {told.address} "
                    f"after {deadline.limit_s:g} s; do both hosts have the network of RLHPC_INTERFACE?"
                )
        if room is not None and place is not None:
            try:
                if room.check([_ALL_HERE]):
                    return room
                if deadline.is_over:
                    why = _who_is_missing(_missing(room, range(1, world_size)), deadline.limit_s, place)
            except RuntimeError:  # any failure of torch's store
                room = None
                why = f"rank 0 of the trainer (process {place.pid} on {place.host}) died before all ranks connected"
        if deadline.is_over:
            raise ChannelTimeout(why)
        pause_s = _pause(pause_s)


def _enter(place: Place, rank: int) -> Store | None:
    """Register with rank 0; None if it does not reply."""
    try:
        # torch's client would retry for its whole time limit, with warnings; this one fails at once if nobody listens.
        socket.create_connection(place.endpoint, timeout=PROBE_S).close()
        client = TCPStore(*place.endpoint, is_master=False, wait_for_workers=False, timeout=CALL_TIMEOUT)
        room = PrefixStore(place.nonce, client)
        room.set(_key(rank), f"{socket.gethostname()} {os.getpid()}")
    except (OSError, RuntimeError):
        return None
    return room


def _read(file: Path) -> Place | None:
    content = seen(lambda: file.read_bytes() if is_listed(file) else None, None)
    return None if content is None else Place(**json.loads(content))


def _missing(room: Store, ranks: range | list[int]) -> list[int]:
    return [rank for rank in ranks if not room.check([_key(rank)])]


def _who_is_missing(ranks: list[int], timeout_s: float, place: Place) -> str:
    names = ", ".join(map(str, ranks))
    who = f"rank {names} of the trainer has" if len(ranks) == 1 else f"ranks {names} of the trainer have"
    return f"{who} not appeared at {place.address} on {place.host} after {timeout_s:g} s; see their logs"


def _key(rank: int) -> str:
    return f"rank {rank}"


def _pause(seconds: float) -> float:
    """Sleep; return how long to sleep the next time."""
    time.sleep(seconds)
    return min(seconds * 1.5, LONGEST_POLL_S)


# -------------------------------------------------------------------------------------------------------- process group

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank may wait this long for others to read or write a checkpoint
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by the values of model.dtype
RENDEZVOUS, MEET_TIMEOUT_S, LOOPBACK = "rendezvous://", 120.0, "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankContext:
    """This process's rank in the trainer, and the rendezvous; a single rank needs only the first two fields."""

    rank: int = 0
    world_size: int = 1
    store_address: str = ""
    """Meeting place of the ranks: "rendezvous:///path" of a file for rank 0's address, the only form for several hosts
        (rendezvous.py); "file:///path" of a file that does not exist yet, for torch's own FileStore; or
        "tcp://host:port"."""
    host: str = LOOPBACK
    """IPv4 address under which other ranks reach this one; only with rendezvous://."""
    meet_timeout_s: float = MEET_TIMEOUT_S
    """Time to wait for the other ranks; only with rendezvous://."""


def open_process_group(context: RankContext, device: torch.device) -> None:
    """Connect the ranks; NCCL on CUDA, gloo on CPU.  A collective.  One rank may open a group too.

    Raises the process's limit of open files.  Raises ChannelTimeout, which names the ranks that are missing.
    """
    allow_many_connections()
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
    """Leave the default group and every group made from it.  Idempotent.

    While an exception is handled NCCL's groups stay, and the process ends by leave_at_once (lifecycle.py).
    """
    if not dist.is_initialized():
        return
    # All ranks destroy NCCL's groups together: one that has failed alone would wait for the others' kernels, and they,
    # in a collective, for it, until a time-out of half an hour (pytorch/torchtitan#1342).
    if sys.exception() is None or dist.get_backend() != "nccl":
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
        # Also for "auto": this rank would train on the CPU, while others wait for it on their GPUs.
        raise ConfigError(
            f"trainer.device={wish!r}: torch {torch.__version__} sees no GPU on {socket.gethostname()} "
            f"(CUDA_VISIBLE_DEVICES={shown!r}): none is there, one has failed, or the driver is too old; "
            "`nvidia-smi` tells; legal here: 'cpu'"
        )
    # A launcher that shows each rank one GPU gives device 0; one that shows all of a node gives one to each rank.
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


# ------------------------------------------------------------------------------------------------------------- exchange
#
# Small messages between all ranks of the trainer, as JSON over gloo.
#
# Input: values that JSON can represent.  Output: the same on other ranks.  For metrics and sizes; tensors are sent
# separately.  Floats arrive bit for bit, nan and inf included.


class Exchange:
    """A separate gloo group, so that no message comes between two collectives of the model."""

    def __init__(self) -> None:
        """A collective of the default process group."""
        self._group = open_gloo_group(COLLECTIVE_TIMEOUT)

    def from_rank(self, source: int, message: Any) -> Any:
        """Return the message of rank `source` on every rank; the others' is ignored.  A collective."""
        content = _encode(message) if dist.get_rank() == source else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor(len(content))
        dist.broadcast(length, source, group=self._group)
        if dist.get_rank() != source:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, source, group=self._group)
        return _decode(content)

    def of_all(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, in rank order, on every rank.  A collective."""
        content = _encode(message)
        lengths = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, torch.tensor(len(content)), group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.cat([content, content.new_zeros(longest - len(content))])
        contents = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(contents, padded, group=self._group)
        return [_decode(content[:length]) for content, length in zip(contents, lengths, strict=True)]


def _encode(message: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
