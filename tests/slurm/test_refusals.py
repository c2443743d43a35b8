"""What the cluster would refuse is refused before submission, with key, value and what is legal: a real slurmctld."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.doctor.slurm_plan import find_unfit, refuse_unfit, try_components
from launch.plan.jobs import JobPlan
from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.packages import SlurmMissing, obtain
from launch.private_slurm.shape import default_shape
from launch.slurm.cluster_facts import ask_cluster
from launch.slurm.commands import SlurmError
from rlhpc.protocol.errors import ConfigError
from tests.slurm import faults
from tests.slurm.cluster_kit import MakeCluster, known_jobs, seconds_of
from tests.slurm.doctor_kit import plan_of, turned_to
from tests.slurm.stand import discard, new_cluster

NO_GPUS = {"partition": "train", "gpus_per_node": None, "gres_type": None, "memory_gib_per_gpu": None}


def refusal(cluster: DevCluster, plan: JobPlan) -> list[str]:
    with turned_to(cluster), pytest.raises(ConfigError) as caught:
        refuse_unfit(plan)
    return str(caught.value).splitlines()


def test_a_run_that_fits_is_taken_in_less_than_two_seconds_and_nothing_is_submitted(
    slurm: DevCluster, tmp_path: Path
) -> None:
    before = known_jobs(slurm)
    with turned_to(slurm):
        for _ in range(3):
            took_s = seconds_of(lambda: refuse_unfit(plan_of(tmp_path)))
            one_question_s = seconds_of(lambda: slurm.run("sinfo"))
            if took_s < 2 + 10 * one_question_s:  # on a busy machine its questions alone take that
                break
        assert took_s < 2 + 10 * one_question_s
        verdicts = {finding.key: finding.verdict for finding in find_unfit(plan_of(tmp_path), ask_cluster())}
    assert set(verdicts.values()) == {"pass"}
    assert known_jobs(slurm) <= before  # Slurm may have forgotten old ones meanwhile


@pytest.mark.parametrize(
    ("trainer", "told"),
    [({"partition": "trian"}, "partition='trian': no such partition (did you mean train?); legal: "),
     ({"reservation": "course"}, "reservation='course': sbatch refuses it: "),
     ({"gres_type": "h100"}, "gres_type='h100': nodes of partition 'train' have no such GPUs; legal: fake"),
     ({"cpus_per_gpu": 10_000}, "cpus_per_gpu='10000': 1 task needs 10000 cores of one node, and nodes of partition"),
     ({"memory_gib_per_gpu": 10_000}, "memory_gib_per_gpu='10000': 1 task needs 10000 GiB of memory of one node"),
     ({"constraint": "infiniband"}, "constraint='infiniband': no such features in partition 'train'; legal: "),
     ({"partition": "cpu", "gres_type": None},
      "gpus_per_node='1 GPU': nodes of partition 'cpu' have none; legal: another partition"),
     ({"extra": ["--licenses=matlab:1"]}, "='sbatch --test-only': sbatch refuses it: ")],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)  # fmt: skip
def test_what_a_component_asks_for_and_nothing_has_is_refused_by_its_key_or_in_sbatchs_words(
    slurm: DevCluster, tmp_path: Path, trainer: dict[str, Any], told: str
) -> None:
    (line,) = refusal(slurm, plan_of(tmp_path, trainer=trainer))
    assert line.startswith(f"trainer{told if told.startswith('=') else f'.{told}'}")
    assert ("; it was asked for " in line and "--licenses=matlab:1" in line) == told.startswith("=")


def test_ranks_without_gpus_per_node_that_fill_no_node_are_refused_with_the_key(
    slurm: DevCluster, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, "trainer.num_ranks=16", "trainer.device=cpu", trainer=NO_GPUS)
    (line,) = refusal(slurm, plan)
    assert line == (
        "trainer.cpus_per_gpu='4': 16 tasks need 64 cores of one node, and nodes of partition 'train' have 16 at most; "
        "without trainer.gpus_per_node all 16 tasks are on one node, without GPUs; legal: at most 1"
    )


def test_more_gpus_than_a_node_has_are_refused(slurm: DevCluster, tmp_path: Path) -> None:
    wide = plan_of(tmp_path, "generation.num_replicas=8", generation={"gpus_per_node": 8, "cpus_per_gpu": 1})
    (line,) = refusal(slurm, wide)
    assert line.startswith("generation.gpus_per_node='8 GPUs': nodes of partition 'gen' have ")
    assert line.endswith(" or another partition")


def test_an_unknown_account_is_refused(slurm_accounts: DevCluster, tmp_path: Path) -> None:
    (line,) = refusal(slurm_accounts, plan_of(tmp_path, common={"account": "nobody"}))
    assert line.startswith("common.account='nobody': no account of yours; legal: lab")
    (line,) = refusal(slurm_accounts, plan_of(tmp_path, common={"account": "lab"}, trainer={"account": "nobody"}))
    assert line.startswith("trainer.account='nobody': no account of yours; legal: lab")
    with turned_to(slurm_accounts):
        refuse_unfit(plan_of(tmp_path, common={"account": "lab"}))


def test_an_account_that_the_partition_does_not_name_is_a_warning_where_sbatch_takes_it(
    slurm_accounts: DevCluster, tmp_path: Path
) -> None:
    """Slurm 22.05 takes such a job unless it enforces limits; a newer one takes accounts below the named one."""
    plan = plan_of(tmp_path, common={"account": "lab"})
    slurm_accounts.run("scontrol", "update", "PartitionName=train", "AllowAccounts=university")
    try:
        with turned_to(slurm_accounts):
            refuse_unfit(plan)
            warned = [finding for finding in find_unfit(plan, ask_cluster()) if finding.key == "common.account"]
    finally:
        slurm_accounts.run("scontrol", "update", "PartitionName=train", "AllowAccounts=ALL")
    assert [finding.verdict for finding in warned] == ["warn"]
    assert warned[0].text == (
        "partition 'train' does not accept this account by its name: it may never start (here of trainer)"
    )


def test_an_account_that_sbatch_refuses_is_refused(make_cluster: MakeCluster, tmp_path: Path) -> None:
    try:
        installation = obtain(has_accounting=True)
    except SlurmMissing as error:
        pytest.skip(str(error))
    shape = replace(default_shape(1, 1, 1, gpus=2), has_accounting=True, enforces_limits=True)
    cluster = make_cluster(shape, installation)
    cluster.run("sacctmgr", "--immediate", "add", "account", "university")  # newer releases pass over what is not there
    cluster.run("scontrol", "update", "PartitionName=train", "AllowAccounts=university")
    (line,) = refusal(cluster, plan_of(tmp_path, common={"account": "lab"}))
    assert line.startswith("trainer='sbatch --test-only': sbatch refuses it: ")


@pytest.mark.parametrize(
    ("change", "line"),
    [("qos normal set MaxWall=5", "common.time='0:10:00': QOS 'normal', its default, allows 0:05:00"),
     ("qos normal set MaxTRESPerUser=gres/gpu=0",
      "trainer.gpus_per_node='1 GPU': QOS 'normal', its default, allows 0 GPUs per user"),
     ("qos normal set MinTRES=cpu=20",
      "trainer.cpus_per_gpu='4 cores': QOS 'normal', its default, takes only jobs of 20 cores or more"),
     ("qos narrow set MaxWall=6",
      "common.time='0:10:00': QOS 'narrow' of partition 'train' allows 0:06:00 (here of trainer)"),
     ("account lab set MaxWall=7", "common.time='0:10:00': account 'lab' allows 0:07:00"),
     ("account above set GrpTRES=node=0", "trainer.nodes='1 node': account 'above' allows 0 nodes in all"),
     ("qos normal set MaxJobsPerUser=2",
      "controller.qos='normal': controller + trainer + generation need 3 running jobs at the same time, and QOS "
      "'normal', its default, allows 2 running jobs per user")],
    ids=lambda each: each.split(" set ")[-1],
)  # fmt: skip
def test_a_limit_that_holds_without_a_qos_in_the_site_file_is_refused_although_slurm_takes_the_job(
    limited: DevCluster, tmp_path: Path, change: str, line: str
) -> None:
    """Such a job is pending for ever."""
    plan = plan_of(tmp_path, common={"account": "lab", "time": "0:10:00"})
    where = change.partition(" set ")[0]
    with turned_to(limited):
        refuse_unfit(plan)
        limited.run("sacctmgr", "--immediate", "modify", *change.split())
        try:
            assert {finding.verdict for finding in try_components(plan, ask_cluster())} == {"pass"}
            assert line in [each.partition("; legal: ")[0] for each in refusal(limited, plan)]
        finally:
            names = (word.partition("=")[0] for word in change.partition(" set ")[2].split())
            cleared = [f"{name}={'gres/gpu=-1,cpu=-1,node=-1' if 'TRES' in name else -1}" for name in names]
            limited.run("sacctmgr", "--immediate", "modify", *where.split(), "set", *cleared)


@pytest.fixture(scope="module")
def limited() -> Iterator[DevCluster]:
    """A cluster that enforces limits: account `lab` below `above`, the partition `train` with a QOS `narrow`."""
    try:
        installation = obtain(has_accounting=True)
    except SlurmMissing as error:
        pytest.skip(str(error))
    cluster = new_cluster(
        replace(default_shape(1, 1, 1, gpus=2), has_accounting=True, enforces_limits=True), installation
    )
    try:
        cluster.start()
        for words in ("add qos narrow", "add account above", "modify account lab set parent=above"):
            cluster.run("sacctmgr", "--immediate", *words.split())
        cluster.run("scontrol", "update", "PartitionName=train", "QoS=narrow")
        yield cluster
    finally:
        discard(cluster)


def test_a_time_above_the_partitions_is_refused_although_slurm_would_take_it(slurm: DevCluster, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, common={"time": "2:00:00"})
    with turned_to(slurm):
        assert {finding.verdict for finding in try_components(plan, ask_cluster())} == {"pass"}
    lines = refusal(slurm, plan)
    assert [line for line in lines if line.startswith("common.time='2:00:00': partition 'train' allows 1:00:00")]
    assert all(line.endswith("; legal: at most '1:00:00'") for line in lines)


def test_components_that_want_more_nodes_together_than_there_are_are_refused(slurm: DevCluster, tmp_path: Path) -> None:
    """Slurm takes such a job, and lets it wait for ever: each component alone would fit."""
    plan = plan_of(tmp_path, "trainer.num_ranks=2", trainer={"nodes": 2}, generation={"partition": "train"})
    with turned_to(slurm):
        assert {finding.verdict for finding in try_components(plan, ask_cluster())} == {"pass"}
    lines = refusal(slurm, plan)
    assert len(lines) == 1
    assert "trainer (2) + generation (1) need 3, there are 2" in lines[0]
    beside = plan_of(tmp_path, controller={"partition": "cpu"}, rewards={"partition": "cpu"})
    assert "controller (1) + rewards (1) need 2, there are 1" in refusal(slurm, beside)[0]


def test_a_directory_that_is_not_there_is_refused(slurm: DevCluster, tmp_path: Path) -> None:
    assert refusal(slurm, plan_of(tmp_path / "none"))[0].endswith("create it, or correct the key")


def test_drained_nodes_make_a_job_wait_and_are_not_a_refusal(slurm: DevCluster, tmp_path: Path) -> None:
    slurm.run("scontrol", "update", "NodeName=c0", "State=DRAIN", "Reason=test")
    try:
        with turned_to(slurm):
            refuse_unfit(plan_of(tmp_path))
            findings = find_unfit(plan_of(tmp_path), ask_cluster())
    finally:
        slurm.run("scontrol", "update", "NodeName=c0", "State=RESUME")
        slurm.wait_idle()
    assert [finding.key for finding in findings if finding.verdict == "warn"] == ["controller"]


@pytest.mark.long
def test_a_controller_that_does_not_answer_is_said(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster()
    faults.stop_controller(cluster)
    with turned_to(cluster), pytest.raises(SlurmError, match="slurmctld does not answer, so nothing could be checked"):
        ask_cluster()
