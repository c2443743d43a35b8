from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from checkpoints import sums, write_jsonl

from rlhpc.data.record_source import Record, read_records
from rlhpc.protocol.errors import DataError


def test_jsonl_records_keep_their_order_and_know_their_line(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", sums(3))
    records = read_records(path)
    assert [record.fields for record in records] == sums(3)
    assert records[2].source == f"{path}:3"


def test_empty_lines_and_a_byte_order_mark_are_skipped(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a"}\n\n   \n{"question": "b"}')
    assert [(r.fields["question"], r.source[-2:]) for r in read_records(path)] == [("a", ":1"), ("b", ":4")]


def test_parquet_gives_the_same_records_as_jsonl(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(sums(4)), tmp_path / "train.parquet")
    records = read_records(tmp_path / "train.parquet")
    assert [record.fields for record in records] == sums(4)
    assert records[3].source == f"{tmp_path / 'train.parquet'}:4"


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


def test_a_damaged_parquet_file_is_named(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"train\.parquet is not a readable Parquet file"):
        read_records(tmp_path / "train.parquet")


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


def test_fields_become_text_only_when_that_is_unambiguous():
    record = Record({"text": "a", "count": 3, "ratio": 0.5, "flag": True, "none": None, "list": [1]}, "train.jsonl:7")
    assert [record.text(name) for name in ("text", "count", "ratio")] == ["a", "3", "0.5"]
    for name, kind in (("flag", "a boolean"), ("none", "null"), ("list", "a list")):
        with pytest.raises(DataError, match=f"train.jsonl:7: field '{name}' is {kind}"):
            record.text(name)
    with pytest.raises(
        DataError, match=r"'missing', which data\.prompt_template names; the record has 'text', 'count'"
    ):
        record.text("missing")


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


def test_a_reference_may_be_a_structure():
    tests = {"inputs": [1, 2], "output": "ü"}
    record = Record({"tests": tests, "answer": "#### 4", "none": None}, "train.jsonl:1")
    assert json.loads(record.reference("tests")) == tests
    assert record.reference("answer") == "#### 4"
    with pytest.raises(DataError, match="is null"):
        record.reference("none")


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(DataError, match="surrogate"):
        Record({"question": "\ud800"}, "train.jsonl:1").text("question")
