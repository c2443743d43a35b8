"""Properties of a cluster: partitions, nodes, accounts, settings.  Slurm is queried once.

Input: the output of scontrol and sacctmgr.  Output: ClusterFacts.  Only `ask_cluster` runs commands; the rest is pure.
Guarantees: facts that a site hides (PrivateData, no accounting) are empty or None and listed in `hidden`, not errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from launch.slurm.commands import SlurmError, slurm, unchecked
from launch.slurm.states import duration_s
from rlhpc.base.processes import own_name, own_user

_KEY = re.compile(r"(?:^|\s)([A-Za-z][\w/:]*)=")
_DENIED = "Access/permission denied"  # PrivateData in slurm.conf
_NOTHING = ("", "(null)", "N/A", "NONE", "None", "UNLIMITED", "INFINITE")
PATIENCE_S = 20.0  # with a slurmctld that is down for a moment
_GENERATIONS = 9  # of accounts, from a user's own up to root
# Limits by sacctmgr's names: the limited resource, and its scope.  "share" counts the remaining time of running jobs.
_LIMITS = {
    "maxwall": ("wall", "job"),
    "maxsubmitjobs": ("submitted", "user"), "grpsubmit": ("submitted", "group"),
    "maxsubmitjobsperuser": ("submitted", "user"), "maxsubmitjobsperaccount": ("submitted", "account"),
    "maxjobs": ("running", "user"), "grpjobs": ("running", "group"),
    "maxjobsperuser": ("running", "user"), "maxjobsperaccount": ("running", "account"),
    "maxtres": ("most", "job"), "maxtrespernode": ("most", "node"), "mintres": ("least", "job"),
    "maxtresperuser": ("most", "user"), "maxtresperaccount": ("most", "account"), "grptres": ("most", "group"),
    "maxtresmins": ("minutes", "job"), "grptresrunmins": ("minutes", "group"),
}  # fmt: skip
LIMITS_OF_ASSOCIATIONS = ("maxsubmitjobs", "maxwall", "maxjobs", "grpjobs", "grpsubmit", "maxtres", "maxtrespernode",
                    "maxtresmins", "grptres", "grptresrunmins")  # fmt: skip
LIMITS_OF_QOS = ("maxwall", "maxsubmitjobsperuser", "maxsubmitjobsperaccount", "maxjobsperuser", "maxjobsperaccount",
           "grpjobs", "grpsubmit", "maxtres", "maxtrespernode", "mintres", "maxtresperuser", "maxtresperaccount",
           "maxtresmins", "grptres", "grptresrunmins")  # fmt: skip
# Words of a node's state with which it accepts no jobs; others are temporary, such as POWERED_DOWN: Slurm switches
# the node on.
_AWAY = frozenset(
    ("UNKNOWN", "DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "NOT_RESPONDING", "NO_RESPOND",
     "INVAL", "INVALID", "INVALID_REG", "FUTURE")
)  # fmt: skip


@dataclass(frozen=True)
class PartitionFacts:
    """A partition; None means no limit, or no restriction of users."""

    name: str
    is_default: bool
    max_time_s: int | None
    max_nodes: int | None
    min_nodes: int
    allowed_accounts: tuple[str, ...] | None
    denied_accounts: tuple[str, ...]
    allowed_qos: tuple[str, ...] | None
    denied_qos: tuple[str, ...]
    preempt_mode: str  # OFF, REQUEUE, CANCEL, SUSPEND, …
    qos: str = ""  # its limits hold for all jobs of the partition


@dataclass(frozen=True)
class NodeFacts:
    """A node."""

    name: str
    partitions: frozenset[str]
    gpus: Mapping[str, int]  # by type; "" if the site names no type
    state: str
    cores: int = 0  # for jobs, as Slurm counts them; 0: not known
    memory_gib: float = 0.0  # 0: not known
    features: tuple[str, ...] = ()

    @property
    def is_up(self) -> bool:
        """True if jobs start there, now or when others have ended."""
        words = re.split(r"[+\s]+", self.state.upper())  # "*": the node does not answer
        return not any(word.endswith("*") or word.rstrip("~#!%$@^-*") in _AWAY for word in words)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all types."""
        return sum(self.gpus.values())


