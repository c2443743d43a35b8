"""Answers that scorers of reasoning-gym have Python evaluate: mathematics and lists may be, programs may not."""

import json

import pytest

from rlhpc.rewards.harmless_answer import EVALUATING, is_harmless


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("(3 + 4) * 12 - 5/2", "84"),
        ("3*x**2 + sin(x)*exp(-x)/2 + C", "0"),
        ("-log(Abs(cos(x))) + sqrt(2)*x^2", "0"),
        ("theta**2/2", "theta**3"),
        ("5! - 2.50", "1"),
        ("[[0, 1], [1, 0]]", "0 1"),
        ("['A', 'B', 'C']", "ABC"),
        ("ABCDDCBA", "ABCD"),
        ("_ Q _ _\n_ _ _ Q", "Q"),
        ("the right one, whatever it is.", "the right one, whatever it is."),
    ],
)
def test_mathematics_and_lists_are_harmless(answer, right):
    assert is_harmless(answer, right)


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('true')",
        "().__class__.__base__",
        "open(1)",
        "exec(x)",
        "x.real",
        "(1) . real",
        "S('1')",
        "[len('aaa')]",
        "[x for x in y]",
        "lambda: 1",
        "print(1)",
        "x := 1",
        r"S('\x5f')",
        "ｅval(1)",
        "f'{open(1)}'",
        "{1: open(1)}",
        "1 if x else 2",
        "globals()",
    ],
    ids=lambda answer: answer[:20],
)
def test_programs_are_not(answer):
    assert not is_harmless(answer, "12")


@pytest.mark.parametrize("name", sorted(EVALUATING))
def test_no_scorer_runs_the_program_that_an_answer_is(name, tmp_path):
    gym = pytest.importorskip("reasoning_gym")
    from rlhpc.rewards.reasoning_gym_task import judge  # it imports the library
    from rlhpc.sandbox.values import encode

    entry = {"question": "", "answer": "12", "metadata": {"variable": "x", "integrand": "x", "numbers": [1]}}
    entry["metadata"] |= {"target": 12, "valid_answers": ["12"], "valid_solutions": []}
    reference = json.dumps({"dataset": name, "settings": {}, "entry": encode(entry)})
    assert name in gym.factory.DATASETS
    outcome = judge(f"<answer>[open({str(tmp_path / 'mine')!r}, 'w')]</answer>", reference)
    assert outcome.reward == 0.0
    assert not (tmp_path / "mine").exists()
