"""What a real Slurm says of real jobs is classified as the table states, and shown by `rlhpc status`."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from launch.commands.logs import show_logs
from launch.private_slurm.cluster import DevCluster
from launch.run_files.records import JobRecord, write_job_record
from launch.slurm.queue import QueueLook, look_at_jobs
from launch.slurm.states import STATES, EndedBy, JobStage, is_stuck, reason_in_words
from launch.view.status import render_status
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RoleFailed
from tests.slurm import faults
from tests.slurm.cluster_kit import MakeCluster, job_output, seconds_of, submit, wait_state, wait_until
from tests.slurm.rows_kit import row_of, rows_of, status_of, wait_name, wait_reason, wait_row

LONG = "echo up; sleep 300"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[DevCluster], None]:
    """Turns this process towards a cluster, as `source …/activate` does."""

    def turn(cluster: DevCluster) -> None:
        for name, value in cluster.environment().items():
            monkeypatch.setenv(name, value)

    return turn


@pytest.fixture
def cluster(slurm: DevCluster, here: Callable[[DevCluster], None]) -> DevCluster:
    """The session's cluster."""
    here(slurm)
    return slurm


def make_run(root: Path, *jobs: tuple[int, str]) -> RunLayout:
    """A run directory with records of these jobs."""
    layout = RunLayout(root / "run")
    layout.jobs.mkdir(parents=True)
    layout.config.write_text('{"config": {}, "hash": ""}')
    for job_id, name in jobs:
        note(layout, job_id, name)
    return layout


def note(layout: RunLayout, job_id: int, name: str) -> None:
    write_job_record(layout, JobRecord(job_id, name, "jobs", None, "plan", "script", False, 0, 1, None, time.time()))


# -------------------------------------------------------------------------------------------------------------- states


def test_the_installed_squeue_knows_no_state_besides_the_table_and_takes_our_short_codes(slurm: DevCluster) -> None:
    with pytest.raises(RoleFailed, match="Invalid job state specified: nonsense") as refused:
        slurm.run("squeue", "--states=nonsense")
    listed = re.search(r"[Vv]alid job states include: ([A-Za-z_,]+)", str(refused.value))
    if listed is None:
        pytest.skip("this squeue does not list its states")
    names = listed[1].upper().split(",")  # 26.05 writes them small
    assert set(names) <= {state.name for state in STATES}
    codes = [state.code for state in STATES if state.code and state.name in names]
    assert len(codes) > 20
    slurm.run("squeue", f"--states={','.join(codes)}")  # it refuses one that it does not know


def test_how_a_job_ended_is_told_apart(cluster: DevCluster) -> None:
    done, failed = submit(cluster, "true", "--partition=cpu"), submit(cluster, "exit 3", "--partition=cpu")
    cancelled, late = (submit(cluster, LONG, "--partition=cpu") for _ in range(2))
    for job in (cancelled, late):
        wait_name(job, "RUNNING")
    cluster.run("scancel", str(cancelled))
    cluster.run("scontrol", "update", f"JobId={late}", "TimeLimit=0")
    expected = {
        done: ("COMPLETED", EndedBy.SUCCESS, False),
        failed: ("FAILED", EndedBy.RUN, False),
        cancelled: ("CANCELLED", EndedBy.PERSON, False),
        late: ("TIMEOUT", EndedBy.SITE, True),
    }
    for job, (name, ended_by, resume) in expected.items():
        state = wait_name(job, name).state  # Slurm looks at time limits every 30 s
        assert (state.is_alive, state.ended_by, state.is_worth_resuming) == (False, ended_by, resume)


def test_a_job_that_cannot_start_before_its_deadline_is_over(cluster: DevCluster) -> None:
    submit(cluster, LONG, "--partition=cpu", "--exclusive")
    job = submit(cluster, LONG, "--partition=cpu", "--exclusive", "--time=1", "--deadline=now+75")
    state = wait_name(job, "DEADLINE").state
    assert (state.is_alive, state.ended_by, state.is_worth_resuming) == (False, EndedBy.SITE, False)


def test_a_stopped_and_a_suspended_job_keep_their_nodes(cluster: DevCluster) -> None:
    stopped, suspended = (submit(cluster, LONG, "--partition=cpu") for _ in range(2))
    for job in (stopped, suspended):
        wait_name(job, "RUNNING")
        wait_until(lambda job=job: "up" in job_output(cluster, job), "its script runs")  # earlier signals are lost
    cluster.run("scancel", "--signal=STOP", str(stopped))
    cluster.run("scontrol", "suspend", str(suspended))
    assert wait_name(stopped, "STOPPED").state.life is JobStage.ON_NODES
    assert wait_name(suspended, "SUSPENDED").state.life is JobStage.ON_NODES
    cluster.run("scontrol", "resume", str(suspended))
    cluster.run("scancel", "--signal=CONT", str(stopped))
    for job in (stopped, suspended):
        wait_name(job, "RUNNING")


