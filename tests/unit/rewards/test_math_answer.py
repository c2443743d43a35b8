"""Which answers of mathematics are right: marked ones, integers, plain numbers, and what does no harm."""

import contextlib
import json
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.protocol.types import Verdict
from rlhpc.rewards.math_answer import check_math_answer, integer_arithmetic, math_answer, verify
from rlhpc.rewards.math_values import PlainNumber, parse_plain_number
from rlhpc.rewards.reasoning_gym_reference import EVALUATING, is_harmless
from rlhpc.rewards.text_answer import braced, last_mark, last_marked_answer, last_tagged

GSM8K = Path(__file__).parents[3].parent / "shared" / "data" / "gsm8k"

SOLUTION = (
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\n"
    "She makes 9 * 2 = $<<9*2=18>>18 every day at the farmer’s market.\n"
    "#### 18"
)
# (content of the last box, reference)
EQUAL = [
    ("18", SOLUTION), ("70,000", "… #### 70,000"), (r"\$70{,}000", "#### 70000"), ("18.00", "#### 18"),
    ("18 dollars", "#### 18"), (r"18\text{ dollars}", "18"), (r"\frac{36}{2}", "18"),
    ("9 * 2 = 18", "18"),  # a chain of equations ends with its value
    ("x = 5", "5"), (r"40\%", "#### 40"), (r"\frac{3}{4}", "0.75"), ("0.75", r"\frac34"), ("-5", "-5"),
    (r"2\sqrt{2}", r"\sqrt{8}"), ("(x+1)^2", "x^2+2x+1"), (r"\{1,2\}", r"\{2,1\}"), ("(1, 2)", "(1,2)"),
    (r"90^\circ", "90"), (r"10^3", "1000"), (r"\text{(B)}", "B"), ("$18$", "18"),
    (r"\dfrac{\pi}{2}", r"\boxed{\pi/2}"), (r"\left\{1\right\}", r"\{1\}"), (r"2^{-60}", r"\frac{1}{2^{60}}"),
    (r"663 \times 10^{-36}", r"6.63 \times 10^{-34}"), (r"\frac{100}{100!}", r"\frac{1}{99!}"),
    (r"\sqrt{3+2\sqrt{2}} - 1 - \sqrt{2}", "0"), ("(-\\infty, 10^{-20}]", "(-\\infty, 10^{-20}]"),
    (r"\{1, 10^{-20}\}", r"\{10^{-20}, 1\}"), ("60°", "60"), ("30 °", r"30^\circ"), (r"\varnothing", r"\emptyset"),
    ("[0,∞)", r"[0,\infty)"), (r"x \ge 0", r"[0,\infty)"), (r"-1 \le x < 1", "[-1,1)"), ("110_{2}", "110_2"),
    # Relations with other numbers, or with the numbers on other sides.
    ("4x+6y=12", "2x+3y=6"), ("x^2+y^2-25=0", "x^2+y^2=25"), ("3x-4y=12", "3x-4y-12=0"), (r"x-3 \ge 0", r"x \ge 3"),
    (r"x-3 \ge 0", r"3 \le x"),
]  # fmt: skip
UNEQUAL = [
    ("19", SOLUTION), ("", "18"), ("18 or 19", "18"), ("18, 19", "18"), (r"18\text{ or }19", "18"), (r"\pm 18", "18"),
    ("18 19", "37"),  # juxtaposition is no sum
    ("1 234", "235"), ("18000", "18"), ("2x", "2"), ("5 million", "5"), ("-5", "5"), ("0.33", r"\frac13"),
    ("(2,1)", "(1,2)"), (r"\pi", "3.14"), (r"\frac{1}{0}", "1"), (r"\infty", "1"), ("not mathematics at all", "18"),
    (r"\frac{", "18"), ("18$ $18", "18"), ("9" * 2000, "18"),
    # Numbers that are small differ, too, though their difference is smaller still.
    (r"1.6 \times 10^{-19}", r"6.63 \times 10^{-34}"), ("10^{-20}", r"\frac{1}{2^{60}}"), ("10^{-20}", "e^{-50}"),
    (r"\frac{1}{99!}", r"\frac{1}{100!}"), (r"x = 0.0000002", "x = 0.0000001"),
    (r"(2 \cdot 10^{-20}, 1)", "(10^{-20}, 1)"), (r"\{10^{-20}, 1\}", r"\{10^{-21}, 1\}"),
    ("[0, 10^{-20}]", "[0, 10^{-21}]"), ("x < 10^{-20}", "x < 10^{-21}"), ("61°", "60"),
    (r"-1 \le x \le 1", "[-1,1)"), (r"x > 0", r"[0,\infty)"), ("110_3", "110_2"), ("$4210_{7}$", "4210_5"),
    ("f(0) = 10^{-20}", "f(0) = 10^{-21}"), ("4x+6y=13", "2x+3y=6"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_an_equal_answer_in_another_spelling_is_correct(answer, reference):
    outcome = math_answer(f"Therefore, \\boxed{{{answer}}}.", reference)
    assert (outcome.reward, outcome.is_correct) == (1.0, True)


@pytest.mark.parametrize(("answer", "reference"), UNEQUAL)
def test_an_unequal_or_hedged_or_unreadable_answer_is_wrong(answer, reference):
    outcome = math_answer(f"Therefore, \\boxed{{{answer}}}.", reference)
    assert (outcome.reward, outcome.is_correct) == (0.0, False)
    assert outcome.detail


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and then \boxed{2}", "2"), ("#### 1\n#### 2", "2"), ("\\boxed{1}\n#### 2", "2"),
        ("#### 1\nso \\boxed{2}", "2"), (r"#### \boxed{2}", "2"), (r"\boxed{\boxed{2}}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{\{1\}}", r"\{1\}"), (r"\fbox {2}", "2"),
        ("####2 \nmore text", "2"), (r"\boxed{2} and \boxed{3", "2"),  # cut off inside the second
        (r"\boxed{}", ""), (r"\boxed{2", None), ("the answer is 2", None), ("", None),
    ],
)  # fmt: skip
def test_the_last_marked_answer_counts(text, answer):
    assert last_marked_answer(text) == answer


