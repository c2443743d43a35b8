"""`rlhpc status` says where a run stands, what each job is, who waits for whom, and what can be done."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.commands.submit import wait_if_asked
from launch.run_files.records import JobRecord, write_job_record
from launch.supervisor.outcomes import RetryBudget
from launch.view import status as status_view
from launch.view.run import RunView
from launch.view.status import read_notes, render_status, verifier_lines
from rlhpc.base.files import write_atomically
from rlhpc.base.ownership import Launcher
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases, Suspicion
from rlhpc.config.file import write_resolved
from rlhpc.metrics.names import find_metric
from rlhpc.protocol.messages import Heartbeat, Hello
from rlhpc.protocol.types import SamplingParams
from rlhpc.rewards.outcomes import DIED, FAILURES, FIGURES, PREFIX, TIMED_OUT, TaskCounts, by_task
from rlhpc.roles.controller.guarding import GuardEntry, GuardFile
from rlhpc.roles.controller.leases import ProcessRegistry
from rlhpc.roles.controller.recorder import verifier_figures
from rlhpc.roles.controller.run_status import StatusBoard
from tests.unit.buffer.rollout_samples import ManualClock, make_ledger
from tests.unit.launch.runs_kit import living_launcher
from tests.unit.launch.site_kit import config_of

pytestmark = pytest.mark.starts

# ------------------- `rlhpc status` of a run under Slurm says what each job is, who waits for whom, and what comes next

ROOT = Path(__file__).parents[3]
STATUS = {
    "name": "first", "unix_time_s": 0.0, "num_steps": 100, "staleness_bound": 1, "queue": {"in_flight": 3}, "roles": [],
    "phase": "training", "step": 41, "version": 41, "reward": 0.5, "staleness_max": 1, "trainer_tokens_per_s": 10.0,
    "generator_tokens_per_s": 20.0, "eta_s": None,
}  # fmt: skip


def line(job: str, state: str, reason: str = "None", start_in_s: float | None = None, left: str = "58:47",
         nodes: str = "", restarts: int = 0) -> str:  # fmt: skip
    """As squeue prints it."""
    start = "N/A" if start_in_s is None else moment(start_in_s)
    used = "1:13" if nodes else "0:00"
    return f"{job}|{state}|{restarts}|{reason}|p|{used}|{left}|1:00:00|{start}|{nodes}|x|\n"


def moment(in_s: float, form: str = "%Y-%m-%dT%H:%M:%S") -> str:
    return time.strftime(form, time.localtime(time.time() + in_s))


class Run:
    """A run directory, and what squeue says of it."""

    def __init__(self, root: Path) -> None:
        self.layout = RunLayout(root / "run")
        self.bin = root / "bin"
        for directory in (self.layout.root, self.layout.jobs, self.bin):
            directory.mkdir()
        self.layout.config.write_text('{"config": {}, "hash": ""}')
        self.queue("")

    def job(self, job_id: int, name: str, **more: Any) -> None:
        record = JobRecord(job_id, name, "jobs", None, "plan", "script", False, 0, 1, None, submitted_unix_s=job_id)
        write_job_record(self.layout, replace(record, **more))

    def event(self, name: str, text: str, ago_s: float) -> None:
        document = {"unix_time_s": time.time() - ago_s, "restart": 0, "attempt": 0, "event": "x", "text": text}
        with self.layout.job_events(name).open("a") as file:
            file.write(json.dumps(document) + "\n")

    def queue(self, text: str) -> None:
        (self.bin / "answer").write_text(text)
        self.script(f"cat {self.bin}/answer")

    def script(self, text: str) -> None:
        (self.bin / "squeue").write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / "squeue").chmod(0o755)

    @property
    def text(self) -> str:
        return render_status(self.layout)

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(render_status(self.layout, as_json=True))["slurm"]
        return found


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    run = Run(tmp_path)
    monkeypatch.setenv("PATH", f"{run.bin}:/usr/bin:/bin")
    return run


@pytest.fixture
def separate(run) -> Run:
    """Placement `jobs`: the controller runs, the trainer waits, generators are an array, one elastic job beside it."""
    run.job(12, "controller")
    run.job(13, "trainer")
    run.job(14, "generation", array_size=4, first_replica=0, replicas_per_task=2)
    run.job(15, "generation-1", is_elastic=True, array_size=1, first_replica=8)
    run.job(16, "generation-2", is_elastic=True, first_replica=9, replicas_per_task=2)
    run.queue(
        line("12", "RUNNING", nodes="c0", restarts=1)
        + line("13", "PENDING", "Resources", start_in_s=3600)
        + line("14_0", "RUNNING", nodes="g0")
        + line("14_[1-3%2]", "PENDING", "QOSMaxGRESPerUser")
        + line("15_0", "PENDING", "Priority")
        + line("16", "RUNNING", nodes="g1")
    )
    return run


def test_each_job_is_named_by_what_it_does(separate):
    assert {job["id"]: job["what"] for job in separate.document["jobs"]} == {
        "12": "controller", "13": "trainer", "14_0": "generator-0…1", "14_[1-3]": "generator-2…7",
        "15_0": "generator-8 (elastic)", "16": "generator-9…10 (elastic)",
    }  # fmt: skip
    assert "this QOS has as many GPUs in use as it allows per user" in separate.text, "a limit of the site is explained"
    for file, words in (("STOP", "finished and saved"), ("ABORT", "saved only if it ends within seconds")):
        (separate.layout.root / file).touch()
        assert words in separate.document["next"][0]
    for task in range(20):
        separate.event(f"14_{task}", f"task {task}", 100 - task)
    assert f"earlier ones: {separate.layout.jobs}/*.events.jsonl" in separate.text
    assert len(separate.document["events"]) == 20


def test_components_of_a_heterogeneous_job_are_named_by_the_plan(run):
    run.job(14, "generation", array_size=4, first_replica=2)
    run.queue(line("14", "CANCELLED"))
    assert [job["what"] for job in run.document["jobs"]] == ["generator-2…5"], "an array that never began, as a whole"
    run.layout.job_record(14).unlink()
    run.job(12, "hetjob")
    names = ["controller", "trainer", "generation"]
    plan = {"jobs": [{"name": "hetjob", "components": [{"name": name} for name in names]}]}
    run.layout.job_plan.write_text(json.dumps(plan))
    run.queue("".join(line(f"12+{k}", "RUNNING", nodes=f"n{k}") for k in range(4)))
    assert [job["what"] for job in run.document["jobs"]] == [*names, "component 3"]
    assert "waits for" not in run.text


def test_who_waits_for_whom_is_said_with_the_reason_and_the_estimate(separate):
    (said,) = separate.document["waits"]
    beginning, _, when = said.rpartition(" ")
    assert beginning == "controller and generation wait for trainer: job 13 PENDING (Resources), starts about"
    assert separate.text.count("waits for nodes to become free") == 1, "the table has it"
    assert when in (moment(3600, "%H:%M"), moment(3540, "%H:%M"))  # the minute may just have changed
    assert "WAITING      controller and generation wait for trainer: job 13 PENDING" in separate.text


def test_nobody_waits_for_an_elastic_job_or_in_a_run_that_is_complete(separate):
    assert "elastic" not in "".join(separate.document["waits"])
    separate.layout.summary.write_text("{}")
    assert separate.document["waits"] == []
    assert separate.document["next"] == ["the run is complete; its jobs end"]


def test_the_time_limit_says_what_happens_at_it(separate):
    steps = separate.layout.checkpoint(40)
    steps.mkdir(parents=True)
    (steps / "COMPLETE").touch()
    (said,) = separate.document["next"]
    before, rest = said.split(", ", 1)
    assert rest == "its time limit, job 12 saves, is requeued or submits a successor, and continues"
    assert before in [f"before {moment(58 * 60 + second, '%H:%M')}" for second in (47, -13)]


def test_a_successor_is_announced(run):
    run.job(12, "hetjob")
    run.job(20, "hetjob", follows=12)
    plan = {"jobs": [{"name": "hetjob", "components": [{"name": "controller"}]}]}
    run.layout.job_plan.write_text(json.dumps(plan))
    run.queue(line("12+0", "RUNNING", nodes="c0") + line("20+0", "PENDING", "Dependency"))
    said = run.document["next"]
    assert "job 12+0 saves, ends, and its successor continues" in said[0]
    assert said[-1] == "job 20 continues the run when job 12 has ended"


def test_a_run_whose_jobs_have_all_ended_says_how_to_go_on_and_a_held_one_how_it_is_let_go(run):
    run.job(12, "controller")
    assert "12   controller  unknown" in run.text, "Slurm has forgotten it"
    assert "no longer knows the job" in run.text
    assert "no job of this run is alive" in run.text
    run.queue(line("12", "NODE_FAIL", nodes="c0"))
    assert run.document["next"] == [f"no job of this run is alive; `rlhpc resume {run.layout.root}` begins at step 0"]
    run.queue(line("12", "OUT_OF_MEMORY", nodes="c0"))
    assert f"first see why: `rlhpc logs {run.layout.root} slurm`" in run.document["next"][0]
    assert "memory_gib_per_gpu" in run.text
    for state, reason in (
        ("REQUEUE_HOLD", "None"),
        ("PENDING", "job requeued in held state"),
        ("PENDING", "JobHeldUser"),
    ):
        run.queue(line("12", state, reason))
        (said,) = run.document["next"]
        assert said.startswith("job 12 stays in the queue: ")
        assert "`scontrol release 12` releases it" in said


def test_attempt_restart_and_last_events_are_told_newest_first(separate):
    attempt = {"attempt": 3, "resume_step": 40, "job_id": 12, "restart": 1, "host": "c0"}
    separate.layout.attempt.write_text(json.dumps(attempt))
    separate.layout.status.write_text(json.dumps(STATUS | {"unix_time_s": time.time()}))
    separate.event("12", "something earlier", 100)
    separate.event("12", "attempt 3 begins from step 40", 50)
    separate.event("14_0", "generator-0 starts", 10)
    with separate.layout.job_events("14_0").open("a") as file:
        file.write('{"unix_time_s": 1')  # torn
    text = separate.text
    assert "first: training, step 41/100, policy version 41, under Slurm" in text
    assert "attempt 3 from step 40, job 12, restart 1, controller on c0" in text
    order = ["job 14_0: generator-0 starts", "job 12: attempt 3 begins from step 40", "job 12: something earlier"]
    assert [said for said in order if said not in text] == []
    assert sorted(order, key=text.index) == order, "the last of all, not the last of each supervisor"
    for k in range(8):
        separate.event("12", f"news {k}", 5)
    shown = separate.text.partition("LAST EVENTS")[2]
    assert [f"news {k}" for k in range(8) if f"news {k}" not in shown] == []
    assert "attempt 3 begins" not in shown


def test_without_slurm_or_its_answer_the_rest_is_still_shown(separate, monkeypatch):
    separate.event("12", "attempt 3 begins", 50)
    separate.script("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    text = separate.text
    assert "Slurm did not answer: squeue: slurm_load_jobs error: Unable to contact slurm controller" in text
    assert "jobs of this run: 12, 13, 14, 15, 16" in text
    assert "attempt 3 begins" in text
    assert separate.document["is_alive"]  # not known to be over
    (separate.bin / "squeue").unlink()
    monkeypatch.setenv("PATH", str(separate.bin))
    assert "squeue: no such command here" in separate.text


def test_a_run_on_this_machine_is_shown_without_a_word_of_slurm(run):
    assert run.text.endswith("ended before its controller started")
    nothing = {
        "status": None,
        "slurm": None,
        "evaluations": {},
        "guard": [],
        "quarantined": [],
        "suspects": [],
        "retries": {},
    }
    assert json.loads(render_status(run.layout, as_json=True)) == nothing
    run.layout.status.write_text(json.dumps(STATUS))
    assert "not running on this machine" in run.text
    assert "job" not in run.text.lower()


def test_a_run_that_was_resumed_on_this_machine_is_shown_as_such(separate):
    Launcher.register(separate.layout)
    separate.layout.status.write_text(json.dumps(STATUS))
    assert f"launcher pid {os.getpid()}" in separate.text
    assert "PENDING" not in separate.text


def test_status_takes_less_than_a_second_of_work_and_no_torch(separate):
    program = (
        "import sys; from pathlib import Path; from launch.view.status import render_status; "
        "from rlhpc.base.run_directory import RunLayout; "
        f"print(render_status(RunLayout(Path({str(separate.layout.root)!r})))); "
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    best_s, num_tries = float("inf"), 0
    while best_s >= 1.0 and num_tries < 3:  # and time on a processor: what the machine's neighbours do is not ours
        num_tries += 1
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True,
                       env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best_s = min(best_s, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert best_s < 1.0


def test_jobs_of_another_name_under_the_ids_of_a_copied_run_are_not_its_own(separate):
    separate.layout.config.write_text('{"config": {"run": {"name": "first"}}, "hash": ""}')
    separate.queue(line("12", "RUNNING", nodes="c0"))
    assert "none of its jobs is alive" in separate.text
    assert "of another run, perhaps of another cluster: here job 12 is x" in separate.text
    assert not separate.document["is_alive"]
    separate.queue(line("12", "RUNNING", nodes="c0").replace("|x|", "|first.controller|"))
    assert "under Slurm" in separate.text
    assert "of another run" not in separate.text


# ----------------------------------------- What `rlhpc status` advises can be done as it is printed, and is not refused


@pytest.fixture
def living(run) -> Run:
    """Placement `jobs`, up: a controller, a trainer, four generators, and one that was added."""
    run.job(12, "controller")
    run.job(13, "trainer")
    run.job(14, "generation", array_size=4, replicas_per_task=1)
    run.job(15, "generation-1", is_elastic=True, array_size=1, first_replica=4)
    return run


UP = line("12", "RUNNING", nodes="c0") + line("13", "RUNNING", nodes="t0")


def why_of(run: Run, label: str) -> str:
    (said,) = [job["why"] for job in run.document["jobs"] if job["id"] == label]
    return str(said)


def test_a_resume_is_not_advised_while_the_run_lives_which_would_refuse_it(living):
    living.queue(UP + line("14_0", "RUNNING", nodes="g0") + line("14_1", "PREEMPTED", nodes="g1")
                 + line("14_2", "CANCELLED", nodes="g2") + line("14_3", "NODE_FAIL", nodes="g3")
                 + line("15_0", "PREEMPTED", nodes="g1"))  # fmt: skip
    assert "rlhpc resume" not in living.text
    assert why_of(living, "14_1").endswith("; will be resubmitted by the controller's job")
    assert why_of(living, "14_2").endswith("; not resubmitted")
    assert f"`rlhpc scale {living.layout.root} --generators +1` adds another" in why_of(living, "15_0")
    living.job(27, "generation", array_size=4, replicas_per_task=1, follows=14, tasks=[1])
    living.queue(UP + line("14_1", "PREEMPTED", nodes="g1") + line("14_3", "NODE_FAIL", nodes="g3")
                 + line("27_1", "RUNNING", nodes="g2"))  # fmt: skip
    assert why_of(living, "14_1").endswith("; replaced by job 27")
    assert why_of(living, "14_3").endswith("; will be resubmitted by the controller's job")
    living.queue(line("12", "NODE_FAIL", nodes="c0") + line("14_1", "PREEMPTED", nodes="g1"))
    assert f"`rlhpc resume {living.layout.root}` continues" in why_of(living, "14_1")


def test_attempts_that_have_saved_nothing_are_counted_with_the_last_reason(living):
    living.queue(UP)
    assert "retries" not in living.text
    for why in ("no node", "12 s are left, and stopping needs 60 s"):
        RetryBudget(living.layout, 5).take(0, why)
    assert (
        "retries   2 attempts without a checkpoint beyond step 0, of at most 6 (cluster.max_retries=5): 12 s are left"
    ) in living.text
    (living.layout.checkpoint(3)).mkdir(parents=True)
    (living.layout.checkpoint(3) / "COMPLETE").touch()
    assert "retries" not in living.text, "a new checkpoint refills them"


def test_a_generator_that_was_retired_is_no_accident(living):
    living.job(16, "generation-2", is_elastic=True, array_size=3, first_replica=5)
    for task in (0, 1):
        living.layout.retired(f"16_{task}").touch()
    living.queue(UP + line("16_0", "CANCELLED", nodes="g1") + line("16_1", "RUNNING", nodes="g2")
                 + line("16_2", "CANCELLED", nodes="g3"))  # fmt: skip
    assert why_of(living, "16_0") == "retired by `rlhpc scale`"
    assert why_of(living, "16_1") == "is being retired by `rlhpc scale`"
    assert why_of(living, "16_2").startswith("has been cancelled by you or an administrator")


def test_processes_that_are_not_there_yet_are_named_under_slurm_too(living):
    write_resolved(config_of("generation.num_replicas=6", "run.name=x"), living.layout, "")
    roles = [{"name": name, "state": "starting", "version": -1, "silent_s": 0.1, "waits_for": "", "metrics": {}}
             for name in ("reward-0", "generator-2")]  # fmt: skip
    status = STATUS | {"unix_time_s": time.time(), "phase": "waiting for generators", "roles": roles}
    living.layout.status.write_text(json.dumps(status))
    living.queue(UP)
    absent = [words for words in living.text.splitlines() if words.endswith("absent")]
    assert absent == [
        *(f"{name:<14}absent" for name in ("trainer-0", "trainer-1", "generator-0", "generator-1")),
        "and 3 more absent",
    ]
    living.layout.status.write_text(json.dumps(status | {"phase": "complete"}))
    assert "absent" not in living.text, "at the end everybody leaves"
    living.queue("")
    assert "absent" not in living.text


def test_who_waits_for_jobs_sees_who_is_missing_and_at_the_end_the_figures(living, capsys, monkeypatch):
    write_resolved(config_of("generation.num_replicas=2", "run.name=x"), living.layout, "")
    status = STATUS | {"unix_time_s": time.time(), "phase": "starting", "step": 0}
    living.layout.status.write_text(json.dumps(status | {"roles": [{"name": "reward-0"}]}))
    ended, asked = line("12", "COMPLETED", nodes="c0"), living.bin / "asked"
    runs = UP.splitlines()[0]
    living.script(f"[ -e {asked} ] && {{ echo '{ended.strip()}'; exit; }}; touch {asked}; echo '{runs}'")
    monkeypatch.setattr(status_view, "ASK_SLURM_EVERY_S", 0.1)
    assert wait_if_asked(living.layout, Namespace(wait=True)) == 1
    out, err = capsys.readouterr()
    assert "starting | waits for trainer-0, trainer-1, generator-0, generator-1 | " in err
    root = living.layout.root
    assert out == f"{root}: stopped before the first step; `rlhpc resume {root}` continues it\n"
    living.layout.summary.write_text(json.dumps({"steps": 7, "reward_last_tenth": 0.5}))
    assert wait_if_asked(living.layout, Namespace(wait=True)) == 0
    out = capsys.readouterr().out
    assert re.search(r"optimiser steps +7\n", out), "as `rlhpc run` ends"
    assert f"`rlhpc export {root} MODEL`" in out
    assert wait_if_asked(living.layout, Namespace(wait=False)) == 0
    assert capsys.readouterr().out == ""


def test_a_job_whose_time_was_cut_short_is_not_said_to_have_come_to_its_limit(living):
    cut = line("14_0", "TIMEOUT", nodes="g0").replace("|1:13|", "|41:00|")
    whole = line("14_1", "TIMEOUT", nodes="g1").replace("|1:13|", "|1:00:04|")
    living.queue(UP + cut + whole)
    assert why_of(living, "14_0").startswith("was ended 19 min 00 s before its time limit, as after the grace time of")
    assert why_of(living, "14_1").startswith("reached its time limit")


def test_who_takes_over_is_told_while_it_waits_and_not_when_both_run(living):
    living.job(27, "controller", follows=12)
    living.job(28, "trainer", follows=13)
    for job, before in ((27, 12), (28, 13)):
        living.queue(UP + line(str(job), "PENDING", "Dependency"))
        assert living.document["next"][-1] == f"job {job} continues the run when job {before} has ended"
    for queue in (
        UP + line("28", "RUNNING", nodes="t1"),
        line("12", "RUNNING", nodes="c0") + line("13", "NODE_FAIL", nodes="t0") + line("28", "PENDING"),
    ):
        living.queue(queue)
        assert not [said for said in living.document["next"] if "continues the run when" in said]


def test_a_site_whose_runs_go_on_in_successors_is_not_promised_a_requeue(living):
    living.queue(UP)
    for way, said in (
        ("successor", "job 12 saves, ends, and its successor continues"),
        ("requeue", "job 12 saves, is requeued or submits a successor, and continues"),
    ):
        plan = {"jobs": [{"name": "controller", "components": []}], "continuation": way}
        living.layout.job_plan.write_text(json.dumps(plan))
        assert living.document["next"][0].endswith(said)


def test_why_a_heterogeneous_job_is_held_is_said_once_in_the_table_and_once_below(run):
    run.job(12, "hetjob")
    run.queue("".join(line(f"12+{k}", "PENDING", "JobHeldUser") for k in (2, 1, 0)))
    assert run.text.count("held by you") == 2
    assert run.text.count("the same") == 2
    assert [said for said in run.document["next"] if "stays in the queue" in said] == [
        "job 12 stays in the queue: held by you (or a coordinator of the account); `scontrol release 12` releases it"
    ]


def test_for_a_job_that_never_began_no_log_is_advised_and_the_drained_node_is_named(run):
    run.job(12, "controller")
    run.queue(line("12", "PENDING", "launch failed requeued held"))
    sinfo = run.bin / "sinfo"
    rows = "g0|Prolog error|2026-11-22T01:19:34\\ng1|disk is full|2026-11-20T08:00:00\\n"
    sinfo.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    sinfo.chmod(0o755)
    text = run.text
    assert "rlhpc logs" not in text
    assert "drained nodes: g0: Prolog error, since 2026-11-22T01:19:34: tell" in text
    assert "g1" not in text
    sinfo.write_text("#!/bin/sh\necho 'slurm_load_node: Access/permission denied' >&2; exit 1\n")
    assert "could not be started on its nodes" in run.text


def test_the_run_directory_stands_by_its_name_in_every_line(living):
    states = ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "CANCELLED", "DEADLINE", "BOOT_FAIL")
    for alive in (UP, ""):
        for state in states:
            living.queue(alive + line("14_0", state, nodes="g0"))
            assert "RUN_DIR" not in living.text
            assert "JOB " not in living.text.replace("JOB   ", "")


def test_what_roles_did_before_the_last_job_ended_is_not_shown(separate):
    role = {"name": "generator-0", "state": "sampling", "version": 3, "silent_s": 0.5, "waits_for": "", "metrics": {}}
    document = STATUS | {"unix_time_s": time.time() - 900, "roles": [role]}
    separate.layout.status.write_text(json.dumps(document))
    assert "sampling" in separate.text
    separate.queue("".join(line(job, "FAILED", nodes="c0") for job in ("12", "13", "14_0", "15_0", "16")))
    assert "none of its jobs is alive" in separate.text
    assert "sampling" not in separate.text


# ------------------------------------------- What `rlhpc status` tells of prompts that end generators, and of the guard


@pytest.fixture
def layout(tmp_path) -> RunLayout:
    layout = RunLayout(tmp_path)
    write_resolved(config_of("admission.max_attempts=3"), layout, "")
    return layout


def strike(layout: RunLayout, **lost_leases: int) -> None:
    book = LostLeases()
    book.unwritten = [Suspicion(prompt, number, 4) for prompt, number in lost_leases.items()]
    LostLeaseFile(layout.lost_leases).append(book)


def test_prompts_that_ended_generators_too_often_are_listed_and_others_counted(layout):
    assert read_notes(RunView(layout)).lines() == [], "where nothing has happened"
    strike(layout, killer=1, other=1, innocent=1)
    strike(layout, killer=3, innocent=0)
    notes = read_notes(RunView(layout))
    assert [each.prompt for each in notes.quarantined] == ["killer"]
    assert [each.prompt for each in notes.suspects] == ["other"]
    assert notes.lines()[0] == (
        "quarantined prompts   1: record killer: 3 generators died sampling it; a resume with "
        "--lift-quarantine samples them again"
    )
    assert notes.lines()[1].startswith("suspect prompts   1;")


def test_status_shows_the_last_action_of_the_guard_and_programs_get_all(layout):
    for step in (3, 4):
        GuardFile(layout.guard).append(
            GuardEntry(0, step, step, "warn", {"ess": (0.1, 0.3, None)}, (1,), f"step {step}: low")
        )
    assert read_notes(RunView(layout)).lines() == ["guard   2 actions, the last one: warn (attempt 0), step 4: low"]
    document = json.loads(render_status(layout, as_json=True))
    assert [entry["step"] for entry in document["guard"]] == [3, 4]


def test_who_starts_has_a_row_and_the_queue_fits_the_terminal(tmp_path):
    layout = RunLayout(tmp_path)
    config = config_of("generation.num_replicas=2")
    write_resolved(config, layout, "")
    ledger = make_ledger(ManualClock())
    counts = dict.fromkeys(ledger.counts(), 1234567) | {"dropped_poison": 0}
    role = {"name": "generator-0", "state": "ready", "version": 3, "silent_s": 0.3, "waits_for": "", "metrics": {}}
    figures = dict.fromkeys(("version", "step", "reward", "generator_tokens_per_s", "trainer_tokens_per_s"), 1)
    figures |= dict.fromkeys(("staleness_max", "staleness_bound", "num_steps", "unix_time_s"), 2)
    status = {"name": "first", "phase": "training", "queue": counts, "roles": [role], **figures}
    layout.status.write_text(json.dumps(status))
    with living_launcher(layout):
        lines = render_status(layout).splitlines()
    assert "generator-1   starting" in lines
    (row,) = [line for line in lines if line.startswith("generator-0")]
    assert row.split() == ["generator-0", "ready", "3", "0", "0.3s", "-"]
    queue = lines[2 : lines.index("")]
    assert max(map(len, queue)) <= 80
    told = re.findall(r"(\w+) (\d+)", "\n".join(queue))
    assert dict(told) == {name: str(count) for name, count in counts.items() if count}
    over = render_status(layout)  # the launcher is gone
    assert "generator-" not in over
    assert "not running on this machine" in over


# ------------------ `rlhpc status` tells of the job that evaluates a run when nothing evaluates, and is silent while it


@pytest.fixture
def evaluated(run) -> Run:
    """Its controller is job 12, the evaluation job 20."""
    run.job(12, "controller")
    run.layout.status.write_text(json.dumps(STATUS | {"unix_time_s": time.time()}))
    run.layout.evaluations.mkdir()
    (run.layout.evaluations / "job.json").write_text('{"job_id": 20}')
    return run


def said_of(run: Run, controllers: str, evaluations: str) -> str:
    """What status says of the evaluation's job; controllers, evaluations: what squeue prints of either job."""
    run.script(f"case \"$*\" in *=20,20*) printf '{evaluations}\\n';; *) printf '{controllers}\\n';; esac")
    return "\n".join(row for row in run.text.splitlines() if row.startswith("evaluation"))


