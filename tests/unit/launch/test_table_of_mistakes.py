"""`rlhpc check` refuses every mistake of the table, with place, value and what is legal, and so does `rlhpc run`.

tests/golden/mistakes.md has all messages, written by `python -m tests.unit.launch.test_table_of_mistakes`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import platform
import re
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
from tests.ring.run_kit import Lab, make_lab
from tests.unit.doc_pages import ROOT
from tests.unit.launch.bad_inputs import code_cases, data_cases, model_cases, place_cases, run_file_cases, warned_cases
from tests.unit.launch.bad_inputs.desk import Case, Desk

PAGE = ROOT / "tests" / "golden" / "mistakes.md"
TABLES: Mapping[str, tuple[Case, ...]] = {
    "The notation of the run file": run_file_cases.TOML,
    "Names of keys": run_file_cases.KEYS,
    "Values": run_file_cases.VALUES,
    "Keys that contradict each other": run_file_cases.CONTRADICTIONS,
    "Words behind the run file": run_file_cases.OVERRIDES,
    "The model": model_cases.MODEL,
    "Files of data": data_cases.FILES,
    "Records": data_cases.LINES,
    "References": data_cases.REFERENCES,
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
    "Warnings of values": warned_cases.UNUSUAL,
    "Warnings of keys beside others": warned_cases.BESIDE_OTHERS,
    "Warnings of your own code": warned_cases.CODE,
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


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def refuse(*arguments: object, **settings: object) -> NoReturn:
        raise AssertionError(f"a process was started: {arguments}")

    platform.processor()  # starts one the first time: h5py asks for it when it is imported
    if not request.node.callspec.params["case"].is_tried:
        monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.starts
@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_refused_with_place_value_and_what_is_legal(
    lab: Lab, tmp_path: Path, case: Case, no_process: None
) -> None:
    desk, words = _spoiled(lab, tmp_path, case)
    status, message = _refusal(desk, "check", words)
    assert status == EXIT_CONFIG, f"`rlhpc check` accepts it: {message}"
    assert _row(lab, desk, case, message) in PAGE.read_text(encoding="utf-8").splitlines(), ANEW
    for part in case.says:
        assert part in message
    assert len(message.splitlines()) <= 8, "one line a fault"
    assert "Traceback" not in message
    if not case.is_tried and "--site" not in words:  # of these, a few below; a run has no --site
        status, again = _refusal(desk, "run", words)
        assert status == EXIT_CONFIG
        # Of a place for the run each speaks in its own words: `run` is told by the filesystem.
        own_words = ("run director", "too long", "a directory", "or directory")
        assert again == message or any(each in again for each in own_words)
    assert not (tmp_path / "runs" / "first" / "config.json").exists()


@pytest.mark.starts
@pytest.mark.parametrize("case", [case for case in CASES if case.id in TRIED_BY_A_RUN])
def test_a_run_tries_the_users_own_code_before_it_starts_anything(lab: Lab, tmp_path: Path, case: Case) -> None:
    desk, words = _spoiled(lab, tmp_path, case)
    status, message = _refusal(desk, "run", words)
    assert status == EXIT_CONFIG
    assert _row(lab, desk, case, message) in PAGE.read_text(encoding="utf-8").splitlines()
    assert not [*(tmp_path / "runs").glob("*")]


@pytest.mark.starts
@pytest.mark.parametrize("case", DOUBTS)
def test_what_is_legal_and_seldom_meant_is_warned_of(lab: Lab, tmp_path: Path, case: Case) -> None:
    desk, words = _spoiled(lab, tmp_path, case)
    message = _warnings(desk, words)
    for part in case.says:
        assert part in message
    assert _row(lab, desk, case, message) in PAGE.read_text(encoding="utf-8").splitlines(), ANEW


def test_what_is_right_is_accepted_without_a_warning(lab: Lab, tmp_path: Path) -> None:
    """The desk on which mistakes are made: nothing but the mistake is refused."""
    desk, _ = _spoiled(lab, tmp_path, Case("nothing", lambda desk: None, ()))
    assert _warnings(desk, []) == ""


def test_there_are_enough_of_them_and_no_two_are_alike() -> None:
    names = [(title, each.what) for tables in (TABLES, WARNED) for title, table in tables.items() for each in table]
    assert len(names) == len({*names}) >= 120


def test_the_page_has_a_row_for_each() -> None:
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


def page() -> str:
    """tests/golden/mistakes.md."""
    number = sum(map(len, TABLES.values()))
    head, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## ")
    parts = [re.sub(r"\d+ mistakes", f"{number} mistakes", head).rstrip("\n")]
    with tempfile.TemporaryDirectory() as place:
        lab = make_lab(Path(place) / "lab")
        for title, table in [*TABLES.items(), *WARNED.items()]:
            what = "what is legal" if title in WARNED else "mistake"
            parts += ["", f"## {title}", "", f"| {what} | what is said |", "|---|---|"]
            for index, each in enumerate(table):
                root = Path(place) / f"{len(parts)}_{index}"
                root.mkdir()
                desk, words = _spoiled(lab, root, each)
                said = _warnings(desk, words) if title in WARNED else _refusal(desk, "check", words)[1]
                parts.append(_row(lab, desk, each, said))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
