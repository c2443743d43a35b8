"""`rlhpc reward`: what it prints of records that are right, wrong, or cannot be judged, and with which status."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from rlhpc.protocol.errors import EXIT_CONFIG

pytestmark = pytest.mark.starts

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
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "answers.jsonl", RECORDS)


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n\n".join(json.dumps(record) for record in records))  # with blank lines between
    return path


def test_a_table_has_a_row_for_each_record_and_a_failed_verifier_is_no_reward(file, capsys):
    assert main(["reward", "integer_arithmetic", str(file)]) == 1
    head, *rows, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["LINE", "VERDICT", "REWARD", "PARTS", "DETAIL"]
    assert [row.split()[:3] for row in rows] == [
        ["1", "correct", "1"],
        ["3", "wrong", "0"],
        ["5", "verifier_error", "-"],
    ]
    assert "reference 'two' is not an integer" in rows[2]
    assert total == "3 judged: 1 correct, 1 wrong, 1 verifier_error, mean reward 0.5"


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


def test_status_0_says_that_all_were_judged_and_not_that_all_are_right(tmp_path, capsys):
    assert main(["reward", "integer_arithmetic", str(write(tmp_path / "wrong.jsonl", RECORDS[:2]))]) == 0
    assert "1 wrong, 0 verifier_error" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["arithmetic"], "is not a task; legal: code_functions"),
        (["no_such_module:f"], "there is no module 'no_such_module' here"),
        (["regex", "--reference", "pattern"], "answers.jsonl:1: no field 'pattern', which --reference names"),
        (["regex", "--completion", "text"], "answers.jsonl:1: no field 'text', which --completion names"),
        (
            ["regex", "trainer.token_budget=8"],
            "legal: rewards.…, sandbox.…, instructions.…, math.…, text.…, composite.…, judge.…, the others in --run",
        ),
        (["regex", "rewards.timeout_s=0"], "rewards.timeout_s=0: legal: 0.01 or more"),
        (["regex", "other.jsonl"], "at most one file"),
        (["regex", "--run", "none.toml"], "none.toml: no such run file"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_judged(file, words, said, capsys):
    assert main(["reward", words[0], str(file), *words[1:]]) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_file_that_is_not_there_or_holds_no_json_is_named(tmp_path, capsys):
    assert main(["reward", "regex", str(tmp_path / "none.jsonl")]) == EXIT_CONFIG
    (tmp_path / "half.jsonl").write_text('{"completion": "a", "reference": "a"}\n{"completion"')
    assert main(["reward", "regex", str(tmp_path / "half.jsonl")]) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert "none.jsonl cannot be read: No such file or directory" in said
    assert "half.jsonl:2: malformed JSON" in said


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
