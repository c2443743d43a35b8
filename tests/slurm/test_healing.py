"""A cluster that tests share is whole for the next test, whatever the last one did to it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launch.private_slurm import processes as namespaces
from launch.private_slurm.packages import Installation
from launch.private_slurm.shape import default_shape
from rlhpc.protocol.errors import ConfigError
from tests.slurm import faults
from tests.slurm.cluster_kit import PATIENCE_S, directory_of, job_node, logs_shown, submit, wait_state, wait_until
from tests.slurm.healing import find_amiss
from tests.slurm.stand import Stand, new_cluster

pytestmark = pytest.mark.long

SHAPE = default_shape(1, 2, 1, gpus=1)


@pytest.fixture
def stand(slurm_installation: Installation) -> Iterator[Stand]:
    with Stand(lambda: new_cluster(SHAPE, slurm_installation)) as made:
        yield made


def test_a_cluster_that_is_whole_is_left_alone(stand: Stand) -> None:
    before = stand.cluster.daemons.recorded()
    assert stand.heal() == []
    assert stand.cluster.daemons.recorded() == before


def test_jobs_processes_nodes_and_partitions_are_as_in_the_beginning_in_the_same_cluster(stand: Stand) -> None:
    cluster = stand.cluster
    astray = "setsid sh -c 'trap \"\" TERM; touch astray; exec sleep 300' & \nexec sleep 300"
    lost = submit(cluster, astray, "--partition=gen")
    waiting = submit(cluster, "true", "--partition=cpu", "--begin=now+1hour")
    whole_node = submit(cluster, "sleep 300", "--partition=train", "--exclusive")
    for job in (lost, whole_node):
        wait_state(cluster, job, "RUNNING")
    wait_until((directory_of(cluster) / "astray").exists, "it has left its session")
    faults.crash_node(cluster, job_node(cluster, whole_node))
    faults.declare_down(cluster, "t0")
    cluster.run("scontrol", "update", "NodeName=c0", "State=DRAIN", "Reason=test")
    cluster.run("scontrol", "update", "PartitionName=gen", "State=INACTIVE")
    amiss = stand.heal(PATIENCE_S)
    assert any("slurmd-t0 is dead" in each for each in amiss)
    assert stand.cluster is cluster
    assert find_amiss(cluster) == []
    assert not cluster.job_processes()
    for job in (lost, waiting, whole_node):
        assert not cluster.run("squeue", "--noheader", f"--jobs={job}")
    for partition in ("gen", "train", "cpu"):
        wait_state(cluster, submit(cluster, "true", f"--partition={partition}"), "COMPLETED")


@pytest.mark.parametrize("is_hung", [False, True])
def test_a_controller_that_is_dead_or_hangs_is_back(stand: Stand, is_hung: bool) -> None:
    cluster = stand.cluster
    submit(cluster, "sleep 300", "--partition=gen")
    if is_hung:
        found = cluster.daemons.find("slurmctld")
        assert found is not None
        found.send(signal.SIGSTOP)
    else:
        faults.stop_controller(cluster)
    assert stand.heal(PATIENCE_S)
    assert stand.cluster is cluster
    assert find_amiss(cluster) == []


def test_a_cable_that_was_pulled_is_back_in_the_switch(slurm_installation: Installation) -> None:
    try:
        namespaces.require()
    except ConfigError as error:
        pytest.skip(str(error))
    shape = replace(default_shape(0, 2, 0, gpus=0), has_networks=True)
    with Stand(lambda: new_cluster(shape, slurm_installation)) as stand:
        cluster = stand.cluster
        submit(cluster, "sleep 300", "--partition=gen", "--nodelist=g0")
        faults.cut(cluster, "g0")
        faults.declare_down(cluster, "g0")
        assert stand.heal(PATIENCE_S)
        assert stand.cluster is cluster
        with logs_shown(cluster):
            names = cluster.run("srun", "--partition=gen", "--nodes=2", "hostname").split()
        assert sorted(names) == ["g0", "g1"]


def test_a_cluster_beyond_healing_is_replaced_by_a_new_one_without_a_trace(stand: Stand) -> None:
    broken = stand.cluster
    submit(broken, "sleep 300", "--partition=gen")
    processes = [*broken.daemons.recorded().values()]
    # A configuration that slurmd refuses: it ends by itself as often as it is started.
    broken.layout.slurm_conf.write_text("NoSuchKey=1\n" + broken.layout.slurm_conf.read_text(encoding="utf-8"))
    faults.kill_node_daemon(broken, "g0")
    amiss = stand.heal(3.0)
    assert amiss[0].startswith("replaced by a new cluster")
    assert not Path(broken.layout.root).exists()
    assert not [each for each in processes if each.is_alive]
    assert stand.cluster is not broken
    assert find_amiss(stand.cluster) == []
    wait_state(stand.cluster, submit(stand.cluster, "true", "--partition=gen"), "COMPLETED")
