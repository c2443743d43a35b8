"""No job is lost or submitted twice, whatever becomes of sbatch's answer; records, environment and end of jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.commands import stop
from launch.commands.submit import write_plan
from launch.plan.jobs import Elastic, plan_elastic
from launch.plan.script import plan_document
from launch.run_files.records import (
    JobRecord,
    elastic_plans,
    next_elastic_name,
    next_replica,
    read_job_records,
    replica_numbers,
    write_job_record,
)
from launch.run_files.run_state import Attempt
from launch.slurm import sbatch
from launch.slurm.commands import SlurmError, clean_environment, slurm, srun_environment
from launch.slurm.sbatch import MayBeQueued, submit_script
from launch.slurm.states import task_numbers, tasks_in_words
from launch.submitit_hetjob.step import ComponentProcess as ComponentStep
from launch.supervisor.other_jobs import submit_again
from launch.supervisor.processes import start_part
from rlhpc.base.patience import Deadline
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RunDirectoryError
from tests.patience import PATIENCE_S
from tests.ring.run_kit import ROOT
from tests.unit.launch.site_kit import AWAY as AWAY_FROM_SQUEUE
from tests.unit.launch.site_kit import config_of, job_part, part_of, plan_of, site_of
from tests.unsettling import UNSETTLING

pytestmark = pytest.mark.starts

# ----------------------------------------------- No job is lost or submitted twice, whatever becomes of sbatch's answer

TIMED_OUT = "Batch job submission failed: Socket timed out on send/recv operation"
REFUSED = "Batch job submission failed: Invalid partition name specified"
AWAY = "Batch job submission failed: Unable to contact slurm controller (connect failure)"
TAKES = 'echo "77|$*" >> {here}/queue; '


class FakeSlurm:
    """sbatch, squeue and scancel of the test's own; what they were called with."""

    def __init__(self, here: Path) -> None:
        self.here = here
        (here / "bin").mkdir()
        self.program("squeue", "cat {here}/queue 2>/dev/null; true")
        self.program("scancel", "true")
        self.script = here / "job.sh"
        self.script.write_text("#!/bin/bash\n#SBATCH --time=1\ntrue\n")

    def program(self, name: str, body: str) -> None:
        path = self.here / "bin" / name
        text = f'#!/bin/bash\necho "$*" >> {self.here}/{name}.calls\n' + body.format(here=self.here) + "\n"
        path.write_text(text)
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        path = self.here / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def fake(tmp_path, monkeypatch) -> FakeSlurm:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(sbatch, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(sbatch, "REPEAT_S", 0.1)
    monkeypatch.setattr(sbatch, "LOOK_PATIENCE_S", 0.0)
    return FakeSlurm(tmp_path)


def test_a_job_is_recorded_by_the_number_that_sbatch_says_last(fake):
    recorded: list[int] = []
    for said, number in (("12", 12), ("Welcome!\n13;east", 13), ("Submitted batch job 14", 14)):
        fake.program("sbatch", f"printf '{said}\\n'")
        assert submit_script(fake.script, ["--partition=gen"], record=recorded.append) == number
    assert recorded == [12, 13, 14]
    assert fake.calls("squeue") == []
    tags = [next(word for word in call.split() if word.startswith("--comment=rlhpc-")) for call in fake.calls("sbatch")]
    assert len(set(tags)) == 3


@pytest.mark.parametrize("lost", [f"echo '{TIMED_OUT}' >&2; exit 1", "kill -TERM $$", "true", "exec sleep 5"])
def test_a_job_whose_answer_was_lost_is_found_by_its_tag(fake, lost, monkeypatch):
    monkeypatch.setattr(sbatch, "ANSWER_S", 0.5)
    recorded: list[int] = []
    fake.program("sbatch", TAKES + lost)
    assert submit_script(fake.script, record=recorded.append, patience_s=30.0) == 77
    assert recorded == [77]
    assert len(fake.calls("sbatch")) == 1


def test_sbatch_is_repeated_only_after_squeue_has_said_that_there_is_no_job(fake):
    fake.program("sbatch", f"echo '{TIMED_OUT}' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"Socket timed out.*; no job of this submission is in the queue"):
        submit_script(fake.script, record=print)
    assert len(fake.calls("squeue")) == 2, "a request that was lost is no job, and that is asked twice"
    again = f"if [ $(wc -l < {fake.here}/sbatch.calls) = 2 ]; then echo '{TIMED_OUT}' >&2; exit 1; fi; echo 5"
    fake.program("sbatch", again)
    assert submit_script(fake.script, record=lambda _: None, patience_s=30.0) == 5
    assert (len(fake.calls("sbatch")), len(fake.calls("squeue"))) == (3, 4)


def test_where_squeue_is_silent_too_nobody_repeats_and_the_error_says_how_to_look(fake):
    fake.program("sbatch", TAKES + f"echo '{TIMED_OUT}' >&2; exit 1")
    fake.program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(MayBeQueued, match=r"a job may be queued nevertheless, `squeue --me .*grep rlhpc-[0-9a-f]{12}`"):
        submit_script(fake.script, record=print, patience_s=30.0)
    assert len(fake.calls("sbatch")) == 1


@pytest.mark.parametrize("said", [REFUSED, AWAY])
def test_where_nothing_can_have_been_submitted_nobody_is_asked(fake, said):
    fake.program("sbatch", f"echo '{said}' >&2; exit 1")
    with pytest.raises(SlurmError, match=said.partition(":")[0]):
        submit_script(fake.script, record=print)
    assert fake.calls("squeue") == []


def test_the_comment_of_a_script_is_left_alone(fake):
    fake.script.write_text("#!/bin/bash\n#SBATCH --time=1 --comment=project7\ntrue\n")
    fake.program("sbatch", TAKES + 'cat "${{@: -1}}" >> {here}/seen; ' + f"echo '{TIMED_OUT}' >&2; exit 1")
    assert submit_script(fake.script, record=lambda _: None) == 77
    (call,) = fake.calls("sbatch")
    assert "--comment" not in call
    assert call.endswith("/job.sh")  # its name is the job's where nothing else is
    assert (fake.here / "seen").read_text() == fake.script.read_text()


def test_a_job_that_cannot_be_recorded_is_cancelled(fake):
    def full(job_id: int) -> None:
        raise OSError(28, "No space left on device")

    fake.program("sbatch", "echo 12")
    with pytest.raises(OSError, match="No space"):
        submit_script(fake.script, record=full)
    assert fake.calls("scancel") == ["12"]


def test_a_job_that_is_submitted_again_is_recorded_though_the_answer_was_lost(fake):
    layout = RunLayout(fake.here)
    write_job_record(layout, JobRecord(12, "trainer", "jobs", None, "p", str(fake.script), False, 0, 0, "gpu", 100.0))
    fake.program("sbatch", TAKES + f"echo '{TIMED_OUT}' >&2; exit 1")
    assert submit_again(layout, 12, "--dependency=afterany:12") == 77
    assert [(record.job_id, record.follows) for record in read_job_records(layout)] == [(12, None), (77, 12)]
    assert len(fake.calls("sbatch")) == 1


SUBMITS = (
    "import sys; from pathlib import Path; from launch.slurm import sbatch; sbatch.LOOK_AGAIN_S = 0.05\n"
    "try:\n    sbatch.submit_script(Path(sys.argv[1]), record=lambda job: print('recorded', job, flush=True))\n"
    "except KeyboardInterrupt as interrupt:\n    print('interrupted:', interrupt)\n"
)


@pytest.mark.parametrize("ending", ["echo 77", f"echo '{TIMED_OUT}' >&2; exit 1"])
def test_ctrl_c_waits_for_sbatch_and_cancels_what_it_submits(fake, ending):
    fake.program("sbatch", "touch {here}/begun; while [ ! -e {here}/go ]; do sleep 0.05; done; " + TAKES + ending)
    out, err = _interrupted(fake, times=1)
    assert out == "interrupted: job 77 was submitted, and has been cancelled\n"
    assert "waiting for sbatch" in err
    assert fake.calls("scancel") == ["77"]


def test_a_second_ctrl_c_does_not_wait_and_says_how_to_look(fake):
    fake.program("sbatch", "touch {here}/begun; exec sleep 300")
    began = time.monotonic()
    out, _ = _interrupted(fake, times=2)
    assert out.startswith("interrupted: a job may be queued: `squeue --me")
    assert time.monotonic() - began < 2 * PATIENCE_S


def _interrupted(fake: FakeSlurm, times: int) -> tuple[str, str]:
    """Submit in a process group that Ctrl-C reaches as a whole, as at a terminal."""
    said = fake.here / "said"
    with said.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", SUBMITS, str(fake.script)],
            stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
    assert Deadline(PATIENCE_S).wait_for((fake.here / "begun").exists, 0.05)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        assert Deadline(PATIENCE_S).wait_for(lambda: "waiting for sbatch" in said.read_text(), 0.05)
    (fake.here / "go").touch()
    out, _ = process.communicate(timeout=PATIENCE_S)
    return out, said.read_text()


# ------------------------ What a user's shell, a site's module or a job around a command has set does not reach Slurm's

# Of a batch step: by these srun finds its job, its components and its nodes.
OF_THE_JOB = {
    "SLURM_JOB_ID": "12", "SLURM_JOBID": "12", "SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST": "c0",
    "SLURM_JOB_ID_HET_GROUP_1": "13", "SLURM_NTASKS_HET_GROUP_1": "4", "SLURM_TASKS_PER_NODE": "1",
    "SLURM_JOB_CPUS_PER_NODE": "8", "SLURM_CLUSTER_NAME": "dev", "SLURM_RESTART_COUNT": "1", "SLURMD_NODENAME": "c0",
    "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_END_TIME": "99", "SLURM_HINT": "nomultithread",
}  # fmt: skip
REACHES_ALL = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CONF_SERVER": "a:6817", "SLURM_JWT": "x", "NCCL_DEBUG": "INFO"}


@pytest.fixture
def shell(monkeypatch) -> None:
    for key, value in {**UNSETTLING, **OF_THE_JOB, **REACHES_ALL}.items():
        monkeypatch.setenv(key, value)


@pytest.mark.usefixtures("shell")
def test_a_command_sees_of_slurms_variables_only_those_that_find_the_cluster():
    said = slurm("sh", "-c", "env").splitlines()
    ours = {line.partition("=")[0] for line in said if line.startswith(("S", "PMI", "NCCL"))} - {"SHLVL", "SHELL"}
    assert {"SLURM_TIME_FORMAT", *REACHES_ALL} <= ours
    assert not ours & ({*UNSETTLING, *OF_THE_JOB} - {"SLURM_TIME_FORMAT"})
    assert "SLURM_TIME_FORMAT=standard" in said


def test_an_environment_that_is_handed_in_is_made_clean_too():
    given = {**UNSETTLING, "PATH": os.environ["PATH"], "SLURM_CONF": "here"}
    said = slurm("sh", "-c", "env", environment=given).splitlines()
    assert "SLURM_CONF=here" in said
    assert not [line for line in said if line.startswith(("SQUEUE_", "SBATCH_", "SLURM_CLUSTERS"))]
    assert clean_environment(given) == {"PATH": os.environ["PATH"], "SLURM_CONF": "here"}


@pytest.mark.parametrize("command", ["sbatch", "squeue", "sacct"])
def test_one_of_several_clusters_that_a_login_node_serves_is_named_by_a_variable_of_ours(
    commands, monkeypatch, command
):
    commands.put(command, 'echo "$SLURM_CLUSTERS $*"')
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    assert slurm(command, "-x") == " -x\n"
    monkeypatch.setenv("RLHPC_SLURM_CLUSTER", "gpu")
    assert slurm(command, "-x") == ("gpu --clusters=gpu -x\n" if command == "sacct" else "gpu -x\n")
    assert slurm(command, "-x", environment=clean_environment()) == slurm(command, "-x")


@pytest.mark.usefixtures("shell")
def test_a_step_keeps_its_job_and_loses_what_would_make_it_another_step():
    seen = srun_environment()
    assert not {key for key in UNSETTLING if key in seen} - {"SLURM_EXPORT_ENV", *OF_THE_JOB} - {
        "SLURM_TIME_FORMAT",  # of no meaning to srun
    }  # fmt: skip
    assert {key: seen.get(key) for key in {**OF_THE_JOB, **REACHES_ALL}} == {**OF_THE_JOB, **REACHES_ALL}
    assert seen["SLURM_EXPORT_ENV"] == "ALL"


def test_a_step_in_another_component_than_the_batch_step_does_not_take_over_its_gpus():
    sizes = ("GPUS", "GPUS_PER_NODE", "GRES", "CPUS_PER_GPU", "NTASKS_PER_GPU", "CPU_BIND")
    of_component_0 = {f"SLURM_{name}": "1" for name in sizes}
    given = {**OF_THE_JOB, **of_component_0, "SLURM_MEM_PER_NODE": "1024"}
    plain = {**OF_THE_JOB, "SLURM_EXPORT_ENV": "ALL"}
    assert srun_environment(given) == {**plain, **of_component_0}
    assert srun_environment(given, any_component=True) == plain


def test_a_step_does_not_bind_its_tasks_to_gpus_because_the_job_asked_for_them_by_task():
    set_by_slurm = {  # 22.05 the first, 24.11 the others
        "SLURM_GPUS_PER_TASK": "h100:1",
        "SLURM_TRES_PER_TASK": "cpu=1,gres/gpu:h100=1",
        "SLURM_TRES_BIND": "gres/gpu:per_task:1",
    }
    assert srun_environment({**OF_THE_JOB, **set_by_slurm}) == {**OF_THE_JOB, "SLURM_EXPORT_ENV": "ALL"}


@pytest.mark.usefixtures("shell")
def test_components_of_the_executor_and_parts_of_a_run_are_started_in_such_an_environment(
    tmp_path, monkeypatch, commands
):
    def seen() -> dict[str, str]:
        return dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)

    commands.put("srun", f"env > {tmp_path}/seen")
    layout, part = RunLayout(tmp_path), replace(part_of("trainer", program=sys.executable), srun=("--nodes=1",))
    assert start_part(job_part(layout, "trainer", part), part, None, Attempt(0, None, 12, 0), 0).wait(60.0)
    assert seen()["SLURM_JOB_ID"] == "12"
    assert not {"SLURM_TIMELIMIT", "SRUN_OUTPUT", "SLURM_STDOUTMODE", "SLURM_EXCLUSIVE", "SQUEUE_STATES"} & set(seen())
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "8")
    plan = {
        "name": "learner", "is_essential": True, "stores_checkpoint": True, "restarts": 0, "group": 1, "num_tasks": 1,
        "in_batch_step": False, "command": [sys.executable], "srun": [], "stderr_to_stdout": False,
    }  # fmt: skip
    component = ComponentStep(plan, tmp_path, "12")
    component.start()
    while component.is_alive:
        time.sleep(0.01)
    assert not {"SLURM_GPUS_PER_NODE", "SLURM_NTASKS"} & set(seen())
    assert (seen()["SLURM_JOB_ID"], seen()["RLHPC_HET_COMPONENT"]) == ("12", "learner")