@dataclass(frozen=True)
class JobLimits:
    """Limits of jobs; missing entries have no limit.

    numbers: by limited quantity and scope, as in _LIMITS: jobs, or seconds of ("wall", "job").  resources: the same,
    by Slurm's name of the resource: "cpu", "node", "mem" in MiB, "gres/gpu", "gres/gpu:h100".
    """

    numbers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    resources: Mapping[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Association:
    """An account that the user may charge."""

    account: str
    partition: str  # "": any
    qos: tuple[str, ...]
    default_qos: str = ""  # "": the site has not chosen one
    limits: JobLimits = JobLimits()


@dataclass(frozen=True)
class Account:
    """An account as a whole, with all its users."""

    name: str
    parent: str
    limits: JobLimits = JobLimits()


@dataclass(frozen=True)
class Qos:
    """A quality of service."""

    name: str
    flags: str = ""
    limits: JobLimits = JobLimits()


@dataclass(frozen=True)
class ClusterFacts:
    """All facts about a cluster, at one moment."""

    version: tuple[int, int]
    release: str
    config: Mapping[str, str]  # of `scontrol show config`
    clock_text: str  # slurmctld's local time at the query, "2026-01-31T12:00:00"
    partitions: tuple[PartitionFacts, ...]
    nodes: tuple[NodeFacts, ...]
    associations: tuple[Association, ...] | None  # None: no accounting, or it does not answer
    default_account: str
    qos: tuple[Qos, ...]
    accounts: tuple[Account, ...] = ()  # the user's, and those above them
    hidden: frozenset[str] = frozenset()  # "partition", "node": shown only to the site's staff

    @property
    def default_partition(self) -> str | None:
        """The default partition."""
        return next((partition.name for partition in self.partitions if partition.is_default), None)

    @property
    def enforced(self) -> frozenset[str]:
        """Features enforced by accounting: associations, limits, qos."""
        words = set(self.config.get("AccountingStorageEnforce", "").lower().split(","))
        words |= {"safe"} & words and {"limits"}
        words |= {"limits", "qos"} & words and {"associations"}
        return frozenset(words)

    def partition(self, name: str) -> PartitionFacts | None:
        """The partition of that name; None: there is none."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    def nodes_of(self, partition: str) -> tuple[NodeFacts, ...]:
        """Visible nodes of a partition."""
        return tuple(node for node in self.nodes if partition in node.partitions)


def ask_cluster(timeout_s: float = 30.0) -> ClusterFacts:
    """Query slurmctld, and accounting if there is any.  Raises SlurmError: not installed, or no answer."""
    hidden: set[str] = set()

    def ask(*words: str, patience_s: float = PATIENCE_S) -> str:
        return slurm(*words, timeout_s=timeout_s, patience_s=patience_s)

    def show(kind: str, *options: str) -> str:
        try:
            return ask("scontrol", "show", kind, "--oneliner", *options)
        except SlurmError as error:
            if _DENIED not in str(error):
                raise
            hidden.add(kind)
            return ""

    try:
        partitions = show("partition", "--all")
        config = ask("scontrol", "show", "config")
        nodes = show("node", "--all")
        release = ask("scontrol", "--version")
    except SlurmError as error:
        if "no such command" in str(error):
            raise
        raise unchecked("nothing could be checked", error) from None
    settings = parse_config(config)
    known = _ask_accounts(partial(ask, patience_s=0.0), settings, own_user()) or _Accounting()
    found = re.search(r"(\d+)\.(\d+)", release)
    return ClusterFacts(
        version=(int(found[1]), int(found[2])) if found else (0, 0),
        release=release.split()[-1] if release.split() else "?",
        config=settings,
        clock_text=config.partition("as of ")[2].split("\n", 1)[0].strip(),
        partitions=parse_partitions(partitions),
        nodes=parse_nodes(nodes),
        **vars(known),
        hidden=frozenset(hidden),
    )


@dataclass(frozen=True)
class _Accounting:
    """A user's facts from sacctmgr."""

    associations: tuple[Association, ...] | None = None
    default_account: str = ""
    qos: tuple[Qos, ...] = ()
    accounts: tuple[Account, ...] = ()


def _ask_accounts(ask: Callable[..., str], settings: Mapping[str, str], user: str) -> _Accounting | None:
    """Query sacctmgr; None without accounting, or if it is down: jobs are accepted nevertheless."""
    if "slurmdbd" not in settings.get("AccountingStorageType", "") or not own_name():
        return None  # accounts belong to names
    show = partial(ask, "sacctmgr", "--noheader", "--parsable2", "show")
    cluster = f"cluster={settings.get('ClusterName', '')}"
    try:
        columns = ",".join(("account", "partition", "qos", "defaultqos", *LIMITS_OF_ASSOCIATIONS))
        associations = parse_associations(show("assoc", f"user={user}", cluster, f"format={columns}"))
        default_account = show("user", user, "format=defaultaccount").strip().split("\n")[0]
        qos = parse_qos(show("qos", f"format={','.join(('name', 'flags', *LIMITS_OF_QOS))}"))
        columns, accounts = ",".join(("account", "parentname", *LIMITS_OF_ASSOCIATIONS)), dict[str, Account]()
        wanted = {each.account for each in associations}
        for _ in range(_GENERATIONS):  # an account's limits on all its users also hold for accounts below it
            if not wanted:
                break
            names = f"account={','.join(sorted(wanted))}"
            accounts |= {
                each.name: each for each in parse_accounts(show("assoc", names, "user=", cluster, f"format={columns}"))
            }
            wanted = {each.parent for each in accounts.values() if each.parent} - accounts.keys()
    except SlurmError:
        return None
    return _Accounting(associations, default_account, qos, tuple(accounts.values()))


# ------------------------------------------------------------------------------------------------------------- parsing


def records(text: str, first: str) -> list[dict[str, str]]:
    """Lines of `scontrol --oneliner` as mappings; values may have spaces.  Lines without the key `first` are left out.

    A repeated key keeps its first value: later ones are words of a reason or of the system's name.
    """
    found = []
    for line in text.splitlines():
        marks = list(_KEY.finditer(line))
        ends = [*(mark.start() for mark in marks[1:]), len(line)]
        record: dict[str, str] = {}
        for mark, end in zip(marks, ends):  # a line without a key has an end, too
            record.setdefault(mark[1], line[mark.end() : end].strip())
        if first in record:
            found.append(record)
    return found


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_partitions(text: str) -> tuple[PartitionFacts, ...]:
    """`scontrol show partition --oneliner`."""
    return tuple(
        PartitionFacts(
            name=record["PartitionName"],
            is_default=record.get("Default") == "YES",
            max_time_s=duration_s(record.get("MaxTime", "")),
            max_nodes=_number(record.get("MaxNodes", "")),
            min_nodes=_number(record.get("MinNodes", "")) or 0,
            allowed_accounts=_everybody(record.get("AllowAccounts", "ALL")),
            denied_accounts=_names(record.get("DenyAccounts", "")),
            allowed_qos=_everybody(record.get("AllowQos", "ALL")),
            denied_qos=_names(record.get("DenyQos", "")),
            preempt_mode=record.get("PreemptMode", "OFF"),
            qos="".join(_names(record.get("QoS", ""))),
        )
        for record in records(text, "PartitionName")
    )


def parse_nodes(text: str) -> tuple[NodeFacts, ...]:
    """`scontrol show node --oneliner`."""
    return tuple(
        NodeFacts(
            name=record["NodeName"],
            partitions=frozenset(_names(record.get("Partitions", ""))),
            gpus=parse_gpus(record.get("Gres", "")),
            state=record.get("State", "UNKNOWN"),
            cores=_number(record.get("CPUEfctv", "") or record.get("CPUTot", "")) or 0,
            memory_gib=(_number(record.get("RealMemory", "")) or 0) / 1024,
            features=_names(record.get("AvailableFeatures", "")),
        )
        for record in records(text, "NodeName")
    )


def parse_gpus(text: str) -> dict[str, int]:
    """GPUs of "gpu:h100:8(S:0-1),shard:32" by type: {"h100": 8}.  As in Slurm, a number at the end is the count."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", text).split(","):  # without sockets, and (null)
        name, *words = item.strip().split(":")
        words = [word for word in words if word != "no_consume"]
        if name == "gpu":
            count = int(words.pop()) if words and words[-1].isdecimal() else 1
            kind = ":".join(words)
            found[kind] = found.get(kind, 0) + count
    return found


def parse_associations(text: str) -> tuple[Association, ...]:
    """`sacctmgr show assoc` of a user: account, partition, qos, defaultqos, limits."""
    rows = _cells(text, 3)
    return tuple(
        Association(row[0], row[1], _names(row[2]), row[3], _limits(LIMITS_OF_ASSOCIATIONS, row[4:])) for row in rows
    )


def parse_accounts(text: str) -> tuple[Account, ...]:
    """`sacctmgr show assoc` without users: account, parentname, limits."""
    return tuple(Account(row[0], row[1], _limits(LIMITS_OF_ASSOCIATIONS, row[2:])) for row in _cells(text, 1))


def parse_qos(text: str) -> tuple[Qos, ...]:
    """`sacctmgr show qos`: name, flags, limits."""
    return tuple(Qos(row[0], row[1], _limits(LIMITS_OF_QOS, row[2:])) for row in _cells(text, 1))


def _cells(text: str, least: int) -> list[list[str]]:
    return [line.split("|") for line in text.splitlines() if line.count("|") >= least]


def _limits(names: tuple[str, ...], cells: list[str]) -> JobLimits:
    numbers: dict[tuple[str, str], int] = {}
    resources: dict[tuple[str, str], dict[str, int]] = {}
    for name, cell in zip(names, cells):
        key = _LIMITS[name]
        if key[0] in ("most", "least", "minutes"):
            resources[key] = parse_resources(cell)
        else:
            number = duration_s(cell) if key[0] == "wall" else _number(cell)
            numbers.update({} if number is None else {key: number})
    return JobLimits(numbers, resources)


def parse_resources(text: str) -> dict[str, int]:
    """Amounts of "cpu=8,mem=1.50G,gres/gpu:h100=4"; of memory in MiB."""
    found = {}
    for name, _, amount in (part.partition("=") for part in text.split(",")):
        number = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", amount)
        if number is not None:
            unit = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}.get(
                number[2], 2**20 if name == "mem" else 1
            )
            found[name.lower()] = int(float(number[1]) * unit / (2**20 if name == "mem" else 1))
    return found


def _number(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def _names(text: str) -> tuple[str, ...]:
    return () if text in _NOTHING else tuple(word for word in text.split(",") if word)


def _everybody(text: str) -> tuple[str, ...] | None:
    return None if text.upper() == "ALL" else _names(text)


def slurm_versions() -> list[tuple[str, str]]:
    """The releases of Slurm's programs: (command, output or error)."""
    return [(f"{program} --version", _version_said(program)) for program in ("scontrol", "sinfo")]


def _version_said(program: str) -> str:
    try:
        return slurm(program, "--version", timeout_s=30.0)
    except SlurmError as error:
        return str(error)
