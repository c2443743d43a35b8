"""Which function judges a task, with which settings and references; what is an error and what is a wrong answer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.column_rewards import reward
from rlhpc.config.rules import Config
from rlhpc.config.tables_services import CompositeConfig, JudgeConfig
from rlhpc.data.record_source import Record
from rlhpc.protocol.contracts import RewardFunction, RewardOutcome
from rlhpc.protocol.errors import ConfigError, RoleFailed, StarvedError
from rlhpc.protocol.types import Verdict
from rlhpc.rewards import registry
from rlhpc.rewards.outcomes import QUARANTINED, ErrorGate
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.registry import (
    ASK_SERVICES,
    BUILT_IN,
    CHECKS,
    asks_for_record,
    reference_check,
    resolve,
    task_names,
    validate_task,
)
from rlhpc.rewards.task_settings import VARIABLE, TaskSettings
from rlhpc.sandbox.values import encode
from tests.patience import PATIENCE_S


def test_every_built_in_task_is_legal_and_resolves_to_a_function():
    for task in task_names():
        validate_task(task)
        if task != "reasoning_gym" or importlib.util.find_spec("reasoning_gym"):  # of an extra
            assert callable(resolve(task))


def test_a_users_own_function_is_named_by_its_import_path():
    validate_task("sample_rewards:length")
    assert resolve("sample_rewards:length")("abc", "").reward == 3.0


@pytest.mark.parametrize("check", [validate_task, resolve])
@pytest.mark.parametrize("task", ["maths_answer", "", "a.b.c", "a b:c", "pkg:f.g", "../x:f"])
def test_an_unknown_task_is_refused_and_the_legal_ones_are_listed(check, task):
    with pytest.raises(ConfigError, match=r"regex, reward_model, token_f1, or package.module:function"):
        check(task)


def test_an_unknown_task_is_guessed_also_where_a_dot_stands_for_the_colon():
    with pytest.raises(ConfigError, match=r"function \(did you mean math_answer\?\)"):
        validate_task("maths_answer")
    with pytest.raises(ConfigError, match=r"function \(did you mean my_rewards:brevity\?\)"):
        validate_task("my_rewards.brevity")
    with pytest.raises(ConfigError, match="no_such_package"):
        validate_task("no_such_package.rewards:f")


def test_a_function_may_ask_for_the_whole_record_which_is_known_without_importing_it():
    judge = resolve("sample_rewards:of_record")
    record = {"data_source": "sums", "reward_model": {"ground_truth": "4"}}
    assert judge("4", json.dumps(record)) is True
    assert judge("5", json.dumps(record)) is False
    for reference in ("4", "[1]", "no JSON"):
        with pytest.raises(ValueError, match=r'set data\.reference_field = "\*"'):
            judge("4", reference)
    assert asks_for_record("sample_rewards:of_record")
    assert not asks_for_record("sample_rewards:length")
    assert not asks_for_record("math_answer")


def test_a_missing_function_or_something_that_cannot_be_called_is_named():
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        resolve("sample_rewards:nothing")
    with pytest.raises(ConfigError, match="not_callable"):
        resolve("sample_rewards:not_callable")
    with pytest.raises(ConfigError, match=r"cannot import sample_rewards\.deeper"):
        resolve("sample_rewards.deeper:f")


def test_a_function_that_the_module_does_not_have_is_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "my_grading"
    (package / "deep").mkdir(parents=True)
    code = "raise SystemExit('imported')\nfrom math import sqrt as root\ndef score(completion, reference): ...\n"
    for file in (package / "__init__.py", package / "rules.py", package / "deep" / "__init__.py"):
        file.write_text(code)
    for module in ("my_grading", "my_grading.rules", "my_grading.deep"):
        validate_task(f"{module}:score")
        validate_task(f"{module}:root")
        said = r"my_grading/.*\.py has no 'scor'; its functions: score \(did you mean score\?\)$"
        with pytest.raises(ConfigError, match=said):
            validate_task(f"{module}:scor")


@pytest.mark.parametrize("code", ["from math import *", "def __getattr__(name): ...", "globals()['scor'] = 1"])
def test_a_module_whose_names_its_text_does_not_tell_is_left_to_the_reward_service(tmp_path, monkeypatch, code):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"dynamic_{len(code)}"
    (tmp_path / f"{name}.py").write_text(code)
    validate_task(f"{name}:scor")


def test_a_syntax_error_in_a_users_module_is_found_with_its_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_written.py").write_text("x = 1\ndef score(:\n")
    with pytest.raises(ConfigError, match=r"data\.task='half_written:score': .*half_written\.py:2: "):
        validate_task("half_written:score")


def test_every_built_in_task_has_its_row_in_the_page_of_rewards():
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    for task in task_names():
        assert f"\n| `{task}` |" in page, f"docs/rewards.md has no row for {task}"


@pytest.mark.starts
def test_reading_the_table_imports_neither_a_verifier_nor_torch():
    code = (
        "import sys; from rlhpc.rewards.registry import validate_task; validate_task('math_answer');"
        "assert not {'mpmath', 'torch', 'zmq'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


# ----------------------------- The demo's sums with a reward for every column: what bench/critic.py trains a critic on


@pytest.mark.parametrize(
    ("completion", "earned", "is_correct"),
    [
        ("7+6+0=13;2+5+1=08;8+3+0=11;4+9+1=14;14183", {9: 0.25, 18: 0.25, 27: 0.25, 36: 0.25}, True),
        ("7+6+0=12;2+5+1=08;8+3+0=11;4+9+1=14;14182", {18: 0.25, 27: 0.25, 36: 0.25}, False),  # a slip by one
        ("7+6+0=03;2+5+0=07;8+3+0=11;4+9+1=14;14173", {9: 0.25, 27: 0.25, 36: 0.25}, False),  # a carry that is lost
        ("7+6+0=13;2+5", {9: 0.25}, False),
        ("14183", {}, True),  # the answer alone
        ("", {}, False),
    ],
)
def test_columns_are_paid_for_where_they_end(completion: str, earned: dict[int, float], is_correct: bool) -> None:
    outcome = reward(completion, "14183")
    assert outcome.rewards_at == earned
    assert outcome.reward == pytest.approx(sum(earned.values()))
    assert outcome.is_correct is is_correct


# ------------------------- A task made of others: rewards by weight, parts by name, one part that says what is correct

GRADED = CompositeConfig(
    tasks={"answer": "math_answer", "form": "regex", "instructions": "instruction_following"},
    weights={"form": 0.25, "instructions": 0.5},
    correct="answer",
    fields={"answer": "solution", "form": "pattern"},
)
RECORD = {
    "solution": "#### 7",
    "pattern": r"\d+",
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{}],
}


def judge(settings: CompositeConfig, completion: str, record: object) -> RewardOutcome:
    return registry.Composite(settings)(completion, record if isinstance(record, str) else json.dumps(record))


def test_the_reward_is_the_weighted_sum_and_one_part_says_what_is_correct():
    right = judge(GRADED, "3 + 4, so #### 7", RECORD)
    assert (right.reward, right.is_correct, right.answer) == (1.0 + 0.25 + 0.5 * 0.0, True, "7")
    assert right.parts == {
        "answer": 1.0, "form": 1.0, "instructions": 0.0, "instructions.strict": 0.0, "instructions.loose": 0.0
    }  # fmt: skip
    assert right.detail == "answer: answer 7; form: answer 7; instructions: 0 of 1; not: punctuation:no_comma"
    wrong = judge(GRADED, "#### 8", RECORD)
    assert (wrong.reward, wrong.is_correct) == (0.25 + 0.5, False)


def test_without_fields_every_part_has_the_same_reference():
    both = CompositeConfig(tasks={"exact": "exact_match", "words": "token_f1"}, correct="exact")
    outcome = judge(both, "a red house", "red house")
    assert (outcome.reward, outcome.is_correct) == (2.0, True)
    assert judge(both, "red hut", "red house").reward == pytest.approx(0.5)


@pytest.mark.parametrize("number", [1e16, 1e-5, -2.5, 7])
def test_a_number_in_a_field_is_the_reference_that_it_is_without_a_composite(number):
    record = RECORD | {"solution": number}
    whole = json.dumps(record)
    assert registry.references(GRADED, whole)["answer"] == Record(record, "a:1").reference("solution")


def test_places_of_rewards_are_weighted_like_the_rewards():
    placed = CompositeConfig(
        tasks={"a": "sample_rewards:rewards_of_words", "b": "sample_rewards:rewards_of_words"},
        weights={"a": 0.5, "b": 2.0},
        correct="a",
    )
    outcome = judge(placed, "two words", "")
    assert (outcome.reward, outcome.rewards_at) == (5.0, {3: 2.5, 9: 2.5})


def test_a_part_that_cannot_judge_leaves_the_whole_without_a_verdict():
    for broken in ("sample_rewards:fail", "sample_rewards:return_nothing"):
        settings = CompositeConfig(tasks={"a": "exact_match", "b": broken}, correct="a")
        with pytest.raises((ValueError, TypeError)):
            judge(settings, "a", "a")
    with pytest.raises(ValueError, match=r"no field 'pattern', which composite\.fields names; it has solution"):
        judge(GRADED, "#### 7", {"solution": "7"})


@pytest.mark.starts
async def test_a_worker_knows_the_composites_of_its_run():
    settings = TaskSettings(composite={"graded": GRADED})
    async with RewardPool(
        1, PATIENCE_S, preload_tasks=["graded"], environment={VARIABLE: settings.model_dump_json()}
    ) as pool:
        judgement = await pool.judge("graded", "#### 7", json.dumps(RECORD))
        assert (judgement.verdict, judgement.reward, judgement.parts["form"]) == (Verdict.CORRECT, 1.75, 1.0)
        spoilt = await pool.judge("graded", "#### 7", json.dumps(RECORD | {"solution": ""}))
        assert (spoilt.verdict, spoilt.reward) == (Verdict.VERIFIER_ERROR, 0.0)


def test_references_of_all_parts_are_checked_each_in_its_field():
    check = registry.composite_reference_check("graded", {"graded": GRADED}, JudgeConfig())
    assert check is not None
    check(json.dumps(RECORD))
    for change, why in (
        ({"pattern": "("}, "not a regular expression"),
        ({"solution": ""}, "cannot be read as mathematics"),
        ({"solution": None}, "no field 'solution'"),
        ({"kwargs": []}, "is shorter"),
    ):
        with pytest.raises(ValueError, match=why):
            check(json.dumps(RECORD | change))
    assert registry.composite_reference_check("math_answer", {"graded": GRADED}, JudgeConfig()) is not None


def make_config(**changes: object) -> Config:
    document = {
        "run": {"name": "a", "num_steps": 1},
        "model": {"path": "m"},
        "data": {"path": "d.jsonl", "task": "graded", "reference_field": "*"},
        "composite": {"graded": GRADED.model_dump()},
        "generation": {"max_prompt_tokens": 1, "max_completion_tokens": 1},
        "admission": {"groups_per_step": 1, "group_size": 2},
        "trainer": {"token_budget": 8},
    }
    return Config.model_validate(document | changes)


def test_a_run_knows_the_tasks_behind_its_composites():
    config = make_config(instructions={"reward": "fraction"})  # which has an effect, since a part follows instructions
    assert config.judging_tasks == ("math_answer", "regex", "instruction_following")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": {"path": "d", "task": "graded"}}, r"data\.reference_field='answer' with composite\.graded\.fields"),
        ({"data": {"path": "d", "task": "regex"}}, r"composite\.graded has no effect"),
        ({"composite": {"graded": {"tasks": {}, "correct": "a"}}}, "has no part"),
        ({"composite": {"graded": {"tasks": {"a": "regex"}, "correct": "b"}}}, "names 'b', not one of its parts"),
        (
            {"composite": {"graded": {"tasks": {"a": "regex"}, "correct": "a", "weights": {"c": 1.0}}}},
            r"composite\.graded\.weights names 'c', not one of its parts; legal: a",
        ),
        (
            {"composite": {"graded": {"tasks": {"a": "graded"}, "correct": "a"}}},
            r"a='graded' is a composite; legal: a task that is none",
        ),
        ({"composite": {"a:b": GRADED.model_dump()}}, "should match pattern"),
    ],
)
def test_a_composite_that_makes_no_sense_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        make_config(**changes)


# ----------------------- What each task says of references before a run: the same as its judge says of them during one

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
    # What a template needs stands in the run file: test_llm_judge.py, test_reward_model.py.
    assert {*CHECKS, *ASK_SERVICES} == set(BUILT_IN)
    for name, rows in (("GOOD", GOOD), ("BAD", BAD)):
        covered = {task for task, *_ in rows}
        assert not set(CHECKS) - covered, f"add a row to {name} of this file for {sorted(set(CHECKS) - covered)}"
        assert not covered - set(CHECKS), f"{name} of this file has rows for no task: {sorted(covered - set(CHECKS))}"


def test_a_function_of_the_users_own_is_not_imported_for_it():
    assert reference_check("no_such_package:judge") is None


# ---------------------------------------------------------------------------------------------------------- error gate


def count(gate: ErrorGate, verdict: Verdict, times: int, detail: str = "") -> None:
    for _ in range(times):
        gate.count(verdict, detail)


def test_a_verifier_that_always_fails_is_found_early_and_errors_alike_are_said_once():
    gate = ErrorGate(0.2, window=10)
    count(gate, Verdict.VERIFIER_ERROR, 3, "ValueError: no such book")
    with pytest.raises(RoleFailed, match=r"(?s)max_error_share=0.2: 3 of the last 3.*no such book"):
        gate.check()
    gate = ErrorGate(0.2, window=10)
    for detail in ("second", "first", "first", "first", "first"):
        gate.count(Verdict.VERIFIER_ERROR, detail)
    with pytest.raises(RoleFailed, match=r"the latest: second; first$"):
        gate.check()


@pytest.mark.parametrize(("other", "waits"), [("invalid", False), ("raised", True), ("timed_out", True), ("", True)])
def test_what_is_no_reward_each_time_is_not_waited_for(other, waits):
    gate = ErrorGate(0.5, window=10, patience_s=120.0, clock=lambda: 0.0)
    for failure in [other, *["invalid"] * 5]:
        gate.count(Verdict.VERIFIER_ERROR if failure else Verdict.WRONG, "not list", failure)
    gate.count(Verdict.VERIFIER_ERROR, "not list", "invalid")
    if waits:
        gate.check()
        assert gate.is_waiting
    else:
        with pytest.raises(StarvedError, match=r"7 of the last 7 verdicts.*invalid 7.*not list"):
            gate.check()


def test_the_gate_counts_the_last_verdicts_and_no_wrong_answers():
    gate = ErrorGate(0.2, window=10)
    count(gate, Verdict.VERIFIER_ERROR, 2)
    count(gate, Verdict.WRONG, 10)
    assert gate.error_share == 0.0
    count(gate, Verdict.VERIFIER_ERROR, 2)
    gate.check()
    count(gate, Verdict.VERIFIER_ERROR, 1)
    with pytest.raises(RoleFailed):
        gate.check()
    gate = ErrorGate(0.0, window=10)
    count(gate, Verdict.WRONG, 50)
    count(gate, Verdict.CORRECT, 50)
    gate.check()
    assert ErrorGate(0.0).error_share == 0.0
    gate = ErrorGate(1.0, window=10)
    count(gate, Verdict.VERIFIER_ERROR, 100)
    gate.check()
    gate = ErrorGate(0.2, window=10)
    count(gate, Verdict.VERIFIER_ERROR, 2)
    gate.check()
    assert gate.error_share == 1.0


def test_the_message_counts_errors_by_their_cause():
    gate = ErrorGate(0.5, window=10)
    for failure in ("agent_died", "timed_out", "agent_died"):
        gate.count(Verdict.VERIFIER_ERROR, "exit status 1: HTTP 400", failure)
    gate.count(Verdict.WRONG)
    for _ in range(3):
        gate.count_refused(QUARANTINED, "record 3: 5 reward workers died judging it")
    said = r"6 of .*\(window 10; quarantined 3, agent died 2, timed out 1\).*-quarantine; the latest: .*record 3"
    with pytest.raises(RoleFailed, match=said):
        gate.check()
    gate.count_refused(
        QUARANTINED, "record 3: 5 reward workers died judging it"
    )  # most are refusals: another attempt would not help
    with pytest.raises(StarvedError):
        gate.check()


class Waiting:
    """A gate of a tenth of ten verdicts that is patient for a minute, and its clock."""

    def __init__(self, max_share: float = 0.1) -> None:
        self.now_s = 1000.0
        self.gate = ErrorGate(max_share, window=10, patience_s=60.0, clock=lambda: self.now_s)

    def fail(self, times: int = 2, *, after_s: float = 0.0, most_in_a_row: int = 0) -> None:
        self.now_s += after_s
        for _ in range(times):
            self.gate.count(Verdict.VERIFIER_ERROR, "no tool server", "raised")
            self.gate.check(most_in_a_row)

    def succeed(self, times: int = 1) -> None:
        for _ in range(times):
            self.gate.count(Verdict.WRONG)
            self.gate.check()

    def leases(self, seconds: int) -> list[int]:
        """Grant whatever may be granted; returns the seconds at which there was one."""
        granted = []
        for second in range(1, seconds + 1):
            self.now_s += 1.0
            if self.gate.may_lease("generator-0"):
                self.gate.lease_granted()
                self.fail(1)
                granted.append(second)
        return granted


def test_what_fails_for_a_while_is_waited_for_with_few_leases_and_forgiven(caplog: pytest.LogCaptureFixture) -> None:
    waiting = Waiting()
    waiting.succeed(5)
    assert waiting.gate.may_lease("generator-0")
    waiting.fail(30)
    assert waiting.leases(50) == [1, 3, 7, 15, 25, 35, 45]
    assert waiting.gate.document() | {"causes": {}} == {
        "causes": {}, "latest": "no tool server", "waited_s": 50, "patience_s": 60.0
    }  # fmt: skip
    assert waiting.gate.error_share == 1.0
    waiting.succeed()
    assert waiting.gate.may_lease("generator-0")
    assert "waited_s" not in waiting.gate.document()
    waiting.fail(1)  # no more than are tolerated
    waiting.succeed(9)
    waiting.fail(2, after_s=100.0)  # another time, with patience of its own
    assert not waiting.gate.may_lease("generator-0")
    waiting.succeed(2)
    waiting.now_s += 30.0
    waiting.succeed(1)
    waiting.fail(2, after_s=100.0)
    assert not waiting.gate.may_lease("generator-0")
    said = [record.getMessage() for record in caplog.records]
    assert said[0].endswith(
        "2 of the last 7 verdicts are verifier errors (window 10; raised 2): waiting for up to 60 s "
        "(rewards.error_patience_s); the latest: no tool server"
    )
    assert said[1] == "there are verdicts again, after 50 s"


def test_what_fails_for_good_is_tried_for_so_long_and_then_without_a_pause_until_the_run_ends() -> None:
    waiting = Waiting()
    waiting.fail()
    assert waiting.leases(59)[-1] == 55
    waiting.fail(1, after_s=1.0)
    assert waiting.gate.may_lease("generator-0")
    assert waiting.gate.document()["waited_s"] == 60  # and not as if there were verdicts again
    with pytest.raises(
        StarvedError, match=r"2 of the last 2 verdicts .*raised 2\), 60 s after the first.*tool server$"
    ):
        waiting.fail(1)


@pytest.mark.parametrize("num_verdicts", [1, 5])
def test_a_verdict_now_and_then_makes_nobody_wait_for_longer(num_verdicts: int) -> None:
    waiting = Waiting()
    for _ in range(60):
        waiting.fail(2, after_s=1.0)
        waiting.succeed(num_verdicts)
    with pytest.raises(StarvedError, match="60 s after the first"):
        waiting.fail(2, after_s=1.0)


def test_who_tolerates_every_error_waits_too_where_there_is_none_but_errors() -> None:
    waiting = Waiting(max_share=1.0)
    waiting.fail(12, most_in_a_row=12)
    assert not waiting.gate.may_lease("generator-0")
    with pytest.raises(StarvedError, match=r"12 errors in a row .* 60 s after the first: no batch can be filled"):
        waiting.fail(12, after_s=60.0, most_in_a_row=12)


def test_nobody_waits_for_prompts_that_are_refused() -> None:
    waiting = Waiting()
    waiting.gate.count_refused(QUARANTINED, "record 3: 5 reward workers died judging it")
    waiting.gate.count_refused(QUARANTINED, "record 3: 5 reward workers died judging it")
    with pytest.raises(StarvedError, match=r"quarantined 2\), so rewards say nothing"):
        waiting.gate.check()


def test_a_generator_on_which_everything_fails_while_others_have_verdicts_gets_a_share_of_leases_that_shrinks() -> None:
    waiting = Waiting(max_share=1.0)
    gate, paused = waiting.gate, []
    for second in range(100):
        waiting.now_s += 1.0
        waiting.succeed(20)  # of another one
        if not gate.may_lease("generator-1"):
            paused.append(second)
            continue
        for _ in range(8):
            gate.count(Verdict.VERIFIER_ERROR, "no such program", "agent_raised", "generator-1")
    free = [second for second in range(100) if second not in paused]
    assert free == [0, 1, 2, 4, 8, 16, 32, 64]
    assert gate.may_lease("generator-0")
    assert gate.document()["paused"] == ["generator-1"]
    gate.count(Verdict.WRONG, holder="generator-1")
    assert gate.may_lease("generator-1")
    assert "paused" not in gate.document()


def test_the_only_generator_is_never_paused() -> None:
    waiting = Waiting(max_share=1.0)
    for _ in range(50):
        waiting.succeed(1)
        waiting.fail(8)
        assert waiting.gate.may_lease("")
