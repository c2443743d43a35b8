"""Datasets: files, forms, records, fields, lengths, references."""

from __future__ import annotations

import gzip
import io
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.unit.launch.bad_inputs.desk import RECORDS, Desk, both, case, data_file, key, records

GOOD = '{"prompt": "1+1=", "answer": "2"}'


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


VERL = _parquet(
    [{"data_source": "gsm8k", "prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}]
)


def _directory(*names: str) -> Any:
    def spoil(desk: Desk) -> None:
        (desk.root / "set").mkdir()
        for name in names:
            desk.write_records(RECORDS, f"set/{name}")
        desk.settings["data"]["path"] = "set"

    return spoil


def _two(**second: Any) -> Any:
    def spoil(desk: Desk) -> None:
        first = desk.settings["data"]
        desk.settings["data"] = [first, first | second]

    return spoil


FILES = (
    case("no such file", key("data.path", "trian.jsonl"), "data.path=", "trian.jsonl does not exist", "did you mean train.jsonl?"),
    case("a pattern of files", key("data.path", "train*.jsonl"), "train*.jsonl does not exist", "patterns and lists are not expanded; legal", "[[data]]"),
    case("braces of a shell", key("data.path", "{train,more}.jsonl"), "patterns and lists are not expanded; legal"),
    case("two files in one text", key("data.path", "train.jsonl,more.jsonl"), "patterns and lists are not expanded; legal"),
    case("an indented document called JSON lines", data_file("train.jsonl", '{\n  "prompt": "1+1=",\n  "answer": "2"\n}\n'), "train.jsonl:1", "one record a line", "named .json"),
    case("an array over several lines called JSON lines", data_file("train.jsonl", '[\n' + GOOD + ',\n' + GOOD + '\n]\n'), "train.jsonl:1", "one record a line", "named .json"),
    case("an array on a line called JSON lines", data_file("train.jsonl", f"[{GOOD}, {GOOD}]\n"), "train.jsonl:1", "a list", "a file named .json"),
    case("indented records one after the other", data_file("train.json", '{\n  "prompt": "1+1=",\n  "answer": "2"\n}\n' * 2), "train.json:1", "one record a line"),
    case("a comma behind each line", data_file("train.jsonl", f"{GOOD},\n{GOOD}\n"), "train.jsonl:1", "with nothing behind it"),
    case("a comment in JSON lines", data_file("train.jsonl", f"// sums\n{GOOD}\n"), "train.jsonl:1", "JSON has no comments"),
    case("a form that is not known", data_file("train.txt", "1+1=2"), "train.txt", "legal: a file of .jsonl"),
    case("an Excel sheet", data_file("train.xlsx", b"PK\x03\x04"), "train.xlsx", "legal: a file of .jsonl"),
    case("an empty file", records(), "train.jsonl", "has no records"),
    case("blank lines", data_file("train.jsonl", "\n  \n\n"), "train.jsonl", "has no records"),
    case("a directory with nothing", _directory(), "set holds no file of .jsonl"),
    case("a directory with training and validation", _directory("train.jsonl", "validation.jsonl"), "set has the splits train, validation", "data.split"),
    case("a split that is not there", both(_directory("train.jsonl", "test.jsonl"), key("data.split", "validation")), "data.split='validation'", "test, train"),
    case("a split of one file", key("data.split", "train"), "data.split='train'", "legal: leave it out"),
    case("the name of gz without its content", data_file("train.jsonl.gz", GOOD), "train.jsonl.gz", "gzip"),
    case("a gz that is cut off", data_file("train.jsonl.gz", gzip.compress(GOOD.encode() * 999)[:-20]), "train.jsonl.gz", "damaged"),
    case("a zst that is none", data_file("train.jsonl.zst", GOOD), "train.jsonl.zst"),
    case("a Parquet that is cut off", data_file("train.parquet", VERL[:-30]), "train.parquet", "Parquet"),
    case("JSON lines called Parquet", data_file("train.parquet", GOOD), "train.parquet", "Parquet"),
    case("a Parquet without rows", data_file("train.parquet", _parquet([])), "train.parquet", "has no records"),
    case("an Arrow that is none", data_file("train.arrow", b"ARROW1" * 9), "train.arrow", "Arrow"),
    case("a pointer of Git LFS", data_file("train.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n"), "train.parquet", "Git LFS"),
    case("JSON lines that are not UTF-8", data_file("train.jsonl", GOOD.replace("1+1=", "é").encode("latin-1")), "train.jsonl:1", "not UTF-8"),
    case("UTF-16", data_file("train.jsonl", GOOD.encode("utf-16")), "train.jsonl:1", "not UTF-8"),
    case("a JSON document that is a number", data_file("train.json", "42"), "train.json", "legal: an array of objects"),
    case("a JSON array of texts", data_file("train.json", '["1+1="]'), "train.json:1", "legal: an object"),
    case("CSV with semicolons", data_file("train.csv", "prompt;answer\n1+1=;2\n"), "train.csv:1", "semicolons", "legal: commas"),
    case("CSV without a header", data_file("train.csv", "1+1=,2\n1+2=,3\n"), "train.csv:2", "no field", "'1+1=', '2'"),
    case("CSV with a comma that is not quoted", data_file("train.csv", "prompt,answer\n1+1=,2\nadd 1, 2,3\n"), "train.csv:3", "3 values", "2 columns"),
    case("CSV with a quote that is not closed", data_file("train.csv", 'prompt,answer\n"1+1=,2\n'), "train.csv", "malformed"),
    case("CSV with one name twice", data_file("train.csv", "prompt,prompt\na,b\n"), "train.csv:1", "'prompt'", "legal: a name of its own"),
    case("CSV with pandas' index", data_file("train.csv", ",prompt,answer\n0,1+1=,2\n"), "train.csv:1", "index=False", "legal: a name"),
    case("CSV with an empty answer", data_file("train.csv", "prompt,answer\n1+1=,\n"), "train.csv:2", "answer", "legal"),
    case("two datasets of one name", _two(), "data.0 and data.1", "'train'", "another name"),
)  # fmt: skip

LINES = (
    case("a blank prompt", records(GOOD, '{"prompt": " ", "answer": "3"}'), "train.jsonl:2", "field 'prompt'", "is empty"),
    case("a line that is cut off", records(GOOD, '{"prompt": "1+2=", "answer": "3"'), "train.jsonl:2", "malformed JSON", "column"),
    case("single quotes", records(GOOD, "{'prompt': '1+2=', 'answer': '3'}"), "train.jsonl:2", "malformed JSON", "column 2"),
    case("an array", records(GOOD, "[1, 2]"), "train.jsonl:2", "a list", "legal: an object"),
    case("two records on a line", records(GOOD, GOOD + GOOD), "train.jsonl:2", "malformed JSON"),
    case("a line without the answer", records(GOOD, '{"prompt": "1+2="}'), "train.jsonl:2", "no field 'answer'", "data.reference_field"),
    case("a null", records('{"prompt": "1+1=", "answer": null}'), "train.jsonl:1", "'answer' is null", "legal"),
    case("a prompt that is a list", records('{"prompt": ["1+1="], "answer": "2"}'), "train.jsonl:1", "'prompt' is a list", "legal"),
    case("an empty prompt", records('{"prompt": "", "answer": "2"}'), "train.jsonl:1", "is empty"),
    case("half of a character", records('{"prompt": "\\ud800", "answer": "2"}'), "train.jsonl:1", "surrogate"),
    case("a NUL byte in a line", data_file("train.jsonl", GOOD + "\n" + "\x00" * 20 + "\n"), "train.jsonl:2", "NUL"),
    case("a prompt that is too long", records(GOOD, '{"prompt": "1000+1000+1000=", "answer": "3000"}'), "train.jsonl:2", "15 tokens", "legal: 1 to generation.max_prompt_tokens=12"),
    case("a column of another name", records('{"question": "1+1=", "answer": "2"}'), "train.jsonl:1", "no field 'prompt'", "'question', 'answer'"),
    case("the answer has another name", key("data.reference_field", "solution"), "no field 'solution'", "'prompt', 'answer'"),
    case("a nested key that is not there", data_file("train.parquet", VERL, prompt_field="prompt", reference_field="reward_model.answer"), "train.parquet:1", "'reward_model.answer'", "'ground_truth'"),
    case("a nested key into a text", key("data.reference_field", "answer.value"), "train.jsonl:1", "'answer.value'", "a string"),
    case("a template that names no field", key("data.prompt_template", "Add!"), "data.prompt_template='Add!'", "names no field"),
    case("a template with another field", key("data.prompt_template", "{question}"), "train.jsonl:1", "no field 'question'"),
    case("a template with a lone brace", key("data.prompt_template", "Give {prompt} as {"), "data.prompt_template=", "brace"),
    case("a template with a place without a name", key("data.prompt_template", "Add {}"), "data.prompt_template='Add {}'", "name"),
    case("chat messages where text is meant", data_file("train.parquet", VERL, reference_field="reward_model.ground_truth"), "train.parquet:1", "'prompt' is a list", "data.prompt_field"),
    case("chat messages of a strange role", records({"prompt": [{"role": "human", "content": "1+1="}], "answer": "2"}, prompt_field="prompt"), "train.jsonl:1", "'human'", "user"),
    case("chat messages of ShareGPT's words", records({"prompt": [{"from": "human", "value": "1+1="}], "answer": "2"}, prompt_field="prompt"), "train.jsonl:1", "role"),
    case("a field of tasks that nobody has", key("data.task_field", "source", data__tasks={"a": "math_answer"}), "data.task_field='source'", "'prompt', 'answer'"),
    case("a value of no task", records('{"prompt": "1+1=", "answer": "2", "source": "b"}', task_field="source", tasks={"a": "integer_arithmetic"}), "train.jsonl:1", "'source' is 'b'", "'a'"),
    case("a difficulty that is a text", both(records('{"prompt": "1+1=", "answer": "2", "difficulty": "hard"}'), key("curriculum.stages", [0.5])), "train.jsonl:1", "'difficulty'", "legal: a number"),
    case("a source that is none", key("data.path", None, data__source="gym:sums"), "data.source", "'gym:sums'", "legal"),
    case("neither a file nor a source", key("data.path", None), "data.path is not set", "legal: one of them"),
)  # fmt: skip

REFERENCES = (
    case("no number", records('{"prompt": "1+1=", "answer": "no number here"}', task="math_answer"), "train.jsonl:1", "'answer'", "legal"),
    case("a word for a whole number", records('{"prompt": "1+1=", "answer": "two"}'), "train.jsonl:1", "'two'", "legal"),
    case("two letters for a choice", records('{"prompt": "A or B?", "answer": "AB"}', task="multiple_choice"), "train.jsonl:1", "legal: B, (B) or B."),
    case("a pattern that is none", records('{"prompt": "1+1=", "answer": "(2"}', task="regex"), "train.jsonl:1", "regular expression"),
    case("a schema that is none", records({"prompt": "1+1=", "answer": "{"}, task="json_schema"), "train.jsonl:1", "json_schema"),
    case("tests that are none", both(records({"prompt": "1+1=", "answer": "2"}, task="code_stdin"), key("sandbox.require", "none")), "train.jsonl:1", "code_stdin", is_tried=True),
    case("instructions that are unknown", records({"prompt": "1+1=", "answer": {"instruction_id_list": ["no:such"], "kwargs": [{}]}}, task="instruction_following"), "train.jsonl:1", "no:such"),
    case("an empty reference", records('{"prompt": "1+1=", "answer": ""}', task="exact_match"), "train.jsonl:1", "legal"),
)  # fmt: skip
