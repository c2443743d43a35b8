"""The parts of a supervisor that need no Slurm: times, budgets, plans, records."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from launch.run_files.plan_file import PlanFileError, read_plan
from launch.run_files.records import ExitRecord, read_exit_records, write_exit_record
from launch.run_files.run_state import (
    EventLog,
    Progress,
    last_outcome,
    needed_to_stop_s,
    read_attempt,
    read_progress,
    saved_step,
)
from launch.slurm import queue
from launch.slurm.commands import SlurmError, clean_environment, is_away, slurm
from launch.slurm.queue import ThisJob, TimeLimit
from launch.slurm.states import OVER, duration_s
from launch.supervisor.outcomes import RetryBudget
from launch.supervisor.processes import Signals, SlurmSignals
from rlhpc.base.run_directory import RunLayout
from tests.patience import PATIENCE_S


def layout_in(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    for directory in (layout.jobs, layout.checkpoints, layout.logs):
        directory.mkdir()
    return layout


def progress(step_s: float, save_s: float) -> Progress:
    return Progress(attempt=0, phase="training", step=7, step_s=step_s, save_s=save_s, age_s=0.0, roles=())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:30", 90), ("2:00:05", 7205), ("3-01:00:00", 262_800), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)
def test_time_left_is_read_in_all_forms_of_squeue(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds


def test_a_job_knows_itself_from_its_environment() -> None:
    job = ThisJob.of({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3", "SLURM_HET_SIZE": "3"})
    assert (job.job_id, job.submitted_id, job.name, job.restart, job.is_heterogeneous) == (12, 12, "12", 3, True)
    assert job.incarnation(4) == "12.3.4"
    task = ThisJob.of({"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "13", "SLURM_ARRAY_TASK_ID": "2"})
    assert (task.job_id, task.submitted_id, task.name, task.restart) == (15, 13, "13_2", 0)


def test_outside_a_job_there_is_no_job() -> None:
    with pytest.raises(SlurmError, match="rlhpc submit"):
        ThisJob.of({})


def test_the_end_of_a_life_is_taken_from_slurm_where_slurm_says_it() -> None:
    job = ThisJob.of({"SLURM_JOB_ID": "12"})
    end = int(time.time()) + 100
    limit = TimeLimit(job, {"SLURM_JOB_END_TIME": str(end)})
    before, left_s, life_s, after = time.time(), limit.left_s(), limit.life_s, time.time()
    assert end - after - 0.01 <= left_s <= end - before + 0.01  # two clocks
    assert left_s - 1 <= life_s <= 101


def test_on_a_node_whose_clock_is_behind_a_life_does_not_seem_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's variables are of slurmctld's clock."""
    now, behind_s = time.time(), 300.0
    monkeypatch.setattr(queue.time, "time", lambda: now - behind_s)
    job = ThisJob.of({"SLURM_JOB_ID": "12"})
    limit = TimeLimit(job, {"SLURM_JOB_START_TIME": str(int(now)), "SLURM_JOB_END_TIME": str(int(now) + 100)})
    assert 95 <= limit.left_s() <= 100
    assert limit.life_s == pytest.approx(100, abs=1)


def test_stopping_needs_the_step_and_the_checkpoint_that_were_seen_and_a_margin() -> None:
    assert needed_to_stop_s(progress(10.0, 30.0), 36_000.0) == pytest.approx(30.0 + 15.0 + 60.0)


def test_what_was_not_seen_yet_never_takes_more_than_a_tenth_of_a_life() -> None:
    assert needed_to_stop_s(progress(2.0, 0.0), 100.0) == pytest.approx(100 / 6 + 3.0 + 10.0)
    assert needed_to_stop_s(None, 60.0) == pytest.approx(10.0)
    assert needed_to_stop_s(progress(2.0, 0.0), float("inf")) == pytest.approx(30.0 + 3.0 + 60.0)


