"""The parts of a supervisor that need no Slurm: times, budgets, plans, records, outcomes, stalls, the end of a job."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from launch.plan.processes import STALL_S
from launch.run_files.plan_file import PlanFileError, read_plan
from launch.run_files.records import (
    ExitRecord,
    JobRecord,
    read_exit_records,
    read_job_records,
    write_exit_record,
    write_job_record,
)
from launch.run_files.run_state import (
    ENDED_BY_SLURM,
    NEAR_ITS_LIMIT,
    Attempt,
    Cause,
    EventLog,
    Outcome,
    ReportedProgress,
    last_outcome,
    needed_to_stop_s,
    read_attempt,
    read_progress,
    reason_to_save,
    save_requests,
    saved_step,
)
from launch.slurm import queue
from launch.slurm.commands import SlurmError, clean_environment, is_away, slurm
from launch.slurm.queue import ThisJob, TimeLimit
from launch.slurm.states import OVER, duration_s
from launch.supervisor.__main__ import _follow_up
from launch.supervisor.controller_job import write_result
from launch.supervisor.outcomes import AwakeTime, OutcomeClassifier, RetryBudget, StallWatch, asked_to_end
from launch.supervisor.processes import Signals, SlurmSignals
from rlhpc.base.run_directory import RunLayout
from tests.patience import PATIENCE_S
from tests.unit.launch.site_kit import job_of_id, job_part, last_event, part_of

ATTEMPT = Attempt(2, 40, 12, 0)


@pytest.fixture
def layout(tmp_path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    for directory in (layout.jobs, layout.checkpoints, layout.logs):
        directory.mkdir(parents=True)
    return layout


def progress(step_s: float, save_s: float) -> ReportedProgress:
    return ReportedProgress(attempt=0, phase="training", step=7, step_s=step_s, save_s=save_s, age_s=0.0, roles=())


def events_of(layout: RunLayout, job: str) -> list[dict]:
    return [json.loads(line) for line in layout.job_events(job).read_text().splitlines()]


# --------------------------------------------------------------------------------------------------------- the job


def test_a_job_knows_itself_from_its_environment():
    job = ThisJob.of({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3", "SLURM_HET_SIZE": "3"})
    assert (job.job_id, job.submitted_id, job.name, job.restart, job.is_heterogeneous) == (12, 12, "12", 3, True)
    assert job.incarnation(4) == "12.3.4"
    task = ThisJob.of({"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "13", "SLURM_ARRAY_TASK_ID": "2"})
    assert (task.job_id, task.submitted_id, task.name, task.restart) == (15, 13, "13_2", 0)
    with pytest.raises(SlurmError, match="rlhpc submit"):
        ThisJob.of({})


@pytest.mark.starts
def test_a_task_of_an_array_speaks_of_itself_alone(commands):
    """The last task has the id of the whole array: by it, all of the array would be requeued."""
    last = ThisJob.of({"SLURM_JOB_ID": "36", "SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "3"})
    commands.put("scontrol", "echo 1:00")
    commands.put("squeue", "echo 1:00")
    last.requeue()
    assert commands.calls("scontrol") == ["requeue 36_3"]
    TimeLimit(last, {})
    assert "--jobs=36_3" in commands.calls("squeue")[0].split()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:30", 90), ("2:00:05", 7205), ("3-01:00:00", 262_800), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)
def test_time_left_is_read_in_all_forms_of_squeue(text, seconds):
    assert duration_s(text) == seconds


def test_the_end_of_a_life_is_taken_from_slurm_whatever_the_clock_of_the_node_says(monkeypatch):
    job = job_of_id(12)
    end = int(time.time()) + 100
    limit = TimeLimit(job, {"SLURM_JOB_END_TIME": str(end)})
    before, left_s, life_s, after = time.time(), limit.left_s(), limit.life_s, time.time()
    assert end - after - 0.01 <= left_s <= end - before + 0.01  # two clocks
    assert left_s - 1 <= life_s <= 101
    now, behind_s = time.time(), 300.0
    monkeypatch.setattr(queue.time, "time", lambda: now - behind_s)  # Slurm's variables are of slurmctld's clock
    limit = TimeLimit(job_of_id(12), {"SLURM_JOB_START_TIME": str(int(now)), "SLURM_JOB_END_TIME": str(int(now) + 100)})
    assert 95 <= limit.left_s() <= 100
    assert limit.life_s == pytest.approx(100, abs=1)


@pytest.mark.parametrize(
    ("seen", "life_s", "needed_s"),
    [
        (progress(10.0, 30.0), 36_000.0, 30.0 + 15.0 + 60.0),  # the step and the save that were seen, and a margin
        (progress(2.0, 0.0), 100.0, 100 / 6 + 3.0 + 10.0),  # what was not seen takes no more than a part of a life
        (None, 60.0, 10.0),
        (progress(2.0, 0.0), float("inf"), 30.0 + 3.0 + 60.0),
    ],
)
def test_stopping_needs_the_step_and_the_checkpoint_that_were_seen_and_a_margin(seen, life_s, needed_s):
    assert needed_to_stop_s(seen, life_s) == pytest.approx(needed_s)


def test_a_job_counts_as_gone_only_in_states_that_are_over():
    """Spelt out: with COMPLETING among them, which may be a requeue, a job would be submitted twice."""
    assert {
        "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
        "OUT_OF_MEMORY", "REVOKED",
    } == OVER  # fmt: skip


def test_a_job_submitted_from_a_job_inherits_nothing_of_it(monkeypatch):
    for name in ("SLURM_HET_SIZE", "SBATCH_PARTITION", "SLURM_CONF", "SRUN_DEBUG", "PMIX_RANK"):
        monkeypatch.setenv(name, "x")
    clean = clean_environment()
    assert clean["SLURM_CONF"] == "x"
    assert not {"SLURM_HET_SIZE", "SBATCH_PARTITION", "SRUN_DEBUG", "PMIX_RANK"} & set(clean)


# --------------------------------------------------------------------------------------------------------- budgets


def test_a_budget_is_used_up_by_failures_and_refilled_by_a_new_checkpoint(layout):
    pauses = [RetryBudget(layout, 3).take(40) for _ in range(4)]  # each time read anew, as after a requeue
    assert pauses == [2.0, 8.0, 32.0, None]
    assert [RetryBudget(layout, 2).take(step) for step in (50, 50, 60, 60, 60)] == [2.0, 8.0, 2.0, 8.0, None]
    layout.failures.write_text('{"failures": 2000, "saved_step": 40}')
    assert RetryBudget(layout, 3000).take(40) == 300.0, "as often as its site file allows"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"x"', "{}", '{"failures": null, "saved_step": 1}'])
def test_a_damaged_count_of_failures_counts_as_none(layout, content):
    layout.failures.write_text(content)
    assert RetryBudget(layout, 3).take(40) == 2.0


def test_a_full_disk_ends_no_supervisor(tmp_path):
    layout = RunLayout(tmp_path / "gone")
    (tmp_path / "gone").write_text("")  # nothing can be made below it
    EventLog(layout.job_events("12"), 0).say("life", "begins")
    budget = RetryBudget(layout, 1)
    assert (budget.take(10), budget.take(10)) == (2.0, None)


# ---------------------------------------------------------------------------------------------------------- files


def test_requests_and_the_newest_complete_checkpoint_are_found(layout):
    assert saved_step(layout) == 0
    for step, is_complete in ((4, True), (8, True), (12, False)):
        layout.checkpoint(step).mkdir()
        if is_complete:
            (layout.checkpoint(step) / "COMPLETE").touch()
    (layout.jobs / "12.yield").touch()
    (request,) = save_requests(layout)
    assert (request.name, reason_to_save(request)) == ("12.yield", NEAR_ITS_LIMIT)
    request.write_text(ENDED_BY_SLURM)
    assert reason_to_save(request) == ENDED_BY_SLURM
    assert reason_to_save(request.with_name("13.yield")) == NEAR_ITS_LIMIT  # withdrawn meanwhile
    assert saved_step(layout) == 8


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_file_server_that_does_not_answer_for_a_moment_asks_for_nothing(layout, monkeypatch, number):
    """It ended the run, and all its jobs: "given_up: the run directory cannot be used"."""

    def refuse(path: object = ".") -> object:
        raise OSError(number, os.strerror(number), str(path))

    (layout.jobs / "12.yield").touch()
    monkeypatch.setattr(os, "listdir", refuse)
    assert (save_requests(layout), saved_step(layout)) == ([], 0)


def test_half_written_state_is_not_known(layout):
    assert (read_attempt(layout), read_progress(layout)) == (None, None)
    layout.attempt.write_text('{"attempt": 1')
    layout.status.write_text("{}")
    assert (read_attempt(layout), read_progress(layout)) == (None, None)


def test_records_of_an_attempt_are_found_by_role_and_replica(layout):
    for replica, status in ((0, 0), (11, 139)):
        path = layout.exit_record("trainer", replica, 3)
        path.parent.mkdir()
        write_exit_record(path, ExitRecord(f"trainer-{replica}", status, "segmentation fault", 1, "n1", "12"))
    found = read_exit_records(layout, "trainer", 3)
    assert {replica: record.status for replica, record in found.items()} == {0: 0, 11: 139}
    assert found[11].cause == "trainer-11 on n1 ended with signal SIGSEGV: segmentation fault"
    assert read_exit_records(layout, "trainer", 2) == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"schema": 2, "jobs": []}', "schema 2; this supervisor reads 1"),
        ('{"schema": 1, "jobs": [{"name": "trainer"}]}', "no job 'hetjob'; legal: trainer"),
        (None, "No such file"),
    ],
)
def test_a_plan_of_another_schema_or_without_the_job_is_refused(tmp_path, content, said):
    path = tmp_path / "job_plan.json"
    if content:
        path.write_text(content)
    with pytest.raises(PlanFileError, match=said):
        read_plan(path, "hetjob")


def test_events_are_lines_of_json_that_a_later_life_goes_on_with(layout):
    EventLog(layout.job_events("12"), 0).say("life", "begins")
    later = EventLog(layout.job_events("12"), 1)
    later.attempt = 2
    later.say("requeue", "back into the queue")
    said = [(e["event"], e["restart"], e["attempt"]) for e in events_of(layout, "12")]
    assert said == [("life", 0, -1), ("requeue", 1, 2)]


def test_an_event_that_a_full_disk_takes_a_part_of_does_not_take_the_next_one_with_it(layout):
    """A life that has begun must not stay the outcome of the one before, which is read from here."""
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
    assert [event["event"] for event in events_of(layout, "12")] == ["verdict", "life"]


# -------------------------------------------------------------------------------------------------------- signals


def test_signals_become_flags_and_end_a_sleep():
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


def test_a_supervisor_with_more_than_a_thousand_open_files_sleeps():
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("fewer than 2,048 open files are allowed here")
    with ExitStack() as files:
        while files.enter_context(Path(os.devnull).open()).fileno() < 1024:
            pass
        Signals().sleep(0.0)


@pytest.mark.starts
def test_a_supervisor_whose_parent_ignores_the_ends_of_children_sees_their_status():
    program = (
        "import subprocess\n"
        "from launch.supervisor.local_run import LocalSignals\n"
        "from launch.supervisor.processes import SlurmSignals\n"
        "def see(): print(subprocess.run(['sh', '-c', 'exit 5']).returncode)\n"
        "if sys.argv[1] == 'slurm': SlurmSignals(); see()\n"
        "else:\n  with LocalSignals([], lambda: None).listening(): see()\n"
    )
    for kind in ("slurm", "local"):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys\n{program}", kind], stdout=subprocess.PIPE, text=True, check=True,
            preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        )  # fmt: skip
        assert done.stdout.strip() == "5"


# ------------------------------------------------------------------------------------------------ Slurm's commands


@pytest.mark.starts
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no-such-sbatch", "--version"), "no-such-sbatch: no such command here"),
        (("sh", "-c", "echo line of its own, >&2; echo and another >&2; exit 3"), "sh: line of its own, and another"),
    ],
)
def test_a_command_that_is_not_there_is_named_and_one_that_fails_is_quoted(words, said):
    with pytest.raises(SlurmError, match=said):
        slurm(*words)


@pytest.mark.starts
@pytest.mark.parametrize(
    "said",
    [
        "Unable to contact slurm controller",
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
def test_a_controller_that_is_away_and_what_a_command_needs_before_it_can_ask_are_waited_for(tmp_path, commands, said):
    """A job that met one of these when it requeued itself took it for a refusal, and the run stood still."""
    words = (f"test -e $1 && echo fine || {{ touch $1; echo '{said}' >&2; exit 1; }}", "sh", str(tmp_path / "back"))
    assert slurm("sh", "-c", *words, patience_s=20.0) == "fine\n"


@pytest.mark.starts
def test_a_controller_that_stays_away_is_an_error_and_known_as_away():
    """`scontrol show config` of 24.11 prints what it knows, asks every controller, and fails with the second."""
    with pytest.raises(SlurmError, match="Unable to contact"):
        slurm("sh", "-c", "echo Unable to contact slurm controller >&2; exit 1", patience_s=0.2)
    with pytest.raises(SlurmError) as caught:
        slurm("sh", "-c", "echo '** RESTORE SLURMCTLD DAEMON TO SERVICE **'; exit 1")
    assert is_away(caught.value)


# ------------------------------------------------------------------------------------------ what an attempt comes to


def jobs_of(layout: RunLayout):
    parts = part_of("controller", here=True), part_of("trainer", count=2)
    return job_part(layout, "controller", *parts, meet_s=10, stall_s=10, max_retries=1)


def outcome_of(layout: RunLayout, status: int, asked: Cause | None = None, why: str = "", is_ended: bool = False):
    return OutcomeClassifier(jobs_of(layout), job_of_id(12)).classify(status, ATTEMPT, asked, why, is_ended)


def ended(layout: RunLayout, name: str, status: int, words: str = "") -> None:
    role, _, replica = name.rpartition("-")
    path = layout.exit_record(role, int(replica), ATTEMPT.index)
    path.parent.mkdir(exist_ok=True)
    write_exit_record(path, ExitRecord(name, status, words, 1, "n1", "12"))


@pytest.mark.parametrize(
    ("status", "asked", "is_ended", "cause"),
    [
        (0, Cause.TIME, False, Cause.TIME),
        (137, Cause.TIME, False, Cause.TIME),  # killed at the last moment: the next life goes on
        (0, Cause.YIELD, False, Cause.YIELD),
        (3, Cause.YIELD, False, Cause.FAILED),
        (0, Cause.STOP, False, Cause.STOP),
        (143, Cause.STOP, False, Cause.STOP),  # asked while it was still importing: not to be tried again
        (0, Cause.SIGNAL, True, Cause.SIGNAL),
        (3, Cause.SIGNAL, True, Cause.SIGNAL),
        (137, Cause.ABORT, False, Cause.ABORT),
        (137, Cause.FENCED, False, Cause.FENCED),
        (137, Cause.STALLED, False, Cause.STALLED),
        (2, None, False, Cause.SETTINGS),
        (5, None, False, Cause.ALONE),
        (3, None, False, Cause.FAILED),
        (70, None, False, Cause.FAILED),
        (0, None, False, Cause.FAILED),  # nobody asked it to end, and the run is not complete
    ],
)
def test_how_the_controller_ended_and_why_decide(layout, status, asked, is_ended, cause):
    assert outcome_of(layout, status, asked, "why", is_ended).cause is cause


def test_a_complete_run_needs_the_word_of_every_rank(layout):
    layout.summary.touch()
    ended(layout, "trainer-0", 0)
    outcome = outcome_of(layout, 0)
    assert (outcome.cause, outcome.text) == (Cause.UNCLEAN, "complete, but trainer ranks 1 did not exit cleanly")
    ended(layout, "trainer-1", 0)
    assert outcome_of(layout, 0).cause is Cause.COMPLETE


def test_the_process_that_explains_a_failure_is_named(layout):
    outcome = outcome_of(layout, 137, Cause.FAILED, "no step for 15 s")
    assert (outcome.cause, outcome.text) == (Cause.FAILED, "no step for 15 s"), "no process does"
    ended(layout, "controller-0", 3, "RoleFailed: trainer-0 is silent")
    ended(layout, "trainer-1", 137, "CUDA error")
    outcome, log = outcome_of(layout, 3), layout.log("trainer", 1, ATTEMPT.index)
    assert outcome.cause is Cause.FAILED
    assert outcome.text == f"trainer-1 on n1 ended with signal SIGKILL: CUDA error (log: {log})"
    ended(layout, "trainer-1", 2, "trainer.device='cuda': no GPU")
    outcome = outcome_of(layout, 3)
    assert outcome.cause is Cause.SETTINGS, "whatever the controller says"
    assert "no GPU" in outcome.text


def test_every_cause_says_what_follows():
    assert all(cause.words and cause.follows in ("end", "requeue", "again", "leave") for cause in Cause)
    assert Cause.TIME.follows == "requeue"
    good = {Cause.COMPLETE, Cause.STOP, Cause.TIME, Cause.YIELD}
    assert {cause for cause in Cause if cause.status == 0} == good


def test_a_user_who_asks_to_stop_is_heard_and_one_who_asks_for_now_is_heard_first(layout):
    assert asked_to_end(layout) is None
    layout.stop_request.touch()
    assert asked_to_end(layout).cause is Cause.STOP
    layout.abort_request.touch()
    assert asked_to_end(layout).cause is Cause.ABORT


@pytest.mark.parametrize(
    ("cause", "is_complete", "result"),
    [
        (Cause.COMPLETE, True, ("success", {"steps": 7})),
        (Cause.UNCLEAN, True, ("error", "how it ended")),
        (Cause.STOP, False, ("error", "how it ended")),
    ],
)
def test_the_result_of_a_job_is_the_summary_of_a_run_that_is_complete_and_ended_well(
    layout, cause, is_complete, result
):
    if is_complete:
        layout.summary.write_text('{"steps": 7}')
    write_result(jobs_of(layout), job_of_id(12), Outcome(cause, "how it ended"))
    assert pickle.loads((layout.logs / "slurm" / "12_0_result.pkl").read_bytes()) == result


@pytest.mark.parametrize(("kind", "by"), [("jobs", "Slurm"), ("local", "a signal")])
def test_a_run_on_this_machine_was_not_ended_by_slurm(layout, kind, by):
    plan = replace(jobs_of(layout), placement=kind)
    outcome = OutcomeClassifier(plan, job_of_id(12)).classify(1, ATTEMPT, None, "", True)
    assert outcome.text.startswith(f"ended by {by}: ")


# ---------------------------------------------------------------------------------------------------------- stalls


@pytest.mark.parametrize(
    ("limits", "looks"),
    [
        # Models that load for longer than stall_s took all of the first step's limit.
        ((15.0, 12.0, 100.0), [(-1, False, 105.0, None), (0, False, 110.0, None), (0, False, 140.0, None),
                               (0, True, 145.0, None), (0, True, 160.0, None), (0, True, 160.1, 15.0)]),
        # Before training roles may wait for each other.
        ((15.0, 12.0, 0.0), [(-1, False, 39.0, None), (-1, False, 39.1, 39.0)]),
        # A model of 7B on one GPU samples for more than an hour before its first step.
        ((STALL_S, 1800.0, 0.0), [(0, True, 1.0, None), (0, True, 7200.0, None), (0, True, 7 * 3600.0, STALL_S)]),
    ],
)  # fmt: skip
def test_the_first_step_has_its_whole_limit_from_the_beginning_of_training_on(limits, looks):
    watch = StallWatch(*limits)
    assert [watch.look(step, is_training, now) for step, is_training, now, _ in looks] == [said for *_, said in looks]
    assert not watch.has_moved


def test_every_step_begins_the_limit_anew_and_those_that_are_trained_again_are_no_progress():
    watch = StallWatch(15.0, 12.0, 0.0)
    assert watch.look(40, True, 5.0) is None  # where it resumes
    assert not watch.has_moved
    assert watch.look(41, True, 19.0) is None
    assert watch.has_moved
    assert (watch.look(41, True, 34.0), watch.look(41, True, 34.5)) == (None, 15.0)
    watch = StallWatch(15.0, 12.0, 0.0)
    for step, is_training, now in ((0, False, 5.0), (1, False, 44.0), (2, False, 83.0), (2, True, 84.0)):
        assert watch.look(step, is_training, now) is None
    assert (watch.has_stepped, watch.has_moved) == (True, False)
    assert (watch.look(2, True, 99.5), watch.look(3, True, 100.0)) == (15.0, None)
    assert watch.has_moved


def test_time_in_which_slurm_had_suspended_the_job_is_no_stall():
    """A job that was continued after an hour was ended at once, or used up a retry."""
    clock = [100.0]
    awake = AwakeTime(lambda: clock[0])
    watch = StallWatch(3600.0, 12.0, awake())
    assert watch.look(6, True, awake()) is None
    clock[0] += 10 * 3600.0
    assert watch.look(6, True, awake()) is None
    for _ in range(3600 - 300):
        clock[0] += 1.0
        assert watch.look(6, True, awake()) is None
    clock[0] += 1.0
    assert watch.look(6, True, awake()) == 3600.0


# ------------------------------------------------- a successor that sbatch refused is submitted when the job ends

REFUSED = (
    "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; echo 'sbatch: error: Batch job submission failed: "
    "Job violates accounting/QOS policy (job submit limit, user'\"'\"'s size and/or time limits)' >&2; exit 1"
)  # as Slurm 22.05.8 says it
HEARD = (  # a requeue that was heard and not answered
    "[ $n -gt 1 ] && { echo 'Job is pending execution for job 7' >&2; exit 1; }; "
    "echo 'slurm_requeue error: Socket timed out on send/recv operation' >&2; exit 1"
)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("sbatch", "successor", "continuation", "status", "jobs", "said"),
    [
        # The run stood still: its event said that the successor continues it.
        ("echo 8", None, "successor", 0, [7, 8], "this job ends; its successor continues the run"),
        (REFUSED, None, "successor", 1, [7], "no successor: sbatch: sbatch: error: QOSMaxSubmitJobPerUserLimit"),
        ("echo 9", 8, "successor", 0, [7], ""),  # one is queued
        ("echo 8", None, "requeue", 0, [7], ""),
    ],
)
def test_sbatch_is_asked_again_for_a_successor_at_the_end(
    layout, commands, monkeypatch, sbatch, successor, continuation, status, jobs, said
):
    monkeypatch.setattr(queue, "REQUEUED_S", 0.0)
    commands.put("sbatch", sbatch)
    commands.put("scontrol", HEARD)
    script = layout.root / "job.sh"
    script.write_text("#!/bin/sh\ntrue\n")
    write_job_record(layout, JobRecord(7, "hetjob", "hetjob", None, "p", str(script), False, 0, 1, None, 100.0))
    plan = job_part(layout, "hetjob", placement="hetjob", continuation=continuation)
    log = EventLog(layout.job_events("7"), 0)
    assert _follow_up(plan, job_of_id(7), log, Outcome(Cause.TIME, ""), successor) == status
    assert [record.job_id for record in read_job_records(layout)] == jobs
    assert last_event(layout, 7).startswith(said)
