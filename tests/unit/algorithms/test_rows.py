"""Rollouts of several rows: every sampled token is trained once, and weighs what it would weigh in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_rows import group, rollout, scored
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.algorithms.estimators import grpo_no_std, reward_itself
from rlhpc.algorithms.figures import length_figures, staleness_figures
from rlhpc.algorithms.packing import FlopCost, pack
from rlhpc.algorithms.policy_loss import make_policy_loss
from rlhpc.algorithms.samples import RewardShaping, SampleMaker, Teaching
from rlhpc.config.tables_algorithm import AlgorithmConfig, ShapingConfig
from rlhpc.models.routes import MixtureForm
from rlhpc.protocol.types import Rollout, RolloutGroup, ScoredRollout, TeacherScores, TrainingSample
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import tiny_config

LONGEST = 40  # generation.max_completion_tokens
AGGREGATIONS = ["token", "sequence", "constant", "prompt"]
PROMPT = 2  # tokens

# A *line* is a history in one row; the same history may as well come in rows, each of which repeats it so far.


def line(index: int, turns: Sequence[tuple[int, int]], seed: int = 0) -> Rollout:
    """turns: of each the tokens that are read before it, and its own."""
    mask = np.array([sampled for read, own in turns for sampled in (*[False] * read, *[True] * own)], np.bool_)
    rng = np.random.default_rng([seed, index])
    return rollout(
        index,
        token_ids=rng.integers(5, 90, len(mask), dtype=np.int32),
        behaviour_logprobs=-rng.random(len(mask), dtype=np.float32),
        versions=np.sort(rng.integers(2, 6, len(mask), dtype=np.int32)),
        loss_mask=mask,
    )


def in_rows(of_line: Rollout, ends: Sequence[int]) -> Rollout:
    """A row up to each of these tokens; what an earlier one has is copied."""
    rows = [slice(0, end) for end in ends]
    masks = []
    for place, end in enumerate(ends):
        mask = of_line.loss_mask[:end].copy()
        mask[: ends[place - 1] if place else 0] = False
        masks.append(mask)
    names = ("token_ids", "behaviour_logprobs", "versions")
    arrays: dict[str, Any] = {name: np.concatenate([getattr(of_line, name)[row] for row in rows]) for name in names}
    starts = np.cumsum(ends[:-1], dtype=np.int32)
    return replace(of_line, **arrays, loss_mask=np.concatenate(masks), row_starts=starts)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Rollout, Rollout]]:
    """Lines, and each in rows, with a cut at any token behind which nothing was cut yet."""
    found = []
    for index in range(draw(st.integers(2, 5))):
        turns = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5))
        of_line = line(index, [*turns, (0, 1)] if not sum(map(sum, turns)) else turns)
        length = len(of_line.token_ids)
        cuts = draw(st.sets(st.integers(1, length), max_size=4))
        found.append((of_line, in_rows(of_line, [*sorted(cuts - {length}), length])))
    return found


def rewarded(rollouts: Sequence[Rollout]) -> RolloutGroup:
    return group(*(scored(each, float(each.sample_index % 2)) for each in rollouts), prompt_length=PROMPT)


def shares(samples: Sequence[TrainingSample], spread: Callable[[TrainingSample, int], float]) -> dict[Any, float]:
    """What each loss token of a line counts: a row repeats its line, so that places are the same in both."""
    found: dict[Any, float] = {}
    for sample in samples:
        for place in np.flatnonzero(sample.loss_mask).tolist():
            key = sample.group_id, sample.sample_index, place
            assert key not in found, "trained twice"
            found[key] = spread(sample, place)
    return found


@settings(max_examples=150, deadline=None)
@given(histories(), st.sampled_from(AGGREGATIONS), st.integers(1, 3), st.sampled_from(["alike", "to_come"]))
def test_a_history_counts_the_same_in_one_line_and_in_rows(
    drawn: list[tuple[Rollout, Rollout]], how: str, num_minibatches: int, spread: Any
) -> None:
    maker = SampleMaker(
        grpo_no_std if spread == "alike" else reward_itself,
        aggregation=how,
        max_completion_tokens=LONGEST,
        num_minibatches=num_minibatches,
        spread=spread,
    )
    in_lines, rows = (maker.minibatches([rewarded(each)], 4) for each in zip(*drawn, strict=True))
    assert len(in_lines) == len(rows) == num_minibatches
    for one, other in zip(in_lines, rows, strict=True):
        weigh = [
            shares(each, lambda sample, place: sample.loss_weight * float(sample.advantages[place]))
            for each in (one, other)
        ]
        assert weigh[0] == weigh[1]
        of_token = [shares(each, lambda sample, _: sample.loss_weight) for each in (one, other)]
        assert of_token[0] == of_token[1]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_however_a_rollout_branches_its_rows_together_weigh_as_one(data: st.DataObject) -> None:
    """Rows of unlike histories, as after a compaction: nothing is copied, or nothing that anyone could tell."""
    lines = [line(index, data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5)))
             for index in range(data.draw(st.integers(2, 4)))]  # fmt: skip
    branched = []
    for each in lines:
        places = (
            st.sets(st.integers(1, len(each.token_ids) - 1), max_size=3) if len(each.token_ids) > 1 else st.just(set())
        )
        branched.append(replace(each, row_starts=np.array(sorted(data.draw(places)), np.int32)))
    counts = np.array([np.count_nonzero(each.loss_mask) for each in lines], np.float64)
    total, num = counts.sum(), len(lines)
    expected = {
        "token": counts,
        "sequence": np.full(num, total / num),
        "constant": counts * total / (num * LONGEST),
        "prompt": counts * total / counts.sum(),
    }
    for how, wanted in expected.items():
        maker = SampleMaker(grpo_no_std, aggregation=how, max_completion_tokens=LONGEST)
        (samples,) = maker.minibatches([rewarded(branched)], 0)
        found = np.zeros(num)
        for sample in samples:
            found[sample.sample_index] += sample.loss_weight * np.count_nonzero(sample.loss_mask)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def three_rows(index: int, **changed: Any) -> Rollout:
    """Sampled 3 and 1 and 2 tokens, in rows that each begin with what the row before has."""
    of_line = line(index, [(1, 3), (2, 1), (0, 2)])
    return replace(in_rows(of_line, [4, 7, 9]), **changed)


def test_each_row_is_a_sample_behind_the_same_prompt_with_the_advantage_of_its_rollout() -> None:
    form = MixtureForm((0,), 8, 2)
    routes = form.pack(np.tile(np.arange(2), (5, 1, 1)))
    samples = SampleMaker(grpo_no_std)([rewarded([three_rows(0, routes=routes), three_rows(1)])])
    assert [(each.sample_index, each.row, len(each.token_ids)) for each in samples] == [
        (0, 0, 6), (0, 1, 9), (0, 2, 11), (1, 0, 6), (1, 1, 9), (1, 2, 11),
    ]  # fmt: skip
    assert all(sample.token_ids[:PROMPT].tolist() == [100, 101] for sample in samples)
    assert all(sample.token_ids[PROMPT:].tolist() == samples[5].token_ids[PROMPT : len(sample.token_ids)].tolist()
               for sample in samples[3:])  # fmt: skip
    assert [int(sample.loss_mask.sum()) for sample in samples] == [3, 1, 2] * 2
    for sample in samples:
        assert set(sample.advantages[sample.loss_mask].tolist()) == {-0.5 if sample.sample_index == 0 else 0.5}
    assert [sample.routes is routes for sample in samples] == [True, *[False] * 5]


def test_a_row_that_the_policy_has_not_written_in_is_no_sample() -> None:
    silent = in_rows(line(0, [(0, 2), (3, 1)]), [2, 4, 6])
    nothing = replace(three_rows(1), loss_mask=np.zeros(20, np.bool_))
    samples = SampleMaker(grpo_no_std)([rewarded([silent, nothing])])
    assert [(each.sample_index, each.row) for each in samples] == [(0, 0), (0, 2), (1, 0)]
    assert not samples[2].loss_mask.any()


def test_if_only_the_last_row_has_credit_the_others_are_not_trained_and_do_not_count() -> None:
    maker = SampleMaker(grpo_no_std, aggregation="sequence", row_credit="last")
    (samples,) = maker.minibatches([rewarded([three_rows(0), line(1, [(0, 4)])])], 0)
    assert [(each.sample_index, each.row, int(each.loss_mask.sum())) for each in samples] == [(0, 2, 2), (1, 0, 4)]
    assert [each.loss_weight for each in samples] == [6 / (2 * 2), 6 / (2 * 4)]
    silent_at_last = replace(three_rows(0), loss_mask=three_rows(0).loss_mask & (np.arange(20) < 11))
    (first, *_) = maker([rewarded([silent_at_last, line(1, [(0, 4)])])])
    assert (first.row, int(first.loss_mask.sum())) == (1, 1)


def test_a_beginning_that_rows_share_makes_a_completion_no_longer() -> None:
    of_line = line(0, [(1, 3), (2, 1), (0, 2)])
    shaping = RewardShaping(ShapingConfig(length_weight=-0.5), lambda _: LONGEST)
    lines, rows = (shaping.rewards(rewarded([each, line(1, [(0, 4)])])) for each in (of_line, three_rows(0)))
    assert lines.tolist() == rows.tolist()
    figures = length_figures([rewarded([three_rows(0), line(1, [(0, 4)])])])
    assert (figures["length/completion_max"], figures["length/completion_mean"]) == (9, 6.5)
    assert (figures["length/rows_mean"], figures["length/rows_max"]) == (2, 3)
    assert figures["length/turns_mean"] == 2  # three and one
    assert figures["length/read_share"] == 1 - 10 / 24


def test_two_turns_on_either_side_of_a_row_s_border_are_two() -> None:
    adjacent = replace(line(0, [(0, 4)]), row_starts=np.array([2], np.int32))
    assert length_figures([rewarded([adjacent])])["length/turns_mean"] == 2


def test_versions_that_fall_from_row_to_row_are_all_counted() -> None:
    versions = np.array([3, 5, 5, 3], np.int32)
    figures = staleness_figures(
        [rewarded([replace(line(0, [(0, 4)]), versions=versions, row_starts=np.array([3]))])], 5
    )
    assert (figures["rollout/num_versions_max"], figures["staleness/token_mean"]) == (2, 1)


# ------------------------------------------------------------------------------------------------- rewards of tokens


def test_a_critic_sees_at_the_end_of_a_row_what_later_rows_earn_and_the_returns_of_one_line() -> None:
    """Undiscounted, the returns of every token are those of the history in one line."""
    token_rewards = {2: 0.25, 10: 0.125}  # in the first row, in the second
    member = replace(scored(three_rows(0), 1.0), token_rewards=token_rewards)
    samples = SampleMaker(reward_itself, spread="earned")([group(member, prompt_length=PROMPT)])
    earned = [sample.advantages[sample.loss_mask].tolist() for sample in samples]
    assert earned == [[0, 0.25, 0.75], [0.125 + 0.625], [0, 0.625]]
    of_line = replace(scored(line(0, [(1, 3), (2, 1), (0, 2)]), 1.0), token_rewards={2: 0.25, 6: 0.125})
    (in_line,) = SampleMaker(reward_itself, spread="to_come")([group(of_line, prompt_length=PROMPT)])
    returns = [value for each in earned for value in np.cumsum(each[::-1])[::-1].tolist()]
    assert returns == in_line.advantages[in_line.loss_mask].tolist()


def test_what_a_teacher_says_goes_with_the_row_of_its_token() -> None:
    first, num = three_rows(0), 20
    said = -np.arange(1, num + 1, dtype=np.float32)
    teacher = TeacherScores(said, np.arange(2 * num, dtype=np.int32), np.repeat(said, 2))
    members = [replace(scored(each, 1.0), teacher=teacher) for each in (first, three_rows(1))]
    maker = SampleMaker(reward_itself, teaching=Teaching(is_reference=True, top_k=2))
    samples = maker([group(*members, prompt_length=PROMPT)])
    assert len(samples) == 6
    for sample, row in zip(samples, 2 * first.rows, strict=True):
        mask = first.loss_mask[row]
        assert sample.teacher_logprobs is not None
        assert sample.teacher_top_ids is not None
        assert sample.teacher_logprobs[sample.loss_mask].tolist() == said[row][mask].tolist()
        assert sample.teacher_top_ids.tolist() == np.arange(2 * num).reshape(num, 2)[row][mask].ravel().tolist()


# --------------------------------------------------------------------------------------------------------- gradients


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), hidden=32, layers=2)


def gradients(model: Path, members: Sequence[ScoredRollout], how: str) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradient of every weight) of a step on a group, by the backend and the loss of a run."""
    maker = SampleMaker(grpo_no_std, aggregation=how, max_completion_tokens=LONGEST)
    asked = group(*members, prompt_length=PROMPT)
    known = replace(asked.prompt, token_ids=np.array([3, 4], np.int32))  # of the model's vocabulary
    (samples,) = maker.minibatches([replace(asked, prompt=known)], 0)
    batch = pack(samples, token_budget=64, num_ranks=1, cost=FlopCost(1.0, 0.0))
    backend = open_backend(tiny_config(model, adam_eps=1.0), RankContext())
    before = {name: tensor.detach().double().clone() for name, tensor in backend.weights()}
    result = backend.step(
        batch.ranks[0],
        make_policy_loss(AlgorithmConfig(proximal="behaviour", importance_cap="off"), 6),
        proximal=None,
        num_loss_tokens=batch.num_loss_tokens,
        learning_rate=1.0,
        weight_decay=0.0,
        max_grad_norm=1e6,
    )
    steps = {name: before[name] - tensor.detach().double() for name, tensor in backend.weights()}  # g / (|g| + 1)
    backend.close()
    return result.metrics["loss"], {name: step / (1 - step.abs()) for name, step in steps.items()}


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_the_gradient_of_a_split_history_is_that_of_one_line(model: Path, how: str) -> None:
    plain = line(1, [(2, 5)])
    of_line = line(0, [(1, 3), (2, 4), (1, 6)])
    split = in_rows(of_line, [4, 10, len(of_line.token_ids)])
    twice = replace(split, loss_mask=np.concatenate([of_line.loss_mask[:end] for end in (4, 10, 17)]))
    loss, wanted = gradients(model, [scored(of_line, 1.0), scored(plain, 0.0)], how)
    found_loss, found = gradients(model, [scored(split, 1.0), scored(plain, 0.0)], how)
    _, doubled = gradients(model, [scored(twice, 1.0), scored(plain, 0.0)], how)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    largest = max(float(each.abs().max()) for each in wanted.values())
    off = max(float((found[name] - each).abs().max()) for name, each in wanted.items())
    off_if_doubled = max(float((doubled[name] - each).abs().max()) for name, each in wanted.items())
    assert off < 1e-4 * largest
    assert off_if_doubled > 1e-2 * largest  # a copy that is trained again would be noticed
