"""What several ranks do when nobody takes the weights that they bring together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.messages import PublishReport, PublishWeights
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.trainer.trainer import Trainer
from rlhpc.training.trainer_state import read_checkpoint
from tests.contracts.trainer_cluster import Rank, RankProcesses
from tests.contracts.trainer_scenarios import train, weights_of
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import draw_samples, pack_row, tiny_config

pytestmark = pytest.mark.long

TENSOR_2 = {"backend": "megatron", "num_ranks": 2, "tensor_parallel": 2}


class Ear:
    """Hears what the trainer says."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def send(self, message: object, timeout_s: float = 10.0) -> None:
        self.answers.append(message)

    def now(self, state: str, waits_for: str, policy_version: int) -> None:
        pass


def publish_to_nobody(rank: Rank, *, model):
    """No epoch is formed: the lead fails before it has asked for one tensor.  Then a step, and weights again."""
    backend, ear = rank.open(model), Ear()
    config = tiny_config(model, **rank.layout)
    context = RoleContext("trainer", rank.rank, 1, 0, None, "first", RunLayout(rank.scratch), config, "hash")
    trainer = Trainer(context, backend, ear if backend.is_rank_zero else None, ear)
    trainer.begin()
    trainer.obey(PublishWeights(epoch=1, policy_version=0))
    reports = [answer for answer in ear.answers if isinstance(answer, PublishReport)]
    train(rank, backend, [pack_row(draw_samples((5, 9)))])
    weights = weights_of(backend)
    backend.save(rank.scratch / "save").result()
    backend.close()
    return [report.error for report in reports], weights


@pytest.fixture
def two_ranks():
    processes = RankProcesses(2)
    yield processes
    processes.close()


def test_ranks_stay_in_step_when_a_version_finds_no_epoch_to_go_to(two_ranks, tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", hidden=32, layers=2)
    (errors, weights), (others, nothing) = two_ranks.run(publish_to_nobody, TENSOR_2, tmp_path / "run", model=model)
    assert errors == ["epoch 1 is not formed"]
    assert not others
    assert not nothing
    saved = read_checkpoint(tmp_path / "run" / "save", None).tensors("weights")
    assert all(torch.equal(weights[name], tensor) for _, name, tensor in saved)
