"""What docs/algorithms.md says of admission.oversample, with the real ledger in virtual time (bench/oversampling)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.oversampling import Figures, measure
from launch.checks.bias import OVERSAMPLING

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
SHARES = ("0.125", "0.25", "0.5")


def figures(share: float, sigma: float, of_prompt: float) -> Figures:
    return measure(share, 2, "g = t", sigma, of_prompt, steps=60, seeds=1)


def test_without_it_what_is_trained_is_as_long_as_what_is_sampled() -> None:
    found = figures(0.0, 1.0, 0.5)
    assert found.length == pytest.approx(1, abs=0.01)
    assert found.cut_per_step == found.wasted == 0


def test_it_is_faster_where_lengths_differ_much_and_what_is_trained_is_shorter() -> None:
    before, after = figures(0.0, 1.0, 0.5), figures(0.25, 1.0, 0.5)
    assert after.pace > 1.5 * before.pace
    assert after.length < 0.85
    assert after.wasted > 0.2


def test_the_bias_is_smaller_where_prompts_are_alike() -> None:
    assert figures(0.25, 0.5, 0.5).length < figures(0.25, 0.5, 0.0).length - 0.02


def test_the_warning_says_what_the_table_says() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Over-sampling")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[4:] for line in section.splitlines() if re.match(r"\| \d", line)]
    for column, share in enumerate(SHARES):
        lost = [round(100 * (1 - float(row[column].split(",")[0]))) for row in rows]
        assert re.search(rf"{min(lost)}–{max(lost)} %[a-z ]* with {re.escape(share)}", OVERSAMPLING)
