"""slurm.conf and its companions, as text.

Input: shape, paths and ports.  Pure.  The same text works with Slurm 22.05 to 26.05: plugins named "none", which 23.11
removed, are simply not mentioned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.dev_cluster import accounting
from launch.dev_cluster.layout import ClusterLayout
from launch.dev_cluster.shape import LOOPBACK, ClusterShape, NodeGroup, Partition, machine_address


@dataclass(frozen=True, slots=True)
class Ground:
    """What the machine adds to a shape."""

    cluster_name: str
    user: str
    plugins: Path
    version: tuple[int, int]
    controller_port: int
    node_ports: dict[str, int]
    first_job_id: int
    accounting_port: int | None = None
    subnet: str = LOOPBACK  # of the nodes' addresses


def slurm_conf(shape: ClusterShape, layout: ClusterLayout, ground: Ground) -> str:
    """Text of slurm.conf."""
    lines = [*_controller(layout, ground), *_behaviour(shape, layout)]
    if ground.accounting_port is not None:
        lines += accounting.lines_of_slurm_conf(layout, ground.accounting_port, enforces_limits=shape.enforces_limits)
    for group in shape.groups:
        lines += [_node(group, node, shape, ground) for node in group.nodes]
    lines += [_partition(partition, shape, index == 0) for index, partition in enumerate(shape.partitions)]
    return "\n".join(lines) + "\n"


def gres_conf(shape: ClusterShape, layout: ClusterLayout) -> str:
    """Text of gres.conf.  Only a GPU that is a device file counts; without the flag every vendor's variable is set."""
    return "".join(
        f"NodeName={node} Name=gpu Type={group.gpu_type} File={layout.devices(node)}/nvidia{_range(group.gpus)} "
        "Flags=nvidia_gpu_env\n"
        for group in shape.groups
        if group.gpus
        for node in group.nodes
    )


def cgroup_conf(version: tuple[int, int]) -> str:
    """Text of cgroup.conf: since 23.11 Slurm would look for a cgroup tree that an ordinary user does not have."""
    return "CgroupPlugin=disabled\n" if version >= (23, 11) else ""


def _controller(layout: ClusterLayout, ground: Ground) -> list[str]:
    return [
        f"ClusterName={ground.cluster_name}",
        f"SlurmctldHost=localhost({machine_address(ground.subnet)})",
        f"SlurmctldPort={ground.controller_port}",
        f"SlurmUser={ground.user}",
        f"SlurmdUser={ground.user}",
        f"FirstJobId={ground.first_job_id}",
        f"StateSaveLocation={layout.state}",
        f"SlurmdSpoolDir={layout.spool('%n')}",
        f"SlurmctldPidFile={layout.run}/slurmctld.own",
        f"SlurmdPidFile={layout.run}/slurmd-%n.own",
        f"SlurmctldLogFile={layout.log('slurmctld')}",
        f"SlurmdLogFile={layout.log('slurmd-%n')}",
        f"PluginDir={ground.plugins}",
    ]


def _behaviour(shape: ClusterShape, layout: ClusterLayout) -> list[str]:
    times = shape.times
    return [
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={layout.munge_socket},cred_expire={times.requeue_delay_s}",
        "ProctrackType=proctrack/linuxproc",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        "DefMemPerCPU=16",
        f"EnforcePartLimits={'ALL' if shape.enforces_limits else 'NO'}",
        "GresTypes=gpu",
        "MpiDefault=none",
        "SlurmdParameters=config_overrides",  # nodes may declare more cores and memory than the machine has
        "ReturnToService=2",
        "SchedulerType=sched/backfill",
        # Heterogeneous jobs are started by the backfill scheduler alone, every 30 s unless told otherwise.
        "SchedulerParameters=bf_interval=1,bf_continue,bf_hetjob_immediate,sched_min_interval=100000,batch_sched_delay=0",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
        "MinJobAge=300",
        f"KillWait={times.kill_wait_s}",
        f"SlurmdTimeout={times.dead_node_s}",
        "MessageTimeout=5",  # with 10 a dead node is seen after 26 s instead of 15
        "UnkillableStepTimeout=60",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={layout.logs}/jobs.txt",
    ]


def _node(group: NodeGroup, node: str, shape: ClusterShape, ground: Ground) -> str:
    address, port = shape.address(node, ground.subnet), ground.node_ports[node]
    hostname = node if shape.has_networks else "localhost"
    gpus = f" Gres=gpu:{group.gpu_type}:{group.gpus}" if group.gpus else ""
    features = f" Features={','.join(group.features)}" if group.features else ""
    return (
        f"NodeName={node} NodeHostname={hostname} NodeAddr={address} Port={port} "
        f"CPUs={group.cpus} RealMemory={group.memory_mib}{gpus}{features} State=UNKNOWN"
    )


def _partition(partition: Partition, shape: ClusterShape, is_default: bool) -> str:
    nodes = ",".join(f"{group.name}{_range(group.count)}" for group in shape.groups if group.name in partition.groups)
    preemption = f"PreemptMode=REQUEUE GraceTime={partition.grace_s}" if partition.is_preemptible else "PreemptMode=OFF"
    return (
        f"PartitionName={partition.name} Nodes={nodes} Default={'YES' if is_default else 'NO'} State=UP "
        f"MaxTime={partition.max_minutes} PriorityTier={partition.tier} {preemption}"
    )


def _range(count: int) -> str:
    """Slurm's notation for 0 … count-1."""
    return f"[0-{count - 1}]" if count > 1 else "0"
