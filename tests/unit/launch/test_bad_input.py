"""Whatever is wrong with what the user wrote is said in a line a fault, with the place, before anything is started."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from launch.cli import EXIT_USER, main
from tests.ring.run_kit import Lab, make_lab, quick_settings, to_toml

Change = Callable[[dict[str, dict[str, Any]], Path], None]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **settings: object) -> NoReturn:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


class Bench:
    """One run file in a directory of its own, and what the command line says to it."""

    def __init__(self, lab: Lab, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys
        self.settings = quick_settings(lab, "bench")
        self.run_directory = root / "runs" / "bench"
        self.settings["run"]["directory"] = str(self.run_directory)
        self.run_file = root / "run.toml"

    def refusal(self, *words: str, command: str = "run") -> list[str]:
        """Give the command; it fails, starts nothing, makes no directory; returns the lines it says."""
        self.run_file.write_text(to_toml(self.settings), encoding="utf-8")
        assert main([command, str(self.run_file), *words]) == EXIT_USER
        captured = self._capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("rlhpc: ")
        assert not self.run_directory.exists()
        return captured.err.splitlines()


@pytest.fixture
def bench(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_process: None) -> Bench:
    return Bench(lab, tmp_path, capsys)


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("trainer", "learning_rte", 1e-4, ["trainer.learning_rte=0.0001: unknown key", "did you mean learning_rate?"]),
        ("trainr", "device", "cpu", ["trainr=", "unknown key", "legal: run, model", "did you mean trainer?"]),
        ("run", "num_steps", "many", ["run.num_steps='many'", "valid integer"]),
        ("run", "num_steps", 0, ["run.num_steps=0", "greater than 0"]),
        ("run", "name", "../elsewhere", ["run.name='../elsewhere'"]),
        ("model", "dtype", "float16", ["model.dtype='float16'", "'float32' or 'bfloat16'"]),
        ("trainer", "learning_rate", "small", ["trainer.learning_rate='small'", "number"]),
        ("trainer", "recompute_activations", "perhaps", ["trainer.recompute_activations='perhaps'", "boolean"]),
        ("admission", "group_size", 1, ["admission.group_size=1", "algorithm.advantage='grpo'", "legal: 2 or more"]),
        ("generation", "top_p", 0.9, ["generation.top_p=0.9", "importance ratio", "legal: top_p=1.0"]),
        ("generation", "top_k", 5, ["generation.top_k=5", "importance ratio", "legal: top_k=0"]),
        ("trainer", "token_budget", 35, ["trainer.token_budget=35", "longest sample", "= 36", "legal: 36 or more"]),
        ("admission", "window_groups", 6, ["admission.window_groups=6", "legal: 1 to 5"]),
        ("trainer", "warmup_steps", 7, ["trainer.warmup_steps=7", "run.num_steps=6"]),
        ("trainer", "min_learning_rate", 1.0, ["trainer.min_learning_rate=1", "trainer.learning_rate=0.0001"]),
        ("transport", "dead_after_s", 0.5, ["transport.dead_after_s=0.5", "legal: 0.6"]),
        ("data", "task", "integer_arithmetics", ["data.task='integer_arithmetics'", "integer_arithmetic, math_answer"]),
        ("data", "task", "no_such_package_here:judge", ["data.task='no_such_package_here:judge'", "PYTHONPATH"]),
        ("data", "path", "missing.jsonl", ["data.path=", "missing.jsonl does not exist", "run.toml"]),
        ("data", "reference_field", "solution", ["train.jsonl:1", "no field 'solution'", "'prompt', 'answer'"]),
        ("data", "prompt_template", "{question}", ["train.jsonl:1", "no field 'question'"]),
        ("data", "prompt_template", "Add!", ["data.prompt_template='Add!'", "names no field"]),
        ("generation", "max_prompt_tokens", 8, ["train.jsonl:", "has 10 tokens", "generation.max_prompt_tokens=8"]),
        ("model", "path", "nowhere", ["model.path=", "nowhere", "no such directory"]),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_its_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, section: str, key: str, value: object, words: list[str]
) -> None:
    monkeypatch.chdir(bench.root)
    bench.settings.setdefault(section, {})[key] = value
    (line,) = bench.refusal()
    for word in words:
        assert word in line
    assert bench.refusal(command="check") == [line]


def test_an_unknown_key_is_answered_with_the_legal_ones(bench: Bench) -> None:
    bench.settings["metrics"] = {"histogram": True}
    (line,) = bench.refusal()
    assert "metrics.histogram=True: unknown key; legal: samples_every_steps, num_samples, histograms_every" in line


def test_every_fault_of_a_file_has_its_line(bench: Bench) -> None:
    bench.settings["run"]["num_steps"] = "many"
    bench.settings["trainer"]["learning_rte"] = 1.0
    del bench.settings["generation"]["max_prompt_tokens"]
    lines = bench.refusal()
    assert len(lines) == 3
    assert all("run.toml" in line for line in lines)
    assert sum("generation.max_prompt_tokens: missing" in line for line in lines) == 1


def test_a_sample_longer_than_the_models_context_is_refused(bench: Bench) -> None:
    bench.settings["generation"]["max_completion_tokens"] = 4096
    bench.settings["trainer"]["token_budget"] = 8192
    (line,) = bench.refusal()
    assert "= 4108" in line
    assert "context of 4096" in line
    assert "max_position_embeddings" in line


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "1+1=", "answer": "2"}', '{"prompt": "1+2=", "answer": "3"'], [":2", "malformed JSON", "column"]),
        (['{"prompt": "1+1=", "answer": "2"}', "", "[1, 2]"], [":3", "a list", "legal: an object"]),
        (['{"prompt": "1+1=", "answer": "2"}', '{"prompt": "1+2="}'], [":2", "no field 'answer'"]),
        (['{"prompt": "1+1=", "answer": null}'], [":1", "'answer' is null"]),
        (['{"prompt": "", "answer": "2"}'], [":1", "the prompt has 0 tokens"]),
        ([], ["holds no record"]),
        (["", "  "], ["holds no record"]),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(bench: Bench, lines: list[str], words: list[str]) -> None:
    dataset = bench.root / "data.jsonl"
    dataset.write_text("\n".join(lines))
    bench.settings["data"]["path"] = str(dataset)
    (line,) = bench.refusal()
    assert str(dataset) in line
    for word in words:
        assert word in line


def test_a_directory_without_datasets_is_refused(bench: Bench) -> None:
    bench.settings["data"]["path"] = str(bench.root)
    (line,) = bench.refusal()
    assert "holds no .jsonl or .parquet file" in line


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_half_a_model_is_refused_by_what_it_lacks(bench: Bench, lab: Lab, missing: str) -> None:
    model = bench.root / "model"
    shutil.copytree(lab.model, model)
    (model / missing).unlink()
    bench.settings["model"]["path"] = str(model)
    (line,) = bench.refusal()
    assert "not a complete HF checkpoint" in line
    assert missing.removeprefix("model") in line


def test_a_model_whose_config_is_not_json_is_refused(bench: Bench, lab: Lab) -> None:
    model = bench.root / "model"
    shutil.copytree(lab.model, model)
    (model / "config.json").write_text("{")
    bench.settings["model"]["path"] = str(model)
    (line,) = bench.refusal()
    assert "config.json: not JSON" in line


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("run.num_steps", ["'run.num_steps'", "section.key=value"]),
        ("=3", ["'=3'", "section.key=value"]),
        ("run..num_steps=3", ["section.key=value"]),
        ("run.num_steps.deep=3", ["num_steps is a value, not a section"]),
        ("run.num_stps=3", ["run.num_stps=3", "did you mean num_steps?"]),
        ("run.num_steps=three", ["run.num_steps='three'"]),
        ("num_steps=3", ["num_steps=3", "unknown key"]),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(bench: Bench, word: str, said: list[str]) -> None:
    (line,) = bench.refusal(word)
    for expected in said:
        assert expected in line


def test_a_run_file_that_is_not_there_not_a_file_or_not_toml_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\nname = 3")
    for path, said in ((tmp_path / "no.toml", "no such run file"), (tmp_path, "a directory"), (broken, "line 1")):
        assert main(["run", str(path)]) == EXIT_USER
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{path}: " in error
        assert said in error


def test_a_dataset_is_refused_only_where_it_is_wrong(bench: Bench) -> None:
    """The last of many lines is read before anything starts."""
    dataset = bench.root / "long.jsonl"
    records = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(2_000)]
    dataset.write_text("\n".join([*records, json.dumps({"prompt": "1" * 13, "answer": "1"})]))
    bench.settings["data"]["path"] = str(dataset)
    (line,) = bench.refusal()
    assert "long.jsonl:2001: the prompt has 13 tokens; legal: 1 to generation.max_prompt_tokens=12" in line
