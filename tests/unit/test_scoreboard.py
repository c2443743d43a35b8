"""The scoreboard's rows fit its programs, and bench/scoreboard.md is what the last measurement wrote."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.figures import FIGURES_FILE, read_figures, tell
from bench.scoreboard import PAGE, Figure, Measured, page, read_found, read_table, row_of

PROGRAMS, ROWS = read_table()


def test_every_program_is_there_and_measures_a_row() -> None:
    assert {figure.program for figure in ROWS} == set(PROGRAMS)
    for program in PROGRAMS.values():
        assert find_spec(program.words[0]) is not None, program.words[0]


def test_rows_have_ids_of_their_own_and_a_direction() -> None:
    assert [row for row, count in Counter(figure.id for figure in ROWS).items() if count > 1] == []
    assert {figure.better for figure in ROWS} == {"more", "less"}


def test_a_program_tells_every_figure_that_a_row_asks_it_for() -> None:
    """By the fixed start of its name: the rest may be computed."""
    for figure in ROWS:
        spec = find_spec(PROGRAMS[figure.program].words[0])
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        starts = [line.split('"')[1].split("{")[0] for line in source.splitlines() if "tell(" in line and '"' in line]
        assert any(figure.name.startswith(start) for start in starts), figure.name


def test_the_page_is_what_was_measured_last() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(PROGRAMS, ROWS, read_found())


@pytest.mark.parametrize(("better", "value", "is_missed"), [("more", 0.9, True), ("less", 0.9, False)])
def test_an_aim_that_is_missed_says_so(better: str, value: float, is_missed: bool) -> None:
    figure = Figure("X", "something", "x", "program", better, 1.0, "nobody")
    measured = Measured(value, 0.5, "2026-11-24", "a machine")
    assert ("**missed**" in row_of(figure, measured)) is is_missed
    assert "not measured" in row_of(figure, None)
    assert "1,234 s" in row_of(replace(figure, unit="s"), replace(measured, value=1234.4))


def test_figures_go_to_the_file_that_is_named_and_nowhere_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures"
    monkeypatch.delenv(FIGURES_FILE, raising=False)
    tell("lost", 1.0)
    monkeypatch.setenv(FIGURES_FILE, str(path))
    assert read_figures(path) == {}
    tell("a", 1.0)
    tell("a", 2.0)
    assert read_figures(path) == {"a": 2.0}
