"""`rlhpc logs` shows the newest attempt, merged, and follows what comes until the run is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launch.commands import logs
from launch.commands.logs import LAST_LINES, _Tail, log_files, roles_there, show_logs
from launch.run_directory.owner import register_launcher
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RunDirectoryError
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run directory with logs of two attempts of a run on this machine."""
    layout = RunLayout(tmp_path / "run")
    layout.logs.mkdir(parents=True)
    layout.config.write_text('{"config": {}, "hash": ""}')
    for role, replica in (("controller", 0), ("trainer", 0), ("trainer", 1), ("generator", 0), ("generator", 10)):
        write(layout, role, replica, 0, "old\n")
        if role != "generator" or replica == 0:
            write(layout, role, replica, 1, f"first of {role}\nsecond of {role}\n")
    batch = layout.logs / "slurm"
    batch.mkdir()
    (batch / "hetjob-12.log").write_text("prologue\n")
    return layout


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a second."""
    monkeypatch.setattr("launch.commands.logs.LOOK_S", 0.05)


def write(layout: RunLayout, role: str, replica: int, attempt: int, text: str) -> Path:
    path = layout.log(role, replica, attempt)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)
    return path


def shown(capsys: pytest.CaptureFixture[str], layout: RunLayout, role: str | None) -> list[str]:
    assert show_logs(layout, role, follow=False) == 0
    return capsys.readouterr().out.splitlines()


def test_all_roles_of_the_newest_attempt_are_shown_with_their_names_in_one_column(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, layout, None)
    assert lines == [
        "controller-0    | first of controller",
        "controller-0    | second of controller",
        "generator-0     | first of generator",
        "generator-0     | second of generator",
        "generator-10    | old",  # it has outlasted the attempt, and goes on in its log
        "trainer-0       | first of trainer",
        "trainer-0       | second of trainer",
        "trainer-1       | first of trainer",
        "trainer-1       | second of trainer",
        "slurm/hetjob-12 | prologue",
    ]


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("trainer", {"trainer-0", "trainer-1"}),
        ("trainer-1", {"trainer-1"}),
        ("slurm", {"slurm/hetjob-12"}),
        ("generator", {"generator-0", "generator-10"}),
    ],
)
def test_a_role_is_all_its_processes_and_a_name_is_one(
    role: str, names: set[str], layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {line.split(" |")[0].strip() for line in shown(capsys, layout, role)} == names


def test_the_last_lines_are_shown_of_a_long_log_and_progress_bars_are_one_line(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    write(layout, "trainer", 0, 2, "".join(f"line {k}\n" for k in range(50_000)) + "10%\r50%\r100%\n")
    lines = shown(capsys, layout, "trainer-0")
    assert len(lines) == LAST_LINES
    assert lines[-2:] == ["trainer-0 | line 49999", "trainer-0 | 100%"]


def test_that_earlier_lines_are_not_shown_is_said(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    write(layout, "trainer", 0, 2, "".join(f"line {k}\n" for k in range(LAST_LINES + 1)))
    write(layout, "generator", 0, 2, "one\n")
    assert show_logs(layout, None, follow=False) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"rlhpc: only the last {LAST_LINES} lines of 1 of ")
    assert said.endswith(f" logs; whole: {layout.log('trainer', 0, 2)}\n")
    assert show_logs(layout, "generator", follow=False) == 0
    assert capsys.readouterr().err == ""


def test_a_colour_ends_with_its_line_so_that_no_text_can_hide_what_follows(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    write(layout, "trainer", 0, 2, "\x1b[8m hidden\n\x1b[31mred\x1b[0m\nplain\n")
    assert shown(capsys, layout, "trainer-0") == [
        "trainer-0 | \x1b[8m hidden\x1b[0m",
        "trainer-0 | \x1b[31mred\x1b[0m",
        "trainer-0 | plain",
    ]


def test_a_log_that_is_shortened_while_it_is_followed_is_not_printed_again(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    write(layout, "trainer", 0, 2, "".join(f"line {k:07}\n" for k in range(600_000)))
    (file,) = log_files(layout, "trainer-0")[-1:]
    tail = _Tail(file)
    tail.print_last(1, 9)
    file.path.write_text("".join(f"line {k:07}\n" for k in (*range(150_000), *range(450_000, 600_001))))
    capsys.readouterr()
    tail.print_new(9)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "trainer-0 | line 0600000"
    assert "line 0150000" not in lines[0]
    assert len(lines) < 100_000


def test_an_unknown_role_is_refused_with_those_there_are(layout: RunLayout) -> None:
    with pytest.raises(RunDirectoryError) as error:
        show_logs(layout, "judge", follow=True)
    assert "'judge' has no log" in str(error.value)
    assert "trainer, controller-0, generator-0, generator-10, slurm/hetjob-12, trainer-0, trainer-1" in str(error.value)


def test_a_run_without_logs_and_a_directory_that_is_no_run_are_refused(layout: RunLayout, tmp_path: Path) -> None:
    empty = RunLayout(tmp_path / "empty")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        show_logs(empty, None, follow=False)
    empty.root.mkdir()
    empty.config.write_text('{"config": {}, "hash": ""}')
    with pytest.raises(RunDirectoryError, match=r"no logs yet; `rlhpc status .*` says"):
        show_logs(empty, None, follow=False)


@pytest.mark.usefixtures("looks_often")
def test_following_takes_up_new_lines_attempts_and_replicas_and_ends_with_the_run(
    layout: RunLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_launcher(layout)  # this process: the run lives
    follows = threading.Event()
    is_over = logs.is_over
    monkeypatch.setattr(logs, "is_over", lambda layout: follows.set() or is_over(layout))

    def go_on() -> None:
        assert follows.wait(PATIENCE_S)
        write(layout, "trainer", 0, 1, "third of trainer\nhalf a ")
        write(layout, "trainer", 0, 2, "of the next attempt\n")
        write(layout, "generator", 7, 1, "a new replica\n")
        time.sleep(0.3)
        write(layout, "trainer", 0, 1, "line\nno end")
        layout.summary.write_text("{}")

    writer = threading.Thread(target=go_on)
    writer.start()
    assert show_logs(layout, None, follow=True) == 0
    writer.join()
    lines = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()]
    for line in ("trainer-0|third of trainer", "trainer-0|half a line", "trainer-0|of the next attempt",
                 "generator-7|a new replica", "trainer-0|no end"):  # fmt: skip
        assert lines.count(line.replace(" ", "")) == 1, line
    assert lines.count("trainer-0|old") == 0


@pytest.mark.usefixtures("looks_often")
def test_following_a_run_that_is_over_ends_at_once(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert show_logs(layout, "trainer", follow=True) == 0  # no launcher lives
    assert time.monotonic() - began < PATIENCE_S
    assert "second of trainer" in capsys.readouterr().out


@pytest.mark.usefixtures("looks_often")
def test_a_log_that_is_begun_anew_is_read_from_its_beginning(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    register_launcher(layout)
    path = write(layout, "trainer", 1, 1, "much more than will stand there afterwards\n" * 5)

    def go_on() -> None:
        time.sleep(0.3)
        path.write_text("anew\n")
        time.sleep(0.3)
        layout.summary.write_text("{}")

    writer = threading.Thread(target=go_on)
    writer.start()
    show_logs(layout, "trainer-1", follow=True)
    writer.join()
    assert capsys.readouterr().out.splitlines()[-1] == "trainer-1 | anew"


@pytest.mark.starts
def test_ctrl_c_ends_the_following(layout: RunLayout) -> None:
    register_launcher(layout)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    viewer = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "logs", str(layout.root), "trainer-0", "-f"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert viewer.stdout is not None
    assert viewer.stdout.readline() == "trainer-0 | first of trainer\n"
    viewer.send_signal(signal.SIGINT)
    assert viewer.wait(PATIENCE_S) == 130
    viewer.stdout.close()


def test_roles_come_in_the_order_of_their_numbers(layout: RunLayout) -> None:
    write(layout, "generator", 9, 1, "x\n")
    assert [name for name in roles_there(layout) if "generator" in name] == [
        "generator-0",
        "generator-9",
        "generator-10",
    ]
