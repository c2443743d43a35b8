"""What each task says of references before a run: the same as its judge says of them during one."""

from __future__ import annotations

import json

import pytest

from rlhpc.protocol.contracts import RewardFunction
from rlhpc.rewards.registry import BUILT_IN, CHECKS, reference_check, resolve
from rlhpc.sandbox.values import encode

PRINTS = {"inputs": ["1\n"], "outputs": ["2\n"]}
ENTRY = {"dataset": "chain_sum", "settings": encode({}), "entry": encode({"answer": "7", "metadata": {}})}
CALLS = {"entry_point": "f", "tests": [{"args": [1], "output": 2}]}

GOOD = [
    ("integer_arithmetic", "-46"),
    ("math_answer", "so 3 + 4 = 7 #### 7"),
    ("math_answer", r"\boxed{\frac{1}{2}}"),
    ("math_answer", "x^2 + 1"),
    ("exact_match", "Paris"),
    ("exact_match", '["Paris", "Lyon"]'),
    ("token_f1", "[1"),
    ("regex", "(?i)yes|no"),
    ("multiple_choice", "(B)"),
    ("instruction_following", '[{"id": "punctuation:no_comma"}]'),
    ("json_schema", '{"type": "object"}'),
    ("reasoning_gym", json.dumps(ENTRY)),
    ("code_stdin", json.dumps(PRINTS)),
    ("code_stdin", json.dumps([{"input": "", "output": "1"}])),
    ("code_stdin", json.dumps([{"type": "stdin_stdout", "input": "", "output": "1", "fn_name": None}])),
    ("code_stdin", json.dumps([{"input": "", "output": "1", "testtype": "stdin"}])),
    ("code_functions", json.dumps(CALLS)),
    ("code_functions", json.dumps({"entry_point": "f", "tests": [{"kwargs": {"a": {"$set": [1]}}, "output": None}]})),
]
BAD = [
    ("integer_arithmetic", "046", "'046' is not an integer"),
    ("math_answer", "", "'' cannot be read as mathematics; legal: a number"),
    ("math_answer", "18 19", "'18 19' cannot be read"),
    ("exact_match", "[]", "legal: one that holds one text or more"),
    ("token_f1", "[1, 2]", "legal: one that holds one text or more"),
    ("regex", "(", "is not a regular expression"),
    ("multiple_choice", "A or B", "legal: B"),
    ("instruction_following", '[{"id": "punctuation:comma"}]', "is unknown; legal"),
    ("json_schema", '{"type": "text"}', "no JSON Schema: at $.type"),
    ("reasoning_gym", "7", 'data.reference_field = "entry"'),
    ("code_stdin", "print(1)", '"inputs"'),
    ("code_stdin", json.dumps({"inputs": ["1"], "outputs": []}), '"outputs"'),
    ("code_stdin", "[]", "no tests; legal: one or more"),
    ("code_stdin", json.dumps([{"input": 1, "output": "1"}]), "test 1: input is of type int; legal: texts"),
    ("code_stdin", json.dumps(PRINTS | {"fn_name": "add"}), "calls a function; legal: tests of standard input"),
    ("code_stdin", json.dumps([{"input": "[1]", "output": "2", "testtype": "functional"}]), "calls a function"),
    ("code_stdin", json.dumps([{"type": "function_call", "input": "[1]", "output": "2"}]), "calls a function"),
    ("code_functions", "{}", '"entry_point"'),
    ("code_functions", json.dumps(CALLS | {"tests": []}), "no tests"),
    ("code_functions", json.dumps(CALLS | {"entry_point": 3}), "entry_point that is no text"),
    ("code_functions", json.dumps(CALLS | {"tests": [{"args": [1]}]}), "KeyError: 'output'"),
    ("code_functions", json.dumps(CALLS | {"tests": [{"args": [1], "output": {"$date": 1}}]}), "no tag of a value"),
]
# Faults that the program under test would be blamed for, were they not found before.
BLAMED = [
    (
        "code_functions",
        json.dumps(CALLS | {"entry_point": "f(x)"}),
        "entry_point='f(x)'; legal: the name of a function",
    ),
    ("code_functions", json.dumps(CALLS | {"tests": [{"args": "ab", "output": 1}]}), "test 1 has args=ab"),
    ("code_functions", json.dumps(CALLS | {"tests": [{"args": [{"$date": 1}], "output": 1}]}), "arguments of test 1"),
]


def _judge(task: str) -> RewardFunction:
    if task == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    return resolve(task)


@pytest.mark.parametrize(("task", "reference"), GOOD)
def test_a_reference_that_is_well_formed_passes_and_is_judged(task, reference):
    check = reference_check(task)
    assert check is not None
    check(reference)
    _judge(task)("", reference)  # raises for a reference that it cannot read


@pytest.mark.parametrize(("task", "reference", "why"), BAD)
def test_a_reference_that_cannot_be_judged_is_refused_before(task, reference, why):
    check = reference_check(task)
    assert check is not None
    with pytest.raises(ValueError, match=r"legal|reference") as refusal:
        check(reference)
    assert why in str(refusal.value)
    with pytest.raises(ValueError, match=r"legal|reference"):
        _judge(task)("", reference)


@pytest.mark.parametrize(("task", "reference", "why"), BLAMED)
def test_tests_that_no_program_could_pass_are_refused(task, reference, why):
    check = reference_check(task)
    assert check is not None
    with pytest.raises(ValueError, match=r"legal|reference") as refusal:
        check(reference)
    assert why in str(refusal.value)


def test_every_task_checks_references_and_the_cases_here_cover_it():
    # What a judge's template needs stands in the run file: test_llm_judge.py.
    assert {*CHECKS, "llm_judge"} == set(BUILT_IN)
    assert {task for task, *_ in GOOD} == set(CHECKS) == {task for task, *_ in BAD}


def test_a_function_of_the_users_own_is_not_imported_for_it():
    assert reference_check("no_such_package:judge") is None
