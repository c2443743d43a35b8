"""The trainer with a critic: rewards become advantages, the critic learns, and both are saved and taken up."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import AlgorithmConfig, CriticConfig
from rlhpc.protocol.errors import CheckpointError
from rlhpc.protocol.messages import SaveCheckpoint, StepReport
from rlhpc.protocol.types import PackedBatch, PackedMicrobatch, PackedMinibatch
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.trainer.models import CRITIC_DIRECTORY, Critic
from rlhpc.roles.trainer.trainer import TRAINER_DIRECTORY, Together, Trainer
from rlhpc.training.checkpoint_directory import complete
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.algorithms.test_estimators import gae_of
from tests.unit.roles.test_trainer import Ear, copied, same_weights
from tests.unit.training.packed_rows import draw_samples, num_loss_tokens, pack_row, tiny_config
from tests.unit.training.rank_processes import run_ranks

pytestmark = pytest.mark.starts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", hidden=32, layers=1)


def config_of(model: Path, normalization: str = "batch", backend: str = "reference", **critic: object) -> Config:
    algorithm = {"advantage": "gae", "advantage_normalization": normalization, "gae_lambda": 0.9, "minibatches": 2}
    config = tiny_config(model, backend=backend)
    return config.model_copy(
        update={
            "algorithm": AlgorithmConfig.model_validate(algorithm | {"proximal": "recompute"}),
            "critic": CriticConfig.model_validate(critic),
        }
    )


def rewarded_row(lengths: tuple[int, ...], seed: int) -> PackedMicrobatch:
    """A reward on the last token of each: 1 if its first token is even."""
    samples = []
    for sample in draw_samples(lengths, seed=seed):
        rewards = np.zeros(len(sample.token_ids), np.float32)
        rewards[-1] = float(sample.token_ids[0] % 2 == 0)
        samples.append(replace(sample, advantages=rewards))
    return pack_row(samples)


ROWS = [rewarded_row(lengths, seed) for seed, lengths in enumerate([(5, 9, 14), (14, 5, 9), (7, 7, 7), (20, 4, 4)])]


def batch_on(num_ranks: int, step: int = 0, order: tuple[int, ...] = (0, 1)) -> PackedBatch:
    """Two minibatches of two rows, on one rank or on two."""
    minibatches = []
    for rows in (ROWS[:2], ROWS[2:]):
        ranks = (tuple(rows),) if num_ranks == 1 else tuple((row,) for row in rows)
        minibatches.append(PackedMinibatch(ranks, num_loss_tokens(rows), 6))
    return PackedBatch(step, step, tuple(minibatches), order, learning_rate=1e-3, critic_learning_rate=1e-2)


def critic_of(config: Config, context: RankContext | None = None) -> Critic:
    return Critic(open_backend(config, context or RankContext(), has_value_head=True), config)


def test_advantages_are_gae_s_over_the_batch_at_mean_0_and_deviation_1(model: Path) -> None:
    critic = critic_of(config_of(model))
    for step in range(3):
        judged = critic.judge(batch_on(1, step))
        raw = []
        for index, rows in enumerate((ROWS[:2], ROWS[2:])):
            for place, row in enumerate(rows):
                advantages, returns = gae_of(row, judged.values[index][place].numpy(), 1.0, 0.9)
                np.testing.assert_allclose(judged.returns[index][place].advantages, returns, atol=1e-6)
                raw.append(advantages[row.loss_mask])
        pooled = np.concatenate(raw)
        given = np.concatenate([row.advantages[row.loss_mask] for row in judged.batch.rows])
        np.testing.assert_allclose(given, (pooled - pooled.mean()) / pooled.std(), atol=1e-5)
        masked = np.concatenate([row.advantages[~row.loss_mask] for row in judged.batch.rows])
        assert not masked.any()
        assert judged.figures["critic/advantage_std"] == pytest.approx(pooled.std(), rel=1e-6)
        critic.learn(judged)


def references_of(batch: PackedBatch) -> list[list[torch.Tensor]]:
    """What some reference would say of every row."""
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randn(len(row.token_ids), generator=generator) * 0.3 - 1.0 for row in minibatch.ranks[0]]
        for minibatch in batch.minibatches
    ]


def priced_by(config: Config, estimator: str) -> Config:
    words = {"kl_coefficient": 0.3, "kl_in": "reward", "kl_estimator": estimator}
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=words)})


@pytest.mark.parametrize(
    ("estimator", "cost"), [("k1", lambda x: -x), ("k2", lambda x: x**2 / 2), ("k3", lambda x: np.expm1(x) - x)]
)
def test_a_token_s_reward_is_less_by_its_divergence_from_the_reference(
    model: Path, estimator: str, cost: Callable[[np.ndarray], np.ndarray]
) -> None:
    batch = batch_on(1)
    critic, references = critic_of(priced_by(config_of(model, "off"), estimator)), references_of(batch)
    judged = critic.judge(batch, references)
    for index, minibatch in enumerate(batch.minibatches):
        for place, row in enumerate(minibatch.ranks[0]):
            x = references[index][place].numpy().astype(np.float64) - row.behaviour_logprobs
            priced = replace(row, advantages=(row.advantages - 0.3 * np.where(row.loss_mask, cost(x), 0)).astype("f4"))
            advantages, returns = gae_of(priced, judged.values[index][place].numpy(), 1.0, 0.9)
            given = judged.batch.minibatches[index].ranks[0][place].advantages
            np.testing.assert_allclose(given, advantages, rtol=1e-6, atol=1e-5)
            np.testing.assert_allclose(judged.returns[index][place].advantages, returns, rtol=1e-6, atol=1e-5)
    references[0][0][int(np.flatnonzero(ROWS[0].loss_mask)[2])] = float("nan")
    assert not np.isfinite(critic.judge(batch, references).batch.minibatches[0].ranks[0][0].advantages).all()


def test_rows_are_read_only_as_those_of_a_message_and_nobody_is_warned_of_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, batch = priced_by(config_of(model), "k1"), batch_on(1)
    for row in batch.minibatches[0].ranks[0]:
        monkeypatch.setattr(row.behaviour_logprobs.flags, "writeable", False)
    said_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            critic_of(config).judge(batch, references_of(batch))
    finally:
        torch.set_warn_always(said_always)


def test_where_the_reward_pays_for_the_reference_the_loss_does_not(model: Path, tmp_path: Path) -> None:
    """The first batch: policy and reference are one, and what the sampler said is what is paid for."""
    metrics = {}
    for kl_in, coefficient in (("loss", 0.0), ("loss", 0.5), ("reward", 0.5)):
        ear = Ear()
        trainer, _ = trainer_on(model, tmp_path, ear, algorithm={"kl_in": kl_in, "kl_coefficient": coefficient})
        trainer._channel = None
        trainer.begin()
        trainer._channel = ear  # type: ignore[assignment]
        for step in range(2):
            trainer.obey(batch_on(1, step))
        metrics[kl_in, coefficient] = [each.metrics for each in ear.answers if isinstance(each, StepReport)]
        trainer._backend.close()
    without, in_loss, in_reward = metrics.values()
    assert "kl_reference" not in without[1]
    assert in_loss[1]["kl_reference"] > 0 < in_reward[1]["kl_reference"]
    assert in_loss[0]["critic/return_mean"] == without[0]["critic/return_mean"]
    assert in_reward[0]["critic/return_mean"] != without[0]["critic/return_mean"]


def test_it_explains_more_and_more_of_the_returns(model: Path) -> None:
    critic, explained = critic_of(config_of(model)), []
    for step in range(40):
        judged = critic.judge(batch_on(1, step))
        explained.append(critic.learn(judged)["critic/explained_variance"])
    assert explained[0] < 0.1
    assert explained[-1] > 0.9


def _judged_and_learnt(rank: int, world_size: int, config: Config, num_replicas: int) -> tuple[Any, ...]:
    context = RankContext(rank, world_size)
    policy = open_backend(config, context)  # first, as in the trainer
    critic, place = critic_of(config, context), policy.dp_rank
    for step in range(2):
        judged = critic.judge(batch_on(num_replicas, step))
        figures = critic.learn(judged)
    mine = [row.advantages for minibatch in judged.batch.minibatches for row in minibatch.ranks[place]]
    critic.close()
    policy.close()
    return figures, mine, place


TP2, PP2, CP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}


@pytest.mark.parametrize(
    ("backend", "keys", "num_replicas"),
    [
        ("reference", {}, 2),
        ("deepspeed", {"zero_stage": 2}, 2),
        ("deepspeed", {"zero_stage": 3}, 2),
        ("megatron", {}, 2),
        ("megatron", TP2, 1),
        ("megatron", TP2 | {"sequence_parallel": True}, 1),
        ("megatron", PP2, 1),
        ("megatron", CP2, 1),
    ],
)
def test_two_ranks_judge_and_learn_as_one(
    tmp_path: Path, backend: str, keys: dict[str, object], num_replicas: int
) -> None:
    """The reference on one rank, the others on two; of two layers, so that there may be two stages."""
    model = make_tiny_checkpoint(tmp_path / "m", hidden=64, layers=2)
    alone = config_of(model)
    config = alone.model_copy(update={"trainer": tiny_config(model, backend=backend, num_ranks=2, **keys).trainer})
    ((figures, whole, _),) = run_ranks(1, _judged_and_learnt, tmp_path / "one", alone, 1)
    first, second = run_ranks(2, _judged_and_learnt, tmp_path / "two", config, num_replicas, timeout_s=120)
    for found, rows, place in (first, second):
        assert found == first[0]
        for name, value in figures.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        for row, expected in zip(rows, whole[place::num_replicas], strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- the role


def trainer_on(
    model: Path, root: Path, ear: Ear, *, resume: bool = False, algorithm: Any = None, **critic: object
) -> tuple[Trainer, Any]:
    config = config_of(model, **critic)
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=algorithm or {})})
    context = RoleContext("trainer", 0, 1, 0, 2 if resume else None, "first", RunLayout(root), config, "hash")
    backend = open_backend(config, RankContext())
    trainer = Trainer(context, backend, ear, ear, critic_of(config))  # type: ignore[arg-type]
    return trainer, backend


def test_at_a_rate_of_zero_only_the_critic_learns(model: Path, tmp_path: Path) -> None:
    ear = Ear()
    trainer, backend = trainer_on(model, tmp_path, ear)
    before = copied(backend)
    for step in range(3):
        assert same_weights(backend, before)
        trainer.obey(replace(batch_on(1, step), learning_rate=0.0 if step < 2 else 1e-3))
    assert not same_weights(backend, before)
    losses = [answer.metrics["critic/loss"] for answer in ear.answers]
    reported = {"loss", "critic/loss", "critic/explained_variance", "critic/grad_norm"}
    assert reported <= set(ear.answers[-1].metrics)
    assert losses[0] > losses[1] > losses[2]
    assert [answer.metrics["learning_rate"] for answer in ear.answers] == [0.0, 0.0, 1e-3]
    assert [answer.metrics["critic/learning_rate"] for answer in ear.answers] == [1e-2, 1e-2, 1e-2]


def saved_at_two(model: Path, root: Path) -> tuple[list[Any], Trainer, Ear]:
    """Two steps, a checkpoint, and two more."""
    ear, layout = Ear(), RunLayout(root)
    trainer, _ = trainer_on(model, root, ear)
    for step in range(2):
        trainer.obey(batch_on(1, step))
    temporary = root / "checkpoints" / ".step"
    temporary.mkdir(parents=True)
    trainer.obey(SaveCheckpoint(2, str(temporary)))
    saving = trainer._saving
    assert saving is not None
    assert all(size > 0 for size in saving.result(timeout=60).values())
    complete(temporary, layout.checkpoint(2), {"attempt": 0, "step": 2, "policy_version": 2})
    for step in (2, 3):
        trainer.obey(batch_on(1, step))
    return [answer.metrics for answer in ear.answers if isinstance(answer, StepReport)][2:], trainer, ear


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


def test_a_resume_goes_on_with_the_critic_of_the_checkpoint_bit_for_bit(model: Path, tmp_path: Path) -> None:
    expected, _, _ = saved_at_two(model, tmp_path)
    ear = Ear()
    trainer, _ = trainer_on(model, tmp_path, ear, resume=True)
    trainer._channel = None  # nobody is told what will be broadcast
    trainer.begin()
    trainer._channel = ear  # type: ignore[assignment]
    for step in (2, 3):
        trainer.obey(batch_on(1, step))
    found = [answer.metrics for answer in ear.answers if isinstance(answer, StepReport)]
    assert [without_times(metrics) for metrics in found] == [without_times(metrics) for metrics in expected]


def test_a_checkpoint_without_a_critic_is_refused(model: Path, tmp_path: Path) -> None:
    saved_at_two(model, tmp_path)
    there = RunLayout(tmp_path).checkpoint(2)
    assert (there / TRAINER_DIRECTORY).is_dir()
    (there / CRITIC_DIRECTORY).rename(tmp_path / "away")
    trainer, _ = trainer_on(model, tmp_path, Ear(), resume=True)
    with pytest.raises(CheckpointError, match="critic"):
        trainer.begin()


# ------------------------------------------------------------------------------------------ two savings as one


def test_two_savings_end_when_the_second_does_and_fail_if_either_does() -> None:
    first, second = Future[dict[str, int]](), Future[dict[str, int]]()
    both, heard = Together([first, second]), threading.Event()
    both.add_done_callback(lambda _: heard.set())
    second.set_result({"b": 2})
    assert not both.done()
    first.set_result({"a": 1})
    assert both.result(0) == {"a": 1, "b": 2}
    assert heard.is_set()
    failing, sound = Future[dict[str, int]](), Future[dict[str, int]]()
    both = Together([sound, failing])
    failing.set_exception(CheckpointError("no space"))
    assert not both.done()
    sound.set_result({})
    with pytest.raises(CheckpointError, match="no space"):
        both.result(0)


def test_two_savings_are_abandoned_together() -> None:
    first, second = Future[dict[str, int]](), Future[dict[str, int]]()
    both = Together([first, second])
    assert both.cancel()
    assert first.cancelled() is second.cancelled() is both.cancelled() is True
    with pytest.raises(CancelledError):
        both.result(0)
