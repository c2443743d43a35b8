"""Faults to inject into a cluster: a node without power or network, a dead daemon or controller.

Each function acts on a running DevCluster and returns when it is done; `DevCluster.repair` undoes all of them except
`cut`, which `heal` undoes.  Slurm notices a silent node by itself after Times.dead_node_s plus some 20 s, or at once
after `declare_down`.
"""

from __future__ import annotations

import signal

from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.daemons import CONTROLLER, Network, daemon_of
from launch.private_slurm.processes import wait_gone, with_descendants
from rlhpc.protocol.errors import ConfigError, RoleFailed


def crash_node(cluster: DevCluster, node: str) -> None:
    """Power loss: the daemon, its helpers and every process of a job on that node are killed."""
    kill_node_daemon(cluster, node)
    # Helpers first: one that sees its job die tells the controller, and the job has FAILED instead of its node.
    helpers = cluster.step_daemons(node)
    for helper in helpers:
        helper.send(signal.SIGSTOP)
    victims = with_descendants([*helpers, *cluster.job_processes(node)])
    for victim in [*helpers, *victims]:
        victim.send(signal.SIGKILL)
    if not wait_gone(victims, 5.0):
        raise RoleFailed(f"{node}: a process survives SIGKILL")


def kill_node_daemon(cluster: DevCluster, node: str) -> None:
    """Only slurmd dies; its jobs continue, and Slurm will start them a second time elsewhere: a split brain."""
    _check(cluster, node)
    cluster.daemons.kill(daemon_of(node))


def cut(cluster: DevCluster, node: str) -> None:
    """Silently drop all traffic to and from a node; its processes continue: a split brain.

    Raises ConfigError: a cluster without networks (ClusterShape.has_networks).
    """
    _network(cluster, node).forward(node, is_cut=True)


def heal(cluster: DevCluster, node: str) -> None:
    """Undo `cut`; for another 3 s connections may fail, as the kernel remembers failed address look-ups.

    Once Slurm sees the node again it kills the processes there of jobs that it has requeued.
    """
    _network(cluster, node).forward(node, is_cut=False)


def kill_controller(cluster: DevCluster) -> None:
    """The controller dies; jobs continue, commands fail after 9 s or more.

    State that it has not saved is lost, as on a real cluster: it saves a job some seconds after its submission or
    an `scontrol update`, but not after its start (seen with 22.05), for up to five minutes.
    """
    cluster.daemons.kill(CONTROLLER)


def stop_controller(cluster: DevCluster) -> None:
    """The controller is stopped cleanly, as for an upgrade: it saves its state first."""
    cluster.daemons.end(CONTROLLER)


def start_node(cluster: DevCluster, node: str) -> None:
    """Power is back.  Returns at once; `DevCluster.wait_up` waits for the node."""
    cluster.daemons.start(daemon_of(node))


def start_controller(cluster: DevCluster, wait_s: float = 30.0) -> None:
    """Restart the controller and wait until it answers; it reloads its jobs."""
    cluster.daemons.start(CONTROLLER)
    cluster.wait_answer(wait_s)


def declare_down(cluster: DevCluster, node: str) -> None:
    """Tell the controller at once that a node is dead; its jobs are requeued now."""
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=crashed")


def declare_up(cluster: DevCluster, node: str) -> None:
    """Have the controller check a DOWN node now; normally it does so twice a minute."""
    cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def _network(cluster: DevCluster, node: str) -> Network:
    _check(cluster, node)
    if cluster.network is None:
        raise ConfigError(f"{cluster.layout.root}: nodes have no separate networks (ClusterShape.has_networks)")
    return cluster.network


def _check(cluster: DevCluster, node: str) -> None:
    if node not in cluster.shape.nodes:
        raise ConfigError(f"node {node!r}: legal: {', '.join(cluster.shape.nodes)}")
