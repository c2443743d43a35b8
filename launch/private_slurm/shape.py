"""The shape of a dev cluster: groups of equal nodes, partitions, and timeouts that suit tests.

Pure values.  The default has the partitions that a run is placed on: `train`, `gen`, `cpu`, and `scavenge`, whose jobs
are preempted by those of `train` and `gen` on the same nodes.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from launch.private_slurm.packages import Installation, SlurmMissing
from rlhpc.protocol.errors import ConfigError, RoleFailed, RunDirectoryError

# --------------------------------------------------------------------------------------------------------------- layout
#
# Every path of a dev cluster, defined once.
#
# Input: the cluster's directory.  Guarantees that every unix socket below it fits into Linux's limit of 107 bytes.


# The longest socket is the one of a step: ROOT/spool/train99/train99_67108863.4294967291.9 has to fit into 107 bytes.
LONGEST_ROOT = 63


class ClusterLayout:
    """Paths below one cluster's directory.  Creates nothing until `make`."""

    def __init__(self, root: Path) -> None:
        """Raises RunDirectoryError: not absolute, too long for sockets, or not representable in slurm.conf."""
        _refuse_unfit(root)
        self.root = root
        self.description = root / "cluster.json"  # its presence marks the directory as ours
        self.activate = root / "activate"  # shell commands that point a shell to the cluster
        self.slurm_conf = root / "etc" / "slurm.conf"  # for SLURM_CONF
        self.slurmdbd_conf = root / "etc" / "slurmdbd.conf"  # of the accounting daemon, 0600; beside slurm.conf
        self.gres_conf = root / "etc" / "gres.conf"  # GPUs of every node
        self.cgroup_conf = root / "etc" / "cgroup.conf"  # disables cgroups
        self.subnet = root / "etc" / "subnet"  # first three numbers of the nodes' addresses, where they have a network
        self.hosts = root / "etc" / "hosts"  # /etc/hosts of nodes that have a network
        self.state = root / "state"  # the controller's: jobs survive its restart
        self.munge = root / "munge"  # key, socket and log of munged; closed to writing by others
        self.munge_key = self.munge / "munge.key"  # secret that all daemons share, 0400
        self.munge_socket = self.munge / "munge.sock"  # where clients and daemons get their credentials
        self.run = root / "run"  # one file per living daemon
        self.logs = root / "log"  # two files per daemon: its log and its output
        self.database = root / "db"  # MariaDB's files, where there is accounting
        self.database_socket = self.database / "mysql.sock"  # the only one

    def spool(self, node: str) -> Path:
        """A node's own files: scripts and sockets of its steps."""
        return self.root / "spool" / node

    def devices(self, node: str) -> Path:
        """A node's fake GPUs, links to /dev/null."""
        return self.root / "dev" / node

    def pid_file(self, daemon: str) -> Path:
        """Pid and birth of one daemon."""
        return self.run / f"{daemon}.pid"

    def log(self, daemon: str) -> Path:
        """The daemon's log."""
        return self.logs / f"{daemon}.log"

    def output(self, daemon: str) -> Path:
        """The daemon's output: the reason, if it dies before it can log."""
        return self.logs / f"{daemon}.out"

    def make(self) -> None:
        """Create every directory that does not depend on a node."""
        for directory in (self.slurm_conf.parent, self.state, self.munge, self.run, self.logs):
            directory.mkdir(parents=True, exist_ok=True)
        self.munge.chmod(0o711)  # munged refuses a directory that others may write to; clients must reach the socket


def _refuse_unfit(root: Path) -> None:
    text = str(root)
    if not root.is_absolute():
        raise RunDirectoryError(f"{text}: legal: an absolute path for a cluster's directory")
    if len(text.encode()) > LONGEST_ROOT:
        raise RunDirectoryError(
            f"{text}: {len(text.encode())} bytes; unix sockets below it leave room for {LONGEST_ROOT}: "
            "choose a shorter path, for example in /tmp"
        )
    if any(character in text for character in " ,=#%\"'\\\n"):
        raise RunDirectoryError(f"{text}: slurm.conf cannot hold a path with blanks, quotes or any of , = # % \\")


