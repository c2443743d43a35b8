"""Demonstrations are the tokens of the chat template, and each step learns what it is to learn."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import QWEN25, TEMPLATES, make_chat_model, make_tokenizer_files, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.checks.preflight import Findings, doubts_of_demonstrations
from rlhpc.algorithms.packing import FlopCost, unpack
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.config.tables import DataConfig
from rlhpc.config.tables_sft import DemonstrationsConfig
from rlhpc.data import demonstrations
from rlhpc.data.demonstrations import DemonstrationForm, Demonstrations, fitting_keys, open_demonstrations
from rlhpc.data.prompt_form import PromptForm
from rlhpc.data.record_source import Record
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.metrics.names import METRICS
from rlhpc.protocol.errors import ConfigError, DataError
from rlhpc.roles.controller.batch_maker import SupervisedBatches
from tests.unit.doc_pages import ROOT, blocks, section

COST = FlopCost(1.0, 0.0)
SAID = ("system", "user", "assistant", "tool")


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptTokenizer]:
    """Templates of families, and one of a tokenizer of characters that trims contents."""
    made = {each: make_chat_model(tmp_path_factory.mktemp(each), each) for each in TEMPLATES}
    trims = "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}: {{ m.content | trim }}</turn>{% endfor %}"
    made["trims"] = make_tokenizer_files(
        tmp_path_factory.mktemp("trims"),
        chat_template=trims + "{% if add_generation_prompt %}<turn>assistant: {% endif %}",
    )
    return {name: PromptTokenizer(directory) for name, directory in made.items()}


def made_of(tokenizer: PromptTokenizer, record: dict[str, Any], **table: Any) -> tuple[list[int], list[int]]:
    """Tokens, and those of them that are learnt."""
    form = DemonstrationForm(DemonstrationsConfig.model_validate({"path": "d", **table}), tokenizer)
    (found,) = form.demonstrations([Record(record, "d.jsonl:1")])
    assert not found.loss_mask[0]
    return found.token_ids.tolist(), found.token_ids[found.loss_mask].tolist()


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    family=st.sampled_from(["qwen2.5", "llama3", "trims"]),
    said=st.lists(st.text("ab \n<>{}é4", min_size=1).filter(str.strip), min_size=2, max_size=7),
)
def test_a_conversation_is_what_the_template_makes_of_the_whole(
    models: dict[str, PromptTokenizer], data: st.DataObject, family: str, said: list[str]
) -> None:
    tokenizer, last = models[family], [message("assistant", said[-1].strip())]
    roles = [data.draw(st.sampled_from(SAID[1:] if place else SAID[:2])) for place in range(len(said) - 1)]
    messages = [message(role, text.strip()) for role, text in zip(roles, said, strict=False)] + last
    tokens, learnt = made_of(tokenizer, {"messages": [*messages, message("user", "And?")]})
    whole = tokenizer.encode_rendered(tokenizer.chat_template.render(messages, add_generation_prompt=False)).tolist()
    end = {"qwen2.5": "<|im_end|>", "llama3": "<|eot_id|>", "trims": "</turn>"}[family]
    (ending,) = tokenizer.encode_rendered(end).tolist()
    assert tokens == whole[: len(whole) - whole[::-1].index(ending)]  # all but what follows the end of the last turn
    turns = [tokenizer.encode_rendered(m["content"] + end).tolist() for m in messages if m["role"] == "assistant"]
    assert learnt == [token for turn in turns for token in turn]


def test_every_turn_is_what_a_policy_would_have_sampled(models: dict[str, PromptTokenizer]) -> None:
    """Qwen3 writes the last turn with an empty thought, and none before the last question."""
    tokenizer = models["qwen3"]
    messages = [message(role, text) for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    tokens, learnt = made_of(tokenizer, {"messages": messages})
    thought = "<think>\n\n</think>\n\n"
    assert tokenizer.decode(learnt, keep_special_tokens=True) == f"{thought}b<|im_end|>{thought}d<|im_end|>"
    first = tokenizer.chat_template.render(messages[:2], add_generation_prompt=False)
    second = tokenizer.chat_template.render([messages[2], messages[3]], add_generation_prompt=False)
    assert tokenizer.decode(tokens, keep_special_tokens=True) == (first + second).removesuffix("\n")


def test_messages_of_sharegpt_are_read_as_any_others(models: dict[str, PromptTokenizer]) -> None:
    told = [("system", "a"), ("human", "b"), ("gpt", "c"), ("observation", "d"), ("gpt", "e")]
    names = {"human": "user", "gpt": "assistant", "observation": "tool"}
    theirs, ours = (
        [{key: word, value: text} for word, text in messages]
        for key, value, messages in (
            ("from", "value", told),
            ("role", "content", [(names.get(word, word), text) for word, text in told]),
        )
    )
    wanted = made_of(models["qwen2.5"], {"messages": ours})
    assert made_of(models["qwen2.5"], {"conversations": theirs}, messages_field="conversations") == wanted
    assert made_of(models["qwen2.5"], {"messages": json.dumps(theirs)}) == wanted


def test_calls_of_tools_are_learnt_as_the_template_writes_them(tmp_path: Path) -> None:
    calls = "{%- if message.tool_calls %}{{- '<tool_call>' + message.tool_calls[0].name }}{%- endif %}"
    template = QWEN25.replace(
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}",
        "{{- '<|im_start|>' + message.role + '\\n' + message.content }}" + calls + "{{- '<|im_end|>' + '\\n' }}",
    )
    tokenizer = PromptTokenizer(make_chat_model(tmp_path, "qwen2.5", template))
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}
    _, learnt = made_of(tokenizer, {"messages": [message("user", "a"), call, message("tool", "b"), call]})
    assert tokenizer.decode(learnt, keep_special_tokens=True) == "<tool_call>search<|im_end|>" * 2


def test_arguments_that_are_json_in_a_string_are_learnt_as_objects_are(models: dict[str, PromptTokenizer]) -> None:
    """As OpenAI's API has them; nulls in the string are the call's own."""
    tokenizer, arguments = models["qwen3.5"], {"query": "a\nb", "count": 3, "most": None}

    def learnt(spelt: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": spelt}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        _, tokens = made_of(tokenizer, {"messages": [message("user", "a"), said]})
        return tokenizer.decode(tokens, keep_special_tokens=True)

    call = "<tool_call>\n<function=search>\n<parameter=query>\na\nb\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
    end = "</function>\n</tool_call><|im_end|>"
    assert learnt({"query": "a\nb", "count": 3}) == "\n</think>\n\n" + call + end
    assert learnt(json.dumps(arguments)) == "\n</think>\n\n" + call + "<parameter=most>\nNone\n</parameter>\n" + end


def test_a_template_that_joins_arguments_to_text_gets_them_as_text(tmp_path: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    template = "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}" + calls
    template += "</turn>{% endfor %}{% if add_generation_prompt %}<turn>assistant: {% endif %}"
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path, chat_template=template))
    for spelt in ({"a": "b"}, '{"a": "b"}'):
        call = {"type": "function", "function": {"name": "f", "arguments": spelt}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert tokenizer.chat_template.render([said], add_generation_prompt=False).endswith('f{"a": "b"}</turn>')


def template_with_calls(written: str) -> str:
    """Qwen2.5's, with what it writes of a message with calls."""
    return QWEN25.replace(
        "message.content + '<|im_end|>' + '\\n' }}",
        "message.content }}{%- if message.tool_calls %}{{- " + written + " }}{%- endif %}{{- '<|im_end|>\\n' }}",
    )


