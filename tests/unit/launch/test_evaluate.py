"""`rlhpc evaluate` before it starts anything, what it makes of samples, and how it follows a run."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, field_serializer
from safetensors.numpy import save_file

from launch.checks.preflight import preflight_sampling
from launch.cli import main
from launch.commands.arguments import takes_evaluation
from launch.demo.task import write_dataset
from launch.evaluate import follow
from launch.evaluate.command import comparison_of, evaluate
from launch.evaluate.evaluation import (
    Evaluation,
    Report,
    caches_on_this_node,
    evaluation_directory,
    plan_evaluation,
    preview_evaluations,
    report_of,
    side_by_side,
)
from launch.evaluate.follow import Curves, DatasetFollower, RunLife, follow_run
from launch.evaluate.job import TimeIsUp, TimeWarning, _words
from launch.evaluate.request import (
    Request,
    checkpoint_digest,
    evaluation_config,
    find_target,
    of_run_file,
    requests_of,
    with_settings_of,
)
from launch.plan.gpu_map import VisibleGpus
from launch.run_files.records import JobRecord, write_job_record
from launch.slurm.queue import QueueLook
from launch.view.run import RunView
from launch.view.standing import lines_about
from launch.view.status import read_notes
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import read_resolved, write_resolved
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import LoraConfig
from rlhpc.metrics.curves import read_curves
from rlhpc.metrics.evaluations import (
    NAME,
    Estimate,
    EvaluatedSample,
    EvaluationSettings,
    SamplesFile,
    read_samples,
    read_settings,
)
from rlhpc.models.adapter import (
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    adapter_specs,
    base_digest,
    peft_config,
    stored_matrices,
)
from rlhpc.protocol.errors import EXIT_CONFIG, CheckpointError, ConfigError, DataError, RunDirectoryError
from rlhpc.training.checkpoint_directory import begin, complete
from tests import build
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.doc_pages import ROOT, blocks_in, commands_of_block

# --------------------- `rlhpc evaluate` before it starts anything: what it takes, what it refuses, and what it makes of

LONGER = "generation.max_prompt_tokens=12"
NEEDED = ["data.task=integer_arithmetic", LONGER, "generation.max_completion_tokens=8"]


@pytest.fixture
def model(tmp_path, lab) -> Path:
    write_dataset(tmp_path / "test.jsonl", 6, seed=0)
    return shutil.copytree(lab.model, tmp_path / "model")


def settings_of(model: Path, *words: str) -> EvaluationSettings:
    config = evaluation_config(find_target(model, None), model.parent / "test.jsonl", [*NEEDED, *words])
    return EvaluationSettings(config, "model on test", 2, 3, 1.0, {"model": "m", "data": ["d"]})


def a_run(model: Path, *steps: int, **tables: Any) -> RunLayout:
    """A run with checkpoints of these steps; tables: of its run file, over those of a small one."""
    layout = RunLayout(model.parent / "runs" / "first")
    layout.root.mkdir(parents=True)
    own = {"dtype": "float32", "chat_template_kwargs": {"enable_thinking": False}}
    usual: dict[str, Any] = {"model": {"path": str(model), **own}, "data": {"path": "d", "task": "integer_arithmetic"}}
    usual["run"] = {"name": "small", "num_steps": 12, "seed": 7}
    usual["generation"] = {"max_prompt_tokens": 5, "max_completion_tokens": 6, "kv_cache_bytes": 1, "temperature": 0.5}
    usual["admission"] = {"max_staleness": 2, "window_groups": 1}
    for name, table in tables.items():
        usual[name] = usual.get(name, {}) | table if isinstance(table, dict) else table
    write_resolved(build.config(trainer={"backend": "reference"}, transport={"kind": "tcp"}, **usual), layout, "")
    for step in steps:
        place = begin(layout.checkpoint(step))
        (place / "trainer").mkdir()
        (place / "trainer" / "weights").write_bytes(bytes([step]))
        complete(place, layout.checkpoint(step), {"attempt": 0})
    return layout


def request_for(model: Path, **how: Any) -> Request:
    return Request("d", model.parent / "test.jsonl", words=(LONGER,), **how)


def identity_of(config: Config) -> dict[str, Any]:
    return EvaluationSettings(config, "t", 1, 1, 1.0, {}).identity


# ------------------------------------------------------------------------------------------------------------- model


def test_the_example_for_an_exported_model_makes_the_prompts_of_its_run(model):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = model.parent / "test.jsonl"
    made.write_text(next(block for language, block in blocks_in(readme) if language == "json"))
    run = tomllib.loads(next(block for language, block in blocks_in(readme) if language == "toml"))
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (command,) = (each for each in commands_of_block("bash", page) if each.startswith("rlhpc evaluate trained-model "))
    words = shlex.split(command)[4:]
    config = evaluation_config(find_target(model, None), made, [*words, "model.dtype=float32"])
    assert preflight_sampling(config).datasets[0].num_records == 2
    assert config.data[0].prompt_template == run["data"]["prompt_template"]
    assert (config.data[0].task, config.generation.max_prompt_tokens) == (run["data"]["task"], 512)


@pytest.mark.starts
def test_in_a_job_what_engines_compile_lies_on_the_node_until_the_command_ends(monkeypatch, tmp_path):
    """Not in a home directory on a network, with a quota of files; but where the user says so."""
    for variable in ("SLURM_JOB_ID", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    before = dict(os.environ)
    with caches_on_this_node():
        assert dict(os.environ) == before  # a machine of one's own
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path))
    names = ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH")
    code = "import os, pathlib, sys\nfor n in sys.argv[1:]: pathlib.Path(os.environ[n], 'made').mkdir(parents=True)"
    with caches_on_this_node():
        places = [Path(os.environ[name]) for name in names]
        subprocess.run([sys.executable, "-c", code, *names], check=True)  # as an engine does
        assert places[0].parent == places[1].parent
        assert places[0].parent.stat().st_mode & 0o077 == 0
    assert [place.exists() for place in places] == [False, False, True]
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_run_is_evaluated_as_it_was_trained_but_for_what_belongs_to_training(model):
    layout = a_run(model, 4, 12)
    target = find_target(layout.root, None)
    assert (target.title, target.checkpoint) == ("small-step_000012", layout.checkpoint(12))
    config = evaluation_config(target, model.parent / "test.jsonl", ["generation.max_completion_tokens=64"])
    assert (config.data[0].task, config.model.dtype) == ("integer_arithmetic", "float32")
    assert (config.generation.max_prompt_tokens, config.generation.max_completion_tokens) == (5, 64)
    assert config.model.chat_template_kwargs == {"enable_thinking": False}
    assert config.generation.kv_cache_bytes is None  # the engine has its GPU to itself
    assert config.has_seeded_samples
    assert config.run.seed == 0 != target.settings.run.seed  # all models get the same prompts
    assert config.data[0].path == model.parent / "test.jsonl"


def test_on_cpu_the_engine_takes_what_the_runs_engine_took(model, monkeypatch):
    layout = a_run(model, 4)
    target = find_target(layout.root, None)
    data = model.parent / "test.jsonl"
    request = Request("test", data, words=("generation.max_prompt_tokens=12",))
    for words, taken in (((), 1), (("0",), None)):
        monkeypatch.setattr(f"{plan_evaluation.__module__}.gpus_here", lambda _, words=words: VisibleGpus(words))
        assert plan_evaluation(target, request).settings.config.generation.kv_cache_bytes == taken
    told = evaluation_config(target, data, ["generation.kv_cache_bytes=9"], has_gpus=False)
    assert told.generation.kv_cache_bytes == 9


def test_a_run_of_dialogues_is_evaluated_by_its_environment_and_in_one_turn_if_told_so(model):
    asked = {"path": "d", "task": "environment", "environment": "x:Y", "use_chat_template": True}
    layout, data = a_run(model, 4, data=[asked], environment={"max_turns": 3}), model.parent / "test.jsonl"
    config = evaluation_config(find_target(layout.root, None), data, [])
    assert (config.environment.max_turns, identity_of(config)["environment.max_turns"]) == (3, 3)
    plain = ["data.environment=", "data.task=integer_arithmetic"]
    alone = evaluation_config(find_target(layout.root, None), data, plain)
    assert (alone.data[0].environment, alone.environment.max_turns) == ("", 8)


def test_stop_strings_are_the_runs_or_those_of_the_evaluation_whatever_characters_they_have(model):
    odd = ['"\\', "\x7f\x01\n", "\U0001f642", "é]"]
    tables = [
        {"path": "d", "name": "a"},
        {"path": "d", "name": "b", "stop": odd},
        {"path": "d", "name": "c", "stop": []},
    ]
    layout = a_run(model, 4, generation={"stop": ["\n\n"]}, evaluation=tables)
    target = find_target(layout.root, None)
    for request, stop in zip(of_run_file(read_resolved(layout)[0]), (["\n\n"], odd, []), strict=True):
        settings = evaluation_config(target, model.parent / "test.jsonl", request.words)
        assert identity_of(settings)["generation.stop"] == stop


def test_of_a_run_on_several_datasets_one_says_how_its_kind_is_asked_and_judged(model):
    sums = {"path": "d", "task": "integer_arithmetic", "name": "sums", "max_completion_tokens": 3}
    essays = {"path": str(model.parent / "essays.jsonl"), "task": "math_answer", "weight": 5.0}
    target, data = find_target(a_run(model, 4, data=[sums, essays]).root, None), model.parent / "test.jsonl"
    with pytest.raises(
        ConfigError, match=r"test.jsonl: belongs to none of the run's datasets; add data.name=NAME.*sums, essays"
    ):
        evaluation_config(target, data, [])
    with pytest.raises(DataError, match=r"tset.jsonl does not exist; .*\(did you mean test.jsonl\?\)"):
        evaluation_config(target, data.with_name("tset.jsonl"), [])
    with pytest.raises(ConfigError, match=r"data.name=all: no such dataset; .*legal: sums, essays"):
        evaluation_config(target, data, ["data.name=all"])
    like_sums = evaluation_config(target, data, ["data.name=sums"])
    assert (like_sums.data[0].task, like_sums.generation.max_completion_tokens) == ("integer_arithmetic", 3)
    assert like_sums.data[0].path == data
    own = evaluation_config(target, model.parent / "essays.jsonl", [])
    assert (own.data[0].task, own.generation.max_completion_tokens) == ("math_answer", 6)


def test_a_model_is_known_by_its_digest_and_a_step_by_number_or_directory(model):
    layout = a_run(model, 4, 12)
    by_number, by_path = find_target(layout.root, 4), find_target(layout.checkpoint(4), None)
    assert by_number == by_path
    assert by_number.digest == by_path.digest != find_target(layout.root, 12).digest
    assert by_number.home == layout.root / "evaluations"
    before = find_target(model, None).digest
    weights = next(model.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert find_target(model, None).digest != before


def test_the_average_of_a_step_is_another_model_in_a_directory_of_its_own(model):
    layout, data, long = a_run(model, 4), model.parent / "test.jsonl", "generation.max_prompt_tokens=12"
    target = find_target(layout.root, None)
    plain, average = (
        plan_evaluation(target, requests_of(options_of(str(layout.root), str(data), long, *words), target)[0])
        for words in ([], ["--ema"])
    )
    assert average.target.is_average
    assert (plain.directory.name, average.directory.name) == ("small-step_000004-test", "small-step_000004-test-ema")
    assert average.settings.inputs["model"] != plain.settings.inputs["model"]
    with pytest.raises(ConfigError, match=r"--ema: .*model is an HF checkpoint"):
        evaluate(options_of(str(model), str(data), *NEEDED, "--ema"))


def test_a_damaged_checkpoint_is_passed_over_or_refused(model):
    layout = a_run(model, 4, 12)
    (layout.checkpoint(12) / "trainer" / "weights").write_bytes(b"xy")
    assert find_target(layout.root, None).checkpoint == layout.checkpoint(4)
    with pytest.raises(CheckpointError, match=r"no sound checkpoint of step 12; available steps: 4, 12\nstep_000012: "):
        find_target(layout.root, 12)
    with pytest.raises(CheckpointError, match=r"no sound checkpoint of step 7; available steps: 4, 12$"):
        find_target(layout.root, 7)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["no-model", "test.jsonl"], "no-model: no such directory; legal: an HF checkpoint, or a run directory"),
        (["model", "test.jsonl", "--step", "3"], "--step 3: "),
        (["model", "test.jsonl"], "generation.max_completion_tokens: missing; it has no default"),
        (["model", "no.jsonl", *NEEDED], "no.jsonl does not exist"),
        (["data.path=x"], "the dataset is the second argument"),
        (["generation.temperature=0.5"], "an evaluation has --temperature for it"),
        (["trainer.learning_rate=1"], "not a setting of an evaluation; legal: data.…"),
        (["generation.max_completion=3"], "did you mean"),
        (["data.task=sums"], "data.task='sums' is not a task"),
        (["data.prompt_template={q}"], "no field 'q'"),
        (["data.environment=x:Y", "data.use_chat_template=true"], "there is no module 'x' here"),
        (["data.environment=agent", "data.use_chat_template=true"], "agents are not evaluated"),
        (["--samples", "0"], "--samples 0; legal: 1 or more"),
        (["--prompts", "0"], "--prompts 0; legal: 1 or more"),
        (["--temperature", "-1"], "--temperature -1; legal: 0"),
        (["--temperature", "0.005"], "--temperature 0.005; legal: 0 (the most"),
        (["--temperature", "0", "--samples", "2"], "would be the same"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(words, text, model, monkeypatch, capsys):
    monkeypatch.chdir(model.parent)
    before = sorted(model.parent.iterdir())
    usual = [] if "model" in words[0] else ["model", "test.jsonl", *NEEDED]
    assert main(["evaluate", *usual, *words]) == EXIT_CONFIG
    assert text in capsys.readouterr().err
    assert sorted(model.parent.iterdir()) == before


# --------------------------------------------------------------------------------------------------------- directory


def open_directory(directory: Path, settings: EvaluationSettings, *, is_fresh: bool = False) -> list[str]:
    said: list[str] = []
    with evaluation_directory(directory, settings, is_fresh=is_fresh, tell=said.append):
        pass
    return said


def peft_of(model: Path, name: str, *, base: Path | None = None, alpha: float = 8.0, **settings: Any) -> Path:
    """A PEFT adapter directory of the attention of a model."""
    directory = model.parent / name
    directory.mkdir()
    matrices = stored_matrices(model)
    layers = {each: shape for each, shape in matrices.items() if "attn" in each}
    specs = adapter_specs(layers, 4)
    save_file({PEFT_PREFIX + each.name: np.zeros(each.shape, np.float32) for each in specs}, directory / PEFT_WEIGHTS)
    config = peft_config(LoraConfig(rank=4, alpha=alpha), layers, matrices, base or model) | settings
    (directory / PEFT_CONFIG).write_text(json.dumps(config))
    return directory


def planned(path: Path, run: Path | None = None) -> Evaluation:
    target = find_target(path, None) if run is None else with_settings_of(find_target(path, None), run)
    words = (*NEEDED, "model.dtype=float32") if run is None else (LONGER,)
    return plan_evaluation(target, Request("d", path.parent / "test.jsonl", words=words))


def test_adapters_of_peft_are_refused_by_name_where_they_do_not_fit(model):
    other = make_tiny_checkpoint(model.parent / "other", seed=3)
    run = a_run(model, lora={"rank": 4}).root
    assert planned(peft_of(model, "fits"), run).settings.inputs["base"] == base_digest(model)
    cut = peft_of(model, "cut")
    os.truncate(cut / PEFT_WEIGHTS, (cut / PEFT_WEIGHTS).stat().st_size - 1)
    for path, words in (
        (peft_of(model, "elsewhere", base=other), f"elsewhere: belongs to {other}, and --run"),
        (cut, f"{cut / PEFT_WEIGHTS}: .* bytes in place of"),
        (peft_of(model, "norms", use_dora=True), "use_dora=True; legal: False"),
        (peft_of(model, "larger", r=8), "lora_A.weight is"),
    ):
        with pytest.raises(ConfigError, match=words):
            planned(path, run)
    with pytest.raises(ConfigError, match="nowhere: its base 'on-a-hub/x' is no directory here; legal: --run RUN"):
        planned(peft_of(model, "nowhere", base=Path("on-a-hub/x")))


def test_adapters_of_one_base_share_engines_whatever_their_scale(model):
    other = make_tiny_checkpoint(model.parent / "other", seed=3)
    given = [peft_of(model, "a"), model, peft_of(other, "b"), peft_of(model, "c", alpha=2.0)]
    groups = [[each.target.title for each in group] for group in side_by_side(map(planned, given))]
    assert groups == [["a", "c"], ["model"], ["b"]]
    assert planned(model.parent / "c").settings.config.lora.alpha == 2.0


def test_settings_come_back_as_they_were_and_more_samples_go_on_with_what_is_there(model, tmp_path):
    settings = settings_of(model)
    assert read_settings(tmp_path) is None
    settings.write(tmp_path)
    assert read_settings(tmp_path) == settings
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ConfigError, match=f"{NAME}: damaged"):
        read_settings(tmp_path)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / f".{NAME}.0123456789ab.tmp").write_text("{")  # of a command killed while it wrote its settings
    assert open_directory(tmp_path / "e", settings) == []
    more = replace(settings_of(model, "generation.num_replicas=2"), samples_per_prompt=8, num_prompts=6)
    assert open_directory(tmp_path / "e", more) == []
    assert read_settings(tmp_path / "e") == more


def test_samples_of_another_evaluation_are_not_mixed_in(model, tmp_path):
    there = tmp_path / "e"
    for words, changes, text in (
        (["generation.max_completion_tokens=9"], {}, "generation.max_completion_tokens: 9, of the samples 8"),
        (["data.prompt_template=Q: {prompt}"], {}, "data.prompt_template: 'Q: {prompt}', of the samples '{prompt}'"),
        (["run.seed=1"], {}, "run.seed: 1, of the samples 0"),
        ([], {"temperature": 0.5}, "temperature: 0.5, of the samples 1.0"),
        ([], {"inputs": {"model": "other", "data": ["d"]}}, "inputs.model: 'other', of the samples 'm'"),
    ):
        open_directory(there, settings_of(model), is_fresh=True)
        (there / "samples-0.jsonl").touch()
        other = replace(settings_of(model, *words), **changes)
        with pytest.raises(RunDirectoryError, match=re.escape(text)):
            open_directory(there, other)
        assert (there / "samples-0.jsonl").exists()
        assert open_directory(there, other, is_fresh=True) == [f"{there} is deleted, and the evaluation starts over"]
        assert sorted(path.name for path in there.iterdir()) == [".lock", NAME]


def test_settings_that_this_version_cannot_read_are_refused_and_deleted_with_fresh(model, tmp_path):
    open_directory(tmp_path / "e", settings_of(model))
    (tmp_path / "e" / "samples-0.jsonl").touch()
    (tmp_path / "e" / NAME).write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=r"damaged: 'config'$"):
        open_directory(tmp_path / "e", settings_of(model), is_fresh=True)
    (tmp_path / "e" / NAME).write_text('{"config": {}, "samples_per_prompt": 1}')
    with pytest.raises(ConfigError, match=r"damaged(.|\n)*--fresh"):
        open_directory(tmp_path / "e", settings_of(model))
    assert (tmp_path / "e" / "samples-0.jsonl").exists()
    assert "starts over" in open_directory(tmp_path / "e", settings_of(model), is_fresh=True)[0]
    assert not (tmp_path / "e" / "samples-0.jsonl").exists()
    assert read_settings(tmp_path / "e") == settings_of(model)


def test_a_job_is_told_the_temperature_to_its_last_digit(model):
    """Otherwise it refuses the directory that its own submission has prepared."""
    target = find_target(model, None)
    request = Request("d", model.parent / "test.jsonl", words=tuple(NEEDED), temperature=0.12345678)
    words = _words([plan_evaluation(target, request)])
    assert float(words[words.index("--temperature") + 1]) == request.temperature


def test_one_command_at_a_time_and_no_directory_of_somebody_else(model, tmp_path):
    settings = settings_of(model)
    with (
        evaluation_directory(tmp_path / "e", settings, is_fresh=False, tell=print),
        pytest.raises(RunDirectoryError, match="another `rlhpc evaluate` is running there"),
    ):
        open_directory(tmp_path / "e", settings)
    for is_fresh in (False, True):
        with pytest.raises(RunDirectoryError, match="not empty, and not an evaluation"):
            open_directory(model, settings, is_fresh=is_fresh)
    assert not (model / ".lock").exists()


# ------------------------------------------------------------------------------------------------------------ report


def sample(prompt: int, number: int, verdict: str = "correct", finish_reason: str = "stop") -> EvaluatedSample:
    reward, answer = float(verdict == "correct"), {"correct": "4", "wrong": "5"}.get(verdict, "")
    return EvaluatedSample(prompt, number, "test.jsonl:1", "", 10 * prompt, finish_reason, verdict, reward, answer)


def test_the_figures_of_many_samples_need_none_of_their_texts_at_once(model):
    settings = replace(settings_of(model), num_prompts=100)
    length = 50_000
    samples = (
        replace(sample(prompt, number), completion="x" * (length + number), detail="y" * (length + number))
        for prompt in range(100)
        for number in range(2)
    )
    tracemalloc.start()
    try:
        assert report_of(settings, samples) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * length  # of 400 texts


def test_a_report_needs_all_samples_and_only_those_that_were_asked_for(model):
    settings = settings_of(model)  # three prompts, two samples each
    samples = [
        sample(0, 0), sample(0, 1, "wrong"), sample(1, 0, "verifier_error"), sample(1, 1, finish_reason="length"),
        sample(2, 0, "wrong"), sample(2, 1, "wrong"),
    ]  # fmt: skip
    assert report_of(settings, samples[1:]) is None
    report = report_of(settings, [*samples, samples[0], sample(0, 2, "wrong"), sample(7, 0, "wrong")])
    assert report is not None
    assert report.as_text().splitlines() == [
        "model on test: 3 prompts × 2 samples, temperature 1",
        "  pass@1  0.500  [0.125, 0.875]",
        "  pass@2  0.500  [0.055, 0.945]   of 2 prompts",
        "  maj@2   0.250  [0.037, 0.744]   of 2 prompts",
        "  reward  0.500  [-0.066, 1.066]",
        "  10 tokens on average, 16.7 % cut off",
        "  left out: 1 sample that no verifier could judge",
    ]
    assert json.loads(json.dumps(report.as_json()))["figures"]["pass@1"]["value"] == 0.5


# ------------------------------------------------------------------------------------------- what a run file asks for


TABLE = {"name": "held-out", "samples": 2, "prompts": 3, "keep_best": "pass@2", "stop_after": 2}


def with_table(model: Path, **keys: object) -> RunLayout:
    return a_run(model, 4, 12, evaluation=[{"path": str(model.parent / "test.jsonl"), **TABLE, **keys}])


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    takes_evaluation(parser)
    return parser.parse_args([*words])


def test_samples_count_by_what_a_judge_is_asked_and_not_by_the_name_of_the_file(model):
    data, template = model.parent / "test.jsonl", model.parent / "rubric.txt"
    judge = ["data.task=llm_judge", "judge.endpoint=http://127.0.0.1:9/v1", "judge.model=m"]
    words, target = [*NEEDED[1:], *judge, f"judge.template_file={template}"], find_target(model, None)
    identities = []
    for text in ("Grade {completion}.", "Grade {completion} mildly."):
        template.write_text(text)
        request = requests_of(options_of(str(model), str(data), *words), target)[0]
        identities.append(plan_evaluation(target, request).settings.identity)
    differing = {key for key in identities[0] if identities[0][key] != identities[1][key]}
    assert differing == {"inputs.judge.template_file"}


def test_services_of_a_run_are_asked_while_it_lives_and_a_url_at_any_time(model):
    scores = {"name": "scores", "kind": "reward", "path": "/models/scores"}
    layout = a_run(model, 4, data={"path": "d", "task": "reward_model"}, service=[scores])
    data = model.parent / "test.jsonl"

    def planned(*words: str) -> EvaluationSettings:
        target = find_target(layout.root, None)
        given = [*NEEDED[1:], "data.reference_field=*", *words]
        request = requests_of(options_of(str(layout.root), str(data), *given), target)[0]
        return plan_evaluation(target, request, runs_here=False).settings

    def status(phase: str, age_s: float) -> None:
        document = {"phase": phase, "step": 4, "roles": [], "unix_time_s": time.time() - age_s}
        layout.status.write_text(json.dumps(document))

    at_url = 'service=[{name = "scores", kind = "reward", url = "http://127.0.0.1:9/v1"}]'
    for phase, age_s in ((None, 0.0), ("complete", 0.0), ("stopped", 0.0), ("training", 3600.0)):
        if phase:
            status(phase, age_s)
        with pytest.raises(ConfigError, match=r"asks service 'scores', which lives as long as its run.*url ="):
            planned()
        assert planned(at_url).rendezvous == ""
    status("training", 1.0)
    settings = planned()
    assert settings.rendezvous == str(layout.rendezvous)
    (place := model.parent / "evaluation").mkdir()
    settings.write(place)
    assert read_settings(place) == settings
    document = json.loads((place / NAME).read_text())
    (place / NAME).write_text(json.dumps({key: value for key, value in document.items() if key != "rendezvous"}))
    older = read_settings(place)
    assert older is not None
    assert older.rendezvous == ""
    assert settings.identity["reward_model.service"] == "/models/scores"  # samples do not depend on where it answered
    assert planned(at_url).identity["reward_model.service"] == "http://127.0.0.1:9/v1"
    assert planned("data.task=integer_arithmetic", "data.reference_field=answer").rendezvous == ""


def test_a_run_file_says_whether_its_average_is_evaluated(model):
    layout = with_table(model, keep_best="", stop_after=None, max_prompt_tokens=12)
    target = find_target(layout.root, 4)
    assert not requests_of(options_of(str(layout.root)), target)[0].is_average
    with pytest.raises(ConfigError, match=r"--ema: without DATA, \[\[evaluation\]\] of the run file says it"):
        requests_of(options_of(str(layout.root), "--ema"), target)
    config, _ = read_resolved(layout)
    kept = config.trainer.model_copy(update={"ema_decay": 0.9})
    tables = [table.model_copy(update={"ema": True}) for table in config.evaluation]
    target = replace(target, settings=config.model_copy(update={"trainer": kept, "evaluation": tuple(tables)}))
    (request,) = requests_of(options_of(str(layout.root)), target)
    assert request.is_average
    assert "--ema" in _words([plan_evaluation(target, request)])


def test_a_run_file_says_what_the_words_of_a_command_would(model):
    layout = with_table(model, max_completion_tokens=4, task="math_answer", num_replicas=2, every_steps=50)
    target = find_target(layout.root, 4)
    (request,) = requests_of(options_of(str(layout.root)), target)
    assert (request.name, request.samples, request.prompts, request.every) == ("held-out", 2, 3, 50)
    assert (request.best, request.stop_after) == ("pass@2", 2)
    config = evaluation_config(target, request.data, request.words)
    assert (config.data[0].task, config.generation.num_replicas) == ("math_answer", 2)
    assert config.generation.max_completion_tokens == 4


def test_words_that_contradict_the_run_file_are_refused(model, capsys):
    layout = with_table(model)
    for typed, text in (
        ("--samples 3", "--samples 3: without DATA, [[evaluation]] of the run file says it; name DATA"),
        ("--follow --keep-best reward", "--keep-best reward: without DATA"),
        ("data.task=math_answer", "data.task=math_answer: DATA comes before settings"),
        ("--follow --step 4", "--step 4: not with --follow"),
        ("d.jsonl --follow --site s.toml", "a job that follows a run evaluates its [[evaluation]]"),
        ("--keep-best reward", "--keep-best reward: legal with --follow only"),
    ):
        assert main(["evaluate", str(layout.root), *typed.split()]) == EXIT_CONFIG
        assert text in capsys.readouterr().err
    shutil.rmtree(layout.root)
    for place, why in (
        (model, "only a run has datasets of its own, here or of --run RUN"),
        (a_run(model, 4).root, "the run has no [[evaluation]] that names any; legal: a file or directory"),
    ):
        assert main(["evaluate", str(place)]) == EXIT_CONFIG
        assert f"{place}: DATA is missing, and {why}" in capsys.readouterr().err


def test_an_hf_checkpoint_is_evaluated_with_the_settings_of_a_run_that_is_named(model, capsys):
    layout, data = a_run(model, 4), model.parent / "test.jsonl"
    settings, _ = read_resolved(layout)
    target = with_settings_of(find_target(model, None), layout.root)
    assert (target.model, target.checkpoint) == (model, None)
    config = evaluation_config(target, data, ())
    assert config.data[0].task == settings.data[0].task
    assert config.generation.max_completion_tokens == settings.generation.max_completion_tokens
    assert main(["evaluate", str(layout.root), str(data), "--run", str(layout.root)]) == EXIT_CONFIG
    assert "is of a run, whose settings it has; legal: with an HF checkpoint" in capsys.readouterr().err
    assert main(["evaluate", str(layout.root), "--run", str(layout.root), "--follow"]) == EXIT_CONFIG
    assert "not with --follow" in capsys.readouterr().err


def test_what_an_evaluation_would_fail_by_is_told_before_the_run(model):
    config, _ = read_resolved(with_table(model, max_prompt_tokens=12))
    assert preview_evaluations(config) == ["evaluation  held-out: 6 records"]
    for keys, text in (
        ({"max_prompt_tokens": None}, r"\[evaluation\] held-out: .*the prompt has 10 tokens; legal: 1 to"),
        ({"path": Path("no.jsonl")}, r"\[evaluation\] held-out: .*no.jsonl"),
        ({"task": "sums"}, r"\[evaluation\] held-out: data.task='sums' is not a task"),
    ):
        table = config.evaluation[0].model_copy(update=keys)
        with pytest.raises(ConfigError, match=text):
            preview_evaluations(config.model_copy(update={"evaluation": (table,)}))


def note(layout: RunLayout, name: str, step: int, attempt: int | None = None, **values: float) -> None:
    place = layout.evaluations / f"small-step_{step:06d}-{name}"
    place.mkdir(parents=True)
    figures = {key.replace("_at_", "@"): {"value": v, "low": v - 0.1, "high": v + 0.1} for key, v in values.items()}
    (place / "summary.json").write_text(json.dumps({"figures": figures, "attempt": attempt}))


def test_past_figures_are_read_from_their_directories(model):
    layout = a_run(model)
    assert RunView(layout).evaluations == {}
    for step, value in ((12, 0.4), (4, 0.5), (100, 0.3)):
        note(layout, "held-out", step, pass_at_1=value, reward=value)
    note(layout, "step_7-odd", 4)
    (layout.evaluations / "small-step_000008-held-out").mkdir()  # begun
    damaged = layout.evaluations / "small-step_000009-held-out"
    damaged.mkdir()
    (damaged / "summary.json").write_text("{")
    past = RunView(layout).evaluations
    assert list(past["held-out"]) == [4, 12, 100]
    assert list(past["step_7-odd"]) == [4]
    assert RunView(layout).values_of("held-out", "reward") == {4: 0.5, 12: 0.4, 100: 0.3}
    assert RunView(layout).values_of("held-out", "pass@2") == {}
    assert lines_about(past) == [
        "evaluation  held-out: pass@1 0.300 [0.200, 0.400] at step 100; the best was 0.500 at step 4"
    ]
    assert "evaluation  held-out: pass@1 0.300" in "\n".join(read_notes(RunView(layout)).lines())


def life_of(layout: RunLayout, phase: str, unix_time_s: float) -> tuple[bool, bool]:
    layout.status.write_text(json.dumps({"phase": phase, "step": 4, "unix_time_s": unix_time_s, "roles": []}))
    life = RunLife(layout, patience_s=0.05)
    time.sleep(0.1)
    return life.is_over, life.shows


def test_a_run_is_over_when_it_has_been_stopped_while_somebody_looked(model):
    layout = a_run(model, 4)
    assert life_of(layout, "training", time.time()) == (False, True)
    assert life_of(layout, "stopped", time.time() - 100) == (False, True)  # of the attempt before
    assert life_of(layout, "stopped", time.time() + 10) == (True, True)
    life = RunLife(layout, patience_s=0.05)
    assert life.shows
    time.sleep(0.1)
    assert not life.shows
    layout.summary.write_text("{}")
    assert life.is_over


@pytest.mark.waits
def test_a_run_that_is_begun_anew_while_somebody_looks_is_followed_all_the_same(tmp_path):
    """An attempt that begins deletes the status; `--fresh` deletes everything."""
    layout, are_done = RunLayout(tmp_path), threading.Event()
    life, course = RunLife(layout, patience_s=600.0), DatasetFollower(layout, Request("d", tmp_path))

    def begin_anew() -> None:
        while not are_done.is_set():
            layout.status.touch()
            layout.checkpoints.mkdir()
            layout.status.unlink()
            layout.checkpoints.rmdir()

    other = threading.Thread(target=begin_anew)
    other.start()
    deadline = Deadline(4.0)
    try:
        while not deadline.is_over:
            assert life.shows
            assert not course.due(is_last=False)
    finally:
        are_done.set()
        other.join()


def test_a_run_of_jobs_is_over_when_slurm_says_twice_that_none_is_left(model, monkeypatch):
    """Before a time limit its controller leaves as if it were stopped; another life of the job goes on."""
    layout, looks = a_run(model, 4), list[QueueLook]()
    monkeypatch.setattr(follow, "look_at_jobs", lambda jobs: looks.pop(0))
    monkeypatch.setattr(follow, "ASK_S", 0.0)
    layout.jobs.mkdir()
    write_job_record(layout, JobRecord(7, "hetjob", "hetjob", None, "", "", False, 0, 0, None, 0.0))
    layout.status.write_text(json.dumps({"phase": "stopped", "step": 4, "unix_time_s": time.time(), "roles": []}))
    alive = SimpleNamespace(state=SimpleNamespace(is_alive=True))
    life = RunLife(layout, patience_s=10.0)
    looks += [QueueLook((alive,)), QueueLook(()), QueueLook((), trouble="away"), QueueLook(()), QueueLook(())]
    assert [life.is_over for _ in range(4)] == [False] * 4
    assert life.is_over
    assert not looks
    looks += [QueueLook((), trouble="away")]
    assert life.has_jobs is None  # and not False: nobody knows
    layout.stop_request.touch()
    monkeypatch.setattr(follow, "ASK_SOON_S", 0.0)
    looks += [QueueLook(())]
    assert life.is_over


def save(layout: RunLayout, step: int, attempt: int = 0) -> None:
    place = begin(layout.checkpoint(step))
    (place / "weights").write_bytes(bytes([step % 256, attempt]))
    complete(place, layout.checkpoint(step), {"attempt": attempt})


def test_a_checkpoint_is_due_that_is_far_enough_from_the_last_one(model):
    layout = a_run(model, 4, 12)
    course = DatasetFollower(layout, request_for(model, every=10))
    assert course.due(is_last=False) == [12]
    note(layout, "d", 12, reward=0.5)
    for step, due in ((20, []), (22, [22])):
        save(layout, step)
        assert course.due(is_last=False) == due
        assert course.due(is_last=True) == [step]


def test_a_step_is_due_again_once_it_has_another_model(model):
    layout = a_run(model, 4, 12)
    course = DatasetFollower(layout, request_for(model))
    course._tried.add((12, checkpoint_digest(layout.checkpoint(12))))
    assert not course.due(is_last=True)
    shutil.rmtree(layout.checkpoint(12))
    assert course.due(is_last=True) == [4]  # the run went back
    save(layout, 12, attempt=1)
    assert course.due(is_last=True) == [12]


def test_of_adapters_every_checkpoint_is_due_that_is_far_enough_from_the_one_before(model):
    layout = a_run(model, 4, 8, 12, 20, 22, 30, 31)
    course = DatasetFollower(layout, request_for(model, every=8), takes_all=True)
    assert course.due(is_last=False) == [4, 12, 20, 30]
    assert course.due(is_last=True) == [4, 12, 20, 30, 31]
    note(layout, "d", 20, reward=0.5)
    course._tried.add((20, checkpoint_digest(layout.checkpoint(20))))
    assert course.due(is_last=False) == [30]


def begins(layout: RunLayout, *steps: int) -> None:
    lines = [json.dumps({"index": index, "resume_step": step}) for index, step in enumerate(steps)]
    layout.attempts.write_text("\n".join(lines) + "\n")


def test_figures_of_steps_that_were_undone_decide_nothing(model):
    layout = a_run(model)
    request = Request("d", model, best="reward", stop_after=2)
    for step, value in ((50, 0.5), (100, 0.9), (150, 0.6), (200, 0.6)):
        note(layout, "d", step, attempt=0, reward=value)
    begins(layout, 0)
    assert list(RunView(layout).values_of("d", "reward")) == [50, 100, 150, 200]
    begins(layout, 0, 50)
    assert list(RunView(layout).values_of("d", "reward")) == [50]
    note(layout, "d", 60, attempt=1, reward=0.4)
    course = DatasetFollower(layout, request)
    course.has_new = True
    assert not course.is_no_better(lambda line: None)
    best = layout.evaluations / "best-d"
    best.mkdir()
    (best / "rlhpc_figures.json").write_text(
        json.dumps({"step": 100, "attempt": 0, "figures": {"reward": {"value": 0.9}}})
    )
    assert follow._kept_value(layout, best, "reward") == -math.inf
    begins(layout, 0, 100)
    assert follow._kept_value(layout, best, "reward") == 0.9


@pytest.mark.parametrize("is_better_moved_away", [False, True])
def test_the_best_model_is_kept_of_a_checkpoint_that_the_run_has_deleted_meanwhile(model, is_better_moved_away):
    """A command that was killed while it kept a model has not lost the better one, which it had moved away."""
    layout, said = a_run(model, 4), list[str]()
    evaluation = plan_evaluation(find_target(layout.root, 4), request_for(model, best="reward"))
    shutil.rmtree(layout.checkpoint(4))
    layout.evaluations.mkdir()
    moved_away = layout.evaluations / ".best-d.old"
    if is_better_moved_away:
        moved_away.mkdir()
        figures = {"step": 2, "attempt": 0, "figures": {"reward": {"value": 0.9}}, "title": "better"}
        (moved_away / "rlhpc_figures.json").write_text(json.dumps(figures))
    report = Report("small-step_000004 on d", 1.0, 1, 3, {"reward": Estimate(0.5, 0.4, 0.6, 3)}, 4.0, 0.0, 0)
    drawn = model.rename(model.with_name("drawn"))
    follow._keep_if_best(layout, 4, evaluation, report, drawn, "reward", said.append)
    kept = json.loads((layout.evaluations / "best-d" / "rlhpc_figures.json").read_bytes())
    expected = (2, 0, "better") if is_better_moved_away else (4, 0, report.title)
    assert (kept["step"], kept["attempt"], kept["title"]) == expected
    assert not moved_away.exists()
    assert bool(said) != is_better_moved_away


def test_curves_go_on_after_the_run_has_begun_afresh(tmp_path):
    """`rlhpc run --fresh` deletes the run directory, of which a command that follows it has a file open."""
    directory = tmp_path / "evaluations" / "tensorboard"
    curves = Curves(directory)
    curves.add(4, {"reward": 0.5})
    shutil.rmtree(tmp_path / "evaluations")
    curves.add(2, {"reward": 0.25})
    curves.close()
    assert read_curves(directory)["reward"].values.tolist() == [0.25]


@pytest.mark.starts
def test_ctrl_c_ends_an_evaluation_also_where_its_samples_cannot_be_counted(model):
    """Another error in its place would cost one evaluation, and whoever follows a run would go on."""
    layout = a_run(model, 4)
    request = request_for(model)
    evaluation = plan_evaluation(find_target(layout.root, 4), request)
    evaluation = replace(evaluation, target=replace(evaluation.target, checkpoint=None))  # nothing is exported
    evaluated(evaluation.directory, evaluation.settings, [[True]] * evaluation.settings.num_prompts)

    def interrupted(of: Evaluation, report: Report, model: Path) -> None:
        (evaluation.directory / "samples-0.jsonl").write_text("damaged\n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation.report(print, done=interrupted)


def test_a_directory_that_is_used_is_waited_for_and_one_of_others_left_alone(model):
    layout, said = a_run(model, 4), list[str]()
    request = request_for(model)
    course, curves = DatasetFollower(layout, request), SimpleNamespace()
    evaluation = plan_evaluation(find_target(layout.root, 4), request)
    with evaluation_directory(evaluation.directory, evaluation.settings, is_fresh=False, tell=said.append):
        for _ in range(2):
            assert course.due(is_last=True) == [4]
            assert not course.evaluate([4], curves, said.append, said.append)
    assert course.is_waiting
    (line,) = said
    assert "another `rlhpc evaluate` is running there; tried again until it is done" in line
    other = plan_evaluation(find_target(layout.root, 4), replace(request, temperature=0.0))
    other.settings.write(evaluation.directory)
    before = (evaluation.directory / NAME).read_bytes()
    course = DatasetFollower(layout, request)
    assert course.evaluate([4], curves, said.append, said.append)
    assert "holds samples of other temperature" in said[-1]
    assert (evaluation.directory / NAME).read_bytes() == before
    assert not course.due(is_last=True)


def test_a_directory_that_will_never_do_is_not_waited_for(model):
    """A follower that waited would not end with its run."""
    layout, said = a_run(model, 4), list[str]()
    course = DatasetFollower(layout, request := request_for(model))
    directory = plan_evaluation(find_target(layout.root, 4), request).directory
    directory.mkdir(parents=True)
    (directory / "notes.txt").touch()
    assert course.evaluate([4], SimpleNamespace(), said.append, said.append)
    assert (course.is_waiting, course.due(is_last=True)) == (False, [])
    assert "step 4 is not evaluated" in said[0]
    assert "not empty, and not an evaluation" in said[0]


def test_a_disk_that_fails_costs_an_evaluation_and_ends_the_command_only_if_it_goes_on_failing(model):
    layout, said = a_run(model, 4, 8, 12), list[str]()
    course = DatasetFollower(layout, request := request_for(model))
    layout.evaluations.mkdir()
    for step in (4, 8, 12):
        plan_evaluation(find_target(layout.root, step), request).directory.touch()  # no directory can be made there
    for step in (4, 8):
        assert course.evaluate([step], SimpleNamespace(), said.append, said.append)
    assert [line[:24] for line in said] == ["step 4 is not evaluated:", "step 8 is not evaluated:"]
    with pytest.raises(OSError, match="small-step_000012-d"):
        course.evaluate([12], SimpleNamespace(), said.append, said.append)


def test_weights_that_a_killed_command_has_left_are_deleted_when_the_run_is_followed_again(model):
    layout = a_run(model)
    settings, places = settings_of(model), [layout.evaluations / name for name in ("left", "used", "of-others")]
    for place in places:
        (place / "model").mkdir(parents=True)
        (place / "model" / "model.safetensors").touch()
    for place in places[:2]:
        settings.write(place)
    layout.summary.write_text("{}")  # the run is complete, and has saved nothing
    options = options_of(str(layout.root), str(model.parent / "test.jsonl"), "--follow")
    with evaluation_directory(places[1], settings, is_fresh=False, tell=print):
        assert follow.follow_run(options, print, print) == 0
    assert [(place / "model").exists() for place in places] == [False, True, True]
    with evaluation_directory(places[0], settings, is_fresh=False, tell=print):
        pass  # nobody holds it


def test_a_job_that_follows_a_dead_run_without_jobs_gives_its_node_back(model, monkeypatch):
    layout, said = a_run(model), list[str]()
    layout.evaluations.mkdir()
    (layout.evaluations / "job.json").write_text(json.dumps({"job_id": 7}))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    looks = iter(range(100))
    monkeypatch.setattr(RunLife, "is_over", property(lambda life: next(looks) < 0))  # StopIteration: it never ends
    options = options_of(str(layout.root), str(model.parent / "test.jsonl"), "--follow", "--patience-s", "0.1")
    assert follow.follow_run(options, print, said.append) == 1
    assert "no sign of life" in said[-1]


@pytest.mark.parametrize(
    ("values", "has_ended"),
    [([0.5, 0.4], False), ([0.5, 0.4, 0.5], True), ([0.5, 0.4, 0.51], False), ([0.4, 0.5, 0.5, 0.5], True)],
)
def test_a_run_that_is_no_better_for_two_evaluations_is_stopped_by_new_figures(model, values, has_ended):
    layout, said = a_run(model), list[str]()
    course = DatasetFollower(layout, Request("d", model, best="reward", stop_after=2))
    for step, value in enumerate(values):
        note(layout, "d", step, reward=value)
    assert not course.is_no_better(said.append)  # it was resumed, and nothing is new
    course.has_new = True
    assert course.is_no_better(said.append) is has_ended
    assert len(said) == has_ended


# ------------------------------------------------------------------------------------------------------ two models


def evaluated(
    directory: Path, settings: EvaluationSettings, correct: list[list[bool | None]], at: str = "/data"
) -> Path:
    """An evaluation whose samples of each prompt were right or wrong; None: no verifier could judge one."""
    directory.mkdir(parents=True)
    settings = replace(settings, num_prompts=len(correct), samples_per_prompt=max(map(len, correct)))
    settings.write(directory)
    with SamplesFile(directory, 0) as file:
        for prompt, of_prompt in enumerate(correct):
            for sample, is_correct in enumerate(of_prompt):
                verdict = "verifier_error" if is_correct is None else "correct" if is_correct else "incorrect"
                reward = float(bool(is_correct))
                source = f"{at}/test.jsonl:{prompt + 1}"
                file.append(EvaluatedSample(prompt, sample, source, "x", 1, "stop", verdict, reward))
    return directory


def test_the_interval_of_a_difference_is_that_of_single_prompts_differences(model, tmp_path):
    """Hard and easy prompts alike: the two intervals overlap, and one model is better."""
    settings = settings_of(model)
    rates = np.linspace(0.0, 0.8, 60)
    first = [[sample < 10 * rate for sample in range(10)] for rate in rates]
    second = [[sample < 10 * rate + 1 for sample in range(10)] for rate in rates]
    found = comparison_of(
        evaluated(tmp_path / "a", settings, first), evaluated(tmp_path / "b", settings, second, at="/elsewhere")
    )
    one, other, change = found.figures["reward"]
    differences = np.mean(second, axis=1) - np.mean(first, axis=1)
    assert (one, other) == (pytest.approx(np.mean(first)), pytest.approx(np.mean(second)))
    assert change.value == pytest.approx(differences.mean())
    half = 1.959964 * differences.std(ddof=1) / np.sqrt(60)
    assert (change.low, change.high) == (pytest.approx(change.value - half), pytest.approx(change.value + half))
    assert found.figures["pass@1"][2].low > 0
    reports = [
        report_of(each, read_samples(tmp_path / name))
        for each, name in ((read_settings(tmp_path / n), n) for n in "ab")
    ]
    assert reports[0].figures["pass@1"].high > reports[1].figures["pass@1"].low
    assert "pass@1" in found.as_text()
    assert "better" in found.as_text()
    assert found.as_json()["num_prompts"] == 60


def change_samples(directory: Path, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> Path:
    file = directory / "samples-0.jsonl"
    lines = [change(number, json.loads(line)) for number, line in enumerate(file.read_text().splitlines())]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_prompts_and_samples_that_one_of_them_lacks_do_not_count(model, tmp_path):
    settings = settings_of(model)
    first = evaluated(tmp_path / "a", settings, [[True, True], [False, False], [True, False]])
    second = evaluated(tmp_path / "b", settings, [[False, True], [False, None]])
    found = comparison_of(first, second)
    assert (found.num_prompts, found.figures["pass@2"][2].num_prompts) == (2, 1)
    assert found.figures["pass@1"][2].value == pytest.approx(-0.25)
    assert "of 1 prompts" in found.as_text()
    assert "too few prompts" in found.as_text()
    assert "maj@2" not in found.figures  # no answers
    more = evaluated(tmp_path / "more", settings, [[True, True, True], [False] * 3], at="/x")
    for path in (first, more):
        change_samples(path, lambda _, line: line | {"answer": "7"})
    assert "maj@2" in comparison_of(first, first).figures
    assert "maj@2" not in comparison_of(first, more).figures  # of three votes it is another figure


def test_records_of_two_splits_whose_files_have_the_same_name_are_two_prompts(model, tmp_path):
    """As in a dataset that `datasets` has saved, with data.split=all: every split has data-00000-of-00001.arrow."""
    found = comparison_of(*(
        change_samples(
            evaluated(tmp_path / name, settings_of(model), [[name == "b"], [False]]),
            lambda n, line, at=at: line | {"source": f"{at}/{('train', 'test')[n]}/data-00000-of-00001.arrow:1"},
        )
        for name, at in (("a", "/data"), ("b", "/elsewhere/dataset"))
    ))  # fmt: skip
    assert (found.num_prompts, found.figures["pass@1"][2].num_prompts) == (2, 2)
    assert "pass@2" not in found.figures


def test_evaluations_that_differ_in_more_than_the_model_are_not_compared(model, tmp_path):
    first = evaluated(tmp_path / "a", settings_of(model), [[True]])
    other = replace(settings_of(model), inputs={"model": "n", "data": ["e"]}, temperature=0.5)
    with pytest.raises(ConfigError, match=r"(?s)inputs.data: \['d'\] and \['e'\].*temperature: 1.0 and 0.5"):
        comparison_of(first, evaluated(tmp_path / "b", other, [[True]]))
    parts = ["data.task=both", "composite.both.tasks={a='regex'}", "composite.both.correct=a"]
    one = evaluated(tmp_path / "one", settings_of(model, *parts), [[True]])
    two = evaluated(tmp_path / "two", settings_of(model, *parts, "composite.both.weights.a=2"), [[True]])
    with pytest.raises(ConfigError, match=r"composite.both: .*'weights': {}, .* and .*'weights': {'a': 2.0}"):
        comparison_of(one, two)
    with pytest.raises(ConfigError, match="not an evaluation"):
        comparison_of(first, model)
    begun = evaluated(tmp_path / "c", settings_of(model), [[True]])
    (begun / "samples-0.jsonl").write_text("")
    with pytest.raises(ConfigError, match="0 of 1 samples are there"):
        comparison_of(first, begun)
    with pytest.raises(ConfigError, match="no prompt in common"):
        comparison_of(first, evaluated(tmp_path / "d", settings_of(model), [[None]]))
    assert main(["compare", str(first), str(first), "--json"]) == 0


# ------------------ A job that evaluates a run is told that its time is nearly over: wherever that finds it, it goes on

JOB = 4711


def warn() -> None:
    """As Slurm does.  The handler runs before this returns."""
    os.kill(os.getpid(), signal.SIGUSR2)


class Warned(BaseModel):
    """Its serializer is interrupted by the warning."""

    number: int = 0

    @field_serializer("number")
    def _as_text(self, number: int) -> str:
        warn()
        return str(number)


class WarnedFinaliser:
    """The warning comes while it is being finalised."""

    def __del__(self) -> None:
        warn()


@pytest.fixture
def layout(tmp_path, monkeypatch) -> RunLayout:
    """A run whose evaluations are this process's job."""
    layout = RunLayout(tmp_path / "run")
    layout.evaluations.mkdir(parents=True)
    (layout.evaluations / "job.json").write_text(json.dumps({"job_id": JOB}))
    monkeypatch.setenv("SLURM_JOB_ID", str(JOB))
    return layout


