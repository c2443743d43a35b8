"""Ranks of a trainer as real processes that stay up between tests and run one scenario after another.

A scenario is a module-level function of (rank, **arguments); rank.open(config) makes the backend under test.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rlhpc.config import Config
from rlhpc.contracts import TrainerBackend
from rlhpc.training.make import open_backend
from rlhpc.types import PackedMicrobatch
from tests.unit.training.packed_rows import dummy_row


@dataclass(frozen=True)
class Rank:
    """What a scenario knows of the process it runs in."""

    rank: int
    world_size: int
    backend: str
    scratch: Path  # a new directory for every scenario, the same on all ranks

    def open(self, config: Config, name: str = "store") -> TrainerBackend:
        trainer = config.trainer.model_copy(update={"backend": self.backend, "num_ranks": self.world_size})
        config = config.model_copy(update={"trainer": trainer})
        address = f"file://{self.scratch / name}"
        return open_backend(config, rank=self.rank, world_size=self.world_size, store_address=address)

    def share(self, rows: Sequence[PackedMicrobatch], dp_rank: int, dp_size: int) -> list[PackedMicrobatch]:
        """Deal rows out, the same number to every rank."""
        mine = list(rows[dp_rank::dp_size])
        return mine + [dummy_row()] * (-(-len(rows) // dp_size) - len(mine))


class TrainerCluster:
    """`world_size` processes."""

    def __init__(self, backend: str, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.backend, self.world_size = backend, world_size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, world_size, backend), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, scenario: Callable[..., Any], scratch: Path, **arguments: Any) -> list[Any]:
        """Run a scenario on all ranks; return their results in rank order."""
        scratch.mkdir(parents=True, exist_ok=True)
        for pipe in self._pipes:
            pipe.send((scenario, scratch, arguments))
        answers = [pipe.recv() for pipe in self._pipes]
        failures = [text for succeeded, text in answers if not succeeded]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # the end of its pipe ends a rank
        for process in self._processes:
            process.join(timeout=10)
            process.kill()


def _serve(pipe: Connection, rank: int, world_size: int, backend: str) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            scenario, scratch, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, scenario(Rank(rank, world_size, backend, scratch), **arguments)
        except BaseException:  # noqa: BLE001 (whatever a scenario dies of is the test's to see)
            answer = False, f"rank {rank}: {traceback.format_exc()}"
        pipe.send(answer)
