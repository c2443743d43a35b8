"""`rlhpc plan`: scripts are what they were when somebody last read them, and --predict what recorded runs took."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.commands.predict import Figure, Rates, Split, other_splits, pace_of, rates_of
from launch.commands.submit import Submission, short_times
from launch.commands.sweep import MOST_RUNS, sweep_of
from launch.doctor.site import refuse_missing_software, software_not_here
from launch.plan.jobs import plan_jobs
from launch.plan.script import component_directives, render_script, render_scripts
from launch.plan.site_file import Site
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config
from rlhpc.metrics.tensorboard import Recorder
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from tests.patience import PATIENCE_S
from tests.ring.run_kit import quick_settings, to_toml
from tests.unit.launch.runs_kit import TextRun
from tests.unit.launch.site_kit import GOLDEN, PAIRS, ROOT, component_of, config_of, plan_of, site_of, write_status
from tests.unit.launch.test_slurm_queue import scontrol

# ----------------------- Scripts are what they were when somebody last read them, and bash does with them what they say

# ----------------------- Scripts are what they were when somebody last read them, and bash does with them what they say


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
def test_a_shipped_run_on_a_shipped_site_has_the_scripts_that_were_read(pair, capsys):
    assert main(["plan", str(pair.run_file), str(pair.site_file), *pair.overrides]) == 0
    printed, golden = capsys.readouterr().out, pair.golden.read_text(encoding="utf-8")
    difference = "\n".join(
        difflib.unified_diff(golden.splitlines(), printed.splitlines(), str(pair.golden), "printed now", lineterm="")
    )
    assert not difference, f"{difference}\nif meant so: python -m tests.unit.launch.test_job_script"


def test_no_golden_script_is_left_over():
    assert set(GOLDEN.rglob("*.txt")) == {pair.golden for pair in PAIRS}


# ---------------------------------------------------------------------------------------------------------- directives


def test_gpus_are_asked_for_in_the_form_of_the_site_and_other_resources_beside_them():
    for form, kind, written in (
        ("gres", "h100", "--gres=gpu:h100:8"),
        ("gres", None, "--gres=gpu:8"),
        ("gpus-per-node", "h100", "--gpus-per-node=h100:8"),
        ("gpus-per-node", None, "--gpus-per-node=8"),
        ("gpus-per-task", "h100", "--gpus-per-task=h100:4"),
        ("gpus-per-task", None, "--gpus-per-task=4"),
    ):
        keys = {"gpu_request": form, "gres_type": kind}
        plan = plan_of("generation.num_replicas=2", "generation.tensor_parallel=4", generation=keys)
        asked = [word for word in component_directives(component_of(plan, "generation")) if word.startswith("--g")]
        assert asked == [written]
    for form, wanted in (
        ("gres", ["--gres=gpu:2,lscratch:200"]),
        ("gpus-per-node", ["--gpus-per-node=2", "--gres=lscratch:200"]),
        ("gpus-per-task", ["--gpus-per-task=1", "--gres=lscratch:200"]),
    ):
        plan = plan_of(common={"gres": "lscratch:200"}, trainer={"gpu_request": form})
        words = list(component_directives(component_of(plan, "trainer")))
        assert [word for word in words if word.startswith(("--gpu", "--gres"))] == wanted
        assert "--gres=lscratch:200" in component_directives(component_of(plan, "controller"))
    # A controller may ask for a GPU where no partition takes a job without one.
    plan = plan_of(controller={"gres": "gpu:1"}, rewards={"gres": "gpu:a100:1"})
    assert "--gres=gpu:1" in component_directives(component_of(plan, "controller"))
    assert "--gres=gpu:a100:1" in component_directives(component_of(plan, "rewards"))
    assert component_of(plan, "controller").gpus_per_task == 0
    (script,) = render_scripts(plan_of("trainer.device=cpu", "generation.engine=scripted")).values()
    assert "gpu:" not in script
    assert "--gpus" not in script


def test_a_site_that_forbids_requeue_is_not_asked_for_it():
    for way, written in (("requeue", "--requeue"), ("successor", "--no-requeue")):
        for script in render_scripts(plan_of(cluster={"continuation": way, "placement": "jobs"})).values():
            assert [word for word in directives(script)[0] if "requeue" in word] == [written]


def test_every_key_of_a_section_has_its_directive():
    keys: dict[str, Any] = {
        "partition": "p1,p2", "account": "a", "qos": "q", "constraint": "ib&(nvme|ssd)", "reservation": "r",
        "exclusive": True, "extra": ["--licenses=x:1", "--nice"], "cpus_per_gpu": 7, "memory_gib_per_gpu": 50,
    }  # fmt: skip
    plan = plan_of(trainer=keys, controller={"memory_gib_per_task": 0})
    assert list(component_directives(component_of(plan, "trainer"))) == [
        "--partition=p1,p2", "--account=a", "--qos=q", "--constraint=ib&(nvme|ssd)", "--reservation=r",
        "--time=1:00:00", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--cpus-per-task=7", "--gres=gpu:2",
        "--mem=100G", "--exclusive", "--licenses=x:1", "--nice",
    ]  # fmt: skip
    assert "--mem=0" in component_directives(component_of(plan, "controller")), "all memory of a node"


def test_what_holds_for_the_whole_job_stands_in_its_first_component_alone():
    (script,) = render_scripts(plan_of(cluster={"mail": "me@here", "mail_events": ["END", "FAIL"]})).values()
    first, *others = directives(script)
    job_wide = ("--job-name", "--output", "--open-mode", "--requeue", "--signal", "--mail-user", "--mail-type")
    assert [word.partition("=")[0] for word in first][: len(job_wide)] == list(job_wide)
    assert "--mail-type=END,FAIL" in first
    assert [word for words in others for word in words if word.startswith(job_wide)] == []
    scripts = render_scripts(plan_of(cluster={"placement": "jobs", "mail": "me@here"}))
    assert [name for name, script in scripts.items() if "--mail-user=me@here" in script] == ["controller.sbatch"]
    for minutes, warned_s in ((60, 600), (10, 150), (5, 75), (4, None)):  # late in its time, a short one not at all
        (script,) = render_scripts(plan_of(common={"time": minutes})).values()
        warnings = [word for word in directives(script)[0] if word.startswith("--signal")]
        assert warnings == ([f"--signal=B:USR2@{warned_s}"] if warned_s else [])


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


@pytest.mark.starts
def test_bash_understands_every_golden_script():
    """Each as a function of its own: one bash reads them all."""
    scripts = [each.partition("\n")[2] for pair in PAIRS for each in pair.golden.read_text().split("\n----- ")[1:]]
    text = "\n".join(f"script_{number} () {{\n{script}\n}}" for number, script in enumerate(scripts))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.starts
def test_the_supervisor_takes_the_place_of_the_shell_with_what_the_prologue_set(tmp_path):
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
def test_packages_of_the_home_directory_do_not_win_over_those_of_an_image(tmp_path):
    keys: dict[str, Any] = {"image": "/shared/a.sif", "code": "/shared/code", "python": witness(tmp_path)}
    for more, expected in (({}, "1"), ({"environment": {"PYTHONNOUSERSITE": ""}}, "")):
        plan = plan_of(prologue={**keys, **more})
        told = run_script(render_script(plan, plan.jobs[0]), tmp_path).stdout.partition("\n--\n")[2]
        assert f"PYTHONNOUSERSITE={expected}" in told.splitlines()
    plan = plan_of(prologue={"python": witness(tmp_path)})
    assert "PYTHONNOUSERSITE" not in run_script(render_script(plan, plan.jobs[0]), tmp_path).stdout


@pytest.mark.starts
def test_a_prologue_that_fails_says_so_and_starts_nothing(tmp_path):
    for keys, culprit in (
        ({"venv": "/nowhere"}, "source /nowhere/bin/activate"),
        ({"modules": ["cuda/99"]}, "module load cuda/99"),
        ({"conda": "/nowhere"}, "source /nowhere/etc/profile.d/conda.sh"),
        ({"commands": ["true", "test -d /nowhere"]}, "test -d /nowhere"),
    ):
        plan = plan_of(prologue={"python": witness(tmp_path), **keys})
        done = run_script(render_script(plan, plan.jobs[0]), tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"rlhpc: prologue: '{culprit}' failed on {os.uname().nodename}" in done.stderr


def test_conda_is_activated_by_name_and_modules_are_purged_only_on_request():
    prologue = {"conda": "/opt/conda", "conda_environment": "rl", "modules": ["a", "b"], "module_purge": True}
    plan = plan_of(prologue=prologue)
    lines = [line.partition(" || ")[0] for line in render_script(plan, plan.jobs[0]).splitlines()]
    assert [line for line in lines if line.startswith(("module ", "conda ", "source "))] == [
        "module purge", "module load a", "module load b", "source /opt/conda/etc/profile.d/conda.sh",
        "conda activate rl",
    ]  # fmt: skip
    (script,) = render_scripts(plan_of(prologue={"modules": ["a"]})).values()
    assert "module purge" not in script


# ------------------ What the prologue of a site file names and this machine lacks is told by `check --site`, `plan` and


def site_with(shared: Path, **prologue: str) -> Site:
    return site_of(cluster={"shared_directory": str(shared)}, prologue=prologue)


def test_a_path_of_the_prologue_that_is_not_here_is_told(tmp_path):
    for key, named, file in (
        ("conda", "conda", "conda/etc/profile.d/conda.sh"),
        ("venv", "env", "env/bin/activate"),
        ("code", "checkout", "checkout/launch/__init__.py"),
    ):
        site = site_with(tmp_path, **{key: str(tmp_path / named)})
        (line,) = software_not_here(site)
        assert line.startswith(f"prologue    warning: prologue.{key}={str(tmp_path / file)!r}: ")
        assert " is not here; legal: a path that nodes see too" in line
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
        assert software_not_here(site) == []
    conda = str(tmp_path / "conda")
    (line,) = software_not_here(site_with(tmp_path, conda=conda, conda_environment="/nowhere/mine"))
    assert "prologue.conda_environment='/nowhere/mine'" in line, "one that is a path is looked at too"
    assert software_not_here(site_with(tmp_path, conda=conda, conda_environment="mine")) == []
    # On a machine that is none of the cluster's nothing is looked at.
    assert software_not_here(site_with(Path("/no/such/filesystem"), conda="/no/such/filesystem/conda")) == []


@pytest.mark.parametrize(
    ("key", "named"), [("venv", "env"), ("conda", "conda"), ("image", "image.sif"), ("python", "env/bin/python")]
)
def test_what_the_prologue_names_in_the_shared_directory_and_is_not_there_is_refused(tmp_path, key, named):
    shared = tmp_path / "shared"
    shared.mkdir()
    code = {"code": str(ROOT)} if key == "image" else {}
    with pytest.raises(ConfigError, match=rf"^prologue\.{key}=.*{named}.*is not here; legal: a path that nodes"):
        refuse_missing_software(site_with(shared, **code, **{key: str(shared / named)}))
    (line,) = refuse_missing_software(site_with(shared, **code, **{key: f"/opt/{named}"}))  # nodes may have it
    assert line.startswith(f"prologue    warning: prologue.{key}=")


@pytest.mark.starts
@pytest.mark.parametrize("command", [["check"], ["plan"]], ids=" ".join)
def test_commands_that_only_look_tell_it(lab, tmp_path, capsys, command):
    run_file, site_file = tmp_path / "run.toml", tmp_path / "site.toml"
    settings = quick_settings(lab, "looked-at")
    settings["run"]["directory"] = str(tmp_path / "runs" / "looked-at")
    run_file.write_text(to_toml(settings), encoding="utf-8")
    site_file.write_text(
        f'[cluster]\nshared_directory = "{tmp_path}"\n[common]\ntime = 60\n[trainer]\n[generation]\n'
        f'[prologue]\nconda = "{tmp_path}/miniconda"\n'
    )
    site = ["--site", str(site_file)] if command == ["check"] else [str(site_file)]
    assert main([*command, str(run_file), *site]) == 0
    assert "prologue    warning: prologue.conda=" in capsys.readouterr().out


# ------------------ A sweep is every combination of seeds and values, under names that tell its runs apart; nonsense is


@pytest.fixture(scope="module")
def run_file(lab) -> Path:
    """Its seed is 1."""
    return lab.run_file("base", transport={"kind": "tcp"})


@pytest.fixture
def site_file(lab, tmp_path) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(
        f'[cluster]\nshared_directory = "{lab.root}"\n[common]\ntime = "1:00:00"\n[trainer]\n[generation]\n'
    )
    return path


def seeds_of(members: dict[str, Config]) -> list[int]:
    return [config.run.seed for config in members.values()]


def test_a_number_counts_on_from_the_seed_of_the_run_file_and_a_list_is_taken_as_it_is(run_file, lab, tmp_path):
    members = sweep_of(run_file, (), "3", ())
    assert seeds_of(members) == [1, 2, 3]
    names = [config.run.name for config in members.values()]
    assert names == ["base-seed-1", "base-seed-2", "base-seed-3"]
    assert [config.run_directory for config in members.values()] == [lab.layout(name).root for name in names]
    for words, typed, seeds in (((), "9,7,8", [9, 7, 8]), ((), "1234,", [1234]), (["run.seed=40"], "2", [40, 41])):
        assert seeds_of(sweep_of(run_file, words, typed, ())) == seeds
    words = ["run.num_steps=9", f"run.directory={tmp_path / 'mine'}", "run.name=night"]
    members = sweep_of(run_file, words, "2", ()).values()
    assert [(config.run.num_steps, config.run_directory.name, config.run.name) for config in members] == [
        (9, "mine-seed-1", "night-seed-1"), (9, "mine-seed-2", "night-seed-2")
    ]  # fmt: skip


def test_a_sweep_is_every_combination_and_seeds_vary_fastest(run_file):
    members = sweep_of(run_file, (), "2", ["trainer.learning_rate=1e-6,2e-6", "admission.max_staleness=0,2"])
    assert len(members) == 8
    assert [config.run.name for config in members.values()][:3] == [
        "base-learning_rate-1e-6-max_staleness-0-seed-1",
        "base-learning_rate-1e-6-max_staleness-0-seed-2",
        "base-learning_rate-1e-6-max_staleness-2-seed-1",
    ]
    last = members["trainer.learning_rate=2e-6 admission.max_staleness=2 run.seed=2"]
    assert (last.trainer.learning_rate, last.admission.max_staleness, last.run.seed) == (2e-6, 2, 2)


def test_what_makes_no_sweep_is_refused(run_file):
    for seeds, sweeps, message in (
        ("0", [], "0 runs; legal: 1 to"),
        ("x", [], "--seeds 'x': legal: how many"),
        ("-3", [], "--seeds '-3': legal"),
        ("", [], "--seeds '': legal"),
        ("7,,8", [], "--seeds '7,,8': legal"),
        ("7,7", [], "the same name"),
        ("1234", [], f"1234 runs; legal: 1 to {MOST_RUNS} at once; for the one seed: --seeds 1234,"),
        ("4294967295", [], "4294967295 runs; legal: .*: --seeds 4294967295,"),  # 300 GB as a list
        ("40", ["trainer.learning_rate=1e-6,2e-6"], "--seeds and --sweep: 80 runs"),
        (None, ["trainer.learning_rate"], "legal: section.key=value,value"),
        (None, ["trainer.learning_rate=1e-6,"], "legal: section.key=value,value"),
        (None, ["learning_rate=1,2"], r"'learning_rate=1,2': a key without .* mean trainer.learning_rate=1,2\?"),
        (None, ["=1"], "legal: section.key=value,value"),
        (None, ["trainer.learning_rat=1"], r"trainer\.learning_rat=1: unknown key.*did you mean learning_rate"),
        (None, ["trainer.learning_rate=1e-6,fast"], "trainer.learning_rate='fast'"),
        (None, ["data.prompt_template={prompt}!,{prompt}?"], "the same name"),
    ):
        with pytest.raises(ConfigError, match=message):
            sweep_of(run_file, (), seeds, sweeps)


@pytest.mark.starts
def test_a_dry_run_lists_all_runs_and_says_what_it_cannot_check_without_slurm(
    run_file, site_file, lab, capsys, monkeypatch
):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", str(run_file), str(site_file), "--seeds", "7,8,9", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("not checked what the cluster would refuse: scontrol: no such command here") == 1
    assert said.count("\nrun ") + said.startswith("run ") == 3
    assert f"{lab.layout('base-seed-8').root}: run.seed=8\n" in said
    assert not lab.layout("base-seed-7").root.exists()
    for typed, message in (
        ("--seeds 2 --wait", "--wait: only for a single run"),
        ("--seeds 2 --dry-run --after singleton", "--after singleton"),
        ("--seeds 2 --after soon", "--after 'soon': legal"),
    ):
        assert main(["submit", str(run_file), str(site_file), *typed.split()]) == EXIT_CONFIG
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--seeds", "7,8"]], ids=["one", "several"])
@pytest.mark.parametrize(
    ("override", "section", "line"),
    [("", {"generation": 'partition = "nope"'},
      "generation.partition='nope': no such partition; legal: cpu, gpu, lab, old"),
     ("", {"trainer": 'time = "3-00:00:00"\npartition = "gpu"', "cluster": 'placement = "jobs"'},
      "trainer.time='3-00:00:00': partition 'gpu' allows 2-00:00:00; legal: at most '2-00:00:00'"),
     ("", {"prologue": 'venv = "{shared}/no"'}, "prologue.venv='{shared}/no/bin/activate': the environment is not "
      "here; legal: a path that nodes see too"),
     ("model.path=nomodel", {}, "nomodel")],
    ids=["partition", "time", "venv", "model"],
)  # fmt: skip
@pytest.mark.starts
def test_a_dry_run_refuses_what_a_submission_refuses(
    run_file, site_file, lab, commands, capsys, override, section, line, more
):
    commands.put("scontrol", scontrol(()))
    commands.put("sacctmgr", "exit 1")
    commands.put("sbatch", "grep -q partition=nope $2 && { echo 'invalid partition specified: nope' >&2; exit 1; }; :")
    text = site_file.read_text() + "".join(
        f"[{name}]\n{keys}\n" for name, keys in section.items() if name == "prologue"
    )
    for name, keys in section.items():
        text = text.replace(f"[{name}]\n", f"[{name}]\n{keys}\n") if name != "prologue" else text
    site_file.write_text(text.replace("{shared}", str(lab.root)))
    words = [str(run_file), str(site_file), *more, *filter(None, [override])]
    for dry in ([], ["--dry-run"]):
        assert main(["submit", *words, *dry]) == EXIT_CONFIG
        said = capsys.readouterr()
        assert line.replace("{shared}", str(lab.root)) in said.err
        assert "#SBATCH" not in said.out
    assert [call for call in commands.calls("sbatch") if "--test-only" not in call] == []


@pytest.mark.starts
def test_a_dry_run_refuses_a_directory_that_is_taken_and_tells_warnings_before_the_plan(
    run_file, site_file, lab, commands, capsys
):
    commands.put("scontrol", scontrol(()))
    commands.put("sacctmgr", "exit 1")
    commands.put("sbatch", ":")
    site_file.write_text(f'{site_file.read_text()}qos = "long"\n[controller]\npartition = "gpu"\n')
    words = ["submit", str(run_file), str(site_file), "--dry-run"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.index("warning     generation.qos='long': not checked") < out.index("run         base in")
    assert "#SBATCH --qos=long" in out
    assert [call for call in commands.calls("sbatch") if "--test-only" not in call] == []
    taken = lab.layout("taken").root
    taken.mkdir(parents=True)
    (taken / "file").touch()
    assert main([*words, f"run.directory={taken}"]) == EXIT_CONFIG
    assert "exists and is not a run directory" in capsys.readouterr().err
    assert main([*words, f"run.directory={taken.with_name('t')}", "--seeds", "3"]) == 0
    (taken.with_name("t-seed-2")).mkdir()
    (taken.with_name("t-seed-2") / "file").touch()
    capsys.readouterr()
    assert main([*words, f"run.directory={taken.with_name('t')}", "--seeds", "3"]) == EXIT_CONFIG
    assert "1 run of 3 would not be submitted:\nbase-seed-2: " in capsys.readouterr().err


def regenerate() -> None:
    wanted = {pair.golden for pair in PAIRS}
    for stale in set(GOLDEN.rglob("*.txt")) - wanted:
        stale.unlink()
    for pair in PAIRS:
        pair.golden.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main(["plan", str(pair.run_file), str(pair.site_file), *pair.overrides])
        pair.golden.write_text(printed.getvalue())
    sys.stdout.write(f"{len(PAIRS)} plans in {GOLDEN.relative_to(ROOT)}\n")


if __name__ == "__main__":
    regenerate()


# ------------------ `rlhpc plan --predict`: the formula against recorded runs, where its figures come from, and what it

MODEL = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip
NO_GPUS = Site.model_validate({"trainer": {}, "generation": {}})
NUM_STEPS = 40
SCALARS = {
    "time/wait_for_groups_s": 0.5, "trainer/step_s": 0.4, "time/step_s": 1.2, "time/wait_for_weights_s": 1.0,
    "time/checkpoint_s": 4.0, "weights/pause_s": 0.02, "generator/token_s": 0.03, "generator/decoded_together": 10.0,
    "length/prompt_mean": 5.0, "length/completion_mean": 20.0, "length/completion_max": 40.0,
    "reward/zero_variance_share": 0.25, "verifier_mean_s/adding": 0.03, "verifier_mean_s/code": 0.05,
}  # fmt: skip


class MeasuredRun(TextRun):
    """A run whose steps took longer while it compiled; two data-parallel ranks train 200 tokens a step."""

    def __init__(self, root: Path, num_steps: int = NUM_STEPS, *, left_out: str = "") -> None:
        super().__init__(root, f"run.num_steps={num_steps}", "trainer.num_ranks=2")
        recorder = Recorder(self.layout.tensorboard)
        for step in range(num_steps):
            slow = 100.0 if step < num_steps // 10 else 1.0
            figures = {name: value * slow if name.endswith("_s") else value for name, value in SCALARS.items()}
            figures.pop(left_out, None)
            recorder.step(step, figures | {"tokens/trained_total": 200.0 * (step + 1)})
        recorder.close()


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    """A run file and a site file: GPUs whose figures are known."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    run, site = tmp_path / "RUN.toml", tmp_path / "site.toml"
    run.write_text(
        f'[run]\nname = "r"\nnum_steps = 30\n[model]\npath = "{model}"\n'
        '[data]\npath = "d.jsonl"\ntask = "math_answer"\n'
        "[generation]\nmax_prompt_tokens = 64\nmax_completion_tokens = 200\nnum_replicas = 2\nmax_num_seqs = 16\n"
        "[admission]\ngroups_per_step = 4\ngroup_size = 4\nmax_staleness = 1\n[trainer]\ntoken_budget = 4096\n"
    )
    site.write_text('[trainer]\ngpu = "h100"\ngpus_per_node = 8\n[generation]\ngpu = "h100"\ngpus_per_node = 8\n')
    return str(run), str(site)


