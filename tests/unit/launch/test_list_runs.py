"""`rlhpc list` says of every run where it stands; runs with odd clocks, names and files can be looked at."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.commands.logs import show_logs
from launch.commands.show import EventView
from launch.common.text import escaped
from launch.run_directory.begin_attempt import begin_attempt
from launch.run_files.records import ExitRecord, write_exit_record
from launch.view.report import as_text, read_report
from launch.view.run import RunView
from launch.view.standing import Queue, State, find_runs, standing_of, survey
from launch.view.status import render_status
from rlhpc.base.ownership import Launcher
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.unit.doc_pages import ROOT
from tests.unit.launch.runs_kit import Runs, age, launcher_elsewhere
from tests.unit.launch.test_report import BEGAN_S, ToldRun

pytestmark = pytest.mark.starts

# --------------------- `rlhpc list` says of every run where it stands; what is strange is a row or a note, and Slurm is


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Runs:
    made = Runs(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return made


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    """Rows by name."""
    return {run["name"]: run for run in document(capsys, *words)["runs"]}


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()  # what a supervisor has said meanwhile
    assert main(["list", *words, "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def state(capsys: pytest.CaptureFixture[str], name: str) -> tuple[str, str]:
    run = listed(capsys)[name]
    return run["state"], run["remark"]


# ------------------------------------------------------------------------------------------------------- every standing


def test_a_run_of_this_machine_is_what_its_launcher_and_its_status_say(runs, capsys):
    layout = runs.local("here")
    Launcher.register(layout)
    assert state(capsys, "here") == ("starting", f"launcher pid {os.getpid()}")
    runs.status(layout, "waiting for generators", 0)
    assert listed(capsys)["here"]["state"] == "starting"
    assert listed(capsys)["here"]["reward"] is None
    assert "\nreward -  " in render_status(layout)
    runs.status(layout, "training", 41, reward=0.25)
    run = listed(capsys)["here"]
    assert (run["state"], run["step"], run["num_steps"], run["reward"]) == ("running", 41, 100, 0.25)
    assert run["where"] == socket.gethostname()
    layout.launcher.unlink()
    assert state(capsys, "here") == ("lost", "")
    assert "here: lost while training, step 41/100" in render_status(layout)
    runs.status(layout, "stopped", 42)
    assert state(capsys, "here") == ("stopped", "")
    layout.summary.write_text("{}")
    assert state(capsys, "here") == ("complete", "")


def test_a_run_that_ends_while_it_is_looked_at_has_ended(runs):
    layout = runs.local("quick")
    runs.status(layout, "training", 99)
    seen = RunView(layout)
    seen.read_ahead()
    layout.summary.write_text("{}")  # before its launcher is looked for
    assert standing_of(seen, Queue(), time.time()).state is State.COMPLETE


def test_a_run_that_failed_here_says_what_the_first_role_died_of(runs, capsys):
    layout = runs.local("failed")
    runs.status(layout, "training", 5)
    for role, second, words in (
        ("controller", "07", "PeerUnreachable: trainer-0"),
        ("trainer", "05", "CudaError: x y"),
    ):
        log = layout.log(role, 0, 0)
        log.parent.mkdir()
        line = f"2026-11-22 01:16:{second},123 {role}-0 rlhpc.lifecycle ERROR "
        log.write_text(f"{line}failed\nTraceback\n{line}{words}\nlibraries go on talking\n")
    assert state(capsys, "failed") == ("failed", "trainer-0: CudaError: x y")
    assert "failed while training, step 5/100" in render_status(layout)
    assert "\nfailed: trainer-0: CudaError: x y" in render_status(layout)
    record = ExitRecord("trainer-0", 137, "step 5", starts=1, host="vm", job="")
    write_exit_record(layout.exit_record("trainer", 0, 0), record)  # as the launcher does
    runs.status(layout, "stopped", 5)  # and the controller closes its books
    assert state(capsys, "failed") == ("failed", "trainer-0 on vm ended with signal SIGKILL: step 5")
    assert "failed, step 5/100" in render_status(layout)  # and not "failed while stopped"


def test_an_exit_status_above_128_that_is_no_signals_is_told_as_a_status(runs, capsys):
    layout = runs.local("contained")
    record = ExitRecord("trainer-0", 255, "FATAL: no such image", starts=1, host="vm", job="")
    layout.exit_record("trainer", 0, 0).parent.mkdir()
    write_exit_record(layout.exit_record("trainer", 0, 0), record)
    words = "trainer-0 on vm ended with exit status 255: FATAL: no such image"
    assert state(capsys, "contained") == ("failed", words)
    assert replace(record, status=128 + 40).cause.startswith("trainer-0 on vm ended with exit status 168")
    assert replace(record, status=128 + 9).cause.startswith("trainer-0 on vm ended with signal SIGKILL")


def test_of_a_failed_attempt_the_trainer_is_named_first_and_what_was_started_again_not_at_all(runs, capsys):
    layout = runs.local("failed")
    begin_attempt(layout, job_id=0, restart=0)  # another attempt, of this machine too
    runs.status(layout, "training", 3)
    for name, status, is_final in (("controller", 3, True), ("generator", 137, False), ("trainer", 137, True)):
        record = ExitRecord(f"{name}-0", status, "words", 1, "n1", "0", is_final)
        layout.exit_record(name, 0, 1).parent.mkdir()
        write_exit_record(layout.exit_record(name, 0, 1), record)
    assert state(capsys, "failed") == ("failed", "trainer-0 on n1 ended with signal SIGKILL: words")
    layout.exit_record("trainer", 0, 1).unlink()
    layout.exit_record("controller", 0, 1).unlink()
    assert "generator" not in state(capsys, "failed")[1]
    runs.job(layout, 11, "hetjob", submitted_unix_s=1.0)  # long before: it went on as a run of this machine
    write_exit_record(layout.exit_record("trainer", 0, 1), record)
    assert state(capsys, "failed")[0] == "failed"


def test_a_run_on_another_machine_is_alive_while_it_writes_its_status(runs, capsys):
    layout = runs.local("there")
    launcher_elsewhere(layout)
    line = json.loads(layout.attempts.read_text())
    layout.attempts.write_text(json.dumps(line | {"host": "another-host"}) + "\n")
    run = listed(capsys)["there"]
    assert (run["state"], run["where"]) == ("starting", "another-host")
    age(layout.launcher, 300.0)
    runs.status(layout, "training", 7, ago_s=5)
    assert listed(capsys)["there"]["state"] == "running"
    runs.status(layout, "training", 7, ago_s=300)
    assert listed(capsys)["there"]["state"] == "lost"


def test_a_submitted_run_is_what_the_job_with_its_controller_is(runs, capsys):
    waits, held, starts, trains = (
        runs.submitted(name, number, begun=number > 13)
        for number, name in enumerate(("waits", "held", "starts", "trains"), 12)
    )
    runs.queue(waits, "12+0", "PENDING", reason="Priority")
    runs.queue(held, "13+0", "PENDING", reason="JobHeldUser")
    runs.queue(starts, "14+0", "RUNNING", nodes="c0")
    runs.queue(trains, "15+0", "RUNNING", nodes="c0")
    runs.queue(trains, "15+1", "RUNNING", nodes="g[0-1]", partition="gen")
    runs.status(trains, "training", 41)
    found = listed(capsys)
    assert {name: run["state"] for name, run in found.items()} == {
        "waits": "queued", "held": "queued", "starts": "starting", "trains": "running",
    }  # fmt: skip
    assert found["waits"]["remark"] == "jobs of higher priority are before it"
    assert "`scontrol release 13`" in found["held"]["remark"]
    assert found["trains"]["where"] == "c0 (cpu, gen)"
    assert [job["id"] for job in found["trains"]["jobs"]] == ["15+0", "15+1"]
    assert len(runs.calls()) == 1


def test_a_requeued_run_is_queued_although_its_status_says_that_it_trains(runs, capsys):
    layout = runs.submitted("again", 12)
    runs.status(layout, "training", 41)
    runs.verdict(layout, 12, "time: this job is close to its time limit")
    runs.queue(layout, "12+0", "PENDING", reason="BeginTime")
    assert listed(capsys)["again"]["state"] == "queued"


def test_a_status_of_the_life_before_does_not_make_a_run_running(runs, capsys):
    layout = runs.submitted("again", 12)
    runs.queue(layout, "12+0", "RUNNING", nodes="c0")  # since 2026
    runs.status(layout, "training", 41)
    age(layout.status, 40 * 365 * 86400.0)
    assert listed(capsys)["again"]["state"] == "starting"


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("stop: asked for by `rlhpc stop`", ("stopped", "")),
        ("signal: SIGTERM", ("stopped", "Slurm ended this job (scancel, preemption, node failure)")),
        ("given_up: trainer-0 on t0 ended with 70", ("failed", "trainer-0 on t0 ended with 70")),
        ("settings: model.path=x", ("failed", "model.path=x")),
        ("", ("lost", "")),
        ("time: this job is close to its time limit", ("lost", "")),
    ],
)
def test_how_a_submitted_run_ended_is_its_supervisors_last_word(verdict, expected, runs, capsys):
    layout = runs.submitted("over", 12)
    runs.status(layout, "training", 41, ago_s=300)
    runs.verdict(layout, 12, "given_up: in the life before")
    runs.verdict(layout, 12, verdict)
    assert state(capsys, "over") == expected


def test_what_slurm_still_knows_of_an_end_without_a_word_is_told(runs, capsys):
    for number, (name, word) in enumerate((("memory", "OUT_OF_MEMORY"), ("cancelled", "CANCELLED")), 12):
        runs.queue(runs.submitted(name, number, begun=False), f"{number}+0", word)
    assert state(capsys, "memory") == ("failed", "job 12+0 OUT_OF_MEMORY")
    assert state(capsys, "cancelled") == ("stopped", "job 13+0 CANCELLED")


def test_jobs_that_outlive_the_controllers_are_named(runs, capsys):
    layout = runs.prepare("rest")
    runs.job(layout, 12, "controller")
    runs.job(layout, 13, "generation", array_size=4)
    runs.queue(layout, "12", "FAILED", name="controller")
    runs.queue(layout, "13_0", "RUNNING", nodes="g0", name="generation")
    runs.queue(layout, "13_[1-3]", "PENDING", name="generation")
    assert state(capsys, "rest") == ("failed", "job 12 FAILED; still there: 13_0, 13_[1-3]")
    assert main(["list"]) == 0
    assert "13 3 pending 1 running" in capsys.readouterr().out


def test_nothing_was_ever_started_is_not_lost(runs, capsys):
    runs.prepare("new")
    assert state(capsys, "new") == ("new", "never started")
    (runs.root / ".new.submitting").touch()
    assert state(capsys, "new") == ("new", "is being submitted")
    runs.submitted("forgotten", 12, begun=False)
    assert state(capsys, "forgotten") == ("lost", "its jobs have left the queue, and none had started")


def test_where_squeue_does_not_answer_the_directory_says_what_it_can(runs, capsys):
    runs.status(runs.submitted("trains", 12), "training", 41, ago_s=2)
    runs.status(runs.submitted("silent", 13), "training", 41, ago_s=300)
    given_up = runs.submitted("given-up", 14)
    runs.verdict(given_up, 14, "given_up: too often")
    runs.script("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    said = document(capsys)
    assert {run["name"]: run["state"] for run in said["runs"]} == {
        "trains": "running", "silent": "unknown", "given-up": "failed",
    }  # fmt: skip
    assert "Unable to contact slurm controller" in said["notes"][0]
    assert len(set(runs.calls())) == 1  # for two seconds again and again, and not for each run
    assert "--jobs" not in runs.calls()[0]


def test_a_machine_without_slurm_is_silent_about_it_unless_it_matters(runs, capsys, monkeypatch):
    runs.status(runs.local("here"), "stopped", 3)
    monkeypatch.setenv("PATH", str(runs.root))
    assert document(capsys)["notes"] == []
    runs.submitted("elsewhere", 12)
    assert "squeue: no such command here" in document(capsys)["notes"][0]


def test_a_run_whose_job_lives_in_another_queue_is_believed_its_fresh_status(runs, capsys):
    runs.status(runs.submitted("away", 12), "training", 41, ago_s=2)
    found, remark = state(capsys, "away")
    assert found == "running"
    assert "none of its jobs is in this queue" in remark


# -------------------------------------------------------------------------------------------------------------- finding


def test_a_run_in_the_queue_is_found_wherever_it_lies(runs, tmp_path, capsys):
    layout = runs.submitted("far", 12)
    layout.root.rename(tmp_path / "elsewhere")
    far = RunLayout(tmp_path / "elsewhere")
    runs.queue(far, "12+0", "RUNNING", nodes="c0")
    runs.line("20", "RUNNING", str(tmp_path / "thesis/logs/slurm/job-20.log"), nodes="c0")  # somebody's own habits
    runs.line("21", "RUNNING", str(tmp_path / "slurm-21.out"), nodes="c0")
    runs.line("22+0", "PENDING", str(tmp_path / "deleted/logs/slurm/hetjob-%j.log"))
    runs.line("23+0", "COMPLETED", str(tmp_path / "deleted-too/logs/slurm/hetjob-%j.log"))
    said = document(capsys)
    assert [(run["directory"], run["state"]) for run in said["runs"]] == [(str(far.root), "starting")]
    assert said["notes"] == [f"job 22+0: its run directory {tmp_path}/deleted does not exist; `scancel` ends it"]


def test_a_job_that_tells_no_directory_is_known_by_its_record_and_name(runs, capsys):
    runs.submitted("mine", 12)
    runs.submitted("old", 13)  # a job of another kind bears its number: the site has set its counter back
    runs.line("12+0", "RUNNING", "(null)", nodes="c0", name="mine")
    runs.line("13", "RUNNING", "(null)", nodes="c0", name="jupyter")
    assert {name: run["state"] for name, run in listed(capsys).items()} == {"mine": "starting", "old": "lost"}


def test_a_strange_directory_is_a_row_or_a_note_and_never_an_error(runs, capsys, tmp_path):
    for name, text in (("text", "{"), ("list", "[]"), ("foreign", '{"config": 3}')):
        runs.local(name).config.write_text(text)
    runs.local("without").config.unlink()
    for name, text in (("null", "null"), ("words", '{"step": "x", "phase": [], "reward": NaN}'), ("cut", '{"st')):
        runs.local(name).status.write_text(text)
    launchers = ("launcher-list", "[]"), ("launcher-cut", '{"pid"'), ("launcher-host", '{"host": 7}')
    here = {"host": socket.gethostname(), "created": 0.0}
    for name, text in (*launchers, ("launcher-huge", json.dumps(here | {"pid": 10**30}))):
        runs.local(name).launcher.write_text(text)
    runs.local("attempts").attempts.write_text('\n{"index": null}\n[]\n{"ind')
    runs.submitted("record", 12).job_record(12).write_text("{}")
    words = runs.submitted("record-of-words", 13)
    words.job_record(13).write_text(words.job_record(13).read_text().replace("13,", '"x",'))
    runs.job(words, 14, "hetjob")
    runs.local("bytes").root.rename(runs.root / os.fsdecode(b"\xff\n\x1b[31m"))
    model = runs.root / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    project = runs.root / "project"
    (project / "checkpoints").mkdir(parents=True)
    (project / "config.json").write_text('{"lr": 1}')
    (project / "dangling").symlink_to(tmp_path / "nowhere")
    found = {run["directory"].rpartition("/")[2]: run["state"] for run in document(capsys)["runs"]}
    assert {name for name, state in found.items() if state == "damaged"} == {
        "text", "list", "foreign", "without", "record", "record-of-words",
    }  # fmt: skip
    assert {"model", "project"}.isdisjoint(found)
    assert len(found) == 15
    assert main(["list"]) == 0
    table = capsys.readouterr().out
    assert "config.json is damaged" in table
    assert "config.json is missing" in table


def test_links_in_a_circle_end_and_a_run_of_two_names_is_one(runs):
    layout = runs.prepare("one")
    (runs.root / "a-link").symlink_to(layout.root)
    (runs.root / "circle").symlink_to(runs.root)
    (layout.root / "rollouts" / "up").symlink_to(runs.root)
    found = find_runs([runs.root, runs.root / "circle"], depth=30)
    assert [files.root for files in found.runs] == [layout.root]
    assert found.remarks == []


def test_depth_is_bounded_and_hidden_directories_and_runs_are_not_looked_into(runs):
    outer = runs.prepare("outer")
    names = ("a/b/c/deep", ".hidden/run", "a/run")
    for name in names:
        target = runs.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        runs.prepare("moved").root.rename(target)
    runs.prepare("inner").root.rename(outer.root / "inner")
    seen = [{str(f.root.relative_to(runs.root)) for f in find_runs([runs.root], depth).runs} for depth in (0, 1, 2, 4)]
    assert seen == [set(), {"outer"}, {"outer", "a/run"}, {"outer", "a/run", "a/b/c/deep"}]
    assert [files.root for files in find_runs([outer.root]).runs] == [outer.root]


@pytest.fixture
def unreadable(runs) -> Iterator[Path]:
    directory = runs.root / "private"
    directory.mkdir(mode=0o000)
    yield directory
    directory.chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_cannot_be_read_is_a_note(unreadable, capsys):
    assert document(capsys)["notes"] == [f"not read: {unreadable}: Permission denied"]


def test_a_directory_that_vanishes_is_a_note(runs):
    gone = runs.root / "gone"
    assert find_runs([gone]).remarks == [f"not read: {gone}: No such file or directory"]


def test_runs_are_listed_from_a_directory_that_has_been_deleted(runs, tmp_path, monkeypatch, capsys):
    runs.submitted("first", 12)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["list", str(runs.root)]) == 0
    assert str(runs.root / "first") in capsys.readouterr().out
    assert main(["list"]) == EXIT_CONFIG
    assert "the current directory has been deleted" in capsys.readouterr().err


def test_two_thousand_runs_take_seconds(runs):
    layout = runs.submitted("first", 12)
    runs.status(layout, "training", 5, ago_s=300)
    files = {path: (layout.root / path).read_bytes() for path in ("config.json", "status.json", "attempts.jsonl")}
    record = layout.job_record(12).read_bytes()
    for number in range(2000):
        root = runs.root / f"group-{number % 20}" / f"run-{number}"
        (root / "jobs").mkdir(parents=True)
        (root / "jobs" / f"{number + 100}.json").write_bytes(record.replace(b"12", str(number + 100).encode()))
        for name, text in files.items():
            (root / name).write_bytes(text)
        age(root / "status.json", 300.0)
    began = time.process_time()
    found = survey([runs.root])
    assert time.process_time() - began < 10.0  # 2 s on a machine that does nothing else
    assert len(found.runs) == 2001
    assert {run.state.value for run in found.runs} == {"lost"}
    assert len(runs.calls()) == 1


# -------------------------------------------------------------------------------------------------------------- showing


def test_the_table_is_sorted_by_the_last_sign_of_life_and_cut_where_nobody_lives(runs, capsys):
    for number in range(45):
        layout = runs.local(f"run-{number}")
        runs.status(layout, "training", 5)
        for path in layout.root.iterdir():
            age(path, 1000.0 * (1 + number))
    oldest = RunLayout(runs.root / "run-44")
    Launcher.register(oldest)
    age(oldest.launcher, 100_000.0)
    assert main(["list"]) == 0
    head, *rows, summary = capsys.readouterr().out.splitlines()
    names = [row.split()[0] for row in rows]
    assert head.split() == ["RUN", "STATE", "STEP", "REWARD", "SEEN", "AGE", "JOBS", "WHERE", "REMARK"]
    assert names == [f"runs/run-{number}" for number in (*range(39), 44)]
    assert rows[0].split()[1:4] == ["lost", "5/100", "0.500"]
    assert summary == "1 running, 44 lost; 5 older ones are not shown: --all"
    assert main(["list", "--all", "--state", "lost"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 44 + 1


def test_filters_name_what_is_legal(runs, capsys):
    runs.status(runs.local("stopped"), "stopped", 3)
    runs.local("lost")
    assert set(listed(capsys, "--state", "stopped,failed")) == {"stopped"}
    assert main(["list", "--state", "failed"]) == 0
    assert capsys.readouterr().out == f"no run of that state below {runs.root}, nor in the queue\n"
    assert main(["list", "--state", "asleep"]) == EXIT_CONFIG
    assert "--state 'asleep': legal: queued, starting, running, stopped, failed" in capsys.readouterr().err
    assert main(["list", str(runs.root / "nowhere")]) == EXIT_CONFIG
    assert "no such directory" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["list", "--depth", "-1"])
    assert "--depth: '-1'; legal: a whole number, 0 or more" in capsys.readouterr().err


def test_without_a_directory_it_is_runs_or_else_here(runs, capsys, monkeypatch):
    layout = runs.local("one")
    assert list(listed(capsys)) == ["one"]
    for here in (runs.root, layout.root):
        monkeypatch.chdir(here)
        assert list(listed(capsys)) == ["one"]
    monkeypatch.chdir(runs.bin)
    assert listed(capsys) == {}


def test_runs_of_others_are_counted_and_shown_on_request(runs, capsys, monkeypatch):
    runs.status(runs.submitted("theirs", 12), "training", 5, ago_s=300)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert document(capsys) == {"runs": [], "notes": ["1 run of other users: --all shows them"]}
    assert listed(capsys, "--all")["theirs"]["state"] == "unknown"


def test_a_run_that_was_stopped_and_saved_has_not_failed_when_a_process_was_slow_to_leave(runs, capsys):
    layout = runs.local("slow")
    runs.status(layout, "stopped", 97)
    layout.stop_request.touch()
    record = ExitRecord("trainer-0", 143, "ended", starts=1, host="vm", job="")
    layout.exit_record("trainer", 0, 0).parent.mkdir()
    write_exit_record(layout.exit_record("trainer", 0, 0), record)
    assert state(capsys, "slow") == ("stopped", "")
    assert "slow: stopped, step 97/100" in render_status(layout)


@pytest.mark.parametrize("request_of", [lambda run: run.stop_request, lambda run: run.abort_request])
def test_a_run_that_was_stopped_before_its_controller_started_has_not_failed(runs, capsys, request_of):
    layout = runs.local("early")
    request_of(layout).touch()
    record = ExitRecord("trainer-0", 143, "no output", starts=1, host="vm", job="")
    layout.exit_record("trainer", 0, 0).parent.mkdir()
    write_exit_record(layout.exit_record("trainer", 0, 0), record)
    assert state(capsys, "early") == ("stopped", "")
    assert "stopped before its controller started" in render_status(layout)


# -------------------- Runs with odd clocks, names and files can be looked at: nothing in them is an error, or is obeyed

SWITCHES_SCREEN = "\x1b[2J\x1b]0;title\x07"


@pytest.fixture
def layout(tmp_path) -> RunLayout:
    """A run of this machine that is over, with a status."""
    runs = Runs(tmp_path)
    layout = runs.local("strange")
    runs.status(layout, "training", 5)
    return layout


@pytest.fixture
def told(tmp_path) -> ToldRun:
    return ToldRun(tmp_path / "told")


def alter(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def valid(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


# --------------------------------------------------------------------------------------------------------------- status


def test_a_status_of_figures_that_are_no_numbers_is_valid_json(layout):
    alter(layout.status, reward=float("nan"), roles=[{"metrics": {"loss": float("-inf")}}])
    status = valid(render_status(layout, as_json=True))["status"]
    assert (status["reward"], status["roles"][0]["metrics"], status["step"]) == (None, {"loss": None}, 5)


@pytest.mark.parametrize("content", [b"[]", b'{"name": "\xff"}', b"{"])
def test_a_status_that_cannot_be_read_counts_as_none(content, layout):
    layout.status.write_bytes(content)
    assert render_status(layout) == f"{layout.root}: ended before its controller started"


def test_a_status_from_a_clock_that_is_ahead_is_not_younger_than_now(layout):
    alter(layout.status, unix_time_s=time.time() + 7200)
    assert "as of 0 s ago" in render_status(layout)


# --------------------------------------------------------------------------------------------------------------- report


@pytest.mark.parametrize("name", ["nanogpt", "finance"])
def test_a_run_whose_name_has_nan_in_it_has_a_report(name, tmp_path):
    run = ToldRun(tmp_path / "told")
    document = json.loads(run.layout.config.read_text())
    document["config"]["run"]["name"] = name
    run.layout.config.write_text(json.dumps(document))
    assert as_text(read_report(RunView(run.layout)))[0].split() == ["run", name]
    assert main(["report", str(run.layout.root), "--html", str(tmp_path / "report.html")]) == 0
    assert f"Report of {name}" in (tmp_path / "report.html").read_text()


def test_lines_and_settings_of_another_form_are_left_out_of_a_report(told):
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


def test_nothing_that_a_run_has_written_commands_the_terminal(told, layout, capsys):
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


def test_what_is_escaped_can_be_encoded_and_keeps_its_lines():
    assert escaped("a\tb\n\x1b[0m\udcff\x9b\u202e").encode() == b"a\tb\n\\x1b[0m\\xdcff\\x9b\\x202e"


def test_the_last_line_of_a_process_that_died_within_it_is_shown(layout, capsys):
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


def test_a_pipe_whose_reader_has_left_is_no_error(layout):
    reading, writing = os.pipe()
    os.close(reading)
    ended = rlhpc_into(writing, "status", str(layout.root))
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("closed", "words", "status"),
    [
        (">&-", ["recipes"], 0),
        ("2>&-", ["check", "none.toml"], EXIT_CONFIG),
        ("<&-", ["status", "{root}"], 0),
        ("<&- >&- 2>&-", ["recipes"], 0),
        ("<&- >&- 2>&-", ["check", "none.toml"], EXIT_CONFIG),
    ],
)
def test_a_standard_stream_that_is_closed_is_no_error(layout, closed, words, status):
    """As a daemon's are: `2>&-` ended a run with an AttributeError."""
    command = [sys.executable, "-m", "launch.cli", *(word.format(root=layout.root) for word in words)]
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr


def test_standard_error_that_nobody_reads_is_lost_and_the_exit_status_is_what_it_would_be():
    reading, writing = os.pipe()
    os.close(reading)
    command, place = [sys.executable, "-m", "launch.cli", "check", "none.toml"], {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, stderr=writing, stdout=subprocess.PIPE, check=False, env=os.environ | place)
    os.close(writing)
    assert ended.returncode == EXIT_CONFIG


def test_standard_output_on_a_full_disk_is_said_in_one_line(layout):
    with Path("/dev/full").open("w") as full:
        ended = rlhpc_into(full.fileno(), "status", str(layout.root))
    assert (ended.returncode, ended.stderr) == (EXIT_CONFIG, "rlhpc: No space left on device\n")


def test_last_words_that_nobody_can_read_leave_the_exit_status_as_it_is():
    program = "from launch.common.text import print_or_lose; print_or_lose('the end'); raise SystemExit(3)"
    with Path("/dev/full").open("w") as full:
        command, place = [sys.executable, "-c", program], {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, env=os.environ | place)
    assert (ended.returncode, ended.stderr) == (3, b"")


def test_a_locale_without_our_letters_costs_letters_and_not_the_report(told):
    ended = rlhpc_into(subprocess.PIPE, "report", str(told.layout.root), PYTHONIOENCODING="latin-1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "0.025 \\u2192 0.925" in ended.stdout


# ---------------------------------------------------------------------------------------------------------- tensorboard


@pytest.mark.parametrize("settings", [{"run": {"name": "../../outside"}}, {"run": {"name": ".."}}, {"run": None}])
def test_tensorboards_directory_is_not_left_whatever_a_run_is_called(settings, told, tmp_path):
    alter(told.layout.config, config=settings)
    (told.layout.root / "checkpoints").mkdir()
    view = EventView(tmp_path / "view" / "here", [told.layout.root])
    view.find()
    view.update()
    assert len(view.names) == 1
    assert [path.parent.parent for path in tmp_path.rglob("events*") if path.is_symlink()] == [tmp_path / "view/here"]
