"""A teacher's log-probabilities in advantages, in samples and rows, and in the losses made of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_rows import group, rollout, scored, token_row

from rlhpc.algorithms.estimators import grpo_no_std, nothing, reward_itself
from rlhpc.algorithms.figures import teacher_figures
from rlhpc.algorithms.packing import FlopCost, pack, unpack
from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.algorithms.samples import SampleMaker, Teaching
from rlhpc.config.tables_algorithm import AlgorithmConfig
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.types import RolloutGroup, ScoredRollout, TeacherScores

HOLE = np.array([True, False, True])


def taught(member: ScoredRollout, *logprobs: float, top_k: int = 0) -> ScoredRollout:
    """With a teacher's log-probabilities, and those of its most likely tokens: 100 · place + rank."""
    places, ranks = np.arange(len(logprobs), dtype=np.int32), np.arange(top_k, dtype=np.int32)
    scores = TeacherScores(
        np.array(logprobs, np.float32),
        100 * places[:, None] + ranks,
        (-0.5 - ranks[None, :] - 0.125 * places[:, None]).astype(np.float32),
    )
    return replace(member, teacher=scores)


def drawn_groups(rng: np.random.Generator, top_k: int = 0) -> list[RolloutGroup]:
    """Two ragged groups with holes in their loss masks."""
    groups = []
    for _ in range(2):
        members = []
        for index in range(4):
            length = int(rng.integers(1, 9))
            changed: dict[str, Any] = {
                "length": length,
                "loss_mask": rng.random(length) < 0.7,
                "behaviour_logprobs": -rng.exponential(2, length).astype(np.float32),
            }
            member = scored(rollout(index, **changed), float(rng.normal()))
            members.append(taught(member, *-rng.exponential(2, length), top_k=top_k))
        groups.append(group(*members))
    return groups


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("normalization", ["off", "batch"])
def test_the_teacher_s_part_is_added_to_every_loss_token_after_rewards_are_normalised(
    seed: int, normalization: str
) -> None:
    groups = drawn_groups(np.random.default_rng(seed))
    plain = SampleMaker(grpo_no_std, normalization)(groups)
    mixed = SampleMaker(grpo_no_std, normalization, teaching=Teaching(factor=0.25))(groups)
    alone = SampleMaker(nothing, teaching=Teaching(factor=1.0))(groups)
    members = [member for of_group in groups for member in of_group.members]
    for member, before, after, only in zip(members, plain, mixed, alone, strict=True):
        assert member.teacher is not None
        gap = member.teacher.logprobs.astype(np.float64) - member.rollout.behaviour_logprobs
        expected = np.concatenate([[0, 0], np.where(member.rollout.loss_mask, gap, 0)])
        np.testing.assert_allclose(only.advantages, expected, atol=1e-6)
        np.testing.assert_allclose(after.advantages, before.advantages + 0.25 * expected, atol=1e-6)
        assert after.advantages.dtype == np.float32
        assert after.teacher_logprobs is None
        assert after.teacher_top_ids is None


def test_what_a_teacher_takes_for_impossible_is_clipped() -> None:
    """vLLM's server writes −9999 for a logarithm of 0."""
    member = taught(scored(rollout(0, length=3), 1.0), -9999.0, 8.0, -1.0)
    (clipped,), (whole,) = (
        SampleMaker(nothing, teaching=Teaching(factor=0.5, clip=clip))([group(member)]) for clip in (2.0, math.inf)
    )
    differences = whole.advantages[whole.loss_mask] / 0.5
    assert differences[0] < -9000
    assert clipped.advantages[clipped.loss_mask].tolist() == pytest.approx(0.5 * np.clip(differences, -2.0, 2.0))


def test_returns_of_tokens_have_the_teacher_s_part_too() -> None:
    members = [taught(scored(rollout(index), 1.0), -0.5, -0.5, -0.5) for index in range(2)]
    make = SampleMaker(reward_itself, spread="to_come", teaching=Teaching(factor=2.0))
    assert make([group(*members)])[0].advantages.tolist() == [0, 0, 2.0, 4.0, 6.0]  # behaviour: −1, −2, −3


def test_a_reference_and_the_most_likely_tokens_go_with_their_tokens_through_packing() -> None:
    samples = SampleMaker(grpo_no_std, teaching=Teaching(is_reference=True, top_k=2))(
        drawn_groups(np.random.default_rng(1), top_k=3)
    )
    samples = [replace(sample, group_id=index) for index, sample in enumerate(samples)]
    for sample in samples:
        assert sample.teacher_logprobs is not None
        assert not sample.teacher_logprobs[~sample.loss_mask].any()
        assert sample.teacher_top_ids is not None
        ids = sample.teacher_top_ids.reshape(-1, 2)
        assert (ids[:, 0] == 100 * (np.flatnonzero(sample.loss_mask) - 2)).all()  # of the token's own place
        assert (ids[:, 1] == ids[:, 0] + 1).all()
    minibatch = pack(samples, token_budget=24, num_ranks=3, cost=FlopCost(1.0, 0.0))
    parts = unpack(minibatch)
    assert len(parts) == len(samples)
    left = list(samples)
    for part in parts:
        assert part.teacher_logprobs is not None
        (same,) = (
            one
            for one in left
            if np.array_equal(one.behaviour_logprobs, part.behaviour_logprobs)
            and np.array_equal(one.teacher_logprobs, part.teacher_logprobs)
        )
        left = [one for one in left if one is not same]
        for name in ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"):
            np.testing.assert_array_equal(getattr(part, name), getattr(same, name))