def test_a_budget_is_used_up_by_failures_without_a_new_checkpoint(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    pauses = [RetryBudget(layout, 3).take(40) for _ in range(4)]  # each time read anew, as after a requeue
    assert pauses == [2.0, 8.0, 32.0, None]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"x"', "{}", '{"failures": null, "saved_step": 1}'])
def test_a_damaged_count_of_failures_counts_as_none(tmp_path: Path, content: str) -> None:
    layout = layout_in(tmp_path)
    layout.failures.write_text(content)
    assert RetryBudget(layout, 3).take(40) == 2.0


def test_a_run_may_fail_as_often_as_its_site_file_allows(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    layout.failures.write_text('{"failures": 2000, "saved_step": 40}')
    assert RetryBudget(layout, 3000).take(40) == 300.0


def test_a_new_checkpoint_refills_the_budget(tmp_path: Path) -> None:
    budget = RetryBudget(layout_in(tmp_path), 2)
    assert [budget.take(10), budget.take(10), budget.take(20), budget.take(20), budget.take(20)] == [
        2.0, 8.0, 2.0, 8.0, None,
    ]  # fmt: skip


def test_the_saved_step_is_that_of_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    assert saved_step(layout) == 0
    for step, is_complete in ((4, True), (8, True), (12, False)):
        layout.checkpoint(step).mkdir()
        if is_complete:
            (layout.checkpoint(step) / "COMPLETE").touch()
    assert saved_step(layout) == 8


def test_half_written_state_is_not_known(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    assert read_attempt(layout) is None
    assert read_progress(layout) is None
    layout.attempt.write_text('{"attempt": 1')
    layout.status.write_text("{}")
    assert read_attempt(layout) is None
    assert read_progress(layout) is None


def test_records_of_an_attempt_are_found_by_role_and_replica(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    for replica, status in ((0, 0), (11, 139)):
        path = layout.exit_record("trainer", replica, 3)
        path.parent.mkdir()
        write_exit_record(path, ExitRecord(f"trainer-{replica}", status, "segmentation fault", 1, "n1", "12"))
    found = read_exit_records(layout, "trainer", 3)
    assert {replica: record.status for replica, record in found.items()} == {0: 0, 11: 139}
    assert found[11].cause == "trainer-11 on n1 ended with signal SIGSEGV: segmentation fault"
    assert read_exit_records(layout, "trainer", 2) == {}


def test_a_plan_of_another_schema_or_without_the_job_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job_plan.json"
    path.write_text(json.dumps({"schema": 2, "jobs": []}))
    with pytest.raises(PlanFileError, match="schema 2; this supervisor reads 1"):
        read_plan(path, "hetjob")
    path.write_text(json.dumps({"schema": 1, "jobs": [{"name": "trainer"}]}))
    with pytest.raises(PlanFileError, match="no job 'hetjob'; legal: trainer"):
        read_plan(path, "hetjob")
    with pytest.raises(PlanFileError, match="No such file"):
        read_plan(tmp_path / "none.json", "hetjob")


def test_events_are_lines_of_json_that_a_later_life_goes_on_with(tmp_path: Path) -> None:
    path = tmp_path / "jobs" / "12.events.jsonl"
    EventLog(path, 0).say("life", "begins")
    later = EventLog(path, 1)
    later.attempt = 2
    later.say("requeue", "back into the queue")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["event"], e["restart"], e["attempt"]) for e in events] == [("life", 0, -1), ("requeue", 1, 2)]


def test_an_event_that_a_full_disk_takes_a_part_of_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    """A life that has begun must not stay the outcome of the one before, which is read from here."""
    layout = layout_in(tmp_path)
    log = EventLog(layout.job_events("12"), 0)
    log.say("verdict", "requeue: the time limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (layout.job_events("12").stat().st_size + 10, hard))  # as a full disk
    try:
        log.say("queue", "is asked")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert last_outcome(layout, "12") == "requeue: the time limit"
    EventLog(layout.job_events("12"), 1).say("life", "begins")
    assert last_outcome(layout, "12") == ""
    events = [json.loads(line)["event"] for line in layout.job_events("12").read_text().splitlines()]
    assert events == ["verdict", "life"]


def test_signals_become_flags_and_end_a_sleep() -> None:
    old = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)}
    try:
        signals = SlurmSignals()
        os.kill(os.getpid(), signal.SIGUSR2)
        began = time.monotonic()
        signals.sleep(2 * PATIENCE_S)
        assert time.monotonic() - began < PATIENCE_S
        assert (signals.warned, signals.end_requested) == (True, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.end_requested
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def test_a_supervisor_with_more_than_a_thousand_open_files_sleeps() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("fewer than 2,048 open files are allowed here")
    with ExitStack() as files:
        while files.enter_context(Path(os.devnull).open()).fileno() < 1024:
            pass
        Signals().sleep(0.0)


@pytest.mark.starts
def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(SlurmError, match="no-such-sbatch: no such command here"):
        slurm("no-such-sbatch", "--version")


@pytest.mark.starts
def test_a_command_that_fails_is_quoted() -> None:
    with pytest.raises(SlurmError, match="sh: line of its own, and another"):
        slurm("sh", "-c", "echo line of its own, >&2; echo and another >&2; exit 3")


@pytest.mark.starts
def test_a_controller_that_is_away_is_waited_for(tmp_path: Path) -> None:
    away = "echo Unable to contact slurm controller >&2; (sleep 0.3; touch $1) & exit 1"
    script = f"test -e $1 && echo fine || {{ {away}; }}"
    assert slurm("sh", "-c", script, "sh", str(tmp_path / "back"), patience_s=20.0) == "fine\n"
    with pytest.raises(SlurmError, match="Unable to contact"):
        slurm("sh", "-c", "echo Unable to contact slurm controller >&2; exit 1", patience_s=0.2)


@pytest.mark.starts
def test_a_controller_that_scontrol_finds_down_is_away() -> None:
    """`scontrol show config` of 24.11 prints what it knows, asks every controller, and fails with this."""
    with pytest.raises(SlurmError) as caught:
        slurm("sh", "-c", "echo '** RESTORE SLURMCTLD DAEMON TO SERVICE **'; exit 1")
    assert is_away(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        # without slurm.conf on the node
        "sbatch: error: fetch_config: DNS SRV lookup failed\nsbatch: fatal: Could not establish a configuration source",
        'squeue: error: Unable to resolve "ctl": Host name lookup failure\n'
        "squeue: error: Unable to establish control machine address\n"
        "slurm_load_jobs error: Resource temporarily unavailable",
        "squeue: error: If munged is up, restart with --num-threads=10\n"
        'squeue: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory\n'
        "slurm_load_jobs error: Protocol authentication error",
    ],
)
@pytest.mark.starts
def test_what_a_command_needs_before_it_can_ask_slurmctld_is_waited_for(tmp_path: Path, said: str) -> None:
    """A job that met one of these when it requeued itself took it for a refusal, and the run stood still."""
    words = (f"test -e $1 && echo fine || {{ touch $1; echo '{said}' >&2; exit 1; }}", "sh", str(tmp_path / "back"))
    assert slurm("sh", "-c", *words, patience_s=20.0) == "fine\n"


def test_a_job_submitted_from_a_job_inherits_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_HET_SIZE", "SBATCH_PARTITION", "SLURM_CONF", "SRUN_DEBUG", "PMIX_RANK"):
        monkeypatch.setenv(name, "x")
    clean = clean_environment()
    assert clean["SLURM_CONF"] == "x"
    assert not {"SLURM_HET_SIZE", "SBATCH_PARTITION", "SRUN_DEBUG", "PMIX_RANK"} & set(clean)


def test_a_job_counts_as_gone_only_in_states_that_are_over() -> None:
    """Spelt out: with COMPLETING among them, which may be a requeue, a job would be submitted twice."""
    assert {
        "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
        "OUT_OF_MEMORY", "REVOKED",
    } == OVER  # fmt: skip


def stand_in(directory: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of that name that writes down its words, for there is no slurmctld here to look at."""
    words = directory / f"{name}.words"
    program = directory / name
    program.write_text(f'#!/bin/sh\necho "$@" >> {words}\necho 1:00\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return words


@pytest.mark.starts
def test_a_task_of_an_array_speaks_of_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last task has the id of the whole array: by it, all of the array would be requeued."""
    last = ThisJob.of({"SLURM_JOB_ID": "36", "SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "3"})
    requeued, asked = stand_in(tmp_path, "scontrol", monkeypatch), stand_in(tmp_path, "squeue", monkeypatch)
    last.requeue()
    assert requeued.read_text().split() == ["requeue", "36_3"]
    TimeLimit(last, {})
    assert "--jobs=36_3" in asked.read_text().split()


def test_a_full_disk_ends_no_supervisor(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "gone")
    (tmp_path / "gone").write_text("")  # nothing can be made below it
    EventLog(layout.job_events("12"), 0).say("life", "begins")
    budget = RetryBudget(layout, 1)
    assert (budget.take(10), budget.take(10)) == (2.0, None)
