"""The seeded order of prompts, and what is found out about a dataset before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CHATML, make_tokenizer_files, sums, write_jsonl

from rlhpc.config.rules import Config
from rlhpc.config.tables import DataConfig
from rlhpc.config.tables_services import JudgeConfig
from rlhpc.data import validation
from rlhpc.data.prompt_form import DialogueTemplate, PromptForm
from rlhpc.data.prompts import SeededPrompts, open_prompts, validate_datasets
from rlhpc.data.record_source import Record, read_records, reference_of
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.data.validation import FaultyRecords, refuse_bad_references
from rlhpc.protocol.errors import CheckpointError, ConfigError, DataError
from rlhpc.rewards.math_answer import check_math_answer
from rlhpc.rewards.registry import reference_check


@pytest.fixture
def tokenizer(tmp_path: Path) -> PromptTokenizer:
    return PromptTokenizer(make_tokenizer_files(tmp_path / "model", chat_template=CHATML))


def make_prompts(tokenizer: PromptTokenizer, num_records: int = 10, **changes: Any) -> SeededPrompts:
    records = changes.pop(
        "records", [Record(fields, f"train.jsonl:{i}") for i, fields in enumerate(sums(num_records), 1)]
    )
    seed, shuffle, dialogue = changes.pop("seed", 0), changes.pop("shuffle", True), changes.pop("dialogue", None)
    settings = {"path": "train.jsonl", "task": "integer", "prompt_template": "{question}"} | changes
    limits = {"max_prompt_tokens": 64, "max_completion_tokens": 8}
    form = PromptForm(DataConfig.model_validate(settings), tokenizer, **limits, dialogue=dialogue)
    return SeededPrompts(records, form, seed=seed, shuffle=shuffle)


def make_config(tmp_path: Path, records: list[dict[str, Any]], **data: Any) -> Config:
    make_tokenizer_files(tmp_path / "model")
    return Config.model_validate(
        {
            "run": {"name": "test", "num_steps": 1, "seed": 3},
            "model": {"path": tmp_path / "model"},
            "data": {
                "path": write_jsonl(tmp_path / "train.jsonl", records),
                "task": "integer",
                "prompt_template": "Q: {question}\nA:",
                **data,
            },
            "generation": {"max_prompt_tokens": 20, "max_completion_tokens": 8},
            "admission": {"groups_per_step": 2, "group_size": 2},
            "trainer": {"token_budget": 64},
        }
    )


def references(prompts: SeededPrompts, count: int) -> list[str]:
    return [prompts.draw().reference for _ in range(count)]


def test_every_epoch_holds_every_record_once_in_an_order_that_a_seed_says_and_never_changes(tokenizer):
    prompts = make_prompts(tokenizer)
    first, second = references(prompts, 10), references(prompts, 10)
    assert sorted(first) == sorted(second) == sorted(record["answer"] for record in sums(10))
    assert first != second
    # Frozen figures: a run that resumes under another numpy must go on in the same order.
    drawn = [int(reference.split("####")[1]) // 2 for reference in references(make_prompts(tokenizer), 20)]
    assert drawn == FROZEN_ORDER
    assert references(make_prompts(tokenizer), 10) != references(make_prompts(tokenizer, seed=1), 10)
    expected = [record["answer"] for record in sums(10)]
    assert references(make_prompts(tokenizer, shuffle=False), 20) == expected * 2


def test_a_prompt_holds_the_filled_template_in_which_braces_of_a_record_are_only_text(tokenizer):
    prompts = make_prompts(tokenizer, prompt_template="Question: {question} {{think}}", shuffle=False)
    prompt = prompts.draw()
    assert tokenizer.decode(prompt.token_ids) == "Question: 0+0=? {think}"
    assert (prompt.task, prompt.reference) == ("integer", "0 and 0.\n#### 0")
    records = [Record({"question": "{answer} {0}", "answer": "1"}, "train.jsonl:1")]
    assert tokenizer.decode(make_prompts(tokenizer, records=records).draw().token_ids) == "{answer} {0}"
    prompts = make_prompts(tokenizer, prompt_template="Solve {question}", use_chat_template=True, shuffle=False)
    text = tokenizer.decode(prompts.draw().token_ids, keep_special_tokens=True)
    assert text == "<bos><turn>user: Solve 0+0=?</turn>\n<turn>assistant: "


@pytest.mark.parametrize("num_drawn", [0, 3, 10, 27])
def test_a_restart_draws_what_would_have_been_drawn(tokenizer, num_drawn):
    uninterrupted = make_prompts(tokenizer)
    references(uninterrupted, num_drawn)
    restarted = make_prompts(tokenizer)
    restarted.load_state(json.loads(json.dumps(uninterrupted.state())))
    for _ in range(15):
        mine, theirs = restarted.draw(), uninterrupted.draw()
        assert (mine.prompt_id, mine.reference) == (theirs.prompt_id, theirs.reference)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"shuffle": False}, {"num_records": 9}])
def test_the_state_of_another_order_is_refused(tokenizer, changes):
    prompts = make_prompts(tokenizer, **changes)
    with pytest.raises(CheckpointError, match="start a new run"):
        prompts.load_state(make_prompts(tokenizer).state())
    assert prompts.draw().prompt_id == 0


@pytest.mark.parametrize("cursor", [None, -1, "3"])
def test_a_damaged_cursor_is_refused(tokenizer, cursor):
    prompts = make_prompts(tokenizer)
    with pytest.raises(CheckpointError, match="cursor"):
        prompts.load_state(prompts.state() | {"cursor": cursor})


def test_a_record_that_makes_no_prompt_or_one_of_no_token_is_named_and_not_skipped(tokenizer):
    records = [Record({"question": "x" * 65, "answer": "1"}, "train.jsonl:4")]
    prompts = make_prompts(tokenizer, records=records)
    for _ in range(2):
        with pytest.raises(DataError, match=r"train\.jsonl:4: the prompt has 65 tokens; legal: 1 to .*=64"):
            prompts.draw()
    assert prompts.state()["cursor"] == 0
    with pytest.raises(DataError, match="is empty, and nothing else asks"):
        make_prompts(tokenizer, records=[Record({"question": "", "answer": "1"}, "train.jsonl:1")]).draw()


@pytest.mark.parametrize("template", ["{0}", "{}", "{question!r}", "{question:>9}", "{question", "?"])
def test_a_template_of_anything_but_plain_names_is_refused(tokenizer, template):
    with pytest.raises(ConfigError, match=r"data\.prompt_template"):
        make_prompts(tokenizer, prompt_template=template)


def test_a_dataset_is_validated_before_anything_is_started(tmp_path):
    (summary,) = validate_datasets(make_config(tmp_path, sums(12)))
    assert (summary.num_records, summary.longest_prompt_tokens) == (12, 13)
    assert summary.mean_prompt_tokens == pytest.approx((10 * 11 + 2 * 13) / 12)
    assert summary.longest_source == f"{tmp_path / 'train.jsonl'}:11"


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (
            {"question": "x" * 30, "answer": "1"},
            r"train\.jsonl:3: the prompt has 36 tokens; legal: .*max_prompt_tokens=20",
        ),
        ({"question": "1+1"}, r"train\.jsonl:3: no field 'answer', which data.reference_field names"),
        (
            {"problem": "1+1", "answer": "1"},
            r"train\.jsonl:3: no field 'question', which data.prompt_template names; .* 'problem', 'answer'",
        ),
        ({"question": None, "answer": "1"}, r"train\.jsonl:3: field 'question' is null"),
    ],
)
def test_the_first_bad_record_is_named_by_file_and_line(tmp_path, record, why):
    with pytest.raises(DataError, match=why):
        validate_datasets(make_config(tmp_path, [*sums(2), record]))


def test_a_run_opens_its_prompts_with_its_own_seed(tmp_path, tokenizer):
    config = make_config(tmp_path, sums(10))
    opened = open_prompts(config)
    expected = make_prompts(tokenizer, records=read_records(config.data[0].path), seed=3)
    assert references(opened, 10) == references(expected, 10)


FROZEN_ORDER = [0, 8, 9, 3, 7, 5, 1, 2, 6, 4, 3, 7, 4, 2, 9, 8, 1, 6, 5, 0]


def test_stages_without_difficulties_are_found_before_anything_is_started(tmp_path: Path) -> None:
    config = make_config(tmp_path, sums(3))
    curriculum = config.curriculum.model_copy(update={"stages": (1.0,)})
    with pytest.raises(DataError, match=r"no field 'difficulty', which curriculum\.difficulty_field names"):
        validate_datasets(config.model_copy(update={"curriculum": curriculum}))


def test_an_environment_is_given_the_whole_record_and_its_task_a_reference(tokenizer):
    dialogue = DialogueTemplate(tokenizer)
    records = [Record({"question": "1+1", "answer": 2, "level": [3]}, "train.jsonl:1")]
    prompts = make_prompts(tokenizer, records=records, use_chat_template=True, dialogue=dialogue)
    prompt = prompts.draw()
    assert json.loads(prompt.reference) == records[0].fields
    assert reference_of(prompt.reference, "answer") == "2"
    assert tokenizer.decode(prompt.token_ids, keep_special_tokens=True) == "<bos><turn>user: 1+1</turn>\n"
    bare = [Record({"question": "1+1"}, "train.jsonl:7")]
    with pytest.raises(DataError, match=r"train.jsonl:7: no field 'answer', which data.reference_field names"):
        make_prompts(tokenizer, records=bare, use_chat_template=True, dialogue=dialogue).validate()
    judged_by_itself = make_prompts(
        tokenizer, records=bare, use_chat_template=True, dialogue=dialogue, task="environment"
    )
    assert judged_by_itself.validate(lambda task: None).num_references_counted == 0
    assert reference_of(judged_by_itself.draw().reference, "answer") == ""


# --------------------------------------- What is found out about a dataset before a run, and that it is found out once


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path / "cache"))
    make_tokenizer_files(tmp_path / "model", chat_template=CHATML)

    def config(records: list[dict[str, Any]] | None = None, limit: int = 40, **data: Any) -> Config:
        if records is not None:
            write_jsonl(tmp_path / "train.jsonl", records)
        return Config.model_validate(
            {
                "run": {"name": "test", "num_steps": 1},
                "model": {"path": tmp_path / "model"},
                "data": {"path": tmp_path / "train.jsonl", "task": "regex", "prompt_template": "Q: {question}", **data},
                "generation": {"max_prompt_tokens": limit, "max_completion_tokens": 16},
                "admission": {"groups_per_step": 2, "group_size": 2},
                "trainer": {"token_budget": 64},
            }
        )

    return config


def test_the_first_prompt_is_shown_as_the_tokenizer_gets_it(make) -> None:
    (found,) = validate_datasets(make(sums(3), use_chat_template=True))
    assert found.example == "<bos><turn>user: Q: 0+0=?</turn>\n<turn>assistant: "
    assert (found.example_tokens, found.example_source[-2:]) == (30, ":1")


def test_references_that_no_completion_can_hold_are_counted(make) -> None:
    records = [{"question": "?", "answer": "x" * length} for length in (3, 16, 17, 40)]
    (found,) = validate_datasets(make(records))
    assert (found.num_references_counted, found.num_references_longer) == (4, 2)
    (found,) = validate_datasets(make([{"question": "?", "answer": ["x" * 40]}]))  # tests of a program are no answer
    assert found.num_references_counted == 0


def test_how_many_prompts_are_too_long_is_said_with_the_first(make) -> None:
    records = [{"question": "x" * length, "answer": "1"} for length in (3, 38, 5, 90, 37)]
    with pytest.raises(
        DataError, match=r":2: the prompt has 41 tokens; .* \(2 of 5 prompts, the longest 93 tokens\); `rlhpc"
    ):
        validate_datasets(make(records))
    with pytest.raises(
        DataError, match=r":4: the prompt has 93 tokens; legal: 1 to .*=41; `rlhpc data convert … --max-tokens 41`"
    ):
        validate_datasets(make(records, limit=41))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that a dataset was looked at."""
    looks: list[int] = []
    summarise = validation.summarise

    def counted(records: Any, form: Any, check_of: Any) -> Any:
        looks.append(len(records))
        return summarise(records, form, check_of)

    monkeypatch.setattr("rlhpc.data.prompts.summarise", counted)
    return looks