def calls_of(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


ARGUMENTS = "(message.tool_calls[0].function.name ~ (message.tool_calls[0].function.arguments | tojson))"


@pytest.mark.parametrize(
    ("arguments", "learnt"),
    [
        ('{"e": "1+1"}', '{"e": "1+1"}'),
        ({"e": "1+1"}, '{"e": "1+1"}'),
        ('{"e": null}', '{"e": null}'),
        ({"e": '{"a": 1}'}, '{"e": "{\\"a\\": 1}"}'),  # a value that is a text stays one
        ("", "{}"),
        (None, "{}"),
    ],
)
def test_arguments_in_openais_form_are_learnt_as_an_engine_would_be_told_them(
    tmp_path: Path, arguments: Any, learnt: str
) -> None:
    """vLLM parses the text before the template, which would encode it once more."""
    tokenizer = PromptTokenizer(make_chat_model(tmp_path, "qwen2.5", template_with_calls(ARGUMENTS)))
    said, asked = calls_of("calc", arguments), message("user", "a")
    whole = {"messages": [asked, said], "prompt": "a", "chosen": [said], "rejected": [message("assistant", "b")]}
    kept = json.dumps(whole)
    pair = {"completion_field": "chosen", "rejected_field": "rejected", "use_chat_template": True}
    for table in ({}, pair):
        assert tokenizer.decode(made_of(tokenizer, whole, **table)[1]) == f"calc{learnt}"
    assert json.dumps(whole) == kept
    told = {"prompt": [asked, said, message("tool", "2")]}
    data = DataConfig.model_validate({"path": "d", "task": "exact_match", "prompt_field": "prompt"})
    form = PromptForm(data, tokenizer, max_prompt_tokens=500, max_completion_tokens=8)
    assert f"calc{learnt}<|im_end|>" in form.text(Record(told, "d.jsonl:1"))[0]


@pytest.mark.parametrize("arguments", ['{"e": 1', "[1]", "1+1", ["e"]])
def test_arguments_that_are_no_object_are_refused(models: dict[str, PromptTokenizer], arguments: Any) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl:1: field 'messages', message 2: tool_calls\.0: arguments are "):
        made_of(models["qwen2.5"], {"messages": [message("user", "a"), calls_of("calc", arguments)]})


def test_calls_of_tools_that_nobody_described_are_counted(tmp_path: Path) -> None:
    make_chat_model(tmp_path / "model", "qwen2.5", template_with_calls(ARGUMENTS))
    schema = [{"type": "function", "function": {"name": "calc"}}]
    asked, said = message("user", "a"), calls_of("calc", {})
    write_jsonl(
        tmp_path / "d.jsonl",
        [
            {"messages": [asked, said], "functions": schema},
            {"messages": [asked, said], "tools": schema},
            {"messages": [message("system", "You may use calc."), asked, said]},
            {"messages": [asked, message("assistant", "b")]},
        ],
    )
    config = config_of(tmp_path)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"token_budget": 400})})
    corpora = open_demonstrations(config).corpora
    assert [each.num_untold for each in corpora] == [1]
    findings = Findings({}, tokenizer_of(tmp_path), None, 1, (), demonstrations=open_demonstrations(config))
    said_of_it = next(doubts_of_demonstrations(config, findings))
    assert "1 conversation with calls of a tool" in said_of_it
    assert "demonstrations.tools_field='functions' tells of them" in said_of_it


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"tool_calls": [{"name": "search"}]}, "tool_calls"),
        ({"content": "I search.", "tool_calls": [{"name": "search"}]}, "tool_calls"),
        ({"content": "b", "reasoning_content": "Since a."}, "reasoning_content"),
        ({"content": "b", "function_call": {"name": "search"}}, "function_call"),
    ],
)
def test_what_the_template_leaves_out_of_a_turn_is_refused(
    models: dict[str, PromptTokenizer], said: dict[str, Any], key: str
) -> None:
    turn = {"role": "assistant", "content": None, **said}
    messages = [message("user", "a"), turn, message("user", "c"), message("assistant", "d")]
    with pytest.raises(DataError, match=rf"d\.jsonl:1: the chat template .* does not write {key} of the assistant"):
        made_of(models["qwen2.5"], {"messages": messages})
    plain = {**turn, "content": "b", **{name: None for name in said if name != "content"}}
    made_of(models["qwen2.5"], {"messages": [message("user", "a"), plain]})  # nulls of Parquet


