"""Every mistake of the table is refused with place, value and what is legal, before anything is started."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import h5py  # noqa: F401  its first import starts uname, which is not what these tests are about
import pytest

from launch.cli import main
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.ring.run_kit import Lab, make_lab, quick_settings, to_toml
from tests.unit.doc_pages import ROOT
from tests.unit.launch.bad_inputs import code_cases, file_cases, place_cases, run_file_cases
from tests.unit.launch.bad_inputs.desk import Case, Desk

# ------------------- `rlhpc check` refuses every mistake of the table, with place, value and what is legal, and so does

PAGE = ROOT / "tests" / "golden" / "mistakes.md"
TABLES: Mapping[str, tuple[Case, ...]] = {
    "The notation of the run file": run_file_cases.TOML,
    "Names of keys": run_file_cases.KEYS,
    "Values": run_file_cases.VALUES,
    "Keys that contradict each other": run_file_cases.CONTRADICTIONS,
    "Words behind the run file": run_file_cases.OVERRIDES,
    "The model": file_cases.MODEL,
    "Files of data": file_cases.FILES,
    "Records": file_cases.LINES,
    "References": file_cases.REFERENCES,
    "Reward functions": code_cases.REWARDS,
    "Environments, tools, agents": code_cases.ENVIRONMENTS,
    "Losses and advantages": code_cases.LOSSES,
    "Judges and sandboxes": code_cases.JUDGES,
    "Devices and transports": place_cases.DEVICES,
    "Run directories": place_cases.DIRECTORIES,
    "Evaluations": place_cases.EVALUATIONS,
    "Site files (`--site`)": place_cases.SITES,
}
WARNED: Mapping[str, tuple[Case, ...]] = {
    "Warnings of values": place_cases.UNUSUAL,
    "Warnings of keys beside others": place_cases.BESIDE_OTHERS,
    "Warnings of your own code": place_cases.CODE,
}
CASES, DOUBTS = (
    [pytest.param(each, id=f"{title}: {each.what}") for title, table in tables.items() for each in table]
    for tables in (TABLES, WARNED)
)
TRIED_BY_A_RUN = (
    "Reward functions: it raises",
    "Reward functions: it returns a list for a batch",
    "Reward functions: an error on import",
    "Losses and advantages: a loss without weights",
)
ANEW = "tests/golden/mistakes.md is not of today: python -m tests.unit.launch.test_table_of_mistakes"
OF_THE_LAB = "AutoTokenizer takes"  # a warning of its tiny model
# Words of libraries that may change with their versions, and of this machine.
VARYING = (
    (re.compile(r"(is not a readable (?:Parquet|Arrow) file: ).*"), r"\1…"),
    (re.compile(r"(is not a tokenizer: ).*"), r"\1…"),
    (re.compile(r"(does not compile: ).*"), r"\1…"),
    (re.compile(r"(is damaged: ).*"), r"\1…"),
    (re.compile(r"CUDA_VISIBLE_DEVICES[^)]*"), "CUDA_VISIBLE_DEVICES …"),
    (re.compile(r"(cannot be read: ).*"), r"\1…"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0x…"),
    (re.compile(r"\d+\.\d(?= s, more than half)"), "…"),
    (re.compile(r"(processes that share )\d+"), r"\1…"),
)


@pytest.fixture
def no_process(monkeypatch, request) -> None:
    def refuse(*arguments: object, **settings: object) -> NoReturn:
        raise AssertionError(f"a process was started: {arguments}")

    platform.processor()  # starts one the first time: h5py asks for it when it is imported
    if not request.node.callspec.params["case"].is_tried:
        monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.starts
@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_refused_with_place_value_and_what_is_legal(lab, tmp_path, case, no_process):
    desk, words = _spoiled(lab, tmp_path, case)
    status, message = _refusal(desk, "check", words)
    assert status == EXIT_CONFIG, f"`rlhpc check` accepts it: {message}"
    assert _row(lab, desk, case, message) in PAGE.read_text(encoding="utf-8").splitlines(), ANEW
    for part in case.says:
        assert part in message
    assert len(message.splitlines()) <= 8, "one line a fault"
    assert case.without not in message
    if not case.is_tried and "--site" not in words:  # of these, a few below; a run has no --site
        status, again = _refusal(desk, "run", words)
        assert status == EXIT_CONFIG
        # Of a place for the run each speaks in its own words: `run` is told by the filesystem.
        own_words = ("run director", "too long", "a directory", "or directory")
        assert again == message or any(each in again for each in own_words)
    assert not (tmp_path / "runs" / "first" / "config.json").exists()


@pytest.mark.starts
@pytest.mark.parametrize("case", [case for case in CASES if case.id in TRIED_BY_A_RUN])
def test_a_run_tries_the_users_own_code_before_it_starts_anything(lab, tmp_path, case):
    desk, words = _spoiled(lab, tmp_path, case)
    status, message = _refusal(desk, "run", words)
    assert status == EXIT_CONFIG
    assert _row(lab, desk, case, message) in PAGE.read_text(encoding="utf-8").splitlines()
    assert not [*(tmp_path / "runs").glob("*")]


@pytest.mark.starts
@pytest.mark.parametrize("case", DOUBTS)
def test_what_is_legal_and_seldom_meant_is_warned_of(lab, tmp_path, case):
    desk, words = _spoiled(lab, tmp_path, case)
    message = _warnings(desk, words)
    for part in case.says:
        assert part in message
    assert _row(lab, desk, case, message) in PAGE.read_text(encoding="utf-8").splitlines(), ANEW


@pytest.mark.starts
def test_what_is_right_is_accepted_without_a_warning(lab, tmp_path):
    """The desk on which mistakes are made: nothing but the mistake is refused."""
    desk, _ = _spoiled(lab, tmp_path, Case("nothing", lambda desk: None, ()))
    assert _warnings(desk, []) == ""


def test_there_are_enough_of_them_and_no_two_are_alike():
    names = [(title, each.what) for tables in (TABLES, WARNED) for title, table in tables.items() for each in table]
    assert len(names) == len({*names}) >= 120


def test_the_page_has_a_row_for_each():
    """The test above compares their words."""
    shown = re.findall(r"^\| (.*?) \| ``", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [_cell(each.what) for tables in (TABLES, WARNED) for table in tables.values() for each in table]
    assert shown == wanted, ANEW
    assert f"{sum(map(len, TABLES.values()))} mistakes" in PAGE.read_text(encoding="utf-8"), ANEW


# ------------------------------------------------------------------------------------------------------------ internals


def _spoiled(lab: Lab, root: Path, case: Case) -> tuple[Desk, list[str]]:
    desk = Desk(lab, root)
    with contextlib.chdir(root):
        words = list(case.spoil(desk) or ())
        desk.write_run_file()
    return desk, words


def _refusal(desk: Desk, command: str, words: list[str]) -> tuple[int, str]:
    """Return exit status and what is said on stderr."""
    status, _, errors = _said(desk, command, words)
    return status, errors


def _warnings(desk: Desk, words: list[str]) -> str:
    """Return the warnings of `rlhpc check`, without the word, and assert that it refuses nothing."""
    status, output, errors = _said(desk, "check", words)
    assert status == 0, errors
    said = [line.removeprefix("warning     ") for line in output.splitlines() if line.startswith("warning")]
    return "\n".join(line for line in said if not line.startswith(OF_THE_LAB))


def _said(desk: Desk, command: str, words: list[str]) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr, with the user's directory as the current one and on the import path."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(desk.root),
        _on_import_path(desk.root),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        status = main([command, "run.toml", *words])
    return status, output.getvalue(), errors.getvalue().removeprefix("rlhpc: ").rstrip("\n")


@contextlib.contextmanager
def _on_import_path(directory: Path) -> Iterator[None]:
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(directory))


def _row(lab: Lab, desk: Desk, case: Case, message: str) -> str:
    """Of the page; paths as if the user's directory were the current one."""
    for place in (desk.root, lab.root):
        message = message.replace(f"{place}{os.sep}", "").replace(str(place), ".")
    for varying, instead in VARYING:
        message = varying.sub(instead, message)
    lines = message.splitlines()
    return f"| {_cell(case.what)} | {'<br>'.join(f'`` {_cell(line)} ``' for line in lines)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\x00", "�")