# ----------------------------------------------------------------------------------------------------------- accounting
#
# Accounting for a dev cluster: a private MariaDB behind a private slurmdbd, so that sacct and accounts work.
#
# Input: paths and a port.  Functions that make text and argument lists are pure; `prepare_database` writes.  The
# database listens on a unix socket only and has no passwords: access to the socket's directory is the access control.

DATABASE, DAEMON = "mariadbd", "slurmdbd"
ACCOUNT = "lab"  # exists in every cluster with accounting; jobs of another account are refused
_SYSTEM_TABLES = ("system_tables.sql", "system_tables_data.sql")  # mysql_…; since MariaDB 11 mariadb_…


def slurmdbd_conf(layout: ClusterLayout, user: str, plugins: Path, port: int) -> str:
    """Text of slurmdbd.conf, which must be readable by its owner alone."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={layout.munge_socket}",
            "DbdHost=localhost",
            "DbdAddr=127.0.0.1",
            f"DbdPort={port}",
            f"SlurmUser={user}",
            f"LogFile={layout.log(DAEMON)}",
            f"PidFile={layout.run}/slurmdbd.own",
            f"PluginDir={plugins}",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=slurm",
            "StorageLoc=slurm_acct_db",
            "",
        ]
    )


def lines_of_slurm_conf(layout: ClusterLayout, port: int, *, enforces_limits: bool) -> list[str]:
    """Lines of accounting in slurm.conf."""
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={port}",
        f"AccountingStoragePass={layout.munge_socket}",  # munge's socket goes here; AuthInfo is not asked
        f"AccountingStorageEnforce=associations,{'limits,' if enforces_limits else ''}qos",
        "AccountingStorageTRES=gres/gpu",  # else no limit can name GPUs
    ]


def database_command(layout: ClusterLayout, installation: Installation, user: str) -> list[str]:
    """MariaDB's server command, with settings that keep it small."""
    share = _system_tables(installation)[0].parent  # which also has its messages
    return [
        *(installation.program(DATABASE), "--no-defaults", f"--user={user}"),
        *(f"--datadir={layout.database}/data", f"--tmpdir={layout.database}/tmp"),
        *(f"--lc-messages-dir={share}", f"--character-sets-dir={share}/charsets"),
        *("--innodb-buffer-pool-size=16M", "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0"),
        "--loose-innodb-snapshot-isolation=OFF",  # else slurmdbd ends where two transactions meet; 10.6 may not know it
        *("--innodb-lock-wait-timeout=900", "--key-buffer-size=1M", "--performance-schema=OFF"),
        *("--max-connections=20", "--thread-cache-size=2", "--skip-log-bin"),
        *("--skip-networking", "--skip-grant-tables"),
    ]


def serve_arguments(layout: ClusterLayout) -> list[str]:
    """Options added to `database_command` for serving."""
    return [f"--socket={layout.database_socket}", f"--pid-file={layout.database}/mariadb.own"]


