"""Every finding of tests/found.md has its row, and the tests that it names are there and run by `make test`."""

from __future__ import annotations

import re

import pytest

from tests.unit.doc_pages import ROOT
from tests.unit.test_guarantees import everyday_tests

ROWS = [
    line.strip("| ").split(" | ")
    for line in (ROOT / "tests" / "found.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| [FTM]\d", line)
]
# Of the third look; numbers between them were never given.
NUMBERS = [1, 2, 3, 4, 5, 6, 7, 8, 9, *range(10, 16), 18, *range(20, 29), *range(40, 47), *range(60, 72)]


def test_no_finding_is_left_out() -> None:
    numbers = [row[0] for row in ROWS]
    assert [number for number in numbers if number.startswith("F")] == [f"F{number}" for number in range(20, 36)]
    assert [number for number in numbers if number.startswith("T")] == [f"T{number}" for number in NUMBERS]
    assert [number for number in numbers if number.startswith("M")] == ["M1", "M2", "M3", "M4"]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_finding_names_what_mended_it_and_tests_that_make_test_runs(row: list[str]) -> None:
    _, found, now, tests = row
    assert found
    assert now
    names = re.findall(r"`([\w/.]+)`", tests)
    assert names
    everyday = everyday_tests()
    assert [name for name in names if name not in everyday] == []
    assert all(everyday[name] for name in names)
