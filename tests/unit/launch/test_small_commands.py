"""`rlhpc data`, `reward`, `recipes`, `completion`, and what an installed package has."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from launch.cli import main
from launch.commands.arguments import command_parser, completion_script
from launch.commands.recipes import DIRECTORY, copy_recipe, known_recipes, num_gpus
from launch.common.text import quoted
from launch.plan.script import plan_report
from launch.plan.site_file import load_site
from rlhpc.base.ownership import Holder, SubmissionLock
from rlhpc.config.file import load_config
from rlhpc.config.tables import DataConfig
from rlhpc.data.record_source import read_records, records_of
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError, RunDirectoryError
from tests.full_disk import fill, small_disk
from tests.unit.data.checkpoints import CHATML, make_tokenizer_files, write_jsonl
from tests.unit.launch.public_models import head_of, part_of
from tests.unit.rewards.judge_server import judging

# --------------------------------------------------------- `rlhpc data`: what it shows of a dataset, and what it writes

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
def said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_tokenizer_files(tmp_path / "model", chat_template=CHATML)
    write_jsonl(tmp_path / "train.jsonl", rows(20))

    def lines(*words: str, status: int = 0) -> str:
        assert main(["data", *words]) == status
        captured = capsys.readouterr()
        return (captured.err if status else captured.out).replace(f"{tmp_path}/", "")

    return lines


def test_head_shows_fields_and_with_a_model_prompts(said):
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
def test_the_name_of_a_field_commands_no_terminal(action, said, tmp_path):
    write_jsonl(tmp_path / "foreign.jsonl", [{"\x1b]0;title\x07": "\x1b[2J"}])
    shown = said(action, "foreign.jsonl")
    assert "\\x1b]0;title\\x07" in shown
    assert "\x1b" not in shown


def test_columns_of_a_table_stand_below_each_other_also_beside_wide_and_combined_letters(tmp_path, capsys):
    write_jsonl(tmp_path / "wide.jsonl", [{"\u554f\u984c": "a", "re\u0301ponse": "b", "x": "c"}])
    assert main(["data", "stats", str(tmp_path / "wide.jsonl")]) == 0
    _, _, _, wide, combined, narrow = capsys.readouterr().out.splitlines()
    assert wide.index("string") == narrow.index("string") - 2  # two letters take two columns each
    assert combined.index("string") == narrow.index("string") + 1


def test_half_of_a_surrogate_pair_comes_out_of_a_conversion_as_it_went_in(said, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800 é"}\n{"prompt": "é"}\n')
    said("convert", "half.jsonl", "out.jsonl")
    assert [each.fields["prompt"] for each in read_records(tmp_path / "out.jsonl")] == ["\ud800 é", "é"]


@pytest.mark.parametrize("answers", [[10**30], [1, 2.5]])  # 1 would become 1.0, which is another reference
def test_numbers_that_parquet_has_no_one_type_for_are_refused(said, answers, tmp_path):
    write_jsonl(tmp_path / "large.jsonl", [{"answer": answer} for answer in answers])
    assert "out.parquet: a column of Parquet has one type" in said("convert", "large.jsonl", "out.parquet", status=2)
    assert not (tmp_path / "out.parquet").exists()


def test_stats_count_records_fields_tokens_and_references(said):
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


def test_convert_writes_the_same_records_in_another_form_and_overwrites_nothing(said, tmp_path):
    said("convert", "train.jsonl", "out.parquet")
    assert [record.fields for record in read_records(tmp_path / "out.parquet")] == rows(20)
    said("convert", "out.parquet", "back.jsonl")
    assert [json.loads(line) for line in (tmp_path / "back.jsonl").read_text().splitlines()] == rows(20)
    assert "out.parquet exists" in said("convert", "train.jsonl", "out.parquet", status=2)


def test_convert_leaves_out_what_is_too_long_or_asked_before(said, tmp_path):
    shown = said("convert", "train.jsonl", "out.jsonl", *KEYS, "--distinct", "--min-tokens", "25", "--max-tokens", "27")
    kept = [record.fields["prompt"][0]["content"] for record in read_records(tmp_path / "out.jsonl")]
    assert kept == ["1?!", "2?!!", "3?!!!"]
    assert shown.splitlines() == ["out.jsonl: 3 records", "left out: 17"]
    assert "none of 20 records" in said("convert", "train.jsonl", "no.jsonl", *KEYS, "--max-tokens", "1", status=2)
    assert not (tmp_path / "no.jsonl").exists()


FAULTY = [
    {"prompt": "a", "answer": "1"},
    {"prompt": "b", "reply": "2"},
    {"prompt": "c", "answer": "two"},
    {"prompt": "d" * 60, "answer": "4"},
    {"prompt": "e", "answer": "5"},
]
OF_FAULTY = ["--model", "model", "data.task=integer_arithmetic", "generation.max_prompt_tokens=40"]


def test_what_a_run_would_refuse_is_left_out_of_a_conversion_and_named(said, tmp_path):
    write_jsonl(tmp_path / "faulty.jsonl", FAULTY)
    shown = said("convert", "faulty.jsonl", "good.jsonl", *OF_FAULTY, "--valid").splitlines()
    assert [record.fields for record in read_records(tmp_path / "good.jsonl")] == [FAULTY[0], FAULTY[4]]
    assert shown[:3] == ["good.jsonl: 2 records", "left out: 3", "of these 3 that a run refuses:"]
    assert [line.strip().partition(": ")[0] for line in shown[3:]] == [f"faulty.jsonl:{n}" for n in (2, 3, 4)]
    assert "tokens, too many" in shown[5]
    none = ["data.reference_field=answers", "--valid"]
    assert "no field 'answers'" in said("convert", "faulty.jsonl", "no.jsonl", *OF_FAULTY, *none, status=2)


def test_stats_try_references_as_the_task_reads_them(said, tmp_path):
    write_jsonl(tmp_path / "faulty.jsonl", [*FAULTY, {"prompt": "f", "answer": "no idea"}])
    lines = said("stats", "faulty.jsonl", *OF_FAULTY).splitlines()
    references = next(place for place, line in enumerate(lines) if line.startswith("references"))
    assert lines[references].startswith("references  50.0% of records")
    assert lines[references + 1] == "no references in 1 records:"
    assert lines[references + 3] == "references that are refused in 2 records:"
    assert "faulty.jsonl:3: field 'answer' (data.reference_field), for data.task='integer_arithmetic'" in lines[-3]
    lines = said("stats", "faulty.jsonl", *OF_FAULTY, "data.task=math_answer").splitlines()
    assert "references that are doubtful in 2 records:" in lines
    assert "            faulty.jsonl:6: 'no idea' is words without a number" in lines


@pytest.fixture
def chats(said, tmp_path):
    """A run file of supervised fine-tuning, of which one record is faulty."""
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat}] * 3 + [{"messages": chat[:1]}])
    (tmp_path / "sft.toml").write_text(
        "[run]\nname = 'taught'\n[model]\npath = 'model'\n[[demonstrations]]\npath = 'chats.jsonl'\n"
        "[trainer]\ntoken_budget = 200\n"
    )
    return said


def test_demonstrations_of_a_run_file_are_shown_as_they_are_learnt(chats, tmp_path):
    lines = chats("head", "sft.toml", "-n", "1").splitlines()
    assert re.fullmatch(r"chats\.jsonl:1  (\d+) tokens of 200; 2 of them, in «», are learnt", lines[0])
    assert lines[1:] == ["  | <bos><turn>user: 1+1</turn>", "  | <turn>assistant: «2</turn>»", "4 records, 3 not shown"]
    lines = chats("stats", "sft.toml", "sft.max_tokens=20").splitlines()
    assert "no conversations in 1 records:" in lines
    assert next(line for line in lines if line.startswith("too long")).startswith(
        "too long    3 of more than 20 tokens"
    )
    assert lines[-1].startswith("learnt      6 tokens of ")
    assert "no field 'chat', which demonstrations.messages_field names" in chats(
        "head", "sft.toml", "demonstrations.messages_field=chat"
    )
    assert chats("convert", "sft.toml", "good.jsonl", "--valid").splitlines()[:2] == [
        "good.jsonl: 3 records", "left out: 1"
    ]  # fmt: skip
    assert "demonstrations are those of a run file" in chats("head", "chats.jsonl", "demonstrations.split=a", status=2)


def test_a_record_stays_on_its_side_when_others_are_added(said, tmp_path):
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


def test_values_of_several_types_are_no_column(said, tmp_path):
    write_jsonl(tmp_path / "mixed.jsonl", [{"answer": 1}, {"answer": "one"}])
    assert "a column of Parquet has one type" in said("convert", "mixed.jsonl", "out.parquet", status=2)
    write_jsonl(tmp_path / "sparse.jsonl", [{"a": 1}, {"a": 2, "b": [1]}])
    said("convert", "sparse.jsonl", "sparse.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "sparse.parquet").to_pylist()[1] == {"a": 2, "b": [1]}


@pytest.mark.starts
def test_problems_of_a_source_are_written_to_evaluate_on(said, tmp_path):
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
        (["head", "train.jsonl", "model.path=tiny"], "legal: data.…, generation.…; the model is --model DIR"),
        (["head", "train.jsonl", "data.prompt_field=x"], "showing prompts needs --model DIR"),
        (["head", "train.jsonl", "data.promptfield=x"], "did you mean prompt_field?"),
        (["head", "trian.jsonl"], "did you mean train.jsonl?"),
    ],
)
def test_what_makes_no_sense_is_refused(said, words, why):
    assert why in said(*words, status=2)


# ----------------------- `rlhpc reward`: what it prints of records that are right, wrong, or cannot be judged, and with

RECORDS = [
    {"completion": "1+1=2", "reference": 2},
    {"completion": "1+1=3", "reference": "2"},
    {"completion": "2", "reference": "two"},
]
OWN = """
import json, time