def test_the_job_that_evaluates_is_told_when_nothing_evaluates_a_run_that_goes_on(evaluated):
    up, over = line("12", "RUNNING", nodes="c0").strip(), line("12", "COMPLETED", nodes="c0").strip()
    assert said_of(evaluated, up, line("20", "RUNNING", nodes="g0").strip()) == ""
    assert said_of(evaluated, over, "") == ""
    said = said_of(evaluated, up, line("20", "PENDING", "JobHeldUser").strip())
    assert said.startswith("evaluation  job 20 is PENDING: held by you")
    assert "`scontrol release 20`" in said
    for last in ("", line("20", "CANCELLED", nodes="g0").strip()):
        said = said_of(evaluated, up, last)
        assert said.startswith("evaluation  job 20 has ended, and nothing evaluates this run any more")
        assert f"{evaluated.layout.evaluations}/job-20.log" in said


# ---------------------------- Failures of verifiers by task: from heartbeats of reward services into `rlhpc status` and


def test_counts_survive_the_way_through_a_heartbeat_whatever_the_task_is_called():
    counts = TaskCounts()
    counts.count("my.rewards:score", 0.5, TIMED_OUT)
    counts.count("my.rewards:score", 0.25, num_forked=2)
    counts.count("regex", 0.1)
    assert by_task(counts.as_metrics() | {"queued": 3.0}) == {
        "my.rewards:score": {"judged": 2.0, "timed_out": 1.0, "forked": 2.0, "seconds": 0.75},
        "regex": {"judged": 1.0, "seconds": 0.1},
    }


