"""What the guard decides: a warning for one outlier, more the longer it lasts, never more than permitted."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

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
from rlhpc.protocol.types import StepLimits

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


def test_one_step_out_of_bounds_is_a_warning_and_forgotten_after_calm_steps() -> None:
    ours = guard()
    assert actions(ours, [BAD, *[FINE] * CALM]) == [Action.WARN, *[Action.OFF] * CALM]
    assert (ours.num_bad_steps, ours.first_bad_step) == (0, -1)
    assert actions(ours, [BAD] * PATIENCE) == [Action.WARN] * PATIENCE


def test_the_longer_it_lasts_the_more_is_done() -> None:
    rungs = [Action.WARN, Action.TIGHTEN, Action.SKIP, Action.STOP]
    assert actions(guard(), [BAD] * (4 * PATIENCE)) == [rung for rung in rungs for _ in range(PATIENCE)]


def test_steps_out_of_bounds_add_up_while_fewer_than_calm_steps_lie_between() -> None:
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


def test_each_figure_has_its_bounds() -> None:
    for name, value in (("mismatch_kl", 0.2), ("ess", 0.29), ("entropy", 1e-4), ("entropy", 6.0)):
        assert judge(guard(), FINE | {name: value}).broken == (name,)


def test_a_gradient_norm_is_held_against_those_before_it_and_not_before_there_are_some() -> None:
    ours, rng = guard("warn"), random.Random(0)
    norms = [math.exp(rng.gauss(0.0, 0.3)) for _ in range(NUM_NORMS)]
    assert judge(ours, FINE | {"grad_norm": 1e6}).broken == ()  # the first one, whatever it is
    assert {judge(ours, FINE | {"grad_norm": norm}).broken for norm in norms} == {()}
    highest = ours.bounds().highs["grad_norm"]
    assert 5.0 < highest < 30.0
    assert judge(ours, FINE | {"grad_norm": highest * 1.01}).broken == ("grad_norm",)


def test_norms_that_hardly_vary_may_still_grow_fivefold() -> None:
    ours = guard("warn")
    actions(ours, [FINE] * MIN_NORMS)
    assert ours.bounds().highs["grad_norm"] == pytest.approx(math.exp(8 * 0.2))


def test_a_lasting_change_of_the_gradient_norm_becomes_the_reference() -> None:
    ours = guard("warn")
    actions(ours, [FINE] * NUM_NORMS)
    found = actions(ours, [FINE | {"grad_norm": 50.0}] * NUM_NORMS)
    assert found[0] is Action.WARN
    assert found[-1] is Action.OFF


def test_norms_of_refused_steps_do_not_shift_the_reference() -> None:
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


def test_figures_that_are_missing_or_not_finite_are_no_reason() -> None:
    assert guarded_figures({"loss": 1.0, "grad_norm": math.nan, "entropy": math.inf}) == {}
    assert judge(guard(), {}).action is Action.OFF


def test_figures_are_those_of_the_metrics() -> None:
    means = {"mismatch_kl": 0.01, "entropy": 2.0, "grad_norm": 3.0, "importance_weight": 0.5}
    found = guarded_figures(means | {"importance_weight_squared": 1.0})
    assert found == {"mismatch_kl": 0.01, "entropy": 2.0, "grad_norm": 3.0, "ess": 0.25}
    assert "ess" not in guarded_figures(means)


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
