"""What each rank does in the tests of a frozen reference and of what is added to a loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.contracts import StepResult, TrainerBackend
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.checkpoint_export import save_reference
from tests.contracts.trainer_cluster import Rank
from tests.contracts.trainer_scenarios import Rows, train, weights_of


def ask_a_reference(rank: Rank, *, model: Path, rows: Rows, memory: str, **settings: Any) -> dict[str, list[Tensor]]:
    """Log-probabilities at the start, and after two steps by policy and reference, twice, an error in between.

    The whole state is saved before the reference is asked, and after.
    """
    backend = rank.open(model, **settings)
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    backend.hold_reference("device")
    seen = {"start": backend.logprobs(mine)}
    backend.hold_reference(memory)  # replaces the other
    for _ in range(2):
        train(rank, backend, rows)
    seen["policy"] = backend.logprobs(mine)
    weights = weights_of(backend)
    backend.save(rank.scratch / "before").result()
    seen["reference"] = backend.logprobs(mine, of_reference=True)
    with pytest.raises(AttributeError):
        backend.logprobs([replace(row, position_ids=None) for row in mine], of_reference=True)  # type: ignore[arg-type]
    seen["policy again"] = backend.logprobs(mine)
    assert all((tensor == weights[name]).all() for name, tensor in weights_of(backend).items())
    backend.save(rank.scratch / "after").result()
    train(rank, backend, rows)
    seen["reference again"] = backend.logprobs(mine, of_reference=True)
    backend.close()
    return {name: [row.cpu() for row in each] for name, each in seen.items()}


def renew_a_reference(rank: Rank, *, model: Path, rows: Rows, **settings: Any) -> dict[str, list[Tensor]]:
    """Saved with the policy.  Log-probabilities by the policy that it becomes, and by both when they are saved."""
    backend = rank.open(model, **settings)
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    backend.hold_reference("host")
    train(rank, backend, rows)
    seen = {"new": backend.logprobs(mine)}
    backend.hold_reference("host")
    train(rank, backend, rows)
    weights = weights_of(backend)
    saving = backend.save(rank.scratch / "policy")
    files = save_reference(backend, model, rank.scratch / "reference").result()
    assert bool(files) == backend.is_rank_zero
    saving.result()
    assert all((tensor == weights[name]).all() for name, tensor in weights_of(backend).items())
    seen |= {"reference": backend.logprobs(mine, of_reference=True), "policy": backend.logprobs(mine)}
    backend.close()
    return {name: [row.cpu() for row in each] for name, each in seen.items()}


def go_on_with_a_reference(rank: Rank, *, saved: Path, rows: Rows, **settings: Any) -> dict[str, list[Tensor]]:
    """Open what renew_a_reference has saved in its scratch directory; log-probabilities by both."""
    backend = rank.open(saved / "reference", **settings)
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    backend.hold_reference("device")
    backend.load(saved / "policy")
    seen = {"reference": backend.logprobs(mine, of_reference=True), "policy": backend.logprobs(mine)}
    backend.close()
    return {name: [row.cpu() for row in each] for name, each in seen.items()}


def regularised_steps(
    rank: Rank,
    *,
    model: Path,
    rows: Rows,
    references: list[Tensor],
    algorithms: list[dict[str, Any]],
    step: dict[str, Any],
    **settings: Any,
) -> tuple[list[StepResult], dict[str, Tensor]]:
    """A step by each algorithm that is not applied, so that all see the same weights; the last one is: its weights."""
    backend, results = rank.open(model, **settings), []
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    asked = _shared(rank, backend, rows, references)
    for index, algorithm in enumerate(algorithms):
        config = AlgorithmConfig.model_validate(algorithm)
        is_last = index == len(algorithms) - 1
        results.append(
            backend.step(
                mine,
                make_policy_loss(config, policy_version=0),
                proximal=None,
                reference=asked,
                has_entropy_gradient=config.entropy_coefficient > 0,
                may_apply=lambda metrics, norm, is_last=is_last: is_last,
                **step,
            )
        )
    weights = weights_of(backend)
    backend.close()
    return results, weights


def _shared(rank: Rank, backend: TrainerBackend, rows: Rows, references: list[Tensor]) -> list[Tensor]:
    """References of the rows that are this replica's; of a row to spare, that of one token."""
    places: dict[bytes, Tensor] = {_name(row): each for row, each in zip(rows, references, strict=True)}
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    return [places.get(_name(row), references[0].new_zeros(len(row.token_ids))) for row in mine]


def _name(row: PackedMicrobatch) -> bytes:
    return np.ascontiguousarray(row.token_ids).tobytes()
