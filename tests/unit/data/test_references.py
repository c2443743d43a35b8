"""References are looked at before a run: the first bad ones are named, each with its line."""

from __future__ import annotations

import json

import pytest
from checkpoints import sums

from rlhpc.data.curriculum import validate_datasets
from rlhpc.data.record_source import Record
from rlhpc.data.validation import refuse_bad_references
from rlhpc.protocol.errors import DataError
from rlhpc.rewards.registry import reference_check
from tests.unit.data.test_prompts import make_config


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


def test_one_bad_reference_is_one_line():
    with pytest.raises(DataError, match=r"^train\.jsonl:2: [^\n]*$"):
        refuse_bad_references(records(2, 3), "answer", lambda _: "even", lambda _: even)


def test_after_its_time_references_are_only_looked_for():
    seconds = iter(range(100))
    assert (
        refuse_bad_references(
            records(2, 2, 3), "answer", lambda _: "even", lambda _: even, most_s=2.0, clock=lambda: next(seconds)
        )
        == 2
    )
    with pytest.raises(DataError, match="no field 'solution'"):
        refuse_bad_references(records(2), "solution", lambda _: "even", lambda _: None)
    assert refuse_bad_references(records(3), "answer", lambda _: "own:function", lambda _: None) == 0


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