def test_a_sample_without_what_the_run_needs_of_a_teacher_is_refused_by_name() -> None:
    ask, member = SampleMaker(nothing, teaching=Teaching(factor=1.0)), scored(rollout(0), 1.0)
    with pytest.raises(RoleFailed, match=r"sample 0 of group 5: no teacher was asked.*legal: a run of its own"):
        ask([group(member)])
    with pytest.raises(RoleFailed, match=r"sample 0 of group 5: \(2,\) log-probabilities of a teacher for 3 tokens"):
        ask([group(taught(member, -1.0, -1.0))])
    with pytest.raises(RoleFailed, match="sample 0 of group 5: a log-probability of its teacher is not finite"):
        ask([group(taught(member, -1.0, -np.inf, -1.0))])
    with pytest.raises(RoleFailed, match=r"gave the 2 most likely tokens of each place; algorithm\.teacher_top_k=3"):
        SampleMaker(nothing, teaching=Teaching(top_k=3))([group(taught(member, -1.0, -1.0, -1.0, top_k=2))])


def test_what_is_off_the_loss_mask_needs_no_teacher() -> None:
    make = SampleMaker(nothing, teaching=Teaching(factor=1.0, is_reference=True, top_k=1))
    read = taught(scored(rollout(0, loss_mask=HOLE), 1.0), -1.0, np.nan, -1.0, top_k=1)
    silent = scored(rollout(1, loss_mask=np.zeros(3, np.bool_)), 0.0)
    first, second = make([group(read, silent)])
    assert first.advantages.tolist() == [0, 0, 0, 0, 2]
    assert first.teacher_top_ids is not None
    assert first.teacher_top_ids.tolist() == [0, 200]
    assert second.teacher_top_ids is not None
    assert len(second.teacher_top_ids) == 0
    assert pack([first, second], token_budget=64, num_ranks=1, cost=FlopCost(1.0, 0.0)).num_loss_tokens == 2


def test_the_divergence_from_the_teacher_is_a_mean_over_loss_tokens_of_rollouts_with_one() -> None:
    members = [
        taught(scored(rollout(0, loss_mask=HOLE), 1.0), -0.5, -9.0, -1.5),  # behaviour: −1, −2, −3
        taught(scored(rollout(1, length=2), 0.0), -2.0, -4.0),
        scored(rollout(2), 0.0),
    ]
    assert teacher_figures([group(*members)]) == {"teacher/kl": pytest.approx((-0.5 - 1.5 + 1.0 + 2.0) / 4)}
    assert teacher_figures([group(scored(rollout(0), 1.0))]) == {}


@pytest.mark.parametrize("seed", range(4))
def test_the_expected_gradient_of_distillation_alone_is_that_of_the_reverse_divergence(seed: int) -> None:
    """Over all tokens that may be sampled, each as often as the policy samples it, in float64."""
    draw = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(11, generator=draw, dtype=torch.float64)).requires_grad_()
    teacher = (2 * torch.randn(11, generator=draw, dtype=torch.float64)).log_softmax(0)
    current = logits.log_softmax(0)
    divergence = (current.exp() * (current - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    behaviour = current.detach()
    row = token_row(behaviour, advantages=teacher - behaviour, weights=behaviour.exp())
    for loss in ("reinforce", "ppo"):
        algorithm = AlgorithmConfig(advantage="distillation", loss=loss)
        value, _ = make_policy_loss(algorithm, 0)(current, row)
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-9)


FORWARD = AlgorithmConfig(loss="reinforce", forward_kl_coefficient=0.5)


def test_a_teacher_s_divergence_is_added_to_the_loss_with_the_share_of_its_token() -> None:
    current = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    mask, shares = torch.tensor([True, False, True]), torch.tensor([2.0, 1.0, 0.5])
    given = torch.tensor([0.25, torch.nan, 1.0])
    row = token_row(current.detach(), loss_mask=mask, weights=shares, advantages=torch.zeros(3))
    value, metrics = make_policy_loss(FORWARD, 0)(current, replace(row, teacher_divergence=given))
    assert float(value) == pytest.approx(0.5 * (2.0 * 0.25 + 0.5 * 1.0))
    assert float(metrics["forward_kl"]) == 1.25
    broken = replace(row, teacher_divergence=torch.tensor([torch.nan, 0.0, 0.0]))
    assert make_policy_loss(FORWARD, 0)(current, broken)[0].isnan()


def test_a_row_without_samples_counts_for_nothing_and_has_the_same_metrics() -> None:
    current = torch.zeros(1, requires_grad=True)
    idle = token_row(torch.zeros(1), loss_mask=torch.zeros(1, dtype=torch.bool))
    value, metrics = make_policy_loss(FORWARD, 0)(current, idle)
    assert (float(value), float(metrics["forward_kl"])) == (0.0, 0.0)
