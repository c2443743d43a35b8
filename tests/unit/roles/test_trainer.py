"""What the trainer makes of commands: steps, skipped steps, publications, checkpoints."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.algorithms.packing import FlopCost
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.data.demonstrations import Demonstration
from rlhpc.protocol.contracts import StepResult
from rlhpc.protocol.errors import CheckpointError, ConfigError, ProtocolError
from rlhpc.protocol.messages import (
    BatchRows,
    PartReport,
    PublishReport,
    PublishWeights,
    SaveCheckpoint,
    SnapshotTaken,
    StepReport,
)
from rlhpc.protocol.types import PackedBatch, PackedMicrobatch, PackedMinibatch, StepLimits
from rlhpc.roles.controller.batch_maker import pack_demonstrations
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.trainer.models import BatchFigures, open_policy
from rlhpc.roles.trainer.trainer import TRAINER_DIRECTORY, Trainer
from rlhpc.training.backends import AVERAGE
from rlhpc.training.checkpoint_directory import complete
from rlhpc.training.checkpoint_export import REFERENCE_DIRECTORY, save_reference
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from rlhpc.training.trainer_state import STATE_FILE, read_checkpoint
from tests.contracts.trainer_cluster import Rank, RankProcesses
from tests.contracts.trainer_scenarios import train, weights_of
from tests.contracts.trainer_textbook import load_hf
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import draw_samples, dummy_row, num_loss_tokens, pack_row, tiny_config

pytestmark = pytest.mark.starts

# ---------------------------------------------------------------------------------------------------------------- steps
#
# What the trainer makes of a batch: a step, or a step that is skipped and leaves the policy version where it was.


class Ear:
    """Hears what the trainer says, on the channel and with its heartbeats."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.versions: list[int] = []  # that its heartbeats named
        self.told: list[Any] = []
        self.was_told = threading.Event()

    def send(self, message: object, timeout_s: float = 10.0) -> None:
        self.answers.append(message)

    def now(self, state: str, waits_for: str, policy_version: int) -> None:
        self.versions.append(policy_version)

    def tell(self, message: object) -> None:
        self.told.append(message)
        self.was_told.set()


NONE = StepLimits()


def opened(root: Path) -> Any:
    """A backend on a tiny model, which is the same for every root."""
    model = make_tiny_checkpoint(root / "model", hidden=32, layers=1)
    return open_backend(tiny_config(model), RankContext())


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Any]:
    backend = opened(tmp_path)
    yield backend
    backend.close()


def trainer_on(
    backend: Any,
    root: Path,
    ear: Ear,
    resume_step: int | None = None,
    *,
    is_lead: bool = True,
    config: Config | None = None,
    **algorithm: object,
) -> Trainer:
    config = config or tiny_config(root / "model")
    config = config.model_copy(update={"algorithm": AlgorithmConfig.model_validate(algorithm)})
    context = RoleContext("trainer", 0, 1, 0, resume_step, "first", RunLayout(root), config, "hash")
    return Trainer(context, backend, ear if is_lead else None, ear)  # type: ignore[arg-type]