def write_settings() -> None:
    Warned().model_dump_json()


def finalise() -> None:
    WarnedFinaliser()


@pytest.mark.parametrize("work", [warn, write_settings, finalise])
def test_a_warning_disturbs_nobody_and_is_not_forgotten(layout, work):
    handler = signal.getsignal(signal.SIGUSR2)
    with TimeWarning(layout) as warning:
        warning.remind()
        work()
        with pytest.raises(TimeIsUp):
            warning.remind()
    assert signal.getsignal(signal.SIGUSR2) is handler


def test_in_a_job_of_somebody_elses_it_is_ctrl_c(layout, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", str(JOB + 1))
    with TimeWarning(layout) as warning:
        warn()
        with pytest.raises(KeyboardInterrupt):
            warning.remind()


def test_a_job_goes_on_later_where_it_is_reminded_and_nowhere_else(layout, monkeypatch):
    said: list[str] = []

    def evaluate(
        layout: RunLayout, options: object, show: object, tell: Callable[[str], None], remind: Callable[[], None]
    ) -> int:
        remind()
        warn()
        tell("the best model so far")  # before its figures are on disk: nothing is raised here
        remind()
        return 1

    monkeypatch.setattr("launch.evaluate.follow._follow", evaluate)
    monkeypatch.setattr("launch.evaluate.follow.run_of", lambda options: layout)
    monkeypatch.setattr("launch.evaluate.follow.go_on_later", lambda layout, tell: said.append("later") or 0)
    assert follow_run(argparse.Namespace(), lambda report: None, said.append) == 0
    assert said == ["the best model so far", "later"]
