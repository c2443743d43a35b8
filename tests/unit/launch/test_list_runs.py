"""`rlhpc list` says of every run where it stands; what is strange is a row or a note, and Slurm is asked once."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.run_directory.begin_attempt import begin_attempt
from launch.run_directory.owner import register_launcher
from launch.run_files.records import ExitRecord, write_exit_record
from launch.view.standing import find_runs, survey
from launch.view.status import render_status
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.unit.launch.launchers import launcher_elsewhere
from tests.unit.launch.runs_kit import Runs, age

pytestmark = pytest.mark.starts


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
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


def test_a_run_of_this_machine_is_what_its_launcher_and_its_status_say(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = runs.local("here")
    register_launcher(layout)
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


def test_a_run_that_failed_here_says_what_the_first_role_died_of(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_an_exit_status_above_128_that_is_no_signals_is_told_as_a_status(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = runs.local("contained")
    record = ExitRecord("trainer-0", 255, "FATAL: no such image", starts=1, host="vm", job="")
    layout.exit_record("trainer", 0, 0).parent.mkdir()
    write_exit_record(layout.exit_record("trainer", 0, 0), record)
    words = "trainer-0 on vm ended with exit status 255: FATAL: no such image"
    assert state(capsys, "contained") == ("failed", words)
    assert replace(record, status=128 + 40).cause.startswith("trainer-0 on vm ended with exit status 168")
    assert replace(record, status=128 + 9).cause.startswith("trainer-0 on vm ended with signal SIGKILL")


def test_of_a_failed_attempt_the_trainer_is_named_first_and_what_was_started_again_not_at_all(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_run_on_another_machine_is_alive_while_it_writes_its_status(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_submitted_run_is_what_the_job_with_its_controller_is(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_requeued_run_is_queued_although_its_status_says_that_it_trains(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = runs.submitted("again", 12)
    runs.status(layout, "training", 41)
    runs.verdict(layout, 12, "time: this job is close to its time limit")
    runs.queue(layout, "12+0", "PENDING", reason="BeginTime")
    assert listed(capsys)["again"]["state"] == "queued"


def test_a_status_of_the_life_before_does_not_make_a_run_running(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_how_a_submitted_run_ended_is_its_supervisors_last_word(
    verdict: str, expected: tuple[str, str], runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = runs.submitted("over", 12)
    runs.status(layout, "training", 41, ago_s=300)
    runs.verdict(layout, 12, "given_up: in the life before")
    runs.verdict(layout, 12, verdict)
    assert state(capsys, "over") == expected


def test_what_slurm_still_knows_of_an_end_without_a_word_is_told(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (name, word) in enumerate((("memory", "OUT_OF_MEMORY"), ("cancelled", "CANCELLED")), 12):
        runs.queue(runs.submitted(name, number, begun=False), f"{number}+0", word)
    assert state(capsys, "memory") == ("failed", "job 12+0 OUT_OF_MEMORY")
    assert state(capsys, "cancelled") == ("stopped", "job 13+0 CANCELLED")


def test_jobs_that_outlive_the_controllers_are_named(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    layout = runs.prepare("rest")
    runs.job(layout, 12, "controller")
    runs.job(layout, 13, "generation", array_size=4)
    runs.queue(layout, "12", "FAILED", name="controller")
    runs.queue(layout, "13_0", "RUNNING", nodes="g0", name="generation")
    runs.queue(layout, "13_[1-3]", "PENDING", name="generation")
    assert state(capsys, "rest") == ("failed", "job 12 FAILED; still there: 13_0, 13_[1-3]")
    assert main(["list"]) == 0
    assert "13 3 pending 1 running" in capsys.readouterr().out


def test_nothing_was_ever_started_is_not_lost(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.prepare("new")
    assert state(capsys, "new") == ("new", "never started")
    (runs.root / ".new.submitting").touch()
    assert state(capsys, "new") == ("new", "is being submitted")
    runs.submitted("forgotten", 12, begun=False)
    assert state(capsys, "forgotten") == ("lost", "its jobs have left the queue, and none had started")


def test_where_squeue_does_not_answer_the_directory_says_what_it_can(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_machine_without_slurm_is_silent_about_it_unless_it_matters(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.status(runs.local("here"), "stopped", 3)
    monkeypatch.setenv("PATH", str(runs.root))
    assert document(capsys)["notes"] == []
    runs.submitted("elsewhere", 12)
    assert "squeue: no such command here" in document(capsys)["notes"][0]


def test_a_run_whose_job_lives_in_another_queue_is_believed_its_fresh_status(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.status(runs.submitted("away", 12), "training", 41, ago_s=2)
    found, remark = state(capsys, "away")
    assert found == "running"
    assert "none of its jobs is in this queue" in remark


# -------------------------------------------------------------------------------------------------------------- finding


def test_a_run_in_the_queue_is_found_wherever_it_lies(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_job_that_tells_no_directory_is_known_by_its_record_and_name(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.submitted("mine", 12)
    runs.submitted("old", 13)  # a job of another kind bears its number: the site has set its counter back
    runs.line("12+0", "RUNNING", "(null)", nodes="c0", name="mine")
    runs.line("13", "RUNNING", "(null)", nodes="c0", name="jupyter")
    assert {name: run["state"] for name, run in listed(capsys).items()} == {"mine": "starting", "old": "lost"}


def test_a_strange_directory_is_a_row_or_a_note_and_never_an_error(
    runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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


def test_links_in_a_circle_end_and_a_run_of_two_names_is_one(runs: Runs) -> None:
    layout = runs.prepare("one")
    (runs.root / "a-link").symlink_to(layout.root)
    (runs.root / "circle").symlink_to(runs.root)
    (layout.root / "rollouts" / "up").symlink_to(runs.root)
    found = find_runs([runs.root, runs.root / "circle"], depth=30)
    assert [files.root for files in found.runs] == [layout.root]
    assert found.remarks == []


def test_depth_is_bounded_and_hidden_directories_and_runs_are_not_looked_into(runs: Runs) -> None:
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
def unreadable(runs: Runs) -> Iterator[Path]:
    directory = runs.root / "private"
    directory.mkdir(mode=0o000)
    yield directory
    directory.chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_cannot_be_read_is_a_note(unreadable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys)["notes"] == [f"not read: {unreadable}: Permission denied"]


def test_a_directory_that_vanishes_is_a_note(runs: Runs) -> None:
    gone = runs.root / "gone"
    assert find_runs([gone]).remarks == [f"not read: {gone}: No such file or directory"]


def test_runs_are_listed_from_a_directory_that_has_been_deleted(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.submitted("first", 12)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["list", str(runs.root)]) == 0
    assert str(runs.root / "first") in capsys.readouterr().out
    assert main(["list"]) == EXIT_CONFIG
    assert "the current directory has been deleted" in capsys.readouterr().err


def test_two_thousand_runs_take_seconds(runs: Runs) -> None:
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


def test_the_table_is_sorted_by_the_last_sign_of_life_and_cut_where_nobody_lives(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(45):
        layout = runs.local(f"run-{number}")
        runs.status(layout, "training", 5)
        for path in layout.root.iterdir():
            age(path, 1000.0 * (1 + number))
    oldest = RunLayout(runs.root / "run-44")
    register_launcher(oldest)
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


def test_filters_name_what_is_legal(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_without_a_directory_it_is_runs_or_else_here(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = runs.local("one")
    assert list(listed(capsys)) == ["one"]
    for here in (runs.root, layout.root):
        monkeypatch.chdir(here)
        assert list(listed(capsys)) == ["one"]
    monkeypatch.chdir(runs.bin)
    assert listed(capsys) == {}


def test_runs_of_others_are_counted_and_shown_on_request(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.status(runs.submitted("theirs", 12), "training", 5, ago_s=300)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert document(capsys) == {"runs": [], "notes": ["1 run of other users: --all shows them"]}
    assert listed(capsys, "--all")["theirs"]["state"] == "unknown"


def test_a_run_that_was_stopped_and_saved_has_not_failed_when_a_process_was_slow_to_leave(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = runs.local("slow")
    runs.status(layout, "stopped", 97)
    layout.stop_request.touch()
    record = ExitRecord("trainer-0", 143, "ended", starts=1, host="vm", job="")
    layout.exit_record("trainer", 0, 0).parent.mkdir()
    write_exit_record(layout.exit_record("trainer", 0, 0), record)
    assert state(capsys, "slow") == ("stopped", "")
    assert "slow: stopped, step 97/100" in render_status(layout)


@pytest.mark.parametrize("request_of", [lambda run: run.stop_request, lambda run: run.abort_request])
def test_a_run_that_was_stopped_before_its_controller_started_has_not_failed(
    runs: Runs, capsys: pytest.CaptureFixture[str], request_of: Callable[[RunLayout], Path]
) -> None:
    layout = runs.local("early")
    request_of(layout).touch()
    record = ExitRecord("trainer-0", 143, "no output", starts=1, host="vm", job="")
    layout.exit_record("trainer", 0, 0).parent.mkdir()
    write_exit_record(layout.exit_record("trainer", 0, 0), record)
    assert state(capsys, "early") == ("stopped", "")
    assert "stopped before its controller started" in render_status(layout)
