"""What each rank does in the tests of the trainer contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhpc.algorithms.objectives import supervised_loss
from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.base.patience import Deadline
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.contracts import PolicyLoss, StepResult, TokenRow, TrainerBackend
from rlhpc.protocol.errors import CheckpointError
from rlhpc.protocol.types import PackedMicrobatch
from tests.contracts.trainer_cluster import Rank
from tests.patience import PATIENCE_S
from tests.unit.training.packed_rows import clipped_loss, num_loss_tokens

STEP = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}
Rows = list[PackedMicrobatch]


def weights_of(backend: TrainerBackend) -> dict[str, Tensor]:
    return {name: tensor.float().cpu().clone() for name, tensor in backend.weights()}


def train(
    rank: Rank, backend: TrainerBackend, rows: Rows, loss: PolicyLoss = clipped_loss, **overrides: Any
) -> StepResult:
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    return backend.step(
        mine,
        loss,
        proximal=backend.logprobs(mine),
        **{"num_loss_tokens": num_loss_tokens(rows), **STEP, **overrides},
    )


def look(rank: Rank, *, model: Path, rows: Rows, **settings: Any) -> Any:
    """Everything a backend shows before it trains: (dp_rank, log-probabilities, specs, weights)."""
    backend = rank.open(model, **settings)
    results = backend.logprobs(rank.share(rows, backend.dp_rank, backend.dp_size))
    specs, weights = backend.tensor_specs(), [(name, tensor.cpu().clone()) for name, tensor in backend.weights()]
    dp_rank, is_rank_zero = backend.dp_rank, backend.is_rank_zero
    assert bool(weights) == is_rank_zero
    backend.close()
    backend.close()  # idempotent
    return dp_rank, [tensor.cpu() for tensor in results], specs, weights


def score(rank: Rank, *, model: Path, row: Rows, **settings: Any) -> Any:
    """One row on every rank alike, at temperature 1 and then at the run's."""
    backend = rank.open(model, **settings)
    found = [backend.logprobs(row, temperature=1.0)[0].cpu(), backend.logprobs(row)[0].cpu()]
    backend.close()
    return found


def take_steps(rank: Rank, *, model: Path, steps: list[Rows], **settings: Any) -> Any:
    backend = rank.open(model, **settings)
    results = [train(rank, backend, rows) for rows in steps]
    assert backend.num_steps_applied == len(steps)
    weights = weights_of(backend)
    backend.close()
    return results, weights


def refused_steps(
    rank: Rank, *, model: Path, rows: Rows, algorithms: list[dict[str, Any]], policy_version: int, **settings: Any
) -> Any:
    """(loss, gradient norm) by each kind of loss, of steps that are not applied: all see the same weights."""
    backend, found = rank.open(model, **settings), []
    for algorithm in algorithms:
        loss = make_policy_loss(AlgorithmConfig.model_validate(algorithm), policy_version)
        result = train(rank, backend, rows, loss, may_apply=lambda metrics, grad_norm: False)
        assert not result.applied
        found.append((result.metrics["loss"], result.grad_norm))
    backend.close()
    return found


def odd_reference(token_ids: Any) -> Tensor:
    """Log-probabilities [T] of a reference for which only a token counts."""
    return torch.from_numpy(-0.5 * (token_ids % 7 + 1)).float()


def supervised_step(rank: Rank, *, model: Path, rows: Rows, loss: PolicyLoss = supervised_loss) -> Any:
    """(loss, gradients by name of the weight) of a loss, of a step from whose length they can be told."""
    backend = rank.open(model, adam_eps=1.0)
    before = weights_of(backend)
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    result = backend.step(
        mine,
        loss,
        proximal=None,
        reference=[odd_reference(row.token_ids) for row in mine],
        num_loss_tokens=num_loss_tokens(rows),
        learning_rate=1.0,
        weight_decay=0.0,
        max_grad_norm=1e6,
    )
    after = weights_of(backend)
    backend.close()
    steps = {name: tensor.double() - after[name].double() for name, tensor in before.items()}  # g / (|g| + 1)
    return result.metrics["loss"], {name: step / (1 - step.abs()) for name, step in steps.items()}