def page(wanted: str = "") -> str:
    """tests/golden/mistakes.md; only new rows and those in which the wanted words stand are made anew."""
    tables = [*TABLES.items(), *WARNED.items()]
    number, total, done = sum(map(len, TABLES.values())), sum(len(table) for _, table in tables), 0
    head, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    rows = {
        (section.partition("\n")[0], match[1]): match[0]
        for section in sections
        for match in re.finditer(r"^\| (.*?) \| ``.*$", section, re.MULTILINE)
    }
    parts = [re.sub(r"\d+ mistakes", f"{number} mistakes", head).rstrip("\n")]
    with tempfile.TemporaryDirectory() as place:
        lab = make_lab(Path(place) / "lab")
        for title, table in tables:
            what = "what is legal" if title in WARNED else "mistake"
            parts += ["", f"## {title}", "", f"| {what} | what is said |", "|---|---|"]
            for index, each in enumerate(table):
                done += 1
                row = rows.get((title, _cell(each.what)), "")
                if row and wanted.lower() not in f"{title}: {row}".lower():
                    parts.append(row)
                    continue
                print(f"{done} of {total}  {title}: {each.what}", file=sys.stderr, flush=True)
                root = Path(place) / f"{len(parts)}_{index}"
                root.mkdir()
                desk, words = _spoiled(lab, root, each)
                said = _warnings(desk, words) if title in WARNED else _refusal(desk, "check", words)[1]
                parts.append(_row(lab, desk, each, said))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.unit.launch.test_table_of_mistakes",
        description="Make the rows of tests/golden/mistakes.md anew: all of them, which takes minutes, or some.",
    )
    parser.add_argument("words", nargs="*", help="make only new rows and those in which these words stand")
    PAGE.write_text(page(" ".join(parser.parse_args().words)), encoding="utf-8")