def copied(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def same_weights(backend: Any, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())


def batch_of(row: PackedMicrobatch, step: int) -> PackedBatch:
    return PackedBatch(step, 0, (PackedMinibatch(((row,),), num_loss_tokens([row]), 2),), learning_rate=1e-6)


def test_a_step_outside_the_limits_of_its_batch_is_refused_and_its_figures_are_told(
    backend: Any, tmp_path: Path
) -> None:
    ear = Ear()
    trainer = trainer_on(backend, tmp_path, ear)
    batch = batch_of(pack_row(draw_samples((5, 9))), 0)
    before = copied(backend)
    refusals = [StepLimits(highs={"grad_norm": 1e-9, "entropy": 1e-9}), StepLimits(skip=(0,))]
    for limits in (*refusals, StepLimits(highs={"grad_norm": 1e9})):
        assert same_weights(backend, before)
        trainer.obey(replace(batch, limits=limits))
    assert [answer.refused for answer in ear.answers] == ["entropy, grad_norm", "as before", ""]
    assert [answer.applied for answer in ear.answers] == [False, False, True]
    assert len({answer.metrics["grad_norm"] for answer in ear.answers}) == 1


def test_a_step_that_is_not_finite_is_reported_as_skipped_and_raises_no_version(backend: Any, tmp_path: Path) -> None:
    ear = Ear()
    trainer = trainer_on(backend, tmp_path, ear)
    sound = pack_row(draw_samples((5, 9)))
    before = copied(backend)
    trainer.obey(batch_of(replace(sound, advantages=np.where(sound.loss_mask, np.float32("nan"), 0)), 0))
    assert [(a.step, a.policy_version, a.applied) for a in ear.answers] == [(0, 0, False)]
    assert same_weights(backend, before)
    trainer.obey(batch_of(sound, 1))
    assert isinstance(ear.answers[1], StepReport)
    assert (ear.answers[1].step, ear.answers[1].policy_version, ear.answers[1].applied) == (1, 1, True)
    assert not same_weights(backend, before)
    assert ear.versions[-1] == 1


def test_a_publication_tells_how_the_published_weights_score_a_row(backend: Any, tmp_path: Path) -> None:
    ear = Ear()
    trainer = trainer_on(backend, tmp_path, ear)
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


def test_rows_are_scored_by_the_policy_as_it_is_and_nothing_is_trained(backend: Any, tmp_path: Path) -> None:
    ear = Ear()
    trainer, before = trainer_on(backend, tmp_path, ear, config=staged(tmp_path / "model")), copied(backend)
    rows = [pack_row(draw_samples((5, 9), seed=seed)) for seed in (0, 1)]
    trainer.obey(BatchRows(3, tuple(PackedMinibatch(((row,),), num_loss_tokens([row]), 2) for row in rows)))
    [report] = ear.answers
    hf, nll = load_hf(tmp_path / "model").double(), 0.0
    for row in rows:
        for begin, end in itertools.pairwise(row.cu_seqlens.tolist()):
            tokens = torch.from_numpy(row.token_ids[begin:end].astype(np.int64))
            wanted = torch.where(torch.from_numpy(row.loss_mask[begin:end].copy()), tokens, -100)
            with torch.no_grad():
                logits = hf(input_ids=tokens[None]).logits[0, :-1]
            nll += float(torch.nn.functional.cross_entropy(logits, wanted[1:], reduction="sum"))
    assert (report.rows, report.num_loss_tokens) == (3, num_loss_tokens(rows))
    assert report.loss == pytest.approx(nll, rel=1e-6)
    assert same_weights(backend, before)


def staged(model: Path, lora: dict[str, Any] | None = None, **sft: Any) -> Config:
    """Settings of the stage, of which the trainer reads no data."""
    table = {"path": model, "completion_field": "a"} | ({"rejected_field": "b"} if sft else {})
    trainer = {"backend": "reference", "token_budget": 64, "device": "cpu"}
    return Config.model_validate(
        {
            "run": {"name": "staged"},
            "model": {"path": model, "dtype": "float32"},
            "demonstrations": [table],
            "sft": sft,
            "lora": lora or {},
            "weights": {"form": "merged"} if lora else {},
            "trainer": trainer,
        }
    )


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["full", "adapters"])
def test_preferences_are_learnt_against_the_model_as_it_began(tmp_path: Path, lora: dict[str, Any]) -> None:
    config = staged(make_tiny_checkpoint(tmp_path / "model", hidden=32, layers=1), lora, loss="dpo", beta=0.5)
    backend, ear, start = open_backend(config, RankContext()), Ear(), load_hf(tmp_path / "model").double()
    trainer = trainer_on(backend, tmp_path, ear, config=config)
    trainer.begin()
    answers = [Demonstration(each.token_ids, each.loss_mask) for each in draw_samples((9, 6, 5, 11))]
    pairs = [replace(answers[0], rejected=answers[1]), replace(answers[2], rejected=answers[3])]
    minibatch = pack_demonstrations(pairs, token_budget=64, num_ranks=1, cost=FlopCost(1.0, 0.0))
    for step in range(4):
        trainer.obey(PackedBatch(step, step, (minibatch,), learning_rate=5e-3))
    trainer.obey(BatchRows(3, (minibatch,)))
    trainer.obey(PackedBatch(4, 4, (minibatch,), learning_rate=0.0))
    first, *_, report, last = ear.answers[1:]
    assert first.metrics["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert (first.metrics["preference_accuracy"], first.metrics["preference_margin"]) == (0.0, 0.0)
    trained = load_hf(tmp_path / "model").double()
    trained.load_state_dict({name: each.double() for name, each in backend.weights()}, strict=False)
    backend.close()
    margins = []
    for pair in pairs:
        gains = []
        for each in pair.sequences:
            tokens = torch.from_numpy(each.token_ids.astype(np.int64))
            labels = torch.where(torch.from_numpy(each.loss_mask), tokens, -100)[1:]
            with torch.no_grad():
                nll = [
                    torch.nn.functional.cross_entropy(
                        hf(input_ids=tokens[None]).logits[0, :-1], labels, reduction="sum"
                    )
                    for hf in (start, trained)
                ]
            gains.append(float(nll[0] - nll[1]))
        margins.append(0.5 * (gains[0] - gains[1]))
    assert min(margins) > 0.1
    wanted = [sum(math.log1p(math.exp(-each)) for each in margins), 2.0, sum(margins)]
    found = [report.loss, report.metrics["preference_accuracy"], report.metrics["preference_margin"]]
    assert [each / report.num_loss_tokens * 2 for each in found] == pytest.approx(wanted, rel=1e-4)
    of_step = [last.metrics[name] for name in ("loss", "preference_accuracy", "preference_margin")]
    assert [2 * each for each in of_step] == pytest.approx(wanted, rel=1e-4)


def minibatches_of(
    rows: list[PackedMicrobatch], order: tuple[int, ...], limits: StepLimits = NONE, learning_rate: float = 1e-6
) -> PackedBatch:
    minibatches = tuple(PackedMinibatch(((row,),), num_loss_tokens([row]), 1) for row in rows)
    return PackedBatch(0, 0, minibatches, order, limits, learning_rate)


def test_a_batch_of_several_minibatches_is_as_many_optimiser_steps_and_one_version(
    backend: Any, tmp_path: Path
) -> None:
    ear = Ear()
    trainer = trainer_on(backend, tmp_path, ear, proximal="recompute", minibatches=2, epochs=2)
    rows = [pack_row(draw_samples((5, 9), seed=seed)) for seed in (0, 1)]
    trainer.obey(minibatches_of(rows, (0, 1, 1, 0)))
    assert backend.num_steps_applied == 4
    [report] = ear.answers
    assert (report.applied, report.policy_version, report.skipped) == (True, 1, ())


def test_the_ratio_is_of_the_policy_at_the_start_of_the_batch(backend: Any, tmp_path: Path) -> None:
    """Exactly 1 in the first optimiser step, and not in the second: the anchor stays where it was."""
    ratios = []
    for rows, order in (([0], (0,)), ([0], (0, 0))):
        ear = Ear()
        packed = [pack_row(draw_samples((5, 9), seed=seed)) for seed in rows]
        trainer = trainer_on(backend, tmp_path, ear, proximal="recompute", epochs=len(order), minibatches=1)
        trainer.obey(minibatches_of(packed, order))
        ratios.append(ear.answers[0].metrics["ratio"])
    assert ratios[0] == 1.0
    assert ratios[1] != 1.0


def logprobs_of(backend: Any, rows: list[PackedMicrobatch], **where: bool) -> torch.Tensor:
    return torch.cat(backend.logprobs(rows, **where))


def test_every_minibatch_is_beside_its_own_reference_whatever_their_order(tmp_path: Path) -> None:
    """Before anything has moved the distance is 0; beside another minibatch's it would be a nat and more."""
    rows = [pack_row(draw_samples(lengths, seed=seed)) for seed, lengths in enumerate([(5, 9, 14), (14, 5, 9)])]
    ear, backend = Ear(), opened(tmp_path)
    trainer = trainer_on(backend, tmp_path, ear, proximal="recompute", minibatches=2, epochs=2, kl_coefficient=0.1)
    trainer.begin()
    trainer.obey(minibatches_of(rows, (1, 0, 0, 1), learning_rate=1e-9))
    assert 0 <= ear.answers[-1].metrics["kl_reference"] < 1e-6
    backend.close()


def test_a_teacher_as_the_reference_comes_with_the_rows_and_no_model_is_held(tmp_path: Path) -> None:
    """Beside the policy itself the distance is 0; a row without samples has none, and counts for nothing."""
    rows, backend = [pack_row(draw_samples((5, 9), seed=seed)) for seed in (0, 1)], opened(tmp_path)
    own = [logprobs.numpy() * row.loss_mask for logprobs, row in zip(backend.logprobs(rows), rows, strict=True)]
    found = []
    for shift in (0.0, 1.0):
        ear = Ear()
        words = {"kl_coefficient": 0.1, "kl_reference": "teacher", "proximal": "recompute", "minibatches": 2}
        trainer = trainer_on(backend, tmp_path, ear, **words)
        trainer.begin()
        said = [replace(row, teacher_logprobs=each + np.float32(shift)) for row, each in zip(rows, own, strict=True)]
        batch = minibatches_of(said, (1, 0), learning_rate=1e-9)
        idle = replace(batch.minibatches[0], ranks=((*batch.minibatches[0].ranks[0], dummy_row()),))
        trainer.obey(replace(batch, minibatches=(idle, batch.minibatches[1])))
        found.append(ear.answers[-1].metrics["kl_reference"])
        with pytest.raises(AssertionError, match="no reference is held"):
            backend.logprobs(rows, of_reference=True)
    assert 0 <= found[0] < 1e-6
    assert found[1] == pytest.approx(math.e - 2, rel=1e-4)  # k3 of a teacher that is e times as sure everywhere
    backend.close()


def test_after_a_resume_the_reference_is_still_the_model_that_the_run_began_with(tmp_path: Path) -> None:
    rows, backend = [pack_row(draw_samples((5, 9)))], opened(tmp_path)
    start = logprobs_of(backend, rows)
    trainer = trainer_on(backend, tmp_path, Ear(), kl_coefficient=0.1)
    trainer.begin()
    trainer.obey(minibatches_of(rows, (0,)))
    checkpoint = RunLayout(tmp_path).checkpoint(1)
    backend.save(tmp_path / "saved" / TRAINER_DIRECTORY).result()
    checkpoint.parent.mkdir(parents=True)
    complete(tmp_path / "saved", checkpoint, {"policy_version": 1})
    trained = logprobs_of(backend, rows)
    backend.close()
    again = opened(tmp_path)
    resumed = trainer_on(again, tmp_path, Ear(), resume_step=1, kl_coefficient=0.1)
    resumed.begin()
    assert torch.equal(logprobs_of(again, rows), trained)
    assert torch.equal(logprobs_of(again, rows, of_reference=True), start)
    assert not torch.equal(trained, start)
    again.close()


def renewing(backend: Any, tmp_path: Path, resume_step: int | None = None) -> tuple[Trainer, Ear]:
    ear = Ear()
    trainer = trainer_on(
        backend, tmp_path, ear, resume_step, proximal="recompute", kl_coefficient=0.1, reference_every=2
    )
    trainer.begin()
    return trainer, ear


def obey_steps(trainer: Trainer, rows: list[PackedMicrobatch], steps: range) -> None:
    """As the controller says it: the policy of versions 2, 4, … is the reference of the batches after it."""
    for step in steps:
        batch = replace(minibatches_of(rows, (0,), learning_rate=1e-2), step=step, policy_version=step)
        trainer.obey(replace(batch, renews_reference=step in (2, 4)))


def divergences(ear: Ear) -> list[float]:
    return [answer.metrics["kl_reference"] for answer in ear.answers if isinstance(answer, StepReport)]


def test_a_reference_that_is_renewed_is_the_policy_again_and_a_resume_goes_on_with_it_bit_for_bit(
    tmp_path: Path,
) -> None:
    rows, backend = [pack_row(draw_samples((5, 9, 14)))], opened(tmp_path)
    checkpoint = RunLayout(tmp_path).checkpoint(3)
    trainer, ear = renewing(backend, tmp_path)
    obey_steps(trainer, rows, range(3))
    trainer.obey(SaveCheckpoint(3, str(tmp_path / "saved")))
    assert trainer._saving is not None
    assert "reference/model.safetensors" in trainer._saving.result(timeout=60)
    obey_steps(trainer, rows, range(3, 6))
    found = divergences(ear)
    assert [value < 1e-9 for value in found] == [True, False, True, False, True, False]
    ends = copied(backend)
    backend.close()
    checkpoint.parent.mkdir(parents=True)
    complete(tmp_path / "saved", checkpoint, {"policy_version": 3})
    again = open_policy(resuming(tmp_path, 3))
    resumed, later = renewing(again, tmp_path, 3)
    obey_steps(resumed, rows, range(3, 6))
    assert divergences(later) == found[3:]
    assert same_weights(again, ends)
    again.close()


def resuming(tmp_path: Path, step: int) -> RoleContext:
    config = tiny_config(tmp_path / "model")
    algorithm = AlgorithmConfig(kl_coefficient=0.1, reference_every=2, proximal="recompute")
    config = config.model_copy(update={"algorithm": algorithm})
    return RoleContext("trainer", 0, 1, 0, step, "first", RunLayout(tmp_path), config, "hash")


def test_a_checkpoint_without_a_reference_leaves_it_at_the_model_that_the_run_began_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, backend = [pack_row(draw_samples((5, 9)))], opened(tmp_path)
    start = logprobs_of(backend, rows)
    backend.close()
    RunLayout(tmp_path).checkpoint(3).mkdir(parents=True)
    caplog.set_level("INFO")
    again = open_policy(resuming(tmp_path, 3))
    assert torch.equal(logprobs_of(again, rows), start)
    assert "has no reference: the model at model.path is used until it is renewed" in caplog.text
    again.close()


def test_a_reference_that_cannot_be_written_is_a_checkpoint_that_failed_and_costs_the_policy_nothing(
    backend: Any, tmp_path: Path
) -> None:
    before = copied(backend)
    backend.hold_reference("host")
    (tmp_path / "file").write_text("in the way")
    failed = save_reference(backend, tmp_path / "model", tmp_path / "file" / REFERENCE_DIRECTORY)
    with pytest.raises(CheckpointError, match="the reference cannot be written"):
        failed.result()
    assert same_weights(backend, before)
    assert save_reference(backend, tmp_path / "model", tmp_path / "again").result()["again/model.safetensors"] > 0


def test_the_average_moves_once_with_every_batch_that_changed_the_policy_and_is_in_its_checkpoint(
    backend: Any, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path / "model", ema_decay=0.5)
    algorithm = AlgorithmConfig(proximal="recompute", minibatches=2)
    config = config.model_copy(update={"algorithm": algorithm})
    context, ear = RoleContext("trainer", 0, 1, 0, None, "first", RunLayout(tmp_path), config, "hash"), Ear()
    trainer = Trainer(context, backend, ear, ear)  # type: ignore[arg-type]
    trainer.begin()
    rows = [pack_row(draw_samples((5, 9), seed=seed)) for seed in (0, 1)]
    expected = {name: tensor.double() for name, tensor in backend.weights()}
    for step, skip in enumerate([(), (0, 1), (1,)]):  # all of it, nothing, a part
        trainer.obey(replace(minibatches_of(rows, (0, 1), StepLimits(skip=skip), 1e-2), step=step))
        if step != 1:
            expected = {name: (expected[name] + tensor.double()) / 2 for name, tensor in backend.weights()}
    trainer.obey(SaveCheckpoint(3, str(tmp_path / "saved")))
    assert trainer._saving is not None
    trainer._saving.result(timeout=60)
    found = {name: tensor for _, name, tensor in read_checkpoint(tmp_path / "saved" / "trainer", None).tensors(AVERAGE)}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name], atol=1e-7, rtol=1e-6)


