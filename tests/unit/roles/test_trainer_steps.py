"""What the trainer makes of a batch: a step, or a step that is skipped and leaves the policy version where it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.messages import PublishReport, PublishWeights, StepReport
from rlhpc.roles.common.lifecycle import RoleContext
from rlhpc.roles.trainer.role import Trainer
from rlhpc.run_layout import RunLayout
from rlhpc.training.factory import open_backend
from rlhpc.training.process_group import RankContext
from rlhpc.types import PackedBatch, PackedMicrobatch, StepLimits
from tests.contracts.trainer_textbook import load_hf
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import draw_samples, num_loss_tokens, pack_row, tiny_config


class Ear:
    """Hears what the trainer says."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.versions: list[int] = []  # that its heartbeats named

    def send(self, message: object, timeout_s: float = 10.0) -> None:
        self.answers.append(message)

    def now(self, state: str, waits_for: str, policy_version: int) -> None:
        self.versions.append(policy_version)


pytestmark = pytest.mark.starts


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Any]:
    backend = open_backend(tiny_config(make_tiny_checkpoint(tmp_path / "model", hidden=32, layers=1)), RankContext())
    yield backend
    backend.close()


def batch_of(row: PackedMicrobatch, step: int) -> PackedBatch:
    return PackedBatch(
        step=step, policy_version=0, ranks=((row,),), num_loss_tokens=num_loss_tokens([row]), num_samples=2
    )


def test_a_step_outside_the_limits_of_its_batch_is_refused_and_its_figures_are_told(
    backend: Any, tmp_path: Path
) -> None:
    ear = Ear()
    context = RoleContext(
        "trainer", 0, 1, 0, None, "first", RunLayout(tmp_path), tiny_config(tmp_path / "model"), "hash"
    )
    trainer = Trainer(context, backend, ear, ear)  # type: ignore[arg-type]
    batch = batch_of(pack_row(draw_samples((5, 9))), 0)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    refusals = [StepLimits(highs={"grad_norm": 1e-9, "entropy": 1e-9}), StepLimits(must_skip=True)]
    for limits in (*refusals, StepLimits(highs={"grad_norm": 1e9})):
        assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())
        trainer.obey(replace(batch, limits=limits))
    assert [answer.refused for answer in ear.answers] == ["entropy, grad_norm", "as before", ""]
    assert [answer.applied for answer in ear.answers] == [False, False, True]
    assert len({answer.metrics["grad_norm"] for answer in ear.answers}) == 1


def test_a_step_that_is_not_finite_is_reported_as_skipped_and_raises_no_version(backend: Any, tmp_path: Path) -> None:
    ear = Ear()
    context = RoleContext(
        "trainer", 0, 1, 0, None, "first", RunLayout(tmp_path), tiny_config(tmp_path / "model"), "hash"
    )
    trainer = Trainer(context, backend, ear, ear)  # type: ignore[arg-type]
    sound = pack_row(draw_samples((5, 9)))
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    trainer.obey(batch_of(replace(sound, advantages=np.where(sound.loss_mask, np.float32("nan"), 0)), 0))
    assert [(a.step, a.policy_version, a.applied) for a in ear.answers] == [(0, 0, False)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())
    trainer.obey(batch_of(sound, 1))
    assert isinstance(ear.answers[1], StepReport)
    assert (ear.answers[1].step, ear.answers[1].policy_version, ear.answers[1].applied) == (1, 1, True)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())
    assert ear.versions[-1] == 1


def test_a_publication_tells_how_the_published_weights_score_a_row(backend: Any, tmp_path: Path) -> None:
    ear, config = Ear(), tiny_config(tmp_path / "model")
    context = RoleContext("trainer", 0, 1, 0, None, "first", RunLayout(tmp_path), config, "hash")
    trainer = Trainer(context, backend, ear, ear)  # type: ignore[arg-type]
    row = np.arange(5, 14, dtype=np.int32)
    for command in (PublishWeights(1, 0, row), batch_of(pack_row(draw_samples((5, 9))), 0), PublishWeights(1, 1, row)):
        trainer.obey(command)
    trainer.obey(PublishWeights(1, 1))
    before, after, without = (answer for answer in ear.answers if isinstance(answer, PublishReport))
    assert before.error == "epoch 1 is not formed"  # so that a version that goes nowhere costs the ranks the same
    hf = load_hf(tmp_path / "model")
    with torch.no_grad():
        logits = hf(input_ids=torch.from_numpy(row.astype(np.int64))[None]).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.from_numpy(row[1:].astype(np.int64))[:, None])[:, 0].numpy()
    np.testing.assert_allclose(before.canary[1:], expected, atol=1e-5)
    assert before.canary[0] == 0
    assert np.abs(after.canary - before.canary).max() > 1e-5
    assert without.canary is None
