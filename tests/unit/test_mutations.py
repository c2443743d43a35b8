"""The list of bugs that bench/mutations.py plants fits the sources and the tests as they are."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from bench.mutations import ROOT, Bug, find_test, read_bugs

BUGS = read_bugs()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted_and_the_module_still_be_read(bug: Bug) -> None:
    assert bug.problem(ROOT) == ""
    sound = (ROOT / bug.path).read_text(encoding="utf-8")
    assert bug.new != bug.old
    ast.parse(sound.replace(bug.old, bug.new))


def test_every_bug_has_a_name_of_its_own_and_a_test_that_exists() -> None:
    assert [name for name, count in Counter(bug.name for bug in BUGS).items() if count > 1] == []
    for bug in BUGS:
        assert bug.tests, bug.name
        for test in bug.tests:
            file, _, function = find_test(test, ROOT).partition("::")
            assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8") or not function


def test_there_are_at_least_forty_bugs() -> None:
    assert len(BUGS) >= 40


def test_planting_a_bug_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    bug = BUGS[0]
    copy = tmp_path / bug.path
    copy.parent.mkdir(parents=True)
    sound = (ROOT / bug.path).read_bytes()
    copy.write_bytes(sound)

    def interrupted() -> None:
        with bug.planted(tmp_path):
            assert copy.read_text(encoding="utf-8").count(bug.new) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert copy.read_bytes() == sound
    assert (ROOT / bug.path).read_bytes() == sound