# ------------------------------------------------------------------------------------------------------------- formula

# Runs of real processes whose engines and trainer sleep: tests/ring/timed_runs.py, 24 rollouts of 28 tokens a step and
# 64 at most, 8 at once a generator, a token each 0.02 s; generators, S, and the seconds a step that were measured.
RECORDED = [(1, 1, 2.13), (1, 0, 3.77), (2, 1, 1.475), (2, 4, 1.114), (4, 2, 0.959)]
TIMED = ("generation.max_num_seqs=8", "admission.groups_per_step=6", "admission.group_size=4", "trainer.num_ranks=1")
# The trainer's rate, what happens between steps included, and the share of groups to be sampled again are of the first.
TIMED_RATES = Rates(
    engine_step_s=0.02, engine_sample_s=0.0, judge_s=0.0, trainer_tokens_per_s=24 * 33 / 0.915, between_steps_s=0.0,
    live_s=0.1, pause_s=0.0, save_s=0.0, prompt_tokens=5.0, mean_tokens=28.0, longest_tokens=64.0, dropped_share=0.2,
)  # fmt: skip


@pytest.mark.parametrize(("generators", "max_staleness", "measured_s"), RECORDED)
def test_recorded_runs_took_as_long_as_the_formula_says(generators, max_staleness, measured_s):
    pace = pace_of(config_of(*TIMED, "admission.step_parts=1"), TIMED_RATES, Split(generators, 1, max_staleness))
    assert pace.step_s == pytest.approx(measured_s, rel=0.08)


