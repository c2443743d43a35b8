"""Every figure of a step has a documented name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhpc.algorithms.estimators import grpo
from rlhpc.algorithms.packing import FlopCost, pack
from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.algorithms.samples import SampleMaker
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.metrics.names import HISTOGRAMS, find_metric
from rlhpc.protocol.messages import StepReport
from rlhpc.protocol.types import PackedBatch, RolloutGroup
from rlhpc.roles.controller.batches import StepRecord
from rlhpc.roles.controller.recorder import dataset_figures, histograms, sampling_figures, training_figures
from rlhpc.roles.controller.rollout_sink import IntakeStats
from tests.unit.algorithms.token_rows import token_row
from tests.unit.roles.small_ring import prompt, scored

REPORT = dict.fromkeys(
    ("loss", "grad_norm", "entropy", "learning_rate", "step_s", "wait_for_batch_s", "clip_low", "clip_high", "ratio",
     "importance_weight", "importance_weight_squared", "importance_capped", "kl_k1", "kl_k3", "mismatch_abs",
     "mismatch_kl"),
    1.0,
)  # fmt: skip


def group(group_id: int, admitted_version: int, *rewards: float) -> RolloutGroup:
    members = tuple(scored(group_id, index, reward, reward_parts={"form": 0.5}) for index, reward in enumerate(rewards))
    return RolloutGroup(group_id, prompt(group_id), admitted_version, members)


@pytest.fixture
def record() -> StepRecord:
    groups = (group(0, 1, 0.0, 1.0), group(1, 2, 1.0, 0.0))
    minibatch = pack(SampleMaker(grpo)(groups), token_budget=16, num_ranks=1, cost=FlopCost(1.0, 0.0))
    batch = PackedBatch(3, 3, (minibatch,))
    return StepRecord(StepReport(3, 4, True, REPORT), batch, groups, 3, 1.0, 0.1, 0.01, 0.2, 0.3, 0.4)


def test_every_name_is_in_the_table(record: StepRecord) -> None:
    stats = IntakeStats(groups=[*record.groups, group(2, 3, 0.0, 0.0), group(3, 3, 1.0, 1.0)])
    figures = training_figures(record, 16) | sampling_figures(stats)
    for name, value in figures.items():
        find_metric(name)  # raises KeyError
        assert np.isfinite(value), name
    assert histograms(record).keys() == HISTOGRAMS.keys()


@pytest.mark.parametrize("proximal", ["behaviour", "loglinear", "current"])
def test_every_metric_of_a_loss_has_a_row_of_the_table(record: StepRecord, proximal: str) -> None:
    tokens = torch.zeros(3)
    loss = make_policy_loss(AlgorithmConfig.model_validate({"proximal": proximal}), 3)
    _, sums = loss(tokens, token_row(tokens, versions=torch.tensor([1, 2, 3])))
    record = replace(record, report=StepReport(3, 4, True, {name: value.item() for name, value in sums.items()}))
    for name in training_figures(record, 16):
        find_metric(name)  # raises KeyError


def test_a_metric_of_a_loss_that_has_no_row_is_refused_and_not_passed_over(record: StepRecord) -> None:
    record = replace(record, report=StepReport(3, 4, True, {"tapered_share": 0.5}))
    assert training_figures(record, 16)["policy/tapered_share"] == 0.5
    with pytest.raises(KeyError, match="policy/tapered_share"):
        find_metric("policy/tapered_share")


def test_staleness_is_counted_from_admission_against_the_version_that_was_trained(record: StepRecord) -> None:
    figures = training_figures(record, 16)
    assert (figures["staleness/mean"], figures["staleness/max"]) == (1.5, 2.0)
    assert histograms(record)["staleness/histogram"].tolist() == [2, 2, 1, 1]


def test_packing_fill_is_tokens_over_budget(record: StepRecord) -> None:
    figures = training_figures(record, 16)
    assert figures["packing/num_microbatches"] == 2
    assert figures["packing/fill"] == pytest.approx(20 / 32)


def test_groups_without_spread_are_told_apart_by_why() -> None:
    stats = IntakeStats(
        groups=[group(0, 0, 0.0, 0.0), group(1, 0, 1.0, 1.0), group(2, 0, 1.0, 1.0), group(3, 0, 0.0, 1.0)]
    )
    figures = sampling_figures(stats)
    assert figures["group/all_wrong_share"] == 0.25
    assert figures["group/all_correct_share"] == 0.5
    assert figures["reward/mean"] == pytest.approx(5 / 8)
    assert figures["reward_part/form"] == 0.5


def test_a_step_in_which_no_group_was_finished_says_nothing_of_rewards() -> None:
    assert sampling_figures(IntakeStats()) == {}


def test_of_several_datasets_each_has_figures_of_its_own() -> None:
    groups = [group(0, 0, 0.0, 0.0), group(3, 0, 1.0, 1.0), group(1, 0, 0.0, 1.0), group(6, 0, 1.0, 0.0)]
    figures = dataset_figures(groups, ["math", "sums", "code"])  # prompts 0, 3 and 6, then 1
    assert figures["dataset_reward/math"] == pytest.approx(3 / 6)
    assert figures["dataset_reward/sums"] == 0.5
    assert figures["dataset_share/math"] == 0.75
    assert not [name for name in figures if name.endswith("code")]
    assert dataset_figures(groups, ["math"]) == dataset_figures([], ["math", "sums"]) == {}