@pytest.mark.parametrize("written", ["message.tool_calls[0].name", "message.tool_calls | tojson"])
def test_every_call_of_a_turn_is_written_and_so_is_its_text(tmp_path: Path, written: str) -> None:
    either = "{%- if message.tool_calls %}{{- " + written + " }}{%- else %}{{- message.content }}{%- endif %}"
    template = QWEN25.replace("message.content + '<|im_end|>'", "'' }}" + either + "{{- '<|im_end|>'")
    tokenizer = PromptTokenizer(make_chat_model(tmp_path, "qwen2.5", template))
    calls = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}, {"name": "g"}]}
    if "tojson" in written:
        made_of(tokenizer, {"messages": [message("user", "a"), calls]})
    else:
        with pytest.raises(DataError, match="does not write tool_calls of the assistant"):
            made_of(tokenizer, {"messages": [message("user", "a"), calls]})
    one = calls | {"content": "I ask f.", "tool_calls": [{"name": "f"}]}
    with pytest.raises(DataError, match="does not write content of the assistant"):
        made_of(tokenizer, {"messages": [message("user", "a"), one]})


def test_tools_that_the_template_does_not_write_are_refused(models: dict[str, PromptTokenizer]) -> None:
    record = {"messages": [message("user", "a"), message("assistant", "b")], "tools": [{"type": "function"}]}
    with pytest.raises(DataError, match=r"does not write tools, and data\.tools_field='tools'"):
        made_of(models["trims"], record, tools_field="tools")
    made_of(models["trims"], record | {"tools": []}, tools_field="tools")