def test_each_stage_can_be_the_bottleneck_and_more_of_it_helps():
    config, split = config_of(*TIMED), Split(2, 1, 8)
    slow = {
        "generation": replace(TIMED_RATES, engine_step_s=1.0, longest_tokens=28.0),
        "rewards": replace(TIMED_RATES, judge_s=1.0),
        "training": replace(TIMED_RATES, trainer_tokens_per_s=10.0),
    }
    for stage, rates in slow.items():
        assert pace_of(config, rates, split).bottleneck == stage
    more = {"generation": Split(4, 1, 8), "training": Split(2, 2, 8)}
    for stage, other in more.items():
        both = [pace_of(config, slow[stage], each).step_s for each in (split, other)]
        assert both[1] == pytest.approx(both[0] / 2, rel=0.05)
    assert pace_of(config, TIMED_RATES, replace(split, max_staleness=0)).bottleneck == "staleness"


def test_more_places_than_groups_in_flight_are_not_used():
    """The bound limits what is in flight: of 24 rollouts at S = 0, eight generators decode three each."""
    config, rates = config_of(*TIMED), replace(TIMED_RATES, dropped_share=0.0)
    four, eight = (pace_of(config, rates, Split(number, 1, 0)).stages_s["generation"] for number in (4, 8))
    assert four == eight == pytest.approx(28 * 0.02)


