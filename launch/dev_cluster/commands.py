"""The commands `rlhpc cluster up | status | down`.

Input: parsed options.  Output: printed text and the exit status.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from launch.dev_cluster.cluster import DevCluster
from launch.dev_cluster.installation import Installation
from launch.dev_cluster.layout import ClusterLayout
from launch.dev_cluster.packages import obtain
from launch.dev_cluster.shape import default_shape
from rlhpc.errors import ConfigError
from rlhpc.own_user import own_user


def up(options: argparse.Namespace) -> int:
    """Start a cluster, or restart its dead daemons; print how to use it."""
    root = directory(options)
    asked = {name: getattr(options, name) for name in ("train", "gen", "cpu", "gpus")}
    shape = default_shape(**{name: count for name, count in asked.items() if count is not None})
    has_networks = options.networks
    shape = replace(shape, has_accounting=options.accounting, has_networks=has_networks)
    if ClusterLayout(root).description.exists():
        cluster = DevCluster.open(root)
        if (
            options.accounting or has_networks or any(count is not None for count in asked.values())
        ) and shape != cluster.shape:
            raise ConfigError(f"{root}: has a cluster of another shape; `rlhpc cluster down --delete {root}` first")
        if options.release and cluster.installation != _installation(options):
            raise ConfigError(f"{root}: has a cluster of another Slurm; `rlhpc cluster down --delete {root}` first")
    else:
        cluster = DevCluster.create(root, shape, _installation(options))
    if cluster.is_running:
        repaired = cluster.repair(options.wait_s)
        print(f"cluster     {root}, already running" + (f"; restarted: {', '.join(repaired)}" if repaired else ""))
    else:
        seconds = cluster.start(options.wait_s)
        print(f"cluster     {root}, {len(cluster.shape.nodes)} nodes idle after {seconds:.1f} s")
    print("slurm       {}.{:02}".format(*cluster.installation.version))
    _print_partitions(cluster)
    prefix = cluster.installation.prefix
    print(f"use         source {cluster.layout.activate}")
    print(f"            which is {cluster.export_lines[0]}" + (f", and the programs of {prefix}" if prefix else ""))
    print(f"end         rlhpc cluster down {root}")
    return 0


def status(options: argparse.Namespace) -> int:
    """Print every daemon with its pid, and Slurm's view of the nodes; status 1 if nothing runs."""
    cluster = DevCluster.open(directory(options))
    recorded = cluster.daemons.recorded()
    print(f"{'DAEMON':<16} {'PID':>8} {'STATE':<6} {'MIB':>6}")
    for name, found in recorded.items():
        print(f"{name:<16} {found.pid:>8} {'alive' if found.is_alive else 'dead':<6} {found.memory_mib:>6.1f}")
    if not cluster.is_running:
        print(f"{cluster.layout.root}: not running; `rlhpc cluster up {cluster.layout.root}` starts it")
        return 1
    print(cluster.run("sinfo").rstrip() if cluster.is_reachable() else "slurmctld does not answer")
    return 0


def down(options: argparse.Namespace) -> int:
    """End every daemon and every job; with --delete remove the directory too."""
    root = directory(options)
    cluster = DevCluster.open(root)
    was_running = cluster.is_running
    if options.delete:
        cluster.delete()
    else:
        cluster.stop()
    print(f"{root}: {'ended' if was_running else 'did not run'}{', deleted' if options.delete else ''}")
    return 0


def directory(options: argparse.Namespace) -> Path:
    """The directory on the command line, or the user's default."""
    named: Path = options.directory or Path(tempfile.gettempdir(), f"rlhpc-cluster-{own_user()}")
    return named.resolve()


def _installation(options: argparse.Namespace) -> Installation:
    return obtain(is_private=options.private, has_accounting=options.accounting, release=options.release)


def _print_partitions(cluster: DevCluster) -> None:
    nodes = {group.name: group for group in cluster.shape.groups}
    for partition in cluster.shape.partitions:
        groups = [nodes[name] for name in partition.groups]
        names = ", ".join(
            f"{group.nodes[0]}…{group.nodes[-1]}" if group.count > 1 else group.nodes[0] for group in groups
        )
        gpus = ", ".join(f"{group.gpus} fake GPUs each" if group.gpus else "no GPU" for group in groups[:1])
        print(f"partition   {partition.name:<9} {names}: {gpus}{'; preemptible' if partition.is_preemptible else ''}")