@pytest.mark.parametrize("completion", ["The answer is 18.", "18", "answer: $18$", "### 18", r"boxed{18}"])
def test_an_answer_without_a_mark_is_wrong_even_where_it_is_right(completion):
    outcome = math_answer(completion, "18")
    assert not outcome.is_correct
    assert "####" in outcome.detail


def test_listing_many_answers_gains_nothing():
    every = " ".join(f"\\boxed{{{number}}}" for number in range(100))
    assert not math_answer(every, "18").is_correct
    assert math_answer(every, "99").is_correct


@pytest.mark.parametrize("reference", ["", "####", r"\frac{", "18 19", "$$", "nan", "null"])
def test_an_unreadable_reference_is_an_error_and_not_a_wrong_answer(reference):
    with pytest.raises(ValueError, match="cannot be read"):
        math_answer(r"\boxed{18}", reference)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_solution_is_its_own_correct_answer_and_no_neighbours(split):
    path = GSM8K / f"{split}.jsonl"
    if not path.exists():
        pytest.skip("GSM8K is not here")
    references = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    for reference in references:
        answer = reference.rpartition("####")[2].strip()
        assert math_answer(f"so \\boxed{{{answer}}}", reference).is_correct, reference
        assert math_answer(f"so \\boxed{{\\${answer}.00}}", reference).is_correct is ("." not in answer), reference
        assert not math_answer(f"so \\boxed{{{answer}1}}", reference).is_correct, reference
        assert not math_answer(answer, reference).is_correct, reference