def test_tools_of_a_record_are_told_where_the_template_tells_them(models: dict[str, PromptTokenizer]) -> None:
    tokenizer, tools = models["qwen2.5"], [{"type": "function", "function": {"name": "f", "strict": None}}]
    messages = [message("user", "a"), message("assistant", "b")]
    shown = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer.chat_template.render(messages, tools=shown, add_generation_prompt=False).removesuffix("\n")
    wanted = tokenizer.encode_rendered(text).tolist()
    for value in (tools, json.dumps(tools)):  # an object of Parquet has the keys of all
        tokens, learnt = made_of(tokenizer, {"messages": messages, "tools": value}, tools_field="tools")
        assert tokens == wanted
        assert tokenizer.decode(learnt, keep_special_tokens=True) == "b<|im_end|>"
    assert made_of(tokenizer, {"messages": messages, "tools": tools})[0] == wanted  # as TRL reads the column
    plain = made_of(tokenizer, {"messages": messages})
    for nothing in (None, "", "null", "[]", []):
        assert made_of(tokenizer, {"messages": messages, "tools": nothing}) == plain
    assert made_of(tokenizer, {"messages": messages, "tools": tools}, tools_field="") == plain
    with pytest.raises(DataError, match=r'field .tools. \(data\.tools_field\) is no list of JSON schemas; legal: .*""'):
        made_of(tokenizer, {"messages": messages, "tools": "f"})


def test_prompts_and_completions_are_learnt_with_and_without_a_template(models: dict[str, PromptTokenizer]) -> None:
    record = {"q": "12+34=", "a": "46", "said": [message("assistant", "46")], "chat": [message("user", "12+34=")]}
    table = {"prompt_template": "{q}", "completion_field": "a"}
    tokenizer = models["qwen2.5"]
    tokens, learnt = made_of(tokenizer, record, **table)
    assert tokenizer.decode(tokens, keep_special_tokens=True) == "12+34=46<|im_end|>"
    assert tokenizer.decode(learnt, keep_special_tokens=True) == "46<|im_end|>"
    chat = {"messages": [message("system", "S"), message("user", "12+34="), message("assistant", "46")]}
    wanted = made_of(tokenizer, chat)
    assert made_of(tokenizer, record, **table, use_chat_template=True, system_prompt="S") == wanted
    assert made_of(tokenizer, chat | {"messages": chat["messages"][1:]}, system_prompt="S") == wanted
    for completion in ("a", "said"):
        fields = {"prompt_field": "chat", "completion_field": completion, "system_prompt": "S"}
        assert made_of(tokenizer, record, **fields) == wanted
    assert made_of(tokenizer, {"messages": json.dumps(chat["messages"])}) == wanted
    words = r"a prompt that is text, and a completion that is chat messages; legal: data\.use_chat_template=true"
    with pytest.raises(DataError, match=words):
        made_of(tokenizer, record, **(table | {"completion_field": "said"}))
    made_of(tokenizer, record, **(table | {"completion_field": "said"}), use_chat_template=True)
    with pytest.raises(
        DataError, match=r'whole conversation; legal: data\.messages_field="messages", without data\.comp'
    ):
        made_of(tokenizer, record | chat, **(table | {"completion_field": "messages"}))


def test_the_prompt_of_a_preference_is_a_field_or_what_both_answers_begin_with(
    models: dict[str, PromptTokenizer],
) -> None:
    tokenizer, asked = models["qwen2.5"], [message("user", "a"), message("assistant", "b"), message("user", "c")]
    answers = {name: [message("assistant", text)] for name, text in (("chosen", "cat"), ("rejected", "dog"))}
    whole = {name: [*asked, *answer] for name, answer in answers.items()}
    table = {"completion_field": "chosen", "rejected_field": "rejected", "path": "d"}

    def pair(record: dict[str, Any], **more: Any) -> list[tuple[str, str]]:
        form = DemonstrationForm(DemonstrationsConfig.model_validate(table | more), tokenizer)
        (found,) = form.demonstrations([Record(record, "d.jsonl:1")])
        both = [(each.token_ids, each.token_ids[each.loss_mask]) for each in found.sequences]
        return [tuple(tokenizer.decode(ids, keep_special_tokens=True) for ids in each) for each in both]  # type: ignore[misc]

    told = tokenizer.chat_template.render(asked)
    wanted = [(f"{told}{each}<|im_end|>", f"{each}<|im_end|>") for each in ("cat", "dog")]
    assert pair({"prompt": asked} | answers, prompt_field="prompt") == wanted
    assert pair(whole, prompt_template="") == wanted
    assert pair({name: json.dumps(each) for name, each in whole.items()}, prompt_template="") == wanted
    texts = {"chosen": "Q: a\nA: no cat", "rejected": "Q: a\nA: no cut"}
    for (whole_text, learnt), text in zip(pair(texts, prompt_template=""), texts.values(), strict=True):
        assert whole_text == f"{text}<|im_end|>"
        assert f" {text[-3:]}<|im_end|>".endswith(learnt)
    form = DemonstrationForm(DemonstrationsConfig.model_validate(table | {"prompt_template": ""}), tokenizer)
    assert form.parts(Record(texts, "d"), "rejected_field") == [("Q: a\nA: no", False), (" cut", True)]
    same = pair({"prompt": "a", "chosen": "b", "rejected": "b"})
    assert same == [("ab<|im_end|>", "b<|im_end|>")] * 2
    with pytest.raises(DataError, match=r"d\.jsonl:1: two answers that do not begin with the same prompt"):
        pair({"chosen": "dog", "rejected": "den"}, prompt_template="")