def test_a_dataset_is_looked_at_once(make, looked: list[int]) -> None:
    assert validate_datasets(make(sums(3))) == validate_datasets(make())
    assert looked == [3]


def test_it_is_looked_at_again_once_anything_has_changed(make, looked: list[int], tmp_path: Path) -> None:
    validate_datasets(make(sums(3)))
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text().replace("0+0", "0-0"))
    assert validate_datasets(make())[0].example == "Q: 0-0=?"
    validate_datasets(make(limit=39))
    validate_datasets(make(reference_field="question"))
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<pad>"}))
    validate_datasets(make())
    model = {"chat_template_kwargs": {"style": "short"}}
    validate_datasets(make().model_copy(update={"model": make().model.model_copy(update=model)}))
    assert looked == [3] * 6


def test_references_are_checked_again_when_the_file_of_the_judges_template_has_changed(
    make, looked: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "template.txt"
    config = make(sums(3)).model_copy(update={"judge": JudgeConfig(template_file=str(file))})
    for text in ("{completion}", "{completion}", "{reference} {completion}"):
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        validate_datasets(config)
    assert looked == [3, 3]


@pytest.mark.parametrize("left", ["", '{"num_rec', "[1]", "{}", '{"of_another": 1}', "\\ud800"])
def test_what_was_kept_and_is_damaged_is_made_again(make, looked: list[int], tmp_path: Path, left: str) -> None:
    found = validate_datasets(make(sums(3)))
    (file,) = (tmp_path / "cache" / "datasets").iterdir()
    file.write_text(left)
    assert validate_datasets(make()) == validate_datasets(make()) == found
    assert looked == [3, 3]


def test_a_fault_is_looked_for_again(make, looked: list[int]) -> None:
    config = make([{"question": "x" * 90, "answer": "1"}])
    for _ in range(2):
        with pytest.raises(DataError, match="93 tokens"):
            validate_datasets(config)
    assert looked == [1, 1]


# ----------------------------- References are looked at before a run: the first bad ones are named, each with its line


def even(reference: str) -> None:
    if int(reference) % 2:
        raise ValueError(f"reference {reference!r} is odd;\nlegal: an even number")


def records(*answers: int) -> list[Record]:
    return [Record({"answer": answer}, f"train.jsonl:{line}") for line, answer in enumerate(answers, 1)]


def test_the_first_bad_references_are_named_a_line_each_and_the_others_counted():
    with pytest.raises(DataError) as refusal:
        refuse_bad_references(records(2, 3, 4, *range(5, 19)), "answer", lambda _: "even", lambda _: even)
    lines = str(refusal.value).splitlines()
    assert lines[0] == (
        "train.jsonl:2: field 'answer' (data.reference_field), for data.task='even': "
        "reference '3' is odd; legal: an even number"
    )
    assert [line.partition(": ")[0] for line in lines[1:5]] == [f"train.jsonl:{n}" for n in (4, 6, 8, 10)]
    assert lines[5:] == ["and 3 more of 17 records"]
    with pytest.raises(DataError, match=r"^train\.jsonl:2: [^\n]*$"):
        refuse_bad_references(records(2, 3), "answer", lambda _: "even", lambda _: even)


def test_after_its_time_references_are_only_looked_for():
    seconds = iter(range(100))
    assert (
        refuse_bad_references(
            records(2, 2, 3), "answer", lambda _: "even", lambda _: even, most_s=2.0, clock=lambda: next(seconds)
        ).num_checked
        == 2
    )
    with pytest.raises(DataError, match="no field 'solution'"):
        refuse_bad_references(records(2), "solution", lambda _: "even", lambda _: None)
    assert refuse_bad_references(records(3), "answer", lambda _: "own:function", lambda _: None).num_checked == 0


def test_faulty_records_are_counted_and_each_kind_is_named_once(tmp_path):
    many = [{"question": f"{n}?", "answer": "2"} for n in range(50)]
    for place in (7, 11, 30):
        del many[place]["answer"]
    with pytest.raises(DataError) as refusal:
        validate_datasets(make_config(tmp_path, many))
    said = str(refusal.value).replace(f"{tmp_path}/", "")
    assert said.startswith("train.jsonl:8: no field 'answer', which data.reference_field names")
    assert said.endswith(
        "(3 of 50 records, also train.jsonl:12, train.jsonl:31); "
        "`rlhpc data convert RUN.toml OUT --valid` leaves such records out"
    )
    many[40]["question"] = None
    with pytest.raises(DataError) as refusal:
        validate_datasets(make_config(tmp_path, many))
    lines = str(refusal.value).replace(f"{tmp_path}/", "").splitlines()
    assert lines[1].startswith("train.jsonl:41: field 'question' is null")
    assert lines[2].startswith("4 of 50 records are faulty; ")


def test_a_field_that_no_record_has_is_told_once_and_not_tried_in_all(tmp_path):
    num_tried = 0

    def make(record):
        nonlocal num_tried
        num_tried += 1
        return record.text("no")

    faulty = FaultyRecords()
    with pytest.raises(DataError, match=r"^train\.jsonl:1: no field 'no', .* the record has 'answer'$"):
        [faulty.tried(make, record) for record in records(*range(1000))]
    assert num_tried == 100


def test_a_doubtful_reference_is_counted_with_its_line(tmp_path):
    config = make_config(tmp_path, [*sums(2), {"question": "1+1", "answer": "no idea"}])
    (found,) = validate_datasets(config, lambda _: check_math_answer)
    assert (found.num_references_doubted, found.num_references_checked) == (1, 3)
    assert found.doubted_reference.endswith("train.jsonl:3: 'no idea' is words without a number")


def test_every_dataset_is_checked_by_its_own_task(tmp_path):
    config = make_config(tmp_path, [*sums(2), {"question": "1+1", "answer": "3"}])
    asked = []

    def check_of(task: str):
        asked.append(task)
        return even

    with pytest.raises(DataError, match=r"train\.jsonl:3: .* legal: an even number"):
        validate_datasets(config, check_of)
    assert asked == ["integer"]
    assert validate_datasets(config)[0].num_references_checked == 0


def test_the_whole_record_may_be_the_reference(tmp_path):
    config = make_config(tmp_path, sums(2), reference_field="*")
    seen = []
    validate_datasets(config, lambda _task: seen.append)
    assert [json.loads(reference) for reference in seen] == sums(2)


@pytest.mark.parametrize("task", ["code_functions", "code_stdin", "json_schema", "reasoning_gym"])
def test_a_reference_of_thousands_of_levels_is_named_with_its_line(task):
    record = Record({"answer": "[" * 100_000 + "]" * 100_000}, "train.jsonl:1")
    with pytest.raises(DataError, match=r"train\.jsonl:1: field 'answer'.*recursion"):
        refuse_bad_references([record], "answer", lambda _: task, reference_check)