class NanGradientOn:
    """clipped_loss, whose value is finite everywhere and whose gradient is not on one rank."""

    def __init__(self, poisoned_rank: int, rank: int) -> None:
        self._is_here = rank == poisoned_rank

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        if self._is_here and current.requires_grad:
            current.register_hook(lambda gradient: gradient * torch.nan)
        return clipped_loss(current, row)


def skip_poisoned_steps(rank: Rank, *, model: Path, rows: Rows, poisoned: list[Rows]) -> Any:
    """One good step, then bad ones: not finite in some row, and in the gradient of the last rank alone."""
    backend = rank.open(model)
    good = train(rank, backend, rows)
    backend.save(rank.scratch / "before").result()
    skipped = [train(rank, backend, bad) for bad in poisoned]
    skipped.append(train(rank, backend, rows, NanGradientOn(rank.world_size - 1, rank.rank)))
    backend.save(rank.scratch / "after").result()
    steps_applied = backend.num_steps_applied
    backend.close()
    return good.applied, [result.applied for result in skipped], steps_applied


def refuse_a_step(rank: Rank, *, model: Path, rows: Rows, **settings: Any) -> Any:
    """A step that is allowed, then one that is not; what the question was each time."""
    backend, asked = rank.open(model, **settings), []

    def gate(answer: bool, metrics: Mapping[str, float], grad_norm: float) -> bool:
        asked.append((metrics["loss"], grad_norm))
        return answer

    good = train(rank, backend, rows, may_apply=partial(gate, True))
    backend.save(rank.scratch / "before").result()
    refused = train(rank, backend, rows, may_apply=partial(gate, False))
    backend.save(rank.scratch / "after").result()
    again = train(rank, backend, rows)
    steps_applied = backend.num_steps_applied
    backend.close()
    results = [good, refused, again]
    told = [(result.metrics["loss"], result.grad_norm) for result in results]
    return [result.applied for result in results], asked, told, steps_applied


def save_midway(rank: Rank, *, model: Path, steps: list[Rows], directory: Path, **settings: Any) -> Any:
    """Train, save after two steps, go on while it is written."""
    backend = rank.open(model, **settings)
    for rows in steps[:2]:
        train(rank, backend, rows)
    future = backend.save(directory)
    results = [train(rank, backend, rows) for rows in steps[2:]]
    files = future.result()
    weights = weights_of(backend)
    backend.close()
    return files, results, weights


def resume(rank: Rank, *, model: Path, steps: list[Rows], directory: Path, **settings: Any) -> Any:
    backend = rank.open(model, **settings)
    backend.load(directory)
    assert backend.num_steps_applied == 2
    results = [train(rank, backend, rows) for rows in steps[2:]]
    weights = weights_of(backend)
    backend.close()
    return results, weights


def draw_over_a_resume(rank: Rank, *, model: Path, directory: Path) -> Any:
    """Random numbers after a save, and after this save was loaded."""
    backend = rank.open(model)
    torch.rand(5)  # from here on the state is not that of the seed
    backend.save(directory).result()
    drawn = torch.rand(5).tolist()
    backend.load(directory)
    again = torch.rand(5).tolist()
    backend.close()
    return drawn, again


def refuse_to_load(rank: Rank, *, model: Path, directories: list[Path]) -> Any:
    """Return the messages of every rank, and whether weights were left alone."""
    backend = rank.open(model)
    before = weights_of(backend)
    messages = []
    for directory in directories:
        with pytest.raises(CheckpointError) as refusal:
            backend.load(directory)
        messages.append(str(refusal.value))
    after = weights_of(backend)
    backend.close()
    return messages, all(torch.equal(before[name], after[name]) for name in before)


def decay_only(rank: Rank, *, model: Path, rows: Rows) -> Any:
    backend = rank.open(model)
    before = weights_of(backend)
    silent = [replace(row, advantages=np.zeros_like(row.advantages)) for row in rows]
    train(rank, backend, silent, learning_rate=0.1, weight_decay=0.5)
    after = weights_of(backend)
    backend.close()
    return before, after


def threads_after_a_step(rank: Rank, *, model: Path, rows: Rows, most: int) -> int:
    """Threads of this process once the backend is closed; ends of threads are waited for until `most` are left."""
    backend = rank.open(model)
    train(rank, backend, rows)
    backend.close()
    del backend
    for _ in Deadline(PATIENCE_S).polls(0.05):
        if (left := len(list(Path("/proc/self/task").iterdir()))) <= most:
            break
    return left