CHAT = [message("user", "a"), message("assistant", "b")]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "messages_field='conv"),
        ({"question": "a", "answer": "b"}, "completion_field='answer', data.prompt_template=\"{question}\""),
        ({"instruction": "a", "input": "", "output": "b"}, 'prompt_template="{instruction}\\n\\n{input}"'),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "completion_field='completion', data.prompt_field='prompt'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "rejected_field='rejected', data.prompt_template=\"{prompt}\"",
        ),
        (
            {"chosen": CHAT, "rejected": CHAT},
            "sft.loss='dpo', data.completion_field='chosen', data.rejected_field='rej",
        ),
    ],
)
def test_a_record_without_the_field_is_answered_with_keys_that_fit_it(
    models: dict[str, PromptTokenizer], record: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as refusal:
        made_of(models["qwen2.5"], record)
    assert "d.jsonl:1: no field 'messages', which data.messages_field names" in str(refusal.value)
    table = DemonstrationsConfig(path=Path("d"))
    assert f"; legal: {fitting_keys(Record(record, ''), table)}" in str(refusal.value)
    assert said in str(refusal.value)


@pytest.mark.parametrize("record", [{"chosen": CHAT, "rejected": CHAT}, {"chosen": "a: b", "rejected": "a: c"},
                                    {"prompt": "a", "chosen": CHAT, "rejected": CHAT},
                                    {"prompt": CHAT[:1], "chosen": CHAT, "rejected": CHAT}])  # fmt: skip
def test_pairs_that_begin_with_their_prompt_are_told_the_key_for_it(
    models: dict[str, PromptTokenizer], record: dict[str, Any]
) -> None:
    table = {"completion_field": "chosen", "rejected_field": "rejected"}
    chat = {"use_chat_template": True} if isinstance(record.get("prompt"), str) else {}
    field = {"prompt_field": "prompt"} if isinstance(record.get("prompt"), list) else {}
    for more in (field, chat | field):
        with pytest.raises(DataError, match=r'; legal: .*prompt_template=""') as refusal:
            made_of(models["qwen2.5"], record, **table, **more)
        assert "which is asked" not in str(refusal.value)
        assert "sft.loss" not in str(refusal.value)
    made_of(models["qwen2.5"], record, **table, prompt_template="")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "a"}, r"d\.jsonl:1: no field 'messages', which demonstrations\.messages_field names; .* has 'text'"),
        ({"messages": "a"}, r"d\.jsonl:1: field 'messages' .* is no list of chat messages; legal: .* completion_field"),
        ({"messages": [message("user", "a")]}, r"d\.jsonl:1: no message of the assistant, which is what is learnt"),
        ({"messages": [{"from": "bing", "value": "a"}]}, r"message 1: role is 'bing', its keys are 'role', 'content'"),
        ({"messages": [{"from": "human"}]}, r"message 1: role is None, its keys are 'from'"),
        ({"messages": [message("user", "a"), message("assistant", "b" * 99)]}, r"d\.jsonl:1: the conversation has .* "
         r'tokens; legal: up to 64, or sft\.too_long="drop" \(1 of 1 are too long'),
        ({}, r"demonstrations\.path=.*d\.jsonl has no records"),
    ],
)  # fmt: skip
def test_a_record_that_teaches_nothing_is_refused_by_name(tmp_path: Path, record: dict[str, Any], said: str) -> None:
    write_jsonl(tmp_path / "d.jsonl", [record] if record else [])
    with pytest.raises(DataError, match=said):
        open_demonstrations(config_of(tmp_path))


def test_text_without_an_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path, eos_token=None))
    with pytest.raises(
        ConfigError, match=r"no file names an end token.*legal: \"eos_token\" in tokenizer_config\.json"
    ):
        made_of(tokenizer, {"prompt": "a", "a": "b"}, completion_field="a")


# ------------------------------------------------------------------------------------------------- docs/training.md

