import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards.registry import asks_for_record, resolve, task_names, validate_task
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
    with pytest.raises(ConfigError, match=r"regex, token_f1, or package.module:function"):
        check(task)


def test_a_misspelt_task_is_guessed():
    with pytest.raises(ConfigError, match=r"function \(did you mean math_answer\?\)"):
        validate_task("maths_answer")


def test_a_dot_before_the_function_is_taken_for_the_colon_that_is_missing():
    with pytest.raises(ConfigError, match=r"function \(did you mean my_rewards:brevity\?\)"):
        validate_task("my_rewards.brevity")


def test_a_function_may_ask_for_the_whole_record():
    judge = resolve("sample_rewards:of_record")
    record = {"data_source": "sums", "reward_model": {"ground_truth": "4"}}
    assert judge("4", json.dumps(record)) is True
    assert judge("5", json.dumps(record)) is False
    for reference in ("4", "[1]", "no JSON"):
        with pytest.raises(ValueError, match=r'set data\.reference_field = "\*"'):
            judge("4", reference)


def test_who_asks_for_the_record_is_known_without_importing_it():
    assert asks_for_record("sample_rewards:of_record")
    assert not asks_for_record("sample_rewards:length")
    assert not asks_for_record("math_answer")


def test_a_package_that_is_not_there_is_found_before_the_run_starts():
    with pytest.raises(ConfigError, match="no_such_package"):
        validate_task("no_such_package.rewards:f")


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
