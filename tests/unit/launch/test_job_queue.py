"""What squeue and sacct print becomes rows; what they do not print, a sentence.

The lines were recorded from Slurm 22.05; two little scripts in the place of the commands print them again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from launch.slurm.queue import look_at_jobs, moment_unix_s
from launch.slurm.states import JobStage, duration_s
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.starts

QUEUE = """\
12+0      |RUNNING  |1  |None  |cpu  |1:13  |58:47  |1:00:00  |2026-03-01T14:05:00  |c0  |hetjob  |
12+1      |RUNNING  |1  |None  |train  |1:13  |58:47  |1:00:00  |2026-03-01T14:05:00  |t[0-1]  |a|b  |
13_2|PENDING  |0  |JobArrayTaskLimit  |gen  |0:00  |2-00:00:00  |2-00:00:00  |N/A  |  |gen  |
13_4|PENDING  |0  |JobArrayTaskLimit  |gen  |0:00  |2-00:00:00  |2-00:00:00  |N/A  |  |gen  |
13_5|PENDING  |0  |JobArrayTaskLimit  |gen  |0:00  |2-00:00:00  |2-00:00:00  |N/A  |  |gen  |
13_6|PENDING  |1  |BeginTime  |gen  |0:00  |2-00:00:00  |2-00:00:00  |N/A  |  |gen  |
13_0      |RUNNING  |0  |None  |gen  |1-02:03:04  |UNLIMITED  |UNLIMITED  |2026-03-01T14:05:00  |g0  |gen  |
14        |PENDING  |0  |ReqNodeNotAvail, UnavailableNodes:g0  |gen|0:00|1:00:00|1:00:00|2026-03-02T00:00:00||x  |
"""
ACCOUNTS = (
    "15_3|CANCELLED by 1000|gen|00:10:00|01:00:00|2026-03-01T14:05:00|g3|gen\n15+1|NODE_FAIL|gen|1-00:00:00|x|x|g1|h\n"
)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of commands, before the system's own."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def put(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f'#!/bin/sh\necho "$0 $*" >> {directory}/calls\n{script}\n', encoding="utf-8")
    path.chmod(0o755)


def prints(directory: Path, name: str, text: str) -> None:
    (directory / f"{name}.txt").write_text(text, encoding="utf-8")
    put(directory, name, f"cat {directory}/{name}.txt")


def test_components_and_arrays_are_told_apart_and_tasks_that_wait_for_the_same_are_one_row(commands: Path) -> None:
    prints(commands, "squeue", QUEUE)
    rows = look_at_jobs([12, 13, 14]).rows
    assert [row.label for row in rows] == ["12+0", "12+1", "13_0", "13_6", "13_[2,4-5]", "14"]
    leader, second, task, _, waiting, last = rows
    assert (leader.component, second.component, second.nodes, second.restarts) == (0, 1, "t[0-1]", 1)
    assert second.name == "a|b"
    assert (task.array_task, task.used_s, task.left_s, task.limit_s) == (0, 93784, None, None)
    assert (waiting.array_task, waiting.waiting_tasks, waiting.reason) == (None, "2,4-5", "JobArrayTaskLimit")
    assert (waiting.tasks, waiting.start_unix_s) == ([2, 4, 5], None)
    assert last.reason == "ReqNodeNotAvail, UnavailableNodes:g0"
    assert last.start_unix_s is not None
    assert time.localtime(last.start_unix_s)[:5] == (2026, 3, 2, 0, 0)


def test_one_call_of_squeue_is_enough_for_all(commands: Path) -> None:
    prints(commands, "squeue", QUEUE)
    look_at_jobs([12, 13, 14])
    assert len((commands / "calls").read_text().splitlines()) == 1


def test_rows_of_jobs_that_were_not_asked_for_are_left_out_and_the_order_is_kept(commands: Path) -> None:
    prints(commands, "squeue", QUEUE)
    assert [row.label for row in look_at_jobs([14, 12]).rows] == ["14", "12+0", "12+1"]


def test_what_squeue_has_forgotten_is_asked_of_the_accounts(commands: Path) -> None:
    prints(commands, "squeue", QUEUE)
    prints(commands, "sacct", ACCOUNTS)
    look = look_at_jobs([14, 15, 16])
    assert [(row.label, row.state.name, row.restarts) for row in look.rows] == [
        ("14", "PENDING", 0), ("15_3", "CANCELLED", None), ("15+1", "NODE_FAIL", None),
    ]  # fmt: skip
    assert look.unknown == (16,)
    assert "--jobs=15,16" in (commands / "calls").read_text()


def test_without_accounting_a_forgotten_job_is_unknown_and_nothing_fails(commands: Path) -> None:
    prints(commands, "squeue", "")
    put(commands, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    look = look_at_jobs([7])
    assert (look.rows, look.unknown, look.trouble) == ((), (7,), "")


def test_without_slurm_there_is_a_sentence_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    look = look_at_jobs([7])
    assert look.rows == ()
    assert look.unknown == ()
    assert "squeue: no such command here" in look.trouble
    assert look_at_jobs([7]).rows == ()


def test_a_controller_that_is_away_is_a_sentence_within_the_time_given(commands: Path) -> None:
    put(commands, "squeue", "exec sleep 600")
    began = time.monotonic()
    assert "no answer in 0.3 s" in look_at_jobs([7], timeout_s=0.3).trouble
    assert time.monotonic() - began < PATIENCE_S
    put(commands, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact slurm controller" in look_at_jobs([7]).trouble


def test_no_jobs_no_call(commands: Path) -> None:
    put(commands, "squeue", "exit 1")
    assert look_at_jobs([]).trouble == ""
    assert not (commands / "calls").exists()


def test_what_people_set_for_squeue_does_not_reach_it(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    put(commands, "squeue", f"env > {commands}/seen")
    look_at_jobs([7])
    seen = (commands / "seen").read_text().splitlines()
    assert "SLURM_TIME_FORMAT=standard" in seen
    assert not [line for line in seen if line.startswith("SQUEUE_")]
    assert os.environ["SQUEUE_STATES"] == "RUNNING"


def test_lines_of_another_form_are_no_rows(commands: Path) -> None:
    prints(commands, "squeue", "some banner of the site\nx|y\n" + QUEUE)
    assert len(look_at_jobs([12, 13, 14]).rows) == 6


def test_an_unknown_state_is_a_row_that_lives(commands: Path) -> None:
    prints(commands, "squeue", QUEUE.replace("RUNNING", "DREAMING"))
    assert look_at_jobs([12]).rows[0].state.life is JobStage.UNKNOWN


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:05", 5), ("59:59", 3599), ("1:00:00", 3600), ("2-01:00:00", 176400), ("UNLIMITED", None), ("INVALID", None)],
)
def test_durations_are_seconds(text: str, seconds: int | None) -> None:
    assert duration_s(text) == seconds


def test_moments_are_local_time() -> None:
    now = 1_768_478_400.0  # 15 January 2026, 12:00 UTC: an hour that is in no zone there twice
    assert moment_unix_s(time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))) == now
    assert moment_unix_s("N/A") is None
    assert moment_unix_s("Unknown") is None


def test_a_job_of_a_long_name_is_known_as_its_runs(commands: Path) -> None:
    """squeue cuts what is wider than it was asked for."""
    name = "-".join(["sweep", *(f"trainer.learning_rate_{k}e-6" for k in range(8))]).replace(".", "_")
    row = f"12|RUNNING|0|None|cpu|1:13|58:47|1:00:00|N/A|c0|{name}"
    put(
        commands,
        "squeue",
        f"width=$(echo \"$*\" | sed 's/.*,Name:\\([0-9]*\\).*/\\1/'); echo '{row}' | cut -c1-$((38 + width))",
    )
    look = look_at_jobs([12], run_name=name)
    assert (len(look.rows), len(look.others), len(name) > 100) == (1, 0, True)


def test_an_empty_list_with_an_error_says_of_no_job_that_it_has_ended(commands: Path) -> None:
    """Whatever the status of squeue is: `rlhpc stop` would leave what runs."""
    put(commands, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2")
    look = look_at_jobs([12], timeout_s=1.0, patience_s=0.1)
    assert "Unable to contact slurm controller" in look.trouble
    put(commands, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2")
    put(commands, "sacct", "exit 1")
    assert look_at_jobs([12]).unknown == (12,)
    put(commands, "squeue", "echo 'squeue: error: an old option in slurm.conf' >&2")
    assert look_at_jobs([12]).unknown == (12,), "that is said at every call"


def test_a_job_that_squeue_does_not_list_is_not_alive_because_the_accounts_lack_its_end(commands: Path) -> None:
    """Slurm calls these runaway jobs: `rlhpc stop` and `--wait` waited for them for ever."""
    prints(commands, "squeue", "")
    prints(commands, "sacct", "15|RUNNING|gpu|10-00:00:00|01:00:00|2026-03-01T14:05:00|g0|demo.trainer\n")
    look = look_at_jobs([15])
    assert (look.rows, look.unknown, look.trouble) == ((), (15,), "")
