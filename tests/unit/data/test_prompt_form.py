"""From a record as people have it to a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from checkpoints import CHATML, make_tokenizer_files

from rlhpc.config.tables import DataConfig
from rlhpc.data.prompt_form import DialogueTemplate, PromptForm
from rlhpc.data.record_source import Record, read_records, reference_of
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import DataError
from rlhpc.protocol.types import Prompt

# A row of verl's GSM8K, as its examples/data_preprocess/gsm8k.py writes it.
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"content": "What is 3 + 4?", "role": "user"}],
    "ability": "math",
    "reward_model": {"ground_truth": "7", "style": "rule"},
    "extra_info": {"answer": "3 + 4 = 7", "index": 0, "question": "What is 3 + 4?", "split": "train"},
}
# A row of TRL's conversational prompt-only form.
TRL = {
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "Solve x = 2."}],
    "solution": "$2$",
}
SFT = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(make_tokenizer_files(tmp_path_factory.mktemp("model"), chat_template=CHATML))


def test_a_task_field_that_no_record_has_is_refused(tokenizer: PromptTokenizer) -> None:
    keys = {"path": "x.jsonl", "task": "regex", "task_field": "data_sorce", "tasks": {"openai/gsm8k": "math_answer"}}
    form = PromptForm(DataConfig.model_validate(keys), tokenizer, max_prompt_tokens=500, max_completion_tokens=8)
    with pytest.raises(
        DataError, match=r"data.task_field='data_sorce': no record .* \(did you mean 'data_source'\?\)$"
    ):
        form.refuse_unknown_task_field([Record(VERL, "train.parquet:1")])
    form.refuse_unknown_task_field([Record(VERL, "a:1"), Record(VERL | {"data_sorce": "openai/gsm8k"}, "a:2")])


@pytest.mark.parametrize(("own", "key"), [(20, "data"), (None, "generation")])
def test_a_prompt_that_is_too_long_names_the_key_that_says_so(
    tokenizer: PromptTokenizer, own: int | None, key: str
) -> None:
    data = DataConfig.model_validate({"path": "x.jsonl", "task": "regex", "max_prompt_tokens": own})
    form = PromptForm(data, tokenizer, max_prompt_tokens=20, max_completion_tokens=8)
    with pytest.raises(DataError, match=f"legal: 1 to {key}.max_prompt_tokens=20"):
        form.tokens(Record({"prompt": "1 + " * 30}, "a:1"))


@pytest.fixture
def asked(tokenizer: PromptTokenizer):
    def text_and_prompt(fields: dict[str, Any] | Record, **keys: Any) -> tuple[str, Prompt]:
        record = fields if isinstance(fields, Record) else Record(fields, "train.parquet:7")
        data = DataConfig.model_validate({"path": "x.jsonl", "task": "math_answer"} | keys)
        form = PromptForm(data, tokenizer, max_prompt_tokens=500, max_completion_tokens=8)
        prompt = form.prompt(record, 0)
        assert form.lengths([record]) == [len(prompt.token_ids)]
        return tokenizer.decode(prompt.token_ids, keep_special_tokens=True), prompt

    return text_and_prompt


@pytest.mark.parametrize("content", ["Who is \ud800?", [{"type": "text", "text": "Who is \ud800?"}]])
def test_half_of_a_character_in_a_message_is_refused(asked, content: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": content}]
    with pytest.raises(
        DataError, match=r"^train\.parquet:7: field 'prompt', message 2: content holds half of a surrog"
    ):
        asked({"prompt": messages, "answer": "1"}, prompt_field="prompt", reference_field="answer")


def test_verls_parquet_is_read_as_it_is(asked, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "train.parquet")
    (record,) = read_records(tmp_path / "train.parquet")
    keys = {"prompt_field": "prompt", "reference_field": "reward_model.ground_truth"}
    text, prompt = asked(record, **keys)
    assert text == "<bos><turn>user: What is 3 + 4?</turn>\n<turn>assistant: "
    assert (prompt.reference, prompt.task) == ("7", "math_answer")
    tasks = {"openai/gsm8k": "integer_arithmetic"}
    assert asked(record, task_field="data_source", tasks=tasks, **keys)[1].task == "integer_arithmetic"


def test_trls_prompts_keep_their_system_message(asked) -> None:
    text, prompt = asked(TRL, prompt_field="prompt", reference_field="solution", system_prompt="Other.")
    assert text == "<bos><turn>system: Think.</turn>\n<turn>user: Solve x = 2.</turn>\n<turn>assistant: "
    assert prompt.reference == "$2$"


def test_a_system_prompt_comes_before_messages_and_before_text(asked) -> None:
    both = "<bos><turn>system: Be brief.</turn>\n<turn>user: What is 3 + 4?</turn>\n<turn>assistant: "
    keys = {"system_prompt": "Be brief.", "reference_field": "reward_model.ground_truth"}
    assert asked(VERL, prompt_field="prompt", **keys)[0] == both
    assert asked(VERL, prompt_field="extra_info.question", use_chat_template=True, **keys)[0] == both
    assert asked(VERL, prompt_template="{extra_info.question}", use_chat_template=True, **keys)[0] == both


def test_what_the_assistant_says_at_the_end_is_not_asked_but_may_be_the_reference(asked) -> None:
    text, prompt = asked(SFT, prompt_field="messages", reference_field="messages.-1.content")
    assert text.endswith("<turn>assistant: Hello</turn>\n<turn>user: 2 + 2?</turn>\n<turn>assistant: ")
    assert prompt.reference == "4"


def test_fields_inside_fields_fill_a_template(asked) -> None:
    fields = {"info": {"question": "1+1"}, "choices": ["one", "two"], "Full Name": "x", "a.b": "dotted", "answer": 2}
    text, prompt = asked(fields, prompt_template="{info.question}: {choices.1} {Full Name} {a.b}")
    assert (text, prompt.reference) == ("1+1: two x dotted", "2")


def test_csv_holds_objects_and_messages_as_json(asked) -> None:
    fields = {"prompt": '[{"role": "user", "content": "2?"}]', "reward_model": '{"ground_truth": "2"}'}
    text, prompt = asked(fields, prompt_field="prompt", reference_field="reward_model.ground_truth")
    assert (text, prompt.reference) == ("<bos><turn>user: 2?</turn>\n<turn>assistant: ", "2")


def test_content_in_parts_of_text_is_their_text(asked) -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    fields = {"prompt": [{"role": "user", "content": parts, "name": None}], "answer": "4"}
    assert "user: 2 + 2?<" in asked(fields, prompt_field="prompt")[0]


def test_the_whole_record_may_be_the_reference(asked) -> None:
    assert asked({"prompt": "1", "b": [1, {"c": None}]}, reference_field="*")[1].reference == (
        '{"prompt": "1", "b": [1, {"c": null}]}'
    )


def test_tasks_differ_from_record_to_record(asked) -> None:
    keys = {"task_field": "info.kind", "tasks": {"maths": "math_answer", "choice": "multiple_choice"}, "task": "regex"}
    records = [{"prompt": "1", "answer": "A", "info": {"kind": kind}} for kind in ("maths", "choice", None)]
    assert [asked(each, **keys)[1].task for each in records] == ["math_answer", "multiple_choice", "regex"]
    with pytest.raises(
        DataError,
        match=r"train\.parquet:7: field 'info\.kind' is 'math', .* 'maths', 'choice' \(did you mean 'maths'\?\)",
    ):
        asked({"prompt": "1", "answer": "A", "info": {"kind": "math"}}, **keys)


@pytest.mark.parametrize(
    ("fields", "keys", "why"),
    [
        (VERL, {}, r"field 'prompt' is a list of chat messages; set data\.prompt_field = 'prompt'"),
        (
            VERL,
            {"prompt_field": "prompt", "reference_field": "reward_model.ground_truht"},
            r"no field 'reward_model\.ground_truht', which data\.reference_field names; field 'reward_model' has "
            r"'ground_truth', 'style' \(did you mean reward_model\.ground_truth\?\)",
        ),
        (
            VERL,
            {"prompt_field": "prompts"},
            r"no field 'prompts', which data\.prompt_field names; .*did you mean prompt\?",
        ),
        (
            VERL,
            {"prompt_field": "prompt", "reference_field": "ability.x"},
            r"no field 'ability\.x'.* field 'ability' is a string",
        ),
        (
            SFT,
            {"prompt_field": "messages", "reference_field": "messages.9.content"},
            r"field 'messages' is a list of 4",
        ),
        (VERL, {"prompt_field": "reward_model"}, r"field 'reward_model' is an object .*data\.prompt_field names it"),
        (
            {"m": [{"from": "human", "value": "x"}]},
            {"prompt_field": "m"},
            r"train\.parquet:7: field 'm', message 1: role is None, its keys are 'from', 'value'; legal: 'system'",
        ),
        ({"m": [{"role": "assistant", "content": "x"}]}, {"prompt_field": "m"}, "no message that asks for an answer"),
        (
            {"m": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
            {"prompt_field": "m"},
            r"message 1: a part of its content is 'image'; legal: text",
        ),
        (
            {"prompt": "text", "answer": "1"},
            {"prompt_field": "prompt", "system_prompt": "x"},
            r"the prompt is text without a chat template; set data\.use_chat_template = true",
        ),
    ],
)
def test_a_record_that_makes_no_prompt_says_why(asked, fields: dict[str, Any], keys: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        asked(fields, **keys)


def test_dialogues_begin_with_whatever_a_record_begins_with(tokenizer: PromptTokenizer) -> None:
    """No answer is begun: what the environment says comes first; it is given the whole record."""
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    record = Record({"chat": messages, "question": "1+1", "info": {"answer": "2"}}, "train.jsonl:3")
    for keys, said in (
        ({"prompt_field": "chat"}, "<turn>user: 1</turn>\n<turn>assistant: 2</turn>\n<turn>user: 3</turn>\n"),
        ({"prompt_template": "{question}"}, "<turn>user: 1+1</turn>\n"),
    ):
        settings = {"path": "x", "task": "exact_match", "reference_field": "info.answer", "use_chat_template": True}
        data = DataConfig.model_validate(settings | {"system_prompt": "S"} | keys)
        limits = {"max_prompt_tokens": 500, "max_completion_tokens": 8}
        form = PromptForm(data, tokenizer, **limits, dialogue=DialogueTemplate(tokenizer))
        prompt = form.prompt(record, 0)
        text = tokenizer.decode(prompt.token_ids, keep_special_tokens=True)
        assert text == f"<bos><turn>system: S</turn>\n{said}"
        assert form.lengths([record]) == [len(prompt.token_ids)]
        assert form.reference_lengths([record]) == [1]
        assert json.loads(prompt.reference) == record.fields
        assert reference_of(prompt.reference, data.reference_field) == "2"
        assert reference_of(prompt.reference, "*") == prompt.reference