def test_optimiser_steps_that_are_refused_are_named_and_the_others_count(backend: Any, tmp_path: Path) -> None:
    ear = Ear()
    trainer = trainer_on(backend, tmp_path, ear, proximal="recompute", minibatches=3)
    rows = [pack_row(draw_samples((5, 9), seed=seed)) for seed in (0, 1, 2)]
    trainer.obey(minibatches_of(rows, (0, 1, 2), StepLimits(skip=(0, 2))))
    trainer.obey(replace(minibatches_of(rows, (0, 1, 2), StepLimits(skip=(0, 1, 2))), step=1, policy_version=1))
    first, second = ear.answers
    assert (first.applied, first.policy_version, first.refused, first.skipped) == (True, 1, "as before", (0, 2))
    assert (second.applied, second.policy_version, second.skipped) == (False, 1, (0, 1, 2))
    assert backend.num_steps_applied == 1


def test_figures_of_a_batch_are_means_over_the_tokens_of_all_its_optimiser_steps() -> None:
    figures = BatchFigures()
    figures.add(StepResult(True, 2.0, {"loss": 6.0}), 3, "")
    figures.add(StepResult(True, 4.0, {"loss": 1.0}), 1, "")
    figures.add(StepResult(False, float("nan"), {"loss": float("nan")}), 5, "")
    assert figures.means() == {"loss": 7 / 4, "grad_norm": 3.0}
    assert (figures.is_applied, figures.refused, figures.skipped) == (True, "", ())
    broken = BatchFigures()
    broken.add(StepResult(False, float("nan"), {"loss": float("inf")}), 5, "")
    assert broken.means()["loss"] == float("inf")
    assert not broken.is_applied


