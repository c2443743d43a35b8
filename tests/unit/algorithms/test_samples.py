"""What a reward becomes, what a sample carries of it, and which samples an optimiser step sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from algorithm_rows import group, rollout, scored

from rlhpc.algorithms.estimators import grpo_no_std, reward_itself
from rlhpc.algorithms.packing import FlopCost, pack, unpack
from rlhpc.algorithms.samples import RewardShaping, SampleMaker, loss_weights, optimiser_steps, split
from rlhpc.config.tables_algorithm import ShapingConfig
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.types import FinishReason, Rollout, RolloutGroup, ScoredRollout, Verdict
from tests.unit.roles.small_ring import small_config

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


def test_a_zero_variance_group_has_zero_advantages_and_one_with_a_failed_verifier_is_refused() -> None:
    samples = make_samples([group(scored(rollout(0), 1.0), scored(rollout(1), 1.0))])
    assert len(samples) == 2
    assert not any(sample.advantages.any() for sample in samples)
    members = (scored(rollout(0), 1.0), scored(rollout(1), 0.0, Verdict.VERIFIER_ERROR))
    with pytest.raises(ValueError, match="sample 1 of group 5: its verifier failed"):
        make_samples([group(*members)])


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (rollout(0, finish_reason=FinishReason.ABORT), "it was aborted"),
        (rollout(0, prompt_id=8), "sample 0 of group 5: it answers another prompt, 8"),
        (rollout(0, versions=np.zeros(2, np.int32)), r"arrays of shapes \[\(3,\), \(2,\), \(3,\)\]"),
        (rollout(0, length=0), r"for \(0,\) tokens"),
    ],
)
def test_what_must_not_be_trained_on_is_refused(broken: Rollout, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_samples([group(scored(broken, 1.0), scored(rollout(1), 0.0))])


def test_a_group_whose_prompt_is_empty_is_refused() -> None:
    with pytest.raises(ValueError, match="group 5: prompt 7 has no tokens"):
        make_samples([group(scored(rollout(0), 1.0), prompt_length=0)])


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


# ----------------------------------- What counts alike in a loss, by enumeration over completions of different lengths

COUNTS, PROMPTS, MAX_TOKENS = [2, 6, 0, 4, 8], [0, 0, 0, 1, 1], 16


def mean_by(how: str, losses: list[list[float]]) -> float:
    """The aggregate as its paper says it, over lists of losses of tokens."""
    used = [(losses[i], PROMPTS[i]) for i in range(len(COUNTS)) if COUNTS[i]]
    if how == "sequence":
        return float(np.mean([np.mean(values) for values, _ in used]))
    if how == "constant":
        return float(np.mean([sum(values) / MAX_TOKENS for values, _ in used]))
    if how == "prompt":
        prompts = {prompt for _, prompt in used}
        return float(np.mean([np.mean([x for values, p in used if p == prompt for x in values]) for prompt in prompts]))
    return float(np.mean([x for values, _ in used for x in values]))


@pytest.mark.parametrize("how", ["token", "sequence", "constant", "prompt"])
def test_the_weighted_sum_over_tokens_is_the_aggregate(how: str) -> None:
    rng = np.random.default_rng(0)
    losses = [rng.normal(size=count).tolist() for count in COUNTS]
    weights = loss_weights(np.array(COUNTS, np.float64), np.array(PROMPTS), how, MAX_TOKENS)
    found = sum(weight * sum(values) for weight, values in zip(weights, losses, strict=True)) / sum(COUNTS)
    assert found == pytest.approx(mean_by(how, losses), rel=1e-12)
    assert weights[2] == 0 or how == "token"


@pytest.mark.parametrize("how", ["token", "sequence", "constant", "prompt"])
def test_a_batch_without_loss_tokens_has_no_weights_and_no_nan(how: str) -> None:
    assert loss_weights(np.zeros(2), np.array([0, 1]), how, 8).tolist() == [0, 0]


def test_the_share_of_a_sample_travels_with_its_segment() -> None:

    members = (scored(rollout(0, length=3), 1.0), scored(rollout(1, length=1), 0.0))
    [samples] = SampleMaker(grpo_no_std, aggregation="sequence").minibatches([group(*members)], 0)
    batch = pack(samples, token_budget=64, num_ranks=1, cost=FlopCost(1.0, 0.0))
    by_length = {int(row.loss_mask.sum()): float(row.loss_weights[0]) for row in unpack(batch)}
    assert by_length == pytest.approx({3: 4 / 6, 1: 4 / 2})


# ----------------------------------------------------------------------- What a reward becomes, and who is learnt from

LONGEST = 100


def member(index: int, length: int, reward: float = 1.0, **parts: float) -> ScoredRollout:
    reason = FinishReason.LENGTH if length == LONGEST else FinishReason.STOP
    return scored(rollout(index, length=length, finish_reason=reason), reward, **parts)


def shaping(**settings: object) -> RewardShaping:
    return RewardShaping(ShapingConfig.model_validate(settings), lambda _: LONGEST)


def of_lengths(*lengths: int) -> RolloutGroup:
    return group(*(member(index, length) for index, length in enumerate(lengths)))


def test_rewards_are_shaped_by_length_and_only_where_settings_say_so() -> None:
    rewards = shaping().rewards(group(member(0, 100, 1.0), member(1, 3, -0.5)))
    assert rewards.tolist() == [1.0, -0.5]
    assert rewards.dtype == np.float32
    # 0 up to M − C, then linear to −1 at M: with M = 100, C = 20.
    found = shaping(overlong_tokens=20).rewards(of_lengths(1, 80, 81, 90, 99, 100))
    np.testing.assert_allclose(found, 1 + np.array([0, 0, -0.05, -0.5, -0.95, -1.0]), rtol=1e-6)
    doubled = shaping(overlong_tokens=20, overlong_penalty=2.0).rewards(of_lengths(90, 100))
    np.testing.assert_allclose(doubled, [0, -1], atol=1e-6)
    np.testing.assert_allclose(shaping(length_weight=0.5).rewards(of_lengths(10, 100)), [1.05, 1.5], rtol=1e-6)
    np.testing.assert_allclose(shaping(length_weight=-0.5).rewards(of_lengths(10, 100)), [0.95, 0.5], rtol=1e-6)
    alike = of_lengths(85, 95)
    assert shaping(overlong_tokens=20).judged(alike).tolist() == [1.0, 1.0]
    assert shaping(overlong_tokens=20, variance="shaped").judged(alike).tolist() == pytest.approx([0.75, 0.25])


def test_parts_count_by_their_weights_and_one_that_is_not_there_is_named() -> None:
    one = group(member(0, 5, 99.0, answer=1.0, form=0.0), member(1, 5, 99.0, answer=0.0, form=1.0))
    rule = shaping(part_weights={"answer": 2.0, "form": 0.25})
    assert rule.rewards(one).tolist() == rule.judged(one).tolist() == [2.0, 0.25]
    one = group(member(0, 5, answer=1.0, form=0.0))
    with pytest.raises(RoleFailed, match=r"part_weights has a weight for 'frm', .*its parts: answer, form$"):
        shaping(part_weights={"answer": 1.0, "frm": 0.1}).rewards(one)


def test_what_was_cut_off_is_not_learnt_from_is_left_as_it_is_and_counts_for_the_others() -> None:
    mixed = group(member(0, 100, 0.0), member(1, 10, 1.0))
    maker = SampleMaker(grpo_no_std, aggregation="sequence", shaping=shaping(truncated="masked"))
    [samples] = maker.minibatches([mixed], 0)
    assert [int(sample.loss_mask.sum()) for sample in samples] == [0, 10]
    assert samples[1].advantages[-1] == 0.5, "the mean of the group is still 0.5"
    assert [sample.loss_weight for sample in samples] == [0.0, 1.0]
    assert shaping(truncated="masked").judged(mixed).tolist() == [0.0, 1.0]
    cut_off = group(member(0, 100, 0.0), member(1, 100, 1.0))
    assert shaping(truncated="masked").judged(cut_off).tolist() == [0.0, 0.0]
    assert shaping().judged(cut_off).tolist() == [0.0, 1.0]
    cut_off = member(0, 100)
    mask = cut_off.rollout.loss_mask.copy()
    SampleMaker(grpo_no_std, shaping=shaping(truncated="masked"))([group(cut_off, replace(cut_off, reward=0.0))])
    np.testing.assert_array_equal(cut_off.rollout.loss_mask, mask)


def test_length_is_measured_by_the_limit_of_the_prompt_s_own_dataset() -> None:
    """Two datasets: prompts of odd numbers may have 50 tokens, the others 100."""
    rule = RewardShaping(ShapingConfig(overlong_tokens=20), lambda prompt_id: 50 if prompt_id % 2 else 100)
    for prompt_id, expected in ((4, 1.0), (5, 0.5)):
        scored_one = member(0, 40)
        asked = replace(scored_one.rollout, prompt_id=prompt_id)
        assert rule.rewards(group(replace(scored_one, rollout=asked))).tolist() == [expected]


# ------------------------------------------------------------ Which samples an optimiser step sees, and in which order

SEED = (7, 3)  # of the run, and the step


@pytest.mark.parametrize(("size", "parts"), [(8, 4), (10, 4), (5, 5), (64, 3), (3, 1)])
def test_every_sample_is_in_one_minibatch_and_their_sizes_differ_by_one(size: int, parts: int) -> None:
    found = split(range(size), parts, SEED)
    assert sorted(sample for part in found for sample in part) == list(range(size))
    assert len(found) == parts
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert all(part == sorted(part) for part in found)


def test_minibatches_are_dealt_at_random_alike_when_repeated_and_in_another_order_each_epoch() -> None:
    found = split(range(64), 4, SEED)
    assert found == split(range(64), 4, SEED)
    assert found != split(range(64), 4, (7, 4))
    assert found != split(range(64), 4, (8, 3))
    assert found[0] != list(range(16))
    assert split([5, 3, 9], 1, SEED) == [[5, 3, 9]]
    assert optimiser_steps(1, 1, SEED) == (0,)
    order = optimiser_steps(8, 3, SEED)
    assert order == optimiser_steps(8, 3, SEED)
    epochs = [order[start : start + 8] for start in (0, 8, 16)]
    assert epochs[0] == tuple(range(8))
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len(set(epochs)) == 3


def test_advantages_are_those_of_the_batch_and_shares_those_of_the_minibatch() -> None:
    members = [scored(rollout(i, length=i + 1), float(i % 2)) for i in range(4)]
    maker = SampleMaker(grpo_no_std, aggregation="sequence", num_minibatches=2)
    parts = maker.minibatches([group(*members)], step=5)
    assert sorted(sample.sample_index for part in parts for sample in part) == [0, 1, 2, 3]
    for part in parts:
        total = sum(int(sample.loss_mask.sum()) for sample in part)
        for sample in part:
            assert sample.advantages[-1] == (0.5 if sample.sample_index % 2 else -0.5)
            assert sample.loss_weight == pytest.approx(total / (2 * (sample.sample_index + 1)))