def test_all_splits_have_as_many_gpus_and_the_best_is_balanced():
    """Four GPUs a rank and two a generator: of 16, two ranks and four generators if both stages cost the same."""
    config = config_of(*TIMED, "generation.num_replicas=6", "admission.max_staleness=8")
    rates = replace(TIMED_RATES, longest_tokens=28.0, dropped_share=0.0, trainer_tokens_per_s=24 * 33 / 0.84)
    splits = other_splits(config, rates, 4, 2)
    assert {(pace.split.data_parallel, pace.split.generators) for pace in splits} == {(1, 6), (2, 4), (3, 2)}
    assert splits[0].split == Split(4, 2, 8)


# ------------------------------------------------------------------------------------------------------------- figures


def test_a_measured_run_gives_every_figure(tmp_path):
    run = MeasuredRun(tmp_path / "measured")
    found = rates_of(config_of("generation.max_completion_tokens=30"), NO_GPUS, MODEL, run.layout, {})
    assert all(figure.source.startswith(f"{run.layout.root}, steps 4 to 39") for figure in found.values())
    assert {name: figure.value for name, figure in found.items()} == pytest.approx(
        {
            "engine_step_s": 0.0, "engine_sample_s": 0.003, "judge_s": 0.04, "trainer_tokens_per_s": 200 / 0.4 / 2,
            "between_steps_s": 0.2, "live_s": 1.0, "pause_s": 0.02, "save_s": 4.0, "prompt_tokens": 5.0,
            "mean_tokens": 20.0, "longest_tokens": 30.0, "dropped_share": 0.25,
        }
    )  # fmt: skip


