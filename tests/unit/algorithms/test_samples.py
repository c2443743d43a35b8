from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from group_builder import group, rollout, scored

from rlhpc.algorithms.estimators import grpo_no_std, packed_gae, reward_itself
from rlhpc.algorithms.samples import RewardShaping, SampleMaker
from rlhpc.config.tables_algorithm import ShapingConfig
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.types import FinishReason, Rollout, ScoredRollout, Verdict
from tests.unit.roles.small_ring import small_config
from tests.unit.training.packed_rows import pack_row

make_samples = SampleMaker(grpo_no_std)


def test_entry_t_of_every_array_describes_token_t_of_prompt_and_completion() -> None:
    members = (scored(rollout(0), 1.0), scored(rollout(1, length=2), 0.0))
    first, second = make_samples([group(*members)])
    assert first.token_ids.tolist() == [100, 101, 0, 1, 2]
    assert first.loss_mask.tolist() == [False, False, True, True, True]
    assert first.behaviour_logprobs.tolist() == [0, 0, -1, -2, -3]
    assert first.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert first.versions.tolist() == [-1, -1, 4, 4, 4]
    assert second.token_ids.tolist() == [100, 101, 10, 11]
    assert second.advantages.tolist() == [0, 0, -0.5, -0.5]
    assert (second.group_id, second.sample_index) == (5, 1)
    assert [first.token_ids.dtype, first.versions.dtype] == [np.int32, np.int32]
    assert [first.behaviour_logprobs.dtype, first.advantages.dtype] == [np.float32, np.float32]


def test_tokens_of_a_tool_carry_no_advantage_and_no_log_probability() -> None:
    mask = np.array([True, False, True])
    unset = np.array([-1.0, np.nan, -3.0], np.float32)
    members = (scored(rollout(0, loss_mask=mask, behaviour_logprobs=unset), 1.0), scored(rollout(1), 0.0))
    sample = make_samples([group(*members)])[0]
    assert sample.loss_mask.tolist() == [False, False, True, False, True]
    assert sample.behaviour_logprobs.tolist() == [0, 0, -1, 0, -3]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0, 0.5]
    assert sample.versions.tolist() == [-1, -1, 4, 4, 4]


def test_a_group_without_spread_gives_samples_with_zero_advantages() -> None:
    samples = make_samples([group(scored(rollout(0), 1.0), scored(rollout(1), 1.0))])
    assert len(samples) == 2
    assert not any(sample.advantages.any() for sample in samples)