def test_a_loss_that_is_not_there_is_told_before_the_first_batch(backend: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss='no_such_module:loss': cannot import no_such_module"):
        trainer_on(backend, tmp_path, Ear(), loss="no_such_module:loss")


# ------------------------------------------------------------------------------------------------------ steps in parts


ROWS = [pack_row(draw_samples(lengths, seed=seed)) for seed, lengths in enumerate([(5, 9), (14,), (7, 8, 4)])]


def part_of(rows: list[Any], num_before: int, num_tokens: int, *, is_part: bool) -> PackedBatch:
    minibatch = PackedMinibatch((tuple(rows),), num_tokens, 2)
    return PackedBatch(0, 0, (minibatch,), learning_rate=1e-3, num_parts_before=num_before, is_part=is_part)


def test_a_step_in_parts_is_the_step_on_the_whole_batch(backend: Any, tmp_path: Path) -> None:
    ear, total = Ear(), num_loss_tokens(ROWS)
    start = copied(backend)
    backend.save(tmp_path / "start" / "trainer").result()
    trainer_on(backend, tmp_path, ear).obey(part_of(ROWS, 0, total, is_part=False))
    whole = copied(backend)
    backend.load(tmp_path / "start" / "trainer")
    trainer = trainer_on(backend, tmp_path, ear)
    for number, row in enumerate(ROWS):
        is_last = number == len(ROWS) - 1
        assert is_last or same_weights(backend, start)
        trainer.obey(part_of([row], number, total if is_last else 7, is_part=not is_last))
    at_once, *parts, last = ear.answers
    assert parts == [PartReport(0, 0), PartReport(0, 1)]
    for name in ("loss", "grad_norm", "entropy"):
        assert last.metrics[name] == pytest.approx(at_once.metrics[name], rel=1e-5)
    for name, tensor in backend.weights():
        np.testing.assert_allclose(tensor.numpy(), whole[name].numpy(), rtol=1e-4, atol=1e-6)


def test_a_step_that_was_given_up_leaves_nothing_to_the_next(backend: Any, tmp_path: Path) -> None:
    """Another controller begins its step anew."""
    ear = Ear()
    trainer = trainer_on(backend, tmp_path, ear)
    spoiled = replace(ROWS[0], advantages=np.where(ROWS[0].loss_mask, np.float32("nan"), 0))
    trainer.obey(part_of([spoiled], 0, 7, is_part=True))
    trainer.obey(part_of(ROWS[:1], 0, 7, is_part=True))
    trainer.obey(part_of(ROWS[1:], 1, num_loss_tokens(ROWS), is_part=False))
    assert ear.answers[-1].applied


def test_a_part_without_those_before_it_is_refused_and_so_is_a_batch_after_parts_of_another(
    backend: Any, tmp_path: Path
) -> None:
    trainer = trainer_on(backend, tmp_path, Ear())
    with pytest.raises(ProtocolError, match="part 1 of step 0 after 0 parts"):
        trainer.obey(part_of(ROWS[:1], 1, 7, is_part=False))
    trainer.obey(part_of(ROWS[:1], 0, 7, is_part=True))
    with pytest.raises(ProtocolError, match="part 0 of step 0 after 1 parts"):
        trainer.obey(part_of(ROWS, 0, num_loss_tokens(ROWS), is_part=False))


# ---------------------------------------------------------------------------------------------------------- checkpoints
#
# What the trainer does with SaveCheckpoint: answer when the state is copied, tell later how the writing ended.


def slow_disk(directory: Path) -> Path:
    """Nothing is written into the first file before somebody reads it."""
    (directory / TRAINER_DIRECTORY).mkdir(parents=True)
    pipe = directory / TRAINER_DIRECTORY / ".weights-00001.safetensors.tmp"
    os.mkfifo(pipe)
    return pipe


def test_the_answer_comes_with_the_snapshot_and_the_report_when_all_is_written(backend, tmp_path):
    ear, pipe = Ear(), slow_disk(tmp_path / "save")
    trainer = trainer_on(backend, tmp_path, ear)
    assert trainer.obey(SaveCheckpoint(4, str(tmp_path / "save")))
    assert [(type(answer), answer.step) for answer in ear.answers] == [(SnapshotTaken, 4)]
    assert ear.told == []
    reading = threading.Thread(target=pipe.read_bytes)  # what went into the pipe is gone: only its course matters here
    reading.start()
    assert ear.was_told.wait(PATIENCE_S)
    reading.join()
    (report,) = ear.told
    assert report.step == 4
    assert report.seconds > ear.answers[0].seconds


@pytest.mark.parametrize("is_writable", [True, False])
def test_the_report_of_a_checkpoint_says_whether_it_is_sound(backend, tmp_path, is_writable):
    ear = Ear()
    if not is_writable:
        (tmp_path / "save").write_text("")
    trainer_on(backend, tmp_path, ear).obey(SaveCheckpoint(4, str(tmp_path / "save")))
    assert ear.was_told.wait(PATIENCE_S)
    if is_writable:
        assert ear.told[0].error == ""
        assert read_checkpoint(tmp_path / "save" / TRAINER_DIRECTORY, backend.tensor_specs()).num_steps_applied == 0
    else:
        assert "cannot be written" in ear.told[0].error


def test_a_rank_that_does_not_lead_logs_a_failure_and_tells_nobody(backend, tmp_path, caplog):
    ear = Ear()
    (tmp_path / "save").write_text("")
    trainer_on(backend, tmp_path, ear, is_lead=False).obey(SaveCheckpoint(4, str(tmp_path / "save")))
    backend.close()
    assert "the checkpoint of step 4 could not be written" in caplog.text
    assert ear.answers == ear.told == []


def test_a_trainer_in_haste_gives_the_write_up_and_reports_nothing(backend, tmp_path):
    ear, pipe = Ear(), slow_disk(tmp_path / "save")
    trainer = trainer_on(backend, tmp_path, ear)
    trainer.obey(SaveCheckpoint(4, str(tmp_path / "save")))
    trainer.close(in_haste=True)
    reading = threading.Thread(target=pipe.read_bytes)
    reading.start()
    backend.close()
    reading.join()
    assert ear.told == []
    assert not (tmp_path / "save" / TRAINER_DIRECTORY / STATE_FILE).exists()


def test_a_trainer_that_is_asked_to_stop_finishes_the_write(backend, tmp_path):
    ear = Ear()
    trainer = trainer_on(backend, tmp_path, ear)
    trainer.obey(SaveCheckpoint(4, str(tmp_path / "save")))
    trainer.close(in_haste=False)
    backend.close()
    assert [report.error for report in ear.told] == [""]
    assert (tmp_path / "save" / TRAINER_DIRECTORY / STATE_FILE).exists()


# -------------------------------------------------------------------------------------------------------- several ranks
#
# What several ranks do when nobody takes the weights that they bring together.


TENSOR_2 = {"backend": "megatron", "num_ranks": 2, "tensor_parallel": 2}


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


@pytest.mark.long
def test_ranks_stay_in_step_when_a_version_finds_no_epoch_to_go_to(two_ranks, tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", hidden=32, layers=2)
    (errors, weights), (others, nothing) = two_ranks.run(publish_to_nobody, TENSOR_2, tmp_path / "run", model=model)
    assert errors == ["epoch 1 is not formed"]
    assert not others
    assert not nothing
    saved = read_checkpoint(tmp_path / "run" / "save", None).tensors("weights")
    assert all(torch.equal(weights[name], tensor) for _, name, tensor in saved)
