"""Every promise of docs/guarantees.md names tests that are there, and `make test` runs one of them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line.strip("| ").split(" | ")
    for line in (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").partition("\n## ")[0].splitlines()
    if line.startswith("|") and "`" in line
]


def is_long(node: ast.AST) -> bool:
    """Whether the whole of a test, or of a file's tests, is left out of `make test`."""
    return any(isinstance(part, ast.Attribute) and ast.unparse(part) == "pytest.mark.long" for part in ast.walk(node))


@cache
def everyday_tests() -> dict[str, bool]:
    """Name of a test, or path of a file of tests → whether `make test` runs it or a part of it."""
    found: dict[str, bool] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
        is_left_out = any(map(is_long, marks))
        found[str(path.relative_to(ROOT))] = not is_left_out
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                whole = [mark for mark in node.decorator_list if not ast.unparse(mark).startswith("pytest.mark.param")]
                found[node.name] = not is_left_out and not any(map(is_long, whole))
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_promise_is_held_by_a_test_of_make_test(row: list[str]) -> None:
    promise, _, tests = row
    names = re.findall(r"`([\w/.]+)`", tests)
    everyday = everyday_tests()
    assert [name for name in names if name not in everyday] == []
    if names:
        assert any(everyday[name] for name in names), f"only `make test-all` holds {promise!r}"