def test_what_a_run_has_not_written_is_guessed(tmp_path):
    run = MeasuredRun(tmp_path / "measured", left_out="reward/zero_variance_share")
    found = rates_of(config_of(), NO_GPUS, MODEL, run.layout, {})
    assert found["dropped_share"] == Figure(0.2, "a guess: 0.2 anywhere")


def test_measured_comes_before_given_and_given_before_guessed(tmp_path):
    run, config = MeasuredRun(tmp_path / "measured"), config_of()
    site = site_of(rates={"live_s": 9.0, "trainer_tokens_per_s": 7.0})
    without, measured = (rates_of(config, site, MODEL, each, {}) for each in (None, run.layout))
    assert without["live_s"] == Figure(9.0, "given: rates.live_s of the site file")
    assert without["engine_step_s"].source == "a guess: data sheet of h100"
    assert measured["live_s"].value == pytest.approx(1.0)
    # The measured time between tokens is divided as the guess is.
    step, sample = (measured[name].value for name in ("engine_step_s", "engine_sample_s"))
    assert step + 10 * sample == pytest.approx(0.03)
    assert sample / step == pytest.approx(
        without["engine_sample_s"].value / without["engine_step_s"].value,
        rel=0.05,  # of other lengths
    )


def test_more_engine_ranks_than_key_heads_read_no_cache_faster():
    """A copy of a head lies on several of them (checks/memory/engine.py counts it so)."""
    model = MODEL | {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 1}
    long = ("generation.max_prompt_tokens=100000000", "trainer.token_budget=200000000")
    one, four = (
        rates_of(
            config_of(f"generation.tensor_parallel={ranks}", *long), site_of(), model, None, {},
        )["engine_sample_s"].value
        for ranks in (1, 4)
    )  # fmt: skip
    assert four == pytest.approx(one, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mean_tokens": 0.0}, "--mean-tokens 0: legal: 1 to generation.max_completion_tokens=52"),
        ({"mean_tokens": 53.0}, "--mean-tokens 53"),
        ({"dropped_share": 1.0}, "--dropped-share 1: legal: from 0, below 1"),
    ],
)
def test_an_option_without_a_legal_value_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        rates_of(config_of(), site_of(), MODEL, None, options)


