"""Nodes with networks of their own: they meet over TCP, a link can be cut and healed, and nothing stays behind."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from launch.private_slurm import processes as namespaces
from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.packages import Installation
from launch.private_slurm.processes import process, wait_gone
from launch.private_slurm.shape import ClusterShape, default_shape
from rlhpc.protocol.errors import ConfigError
from tests.slurm import faults
from tests.slurm.cluster_kit import (
    MakeCluster,
    all_processes,
    directory_of,
    job_node,
    job_output,
    submit,
    wait_state,
    wait_until,
)

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SHAPE = replace(default_shape(train=0, gen=2, cpu=1, gpus=2), has_networks=True)
# Answers every connection with the name of its node.
SERVER = """
import socket, sys
with socket.create_server((socket.gethostbyname(socket.gethostname()), 0)) as server:
    open(sys.argv[1] + ".part", "w").write("%s %d" % server.getsockname())
    __import__("os").rename(sys.argv[1] + ".part", sys.argv[1])
    while True:
        server.accept()[0].sendall(socket.gethostname().encode())
"""
CLIENT = """
import socket, sys
print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).recv(100).decode())
"""
NetworkedCluster = Callable[[], DevCluster]


@pytest.fixture
def networked(make_cluster: MakeCluster) -> NetworkedCluster:
    try:
        namespaces.require()
    except ConfigError as error:
        pytest.skip(str(error))
    return lambda: make_cluster(SHAPE)


def test_a_cluster_with_networks_starts_and_ends_without_a_trace(
    networked: NetworkedCluster,
) -> None:
    cluster = networked()
    assert len(_traces(cluster)) == 1
    submit(cluster, "sleep 300", "--partition=gen")
    processes = all_processes(cluster)
    cluster.stop()
    assert not _traces(cluster)
    assert not [each for each in processes if each.is_alive]
    assert not all_processes(cluster)


def test_a_cluster_all_of_whose_processes_are_killed_leaves_no_interface(networked: NetworkedCluster) -> None:
    cluster = networked()
    processes = all_processes(cluster)
    for each in processes:
        each.send(signal.SIGKILL)
    assert wait_gone(processes, 5.0)
    wait_until(lambda: not _traces(cluster), "the kernel has taken the namespaces down")


def test_a_node_finds_its_own_address_by_its_own_name(networked: NetworkedCluster) -> None:
    cluster = networked()
    assert cluster.network is not None
    ask = "import socket; from rlhpc.transport.sockets import host_address; print(socket.gethostname(), host_address())"
    command = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", ask)
    said = cluster.run("srun", "--partition=gen", "--nodes=2", *command).splitlines()
    assert sorted(said) == [f"{node} {SHAPE.address(node, cluster.network.subnet)}" for node in ("g0", "g1")]


def test_jobs_on_two_nodes_and_this_machine_meet_over_tcp(networked: NetworkedCluster) -> None:
    cluster = networked()
    host, port = _serve(cluster, "--nodelist=g0")
    client = _python(CLIENT, host, port)
    assert cluster.run("srun", "--partition=gen", "--nodelist=g1", "sh", "-c", client) == "g0\n"
    assert cluster.run("srun", "--partition=cpu", "sh", "-c", client) == "g0\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", host, port])
        exec(CLIENT)


def test_a_batch_step_on_one_node_gets_the_output_of_steps_on_the_others(networked: NetworkedCluster) -> None:
    cluster = networked()
    script = "hostname; srun --het-group=1 --nodes=2 --ntasks=2 sh -c 'cat; hostname' < /dev/null"
    job = submit(cluster, script, "--partition=cpu", ":", "--partition=gen", "--nodes=2", "--mem=16M")
    wait_state(cluster, job, "COMPLETED")
    assert sorted(job_output(cluster, job).split()) == ["c0", "g0", "g1"]


def test_a_job_behind_a_cut_link_runs_twice_until_the_link_is_healed(networked: NetworkedCluster) -> None:
    cluster = networked()
    out = directory_of(cluster)
    # Every life counts in a file of its own: two files that grow are a split brain.
    script = (
        "echo $$ > pid-$SLURMD_NODENAME; n=0; while sleep 0.2; do n=$((n+1)); echo $n > life-$SLURMD_NODENAME; done"
    )
    job = submit(cluster, script, "--partition=gen")
    wait_state(cluster, job, "RUNNING")
    first = job_node(cluster, job)
    other = {"g0": "g1", "g1": "g0"}[first]
    wait_until((out / f"life-{first}").exists, "it runs")
    old = process(_number(out / f"pid-{first}"))
    assert old is not None
    faults.cut(cluster, first)
    wait_until(lambda: cluster.node_states()[first].startswith("down"), "noticed")
    wait_until((out / f"life-{other}").exists, "it runs again")
    assert job_node(cluster, job) == other
    assert old.is_alive
    before = {node: _number(out / f"life-{node}") for node in (first, other)}
    wait_until(lambda: all(_number(out / f"life-{node}") > count for node, count in before.items()), "both count")
    faults.heal(cluster, first)
    faults.declare_up(cluster, first)
    wait_until(lambda: not old.is_alive, "the old life is ended")
    cluster.wait_up()
    wait_until(lambda: not cluster.job_processes(first), "what it had started is ended")
    assert cluster.job_processes(other)


def test_nothing_passes_a_cut_link_in_either_direction(networked: NetworkedCluster) -> None:
    cluster = networked()
    host, port = _serve(cluster, "--nodelist=g0")
    client = _python(CLIENT, host, port)
    faults.cut(cluster, "g0")
    said = cluster.run("srun", "--partition=gen", "--nodelist=g1", "sh", "-c", f"{client} 2>&1 | tail -1; true")
    assert "timed out" in said or "No route" in said
    faults.heal(cluster, "g0")
    ask = ("srun", "--partition=gen", "--nodelist=g1", "sh", "-c", client)
    wait_until(lambda: cluster.run(*ask, check=False) == "g0\n", "it answers again")


@pytest.mark.parametrize("victim", ["network", "network-g0"])
def test_a_dead_network_is_mended(networked: NetworkedCluster, victim: str) -> None:
    cluster = networked()
    cluster.daemons.kill(victim)
    repaired = cluster.repair()
    assert repaired == ([victim] if victim == "network" else [victim, "slurmd-g0"])
    cluster.wait_idle()
    host, port = _serve(cluster, "--nodelist=g0")
    assert cluster.run("srun", "--partition=gen", "--nodelist=g1", "sh", "-c", _python(CLIENT, host, port)) == "g0\n"


def test_two_networks_at_once_have_different_subnets(networked: NetworkedCluster) -> None:
    one, other = networked(), networked()
    assert one.network is not None
    assert other.network is not None
    assert one.network.subnet != other.network.subnet
    other.stop()
    assert one.run("srun", "--partition=gen", "hostname").strip() in ("g0", "g1")


def test_a_cluster_without_networks_has_no_link_to_cut(slurm: DevCluster) -> None:
    with pytest.raises(ConfigError, match="no separate networks"):
        faults.cut(slurm, "g0")


def test_networks_are_refused_without_root_or_ip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ClusterShape(SHAPE.groups, SHAPE.partitions, has_networks=True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"need root|need ip"):
        DevCluster.create(tmp_path / "c", shape, Installation())
    assert not (tmp_path / "c").exists()


def _serve(cluster: DevCluster, *options: str) -> tuple[str, str]:
    """Start a job that listens; returns its address and port."""
    ready = directory_of(cluster) / "ready"
    submit(cluster, f"exec {_python(SERVER, str(ready))}", "--partition=gen", *options)
    wait_until(ready.exists, "it listens")
    host, port = ready.read_text(encoding="ascii").split()
    return host, port


def _python(program: str, *words: str) -> str:
    return shlex.join([sys.executable, "-c", program, *words])


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii").strip() or 0)


def _traces(cluster: DevCluster) -> list[str]:
    """Interfaces and mounts of this machine that are the cluster's."""
    root = str(cluster.layout.root)
    interfaces = []
    for alias in Path("/sys/class/net").glob("*/ifalias"):
        with suppress(OSError):  # it has gone meanwhile
            interfaces += [alias.parent.name] if root in alias.read_text(encoding="utf-8") else []
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return [*interfaces, *(line for line in mounts if root in line)]