def test_what_a_command_remarks_beside_its_answer_is_kept():
    remarks: list[str] = []
    assert slurm("sh", "-c", "echo 12; echo 'sbatch: your job was moved to scav' >&2", hear=remarks.append) == "12\n"
    assert remarks == ["sbatch: your job was moved to scav"]


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("0", [0]), ("0-1,3", [0, 1, 3]), ("2-5%2", [2, 3, 4, 5]), ("", []), ("1,3,...", [1, 3]), ("1,3,", [1, 3]),
     ("2-18:2", [2, 4, 6, 8, 10, 12, 14, 16, 18]), ("0,5-9:4%1", [0, 5, 9])],
)  # fmt: skip
def test_tasks_of_an_array_are_read_as_squeue_writes_them(text, tasks):
    assert task_numbers(text) == tasks
    assert task_numbers(tasks_in_words(tasks)) == tasks
    assert tasks_in_words([4, 0, 2, 3]) == "0,2-4"


# -------------------- Records of submitted jobs are read as they were written, and no generator's number is given twice

RECORD = JobRecord(12, "hetjob", "hetjob", None, "p", "s", False, 0, 2, "gpu", 100.0)


def add(layout: RunLayout, count: int) -> None:
    """What `rlhpc scale` leaves of an addition."""
    wanted = Elastic(next_elastic_name(layout), count, next_replica(layout, "generator"), "hetjob")
    site = site_of(cluster={"shared_directory": str(layout.root)})
    write_plan(plan_elastic(config_of(f"run.directory={layout.root}"), site, layout, wanted))


