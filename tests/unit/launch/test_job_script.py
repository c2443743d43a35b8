"""Scripts are what they were when somebody last read them, and bash does with them what they say."""

from __future__ import annotations

import difflib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.plan.script import component_directives, render_script, render_scripts
from launch.plan.site_file import GpuRequest
from tests.patience import PATIENCE_S
from tests.unit.launch.regenerate_scripts import GOLDEN, PAIRS, Pair
from tests.unit.launch.site_kit import component_of, plan_of


def directives(script: str) -> list[list[str]]:
    """What sbatch reads, a list for each component."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    components: list[list[str]] = [[]]
    for line in lines:
        if line == "hetjob":
            components.append([])
        else:
            components[-1].append(line)
    return components


# -------------------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_shipped_run_on_a_shipped_site_has_the_scripts_that_were_read(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(pair.run_file), str(pair.site_file), *pair.overrides]) == 0
    printed, golden = capsys.readouterr().out, pair.golden.read_text(encoding="utf-8")
    difference = "\n".join(
        difflib.unified_diff(golden.splitlines(), printed.splitlines(), str(pair.golden), "printed now", lineterm="")
    )
    assert not difference, f"{difference}\nif meant so: python -m tests.unit.launch.regenerate_scripts"


def test_no_golden_script_is_left_over() -> None:
    assert set(GOLDEN.rglob("*.txt")) == {pair.golden for pair in PAIRS}


# ---------------------------------------------------------------------------------------------------------- directives


@pytest.mark.parametrize(
    ("form", "kind", "written"),
    [
        ("gres", "h100", "--gres=gpu:h100:8"),
        ("gres", None, "--gres=gpu:8"),
        ("gpus-per-node", "h100", "--gpus-per-node=h100:8"),
        ("gpus-per-node", None, "--gpus-per-node=8"),
        ("gpus-per-task", "h100", "--gpus-per-task=h100:4"),
        ("gpus-per-task", None, "--gpus-per-task=4"),
    ],
)
def test_gpus_are_asked_for_in_the_form_of_the_site(form: GpuRequest, kind: str | None, written: str) -> None:
    keys = {"gpu_request": form, "gres_type": kind}
    plan = plan_of("generation.num_replicas=2", "generation.tensor_parallel=4", generation=keys)
    asked = [word for word in component_directives(component_of(plan, "generation")) if word.startswith("--g")]
    assert asked == [written]


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("gres", ["--gres=gpu:2,lscratch:200"]),
        ("gpus-per-node", ["--gpus-per-node=2", "--gres=lscratch:200"]),
        ("gpus-per-task", ["--gpus-per-task=1", "--gres=lscratch:200"]),
    ],
)
def test_other_generic_resources_are_asked_for_beside_gpus(form: GpuRequest, written: list[str]) -> None:
    plan = plan_of(common={"gres": "lscratch:200"}, trainer={"gpu_request": form})
    words = list(component_directives(component_of(plan, "trainer")))
    assert [word for word in words if word.startswith(("--gpu", "--gres"))] == written
    assert "--gres=lscratch:200" in component_directives(component_of(plan, "controller"))


def test_a_controller_may_ask_for_a_gpu_where_no_partition_takes_a_job_without_one() -> None:
    plan = plan_of(controller={"gres": "gpu:1"}, rewards={"gres": "gpu:a100:1"})
    assert "--gres=gpu:1" in component_directives(component_of(plan, "controller"))
    assert "--gres=gpu:a100:1" in component_directives(component_of(plan, "rewards"))
    assert component_of(plan, "controller").gpus_per_task == 0


def test_a_component_without_gpus_asks_for_none() -> None:
    (script,) = render_scripts(plan_of("trainer.device=cpu", "generation.engine=scripted")).values()
    assert "gpu:" not in script
    assert "--gpus" not in script


@pytest.mark.parametrize(("way", "written"), [("requeue", "--requeue"), ("successor", "--no-requeue")])
def test_a_site_that_forbids_requeue_is_not_asked_for_it(way: str, written: str) -> None:
    for script in render_scripts(plan_of(cluster={"continuation": way, "placement": "jobs"})).values():
        assert [word for word in directives(script)[0] if "requeue" in word] == [written]


def test_every_key_of_a_section_has_its_directive() -> None:
    keys: dict[str, Any] = {
        "partition": "p1,p2",
        "account": "a",
        "qos": "q",
        "constraint": "ib&(nvme|ssd)",
        "reservation": "r",
        "exclusive": True,
        "extra": ["--licenses=x:1", "--nice"],
        "cpus_per_gpu": 7,
        "memory_gib_per_gpu": 50,
    }
    assert list(component_directives(component_of(plan_of(trainer=keys), "trainer"))) == [
        "--partition=p1,p2",
        "--account=a",
        "--qos=q",
        "--constraint=ib&(nvme|ssd)",
        "--reservation=r",
        "--time=1:00:00",
        "--nodes=1",
        "--ntasks=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=7",
        "--gres=gpu:2",
        "--mem=100G",
        "--exclusive",
        "--licenses=x:1",
        "--nice",
    ]


def test_all_memory_of_a_node_is_zero_for_slurm() -> None:
    plan = plan_of(controller={"memory_gib_per_task": 0})
    assert "--mem=0" in component_directives(component_of(plan, "controller"))


def test_what_holds_for_the_whole_job_stands_in_its_first_component_alone() -> None:
    (script,) = render_scripts(plan_of(cluster={"mail": "me@here", "mail_events": ["END", "FAIL"]})).values()
    first, *others = directives(script)
    job_wide = ("--job-name", "--output", "--open-mode", "--requeue", "--signal", "--mail-user", "--mail-type")
    assert [word.partition("=")[0] for word in first][: len(job_wide)] == list(job_wide)
    assert "--mail-type=END,FAIL" in first
    assert [word for words in others for word in words if word.startswith(job_wide)] == []


def test_only_the_end_of_the_controllers_job_is_mailed() -> None:
    scripts = render_scripts(plan_of(cluster={"placement": "jobs", "mail": "me@here"}))
    assert [name for name, script in scripts.items() if "--mail-user=me@here" in script] == ["controller.sbatch"]


@pytest.mark.parametrize(("minutes", "warned_s"), [(60, 600), (10, 150), (5, 75), (4, None)])
def test_the_batch_step_alone_is_warned_late_in_its_time_and_a_short_one_not_at_all(
    minutes: int, warned_s: int | None
) -> None:
    (script,) = render_scripts(plan_of(common={"time": minutes})).values()
    warnings = [word for word in directives(script)[0] if word.startswith("--signal")]
    assert warnings == ([f"--signal=B:USR2@{warned_s}"] if warned_s else [])


def test_generators_are_an_array_with_a_log_each() -> None:
    scripts = render_scripts(plan_of("generation.num_replicas=3", cluster={"placement": "jobs"}))
    (words,) = directives(scripts["generation.sbatch"])
    assert "--array=0-2" in words
    assert "--output=/shared/run/logs/slurm/generation-%A_%a.log" in words
    assert list(scripts) == ["controller.sbatch", "trainer.sbatch", "generation.sbatch"]


# ---------------------------------------------------------------------------------------------------------------- bash


def run_script(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = directory / "job.sbatch"
    path.write_text(script)
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "16", "USER": "me"}
    environment["RLHPC_SLURM_CLUSTER"] = "gpu"
    return subprocess.run(["bash", path], capture_output=True, text=True, env=environment, timeout=PATIENCE_S)


def witness(directory: Path) -> str:
    """An interpreter for the site file that tells how it was called."""
    path = directory / "python"
    path.write_text('#!/bin/bash\nprintf "%s\\n" "$$" "$@"; echo --; env\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.starts
def test_bash_understands_every_golden_script(pair: Pair) -> None:
    for script in pair.golden.read_text().split("\n----- ")[1:]:
        _, _, text = script.partition("\n")
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.starts
def test_the_supervisor_takes_the_place_of_the_shell_with_what_the_prologue_set(tmp_path: Path) -> None:
    venv = tmp_path / "my venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text("export ACTIVE=yes\n")
    prologue = {
        "venv": str(venv),
        "python": witness(tmp_path),
        "code": "/shared/code",
        "nccl_interface": "ib0,ib1",
        "environment": {"CACHE": "${SCRATCH:-/tmp}/$USER-$SLURM_JOB_ID", "TEXT": 'a "b" `c` $(d) \\ $5'},
        "commands": ["ulimit -n 64  # few", "export LATE=1"],
    }
    plan = plan_of(prologue=prologue)
    done = run_script("echo $$\n" + render_script(plan, plan.jobs[0]), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    called, _, told = done.stdout.partition("\n--\n")
    shell, pid, *arguments = called.splitlines()
    environment = dict(line.split("=", 1) for line in told.splitlines())
    assert pid == shell
    assert arguments == ["-u", "-P", "-m", "launch.supervisor", "--run-dir", "/shared/run",
                         "--plan", "/shared/run/job_plan.json", "--job", "hetjob"]  # fmt: skip
    assert (environment["ACTIVE"], environment["LATE"]) == ("yes", "1")
    assert environment["CACHE"] == "/tmp/me-7"
    assert environment["TEXT"] == 'a "b" `c` $(d) \\ $5'
    assert environment["PYTHONPATH"] == "/shared/code"
    assert environment["NCCL_SOCKET_IFNAME"] == environment["RLHPC_INTERFACE"] == "ib0,ib1"
    assert "GLOO_SOCKET_IFNAME" not in environment  # gloo wants all of them to be there: a role names the first that is
    assert (environment["HF_HUB_OFFLINE"], environment["HDF5_USE_FILE_LOCKING"]) == ("1", "FALSE")
    assert environment["SLURM_EXPORT_ENV"] == "ALL"
    assert not {"SLURM_MEM_PER_CPU", "RLHPC_SLURM_CLUSTER"} & environment.keys()


@pytest.mark.starts
def test_packages_of_the_home_directory_do_not_win_over_those_of_an_image(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"image": "/shared/a.sif", "code": "/shared/code", "python": witness(tmp_path)}
    for more, expected in (({}, "1"), ({"environment": {"PYTHONNOUSERSITE": ""}}, "")):
        plan = plan_of(prologue={**keys, **more})
        told = run_script(render_script(plan, plan.jobs[0]), tmp_path).stdout.partition("\n--\n")[2]
        assert f"PYTHONNOUSERSITE={expected}" in told.splitlines()
    plan = plan_of(prologue={"python": witness(tmp_path)})
    assert "PYTHONNOUSERSITE" not in run_script(render_script(plan, plan.jobs[0]), tmp_path).stdout


@pytest.mark.parametrize(
    ("keys", "culprit"),
    [
        ({"venv": "/nowhere"}, "source /nowhere/bin/activate"),
        ({"modules": ["cuda/99"]}, "module load cuda/99"),
        ({"conda": "/nowhere"}, "source /nowhere/etc/profile.d/conda.sh"),
        ({"commands": ["true", "test -d /nowhere"]}, "test -d /nowhere"),
    ],
)
@pytest.mark.starts
def test_a_prologue_that_fails_says_so_and_starts_nothing(tmp_path: Path, keys: dict[str, Any], culprit: str) -> None:
    plan = plan_of(prologue={"python": witness(tmp_path), **keys})
    done = run_script(render_script(plan, plan.jobs[0]), tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"rlhpc: prologue: '{culprit}' failed on {os.uname().nodename}" in done.stderr


def test_conda_is_activated_by_name_and_modules_are_purged_only_on_request() -> None:
    prologue = {"conda": "/opt/conda", "conda_environment": "rl", "modules": ["a", "b"], "module_purge": True}
    plan = plan_of(prologue=prologue)
    lines = [line.partition(" || ")[0] for line in render_script(plan, plan.jobs[0]).splitlines()]
    found = [line for line in lines if line.startswith(("module ", "conda ", "source "))]
    assert found == [
        "module purge",
        "module load a",
        "module load b",
        "source /opt/conda/etc/profile.d/conda.sh",
        "conda activate rl",
    ]
    (script,) = render_scripts(plan_of(prologue={"modules": ["a"]})).values()
    assert "module purge" not in script
