"""A chat template that fails, or cannot be read: named, and so is the record that it fails on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_models import make_chat_model

from rlhpc.config_data import DataConfig
from rlhpc.data.prompt_form import PromptForm
from rlhpc.data.records import Record
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ConfigError, DataError

ALTERNATING = """
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- '<|im_start|>' + message.content + (message.reasoning_content or '') }}
{%- endfor %}"""

Asked = Callable[..., list[int]]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    def tokens(template: str, messages: Any) -> list[int]:
        keys = {"path": "x.jsonl", "task": "math_answer", "prompt_field": "m"}
        tokenizer = PromptTokenizer(make_chat_model(tmp_path / "model", "qwen2.5", template))
        form = PromptForm(DataConfig.model_validate(keys), tokenizer, max_prompt_tokens=500, max_completion_tokens=8)
        return form.tokens(Record({"m": messages}, "train.jsonl:7")).tolist()

    return tokens


def test_the_record_that_a_template_refuses_is_named(asked: Asked) -> None:
    said = {"role": "user", "content": "2?"}
    assert asked(ALTERNATING, [said])
    why = r"^train\.jsonl:7: model\.path: the chat template fails on messages of user, user: roles must alternate"
    with pytest.raises(DataError, match=why):
        asked(ALTERNATING, [said, said])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ '{0}'.format() }}", "IndexError"),
        ("{{ '{x}'.format() }}", "KeyError"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(100000000) %}{% endfor %}", "Range too big"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_whatever_a_template_raises_is_said_to_be_its_own(asked: Asked, template: str, why: str) -> None:
    with pytest.raises(DataError, match=f"the chat template fails on a user message: .*{why}"):
        asked(template, [{"role": "user", "content": "2?"}])


@pytest.mark.parametrize(
    "content",
    ['{"chat_template": ["text"]}', '{"chat_template": [{"name": "default"}]}', '{"chat_template": [{"template": "x"}]}'],
)
def test_a_list_of_templates_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    model = make_chat_model(tmp_path, "qwen2.5")
    (model / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptTokenizer(model).render_chat([{"role": "user", "content": "2?"}])


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path, "qwen2.5")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "text"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert PromptTokenizer(model).render_chat([{"role": "user", "content": "2?"}]) == "text"


def test_a_template_in_another_encoding_is_named(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path, "qwen2.5")
    (model / "chat_template.jinja").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is not UTF-8"):
        PromptTokenizer(model).render_chat([{"role": "user", "content": "2?"}])


def test_half_of_a_character_anywhere_in_a_message_is_refused(asked: Asked) -> None:
    calls = [{"function": {"name": "f", "arguments": {"q": "\ud800"}}}]
    for key, value in (("reasoning_content", "\ud800"), ("tool_calls", calls)):
        messages = [{"role": "assistant", "content": "a", key: value}, {"role": "user", "content": "2?"}]
        with pytest.raises(DataError, match=f"train\\.jsonl:7: .*message 1: {key} holds half of a surrogate pair"):
            asked(ALTERNATING, messages)


def test_messages_as_python_writes_them_are_not_taken_for_a_text(asked: Asked) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:7: field 'm' holds messages as Python writes them.*legal: JSON"):
        asked(ALTERNATING, str([{"role": "user", "content": "2?"}]))
