"""Values that a file may hold and Python has no place for: records without them are read, and the others are named."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlhpc.data.files import write_records
from rlhpc.data.prompt_form import as_conversation, prompt_messages
from rlhpc.data.record_source import Record, read_records
from rlhpc.protocol.errors import DataError

HUGE, DEEP = b"1" * 5000, b"[" * 100_000 + b"]" * 100_000


def table_of(tmp_path: Path, columns: dict[str, Any]) -> list[dict[str, Any]]:
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    return [record.fields for record in read_records(tmp_path / "train.parquet")]


@pytest.mark.parametrize("value", [HUGE, DEEP], ids=["digits", "depth"])
@pytest.mark.parametrize(("name", "form"), [("a.jsonl", b'{"a": 1}\n{"a": %b}\n'), ("a.json", b'[{"a": %b}]')])
def test_numbers_too_long_and_lists_too_deep_for_python_are_named(
    tmp_path: Path, name: str, form: bytes, value: bytes
) -> None:
    (tmp_path / name).write_bytes(form % value)
    with pytest.raises(DataError, match=rf"{name}(:2)?: JSON that cannot be read: (Exceeds the limit|maximum recur)"):
        read_records(tmp_path / name)


@pytest.mark.parametrize("text", [DEEP.decode(), "[" + HUGE.decode() + "]"], ids=["depth", "digits"])
def test_a_text_that_looks_like_json_and_cannot_be_read_has_no_fields(text: str) -> None:
    with pytest.raises(DataError, match=r"a:1: no field 'info\.0'.*field 'info' is a string"):
        Record({"info": text}, "a:1").text("info.0")


UNION = [  # as a table has it: {"a": 1, "b": null}
    {"tests": [{"args": [1], "kwargs": {"a": 1}, "output": 2}, {"args": [2], "kwargs": {"b": [None, 3]}, "output": 3}]},
    {"tests": [{"args": [], "kwargs": {}, "output": 4}]},
]


def test_nulls_with_which_a_table_pads_objects_are_left_out(tmp_path: Path) -> None:
    assert table_of(tmp_path, {"tests": [row["tests"] for row in UNION]}) == UNION
    assert table_of(tmp_path, {"tests": [UNION[0]["tests"], None]})[1] == {"tests": None}  # a field of the row
    write_records(tmp_path / "written.parquet", UNION)
    assert [record.fields for record in read_records(tmp_path / "written.parquet")] == UNION


def test_nulls_of_objects_with_the_same_keys_come_back_and_a_mixture_is_refused(tmp_path: Path) -> None:
    rows = [{"schema": {"const": None, "type": "null"}}, {"schema": {"const": 1, "type": "integer"}}]
    write_records(tmp_path / "same.parquet", rows)
    assert [record.fields for record in read_records(tmp_path / "same.parquet")] == rows
    with pytest.raises(DataError, match=r"field 'schema': \{\"const\": null\} would be read as \{\}; legal: \.jsonl"):
        write_records(tmp_path / "mixed.parquet", [{"schema": {"const": None}}, {"schema": {"minimum": 1}}])


NARROW = pyarrow.float32()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pyarrow.struct({"x": NARROW, "y": pyarrow.string()}), {"x": 0.1, "y": "a"}),
        (pyarrow.list_(NARROW), [0.1, None, 0.7]),
        (pyarrow.list_(NARROW, 2), [0.1, 0.7]),
        (pyarrow.large_list(pyarrow.struct({"x": pyarrow.list_(NARROW)})), [{"x": [0.1]}, None]),
        (pyarrow.map_(pyarrow.string(), NARROW), [("x", 0.1)]),
        (pyarrow.float16(), 0.1),
        (pyarrow.float64(), 0.10000000149011612),
    ],
    ids=str,
)
def test_narrow_numbers_are_as_written_wherever_they_are(tmp_path: Path, kind: Any, value: Any) -> None:
    if pyarrow.types.is_float16(kind):
        import numpy

        column = pyarrow.array(numpy.array([value], numpy.float16))
    else:
        column = pyarrow.array([value], kind)
    assert table_of(tmp_path, {"answer": column}) == [{"answer": value}]


def test_a_name_with_two_dashes_is_no_place_in_a_list() -> None:
    with pytest.raises(DataError, match=r"no field 'a\.--1'.* is a list of 1"):
        Record({"a": [1]}, "a:1").text("a.--1")


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pyarrow.array([1], pyarrow.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
        (pyarrow.array([1], pyarrow.duration("ns")), "1"),
    ],
    ids=["time", "duration"],
)
def test_times_between_microseconds_are_texts_and_keep_nobody_from_the_other_columns(
    tmp_path: Path, column: Any, text: str
) -> None:
    assert table_of(tmp_path, {"question": ["a"], "when": column}) == [{"question": "a", "when": text}]


def test_a_date_beyond_the_calendar_names_its_column(tmp_path: Path) -> None:
    dates = pyarrow.array([2**30], pyarrow.date32())
    with pytest.raises(DataError, match=r"train\.parquet: column 'when', of type date32.*, cannot be read: "):
        table_of(tmp_path, {"question": ["a"], "when": dates})


def test_a_column_of_texts_that_are_none_is_named(tmp_path: Path) -> None:
    offsets, texts = pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, texts])
    with pytest.raises(DataError, match=r"train\.parquet: column 'question', of type string, cannot be read: .*utf-8"):
        table_of(tmp_path, {"question": broken})


def test_two_columns_of_a_name_are_refused_in_every_table(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["question", "question"])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet: two columns are called 'question'"):
        read_records(tmp_path)


def test_decimals_of_a_table_are_numbers(tmp_path: Path) -> None:
    (fields,) = table_of(tmp_path, {"answer": pyarrow.array([Decimal("3.50")], pyarrow.decimal128(10, 2))})
    record = Record(fields, "train.parquet:1")
    assert (record.reference("answer"), record.number("answer", "curriculum.difficulty_field")) == ("3.50", 3.5)


def test_a_call_has_no_arguments_that_calls_of_other_tools_have_though_a_table_has_a_column_for_each(
    tmp_path: Path,
) -> None:
    def conversation(name: str, **arguments: str) -> list[dict[str, Any]]:
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        asked, answered = {"role": "user", "content": "2?"}, {"role": "tool", "content": "2"}
        return [asked, {"role": "assistant", "content": "", "tool_calls": calls}, answered]

    said = [conversation("search", query="two"), conversation("python", code="2")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"m": each} for each in said]), tmp_path / "train.parquet")
    read = [record.fields["m"] for record in read_records(tmp_path)]
    assert [prompt_messages(each, "a:1", "m", "") for each in read] == said


@pytest.mark.parametrize("text", ['[\n  {"role": "user", "content": "2?"}\n]', ' [ {"role": "user", "content": "2?"}]'])
def test_messages_as_json_may_be_laid_out(text: str) -> None:
    assert as_conversation(text) == [{"role": "user", "content": "2?"}]


def test_text_that_is_no_list_of_messages_stays_text() -> None:
    for text in ("[{", "[{]", '[{"roll": 1}]', "[1]", "[{" + "[" * 100_000, '[{"role": ' + "1" * 5000 + "}]"):
        assert as_conversation(text) == text


def test_what_is_written_is_read_back_though_utf8_has_no_half_characters(tmp_path: Path) -> None:
    rows = [{"question": "\ud800", "note": "é"}, {"question": "é"}]
    write_records(tmp_path / "a.jsonl", rows)
    assert [record.fields for record in read_records(tmp_path / "a.jsonl")] == rows


@pytest.mark.parametrize("number", [2**63, 2**70])
def test_a_number_too_large_for_a_column_is_refused_with_the_file(tmp_path: Path, number: int) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: a column of Parquet .* too (large|big).*legal: \.jsonl"):
        write_records(tmp_path / "a.parquet", [{"answer": number}])


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32()])
def test_a_number_of_few_bits_is_the_one_that_was_written(tmp_path: Path, kind: Any) -> None:
    """As 0.10000000149011612 no answer of 0.1 would equal it."""
    column = pyarrow.array([0.1, None, 3.5, float("inf"), 1e-7], pyarrow.float32()).cast(kind)
    first, second, *others, _ = table_of(tmp_path, {"answer": column})
    assert (first["answer"], second["answer"]) == (0.1, None)
    assert [fields["answer"] for fields in others] == [3.5, float("inf")]


def test_a_decimal_is_spelled_alike_as_a_field_and_in_a_whole_record(tmp_path: Path) -> None:
    (fields,) = table_of(tmp_path, {"answer": pyarrow.array([Decimal("0.00000001")], pyarrow.decimal128(10, 8))})
    record = Record(fields, "a:1")
    assert record.reference("answer") == "0.00000001"
    assert record.reference("*") == '{"answer": "0.00000001"}'
