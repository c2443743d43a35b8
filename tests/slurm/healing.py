"""Restore a cluster to its initial state after any fault: all daemons and links up, no job, every node idle.

Input: a DevCluster.  Guarantees: afterwards the cluster is in its initial state, or RoleFailed says within seconds that
it cannot be restored, so that it can be replaced by a new one (DevCluster.stop(at_once=True)).
"""

from __future__ import annotations

import signal
import time

from launch.private_slurm.cluster import IDLE, DevCluster
from launch.private_slurm.processes import with_descendants
from rlhpc.base.patience import Deadline
from rlhpc.protocol.errors import RoleFailed

PATIENCE_S = 15.0  # a new cluster takes one or two
_ANSWER_S = 10.0
_UNAVAILABLE = ("down", "drain", "fail", "inval", "error", "maint", "unk")  # what a node's state begins with


def find_amiss(cluster: DevCluster) -> list[str]:
    """Differences from the initial state, one line each: dead daemons, jobs, processes of jobs, nodes, partitions."""
    names = [name for name in cluster.daemon_names if not cluster.daemons.is_alive(name)]
    if names or not cluster.is_reachable():
        return [f"{name} is dead" for name in names] or ["the controller does not answer"]
    jobs = cluster.run("squeue", "--noheader", "--format=%i %T", timeout_s=_ANSWER_S).splitlines()
    rows = _rows(cluster)
    nodes = {node: state.removesuffix("-") for node, state, _, _ in rows}
    closed = sorted({partition for _, _, partition, available in rows if available != "up"})
    strays = [] if jobs else cluster.job_processes()
    return [
        *(f"job {job.strip()}" for job in jobs),
        *(f"process {stray.pid} of a job that has ended" for stray in strays),
        *(f"node {node} is {nodes.get(node)}" for node in cluster.shape.nodes if nodes.get(node) not in IDLE),
        *(f"partition {partition} is closed" for partition in closed),
    ]


def restore(cluster: DevCluster, patience_s: float = PATIENCE_S) -> list[str]:
    """Undo every fault and end every job; returns the faults found.  Raises RoleFailed: it does not recover."""
    deadline = Deadline(patience_s)
    amiss = _ask(cluster)
    if not amiss:
        return []
    for found in cluster.daemons.recorded().values():
        found.send(signal.SIGCONT)
    cluster.revive(max(1.0, deadline.left_s))
    if cluster.network:
        for node in cluster.shape.nodes:
            cluster.network.forward(node, is_cut=False)
    cluster.wait_answer(max(1.0, deadline.left_s))
    cluster.cancel_all()
    while left := _ask(cluster):
        if deadline.is_over:
            raise RoleFailed(f"{cluster.layout.root}: not restored after {patience_s:.0f} s: {', '.join(left)}")
        _end_processes(cluster)
        _open(cluster)
        time.sleep(0.1)
    return amiss


def _ask(cluster: DevCluster) -> list[str]:
    try:
        return find_amiss(cluster)
    except RoleFailed as error:  # the controller is alive and does not answer in time
        return [str(error)]


def _end_processes(cluster: DevCluster) -> None:
    """Kill cancelled jobs at once instead of waiting KillWait seconds."""
    for each in with_descendants(cluster.job_processes()):
        each.send(signal.SIGKILL)


def _open(cluster: DevCluster) -> None:
    """Reset states set on nodes and partitions: DOWN, DRAIN, INACTIVE."""
    for node, state, partition, available in _rows(cluster):
        if state.startswith(_UNAVAILABLE):
            cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False, timeout_s=_ANSWER_S)
        if available != "up":
            words = ("update", f"PartitionName={partition}", "State=UP")
            cluster.run("scontrol", *words, check=False, timeout_s=_ANSWER_S)


def _rows(cluster: DevCluster) -> list[list[str]]:
    """Node, its state, a partition that it is in, and whether that is up; a line for each pair."""
    lines = cluster.run("sinfo", "--noheader", "--Node", "--format=%N %T %R %a", timeout_s=_ANSWER_S).splitlines()
    return [line.split() for line in lines if len(line.split()) == 4]