@pytest.fixture
def layout(tmp_path) -> RunLayout:
    return RunLayout(tmp_path)


def test_a_record_is_read_as_it_was_written(layout):
    names = ("hetjob", "controller", "generation")  # the run goes on as long as the job of its controller
    assert [replace(RECORD, name=name).hosts_controller for name in names] == [True, True, False]
    write_job_record(layout, RECORD)
    assert read_job_records(layout) == [RECORD]
    assert json.loads(layout.job_record(12).read_bytes()) == {
        "job_id": 12, "name": "hetjob", "placement": "hetjob", "array_size": None, "plan": "p", "script": "s",
        "is_elastic": False, "first_replica": 0, "replicas_per_task": 2, "partition": "gpu",
        "submitted_unix_s": 100.0, "follows": None, "tasks": None,
    }  # fmt: skip


def test_records_stand_in_the_order_of_submission_and_events_are_none(layout):
    for record in (replace(RECORD, job_id=3, submitted_unix_s=200.0), RECORD):
        write_job_record(layout, record)
    layout.job_events("12").write_text("{}\n")
    (layout.jobs / "trainer.yield").touch()
    (layout.jobs / "notes.json").write_text("{}")
    assert [record.job_id for record in read_job_records(layout)] == [12, 3]


def test_a_field_of_a_later_version_is_no_fault_and_damage_is_named(layout):
    write_job_record(layout, RECORD)
    path = layout.job_record(12)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "red"}))
    assert read_job_records(layout) == [RECORD]
    path.write_text('{"job_id": 12}')
    with pytest.raises(RunDirectoryError, match=r"12\.json: damaged"):
        read_job_records(layout)


