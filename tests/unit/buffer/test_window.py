"""What the default of admission.window_groups rests on, in virtual time with the real ledger (bench/window.py)."""

from __future__ import annotations

import pytest

from bench.window import GROUPS_PER_STEP, PACES, Ring
from rlhpc.config_sections import AdmissionConfig


def pace_of(max_staleness: int, window: int | None, pace: str) -> float:
    admission = AdmissionConfig(
        groups_per_step=GROUPS_PER_STEP, group_size=8, max_staleness=max_staleness, window_groups=window
    )
    figure, worst = Ring(admission, *PACES[pace], sigma=0.5, seed=0).run(60)
    assert worst <= max_staleness
    return figure


@pytest.mark.parametrize("pace", list(PACES))
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_the_default_window_is_faster_than_one_of_a_whole_batch_where_slots_are_scarce(
    pace: str, max_staleness: int
) -> None:
    assert pace_of(max_staleness, None, pace) > 1.05 * pace_of(max_staleness, GROUPS_PER_STEP, pace)


def test_the_default_window_costs_nothing_where_slots_abound() -> None:
    assert pace_of(4, None, "g = t") > 0.95 * pace_of(4, GROUPS_PER_STEP, "g = t")
