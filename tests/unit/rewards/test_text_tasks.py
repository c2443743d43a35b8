"""exact_match, token_f1, regex, multiple_choice: what counts as the answer, and what as right."""

from __future__ import annotations

import random
import string

import pytest

from rlhpc.config.tables_services import TextConfig
from rlhpc.rewards import outcomes, text_answer
from rlhpc.rewards.task_settings import TaskSettings
from rlhpc.rewards.text_answer import exact_match, normalised, token_f1


@pytest.mark.parametrize(
    ("completion", "reference", "is_right"),
    [
        ("The Eiffel Tower.", "eiffel tower", True),
        ("I think it is\n#### the Eiffel  tower", "Eiffel Tower", True),
        (r"so \boxed{Paris}", '["Lyon", "Paris"]', True),
        ("Paris #### Rome", "Paris", False),
        ("Paris, France", "Paris", False),
        ("theory", "ory", False),  # an article is a word
        ("[1]", "[1", True),  # a reference that begins like JSON and is none
        ("", "the", False),  # nothing is left of either by SQuAD's rules
        (r"\boxed{}", "A", False),  # a letter of a multiple choice, and an article
        ("The", "A", False),
        ("(A)", "A", True),
        ("!", "?", False),
        ("?", "?", True),
        ("", '["B", "a"]', False),
    ],
)
def test_exact_match_compares_as_squad_does(completion, reference, is_right):
    outcome = exact_match(completion, reference)
    assert (outcome.reward, outcome.is_correct) == (float(is_right), is_right)


@pytest.mark.parametrize(
    ("completion", "reference", "is_right"),
    [
        ("3.5", "35", False),
        ("1/2", "12", False),
        ("-5", "5", False),
        ("−5", "-5", True),
        ("It is -5.", "it is 5", False),
        ("x=-5", "x=5", False),
        ("(-5)", "-5", True),
        ("$-5", "-5", True),
        ("1,000", "1000", True),
        ("1,000,000.5", "1000000.5", True),
        ("3,5", "35", False),
        (".5", "5", False),
        (".5", "0.5", True),
        ("10:30", "1030", False),
        ("2019–2020", "2019-2020", True),
        ("2019-2020", "20192020", False),
        ("1e-05", "1e05", False),
        ("3.5.", "3.5", True),
        ("5-year", "5year", True),  # as SQuAD's program has it
        ("U.S.", "us", True),
        ("Cafe\u0301", "Café", True),
        ("It’s “here”", 'it\'s "here"', True),
        ("«Paris»…", "Paris", True),
        ("well—done", "welldone", True),
        ("5²", "52", False),
    ],
)
def test_numbers_keep_what_they_say_and_letters_count_however_they_are_composed(completion, reference, is_right):
    assert exact_match(completion, reference).is_correct is is_right
    assert exact_match(reference, completion).is_correct is is_right


def test_punctuation_of_numbers_may_be_left_out_as_by_squads_own_program(monkeypatch):
    settings = TaskSettings(text=TextConfig(punctuation="all"))
    monkeypatch.setattr(text_answer, "task_settings", lambda: settings)
    assert exact_match("3.5", "35").is_correct
    assert exact_match("-1,000", "1000").is_correct


@pytest.mark.parametrize("reference", ["[]", '["a", 1]'])
def test_a_list_of_references_holds_texts(reference):
    with pytest.raises(ValueError, match="legal: one that holds one text or more"):
        exact_match("a", reference)


def test_token_f1_is_the_harmonic_mean_of_precision_and_recall():
    draw = random.Random(0)
    words = ["red", "blue", "green", "one", "two"]
    for _ in range(500):
        answer, wanted = (draw.choices(words, k=draw.randint(1, 6)) for _ in range(2))
        left, common = list(wanted), 0
        for word in answer:
            if word in left:
                left.remove(word)
                common += 1
        precision, recall = common / len(answer), common / len(wanted)
        f1 = 2 * precision * recall / (precision + recall) if common else 0.0
        outcome = token_f1(" ".join(answer), " ".join(wanted))
        assert outcome.reward == pytest.approx(f1, abs=1e-12)
        assert outcome.is_correct is (sorted(answer) == sorted(wanted))


@pytest.mark.parametrize(("completion", "reference"), [("", "A"), ("the", "A"), (r"\boxed{.}", "an"), ("!", "?")])
def test_saying_nothing_shares_nothing_with_a_reference_that_is_an_article(completion, reference):
    assert token_f1(completion, reference).reward == 0.0
    assert token_f1(reference, reference).is_correct


def test_the_best_reference_counts():
    assert token_f1("a big red house", '["small hut", "big house"]').reward == pytest.approx(0.8)


def test_normalising_twice_is_normalising_once():
    draw = random.Random(1)
    for _ in range(500):
        text = "".join(draw.choices(string.printable + " a an the ", k=30))
        assert normalised(normalised(text)) == normalised(text)


@pytest.mark.parametrize(
    ("completion", "pattern", "is_right"),
    [
        ("2026-11-24", r"\d{4}-\d\d-\d\d", True),
        ("on 2026-11-24", r"\d{4}-\d\d-\d\d", False),
        ("It is #### YES", "(?i)yes|no", True),
    ],
)
def test_a_pattern_matches_the_whole_answer(completion, pattern, is_right):
    assert text_answer.regex(completion, pattern).is_correct is is_right


def test_a_reference_that_is_no_pattern_is_an_error_of_the_data():
    with pytest.raises(ValueError, match="is not a regular expression"):
        text_answer.regex("a", "(")


@pytest.mark.parametrize(
    ("completion", "chosen"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("B. Paris", "B"),
        ("B. Vitamin A", "B"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{A} no, \boxed{C}", "C"),
        ("Because of that:\n**Answer:** D", "D"),
        ("**Answer**: D", "D"),
        (r"\boxed{\textbf{(D)}\ 12}", "D"),  # as in the solutions of AMC
        (r"\boxed{\textbf{(D)}~12}", "D"),
        (r"\boxed{\textbf{(D)}\ \textbf{(E)}}", ""),
        ("Answer: A\n#### B", "B"),
        ("#### B\nAnswer: A", "A"),
        ("A or B", ""),
        ("A. or B", ""),
        ("B) and (C)", ""),
        ("A, B, C, D", ""),
        ("The answer is B", ""),  # nothing is marked, and it is not a choice alone
        ("Because", ""),
        ("", ""),
    ],
)
def test_one_marked_letter_is_a_choice_and_several_are_none(completion, chosen):
    outcome = text_answer.multiple_choice(completion, chosen or "A")
    assert (outcome.answer, outcome.is_correct) == (chosen, bool(chosen))
    assert not text_answer.multiple_choice(completion, "E").is_correct


@pytest.mark.parametrize("reference", ["", "AB", "A or B", "1"])
def test_a_reference_is_one_letter(reference):
    with pytest.raises(ValueError, match="is not one letter"):
        text_answer.multiple_choice("A", reference)


def test_true_and_false_are_rewards():
    assert [outcomes.as_outcome(value).reward for value in (True, False)] == [1.0, 0.0]
    assert outcomes.as_outcome(True).is_correct
    assert outcomes.as_outcome({"reward": True, "is_correct": False}).is_correct is False
