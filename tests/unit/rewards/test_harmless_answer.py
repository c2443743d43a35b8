"""Answers that scorers of reasoning-gym have Python evaluate: mathematics and lists may be, programs may not."""

import contextlib
import json

import pytest

from rlhpc.rewards.reasoning_gym_reference import EVALUATING, is_harmless


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("(3 + 4) * 12 - 5/2", "84"),
        ("3*x**2 + sin(x)*exp(-x)/2 + C", "0"),
        ("-log(Abs(cos(x))) + sqrt(2)*x^2", "0"),
        ("theta**2/2", "theta**3"),
        # Ways to write an integral that SymPy reads: constants of integration, and other functions than the right one.
        ("x*atan(x) - log(x**2 + 1)/2 + C1", "x*atan(x) - log(x**2 + 1)/2 + C"),
        ("x**2/2 + C_1", "x**2/2 + C"),
        ("x**2/2 + constant", "x**2/2 + C"),
        ("Rational(1, 2)*x**2 - acot(x) + coth(x)", "x**2/2 + atan(x) + 1/tanh(x) + C"),
        ("5! - 2.50", "1"),
        ("[[0, 1], [1, 0]]", "0 1"),
        ("['A', 'B', 'C']", "ABC"),
        ("[['_', 'Q'], ('.', '12')]", "Q"),
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
        "Rational(open(1), 2)",
        "print(1)",
        "x := 1",
        r"S('\x5f')",
        "ｅval(1)",
        "f'{open(1)}'",
        "{1: open(1)}",
        "1 if x else 2",
        "globals()",
        "'open(1)'",
        "['open(1)']",
        "{1: ('x', {'open(1)'})}",
        "{'open(1)': 1}",
        r"'\x6fpen(1)'",
        "'open' '(1)'",
        "\"'open(1)'\"",
        "b'open(1)'",
    ],
    ids=lambda answer: answer[:20],
)
def test_programs_are_not(answer):
    assert not is_harmless(answer, "12")


@pytest.mark.parametrize("answer", ["{0!r}", "[{0!r}]", "({0!r},)", "{{{0!r}: 1}}"])
def test_a_program_in_quotes_which_sympy_runs_is_refused_before(answer, tmp_path):
    sympy = pytest.importorskip("sympy")
    made = tmp_path / "mine"
    answer = answer.format(f"open({str(made)!r}, 'w')")
    with contextlib.suppress(AttributeError, TypeError, ValueError):  # as the scorers of integrals do
        sympy.diff(sympy.parse_expr(answer), sympy.Symbol("x"))
    assert made.exists()
    assert not is_harmless(answer, "x**2")


@pytest.mark.parametrize("program", ["[open({0!r}, 'w')]", "\"open({0!r}, 'w')\"", "[\"open({0!r}, 'w')\"]"])
@pytest.mark.parametrize("name", sorted(EVALUATING))
def test_no_scorer_runs_the_program_that_an_answer_is(name, program, tmp_path):
    gym = pytest.importorskip("reasoning_gym")
    from rlhpc.rewards.reasoning_gym import reasoning_gym  # it imports the library
    from rlhpc.sandbox.values import encode

    entry = {"question": "", "answer": "12", "metadata": {"variable": "x", "integrand": "x", "numbers": [1]}}
    entry["metadata"] |= {"target": 12, "valid_answers": ["12"], "valid_solutions": []}
    reference = json.dumps({"dataset": name, "settings": {}, "entry": encode(entry)})
    assert name in gym.factory.DATASETS
    outcome = reasoning_gym(f"<answer>{program.format(str(tmp_path / 'mine'))}</answer>", reference)
    assert outcome.reward == 0.0
    assert not (tmp_path / "mine").exists()
