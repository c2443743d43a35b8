import subprocess
import sys

import pytest

from rlhpc.errors import ConfigError
from rlhpc.rewards.registry import resolve, task_names, validate_task
from tests.patience import PATIENCE_S


def test_every_built_in_task_is_legal_and_resolves_to_a_function():
    for task in task_names():
        validate_task(task)
        assert callable(resolve(task))


def test_a_users_own_function_is_named_by_its_import_path():
    validate_task("sample_rewards:length")
    assert resolve("sample_rewards:length")("abc", "").reward == 3.0


@pytest.mark.parametrize("check", [validate_task, resolve])
@pytest.mark.parametrize("task", ["maths_answer", "", "a.b.c", "a b:c", "pkg:f.g", "../x:f"])
def test_an_unknown_task_is_refused_and_the_legal_ones_are_listed(check, task):
    with pytest.raises(ConfigError, match=r"integer_arithmetic, math_answer, or package.module:function"):
        check(task)


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


@pytest.mark.starts
def test_reading_the_table_imports_neither_a_verifier_nor_torch():
    code = (
        "import sys; from rlhpc.rewards.registry import validate_task; validate_task('math_answer');"
        "assert not {'math_verify', 'sympy', 'torch', 'zmq'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
