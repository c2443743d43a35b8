"""[environment] and data.environment: what goes together, and what is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.config.tables_services import JudgeConfig, SandboxConfig, runs_programs
from tests.unit.roles.small_ring import small_config

TOOLS = {"environment": "tools", "use_chat_template": True, "task": "exact_match"}
OWN = {"environment": "my_environments:Game", "use_chat_template": True, "task": "environment"}


def config_with(data: dict[str, Any], environment: dict[str, Any], **sections: Any) -> Config:
    settings = small_config().model_dump(mode="json")
    settings["data"] = {"path": "none.jsonl", "task": "exact_match"} | data
    return Config.model_validate(settings | {"environment": environment} | sections)


def test_tools_and_own_environments_are_accepted() -> None:
    assert config_with(TOOLS, {"tools": ["calculator"]}).data[0].environment == "tools"
    assert config_with(OWN, {"max_turns": 3}).environment.max_turns == 3
    assert config_with({}, {}).data[0].environment == ""


@pytest.mark.parametrize(
    ("data", "environment", "why"),
    [
        (TOOLS | {"use_chat_template": False}, {"tools": ["calculator"]}, "use_chat_template=false.*legal: use_chat"),
        (TOOLS, {}, "needs environment.tools"),
        (TOOLS, {"tools": ["browser"]}, "'browser' is no tool; legal: calculator, python, search, shell, or package"),
        (TOOLS, {"tools": ["search"]}, "environment.corpus=None .*go together"),
        (TOOLS, {"tools": ["calculator"], "corpus": "x.jsonl"}, "environment.corpus='x.jsonl' .*go together"),
        (
            TOOLS,
            {"tools": ["calculator"], "max_turn_tokens": 9},
            "max_turn_tokens=9 is above .*tokens=8",
        ),
        (TOOLS | {"task": "environment"}, {"tools": ["calculator"]}, "tools judge nothing"),
        ({"task": "environment"}, {}, "data.task='environment' needs data.environment"),
        ({"task_field": "kind", "tasks": {"g": "environment"}}, {}, "'environment' needs data.environment"),
        (OWN | {"environment": "gymnasium"}, {}, r"environment.id='' with data.environment='gymnasium'"),
        (OWN, {"id": "Guess-v0"}, "environment.id='Guess-v0' with data.environment='my_environments:Game'"),
        (
            TOOLS,
            {"tools": ["calculator"], "arguments": {"n": 1}},
            "environment.arguments are for 'gymnasium', 'verifiers' and package.module",
        ),
        ({}, {"max_turns": 3}, "environment.max_turns=3 has no effect without data.environment"),
        ({}, {"corpus": "x.jsonl"}, "environment.corpus"),
    ],
)
def test_what_does_not_go_together_is_refused(data: dict[str, Any], environment: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config_with(data, environment)


def test_the_python_tool_needs_a_sandbox_as_tasks_with_code_do() -> None:
    assert runs_programs(config_with(TOOLS, {"tools": ["python"]}))
    assert not runs_programs(config_with(TOOLS, {"tools": ["calculator"]}))
    with pytest.raises(ValueError, match=r"sandbox\.wall_s"):
        config_with(TOOLS, {"tools": ["python"]}, rewards={"timeout_s": 5.0})


def test_a_part_of_a_composite_that_runs_programs_needs_a_sandbox() -> None:
    both = {"both": {"tasks": {"code": "code_stdin", "form": "regex"}, "correct": "code"}}
    assert runs_programs(config_with({"task": "both"}, {}, composite=both))
    assert runs_programs(config_with({"task_field": "kind", "tasks": {"c": "both"}}, {}, composite=both))
    limited = {"timeout_s": 20.0, "task_timeout_s": {"both": 5.0}}
    with pytest.raises(ValueError, match=r"rewards\.task_timeout_s=5"):
        config_with({"task_field": "kind", "tasks": {"c": "both"}}, {}, composite=both, rewards=limited)


def test_the_corpus_is_found_from_any_directory() -> None:
    """Roles run elsewhere than the command."""
    config = load_config(Path(__file__).parents[2] / "configs" / "demo_tool.toml")
    assert config.environment.corpus is not None
    assert config.environment.corpus.is_absolute()


def test_files_of_judges_and_sandboxes_are_found_from_other_directories(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    judge = JudgeConfig(template_file="rubric.txt", key_file="keys/judge")
    sandbox = SandboxConfig(readable_paths=("data", "/usr/share"))
    assert (judge.template_file, judge.key_file) == (f"{tmp_path}/rubric.txt", f"{tmp_path}/keys/judge")
    assert sandbox.readable_paths == (f"{tmp_path}/data", "/usr/share")
    assert SandboxConfig(python=".venv/bin/python").python == f"{tmp_path}/.venv/bin/python"
    assert SandboxConfig(python="python3.12").python == "python3.12"  # of whatever PATH there is
    assert (JudgeConfig(template_file="").template_file, JudgeConfig().key_file) == ("", "")
    with pytest.raises(ValueError, match=r"~ and \$NAME are not expanded; legal: the path written out"):
        JudgeConfig(key_file="~/judge.key")
