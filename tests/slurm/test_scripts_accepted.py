"""Slurm itself accepts every script of every run file that we ship on every site file that we ship.

One cluster has the partitions, node sizes, GPU types, features, accounts and QOS of the four sites together, and says
no to what it lacks.  The scripts go to `sbatch --test-only` as they are: nothing in them is changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.plan.jobs import Elastic, JobPlan, plan_elastic, plan_jobs
from launch.plan.script import render_scripts, shared_layout
from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.packages import SlurmMissing, obtain
from launch.private_slurm.processes import slurm_user
from launch.private_slurm.shape import ClusterShape, NodeGroup, Partition
from rlhpc.protocol.errors import RoleFailed
from tests.slurm.cluster_kit import MakeCluster
from tests.unit.launch.site_kit import PAIRS, Pair

GIB = 1024
WEEK = 7 * 24 * 60  # min
GROUPS = (
    NodeGroup("cpu", 1, cpus=64, memory_mib=256 * GIB),
    NodeGroup("ex", 8, gpus=8, gpu_type="h100", cpus=96, memory_mib=1024 * GIB),
    NodeGroup("venv", 16, gpus=4, gpu_type="a100", cpus=64, memory_mib=512 * GIB),
    NodeGroup("ndr", 16, gpus=4, gpu_type="h100", cpus=96, memory_mib=768 * GIB, features=("ib_ndr", "nvme")),
    NodeGroup("ada", 4, gpus=8, gpu_type="l40s", cpus=64, memory_mib=512 * GIB),
    NodeGroup("hop", 8, gpus=8, gpu_type="h200", cpus=128, memory_mib=2048 * GIB, features=("h200",)),
    NodeGroup("amp", 1, gpus=8, gpu_type="a100", cpus=128, memory_mib=1024 * GIB, features=("a100-80",)),
)
PARTITIONS = (
    Partition("cpu", ("cpu",), max_minutes=WEEK),
    Partition("standard", ("cpu",), max_minutes=WEEK),
    Partition("shared", ("cpu",), max_minutes=WEEK),
    Partition("h100", ("ex", "ndr"), max_minutes=WEEK),  # of two sites; the one that means `ndr` asks for its feature
    Partition("l40s", ("ada",), max_minutes=WEEK),
    Partition("gpu-a100", ("venv",), max_minutes=WEEK),
    Partition("gpu", ("hop",), max_minutes=WEEK),
    Partition("gpu-scavenge", ("hop", "amp"), tier=1, is_preemptible=True, max_minutes=WEEK),
)
ACCOUNTS = "project,nlp-group,rl-2026,bob"


# Pair, script, a word of it, and one in its place that no cluster of these takes.
WRONG = (
    ("gsm8k@conda-lustre", "generation.sbatch", "--partition=gpu-scavenge", "--partition=gpus"),
    ("gsm8k@conda-lustre", "generation.sbatch", "--account=bob", "--account=bobby"),
    ("gsm8k@conda-lustre", "generation.sbatch", "--qos=scavenge", "--qos=scavenger"),
    ("gsm8k@conda-lustre", "generation.sbatch", "--constraint=a100-80|h200", "--constraint=a100-40"),
    ("gsm8k@conda-lustre", "generation.sbatch", "--gpus-per-task=1", "--gpus-per-task=h100:1"),
    ("gsm8k@conda-lustre", "generation.sbatch", "--time=8:00:00", "--time=8-00:00:00"),
    ("gsm8k@conda-lustre", "generation.sbatch", "--mem=", "--mem=9"),
    ("qwen2.5-72b-tp8-pp4@conda-lustre", "trainer.sbatch", "--nodes=", "--nodes=2"),
    ("gsm8k@apptainer", "hetjob.sbatch", "--gres=gpu:l40s:", "--gres=gpu:l40:"),
)


def test_slurm_accepts_every_script_that_we_plan_and_none_with_a_wrong_word(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = _four_sites(make_cluster)
    num_scripts = sum(_write(plan, tmp_path / str(pair)) for pair in PAIRS for plan in _plans(pair))
    scripts = list(tmp_path.glob("*/*.sbatch"))
    assert len(scripts) == num_scripts
    assert {path: said for path in scripts if (said := _refusal(cluster, path))} == {}
    assert [
        wrong
        for pair, name, right, wrong in WRONG
        if not _refusal(cluster, _spoilt(tmp_path, pair, name, right, wrong))
    ] == []


def _spoilt(directory: Path, pair: str, name: str, right: str, wrong: str) -> Path:
    text = (directory / pair / name).read_text(encoding="utf-8")
    assert f"#SBATCH {right}" in text
    path = directory / "spoilt.sbatch"
    path.write_text(text.replace(f"#SBATCH {right}", f"#SBATCH {wrong}"), encoding="utf-8")
    return path


def _four_sites(make_cluster: MakeCluster) -> DevCluster:
    try:
        installation = obtain(has_accounting=True)
    except SlurmMissing as error:
        pytest.skip(str(error))
    cluster = make_cluster(ClusterShape(GROUPS, PARTITIONS, has_accounting=True, enforces_limits=True), installation)
    for words in (
        ("add", "qos", "scavenge"),
        ("add", "account", ACCOUNTS),
        ("add", "user", slurm_user(), f"account={ACCOUNTS}", "qos=normal,scavenge"),
    ):
        cluster.run("sacctmgr", "--immediate", *words)
    return cluster


def _plans(pair: Pair) -> list[JobPlan]:
    """The jobs of a run, and those of generators that join it."""
    config, site = pair.config, pair.site
    layout = shared_layout(config, site)
    plan = plan_jobs(config, site, layout)
    added = Elastic("generators", num_replicas=2, first_replica=4, placement=plan.placement)
    return [plan, plan_elastic(config, site, layout, added)]


def _write(plan: JobPlan, directory: Path) -> int:
    """Write the scripts of a plan; returns how many."""
    directory.mkdir(exist_ok=True)
    scripts = render_scripts(plan)
    for name, text in scripts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return len(scripts)


def _refusal(cluster: DevCluster, script: Path) -> str:
    """What sbatch says against a script, also when all nodes are up; "": nothing."""
    try:
        cluster.run("sbatch", "--test-only", str(script))
    except RoleFailed:
        try:
            cluster.wait_idle(120.0)  # on a busy machine a node may have been silent for a moment
            cluster.run("sbatch", "--test-only", str(script))
        except RoleFailed as error:
            return str(error)
    return ""
