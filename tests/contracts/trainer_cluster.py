"""Ranks of a trainer as real processes that stay up between tests and run one scenario after another.

A scenario is a module-level function of (rank, **arguments); rank.open(model) makes the backend under test.
Layouts of one backend and number of ranks share their processes, which also holds close() to what it promises.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rlhpc.base.patience import Deadline
from rlhpc.protocol.contracts import TrainerBackend
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from tests.rank_context import RANKS, begin_rank
from tests.unit.training.packed_rows import dummy_row, tiny_config

TIMEOUT_S = float(os.environ.get("RLHPC_TEST_RANKS_S", "150"))
GRACE_S = 3  # for the others, once one rank has failed: they may hang in a collective, or have their own story
MAX_PROCESSES = 9  # alive at once; each takes up to a gigabyte
EnvironmentOf = Callable[[int, int], Mapping[str, str]]


@dataclass(frozen=True)
class Rank:
    """What a scenario knows of the process it runs in."""

    rank: int
    world_size: int
    layout: Mapping[str, Any]  # keys of [trainer]
    scratch: Path  # a new directory for every scenario, the same on all ranks

    def open(self, model: Path, **settings: Any) -> TrainerBackend:
        """The backend of this layout on a model; once per scenario.  `settings`: see tiny_config."""
        return open_backend(
            tiny_config(model, **{**self.layout, **settings}),
            RankContext(self.rank, self.world_size, f"file://{self.scratch / 'store'}"),
        )

    def share(self, rows: Sequence[PackedMicrobatch], dp_rank: int, dp_size: int) -> list[PackedMicrobatch]:
        """Deal rows out, the same number to every replica."""
        mine = list(rows[dp_rank::dp_size])
        return mine + [dummy_row()] * (-(-len(rows) // dp_size) - len(mine))


class RankProcesses:
    """`world_size` processes that have loaded nothing but what one backend made them load."""

    def __init__(self, world_size: int, environment_of: EnvironmentOf = lambda rank, world_size: {}) -> None:
        """environment_of: (rank, world size) → variables that this rank sets before it does anything."""
        self.world_size = world_size
        self.is_alive = True
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = RANKS.Pipe()
            whose = rank, world_size
            process = RANKS.Process(target=_serve, args=(there, *whose, environment_of(*whose)), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(
        self, scenario: Callable[..., Any], layout: Mapping[str, Any], scratch: Path, **arguments: Any
    ) -> list[Any]:
        """Run a scenario on all ranks; return their results in rank order.

        Raises AssertionError with the traceback of every rank that raised or the news that it hangs; then, and when a
        test's time limit interrupts the wait, all of them have ended: what state they were in nobody knows, and a late
        answer would be taken for that to the next question.
        """
        scratch.mkdir(parents=True, exist_ok=True)
        for pipe in self._pipes:
            pipe.send((scenario, layout, scratch, arguments))
        try:
            answers = self._collect()
        except BaseException:
            self.close(grace_s=0)
            raise
        failures = [
            f"rank {rank}: {'no answer' if rank not in answers else answers[rank][1]}"
            for rank in range(self.world_size)
            if not answers.get(rank, (False, ""))[0]
        ]
        if failures:
            self.close(grace_s=0)
            raise AssertionError("\n".join(failures))
        return [answers[rank][1] for rank in range(self.world_size)]

    def _collect(self) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = Deadline(TIMEOUT_S)
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (ready := wait(list(waiting), timeout=deadline.left_s)):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = False, "died without a word"
                if not answers[rank][0]:
                    deadline = Deadline(min(deadline.left_s, GRACE_S))
        return answers

    def close(self, grace_s: float = 10) -> None:
        """End them.  Idempotent."""
        self.is_alive = False
        for pipe in self._pipes:
            pipe.close()  # the end of its pipe ends a rank
        for process in self._processes:
            process.join(timeout=grace_s)
            process.kill()
            process.join()


@dataclass(frozen=True)
class TrainerCluster:
    """One layout on the processes it shares with others like it."""

    name: str
    layout: Mapping[str, Any]
    processes: RankProcesses

    @property
    def num_ranks(self) -> int:
        return self.processes.world_size

    def run(self, scenario: Callable[..., Any], scratch: Path, **arguments: Any) -> list[Any]:
        """See RankProcesses.run; every call needs a scratch directory of its own."""
        return self.processes.run(scenario, self.layout, scratch, **arguments)


class ClusterPool:
    """Starts processes when a layout asks for them; those not used for longest end when there are too many.

    Importing a backend takes longer than most tests.
    """

    def __init__(self, environment_of: EnvironmentOf = lambda rank, world_size: {}) -> None:
        """environment_of: see RankProcesses."""
        self._processes: dict[tuple[str, int], RankProcesses] = {}  # oldest use first
        self._environment_of = environment_of

    def cluster(self, name: str, layout: Mapping[str, Any]) -> TrainerCluster:
        key = str(layout["backend"]), int(layout["num_ranks"])
        processes = self._processes.pop(key, None)
        if processes is None or not processes.is_alive:
            self._make_room(key[1])
            processes = RankProcesses(key[1], self._environment_of)
        self._processes[key] = processes
        return TrainerCluster(name, layout, processes)

    def _make_room(self, num_ranks: int) -> None:
        while self._processes and sum(p.world_size for p in self._processes.values()) + num_ranks > MAX_PROCESSES:
            self._processes.pop(next(iter(self._processes))).close()

    def close(self) -> None:
        for processes in self._processes.values():
            processes.close()
        self._processes.clear()


def _serve(pipe: Connection, rank: int, world_size: int, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    begin_rank()
    while True:
        try:
            scenario, layout, scratch, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # DeepSpeed's threads sometimes abort an orderly exit
        try:
            answer = True, scenario(Rank(rank, world_size, layout, scratch), **arguments)
        except BaseException:  # noqa: BLE001 (whatever a scenario dies of is the test's to see)
            answer = False, traceback.format_exc()
        pipe.send(answer)
