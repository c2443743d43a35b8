"""Whatever is wrong with what the user wrote is said in a line a fault, with the place, before anything is started."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import h5py  # noqa: F401  its first import starts uname, which is not what these tests are about
import pytest
from tokenizers import Tokenizer

from launch.cli import main
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.ring.run_kit import Lab, make_lab, quick_settings, to_toml

Change = Callable[[dict[str, dict[str, Any]], Path], None]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **settings: object) -> NoReturn:
        raise AssertionError(f"a process was started: {arguments}")

    platform.processor()  # starts one the first time: h5py asks for it when it is imported
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
        assert main([command, str(self.run_file), *words]) == EXIT_CONFIG
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
        ("run", "num_steps", "many", ["run.num_steps='many'", "legal: a whole number"]),
        ("run", "num_steps", 0, ["run.num_steps=0", "legal: above 0"]),
        ("run", "name", "../elsewhere", ["run.name='../elsewhere'"]),
        ("model", "dtype", "float16", ["model.dtype='float16'", "'float32' or 'bfloat16'"]),
        ("trainer", "learning_rate", "small", ["trainer.learning_rate='small'", "number"]),
        ("trainer", "recompute_activations", "perhaps", ["trainer.recompute_activations='perhaps'", "'full'"]),
        ("admission", "group_size", 1, ["admission.group_size=1", "algorithm.advantage='grpo'", "legal: 2 or more"]),
        ("generation", "top_p", 0.9, ["generation.top_p=0.9: unknown key", "the whole distribution"]),
        ("generation", "top_k", 5, ["generation.top_k=5: unknown key", "the whole distribution"]),
        ("trainer", "token_budget", 35, ["trainer.token_budget=35", "longest sample", "= 36", "legal: 36 or more"]),
        ("admission", "window_groups", 0, ["admission.window_groups=0", "legal: above 0"]),
        ("trainer", "warmup_steps", 7, ["trainer.warmup_steps=7", "run.num_steps=6"]),
        ("trainer", "min_learning_rate", 1.0, ["trainer.min_learning_rate=1", "trainer.learning_rate=0.0001"]),
        ("data", "task", "integer_arithmetics", ["data.task=", "regex, token_f1, or package.module:function"]),
        ("data", "task", "no_such_package_here:judge", ["data.task='no_such_package_here:judge'", "PYTHONPATH"]),
        ("data", "task", "tests.unit.rewards.sample_rewards:of_record", ["whole record", 'legal: "*"']),
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


def test_references_that_the_task_cannot_read_are_named_line_by_line(bench: Bench) -> None:
    bench.settings["data"] |= {"task": "multiple_choice"}
    lines = bench.refusal()
    assert len(lines) == 6
    for number, line in enumerate(lines[:5], 1):
        assert f"train.jsonl:{number}: field 'answer' (data.reference_field), for data.task='multiple_choice': " in line
        assert "is not one letter; legal: B, (B) or B." in line
    assert re.fullmatch(r"and \d+ more of \d+ records", lines[5])
    assert bench.refusal(command="check") == lines


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"num_ranks": 3, "tensor_parallel": 2}, ["trainer.num_ranks=3", "tensor_parallel", "= 2"]),
        ({"num_ranks": 4, "pipeline_parallel": 2, "context_parallel": 4}, ["trainer.num_ranks=4", "= 8"]),
        ({"num_ranks": 4, "expert_parallel": 3}, ["trainer.expert_parallel=3", "the 4 ranks of a pipeline stage"]),
        ({"sequence_parallel": True}, ["sequence_parallel=true", "tensor_parallel=1; legal: false, its default, or "]),
        ({"chunks_per_stage": 2}, ["trainer.chunks_per_stage=2", "pipeline_parallel=1; legal: 1, its default, or "]),
        ({"optimizer_offload": True, "distributed_optimizer": False}, ["trainer.optimizer_offload=true"]),
        ({"zero_stage": 3}, ["zero_stage=3 has no effect with trainer.backend='megatron'; legal: 2, its default"]),
        ({"parameter_offload": True}, ["parameter_offload=true", "or trainer.backend='deepspeed'"]),
        ({"backend": "deepspeed", "parameter_offload": True}, ["zero_stage=2; legal", "trainer.zero_stage=3"]),
        ({"backend": "deepspeed", "tensor_parallel": 2}, ["tensor_parallel=2", "or trainer.backend='megatron'"]),
        ({"backend": "deepspeed", "recompute_activations": "selective"}, ["legal: 'none', its", "'full', or "]),
        ({"backend": "reference", "transformer_engine": True}, ["trainer.transformer_engine=true", "'megatron'"]),
        ({"backend": "reference", "distributed_optimizer": False}, ["distributed_optimizer=false", "'megatron'"]),
        ({"backend": "reference", "optimizer_offload": True}, ["optimizer_offload=true", "'megatron' or 'deepspeed'"]),
        # The model has 2 heads, 2 layers and no experts.
        ({"num_ranks": 4, "tensor_parallel": 4}, ["tensor_parallel = 4", "num_key_value_heads = 2; legal: 1, 2"]),
        ({"num_ranks": 4, "pipeline_parallel": 4}, ["pipeline_parallel × chunks_per_stage = 4", "layers = 2"]),
        ({"num_ranks": 2, "expert_parallel": 2}, ["trainer.expert_parallel=2", "no experts; legal: 1"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_layout_that_contradicts_itself_or_the_model_is_refused(
    bench: Bench, trainer: dict[str, Any], words: list[str]
) -> None:
    bench.settings["trainer"] |= {"backend": "megatron"} | trainer
    (line,) = bench.refusal()
    for word in words:
        assert word in line
    assert bench.refusal(command="check") == [line]


def test_a_family_without_megatron_layers_is_refused_with_another_backend(bench: Bench, lab: Lab) -> None:
    model = bench.root / "model"
    shutil.copytree(lab.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gemma9"}))
    bench.settings["model"]["path"] = str(model)
    bench.settings["trainer"]["backend"] = "megatron"
    (line,) = bench.refusal()
    for word in ("model_type='gemma9'", "legal: llama, qwen2, qwen3, qwen3_moe, or", "trainer.backend='deepspeed'"):
        assert word in line


@pytest.mark.parametrize("backend", ["megatron", "reference"])
def test_a_model_without_one_of_its_sizes_is_refused_by_name(bench: Bench, lab: Lab, backend: str) -> None:
    model = bench.root / "model"
    shutil.copytree(lab.model, model)
    config = json.loads((model / "config.json").read_text())
    del config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))
    bench.settings["model"]["path"] = str(model)
    bench.settings["trainer"]["backend"] = backend
    (line,) = bench.refusal()
    assert "config.json: no 'num_hidden_layers', which every qwen2 has" in line


@pytest.mark.parametrize(
    ("package", "trainer", "words"),
    [
        ("megatron.core", {"backend": "megatron"}, ["trainer.backend='megatron'", "extra 'trainer'"]),
        ("deepspeed", {"backend": "deepspeed"}, ["trainer.backend='deepspeed'", "extra 'deepspeed'"]),
        ("transformer_engine", {"backend": "megatron", "transformer_engine": True}, ["transformer_engine=true"]),
        ("torch", {"backend": "reference"}, ["trainer.backend='reference'", "extra 'trainer'"]),
    ],
)  # fmt: skip
def test_a_backend_that_is_not_installed_is_refused_with_what_to_install(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, package: str, trainer: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as Python itself marks what cannot be imported
    bench.settings["trainer"] |= trainer
    (line,) = bench.refusal()
    for word in (f"needs the package {package}", *words):
        assert word in line


def test_a_layout_that_cannot_fit_the_sites_gpu_is_refused_by_check(bench: Bench, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[trainer]\ngpu = "mine"\ngpu_memory_gib = 1.0\n[generation]\ngpu = "mine"\ngpu_memory_gib = 1.0\n')
    bench.settings["trainer"]["device"] = "auto"
    (line,) = bench.refusal("--site", str(site), command="check")
    for word in ("trainer.backend='reference'", "GiB more than the 1 GiB of trainer.gpu='mine'", str(site)):
        assert word in line
    (line,) = bench.refusal("--site", str(tmp_path / "none.toml"), command="check")
    assert "none.toml: no such site file" in line


def test_an_unknown_key_is_answered_with_the_legal_ones(bench: Bench) -> None:
    bench.settings["checkpoint"]["keeps"] = 3
    (line,) = bench.refusal()
    assert "checkpoint.keeps=3: unknown key; legal: every_steps, keep, trainer_format (did you mean keep?)" in line


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
        (['{"prompt": "", "answer": "2"}'], [":1", "field 'prompt' (data.prompt_template) is empty"]),
        ([], ["has no records"]),
        (["", "  "], ["has no records"]),
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
    assert "holds no file of .jsonl, .ndjson, .json, .csv" in line


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_half_a_model_is_refused_by_what_it_lacks(bench: Bench, lab: Lab, missing: str) -> None:
    model = bench.root / "model"
    shutil.copytree(lab.model, model)
    (model / missing).unlink()
    bench.settings["model"]["path"] = str(model)
    (line,) = bench.refusal()
    assert "not a complete HF checkpoint" in line
    assert missing.removeprefix("model") in line


def test_a_token_that_was_added_to_the_tokenizer_alone_is_refused_where_prompts_have_it(bench: Bench, lab: Lab) -> None:
    model = bench.root / "model"
    shutil.copytree(lab.model, model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text("<|im_start|>{{ messages[0]['content'] }}")
    bench.settings["model"]["path"] = str(model)
    bench.settings["data"]["use_chat_template"] = True
    bench.settings["generation"]["max_prompt_tokens"] = 32
    (line,) = bench.refusal()
    assert "config.json: vocab_size=100, and the prompt of " in line
    assert (
        "has token 100, which was added to the tokenizer and not to the model; legal: a model that was resized" in line
    )


@pytest.mark.parametrize(
    ("template", "end", "said"),
    [
        ("", "<eos>", "data.thinking_end='<eos>' is a special token"),
        ("{{ messages[0]['content'] }}</t>\n\n", "</t>", "ends with it already"),
    ],
)
def test_thinking_whose_end_no_completion_can_have_is_refused(
    bench: Bench, lab: Lab, template: str, end: str, said: str
) -> None:
    model = bench.root / "model"
    shutil.copytree(lab.model, model)
    (model / "chat_template.jinja").write_text(template)
    bench.settings["model"]["path"] = str(model)
    bench.settings["data"] |= {"use_chat_template": bool(template), "thinking_end": end}
    bench.settings["generation"]["max_prompt_tokens"] = 32
    (line,) = bench.refusal()
    assert said in line


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("x<eos>", "generation.stop='x<eos>' has the special token '<eos>' in it, .*; legal: '<eos>' alone"),
        ("\u20ac", "generation.stop='\u20ac': the tokenizer of model.path cannot write it"),
    ],
)
def test_a_stop_string_that_no_completion_can_have_is_refused(bench: Bench, stop: str, said: str) -> None:
    bench.settings["generation"]["stop"] = [stop]
    (line,) = bench.refusal()
    assert re.search(said, line)


def test_a_model_whose_config_is_not_json_is_refused(bench: Bench, lab: Lab) -> None:
    model = bench.root / "model"
    shutil.copytree(lab.model, model)
    (model / "config.json").write_text("{")
    bench.settings["model"]["path"] = str(model)
    (line,) = bench.refusal()
    assert "config.json: not JSON" in line


def test_a_model_with_windows_is_not_trained_without_them(bench: Bench, lab: Lab) -> None:
    model = bench.root / "windows"
    shutil.copytree(lab.model, model)
    document = json.loads((model / "config.json").read_text()) | {"use_sliding_window": True, "sliding_window": 8}
    (model / "config.json").write_text(json.dumps(document))
    bench.settings["model"]["path"] = str(model)
    bench.settings["trainer"]["backend"] = "megatron"
    (line,) = bench.refusal(command="check")
    assert (
        "config.json: use_sliding_window=True, which trainer.backend='megatron' does not compute; legal: False, or"
        in line
    )


def test_a_run_directory_that_cannot_be_made_is_refused_by_check_and_run(bench: Bench) -> None:
    bench.run_directory = bench.root / "run.toml" / "first"
    bench.settings["run"]["directory"] = str(bench.run_directory)
    for command in ("check", "run"):
        (line,) = bench.refusal(command=command)
        assert "run.toml" in line
        assert "not a directory" in line.lower()


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
        assert main(["run", str(path)]) == EXIT_CONFIG
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
