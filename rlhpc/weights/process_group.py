"""A separate process group, independent of torch's global one.

Input: an address, a rank and a world size.  Output: a group with broadcast from rank 0 and a sum.  The trainer's and
vLLM's own process groups are in torch's global state and are not touched.  Every failure is a GroupFailed.  Guarantee:
rank 0 detects within seconds that another rank is gone, and all others that rank 0 is (lifeline.py).
"""

from __future__ import annotations

import datetime
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.deadline import Deadline
from rlhpc.errors import GroupFailed
from rlhpc.weights.lifeline import Lifeline
from rlhpc.weights.nccl_group import abort, connect, nccl_group
from rlhpc.weights.rendezvous_file import file_of

POLL_S = (0.0001, 0.005)  # polling intervals: first, and longest
GRACE_S = 1.0  # for data sent before a member left: leaving after the last vote is not a failure

c10d: Any = dist  # stores and group classes come from C++ and have no stubs


class SideGroup:
    """One rank's end of a gloo or NCCL group.  Blocking; used by one thread at a time."""

    def __init__(
        self,
        backend: str,
        store: Any,
        rank: int,
        world_size: int,
        timeout_s: float,
        *,
        device: torch.device,
        host: str = "",
    ) -> None:
        """Connect all ranks.  Raises GroupFailed if they are not all connected within `timeout_s`.

        device: this rank's GPU, with its index, for NCCL; gloo works on CPU tensors.
        host: address at which the other ranks reach this one, for gloo; "" if all are on this machine.
        """
        self.world_size = world_size
        self.device = torch.device("cpu") if backend == "gloo" else device  # where tensors of a collective must live
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._store = store
        self._group: Any = None
        self._lifeline: Lifeline | None = None
        self._num_under_way = 0  # collectives that were begun and have not completed
        try:
            self._connect(backend, store, rank, device, host)
        except BaseException:
            self.close()
            raise

    def _connect(self, backend: str, store: Any, rank: int, device: torch.device, host: str) -> None:
        world_size, timeout_s = self.world_size, self._timeout.total_seconds()
        with _failures_named(f"rank {rank} of {world_size} could not connect to the others within {timeout_s:g} s"):
            self._lifeline = Lifeline.reach(store) if rank else Lifeline.listen(store, host)
            # Gloo connects lazily on some builds and NCCL always: the first collective connects.
            if backend == "gloo":
                self._group = _gloo_group(store, rank, world_size, self._timeout, host)
                self.total(1)
            else:
                self._group = nccl_group(store, rank, world_size, self._timeout)
                connect(self._group, device, lambda: self.total(1), timeout_s, self.lost)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` (contiguous, same size on all ranks) with rank 0's.  Raises GroupFailed."""
        self.begin_broadcast(tensor)()

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], None]:
        """Start a broadcast and return a function that waits for its end.  All ranks start theirs in the same order.

        Until then `tensor` must not be written, nor read on other ranks than 0.  Both may raise GroupFailed.
        """
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        with _failures_named("a broadcast could not be started"):
            if self._group is None:
                raise GroupFailed("this member has left the group")
            self._num_under_way += 1
            work = self._group.broadcast([tensor], options)

        def wait() -> None:
            with _failures_named("a broadcast did not complete"):
                self._finish(work)

        return wait

    def total(self, value: int) -> int:
        """Sum of `value` over all ranks; waits for all of them.  Raises GroupFailed."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.SUM
        options.timeout = self._timeout
        with _failures_named("a sum over all ranks did not complete"):
            if self._group is None:
                raise GroupFailed("this member has left the group")
            self._num_under_way += 1
            self._finish(self._group.allreduce([tensor], options))
        return int(tensor.item())

    def lost(self) -> str:
        """Who is gone, as far as this rank can know; "" if no loss is known.  Never blocks."""
        lifeline = self._lifeline  # close() may be called meanwhile
        return lifeline.lost() if lifeline is not None else "this member has left the group"

    def _finish(self, work: Any) -> None:
        """Wait for the end of a collective.

        In short sleeps, as torch's own wait for NCCL does: a wait inside torch could not check the lifeline.
        """
        deadline, lost_at, interval_s = Deadline(self._timeout.total_seconds()), math.inf, POLL_S[0]
        while not work.is_completed():
            now = time.monotonic()
            lost_at = min(lost_at, now) if self.lost() else math.inf
            if now - lost_at > GRACE_S or deadline.is_over:
                raise RuntimeError(self.lost() or f"not within {deadline.limit_s:g} s")
            time.sleep(interval_s)
            interval_s = min(1.5 * interval_s, POLL_S[1])
        self._num_under_way -= 1
        work.wait(self._timeout)

    def close(self) -> None:
        """Close the connections; ranks that still wait for this one fail at once.  Idempotent."""
        if self._lifeline is not None:
            self._lifeline.close()
        group, self._group, self._lifeline, self._store = self._group, None, None, None
        if group is not None and not isinstance(group, c10d.ProcessGroupGloo):
            abort(group)
        elif group is not None and self._num_under_way:
            # Gloo cannot cancel a collective, and its destructor waits for the one that this rank abandons.
            left = [group]
            del group
            threading.Thread(target=left.clear, name="weights-abandoned", daemon=True).start()


def open_store(directory: Path, name: str, host: str, world_size: int, timeout_s: float) -> tuple[Any, str]:
    """Rank 0: open a rendezvous; a file in `directory`, or a TCP port of the address `host`.

    Returns (store, address).  Raises GroupFailed if neither file nor port can be opened.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    with _failures_named("the rendezvous could not be opened"):
        if host:
            listener = socket.create_server((host, 0))
            port = listener.getsockname()[1]
            # The store takes over the socket, which is bound to one address; torch itself would listen on all.
            descriptor = listener.detach()
            options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
            return c10d.TCPStore(host, port, world_size, timeout=timeout, **options), f"tcp://{host}:{port}"
        directory.mkdir(parents=True, exist_ok=True)
        # Never the same path twice: a member that still waits for this epoch number of an earlier attempt would open
        # the file by its name, write its old address into it, and delete it when it is the last to leave.
        path = directory / f"{name}-{uuid.uuid4().hex[:8]}.store"
        file_store = c10d.FileStore(str(path), world_size)
        file_store.set_timeout(timeout)
        return file_store, f"file://{path}"


def find_store(address: str, world_size: int, timeout_s: float) -> Any:
    """Other ranks: connect to what open_store returned.  Raises GroupFailed."""
    parts = urlsplit(address)
    timeout = datetime.timedelta(seconds=timeout_s)
    with _failures_named(f"no rendezvous at {address!r}"):
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return c10d.TCPStore(
                parts.hostname, parts.port, world_size, is_master=False, wait_for_workers=False, timeout=timeout
            )
        path = file_of(address)
        if not path.parent.is_dir():
            raise GroupFailed(f"no rendezvous at {address!r}: its directory does not exist")
        store = c10d.FileStore(str(path), world_size)
        store.set_timeout(timeout)
        return store


def is_on_this_machine(address: str) -> bool:
    """True if only this machine can use the rendezvous of open_store: a file, or a port of the loopback interface."""
    return address.startswith(("file://", "tcp://127."))


def _gloo_group(store: Any, rank: int, world_size: int, timeout: datetime.timedelta, host: str) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = _gloo_devices(host)
    return c10d.ProcessGroupGloo(c10d.PrefixStore("weights/", store), rank, world_size, options)


def _gloo_devices(host: str) -> list[Any]:
    """Where gloo listens: on the interfaces of GLOO_SOCKET_IFNAME, as in torch, else at this address.

    torch's default is the address of the host name, which many distributions map to 127.0.1.1.
    """
    create = c10d.ProcessGroupGloo.create_device
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if host and names:
        return [create(interface=name.strip()) for name in names.split(",")]
    # On one machine the loopback interface always works; its host name need not resolve.
    return [create(hostname=host or "127.0.0.1")]


@contextmanager
def _failures_named(what: str) -> Iterator[None]:
    """torch.distributed raises RuntimeError and its subclasses for every network failure."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise GroupFailed(f"{what}: {str(error).splitlines()[0] if str(error) else error!r}") from error
