"""The wrappers in slurm/ submit what `rlhpc submit` would, under sbatch and under bash, and say what they miss."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.private_slurm.cluster import DevCluster
from tests.ring.run_kit import make_lab
from tests.slurm.cluster_kit import directory_of, job_state, wait_state

ROOT = Path(__file__).parents[2]
WRAPPERS = ROOT / "slurm"
RUN_FILE = ROOT / "configs" / "demo.toml"
PLACEMENTS = ("hetjob", "jobs")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_wrapper_without_a_run_file_says_how_it_is_used(placement: str, tmp_path: Path) -> None:
    assert f"usage: sbatch slurm/{placement}.sbatch RUN.toml" in _refusal(placement, site=_site(tmp_path, placement))


def test_a_run_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = _refusal("hetjob", "no.toml", site=_site(tmp_path, "hetjob"))
    assert "no.toml: no such run file" in said


def test_a_site_file_that_is_not_there_is_named_with_the_remedy(tmp_path: Path) -> None:
    said = _refusal("hetjob", str(RUN_FILE), site=tmp_path / "site.toml")
    assert f"{tmp_path}/site.toml: no site file; copy slurm/sites/example.toml" in said


@pytest.mark.parametrize(("placement", "other"), [PLACEMENTS, PLACEMENTS[::-1]])
def test_the_wrapper_of_the_other_placement_is_refused(placement: str, other: str, tmp_path: Path) -> None:
    said = _refusal(placement, str(RUN_FILE), site=_site(tmp_path, other))
    assert f'says cluster.placement = "{other}": take slurm/{other}.sbatch' in said


def test_a_site_file_that_names_no_placement_is_one_for_the_heterogeneous_job(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[cluster]\n# placement = "jobs"\nshared_directory = "/shared"\n')
    assert 'says cluster.placement = "hetjob"' in _refusal("jobs", str(RUN_FILE), site=site)


def test_a_machine_without_rlhpc_is_told_where_it_is_looked_for(tmp_path: Path) -> None:
    shutil.copytree(WRAPPERS, tmp_path / "slurm")  # a checkout without an environment of its own
    site = _site(tmp_path, "hetjob")
    said = _refusal("hetjob", str(RUN_FILE), site=site, wrappers=tmp_path / "slurm", RLHPC="rlhpc-that-is-not-there")
    assert "rlhpc is not in PATH" in said


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_under_sbatch_and_bash_a_dry_run_prints_plan_and_scripts(
    slurm: DevCluster, tmp_path: Path, placement: str
) -> None:
    site, log = _site(tmp_path, placement), tmp_path / "log"
    wrapper, words = str(WRAPPERS / f"{placement}.sbatch"), (str(RUN_FILE), "--dry-run", *_overrides(tmp_path))
    lab = make_lab(tmp_path / "lab")
    words = (*words, f"model.path={lab.model}", f"data.path={lab.dataset}", "model.dtype=float32")
    environment = {**slurm.environment(), **_variables(site)}
    options = ("--parsable", "--partition=cpu", f"--chdir={tmp_path}", f"--output={log}")
    sbatch = [slurm.installation.program("sbatch"), *options, wrapper, *words]
    job = int(subprocess.run(sbatch, env=environment, check=True, capture_output=True, text=True).stdout)
    wait_state(slurm, job, "COMPLETED", "FAILED")
    by_bash = subprocess.run(["bash", wrapper, *words], env=environment, capture_output=True, text=True)
    assert by_bash.returncode == 0, by_bash.stderr
    assert log.read_text() == by_bash.stdout
    assert f"exec python3 -u -P -m launch.supervisor --run-dir {tmp_path}/run" in by_bash.stdout
    assert job_state(slurm, job) == "COMPLETED"


def test_a_refusal_under_sbatch_is_the_status_of_the_job_and_in_its_log(slurm: DevCluster, tmp_path: Path) -> None:
    log = directory_of(slurm).parent / "wrapper.txt"
    environment = {**slurm.environment(), **_variables(tmp_path / "site.toml")}
    options = ("--parsable", "--partition=cpu", f"--output={log}")
    sbatch = [slurm.installation.program("sbatch"), *options, str(WRAPPERS / "hetjob.sbatch"), str(RUN_FILE)]
    job = int(subprocess.run(sbatch, env=environment, check=True, capture_output=True, text=True).stdout)
    assert wait_state(slurm, job, "COMPLETED", "FAILED") == "FAILED"
    assert re.search(r"ExitCode=2:0", slurm.run("scontrol", "show", "job", str(job)))
    assert "no site file" in log.read_text()


def test_the_two_wrappers_differ_in_the_placement_alone() -> None:
    texts = [(WRAPPERS / f"{placement}.sbatch").read_text().splitlines() for placement in PLACEMENTS]
    different = [one for one, other in zip(*texts, strict=True) if one != other]
    assert [line.startswith(("#", "submit_run hetjob")) for line in different] == [True] * len(different)


def _site(directory: Path, placement: str) -> Path:
    path = directory / "site.toml"
    path.write_text(
        f'[cluster]\nshared_directory = "{directory}"\nplacement = "{placement}"\n[common]\ntime = 10\n'
        '[controller]\npartition = "cpu"\n[trainer]\npartition = "train"\n[generation]\npartition = "gen"\n'
    )
    return path


def _overrides(directory: Path) -> list[str]:
    return [f"run.directory={directory}/run", "transport.kind=tcp"]


def _variables(site: Path) -> dict[str, str]:
    return {"RLHPC_SITE": str(site), "RLHPC": str(Path(sys.executable).with_name("rlhpc"))}


def _refusal(placement: str, *words: str, site: Path, wrappers: Path = WRAPPERS, **more: str) -> str:
    """Run a wrapper that has to refuse; returns what it says, one line."""
    command = ["bash", str(wrappers / f"{placement}.sbatch"), *words]
    environment = {**os.environ, **_variables(site), **more}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.count("\n") == 1
    return done.stderr
