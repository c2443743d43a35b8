"""Records of a dataset in whatever form people have it, and what is kept of them between commands."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from checkpoints import sums, write_jsonl

from rlhpc.data.files import dataset_files, write_records
from rlhpc.data.prompt_form import as_conversation, prompt_messages
from rlhpc.data.record_source import Record, cached, read_records
from rlhpc.protocol.errors import DataError

# ------------------------------------------------------------------------------------------------------------- records


def test_jsonl_records_keep_their_order_and_know_their_line(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", sums(3))
    records = read_records(path)
    assert [record.fields for record in records] == sums(3)
    assert records[2].source == f"{path}:3"


def test_empty_lines_and_a_byte_order_mark_are_skipped(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a"}\n\n   \n{"question": "b"}')
    assert [(r.fields["question"], r.source[-2:]) for r in read_records(path)] == [("a", ":1"), ("b", ":4")]


def test_a_directory_is_read_in_the_order_of_file_names(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", [{"question": "third"}])
    write_jsonl(tmp_path / "a.jsonl", [{"question": "first"}, {"question": "second"}])
    (tmp_path / "README.md").write_text("not data")
    assert [record.fields["question"] for record in read_records(tmp_path)] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"question": "a"', r"train\.jsonl:2: malformed JSON"),
        (b'["question"]', r"train\.jsonl:2: the line is a list"),
        (b"null", r"train\.jsonl:2: the line is null"),
        (b'{"question": "\xff"}', r"train\.jsonl:2: not UTF-8"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, why):
    (tmp_path / "train.jsonl").write_bytes(b'{"question": "ok"}\n' + line + b"\n")
    with pytest.raises(DataError, match=why):
        read_records(tmp_path / "train.jsonl")


def test_a_missing_path_says_what_exists_instead(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", sums(1))
    with pytest.raises(DataError, match=r"does not exist; .* holds train\.jsonl"):
        read_records(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"does not exist; .* holds train\.jsonl"):
        read_records(tmp_path / "no" / "such" / "train.jsonl")


def test_an_empty_dataset_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="has no records"):
        read_records(tmp_path / "train.jsonl")


def test_a_directory_without_datasets_says_what_it_holds(tmp_path):
    (tmp_path / "nested").mkdir()
    for index in range(12):
        (tmp_path / f"{index:02d}.txt").touch()
    with pytest.raises(DataError, match=r"no file of \.jsonl, .*; .* holds 00\.txt, .* and 3 more"):
        read_records(tmp_path)


def test_a_directory_of_configurations_of_a_hub_says_which_there_are(tmp_path):
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "train-00000-of-00001.jsonl", sums(1))
    (tmp_path / "notes").mkdir()
    legal = f"; legal: data.path={tmp_path}/main or {tmp_path}/socratic"
    for split in ("", "train"):
        with pytest.raises(DataError, match=re.escape(legal) + "$"):
            read_records(tmp_path, split)


def test_a_reference_of_verls_data_is_guessed():
    record = Record({"prompt": [], "reward_model": {"ground_truth": "7", "style": "rule"}}, "d:1")
    with pytest.raises(DataError, match=r"no field 'answer', .* \(did you mean reward_model\.ground_truth\?\)$"):
        record.reference("answer")
    with pytest.raises(DataError, match=r"'reward_model'$"):
        record.text("answer")


def test_fields_become_text_only_when_that_is_unambiguous_and_a_reference_may_be_a_structure() -> None:
    record = Record({"text": "a", "count": 3, "ratio": 0.5, "flag": True, "none": None, "list": [1]}, "train.jsonl:7")
    assert [record.text(name) for name in ("text", "count", "ratio")] == ["a", "3", "0.5"]
    for name, kind in (("flag", "a boolean"), ("none", "null"), ("list", "a list")):
        with pytest.raises(DataError, match=f"train.jsonl:7: field '{name}' is {kind}"):
            record.text(name)
    with pytest.raises(
        DataError, match=r"'missing', which data\.prompt_template names; the record has 'text', 'count'"
    ):
        record.text("missing")
    tests = {"inputs": [1, 2], "output": "ü"}
    record = Record({"tests": tests, "answer": "#### 4", "none": None}, "train.jsonl:1")
    assert json.loads(record.reference("tests")) == tests
    assert record.reference("answer") == "#### 4"
    with pytest.raises(DataError, match="is null"):
        record.reference("none")
    with pytest.raises(DataError, match="surrogate"):
        Record({"question": "\ud800"}, "train.jsonl:1").text("question")
    with pytest.raises(DataError, match=r"no field 'a\.--1'.* is a list of 1"):
        Record({"a": [1]}, "a:1").text("a.--1")


@pytest.mark.parametrize("line", ['{"answer": NaN}', '{"answer": Infinity}'])
def test_a_hole_in_a_column_of_numbers_is_no_reference(tmp_path, line):
    (tmp_path / "train.jsonl").write_text(line)
    (record,) = read_records(tmp_path)
    with pytest.raises(DataError, match=r"train\.jsonl:1: field 'answer' is a float (nan|inf), .* a number"):
        record.reference("answer")


@pytest.mark.parametrize(
    ("number", "text"), [(1e16, "10000000000000000"), (1e-5, "0.00001"), (-2.5, "-2.5"), (18.0, "18.0"), (-7, "-7")]
)
def test_numbers_have_no_exponent_which_mathematics_would_read_as_e(number, text):
    assert Record({"answer": number}, "train.jsonl:1").reference("answer") == text


# ------------------------------ Datasets in the forms that people have: the same records, whatever file they come from

ROWS = sums(5)


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_array(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps(rows, indent=2).encode()


def separated(delimiter: str) -> Callable[[list[dict[str, Any]]], bytes]:
    def written(rows: list[dict[str, Any]]) -> bytes:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode("utf-8-sig")  # as spreadsheets save it

    return written


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def as_stream(rows: list[dict[str, Any]]) -> bytes:
    table, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


WRITERS = {
    ".jsonl": as_lines, ".ndjson": as_lines, ".json": as_array, ".csv": separated(","), ".tsv": separated("\t"),
    ".parquet": as_parquet, ".arrow": as_stream,
}  # fmt: skip
COMPRESSORS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("form", WRITERS)
def test_a_dataset_has_the_same_records_in_every_form(tmp_path: Path, form: str, compression: str) -> None:
    file = tmp_path / f"train{form}{compression}"
    file.write_bytes(COMPRESSORS[compression](WRITERS[form](ROWS)))
    assert [record.fields for record in read_records(file)] == ROWS
    assert [record.fields for record in read_records(tmp_path)] == ROWS
    assert read_records(file)[0].source.startswith(f"{file}:")


def test_lines_and_an_array_inside_an_object_may_be_called_json(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_bytes(as_lines(ROWS))
    (tmp_path / "inside.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    (tmp_path / "one.json").write_text(json.dumps(ROWS[0]))
    for name, expected in (("lines", ROWS), ("inside", ROWS), ("one", ROWS[:1])):
        assert [record.fields for record in read_records(tmp_path / f"{name}.json")] == expected


def test_arrow_in_the_form_of_files_is_read_too(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(str(tmp_path / "train.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert [record.fields for record in read_records(tmp_path / "train.arrow")] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.json", b'[{"question": 1},\n 2]', r"a\.json:2: item 2 of the array is an integer"),
        ("a.json", b'[{"question": 1},\n {"question" 2}]', r"a\.json:2: malformed JSON: .* column 14"),
        ("a.json", b'{"question": 1}\n{"question" 2}', r"a\.json:2: malformed JSON: .* column 13"),
        ("a.json", b"3", r"the document is an integer; legal: an array of objects"),
        ("a.csv", b"question,answer\n1,2\n3\n", r"a\.csv:3: 1 value; the first line names 2 columns"),
        ("a.csv", b"question,answer\n1,2,3\n", r"a\.csv:2: 3 values"),
        ("a.csv", b"question,question\n1,2\n", r"a\.csv:1: column 2 is called 'question'"),
        ("a.csv", b"question,answer\n1,2\n3,\xff\n", r"a\.csv: after line 1: not UTF-8: .*iconv -f latin1 -t utf-8"),
        ("a.csv", "question,answer\n1,2\n".encode("utf-16"), r"a\.csv: after line 1: UTF-16; legal: UTF-8 \(iconv"),
        ("a.json", '[{"question": 1}]'.encode("utf-16"), r"a\.json: UTF-16; legal: UTF-8 \(iconv -f utf-16"),
        ("a.json", '[{"question": 1}]'.encode("utf-16-be"), r"a\.json: UTF-16"),
        ("a.jsonl", '{"question": 1}\n'.encode("utf-16"), r"a\.jsonl:1: UTF-16"),
        ("a.jsonl", '{"question": 1}\n'.encode("utf-16-le"), r"a\.jsonl:1: UTF-16"),
        ("a.jsonl", b'{"a": "b\n', r"a\.jsonl:1: malformed JSON: Unterminated string starting at column 7"),
        ("a.csv", b'question,answer\n1,"2\n', r"a\.csv:2: malformed"),
        (
            "a.csv",
            b"question;answer\n1;2\n",
            r"a\.csv:1: one column, 'question;answer'; .* by semicolons\? legal: commas",
        ),
        ("a.jsonl", b'{"a": 1}\r{"a": 2}\r', r"a\.jsonl: lines end in a carriage return alone; legal: a line feed"),
        ("a.json", b'{"a": 1}\r{"a": 2}\r', r"a\.json: lines end in a carriage return alone; legal: a line feed"),
        ("a.jsonl", b'{"a": 1}\n{"question"\n', r"a\.jsonl:2: malformed JSON: .* at column 12"),
        ("a.jsonl.gz", gzip.compress(as_lines(ROWS), mtime=0)[:-12], r"a\.jsonl\.gz is damaged"),
        ("a.jsonl.gz", as_lines(ROWS), r"a\.jsonl\.gz is damaged: Not a gzipped file"),
        ("a.jsonl.zst", as_lines(ROWS), r"a\.jsonl\.zst cannot be read"),
        ("a.arrow", b"ARROW not really", r"a\.arrow is not a readable Arrow file"),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), r"a\.parquet\.gz is not a readable Parquet file"),
        ("a.xlsx", b"", r"legal: a file of \.jsonl, .* or \.arrow \(plain, \.gz or \.zst\), or a directory"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=why):
        read_records(tmp_path / name)


def test_a_misspelt_file_is_guessed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"does not exist; .* holds train\.jsonl \(did you mean train\.jsonl\?\)"):
        read_records(tmp_path / "trian.jsonl")


# --------------------------------------------------------------------------------------------------------------- splits


def names(path: Path, split: str = "") -> list[str]:
    return [file.relative_to(path).as_posix() for file in dataset_files(path, split)]


def test_a_directory_with_several_splits_is_not_read_as_one(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation", "test_hard", "more"):
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS[:1])
    with pytest.raises(DataError, match=r"has the splits test, train, validation; data\.split says which"):
        read_records(tmp_path)
    assert names(tmp_path, "train") == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert names(tmp_path, "validation") == names(tmp_path, "dev") == ["validation.jsonl"]
    assert names(tmp_path, "test") == ["test_hard.jsonl"]
    assert len(names(tmp_path, "all")) == 5
    with pytest.raises(DataError, match=r"data\.split='trian': .* has the splits .* \(did you mean train\?\)"):
        read_records(tmp_path, "trian")


def test_names_that_only_begin_like_a_split_are_none(tmp_path: Path) -> None:
    for name in ("trainees", "tests2", "a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS[:1])
    assert len(names(tmp_path)) == 4
    with pytest.raises(DataError, match=r"has no files named after a split"):
        read_records(tmp_path, "train")


def test_a_split_beside_files_of_none_is_not_read_with_them(tmp_path: Path) -> None:
    for name in ("train", "test500", "aime24"):
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS[:1])
    with pytest.raises(DataError, match=r"has the splits train, and files of none; data\.split says which"):
        read_records(tmp_path)
    assert names(tmp_path, "train") == ["train.jsonl"]
    assert len(names(tmp_path, "all")) == 3


def test_shards_are_of_the_split_that_their_whole_name_says(tmp_path: Path) -> None:
    for name in ("train_sft", "train_prefs", "test_sft", "aime24"):
        write_jsonl(tmp_path / f"{name}-00000-of-00001.jsonl", ROWS[:1])
    with pytest.raises(DataError, match="has the splits aime24, test_sft, train_prefs, train_sft"):
        read_records(tmp_path)
    with pytest.raises(DataError, match=r"data\.split='train': .* has the splits aime24"):
        read_records(tmp_path, "train")
    assert names(tmp_path, "train_sft") == ["train_sft-00000-of-00001.jsonl"]
    assert names(tmp_path, "aime24") == ["aime24-00000-of-00001.jsonl"]


def test_every_directory_of_a_split_is_read(tmp_path: Path) -> None:
    for name in ("train_easy", "train_hard", "test"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "0.jsonl", ROWS[:1])
    assert names(tmp_path, "train") == ["train_easy/0.jsonl", "train_hard/0.jsonl"]


def test_a_description_beside_the_directory_of_the_data_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train-00000-of-00001.jsonl", ROWS)
    (tmp_path / "dataset_infos.json").write_text('{"default": {"features": {}}}')
    assert names(tmp_path, "train") == ["data/train-00000-of-00001.jsonl"]


def test_splits_may_be_directories_or_lie_in_data(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "hub" / "data" / split).mkdir(parents=True)
        write_jsonl(tmp_path / "hub" / "data" / split / "0.jsonl", ROWS)
    (tmp_path / "hub" / "README.md").write_text("a card")
    assert names(tmp_path / "hub", "test") == ["data/test/0.jsonl"]
    with pytest.raises(DataError, match="has the splits test, train"):
        read_records(tmp_path / "hub")


def test_descriptions_and_hidden_files_beside_data_are_no_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "._train.jsonl").write_bytes(b"\0\5\26\7")
    assert names(tmp_path) == ["train.jsonl"]


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"data\.split='test': .* is one file"):
        read_records(file, "test")


def save_to_disk(directory: Path, rows: list[dict[str, Any]]) -> None:
    """What Dataset.save_to_disk of `datasets` 5.2 writes."""
    directory.mkdir(parents=True)
    for shard, part in enumerate((rows[:2], rows[2:])):
        (directory / f"data-0000{shard}-of-00002.arrow").write_bytes(as_stream(part))
    state = {
        "_data_files": [{"filename": f"data-0000{shard}-of-00002.arrow"} for shard in (0, 1)],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text(json.dumps({"citation": "", "description": "", "features": {}}))


def test_what_datasets_saved_is_read_without_that_library(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "one", ROWS)
    assert [record.fields for record in read_records(tmp_path / "one")] == ROWS
    save_to_disk(tmp_path / "both" / "train", ROWS)
    save_to_disk(tmp_path / "both" / "held_out", ROWS[:2])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "held_out"]}')
    with pytest.raises(DataError, match="has the splits train, held_out"):
        read_records(tmp_path / "both")
    assert [record.fields for record in read_records(tmp_path / "both", "held_out")] == ROWS[:2]
    assert len(read_records(tmp_path / "both", "all")) == 7


def test_a_damaged_saved_dataset_is_named(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "one", ROWS)
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json names data-00001-of-00002\.arrow, which does not exist"):
        read_records(tmp_path / "one")
    state = {"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}
    (tmp_path / "one" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="flatten_indices"):
        read_records(tmp_path / "one")


# -------------------------------------------------------------- Values that a file may hold and Python has no place for

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
    reason = "lists and objects within one another" if value is DEEP else "an integer of more than 4,300 digits; legal"
    with pytest.raises(DataError, match=rf"{name}(:[12])?: {reason}"):
        read_records(tmp_path / name)


def test_the_line_of_an_integer_of_too_many_digits_is_told_and_not_that_of_a_text_of_digits(tmp_path: Path) -> None:
    text = b'{"records": [\n{"a": "%b\\"%b"},\n\n{"a": -%b}]}' % (HUGE, HUGE, HUGE)
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(DataError, match=r"a\.json:4: an integer"):
        read_records(tmp_path / "a.json")


@pytest.mark.parametrize("value", [10**400, -(10**400), Decimal(10) ** 400], ids=["integer", "negative", "decimal"])
def test_a_number_beyond_floats_is_text_and_no_difficulty(value: Any) -> None:
    record = Record({"answer": value}, "a:1")
    assert record.text("answer") == record.reference("answer") == str(int(value))
    with pytest.raises(
        DataError, match=r"a:1: field 'answer', which k names, is .*; legal: a number within ±1\.8e\+308"
    ):
        record.number("answer", "k")


@pytest.mark.parametrize("value", [math.nan, -math.inf, Decimal("NaN"), Decimal("Infinity"), True])
def test_what_is_no_finite_number_is_neither(value: Any) -> None:
    record = Record({"answer": value}, "a:1")
    with pytest.raises(DataError, match="legal: a string or a number"):
        record.text("answer")
    with pytest.raises(DataError, match=r"legal: a number$"):
        record.number("answer", "k")


def test_of_several_arrays_of_records_in_a_document_none_is_chosen(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"version": 1, "train": [{"a": 1}], "test": [{"a": 2}], "names": ["x"]}')
    with pytest.raises(DataError, match=r"a\.json: holds 2 arrays of objects, 'train', 'test'; legal: one"):
        read_records(file)
    for record in ({"messages": [{"role": "user"}], "tools": [{"name": "x"}]}, {"a": [1], "b": [{"c": 1}], "d": []}):
        file.write_text(json.dumps(record))
        assert [each.fields for each in read_records(file)] == [record]


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


def test_a_column_that_cannot_be_read_and_two_of_a_name_are_named(tmp_path: Path) -> None:
    dates = pyarrow.array([2**30], pyarrow.date32())
    with pytest.raises(DataError, match=r"train\.parquet: column 'when', of type date32.*, cannot be read: "):
        table_of(tmp_path, {"question": ["a"], "when": dates})
    offsets, texts = pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, texts])
    with pytest.raises(DataError, match=r"train\.parquet: column 'question', of type string, cannot be read: .*utf-8"):
        table_of(tmp_path, {"question": broken})
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["question", "question"])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet: two columns are called 'question'"):
        read_records(tmp_path)


def test_a_decimal_of_a_table_is_a_number_spelled_alike_as_a_field_and_in_a_whole_record(tmp_path: Path) -> None:
    (fields,) = table_of(tmp_path, {"answer": pyarrow.array([Decimal("3.50")], pyarrow.decimal128(10, 2))})
    record = Record(fields, "train.parquet:1")
    assert (record.reference("answer"), record.number("answer", "curriculum.difficulty_field")) == ("3.50", 3.5)
    (fields,) = table_of(tmp_path, {"answer": pyarrow.array([Decimal("0.00000001")], pyarrow.decimal128(10, 8))})
    record = Record(fields, "a:1")
    assert record.reference("answer") == "0.00000001"
    assert record.reference("*") == '{"answer": "0.00000001"}'


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


# --------------------------------------------------------------------------------------- What is kept between commands


def test_work_is_done_once_for_what_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path))
    made: list[str] = []

    def make() -> bytes:
        made.append("again")
        return b"result"

    for made_of in ("one", "one", "another"):
        assert cached("kind", made_of, make) == b"result"
    assert len(made) == 2
    assert len(list((tmp_path / "kind").iterdir())) == 2


def test_a_cache_that_cannot_be_written_keeps_nobody_from_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file, where a directory should be")
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path / "cache"))
    assert cached("kind", "one", lambda: b"result") == b"result"


def test_it_lies_where_the_system_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHPC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached("kind", "one", lambda: b"result")
    assert list((tmp_path / "rlhpc" / "kind").iterdir())


def test_what_is_of_no_use_any_more_is_made_again_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path))
    assert cached("kind", "one", lambda: b"") == b""
    assert cached("kind", "one", lambda: b"whole", is_whole=bool) == b"whole"
    assert cached("kind", "one", lambda: b"other", is_whole=bool) == b"whole"
