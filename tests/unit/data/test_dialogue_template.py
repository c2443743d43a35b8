"""Chat templates applied message by message give the tokens of the whole dialogue, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.environment import TOOL_SCHEMAS
from rlhpc.protocol.errors import ConfigError
from tests.unit.data.chat_models import QWEN25, TEMPLATES, make_chat_model
from tests.unit.data.checkpoints import make_tokenizer_files

TOOLS = [TOOL_SCHEMAS["calculator"], TOOL_SCHEMAS["search"]]


def dialogue_of(directory: Path, family: str, template: str | None = None, tools=TOOLS):
    tokenizer = PromptTokenizer(make_chat_model(directory, family, template))
    return tokenizer, DialogueTemplate(tokenizer, tools)


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "none"])
@pytest.mark.parametrize("family", ["qwen2.5", "llama3"])
def test_prompt_turns_and_observations_are_the_tokens_of_the_whole_dialogue(tmp_path, family, tools):
    tokenizer, template = dialogue_of(tmp_path, family, tools=tools)
    role = "tool"
    messages = [
        {"role": "user", "content": "What is 12 times 34?"},
        {"role": "user", "content": "Be quick."},
        {"role": "assistant", "content": "Let me search."},
        {"role": role, "content": "nothing\nwas found — è"},
        {"role": role, "content": "408"},
        {"role": "assistant", "content": "It is 408."},
        {"role": "user", "content": "Sure?"},
    ]
    end = [template.turn_end]
    parts = [
        template.prompt("What is 12 times 34?"),
        template.opening(messages[1:2]),
        tokenizer.encode_rendered("Let me search."),
        end,
        template.observation(messages[3:5], last_token=template.turn_end),
        tokenizer.encode_rendered("It is 408."),
        template.observation(messages[6:], last_token=int(tokenizer.encode_rendered("It is 408.")[-1])),  # cut
    ]
    whole = tokenizer.encode_rendered(tokenizer.chat_template.render(messages, tools=tools))
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_an_observation_does_not_depend_on_what_a_template_does_to_older_turns(tmp_path):
    """Qwen3 drops thoughts of older turns: what was sampled stays, and what is new is as the template has it."""
    tokenizer, template = dialogue_of(tmp_path, "qwen3", tools=())
    for role in ("tool", "user"):
        new = [{"role": role, "content": "408"}]
        text = tokenizer.decode(template.observation(new, last_token=template.turn_end), keep_special_tokens=True)
        said = "\n<tool_response>\n408\n</tool_response>" if role == "tool" else "\n408"
        assert text == f"\n<|im_start|>user{said}<|im_end|>\n<|im_start|>assistant\n"


def test_every_token_that_ends_a_sequence_ends_a_turn(tmp_path):
    tokenizer, template = dialogue_of(tmp_path, "llama3")
    ends = {tokenizer.decode([token], keep_special_tokens=True) for token in template.stop_token_ids}
    assert ends == {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}
    call_end = int(tokenizer.encode_rendered("<|eom_id|>")[0])
    after_call = template.observation([{"role": "tool", "content": "4"}], last_token=call_end)
    assert tokenizer.decode(after_call, keep_special_tokens=True).startswith("<|start_header_id|>ipython")


def test_what_looks_like_the_mark_of_a_turn_is_an_observation_like_any_other(tmp_path):
    tokenizer, template = dialogue_of(tmp_path, "qwen2.5")
    said = template.observation([{"role": "tool", "content": "~the~turn~"}], last_token=template.turn_end)
    assert "~the~turn~\n</tool_response>" in tokenizer.decode(said)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("<|im_end|>' + '\\n'", "' + '\\n'", "does not begin with a special token"),
        ("message.content + '<|im_end|>'", "message.content | upper + '<|im_end|>'", "not rendered as it is"),
        ("message.content + '<|im_end|>'", "message.content + message.content + '<|im_end|>'", "more than once"),
        ("'<|im_start|>' + message.role", "'<|im_start|>' ~ loop.index ~ message.role", "the number of those before"),
        ("{%- if add_generation_prompt", "{{- messages|length }}{%- if add_generation_prompt", "else with|depends on"),
    ],
    ids=["no end", "shouts", "twice", "counts", "tells"],
)
def test_a_template_that_cannot_be_applied_message_by_message_is_refused_at_the_start(tmp_path, old, new, why):
    assert old in QWEN25
    with pytest.raises(ConfigError, match=rf"(?s)one message after the other: .*({why})"):
        dialogue_of(tmp_path, "qwen2.5", QWEN25.replace(old, new))


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_of_the_families_are_accepted(tmp_path, family):
    tokenizer, template = dialogue_of(tmp_path, family)
    assert template.turn_end in tokenizer.eos_token_ids


BEGINNINGS = {"qwen2.5": "<|im_start|>", "qwen3": "<|im_start|>", "llama3": "<|begin_of_text|><|start_header_id|>"}


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "none"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_every_dialogue_begins_with_the_same_special_tokens_whoever_says_what(tmp_path, family, tools):
    _, template = dialogue_of(tmp_path, family, tools=tools)
    assert template.beginning == BEGINNINGS[family]
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    for messages in (told, told[1:]):
        whole = template.whole(messages).tolist()
        assert whole[: len(template.tokens_of_beginning)] == template.tokens_of_beginning.tolist()


def test_letters_that_a_vocabulary_lacks_are_no_beginning(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}é{{ m.content }}</turn>{% endfor %}"
    unknown = PromptTokenizer(make_tokenizer_files(tmp_path / "other", chat_template=template))
    assert DialogueTemplate(unknown).beginning == "<bos>"
