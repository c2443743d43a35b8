"""Run one function on the ranks of a new gloo group, each a process of its own, and hand back what it returned.

Input: a module-level function of (rank, world_size, *arguments).  Output: the list of its results in rank order.  All
processes have ended when run_ranks returns or raises.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import distributed

from rlhpc.base.patience import Deadline
from tests.rank_context import RANKS, begin_rank

TIMEOUT_S = 150  # the first ranks of a process of tests wait until their server has imported everything
GRACE_S = 2  # for the others, once one rank has failed: they may hang in a collective, or have their own story


def run_ranks(
    world_size: int, function: Callable[..., Any], scratch: Path, *arguments: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """function(rank, world_size, *arguments) on every rank, one thread each; scratch/store is where they meet.

    Arguments and results are pickled whole (tensors too).  Raises AssertionError with the traceback of every rank that
    raised, and a line for each that died or had not answered in `timeout_s`.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    store = scratch / "store"
    store.unlink(missing_ok=True)  # a group that finds the keys of an earlier one waits for ever
    task = pickle.dumps((function, arguments))
    pipes: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    try:
        for rank in range(world_size):
            here, there = RANKS.Pipe(duplex=False)
            settings = (there, rank, world_size, f"file://{store}", task, timeout_s)
            process = RANKS.Process(target=_run_rank, args=settings, daemon=True)
            process.start()
            there.close()  # else the death of the rank would not end its pipe
            pipes[here] = rank
            processes.append(process)
        results, failures = _collect(pipes, timeout_s)
        failures += [f"rank {rank}: no answer" for rank in range(world_size) if rank not in results and not failures]
        assert not failures, "\n".join(failures)
        return [results[rank] for rank in range(world_size)]
    finally:
        for pipe in pipes:
            pipe.close()
        _end(processes)


def _collect(pipes: Mapping[Connection, int], timeout_s: float) -> tuple[dict[int, Any], list[str]]:
    """Results by rank and stories of failure, until all have answered or time is over."""
    results: dict[int, Any] = {}
    failures: list[str] = []
    deadline = Deadline(timeout_s)
    waiting = set(pipes)
    while waiting and (ready := wait(waiting, timeout=deadline.left_s)):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            waiting.remove(pipe)
            try:
                succeeded, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, answer = False, f"rank {pipes[pipe]}: died without a word"
            if succeeded:
                results[pipes[pipe]] = answer
            else:
                failures.append(answer)
                deadline = Deadline(min(deadline.left_s, GRACE_S))
    return results, failures


def _end(processes: list[BaseProcess]) -> None:
    deadline = Deadline(GRACE_S)
    for process in processes:
        process.join(timeout=deadline.left_s)
        process.kill()  # this one, by its id; nothing happens to one that has ended
        process.join()


def _run_rank(pipe: Connection, rank: int, world_size: int, address: str, task: bytes, timeout_s: float) -> None:
    begin_rank()
    try:
        function, arguments = pickle.loads(task)
        distributed.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
        # Pickled here: the pipe's own way sends a tensor as a file that must outlive this process.
        answer = pickle.dumps((True, function(rank, world_size, *arguments)))
        distributed.destroy_process_group()
    except BaseException:  # noqa: BLE001 (whatever a rank dies of is the test's to see)
        answer = pickle.dumps((False, f"rank {rank}: {traceback.format_exc()}"))
    pipe.send_bytes(answer)