def test_a_group_with_a_failed_verifier_is_refused() -> None:
    members = (scored(rollout(0), 1.0), scored(rollout(1), 0.0, Verdict.VERIFIER_ERROR))
    with pytest.raises(ValueError, match="sample 1 of group 5: its verifier failed"):
        make_samples([group(*members)])


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (rollout(0, finish_reason=FinishReason.ABORT), "it was aborted"),
        (rollout(0, prompt_length=0), "prompt 7 has no tokens"),
        (rollout(0, versions=np.zeros(2, np.int32)), r"arrays of shapes \[\(3,\), \(2,\), \(3,\)\]"),
        (rollout(0, length=0), r"for \(0,\) tokens"),
    ],
)
def test_what_must_not_be_trained_on_is_refused(broken: Rollout, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_samples([group(scored(broken, 1.0), scored(rollout(1), 0.0))])


def test_a_critic_gets_the_reward_of_a_completion_on_its_last_loss_token() -> None:
    mask = np.array([True, True, False])
    members = (scored(rollout(0, loss_mask=mask), 1.0), scored(rollout(1, length=2), 1.0))
    first, second = SampleMaker(reward_itself, spread="earned")([group(*members)])
    assert first.advantages.tolist() == [0, 0, 0, 1, 0]
    assert second.advantages.tolist() == [0, 0, 0, 1]


# ------------------------------------------------------------------------------------------------- rewards of tokens


def of_tokens(index: int, reward: float, token_rewards: dict[int, float], **changed: object) -> ScoredRollout:
    return replace(scored(rollout(index, **changed), reward), token_rewards=token_rewards)


def drawn_members(rng: np.random.Generator) -> list[ScoredRollout]:
    """Ragged, with holes in the loss mask, parts of the reward anywhere, and one without any."""
    members = []
    for index in range(5):
        length = int(rng.integers(1, 12))
        mask = rng.random(length) < 0.7
        places = np.flatnonzero(rng.random(length) < (0.5 if index else 0.0))
        token_rewards = {int(place): float(rng.normal()) for place in places}
        members.append(of_tokens(index, float(rng.normal()), token_rewards, length=length, loss_mask=mask))
    return members


def textbook_rewards(member: ScoredRollout) -> list[float]:
    """Of each loss token, as docs/algorithms.md says."""
    chosen = [place for place, is_chosen in enumerate(member.rollout.loss_mask) if is_chosen]
    found = dict.fromkeys(chosen, 0.0)
    if not chosen:
        return []
    for place, value in member.token_rewards.items():
        found[max([other for other in chosen if other <= place] or chosen[:1])] += value
    found[chosen[-1]] += member.reward - sum(member.token_rewards.values())
    return list(found.values())


@pytest.mark.parametrize("seed", range(6))
def test_a_critic_gets_each_part_of_the_reward_where_it_was_earned_and_the_rest_at_the_end(seed: int) -> None:
    members = drawn_members(np.random.default_rng(seed))
    for sample, member in zip(SampleMaker(reward_itself, spread="earned")([group(*members)]), members, strict=True):
        np.testing.assert_allclose(sample.advantages[sample.loss_mask], textbook_rewards(member), atol=1e-6)
        assert not sample.advantages[~sample.loss_mask].any()
        if sample.loss_mask.any():
            assert sample.advantages.sum() == pytest.approx(member.reward, abs=1e-5)


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (0.97, 0.9)])
@pytest.mark.parametrize("seed", range(4))
def test_gae_of_rewards_of_tokens_is_the_double_sum_over_them(seed: int, discount: float, trace: float) -> None:
    """From the verdicts to advantages, beside equation 16 written out in float64."""
    rng = np.random.default_rng(seed)
    members = drawn_members(rng)
    samples = SampleMaker(reward_itself, spread="earned")([group(*members)])
    row = pack_row(samples)
    values = rng.normal(size=len(row.token_ids)).astype(np.float32)
    found, returns = packed_gae(row.advantages, values, row.loss_mask, row.cu_seqlens, discount=discount, trace=trace)
    for member, first, last in zip(members, row.cu_seqlens, row.cu_seqlens[1:], strict=False):
        tokens = [t for t in range(first, last) if row.loss_mask[t]]
        v, r = [*(float(values[t]) for t in tokens), 0.0], textbook_rewards(member)
        delta = [r[n] + discount * v[n + 1] - v[n] for n in range(len(tokens))]
        for n, t in enumerate(tokens):
            expected = sum((discount * trace) ** k * delta[n + k] for k in range(len(tokens) - n))
            assert found[t] == pytest.approx(expected, abs=1e-5)
            assert returns[t] == pytest.approx(expected + v[n], abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_reinforce_pp_counts_what_is_still_to_come_normalised_over_the_tokens_of_the_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [group(*drawn_members(rng)) for _ in range(3)]
    make = SampleMaker(reward_itself, normalization="batch", spread="to_come")
    to_come = []
    for member in (member for of_group in groups for member in of_group.members):
        rewards = textbook_rewards(member)
        to_come += [sum(rewards[n:]) for n in range(len(rewards))]
    expected = (np.array(to_come) - np.mean(to_come)) / np.std(to_come)
    found = np.concatenate([sample.advantages[sample.loss_mask] for sample in make(groups)])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_a_group_s_mean_is_subtracted_from_is_the_whole_reward_of_a_completion() -> None:
    members = (of_tokens(0, 1.0, {0: 0.7}), of_tokens(1, 0.0, {1: 0.3}))
    plain = tuple(replace(member, token_rewards={}) for member in members)
    for mine, theirs in zip(make_samples([group(*members)]), make_samples([group(*plain)]), strict=True):
        assert mine.advantages.tobytes() == theirs.advantages.tobytes()


def test_without_rewards_of_tokens_reinforce_pp_is_what_it_was_to_the_last_bit() -> None:
    rng = np.random.default_rng(3)
    groups = [group(*(replace(member, token_rewards={}) for member in drawn_members(rng))) for _ in range(3)]
    alike, to_come = (SampleMaker(reward_itself, "batch", spread=spread)(groups) for spread in ("alike", "to_come"))
    for mine, theirs in zip(to_come, alike, strict=True):
        assert mine.advantages.tobytes() == theirs.advantages.tobytes()


def test_shaping_by_length_stands_at_the_end_and_other_parts_than_the_function_s_are_refused() -> None:
    members = (of_tokens(0, 1.0, {0: 0.75}), of_tokens(1, 0.0, {}))
    longer = RewardShaping(ShapingConfig(length_weight=-0.5), lambda _: 6)
    first, second = SampleMaker(reward_itself, shaping=longer, spread="earned")([group(*members)])
    assert first.advantages.tolist() == [0, 0, 0.75, 0, 0.0]  # 0.25 of the reward is left, which its length costs
    assert second.advantages.tolist() == [0, 0, 0, 0, -0.25]
    weighed = RewardShaping(ShapingConfig(part_weights={"answer": 1.0}))
    of_parts = tuple(replace(member, reward_parts={"answer": 1.0}) for member in members)
    with pytest.raises(
        RoleFailed, match=r"task 'math' says by rewards_at .* shaping\.part_weights makes another reward"
    ):
        SampleMaker(reward_itself, shaping=weighed, spread="earned")([group(*of_parts)])


@pytest.mark.parametrize(
    ("advantage", "spread"),
    [("gae", "earned"), ("reinforce_pp", "to_come"), ("reinforce_pp_baseline", "alike"), ("grpo", "alike")],
)
def test_a_critic_and_reinforce_pp_are_told_of_rewards_of_tokens(advantage: str, spread: str) -> None:
    config = small_config()
    algorithm = config.algorithm.model_copy(update={"advantage": advantage})
    assert SampleMaker.of(config.model_copy(update={"algorithm": algorithm})).spread == spread
