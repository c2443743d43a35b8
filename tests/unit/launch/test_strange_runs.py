"""Runs with odd clocks, names and files can be looked at: nothing in them is an error, or is obeyed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.commands.logs import show_logs
from launch.commands.show import EventView
from launch.common.text import escaped
from launch.view.report import as_text, read_report
from launch.view.run import RunView
from launch.view.status import render_status
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.unit.doc_pages import ROOT
from tests.unit.launch.runs_kit import Runs
from tests.unit.launch.test_report import BEGAN_S, ToldRun

pytestmark = pytest.mark.starts  # a run has a launcher, a command its output
SWITCHES_SCREEN = "\x1b[2J\x1b]0;title\x07"


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run of this machine that is over, with a status."""
    runs = Runs(tmp_path)
    layout = runs.local("strange")
    runs.status(layout, "training", 5)
    return layout


@pytest.fixture
def told(tmp_path: Path) -> ToldRun:
    return ToldRun(tmp_path / "told")


def alter(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def valid(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


# --------------------------------------------------------------------------------------------------------------- status


def test_a_status_of_figures_that_are_no_numbers_is_valid_json(layout: RunLayout) -> None:
    alter(layout.status, reward=float("nan"), roles=[{"metrics": {"loss": float("-inf")}}])
    status = valid(render_status(layout, as_json=True))["status"]
    assert (status["reward"], status["roles"][0]["metrics"], status["step"]) == (None, {"loss": None}, 5)


@pytest.mark.parametrize("content", [b"[]", b'{"name": "\xff"}', b"{"])
def test_a_status_that_cannot_be_read_counts_as_none(content: bytes, layout: RunLayout) -> None:
    layout.status.write_bytes(content)
    assert render_status(layout) == f"{layout.root}: ended before its controller started"


def test_a_status_from_a_clock_that_is_ahead_is_not_younger_than_now(layout: RunLayout) -> None:
    alter(layout.status, unix_time_s=time.time() + 7200)
    assert "as of 0 s ago" in render_status(layout)


# --------------------------------------------------------------------------------------------------------------- report


@pytest.mark.parametrize("name", ["nanogpt", "finance"])
def test_a_run_whose_name_has_nan_in_it_has_a_report(name: str, tmp_path: Path) -> None:
    run = ToldRun(tmp_path / "told")
    document = json.loads(run.layout.config.read_text())
    document["config"]["run"]["name"] = name
    run.layout.config.write_text(json.dumps(document))
    assert as_text(read_report(RunView(run.layout)))[0].split() == ["run", name]
    assert main(["report", str(run.layout.root), "--html", str(tmp_path / "report.html")]) == 0
    assert f"Report of {name}" in (tmp_path / "report.html").read_text()


def test_lines_and_settings_of_another_form_are_left_out_of_a_report(told: ToldRun) -> None:
    whole = [each.text for each in read_report(RunView(told.layout)).story.happenings]
    with told.layout.job_events("4711").open("a") as file:
        for moment in ("noon", None, float("nan")):
            file.write(json.dumps({"unix_time_s": moment, "event": "restart", "text": "odd"}) + "\n")
    with told.layout.attempts.open("a") as file:
        file.write('{"index": 1, "unix_time_s": "noon"}\n')
    told.layout.status.write_text('{"step": null}')
    told.layout.config.write_text('{"config": {"run": null}, "hash": ""}')
    report = read_report(RunView(told.layout))
    assert [each.text for each in report.story.happenings] == whole
    assert report.headline[0] == ("run", "run")


# ------------------------------------------------------------------------------------------------------------- terminal


def test_nothing_that_a_run_has_written_commands_the_terminal(
    told: ToldRun, layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"unix_time_s": BEGAN_S + 50, "event": "restart", "text": SWITCHES_SCREEN}
    with told.layout.job_events("4711").open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert main(["report", str(told.layout.root)]) == 0
    alter(layout.status, name=SWITCHES_SCREEN)
    assert main(["status", str(layout.root)]) == 0
    log = layout.log("reward", 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text(f"it says {SWITCHES_SCREEN}\n\x1b[1;31mred\x1b[0m\n")
    assert show_logs(layout, "reward", follow=False) == 0
    said = capsys.readouterr().out
    assert said.count("\\x1b[2J\\x1b]0;title\\x07") == 3
    assert "| \x1b[1;31mred\x1b[0m\n" in said
    assert said.count("\x1b") == 2


def test_what_is_escaped_can_be_encoded_and_keeps_its_lines() -> None:
    assert escaped("a\tb\n\x1b[0m\udcff\x9b\u202e").encode() == b"a\tb\n\\x1b[0m\\xdcff\\x9b\\x202e"


def test_the_last_line_of_a_process_that_died_within_it_is_shown(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    log = layout.log("trainer", 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text("step 4\nFatal Python error: Segmentation fault")
    assert show_logs(layout, None, follow=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["trainer-0 | step 4", "trainer-0 | Fatal Python error: Segmentation fault"]


def rlhpc_into(stdout: int, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Buffered, as where it is a user who types it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", *words], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
        cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)} | variables,
    )  # fmt: skip


def test_a_pipe_whose_reader_has_left_is_no_error(layout: RunLayout) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = rlhpc_into(writing, "status", str(layout.root))
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("words", "status"), [(["recipes"], 0), (["status", "{root}"], 0), (["check", "none.toml"], EXIT_CONFIG)]
)
def test_a_standard_stream_that_is_closed_is_no_error(
    layout: RunLayout, closed: str, words: list[str], status: int
) -> None:
    """As a daemon's are: `2>&-` ended a run with an AttributeError."""
    command = [sys.executable, "-m", "launch.cli", *(word.format(root=layout.root) for word in words)]
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr


def test_standard_error_that_nobody_reads_is_lost_and_the_exit_status_is_what_it_would_be() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command, place = [sys.executable, "-m", "launch.cli", "check", "none.toml"], {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, stderr=writing, stdout=subprocess.PIPE, check=False, env=os.environ | place)
    os.close(writing)
    assert ended.returncode == EXIT_CONFIG


def test_standard_output_on_a_full_disk_is_said_in_one_line(layout: RunLayout) -> None:
    with Path("/dev/full").open("w") as full:
        ended = rlhpc_into(full.fileno(), "status", str(layout.root))
    assert (ended.returncode, ended.stderr) == (EXIT_CONFIG, "rlhpc: No space left on device\n")


def test_last_words_that_nobody_can_read_leave_the_exit_status_as_it_is() -> None:
    program = "from launch.common.text import print_or_lose; print_or_lose('the end'); raise SystemExit(3)"
    with Path("/dev/full").open("w") as full:
        command, place = [sys.executable, "-c", program], {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, env=os.environ | place)
    assert (ended.returncode, ended.stderr) == (3, b"")


def test_a_locale_without_our_letters_costs_letters_and_not_the_report(told: ToldRun) -> None:
    ended = rlhpc_into(subprocess.PIPE, "report", str(told.layout.root), PYTHONIOENCODING="latin-1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "0.025 \\u2192 0.925" in ended.stdout


# ---------------------------------------------------------------------------------------------------------- tensorboard


@pytest.mark.parametrize("settings", [{"run": {"name": "../../outside"}}, {"run": {"name": ".."}}, {"run": None}])
def test_tensorboards_directory_is_not_left_whatever_a_run_is_called(
    settings: dict[str, Any], told: ToldRun, tmp_path: Path
) -> None:
    alter(told.layout.config, config=settings)
    (told.layout.root / "checkpoints").mkdir()
    view = EventView(tmp_path / "view" / "here", [told.layout.root])
    view.find()
    view.update()
    assert len(view.names) == 1
    assert [path.parent.parent for path in tmp_path.rglob("events*") if path.is_symlink()] == [tmp_path / "view/here"]
