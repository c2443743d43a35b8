"""What is interrupted or unanswered leaves no job that nobody knows, and two submissions do not meet in one directory.

Slurm is real; a program before sbatch on PATH is slow to hand its answer on, or loses it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.cli import main
from launch.run_files.records import read_job_records
from launch.supervisor.other_jobs import submit_again
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_INTERRUPTED
from tests.ring.run_kit import ROOT, Lab, make_lab
from tests.slurm.cluster_kit import PATIENCE_S, wait_until
from tests.slurm.cluster_run import environment_on
from tests.slurm.submit_kit import Desk, ids_of

JOBS = {"placement": "jobs"}
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


def before_sbatch(directory: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program in the place of sbatch; `real` in it is sbatch itself, which a --test-only goes to."""
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    path = directory / "sbatch"
    lines = ["#!/bin/bash", f'real() {{ {real} "$@"; }}', 'case "$*" in *--test-only*) real "$@"; exit;; esac', body]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def until_told(directory: Path) -> str:
    """A line of sh that says that it has begun, and waits for the test."""
    return f"touch {directory}/begun; while [ ! -e {directory}/go ]; do sleep 0.1; done"


def submission(desk: Desk, name: str, site: Path) -> subprocess.Popen[str]:
    """`rlhpc submit` in a process group that Ctrl-C reaches as a whole, as at a terminal."""
    words = [sys.executable, "-m", "launch.cli", "submit", str(desk.run_file(name)), str(site)]
    environment = {**environment_on(desk.cluster), "PATH": os.environ["PATH"]}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_ctrl_c_while_sbatch_works_leaves_no_job(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_lost: bool
) -> None:
    """At the first job of a run and at the second; sbatch has submitted it, and its answer is on the way or lost."""
    count = f'echo >> {tmp_path}/calls; [ $(wc -l < {tmp_path}/calls) = {number} ] || {{ real "$@"; exit; }}'
    answer = f"echo '{TIMED_OUT}' >&2; exit 1" if is_lost else 'echo "$said"'
    body = f'{count}\nsaid=$(real "$@") || exit; {until_told(tmp_path)}; {answer}'
    before_sbatch(tmp_path, body, monkeypatch)
    name = f"interrupted-{number}-{is_lost}"
    process = submission(desk, name, desk.site(cluster=JOBS))
    wait_until((tmp_path / "begun").exists, "sbatch has submitted")
    assert len(desk.queued()) == number
    os.killpg(process.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == EXIT_INTERRUPTED, err
    assert "and has been cancelled" in err
    assert desk.queued() == []
    layout = desk.lab.layout(name)
    assert read_job_records(layout) == []
    assert not layout.root.with_name(f".{name}.submitting").exists()


def test_ctrl_c_at_any_moment_leaves_a_whole_run_or_none(desk: Desk) -> None:
    site = desk.site(cluster=JOBS)
    for number, pause_s in enumerate((0.6, 0.9, 1.2, 1.5, 1.8)):
        process = submission(desk, f"moment-{number}", site)
        time.sleep(pause_s)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
        recorded = set(map(str, ids_of(desk.lab.layout(f"moment-{number}")).values()))
        assert {shown.partition("_")[0] for shown in desk.queued()} == recorded
        assert len(recorded) in (0, 3)
        assert bool(recorded) == ("submitted" in out)
        desk.clear()


def test_a_submission_whose_answers_are_lost_is_whole(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_sbatch(tmp_path, f'real "$@" > /dev/null; echo "{TIMED_OUT}" >&2; exit 1', monkeypatch)
    for placement in ("jobs", "hetjob"):
        assert desk.submit(f"lost-{placement}", desk.site(cluster={"placement": placement})) == 0
        ids = ids_of(desk.lab.layout(f"lost-{placement}"))
        shown = {each.partition("_")[0].partition("+")[0] for each in desk.queued()}
        assert shown == set(map(str, ids.values()))
        desk.clear()


def test_a_successor_whose_answer_is_lost_is_submitted_once(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert desk.submit("succeeded", desk.site(cluster=JOBS)) == 0
    layout = desk.lab.layout("succeeded")
    before = desk.queued()
    before_sbatch(tmp_path, f'real "$@" > /dev/null; echo "{TIMED_OUT}" >&2; exit 1', monkeypatch)
    number = submit_again(layout, ids_of(layout)["trainer"])
    assert sorted(set(desk.queued()) - set(before)) == [str(number)]
    assert read_job_records(layout)[-1].job_id == number


def test_of_two_submissions_at_once_one_is_refused(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first has prepared the directory, and no job of it is recorded yet."""
    before_sbatch(tmp_path, f'{until_told(tmp_path)}; real "$@"', monkeypatch)
    site = desk.site(prologue={"commands": ["export TOKEN=secret"]})
    site.chmod(0o600)
    first = submission(desk, "two", site)
    wait_until((tmp_path / "begun").exists, "the first is at work")
    for words in ((), ("--fresh",)):
        assert desk.submit("two", site, *words) == EXIT_CONFIG
        assert f"a submission is in progress, by pid {first.pid} on " in capsys.readouterr().err
    (tmp_path / "go").touch()
    out, err = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 0, err
    layout = desk.lab.layout("two")
    assert len({each.partition("+")[0] for each in desk.queued()}) == 1
    assert f"submitted   hetjob {ids_of(layout)['hetjob']}" in out
    assert layout.site.stat().st_mode & 0o777 == 0o600
    before = desk.queued()

    for name in ("begun", "go"):
        (tmp_path / name).unlink()
    code = ["scale", str(layout.root), "--generators", "+1"]
    other = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", *code], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**environment_on(desk.cluster), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    wait_until((tmp_path / "begun").exists, "the first is at work")
    assert main(code) == EXIT_CONFIG
    assert f"a submission is in progress, by pid {other.pid} on " in capsys.readouterr().err
    (tmp_path / "go").touch()
    other.communicate(timeout=PATIENCE_S)
    assert other.returncode == 0
    assert len(desk.queued()) == len(before) + 1
