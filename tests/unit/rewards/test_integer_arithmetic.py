import pytest

from rlhpc.rewards.math_answer import integer_arithmetic

RIGHT = ["46", " 46\n", "2+4=6;10+30=40;46", "12+34=46", "work #### 46", "45;46", "####46", "1;2=46"]
WRONG = [
    "",
    "47",
    "46;",  # nothing after the last mark
    "46 47",  # two answers
    "46 46",
    "46;47",  # the last one counts
    "46 #### 47",
    "461",  # digits after it
    "46.0",
    "46.",
    "046",
    "+46",
    "4 6",
    "--46",
    "the answer is 46",
    "46 is the answer",
    "4_6",
    "٤٦",  # digits, but not ASCII
    "⁴⁶",
    "46e0",
    "#### 46 ####",
]


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
