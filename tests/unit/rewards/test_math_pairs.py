"""Verdicts on pairs of references and answers: by hand (math_pairs.tsv), by an oracle (math_oracle.py), of any text."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhpc.config.tables_services import MathConfig
from rlhpc.rewards import math_answer, text_answer
from rlhpc.rewards import math_answer as integer_arithmetic
from rlhpc.rewards.math_answer import check_math_answer
from rlhpc.rewards.math_answer import math_answer as judge
from rlhpc.rewards.task_settings import TaskSettings
from tests.unit.rewards.math_oracle import GROUPS, disagreements

PAIRS = [line.split("\t") for line in (Path(__file__).parent / "math_pairs.tsv").read_text("utf-8").splitlines()[1:]]


@pytest.mark.parametrize(("verdict", "reference", "answer"), PAIRS)
def test_an_answer_has_the_verdict_that_a_mathematician_gives(verdict, reference, answer):
    assert judge(rf"so \boxed{{{answer}}}", reference).is_correct is (verdict == "right")


@pytest.mark.parametrize("reference", sorted({reference for _, reference, _ in PAIRS}))
def test_a_reference_passes_the_check_and_answers_itself(reference):
    check_math_answer(reference)
    assert judge(f"#### {reference}", reference).is_correct


@pytest.mark.parametrize(
    ("completion", "reference"),
    [
        ("#### **5**", "5"), ("**#### 5**", "5"), ("#### `5`", "5"), ("#### __5__", "5"), (r"$\boxed 5$", "5"),
        (r"so \boxed5.", "5"), (r"$\boxed\pi$", r"\pi"), (r"$\boxed \frac12$", "1/2"), (r"\boxed{**5**}", "5"),
        (r"\boxed{5} is what \boxed asks for", "5"), (r"\boxed{2}", '["2", "two"]'),
        (r"\boxed{two}", '["2.5", "two"]'), (r"\boxed{[1, 2]}", "[1, 2]"),
    ],
)  # fmt: skip
def test_marks_and_lists_of_references(completion, reference):
    assert judge(completion, reference).is_correct


@pytest.mark.parametrize(
    "reference",
    [r"\frac{1}{0}", r"\tan 90^\circ", r"\ln 0", "0^0", r"\infty - \infty", "1/(2-2)", "[]", '["2", "18 19"]', "3 +",
     r"4\ldots", "1e99999", "x" * 1001, r"\{1, \frac{1}{0}\}", json.dumps(["", "2"]),
     "(" * 200, "9" * 5000, "[" * 100_000],
)  # fmt: skip
def test_a_reference_that_cannot_be_judged_is_refused(reference):
    with pytest.raises(ValueError, match="legal: a number"):
        check_math_answer(reference)


@pytest.mark.parametrize("group", GROUPS)
def test_verdicts_are_those_of_the_oracle(group):
    num_pairs, num_right, found = disagreements(group, every=5)
    assert not found
    assert num_pairs > num_right


SIGNS = "0123456789abixyeE+-*/^_=<>!%'\".,;:|()[]{}$ "
COMMANDS = (
    r"\frac \sqrt \{ \} \log_ \sin \text{ \pm \cup \le \sum_{k=1}^ \begin{pmatrix} \end{pmatrix} \ldots \overline{"
)
WORDS = "9^{9^ ½ √ ² ° € ∞ million half km 0. 1e9 \u0305 \ud7ff ٤"
PIECES = st.sampled_from([*SIGNS, *COMMANDS.split(), *WORDS.split(), " or ", " and ", "\\\\", "\n"])
SHORT, LONG = st.lists(PIECES, max_size=40), st.lists(PIECES, max_size=6).map(lambda pieces: pieces * 60)
TEXTS = st.one_of(SHORT, LONG).map("".join)
LONGEST_VERDICT_S = 5.0  # of the processor, of which a run grants ten


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.one_of(TEXTS, st.sampled_from(["7", "x^2+1", r"\{1,2\}", "[0,1)", "x<3", r"\text{no}", "5 km"])))
@example("9!" * 300, "1")
@example("x" + "'" * 900, "x")
@example("1/" * 400 + "1", "1")
@example("(" * 450 + "1" + ")" * 450, "1")
@example(r"\sum_{k=1}^{1000}" * 3 + "k", "1")
@example(r"\begin{vmatrix}" + r"\\".join(["&".join("xyzabcdw")] * 8) + r"\end{vmatrix}", "x")
@example("e^{" * 30 + "9" + "}" * 30, "e")
def test_every_verifier_says_something_of_any_text_in_bounded_time(text, reference):
    began = time.thread_time()
    for answer in (f"#### {text}", rf"\boxed{{{text}}}"):
        for verifier in (math_answer.math_answer, text_answer.exact_match, text_answer.token_f1,
                         integer_arithmetic.integer_arithmetic,
                         text_answer.multiple_choice):  # fmt: skip
            with contextlib.suppress(ValueError):  # of a reference that cannot be read
                assert 0.0 <= verifier(answer, reference).reward <= 1.0
    assert time.thread_time() - began < LONGEST_VERDICT_S


@pytest.mark.parametrize(
    ("rules", "reference", "answer", "is_right"),
    [
        ({"units": "required"}, "5 km", "5", False),
        ({"units": "required"}, "5 km", "5000 m", True),
        ({"units": "required"}, "5", "5 km", True),
        ({"units": "required"}, "$5", "5", False),
        ({"units": "required"}, "12 eggs", "12", True),
        ({"units": "ignored"}, "5 km", "5 m", True),
        ({"units": "ignored"}, "$5", "€5", True),
        ({"fractions": "lowest"}, "1/2", "2/4", False),
        ({"fractions": "lowest"}, "1/2", r"\frac24", False),
        ({"fractions": "lowest"}, "1/2", r"\frac12", True),
        ({"fractions": "lowest"}, "1/2", "0.5", True),
        ({"fractions": "lowest"}, "3", "6/2", False),
    ],
)
def test_rules_of_a_run_change_what_is_equal(rules, reference, answer, is_right, monkeypatch):
    monkeypatch.setattr(math_answer, "task_settings", lambda: TaskSettings(math=MathConfig(**rules)))
    assert judge(rf"\boxed{{{answer}}}", reference).is_correct is is_right
