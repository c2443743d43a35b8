"""`rlhpc data`: what it shows of a dataset, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from launch.cli import main
from rlhpc.config.tables import DataConfig
from rlhpc.data.record_source import read_records, records_of
from tests.unit.data.checkpoints import CHATML, make_tokenizer_files, write_jsonl

KEYS = ["--model", "model", "data.prompt_field=prompt", "data.reference_field=reward_model.ground_truth"]


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{n % 7}?" + "!" * (n % 7)}],
            "reward_model": {"ground_truth": str(n % 7) if n else None},
        }
        for n in range(count)
    ]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    make_tokenizer_files(tmp_path / "model", chat_template=CHATML)
    write_jsonl(tmp_path / "train.jsonl", rows(20))

    def lines(*words: str, status: int = 0) -> str:
        assert main(["data", *words]) == status
        captured = capsys.readouterr()
        return (captured.err if status else captured.out).replace(f"{tmp_path}/", "")

    return lines


def test_head_shows_fields_and_with_a_model_prompts(said) -> None:
    assert said("head", "train.jsonl", "-n", "1").splitlines() == [
        "train.jsonl:1",
        '  prompt        [{"role": "user", "content": "0?"}]',
        '  reward_model  {"ground_truth": null}',
        "20 records, 19 not shown",
    ]
    shown = said("head", "train.jsonl", *KEYS, "data.system_prompt=Add", "generation.max_prompt_tokens=50", "-n", "2")
    first, *second = shown.splitlines()
    assert first.startswith("train.jsonl:1: field 'reward_model.ground_truth' is null")
    assert second == [
        "train.jsonl:2  39 tokens of 50, chat template",
        "  | <bos><turn>system: Add</turn>",
        "  | <turn>user: 1?!</turn>",
        "  | <turn>assistant: ",
        "  reference  1",
        "20 records, 18 not shown",
    ]


@pytest.mark.parametrize("action", ["head", "stats"])
def test_the_name_of_a_field_commands_no_terminal(action: str, said, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "foreign.jsonl", [{"\x1b]0;title\x07": "\x1b[2J"}])
    shown = said(action, "foreign.jsonl")
    assert "\\x1b]0;title\\x07" in shown
    assert "\x1b" not in shown


def test_columns_of_a_table_stand_below_each_other_also_beside_wide_and_combined_letters(tmp_path, capsys) -> None:
    write_jsonl(tmp_path / "wide.jsonl", [{"\u554f\u984c": "a", "re\u0301ponse": "b", "x": "c"}])
    assert main(["data", "stats", str(tmp_path / "wide.jsonl")]) == 0
    _, _, _, wide, combined, narrow = capsys.readouterr().out.splitlines()
    assert wide.index("string") == narrow.index("string") - 2  # two letters take two columns each
    assert combined.index("string") == narrow.index("string") + 1


def test_half_of_a_surrogate_pair_comes_out_of_a_conversion_as_it_went_in(said, tmp_path: Path) -> None:
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800 é"}\n{"prompt": "é"}\n')
    said("convert", "half.jsonl", "out.jsonl")
    assert [each.fields["prompt"] for each in read_records(tmp_path / "out.jsonl")] == ["\ud800 é", "é"]


@pytest.mark.parametrize("answers", [[10**30], [1, 2.5]])  # 1 would become 1.0, which is another reference
def test_numbers_that_parquet_has_no_one_type_for_are_refused(said, answers: list[float], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "large.jsonl", [{"answer": answer} for answer in answers])
    assert "out.parquet: a column of Parquet has one type" in said("convert", "large.jsonl", "out.parquet", status=2)
    assert not (tmp_path / "out.parquet").exists()


def test_stats_count_records_fields_tokens_and_references(said) -> None:
    lines = said("stats", "train.jsonl", *KEYS, "generation.max_prompt_tokens=26").splitlines()
    assert lines[0] == "records     20; 12 the same as an earlier one"
    assert [line.split()[:5] for line in lines[3:5]] == [
        ["prompt", "a", "list", "100%", "35"],
        ["reward_model", "an", "object", "100%", "21"],
    ]
    assert lines[6:] == [
        "prompts     20, tokens: least 24, median 27, 95 % up to 30, most 30; 537 in all; 13 repeated",
        "too long    11 of more than 26 tokens",
        "references  95.0% of records; characters: least 1, mean 1, most 1",
        "no references in 1 records:",
        "            train.jsonl:1: field 'reward_model.ground_truth' is null, and data.reference_field names it; "
        "legal: a string or a number",
    ]


def test_convert_writes_the_same_records_in_another_form_and_overwrites_nothing(said, tmp_path: Path) -> None:
    said("convert", "train.jsonl", "out.parquet")
    assert [record.fields for record in read_records(tmp_path / "out.parquet")] == rows(20)
    said("convert", "out.parquet", "back.jsonl")
    assert [json.loads(line) for line in (tmp_path / "back.jsonl").read_text().splitlines()] == rows(20)
    assert "out.parquet exists" in said("convert", "train.jsonl", "out.parquet", status=2)


def test_convert_leaves_out_what_is_too_long_or_asked_before(said, tmp_path: Path) -> None:
    shown = said("convert", "train.jsonl", "out.jsonl", *KEYS, "--distinct", "--min-tokens", "25", "--max-tokens", "27")
    kept = [record.fields["prompt"][0]["content"] for record in read_records(tmp_path / "out.jsonl")]
    assert kept == ["1?!", "2?!!", "3?!!!"]
    assert shown.splitlines() == ["out.jsonl: 3 records", "left out: 17"]
    assert "none of 20 records" in said("convert", "train.jsonl", "no.jsonl", *KEYS, "--max-tokens", "1", status=2)
    assert not (tmp_path / "no.jsonl").exists()


def test_a_record_stays_on_its_side_when_others_are_added(said, tmp_path: Path) -> None:
    many = [{"prompt": f"question {n}"} for n in range(200)]
    write_jsonl(tmp_path / "few.jsonl", many[:100])
    write_jsonl(tmp_path / "many.jsonl", many[::-1])
    sides = []
    for name in ("few", "many"):
        said("convert", f"{name}.jsonl", f"parted-{name}", "--validation", "0.3")
        parts = {part: read_records(tmp_path / f"parted-{name}" / f"{part}.jsonl") for part in ("train", "validation")}
        sides.append({record.fields["prompt"]: part for part, found in parts.items() for record in found})
    assert (len(sides[0]), len(sides[1])) == (100, 200)
    assert sides[0].items() <= sides[1].items()
    assert 40 <= sum(side == "validation" for side in sides[1].values()) <= 80
    assert read_records(tmp_path / "parted-few", "validation")


def test_values_of_several_types_are_no_column(said, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "mixed.jsonl", [{"answer": 1}, {"answer": "one"}])
    assert "a column of Parquet has one type" in said("convert", "mixed.jsonl", "out.parquet", status=2)
    write_jsonl(tmp_path / "sparse.jsonl", [{"a": 1}, {"a": 2, "b": [1]}])
    said("convert", "sparse.jsonl", "sparse.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "sparse.parquet").to_pylist()[1] == {"a": 2, "b": [1]}


@pytest.mark.starts
def test_problems_of_a_source_are_written_to_evaluate_on(said, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    said("convert", "reasoning_gym:chain_sum", "held-out.jsonl", "data.source_seed=1", "data.size=4")
    made = records_of(DataConfig(source="reasoning_gym:chain_sum", size=4, source_seed=1))
    read = read_records(tmp_path / "held-out.jsonl")
    assert [record.reference("entry") for record in read] == [record.reference("entry") for record in made]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["stats", "train.jsonl", "--distinct"], "--distinct: for convert, and this is stats"),
        (["head", "train.jsonl", "out.jsonl"], "'out.jsonl': only convert has an OUT"),
        (["stats", "train.jsonl", "-n", "2"], "--records 2: for head"),
        (["convert", "train.jsonl"], "convert needs one OUT"),
        (["convert", "train.jsonl", "out.csv"], "out.csv: legal is a .jsonl or .parquet file"),
        (["convert", "train.jsonl", "out", "--validation", "1.5"], "--validation 1.5; legal: between 0 and 1"),
        (["convert", "train.jsonl", "out.jsonl", "--max-tokens", "5"], "of prompts, which need --model DIR"),
        (["head", "train.jsonl", "run.seed=1"], "'run.seed=1': not a setting of `rlhpc data`"),
        (["head", "train.jsonl", "data.prompt_field=x"], "showing prompts needs --model DIR"),
        (["head", "train.jsonl", "data.promptfield=x"], "did you mean prompt_field?"),
        (["head", "trian.jsonl"], "did you mean train.jsonl?"),
    ],
)
def test_what_makes_no_sense_is_refused(said, words: list[str], why: str) -> None:
    assert why in said(*words, status=2)
