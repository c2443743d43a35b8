"""A run in an environment that unsettles Slurm's commands ends with exactly its own jobs.

Slurm is real, and hides its nodes and partitions (PrivateData).  Programs before its commands on PATH: squeue fails
every third time, sbatch hands its answer on late, and what scontrol shows is asked for as an ordinary user, since the
user whom a cluster belongs to is shown everything.  Where nobody else can be asked as, scontrol's refusals are those
that were recorded from Slurm 22.05.8.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.shape import default_shape
from tests.ring.run_kit import Lab
from tests.slurm.cluster_kit import MakeCluster
from tests.slurm.cluster_run import SlurmRun, assert_whole, environment_on
from tests.unsettling import UNSETTLING

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.ring, pytest.mark.timeout(600)]

NUM_STEPS = 30
LATE_S = 2
NOBODY = 65534
EXPORTS = "export " + " ".join(f"{key}={value}" for key, value in UNSETTLING.items())  # as a site's modules do
FAILS_EVERY_THIRD_TIME = """\
echo >> {here}/squeue.calls
if [ $(($(wc -l < {here}/squeue.calls) % 3)) = 0 ]; then
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1
fi
exec {real} "$@"
"""
ANSWERS_LATE = """\
case "$*" in *--test-only*) exec {real} "$@";; esac
said=$({real} "$@") || exit
echo "sbatch: your job was moved to another partition" >&2
sleep {late_s}; echo "$said"
"""
AS_NOBODY = 'case "$1" in show) exec setpriv --reuid={nobody} --regid={nobody} --clear-groups {real} "$@";; esac\n'
AS_RECORDED = """\
case "$2" in
partition) echo "slurm_load_partitions error: Access/permission denied" >&2; exit 1;;
node) echo "slurm_load_node error: Access/permission denied" >&2; exit 1;;
esac
"""
# Whatever a command of ours is called with, nobody else's options may be among it.
IS_CLEAN = 'env | grep -E "^(SQUEUE|SCANCEL|SACCT|SINFO|SBATCH|SRUN|SALLOC)_|^SLURM_CLUSTERS=" >> {here}/unclean\n'


@pytest.fixture
def hiding(make_cluster: MakeCluster) -> DevCluster:
    """A cluster that shows its nodes and partitions to nobody but its own user."""
    cluster = make_cluster(default_shape(1, 2, 1, gpus=2))
    cluster.layout.root.chmod(0o755)  # for slurm.conf, and munge's socket
    with cluster.layout.slurm_conf.open("a") as file:
        file.write("PrivateData=nodes,partitions\n")
    cluster.run("scontrol", "reconfigure")
    cluster.wait_answer()
    return cluster


@pytest.fixture
def commands(hiding: DevCluster, tmp_path: Path) -> Path:
    """A directory with programs in the place of Slurm's."""
    bodies = {
        "squeue": FAILS_EVERY_THIRD_TIME,
        "sbatch": ANSWERS_LATE,
        "scontrol": (AS_NOBODY if nobody_can_ask(hiding) else AS_RECORDED) + 'exec {real} "$@"\n',
    }
    directory = tmp_path / "bin"
    directory.mkdir(mode=0o755)
    for name, body in bodies.items():
        real = shutil.which(hiding.installation.program(name))
        text = (IS_CLEAN + body).format(here=tmp_path, real=real, late_s=LATE_S, nobody=NOBODY)
        (directory / name).write_text(f"#!/bin/bash\n{text}")
        (directory / name).chmod(0o755)
    return directory


def nobody_can_ask(cluster: DevCluster) -> bool:
    """Whether Slurm can be asked as another user, who may not see into the home directory where a private one lies."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    words += [cluster.installation.program("scontrol"), "--version"]
    environment = {**os.environ, **cluster.environment()}
    return subprocess.run(words, env=environment, capture_output=True, check=False).returncode == 0


def rlhpc(cluster: DevCluster, commands: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Any command, as somebody with such a shell gives it."""
    environment = {**environment_on(cluster), **UNSETTLING}
    environment["PATH"] = f"{commands}:{environment['PATH']}"  # a private Slurm has its own commands there
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", *words], capture_output=True, text=True, env=environment, timeout=120.0
    )


def test_a_run_in_an_unsettling_environment_ends_with_exactly_its_own_jobs(
    hiding: DevCluster, commands: Path, tmp_path: Path, lab: Lab
) -> None:
    # The generators come late, so that the controller looks for the jobs of roles that are missing.
    run = SlurmRun(
        hiding, lab, "unsettled", "jobs", run={"num_steps": NUM_STEPS}, generation={"num_replicas": 2},
        site={"prologue": {"commands": [EXPORTS]}, "generation": {"extra": ["--begin=now+25"], "gpus_per_node": 1},
              "trainer": {"gpus_per_node": 2}},
    )  # fmt: skip
    done = rlhpc(hiding, commands, "submit", str(run.run_file), str(run.site_file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trainer: your job was moved to another partition" in done.stdout
    jobs = run.jobs
    run.wait_complete()
    assert_whole(run, NUM_STEPS)
    known = {
        line.partition("_")[0] for line in hiding.run("squeue", "--noheader", "--states=all", "--format=%i").split()
    }
    assert known == set(map(str, jobs.values())), run.story()
    assert run.jobs == jobs
    assert not run.events("submit")
    assert len(run.attempts()) == 1, run.story()
    unclean = tmp_path / "unclean"
    assert unclean.read_text() == "", "an option of somebody's shell has reached a command"
    assert len((tmp_path / "squeue.calls").read_text().splitlines()) >= 3

    said = rlhpc(hiding, commands, "status", str(run.layout.root)).stdout
    assert "the run is complete" in said
    assert all(str(job) in said for job in jobs.values())


def test_doctor_passes_hidden_nodes_and_partitions_over(hiding: DevCluster, commands: Path, lab: Lab) -> None:
    run = SlurmRun(hiding, lab, "hidden", "jobs")
    said = rlhpc(hiding, commands, "doctor", str(run.site_file), str(run.run_file), "--quick").stdout
    assert "hides its nodes and partitions" in " ".join(said.split()), said
    rows = [line for line in said.splitlines() if line.startswith("fail")]
    assert not [row for row in rows if "slurm" in row or "partition" in row], said