def test_every_figure_has_its_metric_and_the_mean_time_is_of_a_completion():
    figures = verifier_figures({"my.rewards:score": {**dict.fromkeys(FIGURES, 1.0), "judged": 4.0, "seconds": 2.0}})
    for name in figures:
        find_metric(name)
    assert figures["verifier_mean_s/my.rewards:score"] == 0.5
    assert len(figures) == len(FIGURES)  # seconds are told as their mean


def test_a_line_is_for_a_task_of_which_a_verifier_has_failed():
    lines = verifier_lines({"regex": {"judged": 9.0}, "b": {"judged": 5.0, "timed_out": 2.0, "out_of_memory": 1.0}})
    assert lines == ["verifier b   judged 5, without a verdict: timed out 2, out of memory 1"]
    assert set(FAILURES) <= set(FIGURES)
    (line,) = verifier_lines({"b": {"judged": 5.0, "waiting": 3.0}})
    assert line.startswith("verifier b   3 wait for a verdict for 10 s or more: does a service restart?")


def test_status_adds_up_the_counts_of_all_reward_services(tmp_path):
    layout = RunLayout(tmp_path)
    config = config_of()
    write_resolved(config, layout, "")
    registry = ProcessRegistry("", 15.0, time.monotonic)
    for replica, died in ((0, 2.0), (1, 3.0)):
        registry.register(f"reward-{replica}", Hello("reward", replica, f"1.{replica}", "", 1, "here"))
        counts = {f"{PREFIX}judged:math_answer": 10.0, f"{PREFIX}{DIED}:math_answer": died, "queued": 1.0}
        registry.record(f"reward-{replica}", Heartbeat("running", "", -1, metrics=counts))
    ledger = AdmissionLedger(
        num_slots=4, window_groups=2, groups_per_step=2, group_size=2, sampling=lambda _: SamplingParams(16),
        lease_deadline_s=60.0, max_attempts=3, clock=time.monotonic,
    )  # fmt: skip
    write_atomically(layout.status, StatusBoard(layout, config, registry, ledger).document())
    assert "verifier math_answer   judged 20, without a verdict: died 5" in render_status(layout).splitlines()
    document = json.loads(render_status(layout, as_json=True))
    assert document["status"]["verifiers"] == {"math_answer": {"judged": 20.0, "died": 5.0}}