def prepare_database(
    layout: ClusterLayout, installation: Installation, user: str, environment: Mapping[str, str]
) -> None:
    """Create MariaDB's system tables, once.  Raises RoleFailed with its last message."""
    data, unfinished = layout.database / "data", layout.database / "data.unfinished"
    if data.exists():
        return
    shutil.rmtree(unfinished, ignore_errors=True)  # of a start that was killed, or had no space
    for directory in (unfinished, layout.database / "tmp"):
        directory.mkdir(parents=True, exist_ok=True)
    layout.database.chmod(0o700)
    tables = "".join(path.read_text(encoding="utf-8") for path in _system_tables(installation))
    done = subprocess.run(
        [*database_command(layout, installation, user), f"--datadir={unfinished}", "--bootstrap"],
        input=f"create database mysql;\nuse mysql;\n{tables}",
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RoleFailed(f"mariadbd cannot create a database: {(done.stderr or 'no output').strip().splitlines()[-1]}")
    unfinished.rename(data)


def _system_tables(installation: Installation) -> list[Path]:
    """Definitions and content of MariaDB's own tables.  Raises SlurmMissing if they are missing."""
    base = installation.prefix or Path("/")
    for directory in ("usr/share/mariadb", "usr/share/mysql"):
        for brand in ("mariadb", "mysql"):
            found = [base / directory / f"{brand}_{name}" for name in _SYSTEM_TABLES]
            if all(path.exists() for path in found):
                return found
    raise SlurmMissing(
        f"no {' and '.join(_SYSTEM_TABLES)} of MariaDB below {base}/usr/share: install mariadb-server-core"
    )


# -------------------------------------------------------------------------------------------------------------- machine
#
# A dev cluster's requirements of its machine besides Slurm.  Writes nothing.


def check_owner(root: Path) -> None:
    """Raise RunDirectoryError if the directory belongs to another user, who could change the programs in it."""
    if root.exists() and root.stat().st_uid != os.getuid():
        raise RunDirectoryError(f"{root}: belongs to user {root.owner()}; choose a directory of your own")


def check_own_name(slurm_version: tuple[int, int]) -> None:
    """Raise RunDirectoryError if this machine cannot resolve its own name, which Slurm looks up."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        # Since 23.11 the controller looks itself up for every job, and each look-up blocks it for 10 to 20 s.
        if slurm_version >= (23, 11):
            raise RunDirectoryError(
                f"this machine's own name {name!r} does not resolve, so every job would wait 10 s or more: "
                f"ask an administrator to add the line '127.0.1.1 {name}' to /etc/hosts"
            ) from None


# ---------------------------------------------------------------------------------------------------------------- shape

_NAME = re.compile(r"[a-z]{1,5}")  # a node is this and a number; both appear in paths of sockets
_WORD = re.compile(r"[A-Za-z0-9][\w.-]*")
_MOST_NODES = 253  # 254 is the machine's own address
LOOPBACK = "127.0.77"  # any address of 127/8 can be bound: even without networks every node has its own


def machine_address(subnet: str) -> str:
    """Address of the machine itself among its nodes.  subnet: the first three numbers."""
    return f"{subnet}.{_MOST_NODES + 1}"


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """`count` nodes NAME0, NAME1, …; their resources are declared, not real: eight of them fit on one laptop."""

    name: str
    count: int
    gpus: int = 0
    cpus: int = 16
    memory_mib: int = 64_000
    gpu_type: str = "fake"
    features: tuple[str, ...] = ()  # for --constraint

    def __post_init__(self) -> None:
        """Raises ConfigError: a name or a number that Slurm would not take."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"node group {self.name!r}: legal: one to five lower-case letters")
        if not (1 <= self.count <= 100 and 0 <= self.gpus <= 16 and self.cpus >= 1 and self.memory_mib >= 1):
            raise ConfigError(
                f"node group {self.name}: legal: 1 to 100 nodes, up to 16 GPUs, at least one core and one MiB"
            )
        for word in (self.gpu_type, *self.features):
            if not _WORD.fullmatch(word):
                raise ConfigError(
                    f"node group {self.name}: {word!r}: legal: letters, digits, _, -, ., beginning with one"
                )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of its nodes."""
        return tuple(f"{self.name}{index}" for index in range(self.count))


@dataclass(frozen=True, slots=True)
class Partition:
    """Groups of nodes under one name; preemptible jobs of a lower `tier` make room for those of a higher one."""

    name: str
    groups: tuple[str, ...]
    tier: int = 10
    is_preemptible: bool = False
    grace_s: int = 0
    max_minutes: int = 60


@dataclass(frozen=True, slots=True)
class Times:
    """Slurm's delays in seconds; comments have production defaults, which are 10 to 50 times longer."""

    requeue_delay_s: int = 5  # 120: a requeued job is not eligible before (munge's credentials must have expired)
    kill_wait_s: int = 5  # 30: from SIGTERM to SIGKILL
    # 300: silence after which a node counts as DOWN; seen some seconds later.  More than twice MessageTimeout: a round
    # of pings that waits for a dead node leaves out the others, and with 6 they were once taken for dead with it.
    dead_node_s: int = 12


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The whole of a cluster.  The first partition is the default one."""

    groups: tuple[NodeGroup, ...]
    partitions: tuple[Partition, ...]
    times: Times = Times()
    has_accounting: bool = False  # with slurmdbd and a database: sacct, accounts, QOS
    enforces_limits: bool = False  # refuses jobs at submission that no partition could ever run, as most sites do
    has_networks: bool = False  # every node in a network namespace, with a link that can be cut; takes root

    def __post_init__(self) -> None:
        """Raises ConfigError: no nodes, no partitions, two groups of one name, a partition of unknown groups."""
        names = [group.name for group in self.groups]
        if not names or not self.partitions:
            raise ConfigError("a cluster needs a node group and a partition")
        if sum(group.count for group in self.groups) > _MOST_NODES:
            raise ConfigError(f"a cluster has at most {_MOST_NODES} nodes, one for each address")
        if len(set(names)) != len(names):
            raise ConfigError(f"node groups {', '.join(names)}: legal: each name once")
        for partition in self.partitions:
            unknown = [name for name in partition.groups if name not in names]
            if unknown or not partition.groups:
                raise ConfigError(f"partition {partition.name}: groups={partition.groups}: legal: {', '.join(names)}")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, group by group."""
        return tuple(node for group in self.groups for node in group.nodes)

    def address(self, node: str, subnet: str) -> str:
        """A node's address.  subnet: the first three numbers."""
        return f"{subnet}.{self.nodes.index(node) + 1}"


@dataclass(frozen=True, slots=True)
class Description:
    """Content of cluster.json in a cluster's directory, written once."""

    shape: ClusterShape
    prefix: str | None
    first_job_id: int

    def encode(self) -> bytes:
        """The shape as JSON."""
        return TypeAdapter(Description).dump_json(self, indent=1)

    @classmethod
    def decode(cls, text: bytes) -> Description:
        """Read the shape from JSON.  Raises ValueError: not one."""
        return TypeAdapter(Description).validate_json(text)


def default_shape(
    train: int = 2, gen: int = 4, cpu: int = 1, gpus: int = 4, times: Times | None = None
) -> ClusterShape:
    """`train` and `gen` nodes with `gpus` fake GPUs each, `cpu` nodes without.  Any of the three may be 0, not all."""
    counts = {"train": (train, gpus), "gen": (gen, gpus), "cpu": (cpu, 0)}
    letters = {"train": "t", "gen": "g", "cpu": "c"}
    there = {name: pair for name, pair in counts.items() if pair[0]}
    groups = tuple(NodeGroup(letters[name], count, gpus=each) for name, (count, each) in there.items())
    partitions = [Partition(name, (letters[name],)) for name in there]
    with_gpus = tuple(letters[name] for name in there if name != "cpu")
    if with_gpus:
        partitions.append(Partition("scavenge", with_gpus, tier=1, is_preemptible=True))
    return ClusterShape(groups, tuple(partitions), times or Times())


# --------------------------------------------------------------------------------------------------------- config files
#
# slurm.conf and its companions, as text.
#
# Input: shape, paths and ports.  Pure.  The same text works with Slurm 22.05 to 26.05: plugins named "none", which
# 23.11 removed, are simply not mentioned.


@dataclass(frozen=True, slots=True)
class Ground:
    """Values of the machine that complete a shape."""

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
        lines += lines_of_slurm_conf(layout, ground.accounting_port, enforces_limits=shape.enforces_limits)
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