def test_a_preempted_job_is_alive_and_comes_back_under_its_id(cluster: DevCluster) -> None:
    low = submit(cluster, LONG, "--partition=scavenge", "--nodelist=g2", "--gres=gpu:4")
    wait_name(low, "RUNNING")
    submit(cluster, LONG, "--partition=gen", "--nodelist=g2", "--gres=gpu:4")
    row = wait_row(low, lambda row: row.state.name == "PENDING", "is requeued")
    assert row.state.is_restarted_by_slurm
    assert row.restarts == 1
    assert not is_stuck(row.reason)


def test_a_job_never_looks_over_while_it_is_requeued(cluster: DevCluster, tmp_path: Path) -> None:
    leaving = tmp_path / "leaving"  # until one was seen to end; they leave by themselves, with exit status 0
    slow = f"trap 'while [ ! -e {leaving} ]; do sleep 0.1; done; exit 0' TERM; sleep 300 & wait"
    single = submit(cluster, slow, "--partition=cpu")
    pair = submit(cluster, slow, "--partition=cpu", ":", "--partition=gen", "--mem=16M")
    wait_until(lambda: all(row.state.name == "RUNNING" for row in rows_of(single, pair)), "they run")
    for job in (single, pair):
        cluster.run("scontrol", "requeue", str(job))
    seen: set[str] = set()

    def is_back() -> bool:
        rows = rows_of(single, pair)
        assert len(rows) == 3
        assert all(row.state.is_alive for row in rows)
        seen.update(row.state.name for row in rows)
        if "COMPLETING" in seen:
            leaving.touch()
        return all(row.state.name == "RUNNING" and row.restarts == 1 for row in rows)

    wait_until(is_back, "both run again")
    assert {"COMPLETING", "PENDING"} <= seen


def test_jobs_requeued_and_held_are_alive_and_stuck(cluster: DevCluster) -> None:
    held, special = (submit(cluster, LONG, "--partition=cpu") for _ in range(2))
    for job in (held, special):
        wait_name(job, "RUNNING")
    cluster.run("scontrol", "requeuehold", str(held))
    cluster.run("scontrol", "requeuehold", "State=SpecialExit", str(special))
    assert wait_name(special, "SPECIAL_EXIT").state.life is JobStage.HELD
    # Slurm shows the flag for a moment only: the reason tells.
    row = wait_row(held, lambda row: row.state.name == "PENDING" and is_stuck(row.reason), "is held")
    assert "scontrol release" in reason_in_words(row.reason)


def test_a_job_that_may_not_be_requeued_ends_with_its_node(
    make_cluster: MakeCluster, here: Callable[[DevCluster], None]
) -> None:
    cluster = make_cluster()
    here(cluster)
    job = submit(cluster, LONG, "--partition=gen", "--no-requeue")
    wait_until(lambda: bool(job_output(cluster, job)), "it runs")
    node = row_of(job).nodes
    faults.crash_node(cluster, node)
    faults.declare_down(cluster, node)
    state = wait_row(job, lambda row: not row.state.is_alive, "is over").state
    assert state.name == "NODE_FAIL"
    assert (state.is_alive, state.ended_by, state.is_worth_resuming) == (False, EndedBy.WORLD, True)


# ------------------------------------------------------------------------------------------------------------- reasons


def test_why_jobs_wait_is_read_as_slurm_says_it(cluster: DevCluster) -> None:
    blocker = submit(cluster, LONG, "--partition=train", "--nodes=2", "--exclusive")
    wait_name(blocker, "RUNNING")
    common = ("--partition=train", "--nodes=2", "--exclusive")
    jobs = {
        "Resources": submit(cluster, LONG, *common, "--nice=0"),
        "Priority": submit(cluster, LONG, *common, "--nice=100"),
        "JobHeldUser": submit(cluster, LONG, "--partition=cpu", "--hold"),
        "BeginTime": submit(cluster, LONG, "--partition=cpu", "--begin=now+1hour"),
        "Dependency": submit(cluster, LONG, "--partition=cpu", f"--dependency=afterok:{blocker}"),
    }
    with suppress(RoleFailed):  # 24.11 refuses it; 26.05 says either, whichever it looks at first
        job = submit(cluster, LONG, "--partition=train", "--nodes=9")
        row = wait_row(job, lambda row: row.reason in ("PartitionNodeLimit", "PartitionConfig"), "waits in vain")
        assert not is_stuck(row.reason)
        assert " " in reason_in_words(row.reason)
    for reason, job in jobs.items():
        assert is_stuck(wait_reason(job, reason).reason) == (reason == "JobHeldUser")
    first = wait_row(jobs["Resources"], lambda row: row.start_unix_s is not None, "has an estimate")
    assert (first.start_unix_s or 0.0) > time.time()
    cluster.run("scancel", str(blocker))
    assert is_stuck(wait_reason(jobs["Dependency"], "DependencyNeverSatisfied").reason)


def test_tasks_of_an_array_that_wait_together_are_one_row(cluster: DevCluster) -> None:
    job = submit(cluster, LONG, "--partition=cpu", "--array=0-5%2")
    labels = [f"{job}_0", f"{job}_1", f"{job}_[2-5]"]

    def is_so() -> bool:
        rows = rows_of(job)
        return [row.label for row in rows] == labels and rows[2].reason == "JobArrayTaskLimit"

    wait_until(is_so, "two tasks run, and the others are one row that waits for them")