def test_the_last_mark_is_the_last_of_all_that_are_closed():
    draw = random.Random(5)
    pieces = (r"\boxed{", r"\fbox {", "{", "}", "}", r"\{", r"\}", "\\\\", "\\", "a", "#### b", "\n", "x" * 1990)
    for _ in range(4_000):
        text = "".join(draw.choices(pieces, k=draw.randrange(12)))
        marked = [(match.start(), match[1]) for match in re.finditer(r"####([^\n]*)", text)]
        boxes = [(match.start(), braced(text, match.end())) for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
        expected = max([*marked, *(box for box in boxes if box[1] is not None)], default=None)
        assert last_mark(text) == expected, repr(text)


def test_boxes_that_are_never_closed_take_little_time():
    began = time.thread_time()
    assert math_answer(r"\boxed{" * 50_000, "18").reward == 0.0
    assert time.thread_time() - began < 10.0  # where every box was read to the end, minutes


def test_an_answer_cannot_break_out_of_the_braces_it_is_put_in():
    assert not math_answer(r"#### 5} {18", "18").is_correct
    assert not math_answer(r"#### 5} \boxed{18", "18").is_correct
    assert not math_answer(r"\boxed{5 final answer is $18$. I hope}", "18").is_correct


def test_verify_gives_the_verdict_alone() -> None:
    assert verify(r"so \boxed{18}", "9 + 9 = 18\n#### 18") is Verdict.CORRECT
    assert verify("#### 1,234.00", "#### 1234") is Verdict.CORRECT
    assert verify("so it is 18", "#### 18") is Verdict.WRONG
    assert verify(r"\boxed{18}", "") is Verdict.VERIFIER_ERROR


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("<a>1</a> <a>\n2 </a> #### 3", "\n2 "), ("<a>1</a> <a>2", "1"), ("<a> <a>1</a> </a>", " <a>1"),
        ("</a>1<a>", None), ("<a></a>", ""), ("1", None),
    ],
)  # fmt: skip
def test_the_last_pair_of_tags_holds_the_answer(text: str, held: str | None) -> None:
    assert last_tagged(text, "<a>", "</a>") == held


def test_a_text_full_of_beginnings_is_read_once() -> None:
    began = time.thread_time()
    assert last_tagged("<answer>" * 50_000, "<answer>", "</answer>") is None
    assert time.thread_time() - began < 1.0


# -------------------------------------------------------------------------------------------------- integer arithmetic

RIGHT = ["46", " 46\n", "2+4=6;10+30=40;46", "12+34=46", "work #### 46", "45;46", "####46", "1;2=46"]
WRONG = [
    "", "47", "46;",  # nothing after the last mark
    "46 47",  # two answers
    "46 46", "46;47",  # the last one counts
    "46 #### 47", "461",  # digits after it
    "46.0", "46.", "046", "+46", "4 6", "--46", "the answer is 46", "46 is the answer", "4_6",
    "٤٦",  # digits, but not ASCII
    "⁴⁶", "46e0", "#### 46 ####",
]  # fmt: skip


@pytest.mark.parametrize("completion", RIGHT)
def test_the_integer_after_the_last_mark_is_the_answer(completion):
    outcome = integer_arithmetic(completion, "46")
    assert (outcome.reward, outcome.is_correct) == (1.0, True)


@pytest.mark.parametrize("completion", WRONG)
def test_anything_but_one_integer_in_its_only_spelling_is_wrong(completion):
    outcome = integer_arithmetic(completion, "46")
    assert (outcome.reward, outcome.is_correct) == (0.0, False)
    assert outcome.detail


def test_negative_numbers_zero_and_numbers_of_any_length_are_judged():
    assert integer_arithmetic("1-4=-3", "-3").is_correct
    assert integer_arithmetic("0", "0").is_correct
    assert not integer_arithmetic("-0", "0").is_correct
    assert not integer_arithmetic("3", "-3").is_correct
    # More digits than int() converts.
    assert integer_arithmetic("9" * 5000, "9" * 5000).is_correct


@pytest.mark.parametrize("reference", ["", "forty-six", "4.6", "046", "46;46"])
def test_a_reference_that_is_no_integer_is_an_error_and_not_a_wrong_answer(reference):
    with pytest.raises(ValueError, match="not an integer"):
        integer_arithmetic("46", reference)


# ------------------------------------------------------------------------------------------------------- plain numbers