@pytest.mark.parametrize("placement", ["hetjob", "jobs"])
def test_numbers_of_added_generators_go_on_after_the_planned_ones(layout, placement):
    plan = plan_of("generation.num_replicas=3", cluster={"placement": placement})
    layout.job_plan.write_text(plan_document(plan))
    assert replica_numbers(layout, "generator") == [0, 1, 2]
    add(layout, 2)
    assert [path.name for path in elastic_plans(layout)] == ["generation-1.json"]
    assert (next_replica(layout, "generator"), next_elastic_name(layout)) == (5, "generation-2")
    add(layout, 9)
    assert replica_numbers(layout, "generator") == list(range(14))


def test_additions_are_counted_and_no_number_is_given_again_when_a_resume_plans_fewer(layout):
    layout.job_plan.write_text(plan_document(plan_of("generation.num_replicas=3")))
    for _ in range(10):
        add(layout, 1)
    layout.job_plan.write_text(plan_document(plan_of("generation.num_replicas=1")))
    assert (next_elastic_name(layout), next_replica(layout, "generator")) == ("generation-11", 13)


# ----------------- `rlhpc stop` of a run that another shell resumes meanwhile.  Programs on PATH print what Slurm would


def row(job_id: int, state: str) -> str:
    return f"echo '{job_id}+0|{state}|0|None|cpu|1:13|58:47|1:00:00|2026-03-01T14:05:00|c0|hetjob|'"


