"""The shape of a dev cluster: groups of equal nodes, partitions, and timeouts that suit tests.

Pure values.  The default has the partitions that a run is placed on: `train`, `gen`, `cpu`, and `scavenge`, whose jobs
are preempted by those of `train` and `gen` on the same nodes.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Self

from rlhpc.errors import ConfigError

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
    features: tuple[str, ...] = ()  # what --constraint may ask for

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
    """Some groups of nodes under one name; jobs of a lower `tier` make room for those of a higher, if preemptible."""

    name: str
    groups: tuple[str, ...]
    tier: int = 10
    is_preemptible: bool = False
    grace_s: int = 0
    max_minutes: int = 60


@dataclass(frozen=True, slots=True)
class Times:
    """Slurm's delays in seconds; production defaults, which are 10 to 50 times longer, stand beside them."""

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
    enforces_limits: bool = False  # refuses at submission what no partition could ever run, as most sites do
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
        """A node's own one.  subnet: the first three numbers."""
        return f"{subnet}.{self.nodes.index(node) + 1}"


@dataclass(frozen=True, slots=True)
class Description:
    """What cluster.json in a cluster's directory holds, written once."""

    shape: ClusterShape
    prefix: str | None
    first_job_id: int

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def decode(cls, text: str) -> Self:
        """From JSON."""
        raw = json.loads(text)
        shape = ClusterShape(
            tuple(NodeGroup(**{**each, "features": tuple(each["features"])}) for each in raw["shape"]["groups"]),
            tuple(Partition(**{**each, "groups": tuple(each["groups"])}) for each in raw["shape"]["partitions"]),
            Times(**raw["shape"]["times"]),
            *(raw["shape"][flag] for flag in ("has_accounting", "enforces_limits", "has_networks")),
        )
        return cls(shape, raw["prefix"], raw["first_job_id"])


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
