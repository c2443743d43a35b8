"""What is lost and granted again does not make the rollouts that arrive shorter (bench/length_bias.py)."""

from __future__ import annotations

import numpy as np
import pytest

from bench.length_bias import SIGMA, TRUE_MEAN_S, WAYS, Run

NUM_SAMPLES = 2000
STANDARD_ERROR_S = TRUE_MEAN_S * np.sqrt(np.exp(SIGMA**2) - 1) / np.sqrt(NUM_SAMPLES)
ANEW, PROGRESS, SEEDS, BOTH = WAYS
LOSSES = {"deadline": {"lease_deadline_s": 3.0}, "deaths": {"mtbf_s": 10.0}}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("way", [SEEDS, BOTH], ids=["seeds", "both"])
def test_with_seeds_every_rollout_arrives_as_it_was_first_drawn(loss: str, way) -> None:
    run = Run(way, **LOSSES[loss])
    run.mean_s(NUM_SAMPLES)
    drawn = [run._draw_s(group_id, 0.0) for group_id in range(NUM_SAMPLES)]
    assert sorted(run.arrived_s) == sorted(drawn)


def test_leases_that_progress_renews_lose_nothing_to_their_deadline() -> None:
    assert Run(ANEW, **LOSSES["deadline"]).mean_s(NUM_SAMPLES) < TRUE_MEAN_S - 5 * STANDARD_ERROR_S
    assert abs(Run(PROGRESS, **LOSSES["deadline"]).mean_s(NUM_SAMPLES) - TRUE_MEAN_S) < 4 * STANDARD_ERROR_S


def test_prefixes_take_most_of_the_bias_of_deaths_away() -> None:
    anew, progress = (Run(way, **LOSSES["deaths"]).mean_s(NUM_SAMPLES) for way in (ANEW, PROGRESS))
    assert anew < TRUE_MEAN_S - 5 * STANDARD_ERROR_S
    assert TRUE_MEAN_S - progress < (TRUE_MEAN_S - anew) / 2
