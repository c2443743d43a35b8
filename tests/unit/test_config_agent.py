"""[agent] and data.environment = "agent": what goes together, and what is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.checks.preflight import preflight_sampling
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import ConfigError
from tests.unit.data.checkpoints import QWEN25, make_chat_model
from tests.unit.roles.small_ring import small_config

OWN = {"environment": "agent", "use_chat_template": True, "task": "environment"}
RUN = {"function": "tests.unit.roles.sample_agents:once"}
ROOT = Path(__file__).parents[2]
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without any


def config_with(data: dict[str, Any], agent: dict[str, Any], **sections: Any) -> Config:
    settings = small_config().model_dump(mode="json")
    settings["data"] = {"path": "none.jsonl", "task": "exact_match"} | data
    for section, values in sections.items():
        settings[section] |= values
    return Config.model_validate(settings | {"agent": agent})


def test_a_function_and_a_command_are_accepted() -> None:
    assert config_with(OWN, RUN).agent.max_sessions == 256
    assert config_with(OWN, {"command": ["python3", "solve.py"]}).agent.command == ("python3", "solve.py")
    assert config_with(OWN | {"task": "exact_match"}, RUN, generation={"endpoint": "network"})


@pytest.mark.parametrize(
    ("data", "agent", "sections", "why"),
    [
        (OWN, {}, {}, "needs agent.function .* or agent.command"),
        (OWN, RUN | {"command": ["x"]}, {}, r"beside agent.command=\['x'\]; legal: one of them"),
        (OWN, {"command": ["bash", "x"], "preload": ["json"]}, {}, r"preload=\['json'\] beside agent.command=\['bash'"),
        (OWN, {"command": ["python", "-u", "x"], "preload": ["json"]}, {}, "legal: python, then a file, or -m and a m"),
        (OWN, {"command": ["python", "-m"], "preload": ["json"]}, {}, "legal: python, then a file, or -m and a module"),
        (OWN, RUN | {"preload": ["a, b"]}, {}, "agent.preload=.*'a, b'; legal: names of modules"),
        (OWN, {"function": "solve.py"}, {}, "agent.function='solve.py'; legal: package.module:function"),
        (OWN, RUN | {"turn_timeout_s": 600.0}, {}, "turn_timeout_s=600 is not below admission.lease_deadline_s=600"),
        (OWN | {"use_chat_template": False}, RUN, {}, "use_chat_template=false"),
        (OWN | {"prompt_template": "{x}"}, RUN, {}, "data.prompt_template='{x}' .*legal: '{prompt}', its default"),
        (OWN | {"system_prompt": "x"}, RUN, {}, "data.system_prompt='x'"),
        ({}, RUN, {}, "agent.function=.* has no effect without data.environment; legal: .*'agent'"),
        ({}, {"max_sessions": 3}, {}, "agent.max_sessions=3 has no effect"),
        ({}, {}, {"generation": {"endpoint": "network"}}, "generation.endpoint='network' has no effect"),
    ],
)
def test_what_does_not_go_together_is_refused(
    data: dict[str, Any], agent: dict[str, Any], sections: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        config_with(data, agent, **sections)


def test_a_word_of_a_command_that_is_a_file_is_meant_from_where_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = ROOT / "examples" / "agent.toml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solve.py").write_text("")
    command = 'agent.command=["python3", "solve.py", "--fast", "other.py"]'
    config = load_config(run_file, ["agent.function=", command])
    assert config.agent.command == ("python3", str(tmp_path / "solve.py"), "--fast", "other.py")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = make_chat_model(tmp_path / "model", "qwen2.5")
    (model / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 8}')
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    (tmp_path / "records.jsonl").write_text('{"question": "6 times 7"}\n')
    return model


def looked_at(model: Path, agent: dict[str, Any]) -> Any:
    places = {"path": str(model.parent / "records.jsonl")}
    config = config_with(OWN | places, agent, model={"path": str(model)}, generation={"engine": "scripted"})
    return preflight_sampling(config)


def test_the_prompt_of_an_agent_is_what_every_dialogue_begins_with(checkpoint: Path) -> None:
    (found,) = looked_at(checkpoint, RUN).datasets
    assert (found.example, found.longest_prompt_tokens) == ("<|im_start|>", 1)


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ({"function": "nowhere:solve"}, "agent.function='nowhere:solve': there is no module 'nowhere'"),
        ({"function": "tests.unit.roles.sample_agents:missing"}, "has no 'missing'; its functions: .*once"),
        ({"command": ["no-such-program", "x"]}, "no program 'no-such-program' here"),
    ],
)
def test_an_agent_that_cannot_be_started_is_named_before_anything_is(
    checkpoint: Path, agent: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        looked_at(checkpoint, agent)


def test_a_template_whose_dialogues_begin_with_no_special_token_is_refused(checkpoint: Path) -> None:
    make_chat_model(checkpoint, "qwen2.5", "Dialogue: " + QWEN25.strip())
    with pytest.raises(ConfigError, match="dialogues do not begin with a special token"):
        looked_at(checkpoint, RUN)
