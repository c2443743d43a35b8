"""Rendezvous of ranks on several hosts that share only a directory: rank 0 listens, a file holds its address.

Input: the path of that file.  Output: a torch store that all ranks are connected to.  torch's own FileStore would need
only the file, but it locks it, and many shared filesystems have no locks or only pretend to.
Guarantees: a port is bound before its number is written, never searched for first; the stale address of a dead rank 0
or of another start is replaced as soon as the new one appears; a time-out names the ranks that are missing.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from rlhpc.deadline import Deadline
from rlhpc.errors import ChannelTimeout, RoleFailed
from rlhpc.files import is_listed, write_atomically
from rlhpc.patience import patiently, seen

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
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=CALL_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    place = Place(f"tcp://{host}:{port}", secrets.token_hex(8), socket.gethostname(), os.getpid())
    patiently(lambda: _announce(place, file), file)
    return place, PrefixStore(place.nonce, server)


def _announce(place: Place, file: Path) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asdict(place)).encode(), mode=0o600)


def _go_to_rank_0(file: Path, rank: int, world_size: int, deadline: Deadline) -> Store:
    place: Place | None = None
    room: Store | None = None  # where we are now
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