PAGE = ROOT / "docs" / "training.md"
HEADING = "Supervised fine-tuning"
OF_THE_PAGE: tuple[dict[str, Any], ...] = (  # a record for each row of its table
    {"messages": CHAT},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"prompt": CHAT[:1], "completion": CHAT[1:]},
    {"instruction": "a", "input": "", "output": "b"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [message("assistant", "c")]},
    {"prompt": "a", "chosen": CHAT, "rejected": [*CHAT[:1], message("assistant", "c")]},
)


def test_columns_of_a_dataset_are_read_with_the_keys_that_the_page_names(models: dict[str, PromptTokenizer]) -> None:
    rows = [line.split("|")[1:3] for line in section(PAGE, HEADING).splitlines() if line.startswith("| ")][1:]
    for (columns, keys), record in zip(rows, OF_THE_PAGE, strict=True):
        assert {*re.findall("`([a-z]+)`", columns)} & {*record} or "pairs" in columns
        table = tomllib.loads("\n".join(re.findall("`(.*?)`", keys)))
        tokens, learnt = made_of(models["qwen2.5"], record, **table)
        assert models["qwen2.5"].decode(learnt, keep_special_tokens=True) == "b<|im_end|>"
        said = models["qwen2.5"].decode(tokens, keep_special_tokens=True)
        assert re.search(r"<\|im_start\|>user\na\s*<\|im_end\|>\n<\|im_start\|>assistant\nb<\|im_end\|>$", said)


def test_the_page_of_metrics_names_those_of_supervised_fine_tuning() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert not [name for name in METRICS if name.startswith("sft/") and f"`{name}`" not in page]


def test_run_files_of_the_page_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_chat_model(tmp_path / "model", "qwen2.5")
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("chats.jsonl"), [{"messages": CHAT}] * 9)
    write_jsonl(Path("pairs.jsonl"), [{"chosen": CHAT, "rejected": [*CHAT[:1], message("assistant", "c")]}] * 9)
    counts = []
    for text in blocks(PAGE, "toml", heading=HEADING):
        Path("RUN.toml").write_text(text)
        config = load_config(Path("RUN.toml"), ["model.path=model"])
        found = open_demonstrations(config)
        counts.append((config.is_supervised, config.sft.counts, found.num_conversations, found.corpora[0].num_equal))
    assert counts == [(True, "conversation", 8, 0), (True, "pair", 9, 0)]


# -------------------------------------------------------------------------------------------------------------- batches


def config_of(directory: Path, *tables: dict[str, Any], **sft: Any) -> Config:
    if not (model := directory / "model").exists():
        make_chat_model(model, "qwen2.5")
    return Config.model_validate(
        {
            "run": {"name": "taught", "seed": 5},
            "model": {"path": model},
            "demonstrations": [{"path": directory / "d.jsonl"} | table for table in tables or ({},)],
            "sft": {"batch_size": 4, **sft},
            "trainer": {"token_budget": 64, "num_ranks": 2},
        }
    )


def tokenizer_of(directory: Path) -> PromptTokenizer:
    return PromptTokenizer(directory / "model")


def write_numbers(file: Path, numbers: range, **more: Any) -> None:
    write_jsonl(file, [{"prompt": "a", "answer": str(number)} | more for number in numbers])


PLAIN = {"completion_field": "answer"}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """(Demonstration) → the number that it teaches."""
    make_chat_model(tmp_path / "model", "qwen2.5")
    tokenizer = tokenizer_of(tmp_path)
    return lambda each: int(tokenizer.decode(each.token_ids)[1:])


