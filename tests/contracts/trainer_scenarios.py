"""What each rank does in the tests of the trainer contract."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.contracts import StepResult, TrainerBackend
from rlhpc.errors import CheckpointError
from rlhpc.types import PackedMicrobatch
from tests.contracts.trainer_cluster import Rank
from tests.unit.training.packed_rows import clipped_loss, num_loss_tokens, tiny_config

STEP = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}


def weights_of(backend: TrainerBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.float().cpu().clone() for name, tensor in backend.weights()}


def train(rank: Rank, backend: TrainerBackend, rows: list[PackedMicrobatch], **overrides: Any) -> StepResult:
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    return backend.step(
        mine,
        clipped_loss,
        proximal=backend.logprobs(mine),
        **{"num_loss_tokens": num_loss_tokens(rows), **STEP, **overrides},
    )


def take_logprobs(rank: Rank, *, model: Path, rows: list[PackedMicrobatch], temperature: float) -> Any:
    backend = rank.open(tiny_config(model, temperature=temperature))
    results = backend.logprobs(rank.share(rows, backend.dp_rank, backend.dp_size))
    backend.close()
    backend.close()  # idempotent
    return backend.dp_rank, [tensor.cpu() for tensor in results]


def take_steps(rank: Rank, *, model: Path, steps: list[list[PackedMicrobatch]], **settings: Any) -> Any:
    backend = rank.open(tiny_config(model, **settings))
    results = [train(rank, backend, rows) for rows in steps]
    assert backend.num_steps_applied == len(steps)
    weights = weights_of(backend)
    assert bool(weights) == backend.is_lead
    backend.close()
    return results, weights


def poison_one_step(rank: Rank, *, model: Path, rows: list[PackedMicrobatch], poisoned: list[PackedMicrobatch]) -> Any:
    """One good step, one with a nan on the last rank, and the same good one as if nothing had been."""
    backend = rank.open(tiny_config(model))
    good = train(rank, backend, rows)
    backend.save(rank.scratch / "before")
    skipped = train(rank, backend, poisoned)
    backend.save(rank.scratch / "after")
    steps_applied = backend.num_steps_applied
    backend.close()
    return good.applied, skipped.applied, steps_applied


def save_midway(rank: Rank, *, model: Path, steps: list[list[PackedMicrobatch]], directory: Path) -> Any:
    """Train, save after two steps, go on."""
    backend = rank.open(tiny_config(model))
    for rows in steps[:2]:
        train(rank, backend, rows)
    files = backend.save(directory)
    results = [train(rank, backend, rows) for rows in steps[2:]]
    weights = weights_of(backend)
    backend.close()
    return files, results, weights


def resume(rank: Rank, *, model: Path, steps: list[list[PackedMicrobatch]], directory: Path) -> Any:
    backend = rank.open(tiny_config(model))
    backend.load(directory)
    assert backend.num_steps_applied == 2
    results = [train(rank, backend, rows) for rows in steps[2:]]
    weights = weights_of(backend)
    backend.close()
    return results, weights


def load_refused(rank: Rank, *, model: Path, directory: Path) -> Any:
    """Return the message of every rank, and whether weights were left alone."""
    backend = rank.open(tiny_config(model))
    before = weights_of(backend)
    with pytest.raises(CheckpointError) as refusal:
        backend.load(directory)
    after = weights_of(backend)
    backend.close()
    return str(refusal.value), all(torch.equal(before[name], after[name]) for name in before)


def export(rank: Rank, *, model: Path, dtype: str) -> Any:
    backend = rank.open(tiny_config(model, dtype=dtype))
    specs, weights = backend.tensor_specs(), [(name, tensor.clone()) for name, tensor in backend.weights()]
    backend.close()
    return specs, weights


def decay_only(rank: Rank, *, model: Path, rows: list[PackedMicrobatch]) -> Any:
    backend = rank.open(tiny_config(model))
    before = weights_of(backend)
    silent = [replace(row, advantages=np.zeros_like(row.advantages)) for row in rows]
    train(rank, backend, silent, learning_rate=0.1, weight_decay=0.5)
    after = weights_of(backend)
    backend.close()
    return before, after
