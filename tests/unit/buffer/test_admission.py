"""What the defaults of admission rest on, in virtual time with the real ledger (bench/admission.py)."""

from __future__ import annotations

import pytest

from bench.admission import LAWS, PACES, Figures, G, P, figures_of, limit


def figures(name: str, bound: int, pace: str = "g = t", law: str = "σ = 0.5", share: float = 0.5) -> Figures:
    return figures_of(name, bound, pace, law, int(share * P * G), steps=100, seeds=1)


@pytest.mark.parametrize("pace", list(PACES))
@pytest.mark.parametrize("bound", [1, 2, 4])
def test_no_rule_that_keeps_the_bound_is_faster_than_the_limit_and_ours_is_no_slower_than_strict_order(
    bound: int, pace: str
) -> None:
    for share in (0.5, 1.0):
        highest = limit(bound, *PACES[pace], LAWS["σ = 0.5"], int(share * P * G))
        ours, strict = (figures(name, bound, pace, share=share) for name in ("ours", "strict"))
        assert 0.98 * strict.efficiency < ours.efficiency < highest + 0.03
        assert ours.worst_staleness <= bound


def test_where_generation_is_what_all_wait_for_half_the_staleness_does_as_well() -> None:
    ours, strict = (figures(name, 4) for name in ("ours", "strict"))
    assert ours.efficiency > 0.98
    assert ours.mean_staleness < 0.7 * strict.mean_staleness


def test_what_is_trained_is_as_long_as_what_is_drawn() -> None:
    for bound in (1, 4):
        assert abs(figures("ours", bound).length - 1) < 0.03


def test_other_rules_do_not_keep_the_bound_that_they_are_given() -> None:
    assert figures("AReaL", 1).worst_staleness > 1
