"""What each rank does in the tests of a moving average of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.protocol.contracts import TrainerBackend
from tests.contracts.trainer_cluster import Rank
from tests.contracts.trainer_scenarios import Rows, train


def average_steps(
    rank: Rank, *, model: Path, steps: list[Rows], decay: float, memory: str, saved: Path | None = None, **settings: Any
) -> None:
    """A state after each step, in scratch/1, …; from `saved` on, if it is given.  A refused step does not move it."""
    backend = rank.open(model, **settings)
    backend.hold_average(memory)
    if saved is not None:
        backend.load(saved)
        backend.save(rank.scratch / "0").result()
    for number, rows in enumerate(steps, 1):
        step(rank, backend, rows, decay)
        backend.save(rank.scratch / str(number)).result()
    backend.close()


def step(rank: Rank, backend: TrainerBackend, rows: Rows, decay: float) -> None:
    """As the trainer does it: after a step that was applied."""
    assert not train(rank, backend, rows, may_apply=lambda *_: False).applied
    assert train(rank, backend, rows).applied
    backend.move_average(decay)


def drop_an_average(rank: Rank, *, model: Path, saved: Path, **settings: Any) -> None:
    """Load a state that has one where none is held, and save it."""
    backend = rank.open(model, **settings)
    backend.load(saved)
    backend.save(rank.scratch / "without").result()
    backend.close()