@pytest.fixture
def two_jobs(tmp_path, commands) -> RunLayout:
    """A run of which job 12 has the controller, and a scancel that takes all."""
    layout = RunLayout(tmp_path / "run")
    layout.jobs.mkdir(parents=True)
    layout.config.write_text('{"config": {}, "hash": ""}')
    for job_id, name in ((12, "controller"), (13, "trainer")):
        write_job_record(layout, JobRecord(job_id, name, "jobs", None, "p", "s", False, 0, 0, None, float(job_id)))
    commands.put("scancel", f"touch {tmp_path}/cancelled")
    return layout


def stopped(layout: RunLayout, now: bool = False) -> list[str]:
    said: list[str] = []
    stop.stop_run(layout, now=now, tell=said.append)
    return said


@pytest.mark.parametrize("now", [False, True])
def test_a_stop_leaves_alone_what_another_shell_resumes_once_all_has_ended(commands, two_jobs, now):
    """Job 13 is submitted by the resume, which has deleted the request before."""
    request = two_jobs.abort_request if now else two_jobs.stop_request
    looks = f"if [ $n -le 2 ]; then {row(12, 'COMPLETING')}\nelif [ $n -le 4 ]; then rm -f {request}; "
    commands.put("squeue", f"{looks}{row(13, 'PENDING')}; fi")
    said = stopped(two_jobs, now)
    assert commands.calls("scancel") == []
    assert said[-1] == f"{two_jobs.root}: stopped, and resumed since, by another command; left alone: job 13"


