"""What the guard decides, and the figures that it looks at."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from algorithm_rows import group, rollout, scored

from rlhpc.algorithms.figures import (
    effective_sample_share,
    length_figures,
    reward_figures,
    staleness,
    staleness_figures,
)
from rlhpc.algorithms.guard import (
    AS_BEFORE,
    MIN_NORMS,
    NUM_NORMS,
    Action,
    GuardDecision,
    StepGuard,
    broken,
    guarded_figures,
    refusal,
)
from rlhpc.config.tables_algorithm import GuardConfig
from rlhpc.protocol.types import FinishReason, StepLimits, Verdict

# ----------------------------------------------------------------------------------------------- What the guard decides

FINE = {"mismatch_kl": 1e-4, "ess": 0.99, "entropy": 0.5, "grad_norm": 1.0}
BAD = FINE | {"ess": 0.1}
PATIENCE, CALM = 2, 4


def guard(action: str = "stop", **settings: Any) -> StepGuard:
    return StepGuard(GuardConfig(action=action, **{"patience_steps": PATIENCE, "calm_steps": CALM, **settings}))  # type: ignore[arg-type]


def judge(guard: StepGuard, figures: dict[str, float], step: int = 0) -> GuardDecision:
    """As the trainer does: a step outside the limits that came with it is not applied."""
    applied = not broken(guard.limits(), figures)
    return guard.judge(step, figures, applied=applied)


def actions(guard: StepGuard, figures: list[dict[str, float]]) -> list[Action]:
    return [judge(guard, each, step).action for step, each in enumerate(figures)]


def test_a_bad_step_is_a_warning_that_is_forgotten_and_the_longer_it_lasts_the_more_is_done() -> None:
    ours = guard()
    assert actions(ours, [BAD, *[FINE] * CALM]) == [Action.WARN, *[Action.OFF] * CALM]
    assert (ours.num_bad_steps, ours.first_bad_step) == (0, -1)
    assert actions(ours, [BAD] * PATIENCE) == [Action.WARN] * PATIENCE
    rungs = [Action.WARN, Action.TIGHTEN, Action.SKIP, Action.STOP]
    assert actions(guard(), [BAD] * (4 * PATIENCE)) == [rung for rung in rungs for _ in range(PATIENCE)]
    ours = guard()
    for _ in range(PATIENCE):
        assert judge(ours, BAD).action is Action.WARN
        assert actions(ours, [FINE] * (CALM - 1)) == [Action.OFF] * (CALM - 1)
    assert judge(ours, BAD).action is Action.TIGHTEN


@pytest.mark.parametrize("action", ["off", "warn", "tighten", "skip", "stop"])
def test_no_action_is_stronger_than_permitted(action: str) -> None:
    ours = guard(action)
    worst = max(actions(ours, [BAD] * 40))
    assert worst is Action[action.upper()]
    assert (ours.limits() != StepLimits()) == (worst >= Action.SKIP)


def test_a_step_is_refused_only_by_limits_that_were_known_before_it() -> None:
    ours = guard("skip")
    assert actions(ours, [BAD] * (2 * PATIENCE - 1)) == [Action.WARN] * PATIENCE + [Action.TIGHTEN] * (PATIENCE - 1)
    assert ours.limits() == StepLimits()  # the next one may be the last of its rung
    judge(ours, BAD)
    assert broken(ours.limits(), BAD) == ("ess",)
    assert broken(ours.limits(), FINE) == ()


def test_figures_are_those_of_the_metrics_each_has_its_bounds_and_one_that_is_missing_is_no_reason() -> None:
    for name, value in (("mismatch_kl", 0.2), ("ess", 0.29), ("entropy", 1e-4), ("entropy", 6.0)):
        assert judge(guard(), FINE | {name: value}).broken == (name,)
    assert guarded_figures({"loss": 1.0, "grad_norm": math.nan, "entropy": math.inf}) == {}
    assert judge(guard(), {}).action is Action.OFF
    means = {"mismatch_kl": 0.01, "entropy": 2.0, "grad_norm": 3.0, "importance_weight": 0.5}
    found = guarded_figures(means | {"importance_weight_squared": 1.0})
    assert found == {"mismatch_kl": 0.01, "entropy": 2.0, "grad_norm": 3.0, "ess": 0.25}
    assert "ess" not in guarded_figures(means)


def test_a_gradient_norm_is_held_against_those_before_it_and_not_before_there_are_some() -> None:
    ours, rng = guard("warn"), random.Random(0)
    norms = [math.exp(rng.gauss(0.0, 0.3)) for _ in range(NUM_NORMS)]
    assert judge(ours, FINE | {"grad_norm": 1e6}).broken == ()  # the first one, whatever it is
    assert {judge(ours, FINE | {"grad_norm": norm}).broken for norm in norms} == {()}
    highest = ours.bounds().highs["grad_norm"]
    assert 5.0 < highest < 30.0
    assert judge(ours, FINE | {"grad_norm": highest * 1.01}).broken == ("grad_norm",)


def test_a_lasting_change_of_the_norm_becomes_the_reference_and_norms_of_refused_steps_do_not_shift_it() -> None:
    ours = guard("warn")
    actions(ours, [FINE] * MIN_NORMS)
    assert ours.bounds().highs["grad_norm"] == pytest.approx(math.exp(8 * 0.2))
    ours = guard("warn")
    actions(ours, [FINE] * NUM_NORMS)
    found = actions(ours, [FINE | {"grad_norm": 50.0}] * NUM_NORMS)
    assert found[0] is Action.WARN
    assert found[-1] is Action.OFF
    ours = guard("skip", patience_steps=1)
    actions(ours, [FINE] * NUM_NORMS)
    actions(ours, [BAD] * 2)
    highest = ours.bounds().highs["grad_norm"]
    actions(ours, [FINE | {"grad_norm": 1e9}] * NUM_NORMS)
    assert ours.bounds().highs["grad_norm"] == highest


def test_a_long_alarm_is_told_now_and_then_and_each_stronger_action_always() -> None:
    ours = guard("tighten", patience_steps=3)
    assert [judge(ours, BAD).is_news for _ in range(10)] == [True, True, False, True] + [False] * 3 + [True] + [
        False
    ] * 2
    assert all(judge(guard("stop", patience_steps=1), BAD).is_news for _ in range(3))


def test_a_refusal_names_what_is_out_of_limits_and_a_repeated_one_needs_no_reason() -> None:
    limits = StepLimits({"entropy": 1.0}, {"grad_norm": 2.0})
    assert refusal(limits, {"entropy": 0.5, "grad_norm": 3.0}) == "entropy, grad_norm"
    assert refusal(limits, {"entropy": 1.0, "grad_norm": 2.0}) == ""
    assert refusal(StepLimits(skip=(1, 2)), {}, 2) == AS_BEFORE
    assert refusal(StepLimits(skip=(1, 2)), {}, 0) == ""
    assert StepLimits().allow_all
    assert not StepLimits(skip=(0,)).allow_all


def test_a_restart_goes_on_with_the_same_judgements() -> None:
    """At every point of a long history with outliers."""
    rng = random.Random(1)
    history = [rng.choice([FINE, FINE, BAD]) | {"grad_norm": math.exp(rng.gauss(0, 0.5))} for _ in range(120)]
    through = guard()
    expected, states = [], []
    for step, figures in enumerate(history):
        states.append(json.loads(json.dumps(through.state())))
        expected.append((through.limits(), judge(through, figures, step)))
    for first in range(0, len(history), 7):
        again = guard()
        again.load_state(states[first])
        found = [(again.limits(), judge(again, history[step], step)) for step in range(first, len(history))]
        assert found == expected[first:]


def test_an_alarm_says_which_step_it_began_with_also_after_a_restart() -> None:
    ours, again = guard(), guard()
    actions(ours, [FINE, BAD, FINE, BAD])
    again.load_state(json.loads(json.dumps(ours.state())))
    assert (again.first_bad_step, again.num_bad_steps) == (1, 2)


def test_only_an_alarm_that_may_stop_the_run_needs_the_checkpoints_before_it() -> None:
    for action, figures, needs in (("stop", BAD, True), ("stop", FINE, False), ("skip", BAD, False)):
        ours = guard(action)
        judge(ours, figures)
        assert ours.may_end_the_run is needs


# --------------------------------------------------------------------------------------------------------- diagnostics

FIRST = group(
    scored(rollout(0, length=2), 1.0, format=0.5),
    scored(rollout(1, length=6, finish_reason=FinishReason.LENGTH), 0.0, format=0.0),
)
SECOND = group(scored(rollout(0, length=4), 0.0), scored(rollout(1, length=4), 0.0), admitted_version=1)
SOLVED = group(scored(rollout(0, length=4), 1.0), scored(rollout(1, length=4), 1.0))
FAILED = group(scored(rollout(0), 1.0), scored(rollout(1), 99.0, Verdict.VERIFIER_ERROR))


def test_reward_figures_count_members_and_groups_and_no_verifier_that_failed() -> None:
    figures = reward_figures([FIRST, SECOND, SOLVED])
    assert figures["reward/mean"] == 0.5
    assert figures["reward/correct_share"] == 0.5
    assert figures["reward/zero_variance_share"] == pytest.approx(2 / 3)
    assert figures["group/all_wrong_share"] == pytest.approx(1 / 3)
    assert figures["group/all_correct_share"] == pytest.approx(1 / 3)
    assert figures["reward_part/format"] == 0.25
    # A reward for parts of an answer is above 0 without any answer being correct.
    partly = group(*(scored(rollout(index), 0.3, Verdict.WRONG) for index in range(2)))
    figures = reward_figures([partly])
    assert (figures["group/all_wrong_share"], figures["group/all_correct_share"]) == (1, 0)
    figures = reward_figures([FAILED])
    assert figures["reward/mean"] == 1.0
    assert figures["reward/std"] == 0.0


def test_length_figures_tell_truncation_and_turns_and_nothing_without_groups() -> None:
    figures = length_figures([FIRST, SECOND])
    assert figures["length/completion_mean"] == 4
    assert figures["length/completion_max"] == 6
    assert figures["length/truncated_share"] == 0.25
    assert figures["length/prompt_mean"] == 2
    assert (figures["length/turns_mean"], figures["length/read_share"]) == (1, 0)
    talk = (
        replace(rollout(0, length=3), loss_mask=np.array([0, 1, 0], np.bool_)),
        replace(rollout(1, length=3), loss_mask=np.array([1, 0, 1], np.bool_)),
    )
    figures = length_figures([group(*(scored(each, 1.0) for each in talk))])
    assert figures["length/turns_mean"] == 1.5
    assert figures["length/read_share"] == 0.5
    assert reward_figures([]) == {}
    assert length_figures([]) == {}
    assert staleness_figures([], 3) == {}


def test_staleness_counts_from_admission_and_per_token_from_sampling() -> None:
    mixed = group(scored(rollout(0, versions=np.array([3, 3, 4], np.int32)), 1.0), scored(rollout(1), 0.0))
    figures = staleness_figures([mixed], policy_version=5)
    assert figures["staleness/mean"] == 2
    assert figures["staleness/max"] == 2
    assert figures["staleness/token_mean"] == pytest.approx((2 + 2 + 1 + 1 + 1 + 1) / 6)
    assert figures["rollout/spanning_update_share"] == 0.5
    assert figures["rollout/num_versions_max"] == 2
    assert staleness([mixed, SECOND], 5).tolist() == [2, 2, 4, 4]


def test_effective_share_is_one_for_equal_weights_and_falls_with_their_spread() -> None:
    def share(weights: np.ndarray) -> float:
        sums = {"importance_weight": float(weights.sum()), "importance_weight_squared": float((weights**2).sum())}
        return effective_sample_share(sums, len(weights))

    assert share(np.full(10, 0.3)) == pytest.approx(1.0)
    assert share(np.array([1.0] + [0.0] * 9)) == pytest.approx(0.1)
    assert share(np.zeros(3)) == 0.0