# ------------------------- Whatever is wrong with what the user wrote is said in a line a fault, with the place, before


@pytest.fixture
def no_process_bench(monkeypatch) -> None:
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
def bench(lab, tmp_path, capsys, no_process_bench) -> Bench:
    return Bench(lab, tmp_path, capsys)


def test_references_that_the_task_cannot_read_are_named_line_by_line(bench):
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
def test_a_layout_that_contradicts_itself_or_the_model_is_refused(bench, trainer, words):
    bench.settings["trainer"] |= {"backend": "megatron"} | trainer
    (line,) = bench.refusal()
    for word in words:
        assert word in line
    assert bench.refusal(command="check") == [line]


@pytest.mark.parametrize(
    ("form", "trainer", "words"),
    [
        ("merged", {"backend": "megatron"}, ["'nf4' with trainer.backend='megatron'; legal: 'reference', 'deepspeed'"]),
        ("merged", {"backend": "deepspeed", "zero_stage": 3}, ["with trainer.zero_stage=3", "legal: 1, 2"]),
    ],
)
def test_four_bits_that_the_backend_does_not_have_are_refused(bench, form, trainer, words):
    bench.settings |= {"lora": {"rank": 4, "quantization": "nf4"}, "weights": {"form": form}}
    bench.settings["trainer"] |= trainer
    (line,) = bench.refusal()
    for word in words:
        assert word in line


def test_four_bits_without_their_library_are_refused_with_what_to_install(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    bench.settings |= {"lora": {"rank": 4, "quantization": "nf4"}, "weights": {"form": "merged"}}
    (line,) = bench.refusal()
    assert "needs the package bitsandbytes" in line
    assert "extra 'nf4'" in line


@pytest.mark.parametrize(
    ("package", "trainer", "words"),
    [
        ("megatron.core", {"backend": "megatron"}, ["trainer.backend='megatron'", "extra 'trainer'"]),
        ("deepspeed", {"backend": "deepspeed"}, ["trainer.backend='deepspeed'", "extra 'deepspeed'"]),
        ("transformer_engine", {"backend": "megatron", "transformer_engine": True}, ["transformer_engine=true"]),
        ("torch", {"backend": "reference"}, ["trainer.backend='reference'", "extra 'trainer'"]),
    ],
)  # fmt: skip
def test_a_backend_that_is_not_installed_is_refused_with_what_to_install(bench, monkeypatch, package, trainer, words):
    monkeypatch.setitem(sys.modules, package, None)  # as Python itself marks what cannot be imported
    bench.settings["trainer"] |= trainer
    (line,) = bench.refusal()
    for word in (f"needs the package {package}", *words):
        assert word in line


def test_every_fault_of_a_file_has_its_line(bench):
    bench.settings["run"]["num_steps"] = "many"
    bench.settings["trainer"]["learning_rte"] = 1.0
    del bench.settings["generation"]["max_prompt_tokens"]
    lines = bench.refusal()
    assert len(lines) == 3
    assert all("run.toml" in line for line in lines)
    assert sum("generation.max_prompt_tokens: missing" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("template", "end", "said"),
    [
        ("", "<eos>", "data.thinking_end='<eos>' is a special token"),
        ("{{ messages[0]['content'] }}</t>\n\n", "</t>", "ends with it already"),
    ],
)
def test_thinking_whose_end_no_completion_can_have_is_refused(bench, lab, template, end, said):
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
def test_a_stop_string_that_no_completion_can_have_is_refused(bench, stop, said):
    bench.settings["generation"]["stop"] = [stop]
    (line,) = bench.refusal()
    assert re.search(said, line)


def test_a_run_file_that_is_not_there_not_a_file_or_not_toml_is_refused(tmp_path, capsys):
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\nname = 3")
    near = f"no such run file (did you mean {broken}?)"
    for path, said in (
        (tmp_path / "no.toml", "no such run file\n"),
        (tmp_path / "borken.toml", near),
        (tmp_path, "a directory"),
        (broken, "line 1"),
    ):
        assert main(["run", str(path)]) == EXIT_CONFIG
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{path}: " in error
        assert said in error


def test_a_dataset_is_refused_only_where_it_is_wrong(bench):
    """The last of many lines is read before anything starts."""
    dataset = bench.root / "long.jsonl"
    records = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(2_000)]
    dataset.write_text("\n".join([*records, json.dumps({"prompt": "1" * 13, "answer": "1"})]))
    bench.settings["data"]["path"] = str(dataset)
    (line,) = bench.refusal()
    assert "long.jsonl:2001: the prompt has 13 tokens; legal: 1 to generation.max_prompt_tokens=12" in line
