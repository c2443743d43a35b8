"""What each rank does in the tests of steps that come in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhpc.protocol.contracts import StepResult, TrainerBackend
from tests.contracts.trainer_cluster import Rank
from tests.contracts.trainer_scenarios import Rows, train, weights_of
from tests.unit.training.packed_rows import clipped_loss, num_loss_tokens

ESTIMATE = 7  # of a step's loss tokens, which are about 115


def whole_steps(rank: Rank, *, model: Path, steps: list[Rows], **settings: Any) -> list[StepResult]:
    """Steps as they are without parts; the state after them is saved in scratch/state."""
    backend = rank.open(model, **settings)
    results = [train(rank, backend, rows) for rows in steps]
    backend.save(rank.scratch / "state").result()
    backend.close()
    return results


def steps_in_parts(rank: Rank, *, model: Path, steps: list[list[Rows]], **settings: Any) -> list[StepResult]:
    """The same steps, each as a list of parts."""
    backend = rank.open(model, **settings)
    results = [train_in_parts(rank, backend, parts) for parts in steps]
    backend.save(rank.scratch / "state").result()
    backend.close()
    return results


def lose_steps_in_parts(
    rank: Rank, *, model: Path, parts: list[Rows], poisoned: list[Rows], **settings: Any
) -> tuple[list[StepResult], list[tuple[dict[str, float], float]]]:
    """Steps that are abandoned, refused and not finite, between two that are applied; what `may_apply` was asked.

    The state is saved after the first step in scratch/first, before the last one in scratch/before, and at the end in
    scratch/state.
    """
    backend, asked = rank.open(model, **settings), []

    def refuse(metrics: Any, grad_norm: float) -> bool:
        asked.append((dict(metrics), grad_norm))
        return False

    results = [train_in_parts(rank, backend, parts)]
    backend.save(rank.scratch / "first").result()
    for number, part in enumerate(poisoned[:-1]):
        add_part(rank, backend, part, is_first=number == 0)  # abandoned
    results.append(train_in_parts(rank, backend, parts, may_apply=refuse))
    results.append(train_in_parts(rank, backend, poisoned))
    backend.save(rank.scratch / "before").result()
    results.append(train(rank, backend, [row for part in parts for row in part]))
    backend.save(rank.scratch / "state").result()
    backend.close()
    return results, asked


def interrupt_a_step(rank: Rank, *, model: Path, parts: list[Rows], **settings: Any) -> bool:
    """Two steps in parts, with everything in between that may be.  Returns whether the weights stayed what they were.

    The state is saved before the second step in scratch/before, within it in scratch/within, and in scratch/state.
    """
    backend, seen = rank.open(model, **settings), []

    def look_around() -> None:
        mine = rank.share(parts[0], backend.dp_rank, backend.dp_size)
        backend.hold_reference("host")
        backend.logprobs(mine, of_reference=True)
        seen.append(weights_of(backend))
        backend.save(rank.scratch / "within").result()

    train_in_parts(rank, backend, parts)
    before = weights_of(backend)
    backend.save(rank.scratch / "before").result()
    train_in_parts(rank, backend, parts, between=look_around)
    backend.save(rank.scratch / "state").result()
    backend.close()
    return all((each[name] == before[name]).all() for each in seen for name in before)


def train_in_parts(
    rank: Rank,
    backend: TrainerBackend,
    parts: list[Rows],
    *,
    between: Callable[[], None] = lambda: None,
    **overrides: Any,
) -> StepResult:
    """The last one by step, the others before it; the estimate is far from the true number of loss tokens."""
    for number, part in enumerate(parts[:-1]):
        add_part(rank, backend, part, is_first=number == 0)
        between()
    true_number = num_loss_tokens([row for part in parts for row in part])
    return train(rank, backend, parts[-1], num_loss_tokens=true_number, **overrides)


def add_part(rank: Rank, backend: TrainerBackend, part: Rows, *, is_first: bool) -> None:
    mine = rank.share(part, backend.dp_rank, backend.dp_size)
    proximal = backend.logprobs(mine)
    backend.accumulate(mine, clipped_loss, proximal=proximal, num_loss_tokens=ESTIMATE, is_first=is_first)
