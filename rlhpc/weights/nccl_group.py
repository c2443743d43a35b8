"""An NCCL group whose failure never ends its process.

Input: a store, a rank, a device; output: a ProcessGroupNCCL.  torch's watchdog thread rethrows errors of collectives
(TORCH_NCCL_ASYNC_ERROR_HANDLING=3, the default), and an exception that leaves a thread ends the process: the death of a
generator would end the trainer.  Guarantee: this group has no watchdog and no heartbeat monitor.  Waits and the
rendezvous end at their time-out, or when another rank is gone (lifeline.py); a rank that gives up aborts the
communicator.  Other groups of the process keep their watchdogs.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.deadline import Deadline
from rlhpc.errors import GroupFailed

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
    with _environment(WITHOUT_WATCHDOG):
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


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
