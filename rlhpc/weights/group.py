"""A separate process group, independent of torch's global one.

Input: an address, a rank and a world size.  Output: a group with broadcast from rank 0 and a sum.  The trainer's and
vLLM's own process groups are in torch's global state and are not touched.  Every failure is a GroupFailed.  Guarantee:
rank 0 detects within seconds that another rank is gone, and all others that rank 0 is.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import secrets
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.base.patience import Deadline
from rlhpc.base.processes import variables_set
from rlhpc.protocol.errors import GroupFailed

# ------------------------------------------------------------------------------------------------------------- lifeline
#
# Detect within seconds that another member of a weight group is gone, independently of the group's connections.
#
# Input: the group's store.  Output: a text naming who is gone, "" while all are there.  An NCCL collective without its
# watchdog reports nothing: the GPU kernel keeps waiting for a dead peer until the time-out.  So every
# receiver keeps a TCP connection to the publisher on which, after a password, nothing is ever sent.  The operating
# system closes it when a process ends; keepalive probes detect a lost host.  A hung process is not detected here, but
# by the time-out.


KEY = "lifeline"  # key in the store
LOOPBACK = "127.0.0.1"
CONNECT_S = 30.0
_PASSWORD_BYTES = 32
# 2 s of silence, then a probe every 2 s: after 3 without an answer the other host is gone.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


class Lifeline:
    """One member's end: the publisher has a connection to every receiver, a receiver has one to the publisher."""

    def __init__(self, who: str, listener: socket.socket | None, password: bytes) -> None:
        """See listen() and reach()."""
        self._who, self._listener, self._password = who, listener, password
        self._strangers: dict[socket.socket, bytes] = {}  # bytes received from unauthenticated connections
        self.sockets: list[socket.socket] = []
        self._poll = select.poll()
        self._lock = threading.Lock()  # two threads must not poll at once, as they would while a group connects
        self._lost = ""
        if listener is not None:
            listener.setblocking(False)
            self._poll.register(listener, select.POLLIN)

    @classmethod
    def listen(cls, store: Any, host: str) -> Lifeline:
        """The publisher's end, at a port of `host`; "": of this machine only.  Raises OSError or RuntimeError."""
        listener = socket.create_server((host or LOOPBACK, 0), backlog=socket.SOMAXCONN)
        password = secrets.token_hex(_PASSWORD_BYTES // 2)
        address = f"{host or LOOPBACK}:{listener.getsockname()[1]}"
        try:
            store.set(KEY, f"{address} {password}")
        except BaseException:
            listener.close()
            raise
        return cls("a receiver is gone", listener, password.encode())

    @classmethod
    def reach(cls, store: Any) -> Lifeline:
        """A receiver's end.  Waits for the publisher as long as the store does.  Raises OSError or RuntimeError."""
        address, password = store.get(KEY).decode().split()
        host, port = address.rsplit(":", 1)
        line = cls("the publisher is gone", None, b"")
        line._keep(socket.create_connection((host, int(port)), timeout=CONNECT_S))
        line.sockets[0].sendall(password.encode())
        return line

    def lost(self) -> str:
        """Name the lost members; "" if no loss is known.  Never blocks; a lost member stays lost.  For any thread."""
        if not self._lost and self._lock.acquire(blocking=False):  # else another thread is looking
            try:
                for descriptor, _ in self._poll.poll(0):
                    self._look_at(descriptor)
            finally:
                self._lock.release()
        return self._lost

    def close(self) -> None:
        """Close all connections; the other ends are then lost.  Idempotent."""
        with self._lock:
            self._lost = self._lost or "this member has left the group"
            for line in (*self.sockets, *self._strangers, *([self._listener] if self._listener else [])):
                self._drop(line)
            self._strangers.clear()
            self.sockets.clear()
            self._listener = None

    def _look_at(self, descriptor: int) -> None:
        if self._listener is not None and descriptor == self._listener.fileno():
            with suppress(OSError):  # it has gone again
                stranger, _ = self._listener.accept()
                self._strangers[stranger] = b""
                self._poll.register(stranger, select.POLLIN)
                self._listen_to(stranger)
            return
        for line in [line for line in self._strangers if line.fileno() == descriptor]:
            self._listen_to(line)
            return
        # Nothing is ever sent on a line, so anything readable is its end.
        if any(line.fileno() == descriptor for line in self.sockets):
            self._lost = self._who

    def _listen_to(self, stranger: socket.socket) -> None:
        """A connection counts once it has sent the password; if it ends before, that is ignored."""
        try:
            said = stranger.recv(_PASSWORD_BYTES - len(self._strangers[stranger]), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        so_far = self._strangers[stranger] + said
        self._strangers[stranger] = so_far
        if said and len(so_far) < _PASSWORD_BYTES:
            return
        del self._strangers[stranger]
        if secrets.compare_digest(so_far, self._password):
            self._keep(stranger)
        else:
            self._drop(stranger)

    def _keep(self, line: socket.socket) -> None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        self.sockets.append(line)
        self._poll.register(line, select.POLLIN)

    def _drop(self, line: socket.socket) -> None:
        with suppress(KeyError):
            self._poll.unregister(line)
        line.close()


# ----------------------------------------------------------------------------------------------------------- nccl group
#
# An NCCL group whose failure never ends its process.
#
# Input: a store, a rank, a device; output: a ProcessGroupNCCL.  torch's watchdog thread rethrows errors of collectives
# (TORCH_NCCL_ASYNC_ERROR_HANDLING=3, the default), and an exception that leaves a thread ends the process: the death
# of a generator would end the trainer.  Guarantee: this group has no watchdog and no heartbeat monitor.  Waits and the
# rendezvous end at their time-out, or when another rank is gone; a rank that gives up aborts the
# communicator.  Other groups of the process keep their watchdogs.


log = logging.getLogger("rlhpc.weights")
c10d: Any = dist  # group classes come from C++ and have no stubs

LOOK_S = 0.1  # between two checks that the others are alive
ABORT_S = 5.0
# Read by the constructor of ProcessGroupNCCL, and only there.
WITHOUT_WATCHDOG = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # no watchdog thread is started
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # if a version of torch starts one all the same, it rethrows nothing
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # do not end the process if that thread is stuck
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # would switch error handling on again
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def nccl_group(store: Any, rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    """Make the group without connecting.  Raises GroupFailed if there is no NCCL."""
    if not (c10d.is_nccl_available() and torch.cuda.is_available()):
        raise GroupFailed("weights.transport='nccl' needs CUDA and a torch with NCCL; legal here: gloo")
    # Streams of normal priority come from a pool shared with the engine: a broadcast on the stream of its kernels would
    # stop decoding until the publisher sends.
    options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    with variables_set(WITHOUT_WATCHDOG):
        return c10d.ProcessGroupNCCL(c10d.PrefixStore("weights/", store), rank, world_size, options)


def connect(
    group: Any,
    device: torch.device,
    first_collective: Callable[[], object],
    timeout_s: float,
    lost: Callable[[], str],
) -> None:
    """Run the first collective, in which NCCL connects to the other ranks.

    NCCL itself waits for them without a limit, and torch's own limits begin later.  Raises GroupFailed at the limit, or
    when `lost` reports a lost member; the waiting thread is abandoned with the aborted group.
    """
    failures: list[Exception] = []
    is_connected, is_given_up = threading.Event(), threading.Event()

    def connect() -> None:
        try:
            torch.cuda.set_device(device)
            first_collective()
            is_connected.set()
        except (RuntimeError, ValueError, OSError, GroupFailed) as error:
            failures.append(error)
        finally:
            # An abort misses a communicator that is still being created, and work launched on it never ends.
            if is_given_up.is_set():
                abort(group)

    thread = threading.Thread(target=connect, name="weights-rendezvous", daemon=True)
    thread.start()
    deadline, words = Deadline(timeout_s), ""
    while thread.is_alive() and not words and not deadline.is_over:
        thread.join(min(LOOK_S, timeout_s))
        words = lost()
    if thread.is_alive():
        is_given_up.set()
        raise GroupFailed(f"NCCL did not connect to all ranks{f': {words}' if words else f' within {timeout_s:g} s'}")
    if failures:
        raise failures[0]
    if not is_connected.is_set():
        raise GroupFailed("NCCL did not connect to all ranks: the thread that connects has failed")


def abort(group: Any) -> None:
    """Cut the group's connections, for at most ABORT_S here: aborting waits for locks that a stuck rank may hold.

    Exceptions are only logged: the group is given up either way.
    """

    def cut() -> None:
        try:
            group.abort()
        except RuntimeError as error:
            log.warning("a weight group could not be aborted: %s", error)

    thread = threading.Thread(target=cut, name="weights-abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)


# ------------------------------------------------------------------------------------------------------ rendezvous file
#
# Parse the address of a rendezvous file, and remove one.


SCHEME = "file://"


def file_of(address: str) -> Path:
    """The path of file:///absolute/path.  Raises GroupFailed for any other address."""
    path = Path(address.removeprefix(SCHEME))
    if not address.startswith(SCHEME) or not path.is_absolute():
        raise GroupFailed(f"no rendezvous at {address!r}; legal here: file:// and an absolute path")
    return path


def remove_left_over(path: Path) -> None:
    """Remove a file that is no longer read; it stays if the filesystem refuses.

    Raises nothing, which would hide the reason for leaving a group.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: stays: %s", path, error)


# -------------------------------------------------------------------------------------------------------- process group


POLL_S = (0.0001, 0.005)  # polling intervals: first, and longest
GRACE_S = 1.0  # for data sent before a member left: leaving after the last vote is not a failure


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
        """Name the lost members that this rank knows of; "" if no loss is known.  Never blocks."""
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
    """Devices on which gloo listens: the interfaces of GLOO_SOCKET_IFNAME, as in torch, else this address.

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
