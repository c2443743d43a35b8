"""What each rank does in the tests of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.protocol.contracts import StepResult
from rlhpc.protocol.types import AdapterForm, TensorSpec
from tests.contracts.trainer_cluster import Rank
from tests.contracts.trainer_scenarios import Rows, train, weights_of

Version = dict[str, Tensor]
Course = tuple[list[StepResult], Version, Version, tuple[int, list[Tensor]]]


def adapter_steps(rank: Rank, *, model: Path, steps: list[Rows], **settings: Any) -> Course:
    """Results of steps, versions before and after them, and log-probabilities of the last rows at the end.

    The latter with the index of the replica that they are of.
    """
    backend = rank.open(model, **settings)
    before = weights_of(backend)
    results = [train(rank, backend, rows) for rows in steps]
    assert backend.num_steps_applied == len(steps)
    mine = rank.share(steps[-1], backend.dp_rank, backend.dp_size)
    after, logprobs = weights_of(backend), (backend.dp_rank, [row.cpu() for row in backend.logprobs(mine)])
    backend.close()
    return results, before, after, logprobs


def describe_adapters(
    rank: Rank, *, model: Path, rows: Rows, **settings: Any
) -> tuple[tuple[TensorSpec, ...], AdapterForm | None, list[tuple[str, Tensor]]]:
    """What is announced of versions, and one of them after a step."""
    backend = rank.open(model, **settings)
    train(rank, backend, rows)
    found = backend.tensor_specs(), backend.adapter_form, [(name, each.clone()) for name, each in backend.weights()]
    backend.save(rank.scratch / "state").result()
    backend.close()
    return found


def versions_after_steps(rank: Rank, *, model: Path, steps: list[Rows], **settings: Any) -> list[Version]:
    """The version after each step."""
    backend = rank.open(model, **settings)
    versions = []
    for rows in steps:
        train(rank, backend, rows)
        versions.append(weights_of(backend))
    backend.close()
    return versions


def close_a_version_early(rank: Rank, *, model: Path, rows: Rows, **settings: Any) -> list[Version]:
    """The version before and after one of which rank 0 has taken a single tensor; the others send all of it."""
    backend = rank.open(model, **settings)
    train(rank, backend, rows)
    before, weights = weights_of(backend), backend.weights()
    for _ in weights:
        break
    weights.close()  # type: ignore[attr-defined]
    after = weights_of(backend)
    train(rank, backend, rows)
    backend.close()
    return [before, after]


def base_of(backend: Any) -> dict[str, Tensor]:
    """The frozen weights of a backend, or this rank's part of them."""
    return {name: each.detach().clone() for name, each in backend._lora.base.items()}


def same_base(rank: Rank, *, model: Path, rows: Rows, num_versions: int, **settings: Any) -> list[str]:
    """Names of frozen weights whose bits differ after steps, so many versions, and questions to the reference."""
    backend = rank.open(model, **settings)
    before = base_of(backend)
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    backend.hold_reference("device")
    for number in range(num_versions):
        if number % 20 == 0:
            train(rank, backend, rows)
        for _ in backend.weights():
            pass
    backend.logprobs(mine, of_reference=True)
    after = base_of(backend)
    assert not any(each.requires_grad for each in backend._lora.base.values())  # nor does anybody compute gradients
    backend.close()
    return [name for name in before if not torch.equal(before[name], after[name])]


def four_bit_steps(
    rank: Rank, *, model: Path, steps: list[Rows], **settings: Any
) -> tuple[Version, Version, Version, list[Tensor], list[Tensor], bool]:
    """A and B before and after steps; the version then; log-probabilities of the last rows by policy and reference;
    whether the packed base is bit for bit what it was."""
    backend = rank.open(model, **settings)
    lora = backend._lora

    def bits() -> list[bytes]:
        return [each.packed.numpy().tobytes() for each in lora.quantised.values()]

    packed, before = bits(), {name: each.detach().clone() for name, each in lora.parameters.items()}
    backend.hold_reference("device")
    for rows in steps:
        train(rank, backend, rows)
    mine = rank.share(steps[-1], backend.dp_rank, backend.dp_size)
    policy, reference = (backend.logprobs(mine, of_reference=is_reference) for is_reference in (False, True))
    found = before, {name: each.detach().clone() for name, each in lora.parameters.items()}, weights_of(backend)
    is_same = len(packed) > 0 and packed == bits()
    backend.close()
    return *found, policy, reference, is_same