def test_a_run_that_cannot_be_measured_is_refused_with_the_reason(tmp_path):
    run = MeasuredRun(tmp_path / "young", num_steps=9)
    with pytest.raises(ConfigError, match=r"9 steps are done; legal: a run of 10 or more"):
        rates_of(config_of(), site_of(), MODEL, run.layout, {})
    with pytest.raises(ConfigError, match="--from already provides them"):
        rates_of(config_of(), site_of(), MODEL, run.layout, {"mean_tokens": 3.0})


def test_what_nobody_knows_is_named():
    with pytest.raises(ConfigError, match=r"rates.engine_step_s: missing in the site file.*generation.gpu=None"):
        rates_of(config_of(), NO_GPUS, MODEL, None, {})


# ------------------------------------------------------------------------------------------------------------- command


def test_people_read_stages_bottleneck_and_what_is_guessed(files, capsys):
    assert main(["plan", *files, "--predict", "run.deterministic=true"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for said in ("12 figures are guessed", "a guess: data sheet of h100", "bottleneck  ", "hours of 3 GPUs",
                 "run.deterministic=true", "recommended "):  # fmt: skip
        assert said in text


def test_a_time_limit_too_short_for_a_step_is_warned_of_as_far_as_estimates_know(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    rates = {"trainer_tokens_per_s": 0.01, "engine_step_s": 0.01, "engine_sample_s": 0.001}
    config = config_of(f"model.path={tmp_path}", f"run.directory={tmp_path}/run")
    known = {"cluster": {"shared_directory": str(tmp_path)}, "rates": rates}

    def said(**sections: Any) -> list[str]:
        site = site_of(**(known | sections))
        layout = RunLayout(config.run_directory)
        return short_times(Submission(config, tmp_path / "site.toml", site, plan_jobs(config, site, layout)))

    (line,) = said()
    assert re.match(
        r"common.time='1:00:00': a step and its checkpoint take \d.*, by the rates of `rlhpc plan --pr", line
    )
    assert said(rates=rates | {"trainer_tokens_per_s": 1e6}) == []
    assert said(rates={}, trainer={"gpu": None}, generation={"gpu": None}) == [], "nothing to estimate it from"
    layout = RunLayout(config.run_directory)
    layout.root.mkdir()
    write_status(layout, phase="training", step=3, step_s=3000.0, save_s=700.0)
    (line,) = said(rates={}, trainer={"gpu": None}, generation={"gpu": None})
    assert "take 1 h 01 min, as measured in this run" in line


def test_programs_get_every_figure_with_its_source(files, tmp_path, capsys):
    run = MeasuredRun(tmp_path / "measured")
    assert main(["plan", *files, "--predict", "--from", str(run.layout.root), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["rates"]["live_s"]["value"] == pytest.approx(1.0)
    this = document["this_split"]
    assert document["seconds"] == pytest.approx(30 * this["step_s"])
    assert document["hours"] == pytest.approx((1 + 2) * document["seconds"] / 3600)
    assert this["step_s"] == max(stage["step_s"] for stage in document["stages"].values())
    assert this in document["other_splits"]
    assert document["recommended"]["step_s"] <= this["step_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "runs/first"], "--from: legal with --predict only"),
        (["--json"], "--json: legal with --predict only"),
        (["--predict", "--from", "nowhere"], "nowhere: not a run directory"),
        (["--predict", "model.path=nowhere"], "nowhere': no config.json there; its sizes are needed"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_a_line(files, words, said, capsys):
    assert main(["plan", *files, *words]) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
