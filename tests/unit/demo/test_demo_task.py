"""The demo's problems, their worked answers and the careless ones."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.demo.task import (
    MAX_ANSWER_CHARACTERS,
    MAX_DIGITS,
    MAX_PROMPT_CHARACTERS,
    MIN_DIGITS,
    Problem,
    careless_answer,
    draw_problem,
    problems,
    worked_answer,
    write_dataset,
)
from rlhpc.rewards.math_answer import integer_arithmetic

drawn_problems = st.integers(0, 2**32).map(lambda seed: draw_problem(random.Random(seed)))


def test_the_example_of_the_module_docstring_holds():
    assert worked_answer(Problem(4827, 9356)) == "7+6+0=13;2+5+1=08;8+3+0=11;4+9+1=14;14183"


@given(drawn_problems)
def test_the_last_field_of_a_worked_answer_is_the_sum(problem):
    assert worked_answer(problem).split(";")[-1] == str(problem.left + problem.right) == problem.answer


@given(drawn_problems)
def test_every_column_of_a_worked_answer_adds_up(problem):
    for column in worked_answer(problem).split(";")[:-1]:
        question, written = column.split("=")
        assert sum(map(int, question.split("+"))) == int(written)


@given(drawn_problems, st.integers())
def test_a_careless_pupil_who_never_slips_answers_as_worked(problem, seed):
    assert careless_answer(problem, 0.0, random.Random(seed)) == worked_answer(problem)


@given(drawn_problems, st.integers())
def test_slips_keep_the_form_of_the_answer(problem, seed):
    num_columns = len(str(problem.left))
    fields = careless_answer(problem, 1.0, random.Random(seed)).split(";")
    assert len(fields) == num_columns + 1
    for column in fields[:-1]:
        question, written = column.split("=")
        assert 0 <= int(written) <= 19
        assert abs(int(written) - sum(map(int, question.split("+")))) in (1, 10)


@given(drawn_problems, st.integers())
def test_no_prompt_or_answer_is_longer_than_announced(problem, seed):
    assert len(problem.prompt) <= MAX_PROMPT_CHARACTERS
    assert len(careless_answer(problem, 0.5, random.Random(seed))) <= MAX_ANSWER_CHARACTERS


def test_the_reward_agrees_with_the_task_about_right_and_wrong():
    rng = random.Random(0)
    for problem in problems(0, 200):
        assert integer_arithmetic(worked_answer(problem), problem.answer).is_correct
        written = careless_answer(problem, 0.3, rng)
        assert integer_arithmetic(written, problem.answer).is_correct == (written.split(";")[-1] == problem.answer)


def test_right_answers_become_as_rare_as_the_slip_rate_says():
    rng = random.Random(0)
    right = [careless_answer(p, 0.25, rng).endswith(f";{p.answer}") for p in problems(1, 3000)]
    expected = sum(0.75**n for n in range(MIN_DIGITS, MAX_DIGITS + 1)) / (MAX_DIGITS - MIN_DIGITS + 1)
    assert sum(right) / len(right) == pytest.approx(expected, abs=0.03)


def test_problems_depend_on_the_seed_alone_and_do_not_repeat():
    assert problems(3, 500) == problems(3, 500) != problems(4, 500)
    assert len(set(problems(3, 500))) == 500


def test_training_and_held_out_problems_are_disjoint():
    assert not set(problems(0, 5000)) & set(problems(1, 500, held_out=True))


def test_all_lengths_occur_about_equally_often():
    lengths = [len(str(p.left)) for p in problems(0, 3000)]
    for num_digits in range(MIN_DIGITS, MAX_DIGITS + 1):
        assert lengths.count(num_digits) / 3000 == pytest.approx(1 / (MAX_DIGITS - MIN_DIGITS + 1), abs=0.04)


def test_the_dataset_is_json_lines_of_prompt_and_answer(tmp_path):
    path = tmp_path / "new" / "train.jsonl"
    write_dataset(path, 20, seed=5)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [{"prompt": p.prompt, "answer": p.answer} for p in problems(5, 20)]
