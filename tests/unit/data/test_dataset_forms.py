"""Datasets in the forms that people have: the same records, whatever file they come from."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from checkpoints import sums, write_jsonl

from rlhpc.data.files import dataset_files
from rlhpc.data.record_source import read_records
from rlhpc.protocol.errors import DataError

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
    ".jsonl": as_lines,
    ".ndjson": as_lines,
    ".json": as_array,
    ".csv": separated(","),
    ".tsv": separated("\t"),
    ".parquet": as_parquet,
    ".arrow": as_stream,
}
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
        ("a.json", b'[{"question": 1},\n 2]', r"a\.json:2: item 2 of the array is a int"),
        ("a.json", b'[{"question": 1},\n {"question" 2}]', r"a\.json:2: malformed JSON: .* column 14"),
        ("a.json", b'{"question": 1}\n{"question" 2}', r"a\.json:2: malformed JSON: .* column 13"),
        ("a.json", b"3", r"the document is a int; legal: an array of objects"),
        ("a.csv", b"question,answer\n1,2\n3\n", r"a\.csv:3: 1 values; the first line names 2 columns"),
        ("a.csv", b"question,answer\n1,2,3\n", r"a\.csv:2: 3 values"),
        ("a.csv", b"question,question\n1,2\n", r"a\.csv:1: column 2 is called 'question'"),
        ("a.csv", b"question,answer\n1,2\n3,\xff\n", r"a\.csv: not UTF-8 after line"),
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
