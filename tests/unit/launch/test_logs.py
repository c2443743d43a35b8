"""`rlhpc logs`, and what a user of `rlhpc run` sees while it starts and trains and at its end."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from launch.commands import logs
from launch.commands.logs import LAST_LINES, _Tail, log_files, roles_there, show_logs
from launch.run_files.run_state import last_words
from launch.view.status import LOOK_AT_DISK_S, OLD_S, Watch
from rlhpc.base.ownership import Launcher
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import write_resolved
from rlhpc.protocol.errors import EXIT_CONFIG, RunDirectoryError
from tests.full_disk import fill, small_disk
from tests.patience import PATIENCE_S
from tests.unit.launch.site_kit import config_of

# -------------------------- `rlhpc logs` shows the newest attempt, merged, and follows what comes until the run is over

ROOT = Path(__file__).parents[3]


@pytest.fixture
def layout(tmp_path) -> RunLayout:
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
def looks_often(monkeypatch) -> None:
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


def test_all_roles_of_the_newest_attempt_are_shown_with_their_names_in_one_column(layout, capsys):
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
def test_a_role_is_all_its_processes_and_a_name_is_one(role, names, layout, capsys):
    assert {line.split(" |")[0].strip() for line in shown(capsys, layout, role)} == names


def test_the_last_lines_are_shown_of_a_long_log_and_progress_bars_are_one_line(layout, capsys):
    write(layout, "trainer", 0, 2, "".join(f"line {k}\n" for k in range(50_000)) + "10%\r50%\r100%\n")
    lines = shown(capsys, layout, "trainer-0")
    assert len(lines) == LAST_LINES
    assert lines[-2:] == ["trainer-0 | line 49999", "trainer-0 | 100%"]


def test_that_earlier_lines_are_not_shown_is_said(layout, capsys):
    write(layout, "trainer", 0, 2, "".join(f"line {k}\n" for k in range(LAST_LINES + 1)))
    write(layout, "generator", 0, 2, "one\n")
    assert show_logs(layout, None, follow=False) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"rlhpc: only the last {LAST_LINES} lines of 1 of ")
    assert said.endswith(f" logs; whole: {layout.log('trainer', 0, 2)}\n")
    assert show_logs(layout, "generator", follow=False) == 0
    assert capsys.readouterr().err == ""


def test_a_colour_ends_with_its_line_so_that_no_text_can_hide_what_follows(layout, capsys):
    write(layout, "trainer", 0, 2, "\x1b[8m hidden\n\x1b[31mred\x1b[0m\nplain\n")
    assert shown(capsys, layout, "trainer-0") == [
        "trainer-0 | \x1b[8m hidden\x1b[0m",
        "trainer-0 | \x1b[31mred\x1b[0m",
        "trainer-0 | plain",
    ]


def test_a_log_that_is_shortened_while_it_is_followed_is_not_printed_again(layout, capsys):
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


def test_an_unknown_role_is_refused_with_those_there_are(layout):
    with pytest.raises(RunDirectoryError) as error:
        show_logs(layout, "judge", follow=True)
    assert "'judge' has no log" in str(error.value)
    assert "trainer, controller-0, generator-0, generator-10, slurm/hetjob-12, trainer-0, trainer-1" in str(error.value)


def test_a_run_without_logs_and_a_directory_that_is_no_run_are_refused(layout, tmp_path):
    empty = RunLayout(tmp_path / "empty")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        show_logs(empty, None, follow=False)
    empty.root.mkdir()
    empty.config.write_text('{"config": {}, "hash": ""}')
    with pytest.raises(RunDirectoryError, match=r"no logs yet; `rlhpc status .*` says"):
        show_logs(empty, None, follow=False)


@pytest.mark.usefixtures("looks_often")
def test_following_takes_up_new_lines_attempts_and_replicas_and_ends_with_the_run(layout, capsys, monkeypatch):
    Launcher.register(layout)  # this process: the run lives
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
def test_following_a_run_that_is_over_ends_at_once(layout, capsys):
    began = time.monotonic()
    assert show_logs(layout, "trainer", follow=True) == 0  # no launcher lives
    assert time.monotonic() - began < PATIENCE_S
    assert "second of trainer" in capsys.readouterr().out


@pytest.mark.usefixtures("looks_often")
def test_a_log_that_is_begun_anew_is_read_from_its_beginning(layout, capsys):
    Launcher.register(layout)
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
def test_ctrl_c_ends_the_following(layout):
    Launcher.register(layout)
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


def test_roles_come_in_the_order_of_their_numbers(layout):
    write(layout, "generator", 9, 1, "x\n")
    assert [name for name in roles_there(layout) if "generator" in name] == [
        "generator-0",
        "generator-9",
        "generator-10",
    ]


# ------------------------------ What a user of `rlhpc run` sees while it starts and trains, and what is said at its end

EXPECTED = ["controller-0", "reward-0", "trainer-0", "generator-0"]


class Screen:
    """A run directory, and what is printed of it."""

    def __init__(self, root: Path, **how: Any) -> None:
        self.now = 0.0
        self.layout, self.stream = RunLayout(root), io.StringIO()
        self.watch = Watch(self.layout, self.stream, expected=EXPECTED, clock=lambda: self.now, **how)

    def show(
        self,
        phase: str,
        step: int,
        *roles: str,
        attempt: int = 0,
        disk: Sequence[str] = (),
        errors: Mapping[str, object] = MappingProxyType({}),
        ago_s: float = 0.0,
        **queue: int,
    ) -> None:
        document = {
            "phase": phase, "step": step, "num_steps": 9, "reward": 0.5, "trainer_tokens_per_s": 100.0,
            "generator_tokens_per_s": 200.0, "staleness_max": 1, "eta_s": 60.0, "queue": queue, "attempt": attempt,
            "disk_troubles": disk, "errors": dict(errors), "roles": [{"name": name} for name in roles],
            "unix_time_s": time.time() - ago_s,
        }  # fmt: skip
        self.layout.status.write_text(json.dumps(document))
        self.watch.look()

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_a_start_shows_its_phase_and_who_is_not_there_yet(tmp_path):
    screen = Screen(tmp_path)
    screen.show("starting", 0, "reward-0")
    screen.now = 45.0
    screen.show("waiting for generators", 0, "reward-0", "trainer-0")
    screen.show("waiting for generators", 0, *EXPECTED)
    screen.show("training", 0, *EXPECTED)
    screen.show("training", 1, *EXPECTED)
    assert screen.lines == [
        "starting | waits for trainer-0, generator-0 | 0 s",
        "waiting for generators | waits for generator-0 | 45 s",
        "step 1/9 | 1 min left | reward 0.500 | staleness 1.0 | generate 200 tok/s | train 100 tok/s",
    ]


def test_of_another_attempt_the_time_since_it_began_is_shown(tmp_path):
    screen = Screen(tmp_path)
    screen.show("starting", 80, attempt=3)
    screen.show("training", 81, *EXPECTED, attempt=3)
    screen.now = 4000.0
    screen.show("starting", 81, *EXPECTED, attempt=4)
    screen.now = 4007.0
    screen.show("waiting for generators", 81, *EXPECTED, attempt=4)
    starts = [line for line in screen.lines if not line.startswith("step")]
    assert starts[1:] == ["starting | 0 s", "waiting for generators | the first weights are on their way | 7 s"]


def test_a_resume_shows_no_figures_before_its_first_step(tmp_path):
    screen = Screen(tmp_path)
    screen.show("starting", 80, *EXPECTED)
    screen.show("training", 80, *EXPECTED)
    assert screen.lines == ["starting | 0 s"]
    screen.show("training", 81, *EXPECTED)
    assert screen.lines[1].startswith("step 81/9 | ")


def test_what_no_verifier_can_judge_is_told_when_it_happens_and_whenever_it_has_doubled(tmp_path):
    screen = Screen(tmp_path)
    for count in (0, 1, 2, 3, 5, 9):
        screen.show("training", 0, dropped_verifier_error=count)
    told = [line for line in screen.lines if line.startswith("rlhpc: ")]
    why = f"dropped: no verifier could judge them; `rlhpc rollouts {tmp_path} --verdict verifier_error` says why"
    assert told == [f"rlhpc: 1 group is {why}", *(f"rlhpc: {n} groups are {why}" for n in (2, 5))]


def test_a_wait_for_verdicts_is_told_when_it_begins_and_when_it_is_over(tmp_path):
    screen = Screen(tmp_path)
    waits = {"causes": {"raised": 41}, "latest": "no tool server", "waited_s": 3, "patience_s": 60.0}
    for attempt, errors in enumerate(({}, waits, waits, {}, waits, {})):
        screen.show("training", 0, errors=errors, attempt=attempt // 5)
    begins = (
        "rlhpc: too many errors in place of verdicts: the run waits for up to 60 s until there are some again "
        "(rewards.error_patience_s); the last error: no tool server"
    )
    assert screen.lines == [begins, "rlhpc: there are verdicts again", begins]  # another attempt is anew


def test_a_disk_that_refuses_is_told_when_it_begins_and_when_it_is_over(tmp_path):
    screen = Screen(tmp_path)
    for trouble in ([], ["no room; trying again for 300 s"], ["no room; trying again for 296 s"], [], []):
        screen.show("training", 0, disk=trouble)
        screen.now += LOOK_AT_DISK_S
    assert screen.lines == [
        "rlhpc: the disk refuses: no room; trying again for 300 s",
        "rlhpc: the disk takes what is written again",
    ]


def test_what_the_run_says_of_its_disk_is_told_at_once(tmp_path):
    """It may be over before another look at the disk itself is due."""
    screen = Screen(tmp_path)
    screen.show("training", 0, disk=[])
    screen.show("training", 0, disk=["no room; trying again for 300 s"])
    assert screen.lines == ["rlhpc: the disk refuses: no room; trying again for 300 s"]


@pytest.mark.starts
def test_a_disk_too_full_for_the_status_itself_is_told_all_the_same(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    with small_disk(root, 1 << 20):
        screen = Screen(root)
        screen.show("training", 3, ago_s=OLD_S + 1)  # nothing was written for so long, though there is room
        assert len(screen.lines) == 1
        fill(root / "filler", but_bytes=0)
        screen.now += LOOK_AT_DISK_S
        screen.watch.look()
        (root / "filler").unlink()
        screen.now += LOOK_AT_DISK_S
        screen.watch.look()
        assert sorted(path.name for path in root.iterdir()) == ["status.json"]
    assert screen.lines[1:] == [
        f"rlhpc: the disk refuses: No space left on device in {root}, where the run can write nothing any more, "
        "its status neither",
        "rlhpc: the disk takes what is written again",
    ]


def test_quiet_says_nothing_but_what_it_is_told(tmp_path):
    screen = Screen(tmp_path, is_quiet=True)
    screen.show("training", 3, dropped_verifier_error=7)
    screen.watch.tell("the trainer has failed")
    assert screen.lines == ["rlhpc: the trainer has failed"]


@pytest.fixture
def layout_watch(tmp_path) -> RunLayout:
    layout = RunLayout(tmp_path)
    write_resolved(config_of(), layout, "")
    return layout


def test_a_complete_run_ends_with_its_figures_and_the_next_commands(layout_watch):
    summary = {"steps": 9, "reward_first_tenth": 0.25, "reward_last_tenth": 0.75, "training_s": 3.0}
    layout_watch.summary.write_text(json.dumps(summary))
    words = "\n".join(last_words(layout_watch, "`rlhpc run a.toml --resume`"))
    assert "reward, last tenth of steps    0.750" in words
    assert f"{layout_watch.root}: complete" in words
    assert f"rlhpc export {layout_watch.root} MODEL" in words
    assert "every reward was 0" not in words
    layout_watch.summary.write_text(json.dumps(summary | {"reward_first_tenth": 0.0, "reward_last_tenth": 0.0}))
    assert "every reward was 0" in "\n".join(last_words(layout_watch, ""))


def test_a_run_that_was_interrupted_ends_with_what_was_saved_and_how_to_go_on(layout_watch):
    status = {"phase": "stopped", "step": 7, "unix_time_s": 0.0, "roles": []}
    layout_watch.status.write_text(json.dumps(status))
    layout_watch.checkpoint(7).mkdir(parents=True)
    (layout_watch.checkpoint(7) / "COMPLETE").touch()
    assert last_words(layout_watch, "`rlhpc run a.toml --resume`") == [
        f"{layout_watch.root}: stopped, saved at step 7; `rlhpc run a.toml --resume` continues it"
    ]


def test_before_there_is_a_run_nothing_is_said(tmp_path):
    assert last_words(RunLayout(tmp_path), "") == []


class Closed(io.StringIO):
    """A terminal that is gone: EIO."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_what_nobody_can_read_any_more_ends_no_run(tmp_path):
    screen = Screen(tmp_path)
    screen.watch = Watch(screen.layout, Closed(), expected=EXPECTED)
    screen.show("training", 1, *EXPECTED, dropped_poison=1)


def test_last_words_are_said_also_in_a_directory_that_is_gone(tmp_path, monkeypatch):
    screen, gone = Screen(tmp_path), tmp_path / "gone"
    write_resolved(config_of(), screen.layout, "")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert last_words(screen.layout, "`x`") == [f"{tmp_path}: stopped before the first step; `x` continues it"]
    refused = f"{tmp_path}: stopped before the first step; once that is mended, `x` continues it, or with --fresh for "
    refused += "--resume starts it over, where data or model change"
    assert last_words(screen.layout, "`x`", EXIT_CONFIG) == [refused]


def test_a_terminal_obeys_nothing_of_a_processs_last_words(tmp_path):
    """They may quote what a model has sampled."""
    stream = io.StringIO()
    Watch(RunLayout(tmp_path), stream).tell("generator-0 ended with status 1: no answer in \x1b[2J\x9b2J\u202e\rwell")
    assert stream.getvalue() == (
        "rlhpc: generator-0 ended with status 1: no answer in \\x1b[2J\\x9b2J\\x202e\\x0dwell\n"
    )