def shares(completion, reference):
    if completion == "hang":
        time.sleep(600)
    record = json.loads(reference)
    assert "completion" not in record
    return {"reward": 0.25, "is_correct": False, "length": len(completion), "wanted": record["n"]}
"""


@pytest.fixture
def file(tmp_path) -> Path:
    return write(tmp_path / "answers.jsonl", RECORDS)


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n\n".join(json.dumps(record) for record in records))  # with blank lines between
    return path


@pytest.mark.starts
def test_a_table_has_a_row_for_each_record_and_a_failed_verifier_is_no_reward(file, capsys):
    assert main(["reward", "integer_arithmetic", str(file)]) == 1
    head, *rows, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["LINE", "VERDICT", "REWARD", "PARTS", "DETAIL"]
    assert [" ".join(row.split()[:3]) for row in rows] == ["1 correct 1", "3 wrong 0", "5 verifier_error -"]
    assert "reference 'two' is not an integer" in rows[2]
    assert total == "3 judged: 1 correct, 1 wrong, 1 verifier_error, mean reward 0.5"
    write(file, RECORDS[:2])
    assert main(["reward", "integer_arithmetic", str(file)]) == 0, "all were judged, not all are right"
    assert "1 wrong, 0 verifier_error" in capsys.readouterr().out


@pytest.mark.starts
def test_a_service_that_a_run_starts_is_asked_at_a_url_here(tmp_path, capsys):
    file = write(tmp_path / "answers.jsonl", [{"completion": "4", "prompt": "2+2="}])
    words = ["reward", "reward_model", str(file), "--reference", "*"]
    assert main([*words, "service.name=scores", "service.kind=reward", "service.path=/models/scores"]) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert "'reward_model' asks service 'scores', which a run starts, and there is none here; legal: " in said
    assert main(words) == EXIT_CONFIG
    assert "reward_model.service=''; legal: a table [[service]] with kind='reward'" in capsys.readouterr().err
    with judging(b'{"data": [{"probs": [2.5]}]}') as server:
        where = f'service=[{{ name = "scores", kind = "reward", url = "{server.endpoint}", model = "m" }}]'
        assert main([*words, where, "reward_model.scale=2.0"]) == 0
    assert re.search(r"^1 +correct +5 +score 2\.5", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.starts
def test_a_terminal_obeys_nothing_of_what_is_judged(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_echo.py").write_text(
        "def echo(completion, reference):\n"
        "    return {'reward': 1.0, 'is_correct': True, 'answer': completion, completion: 1.0}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file = write(tmp_path / "hostile.jsonl", [{"completion": "\x9b2J\x1b[2J\u202e", "reference": "x"}])
    for words in ([], ["--json"]):
        assert main(["reward", "own_echo:echo", str(file), *words]) == 0
        said = capsys.readouterr().out
        assert "1" in said
        assert not {"\x9b", "\x1b", "\u202e"} & {*said}


@pytest.mark.starts
def test_an_own_function_judges_whole_records_from_standard_input(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_shares.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    lines = [json.dumps({"text": text, "n": n}) for n, text in enumerate(["abc", "hang", "abcd"])]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    fields = ["--completion", "text", "--reference", "*"]
    assert main(["reward", "own_shares:shares", *fields, "--json", "rewards.timeout_s=3"]) == 1
    first, hung, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["line"], first["verdict"], first["reward"]) == (1, "wrong", 0.25)
    assert first["parts"] == {"length": 3.0, "wanted": 0.0}
    assert (hung["verdict"], hung["reward"]) == ("verifier_error", None)
    assert "no answer within 3 s" in hung["detail"]
    assert (last["line"], last["parts"]["wanted"]) == (3, 2.0)


@pytest.mark.starts
def test_a_composite_is_judged_whose_parts_are_given_on_the_command_line(tmp_path, capsys):
    records = write(tmp_path / "both.jsonl", [{"completion": "#### 7", "solution": "7", "pattern": "[0-9]+"}])
    words = [
        'composite.both.tasks={answer = "math_answer", form = "regex"}',
        "composite.both.weights.form=0.5",
        "composite.both.correct=answer",
        'composite.both.fields={answer = "solution", form = "pattern"}',
    ]
    assert main(["reward", "both", str(records), "--reference", "*", "--json", *words]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["reward"], found["verdict"], found["parts"]) == (1.5, "correct", {"answer": 1.0, "form": 1.0})


@pytest.mark.starts
def test_what_cannot_be_used_is_refused_before_anything_is_judged(file, tmp_path, capsys):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "half.jsonl").write_text('{"completion": "a", "reference": "a"}\n{"completion"')
    sections = "legal: rewards.…, sandbox.…, instructions.…, math.…, text.…, composite.…, judge.…, "
    for typed, said in (
        ("arithmetic FILE", "is not a task; legal: code_functions"),
        ("no_such_module:f FILE", "there is no module 'no_such_module' here"),
        ("regex FILE --reference pattern", "answers.jsonl:1: no field 'pattern', which --reference names"),
        ("regex FILE --completion text", "answers.jsonl:1: no field 'text', which --completion names"),
        ("regex FILE trainer.token_budget=8", sections),
        ("regex FILE rewards.timeout_s=0", "rewards.timeout_s=0: legal: 0.01 or more"),
        ("regex FILE other.jsonl", "at most one file"),
        ("regex FILE --run none.toml", "none.toml: no such run file"),
        (
            f"regex {tmp_path}/empty.jsonl --reference r",
            "holds no record; legal: one JSON object per line, with fields 'completion' and 'r'",
        ),
        (f"regex {tmp_path}/none.jsonl", "none.jsonl cannot be read: No such file or directory"),
        (f"regex {tmp_path}/half.jsonl", "half.jsonl:2: malformed JSON"),
    ):
        assert main(["reward", *typed.replace("FILE", str(file)).split()]) == EXIT_CONFIG
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.out == ""


@pytest.mark.starts
def test_what_a_model_thinks_is_not_judged_where_the_run_file_says_so(tmp_path, capsys):
    records = [
        {"completion": "1+1=3? No.</think>\n\n2", "answer": "2"},
        {"completion": "2</think>3", "answer": "2"},
        {"completion": "2", "answer": "2"},  # it thought to the end
    ]
    file, run = write(tmp_path / "answers.jsonl", records), tmp_path / "run.toml"
    table = """
        run = {{ name = "test", num_steps = 1 }}
        model.path = "model"
        data = [{}]
        generation = {{ max_prompt_tokens = 8, max_completion_tokens = 8 }}
        admission = {{ groups_per_step = 1, group_size = 2 }}
        trainer.token_budget = 64
    """
    first = '{ path = "train.jsonl", task = "exact_match", thinking_end = "</think>" }'
    run.write_text(table.format(first))
    assert main(["reward", "exact_match", str(file), "--run", str(run), "--json"]) == 0
    assert [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()] == [
        "correct",
        "wrong",
        "wrong",
    ]
    run.write_text(table.format(first + ', { path = "other.jsonl", task = "exact_match" }'))
    assert main(["reward", "exact_match", str(file), "--run", str(run)]) == EXIT_CONFIG
    assert "data.thinking_end of the datasets that 'exact_match' judges is '' and '</think>'" in capsys.readouterr().err


@pytest.mark.starts
def test_a_run_file_gives_the_settings_and_the_field_of_the_reference(file, tmp_path, capsys):
    (tmp_path / "RUN.toml").write_text(
        '[run]\nname = "a"\nnum_steps = 1\n[model]\npath = "m"\n'
        '[[data]]\npath = "d.jsonl"\ntask = "regex"\nreference_field = "pattern"\n'
        '[[data]]\npath = "e.jsonl"\ntask = "integer_arithmetic"\nreference_field = "reference"\n'
        "[generation]\nmax_prompt_tokens = 1\nmax_completion_tokens = 1\n[admission]\ngroups_per_step = 1\n"
        "group_size = 2\n[trainer]\ntoken_budget = 8\n[rewards]\ntimeout_s = 9\nworkers_per_replica = 2\n"
    )
    assert main(["reward", "integer_arithmetic", str(file), "--run", str(tmp_path / "RUN.toml"), "--json"]) == 1
    assert [json.loads(line)["line"] for line in capsys.readouterr().out.splitlines()] == [1, 3, 5]
    assert main(["reward", "exact_match", str(file), "--run", str(tmp_path / "RUN.toml")]) == EXIT_CONFIG
    assert "--reference is missing: the datasets of the run file have 'pattern', 'reference'" in capsys.readouterr().err
    assert main(["reward", "regex", str(file), "--run", str(tmp_path / "RUN.toml")]) == EXIT_CONFIG
    assert "no field 'pattern', which --reference names" in capsys.readouterr().err


# ------------------ Recipes are listed, copied, and say in their heads where their numbers come from and what they need

ROOT = Path(__file__).parents[3]
SITE = ROOT / "slurm" / "sites" / "example.toml"
RECIPES = known_recipes()
GPUS_OF_A_NODE = 8
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@every_recipe
def test_a_head_says_what_it_reproduces_from_where_and_what_it_needs(recipe):
    head = head_of(recipe).splitlines()
    assert re.fullmatch(r"\S.{20,90}\.", head[0])
    for label in ("Source", "Hardware", "Memory", "Published"):
        assert part_of(recipe, label).endswith((".", ").")), label
    train, generate = num_gpus(load_config(recipe))
    config = load_config(recipe, ["run.directory=/shared/project/run"])
    assert f"{train + generate} GPUs" in plan_report(config, load_site(SITE)), "it can be planned"
    said = [int(number) for number in re.findall(r"\d+", part_of(recipe, "Hardware"))]
    if recipe.parent.name == "lora" and said[0] == 1:
        assert (train, generate) == (1, 1), "which share the card"
        return
    if recipe.stem == "gsm8k" or recipe.parent.name == "lora":
        assert (said[0], *said[2:4]) == (train + generate, train, generate)
        return
    nodes, gpus, _, *split = said
    assert (gpus, nodes * gpus, split[:2]) == (GPUS_OF_A_NODE, train + generate, [train, generate])
    source = part_of(recipe, "Source")
    assert re.search(r"github\.com/[\w-]+/[\w.-]+[ ,]", source)
    assert re.search(r" at [0-9a-f]{12}\b", source), "which commit?"
    assert re.search(r"\w+\.(sh|yaml)\b", source), "which file?"
    assert re.search(r"arXiv:\d{4}\.\d{5}", source)
    assert sum(line.startswith("  - ") for line in head) >= 3, "what is not as in the source?"


def test_the_list_has_a_line_for_every_file_the_smallest_first(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    files = {path.stem for name in ("lora", "recipes") for path in (DIRECTORY / name).glob("*.toml")}
    assert {line.split()[0] for line in lines} == {"gsm8k", *files}
    gpus = [sum(map(int, re.findall(r" (\d+) \+ (\d+) ", line)[0])) for line in lines]
    assert gpus == sorted(gpus)
    (dapo,) = (line for line in lines if line.startswith("dapo-32b "))
    assert "32 + 96" in dapo
    assert dapo.endswith(head_of(RECIPES["dapo-32b"]).splitlines()[0])
    assert max(map(len, lines)) <= 120


def test_a_copy_is_the_file_and_nothing_is_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "drgrpo-1.5b"]) == 0
    assert "drgrpo-1.5b.toml" in capsys.readouterr().out
    copy = tmp_path / "drgrpo-1.5b.toml"
    assert copy.read_bytes() == RECIPES["drgrpo-1.5b"].read_bytes()
    copy.write_text("mine")
    assert main(["recipes", "copy", "drgrpo-1.5b", str(tmp_path)]) == EXIT_CONFIG
    assert "exists already" in capsys.readouterr().err
    assert copy.read_text() == "mine"
    assert main(["recipes", "copy", "dapo32b"]) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert said.startswith("rlhpc: recipe 'dapo32b': unknown; legal: gsm8k, ")
    assert said.endswith("(did you mean dapo-32b?)\n")
    with pytest.raises(ConfigError, match="is not a directory"):
        copy_recipe("gsm8k", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.starts
def test_a_copy_that_did_not_fit_on_the_disk_stands_in_the_way_of_no_other(tmp_path):
    with small_disk(tmp_path, 64 << 10):
        fill(tmp_path / "filler", 0)
        with pytest.raises(OSError, match="No space left"):
            copy_recipe("gsm8k", tmp_path)
        (tmp_path / "filler").unlink()
        assert copy_recipe("gsm8k", tmp_path).read_bytes() == RECIPES["gsm8k"].read_bytes()


@pytest.mark.parametrize("name", ["pipelinerl-7b", "pipelinerl-32b"])
def test_what_gradients_are_compared_with_is_divided_as_the_loss_is(name):
    """Their loss is a sum over tokens, aggregation = "constant" divides it, and bound and epsilon with it."""
    config = load_config(RECIPES[name])
    assert config.algorithm.aggregation == "constant"
    longest = config.generation.max_completion_tokens
    assert config.trainer.max_grad_norm * longest == pytest.approx(0.3, rel=0.02)
    assert config.trainer.adam_eps * longest == pytest.approx(1e-8, rel=0.02)


# --------------------------- An installation has what a checkout has: code, pages, run files of the demo and of recipes

IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def image_sections() -> dict[str, list[str]]:
    """Lines of the Apptainer definition by section, without comments."""
    sections, lines = {}, list[str]()
    for line in (ROOT / "slurm" / "rlhpc.def").read_text(encoding="utf-8").splitlines():
        if line.startswith("%"):
            lines = sections.setdefault(line.strip("% "), [])
        elif line.strip() and not line.startswith("#"):
            lines.append(line.strip())
    return sections


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory) -> Path:
    """A wheel of the source, unpacked."""
    built = tmp_path_factory.mktemp("built")
    _pip("wheel", "--wheel-dir", built, source)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(built / "installed")
    return built / "installed"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What the Apptainer definition copies of the working tree."""
    source = tmp_path_factory.mktemp("source")
    for line in image_sections()["files"]:
        name, target = line.split()
        assert target == f"/opt/rlhpc/{name}"
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=IGNORED)
        else:
            shutil.copy(ROOT / name, source)
    return source