def test_every_epoch_learns_each_conversation_once_in_its_own_order(tmp_path: Path, read: Any) -> None:
    write_numbers(tmp_path / "d.jsonl", range(11))
    config = config_of(tmp_path, PLAIN)
    found = open_demonstrations(config)
    epochs = [[read(found.learnt(11 * epoch + place)) for place in range(11)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert all(one != other for one, other in pairwise(epochs))
    batches = SupervisedBatches(found, config, COST)
    order = [number for epoch in epochs for number in epoch]
    for step in (5, 0, 2):  # in whatever order: a restart begins anywhere; the third one goes on into the next epoch
        minibatch = batches.rows(step)
        assert len(minibatch.ranks) == 2
        rows = unpack(minibatch)
        assert sorted(map(read, rows)) == sorted(order[4 * step : 4 * step + 4])
        assert minibatch.num_loss_tokens == sum(int(row.loss_mask.sum()) for row in rows)
        for row in rows:
            assert row.advantages.tolist() == row.loss_mask.tolist()
            assert len(row.loss_mask) - int(row.loss_mask.sum()) == 1  # of the prompt
    assert [read(open_demonstrations(config).learnt(n)) for n in range(33)] == order
    other = Demonstrations(config.model_copy(update={"run": config.run.model_copy(update={"seed": 6})}), found.corpora)
    assert [read(other.learnt(n)) for n in range(11)] != epochs[0]


def test_a_batch_holds_pairs_side_by_side_that_all_count_alike(tmp_path: Path, read: Any) -> None:
    numbers = [(number, "1" * (1 + number)) for number in range(10)]
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "yes": f"{n}", "no": f"{n}0{more}"} for n, more in numbers])
    table = {"completion_field": "yes", "rejected_field": "no"}
    config = config_of(tmp_path, table, loss="dpo", held_out=0.2, beta=0.3)
    found = open_demonstrations(config)
    assert (found.num_conversations, found.num_held_out, len(found.corpora[0])) == (8, 2, 10)
    batches, tokenizer = SupervisedBatches(found, config, COST), tokenizer_of(tmp_path)
    for minibatch, num_pairs in ((batches.rows(0), 4), (batches.rows(1), 4), (next(batches.held_out_rows()), 2)):
        assert minibatch.num_samples == 2 * num_pairs
        pairs = 0
        for row in (row for row in minibatch.rows if row.loss_mask.any()):
            segments = list(pairwise(row.cu_seqlens.tolist()))
            for chosen, rejected in zip(segments[::2], segments[1::2], strict=True):
                (mine, gains, share), (theirs, losses, also) = (
                    (
                        row.token_ids[begin:end],
                        row.advantages[begin:end],
                        row.loss_weights[segments.index((begin, end))],
                    )
                    for begin, end in (chosen, rejected)
                )
                number = [tokenizer.decode(ids).split("a")[1] for ids in (mine, theirs)]
                assert number[1].startswith(number[0] + "0")
                assert gains.tolist() == [0.0] * (1 + len(number[0])) + [1.0]  # what both share is not learnt
                assert losses.tolist() == [0.0] * (1 + len(number[0])) + [-1.0] * (1 + len(number[1]) - len(number[0]))
                assert share == also
                weight = share * (np.count_nonzero(gains) + np.count_nonzero(losses)) * num_pairs
                assert weight == pytest.approx(minibatch.num_loss_tokens, rel=1e-6)
                pairs += 1
        assert pairs == num_pairs
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "yes": "1", "no": "1" * length} for length in (3, 40)])
    with pytest.raises(DataError, match=r"d\.jsonl:2: the conversation has 42 tokens; legal: up to 32"):
        open_demonstrations(config_of(tmp_path, table, loss="dpo"))
    assert len(open_demonstrations(config_of(tmp_path, table, loss="dpo", too_long="drop")).corpora[0]) == 1


def test_datasets_are_passed_over_as_often_as_they_say(tmp_path: Path, read: Any) -> None:
    write_numbers(tmp_path / "a.jsonl", range(6))
    write_numbers(tmp_path / "b.jsonl", range(100, 104))
    tables = [
        {"path": tmp_path / f"{name}.jsonl", "passes": passes, **PLAIN} for name, passes in (("a", 0.5), ("b", 2.0))
    ]
    found = open_demonstrations(config_of(tmp_path, *tables))
    assert found.num_conversations == 3 + 8
    for first in (0, 22):
        numbers = [read(found.learnt(first + place)) for place in range(22)]
        assert sorted(numbers) == [*range(6), *sorted([*range(100, 104)] * 4)]  # in two epochs both halves of the one


def test_what_is_held_out_is_never_learnt(tmp_path: Path, read: Any) -> None:
    write_numbers(tmp_path / "a.jsonl", range(20))
    write_numbers(tmp_path / "b.jsonl", range(100, 103))
    tables = [{"path": tmp_path / "a.jsonl", **PLAIN}, {"path": tmp_path / "b.jsonl", "held_out": True, **PLAIN}]
    config = config_of(tmp_path, *tables, held_out=0.25)
    found = open_demonstrations(config)
    held_out = [read(each) for each in found.held_out()]
    assert (found.num_conversations, found.num_held_out) == (15, 8)
    assert held_out[5:] == [100, 101, 102]
    assert sorted([read(found.learnt(n)) for n in range(15)] + held_out[:5]) == list(range(20))
    rows = [list(map(read, unpack(each))) for each in SupervisedBatches(found, config, COST).held_out_rows()]
    assert [sorted(each) for each in rows] == [sorted(held_out[:4]), sorted(held_out[4:])]
    write_numbers(tmp_path / "a.jsonl", range(1))
    with pytest.raises(DataError, match=r"sft\.held_out=0\.9 leaves no conversation to learn from"):
        open_demonstrations(config_of(tmp_path, tables[0], held_out=0.9))


