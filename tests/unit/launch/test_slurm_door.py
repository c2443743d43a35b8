"""What a user's shell, a site's module or a job around a command has set does not reach Slurm's commands."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from launch.run_files.plan_file import JobPart, Limits, Part, Share
from launch.run_files.run_state import Attempt
from launch.slurm.commands import clean_environment, slurm, srun_environment
from launch.slurm.states import task_numbers, tasks_in_words
from launch.submitit_hetjob.step import ComponentProcess as ComponentStep
from launch.supervisor.processes import start_part
from rlhpc.base.run_directory import RunLayout
from tests.unsettling import UNSETTLING

pytestmark = pytest.mark.starts

# Of a batch step: by these srun finds its job, its components and its nodes.
OF_THE_JOB = {
    "SLURM_JOB_ID": "12", "SLURM_JOBID": "12", "SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST": "c0",
    "SLURM_JOB_ID_HET_GROUP_1": "13", "SLURM_NTASKS_HET_GROUP_1": "4", "SLURM_TASKS_PER_NODE": "1",
    "SLURM_JOB_CPUS_PER_NODE": "8", "SLURM_CLUSTER_NAME": "dev", "SLURM_RESTART_COUNT": "1", "SLURMD_NODENAME": "c0",
    "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_END_TIME": "99", "SLURM_HINT": "nomultithread",
}  # fmt: skip
REACHES_ALL = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CONF_SERVER": "a:6817", "SLURM_JWT": "x", "NCCL_DEBUG": "INFO"}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**UNSETTLING, **OF_THE_JOB, **REACHES_ALL}.items():
        monkeypatch.setenv(key, value)


@pytest.mark.usefixtures("shell")
def test_a_command_sees_of_slurms_variables_only_those_that_find_the_cluster() -> None:
    said = slurm("sh", "-c", "env").splitlines()
    ours = {line.partition("=")[0] for line in said if line.startswith(("S", "PMI", "NCCL"))} - {"SHLVL", "SHELL"}
    assert {"SLURM_TIME_FORMAT", *REACHES_ALL} <= ours
    assert not ours & ({*UNSETTLING, *OF_THE_JOB} - {"SLURM_TIME_FORMAT"})
    assert "SLURM_TIME_FORMAT=standard" in said


def test_an_environment_that_is_handed_in_is_made_clean_too() -> None:
    given = {**UNSETTLING, "PATH": os.environ["PATH"], "SLURM_CONF": "here"}
    said = slurm("sh", "-c", "env", environment=given).splitlines()
    assert "SLURM_CONF=here" in said
    assert not [line for line in said if line.startswith(("SQUEUE_", "SBATCH_", "SLURM_CLUSTERS"))]
    assert clean_environment(given) == {"PATH": os.environ["PATH"], "SLURM_CONF": "here"}


@pytest.mark.parametrize("command", ["sbatch", "squeue", "sacct"])
def test_one_of_several_clusters_that_a_login_node_serves_is_named_by_a_variable_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    program = tmp_path / command
    program.write_text('#!/bin/sh\necho "$SLURM_CLUSTERS $*"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    assert slurm(command, "-x") == " -x\n"
    monkeypatch.setenv("RLHPC_SLURM_CLUSTER", "gpu")
    assert slurm(command, "-x") == ("gpu --clusters=gpu -x\n" if command == "sacct" else "gpu -x\n")
    assert slurm(command, "-x", environment=clean_environment()) == slurm(command, "-x")


@pytest.mark.usefixtures("shell")
def test_a_step_keeps_its_job_and_loses_what_would_make_it_another_step() -> None:
    seen = srun_environment()
    assert not {key for key in UNSETTLING if key in seen} - {"SLURM_EXPORT_ENV", *OF_THE_JOB} - {
        "SLURM_TIME_FORMAT",  # of no meaning to srun
    }  # fmt: skip
    assert {key: seen.get(key) for key in {**OF_THE_JOB, **REACHES_ALL}} == {**OF_THE_JOB, **REACHES_ALL}
    assert seen["SLURM_EXPORT_ENV"] == "ALL"


def test_a_step_in_another_component_than_the_batch_step_does_not_take_over_its_gpus() -> None:
    sizes = ("GPUS", "GPUS_PER_NODE", "GRES", "CPUS_PER_GPU", "NTASKS_PER_GPU", "CPU_BIND")
    of_component_0 = {f"SLURM_{name}": "1" for name in sizes}
    given = {**OF_THE_JOB, **of_component_0, "SLURM_MEM_PER_NODE": "1024"}
    plain = {**OF_THE_JOB, "SLURM_EXPORT_ENV": "ALL"}
    assert srun_environment(given) == {**plain, **of_component_0}
    assert srun_environment(given, any_component=True) == plain


def test_a_step_does_not_bind_its_tasks_to_gpus_because_the_job_asked_for_them_by_task() -> None:
    set_by_slurm = {  # 22.05 the first, 24.11 the others
        "SLURM_GPUS_PER_TASK": "h100:1",
        "SLURM_TRES_PER_TASK": "cpu=1,gres/gpu:h100=1",
        "SLURM_TRES_BIND": "gres/gpu:per_task:1",
    }
    assert srun_environment({**OF_THE_JOB, **set_by_slurm}) == {**OF_THE_JOB, "SLURM_EXPORT_ENV": "ALL"}


@pytest.mark.usefixtures("shell")
def test_a_component_of_the_executor_is_started_in_such_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "srun"
    program.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "8")
    plan = {
        "name": "learner", "is_essential": True, "stores_checkpoint": True, "restarts": 0, "group": 1, "num_tasks": 1,
        "in_batch_step": False, "command": [sys.executable], "srun": [], "stderr_to_stdout": False,
    }  # fmt: skip
    component = ComponentStep(plan, tmp_path, "12")
    component.start()
    while component.is_alive:
        time.sleep(0.01)
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert "SLURM_GPUS_PER_NODE" not in seen
    assert "SLURM_NTASKS" not in seen
    assert seen["SLURM_JOB_ID"] == "12"
    assert seen["RLHPC_HET_COMPONENT"] == "learner"


@pytest.mark.usefixtures("shell")
def test_a_part_of_a_run_is_started_in_such_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "srun"
    program.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    part = Part("trainer", (Share("trainer", 1, 0),), False, ("--nodes=1",), 0, (sys.executable,), {}, {})
    layout = RunLayout(tmp_path)
    plan = JobPart(layout, layout.job_plan, "jobs", "trainer", False, (part,), Limits(1, 1, 1), "requeue", ())
    step = start_part(plan, part, None, Attempt(0, None, 12, 0), 0)
    assert step.wait(60.0)
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert seen["SLURM_JOB_ID"] == "12"
    assert not {"SLURM_TIMELIMIT", "SRUN_OUTPUT", "SLURM_STDOUTMODE", "SLURM_EXCLUSIVE", "SQUEUE_STATES"} & set(seen)


def test_what_a_command_remarks_beside_its_answer_is_kept() -> None:
    remarks: list[str] = []
    assert slurm("sh", "-c", "echo 12; echo 'sbatch: your job was moved to scav' >&2", hear=remarks.append) == "12\n"
    assert remarks == ["sbatch: your job was moved to scav"]


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("0", [0]), ("0-1,3", [0, 1, 3]), ("2-5%2", [2, 3, 4, 5]), ("", []), ("1,3,...", [1, 3]), ("1,3,", [1, 3]),
     ("2-18:2", [2, 4, 6, 8, 10, 12, 14, 16, 18]), ("0,5-9:4%1", [0, 5, 9])],
)  # fmt: skip
def test_tasks_of_an_array_are_read_as_squeue_writes_them(text: str, tasks: list[int]) -> None:
    assert task_numbers(text) == tasks
    assert task_numbers(tasks_in_words(tasks)) == tasks


def test_tasks_are_written_with_spans() -> None:
    assert tasks_in_words([4, 0, 2, 3]) == "0,2-4"
