"""Pairs of references and answers, each with the verdict that a mathematician gives: math_pairs.tsv."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.rewards.math_answer import check_reference, judge

PAIRS = [line.split("\t") for line in (Path(__file__).parent / "math_pairs.tsv").read_text("utf-8").splitlines()[1:]]


@pytest.mark.parametrize(("verdict", "reference", "answer"), PAIRS)
def test_an_answer_has_the_verdict_that_a_mathematician_gives(verdict, reference, answer):
    assert judge(rf"so \boxed{{{answer}}}", reference).is_correct is (verdict == "right")


@pytest.mark.parametrize("reference", sorted({reference for _, reference, _ in PAIRS}))
def test_a_reference_passes_the_check_and_answers_itself(reference):
    check_reference(reference)
    assert judge(f"#### {reference}", reference).is_correct


@pytest.mark.parametrize(
    ("completion", "reference"),
    [
        ("#### **5**", "5"),
        ("**#### 5**", "5"),
        ("#### `5`", "5"),
        ("#### __5__", "5"),
        (r"$\boxed 5$", "5"),
        (r"so \boxed5.", "5"),
        (r"$\boxed\pi$", r"\pi"),
        (r"$\boxed \frac12$", "1/2"),
        (r"\boxed{**5**}", "5"),
        (r"\boxed{5} is what \boxed asks for", "5"),
        (r"\boxed{2}", '["2", "two"]'),
        (r"\boxed{two}", '["2.5", "two"]'),
        (r"\boxed{[1, 2]}", "[1, 2]"),
    ],
)
def test_marks_and_lists_of_references(completion, reference):
    assert judge(completion, reference).is_correct


@pytest.mark.parametrize(
    "reference",
    [r"\frac{1}{0}", r"\tan 90^\circ", r"\ln 0", "0^0", r"\infty - \infty", "1/(2-2)", "[]", '["2", "18 19"]', "3 +",
     r"4\ldots", "1e99999", "x" * 1001, r"\{1, \frac{1}{0}\}", json.dumps(["", "2"]), "(" * 200],
)  # fmt: skip
def test_a_reference_that_cannot_be_judged_is_refused(reference):
    with pytest.raises(ValueError, match="legal: a number"):
        check_reference(reference)