def test_long_conversations_are_left_out_where_that_is_wanted(tmp_path: Path, read: Any) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "1" * length} for length in (3, 70, 4, 80)])
    found = open_demonstrations(config_of(tmp_path, PLAIN, too_long="drop"))
    assert found.corpora[0].num_dropped == 2
    assert sorted(read(found.learnt(n)) for n in range(2)) == [111, 1111]
    with pytest.raises(
        DataError, match=r"d\.jsonl:2: .* has 72 tokens; .*\(2 of 4 are too long, the longest 82 tokens\)"
    ):
        open_demonstrations(config_of(tmp_path, PLAIN))


def test_a_limit_that_leaves_nothing_says_how_long_conversations_are(tmp_path: Path, read: Any) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "1" * length} for length in (70, 80)])
    with pytest.raises(DataError) as refusal:
        open_demonstrations(config_of(tmp_path, PLAIN, too_long="drop"))
    said = 'nothing is left with sft.too_long="drop": the 2 records have 72 to 82 tokens, and sft.max_tokens is 64'
    assert f"{said}; legal: 72 or more" in str(refusal.value)


def test_answers_that_teach_nothing_are_counted(tmp_path: Path, read: Any) -> None:
    pairs = [("1", "1"), ("1", "2"), ("1", ""), (" ", "2"), ("12", "12")]
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "answer": yes, "no": no} for yes, no in pairs])
    corpus = open_demonstrations(config_of(tmp_path, PLAIN | {"rejected_field": "no"}, loss="dpo")).corpora[0]
    assert (len(corpus), corpus.num_equal, corpus.num_empty) == (5, 2, 2)
    corpus = open_demonstrations(config_of(tmp_path, PLAIN)).corpora[0]
    assert (corpus.num_equal, corpus.num_empty) == (0, 1)
    write_jsonl(tmp_path / "d.jsonl", [{"messages": [message("user", "a"), message("assistant", "")]}] * 2)
    assert open_demonstrations(config_of(tmp_path)).corpora[0].num_empty == 2


def test_faulty_records_are_counted(tmp_path: Path) -> None:
    chat = [message("user", "a"), message("assistant", "b")]
    write_jsonl(
        tmp_path / "d.jsonl", [{"messages": chat}] * 5 + [{"chat": chat}, {"messages": chat[:1]}, {"chat": chat}]
    )
    with pytest.raises(DataError) as refusal:
        open_demonstrations(config_of(tmp_path))
    first, second, count = str(refusal.value).replace(f"{tmp_path}/", "").splitlines()
    assert first.startswith("d.jsonl:6: no field 'messages', which demonstrations.messages_field names")
    assert first.endswith("legal: demonstrations.messages_field='chat' (2 of 8 records, also d.jsonl:8)")
    assert (second.partition(": ")[0], count.partition(";")[0]) == ("d.jsonl:7", "3 of 8 records are faulty")


def test_a_dataset_is_tokenised_once_and_again_when_it_or_what_was_kept_has_changed(
    tmp_path: Path, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path / "kept"))
    made = []
    tokenise = demonstrations._tokenised
    monkeypatch.setattr(demonstrations, "_tokenised", lambda *given: made.append(1) or tokenise(*given))
    write_numbers(tmp_path / "d.jsonl", range(5))
    for config in (config_of(tmp_path, PLAIN), config_of(tmp_path, PLAIN, held_out=0.5, epochs=3.0)):
        corpus = open_demonstrations(config).corpora[0]
    assert (len(made), len(corpus), corpus.num_learnt) == (1, 5, 10)
    assert corpus.highest_token == max(corpus[0].token_ids.max(), corpus[4].token_ids.max())
    (kept,) = (tmp_path / "kept" / "demonstrations").iterdir()
    for content in (kept.read_bytes()[:-1], b"", kept.read_bytes()[:20]):
        kept.write_bytes(content)
        assert [read(open_demonstrations(config).corpora[0][n]) for n in range(5)] == list(range(5))
    assert len(made) == 4
    write_numbers(tmp_path / "d.jsonl", range(6))
    assert len(open_demonstrations(config).corpora[0]) == 6


def test_kept_tokens_take_four_bytes_each(tmp_path: Path, read: Any) -> None:
    write_numbers(tmp_path / "d.jsonl", range(100))
    corpus = open_demonstrations(config_of(tmp_path, PLAIN)).corpora[0]
    values = corpus._values
    assert not values.flags.owndata
    assert values.nbytes == 4 * sum(len(corpus[n].token_ids) for n in range(100))
    assert corpus.borders.nbytes == 8 * 101
    assert np.diff(corpus.borders).tolist() == [len(corpus[n].token_ids) for n in range(100)]