READ = {
    "18": 18, "-18": -18, "- 18": -18, "−18": -18, "-$18": -18, "$-18": -18, "1,234": 1234,
    "1,234,567.50": Fraction("1234567.5"), "$1{,}234": 1234, r"\$1,\!234": 1234, r"12\,345": 12345,
    ".5": Fraction(1, 2), "18.00": 18, "18.": 18, "3/4": Fraction(3, 4), "-3/4": Fraction(-3, 4), "$18$": 18,
    "007": 7, "12 eggs": 12, "5 km": 5,
}  # fmt: skip
NOT_READ = [
    "", "-", "$", "%", "eggs", "18 19", "18, 19", "18 or 19", "2x", "2 x", "12,34", "1,2345", "1,234,56", "1.2.3",
    "--5", "-$-5", "5/0", "5 million", r"5\text{ million}", "2 dozen", r"18\text{ }19", r"18\text{ or }19", "1e3",
    r"\frac12", "five", "18 = 18", "٤٦", "3 and a half",
    "12 flurbs",  # what is no unit; math_reading reads those in \\text
    "5 m", "$5 eggs", r"7\text{ m}", "2 plus four",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), READ.items())
def test_a_number_is_read_exactly(text, value):
    number = parse_plain_number(text)
    assert number is not None
    assert (number.value, number.is_percent) == (Fraction(value), False)


@pytest.mark.parametrize("text", NOT_READ)
def test_what_is_not_exactly_one_number_is_not_read(text):
    assert parse_plain_number(text) is None


@pytest.mark.parametrize("text", ["40%", r"40\%", "40 %"])
def test_a_percent_sign_is_kept(text):
    assert parse_plain_number(text) == PlainNumber(Fraction(40), is_percent=True)


@pytest.mark.parametrize(
    ("reference", "answer", "is_equal"),
    [
        ("40", "40%", True), ("40%", "40", True), ("0.4", "40%", True), ("40%", "0.4", True), ("40", "0.4", False),
        ("0.4", "40", False), ("40%", "4000", False), ("40%", "40.0%", True), ("$20", "€20", False),
        ("$20", "20", True), ("$20", "20 dollars", True), ("20 euros", "$20", False), ("5 km", "5000 meters", True),
        ("5 km", "5 cm", False), ("12 eggs", "12 people", True),
    ],
)  # fmt: skip
def test_a_percentage_equals_its_number_and_its_share(reference, answer, is_equal):
    wanted, given_answer = parse_plain_number(reference), parse_plain_number(answer)
    assert wanted is not None
    assert given_answer is not None
    assert wanted.equals(given_answer) is is_equal


@given(st.integers())
def test_thousands_separators_do_not_change_a_number(number):
    assert parse_plain_number(f"{number:,}") == parse_plain_number(str(number)) == PlainNumber(Fraction(number))


# ----------------------------------------------------------- Answers that scorers of reasoning-gym have Python evaluate


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
        "__import__('os').system('true')", "().__class__.__base__", "open(1)", "exec(x)", "x.real", "(1) . real",
        "S('1')", "[len('aaa')]", "[x for x in y]", "lambda: 1", "Rational(open(1), 2)", "print(1)", "x := 1",
        r"S('\x5f')", "ｅval(1)", "f'{open(1)}'", "{1: open(1)}", "1 if x else 2", "globals()", "'open(1)'",
        "['open(1)']", "{1: ('x', {'open(1)'})}", "{'open(1)': 1}", r"'\x6fpen(1)'", "'open' '(1)'", "\"'open(1)'\"",
        "b'open(1)'",
    ],
    ids=lambda answer: answer[:20],
)  # fmt: skip
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


@pytest.mark.parametrize("reference", ["no idea", "#### unknown", "The answer", '["4", "no idea"]'])
def test_words_in_place_of_a_number_are_a_doubt(reference: str) -> None:
    assert "is words without a number" in check_math_answer(reference)


@pytest.mark.parametrize(
    "reference",
    ["3 apples", "x + y", r"\text{Evelyn}", r"\sin x", "sqrt(x)", "true", "#### 12", "(A)", r"\frac{\pi}{2}"],
)
def test_mathematics_and_named_choices_are_no_doubt(reference: str) -> None:
    assert check_math_answer(reference) == ""