def test_where_the_controllers_job_has_ended_before_the_rest_is_cancelled_at_once(commands, two_jobs, tmp_path):
    commands.put("squeue", f"{row(12, 'FAILED')}; [ -e {tmp_path}/cancelled ] || {row(13, 'RUNNING')}")
    assert "the controller's job has ended before" in stopped(two_jobs)[0]
    assert commands.calls("scancel") == ["13"]


def test_of_a_suspended_job_a_stop_says_what_lets_it_end(commands, two_jobs):
    commands.put("squeue", f"[ $n -gt 2 ] || {row(12, 'SUSPENDED')}")
    said = stopped(two_jobs)[0]
    assert "12+0 suspended" in said
    assert "`scontrol resume 12`" in said


def test_a_complete_run_is_not_waited_for_and_not_asked_where_slurm_is_away(commands, two_jobs, monkeypatch):
    commands.put("squeue", AWAY_FROM_SQUEUE)
    two_jobs.summary.write_text("{}")
    (said,) = stopped(two_jobs)
    assert said.startswith(f"{two_jobs.root}: complete; its jobs, if there are any, end by themselves (Slurm did not")
    assert not two_jobs.stop_request.exists()


@pytest.mark.waits
def test_running_jobs_are_asked_to_stop_though_slurm_does_not_answer(commands, two_jobs, tmp_path, monkeypatch):
    """They look for the file themselves, and slurmctld may be away for hours."""
    away = f"[ -e {two_jobs.stop_request} ] || {{ {AWAY_FROM_SQUEUE}; }}\n"
    commands.put("squeue", f"{away}[ -e {tmp_path}/shown ] || {row(12, 'RUNNING')}; touch {tmp_path}/shown")
    assert "asked        by the file STOP, which running jobs see: Slurm did not answer" in stopped(two_jobs)[0]
    assert two_jobs.stop_request.exists()
    two_jobs.stop_request.unlink()
    commands.put("squeue", away)
    assert stopped(two_jobs)[-1] == f"{two_jobs.root}: this run is not running", "it had ended meanwhile"
    assert not two_jobs.stop_request.exists()
    monkeypatch.setattr(stop, "PATIENCE_S", 0.2)
    commands.put("squeue", AWAY_FROM_SQUEUE)
    with pytest.raises(SlurmError, match=r"the request STOP is in .*running jobs see it"):
        stopped(two_jobs)
    assert two_jobs.stop_request.exists()