def _pip(command: str, *words: str | Path) -> None:
    how = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", command, *how, *words], check=True, capture_output=True, text=True)


def rlhpc(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "launch.cli", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.starts
def test_an_editable_install_is_a_path_that_editors_and_type_checkers_follow(source, tmp_path):
    _pip("install", "--target", tmp_path, "--editable", source)
    (path,) = tmp_path.glob("*.pth")  # beside it no __editable___rlhpc_finder.py, which they would not run
    assert path.read_text().strip() == str(source)
    assert not [*tmp_path.glob("*.py")]


@pytest.mark.starts
def test_no_file_of_the_packages_is_left_out(installed):
    files = {path.relative_to(ROOT) for folder in ("launch", "rlhpc") for path in (ROOT / folder).rglob("*.*")}
    files |= {
        Path("launch/configs") / path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.toml")
    }
    wanted = {path for path in files if path.suffix in (".py", ".pyi", ".html", ".typed", ".toml")}
    assert {str(path) for path in wanted if not (installed / path).is_file()} == set()


@pytest.mark.starts
def test_recipes_are_copied_and_the_demo_finds_its_run_file(installed, tmp_path):
    """A wrong key ends the demo before it begins: the message is of one who has read the file."""
    assert rlhpc(installed, tmp_path, "recipes", "copy", "gsm8k").returncode == 0
    assert (tmp_path / "gsm8k.toml").read_bytes() == (ROOT / "configs" / "gsm8k.toml").read_bytes()
    ended = rlhpc(installed, tmp_path, "demo", "run.nme=x")
    assert ended.returncode == EXIT_CONFIG
    assert "run.nme" in ended.stderr
    assert "no such run file" not in ended.stderr


@pytest.mark.starts
def test_the_apptainer_definition_installs_what_the_page_on_gpus_does():
    sections = image_sections()
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    (install,) = [
        line for line in page.splitlines() if line.startswith(".venv/bin/pip install") and line.endswith("'.[gpu]'")
    ]
    wanted = install.removeprefix(".venv/bin/pip install ")
    assert f"pip install --no-cache-dir {wanted}" in sections["post"]
    version = wanted.split("gpu-")[1].split(".txt")[0]
    assert f"From: python:{version}-" in (ROOT / "slurm" / "rlhpc.def").read_text(encoding="utf-8")
    for name in ("post", "environment", "runscript", "test"):
        subprocess.run(["sh", "-n"], input="\n".join(sections[name]), text=True, check=True)


# ------------------------------------ `rlhpc completion`: shells complete commands, options and paths, without a Python

NO_SHTAB = "no shtab here: pip install 'rlhpc[completion]'"
ASK = """
source {script}
COMP_WORDS=({words}) COMP_CWORD={place}
_shtab_rlhpc
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    pytest.importorskip("shtab", reason=NO_SHTAB)
    path = tmp_path_factory.mktemp("completion") / "rlhpc.bash"
    path.write_text(completion_script(command_parser(), "bash"))
    return path


def completed(script: Path, directory: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    ask = ASK.format(script=script, words=" ".join(map(shlex.quote, words)), place=len(words) - 1)
    command = [shutil.which("bash") or "bash", "--norc", "--noprofile", "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, check=True, env={"PATH": ""})
    assert not done.stderr  # nothing is on the path: a shell that completes starts no program
    return sorted(filter(None, done.stdout.splitlines()))


def commands() -> list[str]:
    parser = command_parser()
    (subparsers,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return sorted(subparsers.choices)


@pytest.mark.starts
def test_bash_completes_commands_options_values_and_paths(script, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "RUN.toml").touch()
    assert completed(script, tmp_path, "rlhpc", "st") == ["status", "stop"]
    assert [word for word in completed(script, tmp_path, "rlhpc", "") if not word.startswith("-")] == commands()
    assert completed(script, tmp_path, "rlhpc", "status", "--j") == ["--json"]
    assert completed(script, tmp_path, "rlhpc", "tensorboard", "--bi") == ["--bind-all"]
    assert completed(script, tmp_path, "rlhpc", "run", "R") == ["RUN.toml"]
    assert completed(script, tmp_path, "rlhpc", "status", "") == ["runs"]  # a run is a directory
    assert completed(script, tmp_path, "rlhpc", "submit", "RUN.toml", "R") == ["RUN.toml"]
    assert completed(script, tmp_path, "rlhpc", "report", "runs", "--html", "R") == ["RUN.toml"]
    assert completed(script, tmp_path, "rlhpc", "data", "s") == ["stats"]


@pytest.mark.starts
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(shell, tmp_path):
    pytest.importorskip("shtab", reason=NO_SHTAB)
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here: apt-get install {shell}")
    path = tmp_path / "script"
    path.write_text(completion_script(command_parser(), shell))
    subprocess.run([shell, "-n", str(path)], check=True)
    if shell == "fish":
        ask = f"source {path}; complete -C 'rlhpc st'"
        done = subprocess.run([shell, "--no-config", "-c", ask], check=True, capture_output=True, text=True)
        assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["status", "stop"]


def test_without_the_library_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == EXIT_CONFIG
    assert "pip install 'rlhpc[completion]'" in capsys.readouterr().err


# ----------------------------------------------------------------- A command that we tell somebody to type can be typed

LAUNCH = Path(__file__).parents[3] / "launch"
_COMMAND = re.compile(r"`(?:rlhpc|rm|wandb sync) [^`]*?\{([\w.]*(?:root|lock|written))\}[^`]*`")


def test_a_path_with_a_space_is_one_word_of_the_command(tmp_path):
    lock = tmp_path / "my runs" / ".submission"
    lock.parent.mkdir()
    lock.write_text(Holder.of_this_process().to_json())
    with pytest.raises(RunDirectoryError) as refused, SubmissionLock(lock, print):
        raise AssertionError
    command = re.findall(r"`(.*?)`", str(refused.value))[-1]
    assert shlex.split(command) == ["rm", str(lock)]
    assert quoted(Path("/plain/run-1.2_b")) == "/plain/run-1.2_b", "as before where nothing needs it"


def test_no_command_is_told_with_a_run_directory_as_it_is():
    told = {
        path: _COMMAND.findall(path.read_text()) for path in LAUNCH.rglob("*.py") if "private_slurm" not in path.parts
    }
    # The values of status.py are filled in with what is quoted.
    assert {path.name: found for path, found in told.items() if found} == {"status.py": ["root", "root"]}