# ---------------------------------------------------------------------------------------------------------- the status


def test_status_of_a_heterogeneous_job_names_its_components_and_takes_less_than_a_second(
    cluster: DevCluster, tmp_path: Path
) -> None:
    parts = ("--partition=cpu", ":", "--partition=train", "--mem=16M", ":", "--partition=gen", "--mem=16M")
    job = submit(cluster, LONG, *parts)
    wait_state(cluster, job, "RUNNING")
    layout = make_run(tmp_path, (job, "hetjob"))
    names = [{"name": name} for name in ("controller", "trainer", "generation")]
    layout.job_plan.write_text(json.dumps({"jobs": [{"name": "hetjob", "components": names}]}))
    for _ in range(3):
        took_s = seconds_of(lambda: render_status(layout))
        one_question_s = seconds_of(lambda: cluster.run("squeue"))
        if took_s < 1.0 + 3 * one_question_s:  # on a busy machine the questions alone take a second
            break
    assert took_s < 1.0 + 3 * one_question_s
    text = status_of(layout)
    rows = [line.split() for line in text.splitlines() if line.startswith(f"{job}+")]
    assert [row[:4] for row in rows] == [
        [f"{job}+{k}", name, "RUNNING", "0"] for k, name in enumerate(("controller", "trainer", "generation"))
    ]
    assert [row[-2] for row in rows] == ["c0", "t0", "g0"]
    assert f"its time limit, job {job}+0 saves, is requeued or submits a successor, and continues" in text


def test_status_says_who_waits_for_whom_and_when_that_ends(cluster: DevCluster, tmp_path: Path) -> None:
    submit(cluster, LONG, "--partition=train", "--nodes=2", "--exclusive", "--time=10")
    controller = submit(cluster, LONG, "--partition=cpu")
    generation = submit(cluster, LONG, "--partition=gen", "--array=0-3%2")
    trainer = submit(cluster, LONG, "--partition=train", "--nodes=2", "--exclusive")
    wait_reason(trainer, "Resources")
    wait_row(trainer, lambda row: row.start_unix_s is not None, "has an estimate")
    layout = make_run(tmp_path, (controller, "controller"), (trainer, "trainer"), (generation, "generation"))
    text = status_of(layout)
    assert re.search(rf"controller and generation wait for trainer: job {trainer} PENDING \(Resources\), "
                     r"starts about \d\d:\d\d", text)  # fmt: skip
    assert f"{generation}_[2-3]" in text
    assert "generator-2…3" in text


@pytest.mark.long
def test_a_run_of_several_lives_can_be_followed_to_its_end(
    cluster: DevCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = make_run(tmp_path)
    log = layout.log("trainer", 0, 0)
    log.parent.mkdir(parents=True)
    script = f"for k in 0 1; do echo life $k > {log.parent}/attempt_$k.log; sleep 2; done; touch {layout.summary}"
    job = submit(cluster, script, "--partition=cpu")
    note(layout, job, "controller")
    assert show_logs(layout, "trainer", follow=True) == 0
    assert capsys.readouterr().out == "trainer-0 | life 0\ntrainer-0 | life 1\n"


def test_a_controller_of_slurm_that_is_away_is_said(
    make_cluster: MakeCluster, here: Callable[[DevCluster], None], tmp_path: Path
) -> None:
    cluster = make_cluster()
    here(cluster)
    job = submit(cluster, LONG, "--partition=gen")
    wait_state(cluster, job, "RUNNING")
    layout = make_run(tmp_path, (job, "controller"))
    faults.stop_controller(cluster)
    text = render_status(layout)
    assert "Slurm did not answer: squeue: " in text
    assert f"jobs of this run: {job}" in text
    faults.start_controller(cluster)
    assert f"{job}  controller  RUNNING" in status_of(layout)


def test_accounts_know_what_the_queue_has_forgotten(
    slurm_accounts: DevCluster,
    here: Callable[[DevCluster], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here(slurm_accounts)
    array = submit(slurm_accounts, "exit 3", "--partition=gen", "--array=0-1")
    pair = submit(slurm_accounts, "true", "--partition=cpu", ":", "--partition=gen", "--mem=16M")
    wait_until(lambda: not any(row.state.is_alive for row in rows_of(array, pair)), "all have ended")
    forgets = tmp_path / "squeue"  # as after MinJobAge, five minutes as a rule
    forgets.write_text("#!/bin/sh\n")
    forgets.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rows = {f"{array}_0": "FAILED", f"{array}_1": "FAILED", f"{pair}+0": "COMPLETED", f"{pair}+1": "COMPLETED"}
    look = QueueLook(())

    def are_known() -> bool:
        nonlocal look
        look = look_at_jobs([array, pair, 999_999_999])
        return {row.label: row.state.name for row in look.rows} == rows

    wait_until(are_known, "the accounts have it")
    assert look.unknown == (999_999_999,)
    assert {row.partition for row in look.rows} == {"gen", "cpu"}
    assert all(row.used_s is not None and row.start_unix_s and row.restarts is None for row in look.rows)
