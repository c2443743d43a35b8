from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.rewards.math_values import PlainNumber, parse_plain_number

READ = {
    "18": 18,
    "-18": -18,
    "- 18": -18,
    "−18": -18,
    "-$18": -18,
    "$-18": -18,
    "1,234": 1234,
    "1,234,567.50": Fraction("1234567.5"),
    "$1{,}234": 1234,
    r"\$1,\!234": 1234,
    r"12\,345": 12345,
    ".5": Fraction(1, 2),
    "18.00": 18,
    "18.": 18,
    "3/4": Fraction(3, 4),
    "-3/4": Fraction(-3, 4),
    "$18$": 18,
    "007": 7,
    "12 eggs": 12,
    "5 km": 5,
}
NOT_READ = [
    "",
    "-",
    "$",
    "%",
    "eggs",
    "18 19",
    "18, 19",
    "18 or 19",
    "2x",
    "2 x",
    "12,34",
    "1,2345",
    "1,234,56",
    "1.2.3",
    "--5",
    "-$-5",
    "5/0",
    "5 million",
    r"5\text{ million}",
    "2 dozen",
    r"18\text{ }19",
    r"18\text{ or }19",
    "1e3",
    r"\frac12",
    "five",
    "18 = 18",
    "٤٦",
    "3 and a half",
    "12 flurbs",  # what is no unit; math_reading reads those in \\text
    "5 m",
    "$5 eggs",
    r"7\text{ m}",
    "2 plus four",
]


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
        ("40", "40%", True),
        ("40%", "40", True),
        ("0.4", "40%", True),
        ("40%", "0.4", True),
        ("40", "0.4", False),
        ("0.4", "40", False),
        ("40%", "4000", False),
        ("40%", "40.0%", True),
        ("$20", "€20", False),
        ("$20", "20", True),
        ("$20", "20 dollars", True),
        ("20 euros", "$20", False),
        ("5 km", "5000 meters", True),
        ("5 km", "5 cm", False),
        ("12 eggs", "12 people", True),
    ],
)
def test_a_percentage_equals_its_number_and_its_share(reference, answer, is_equal):
    wanted, given_answer = parse_plain_number(reference), parse_plain_number(answer)
    assert wanted is not None
    assert given_answer is not None
    assert wanted.equals(given_answer) is is_equal


@given(st.integers())
def test_thousands_separators_do_not_change_a_number(number):
    assert parse_plain_number(f"{number:,}") == parse_plain_number(str(number)) == PlainNumber(Fraction(number))
