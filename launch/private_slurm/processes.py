"""Processes by identity, read from /proc: a pid together with its start time identifies one process uniquely.

No process is looked up by program name alone, and no signal reaches a pid that has been reused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.private_slurm.shape import machine_address
from rlhpc.base.patience import Deadline
from rlhpc.base.processes import own_name
from rlhpc.protocol.errors import ConfigError, RoleFailed, RunDirectoryError

# ------------------------------------------------------------------------------------------------------------ processes


@dataclass(frozen=True, slots=True)
class Process:
    """A process.  birth: clock ticks since the machine started."""

    pid: int
    birth: int

    @property
    def is_alive(self) -> bool:
        """False once it has ended, also while its parent has not fetched its status."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.birth and fields[0] not in "ZX"

    @property
    def memory_mib(self) -> float:
        """Its proportional set size (PSS), MiB: shared pages are divided by their users; 0.0 if unknown."""
        with contextlib.suppress(psutil.Error):
            return float(psutil.Process(self.pid).memory_full_info().pss / 2**20)
        return 0.0

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it lives."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def process(pid: int) -> Process | None:
    """The process that has this pid now, or None."""
    fields = _stat(pid)
    return None if fields is None else Process(pid, int(fields[19]))


def slurm_user() -> str:
    """Return the name of this process's user.  Raises RunDirectoryError: the uid has no name here."""
    name = own_name()
    if not name:
        raise RunDirectoryError(f"user {os.getuid()} has no name here, and Slurm identifies users by name")
    return name


def write_record(path: Path, pid: int) -> None:
    """Write `pid birth`, so that a later command finds this very process."""
    fields = _stat(pid)
    partial = path.with_suffix(".partial")
    partial.write_text(f"{pid} {fields[19] if fields else 0}\n", encoding="ascii")
    partial.replace(path)


def read_record(path: Path) -> Process | None:
    """Process recorded by `write_record`; None if there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        pid, birth = path.read_text(encoding="ascii").split()
        return Process(int(pid), int(birth))
    return None


def end(processes: Iterable[Process], grace_s: float) -> None:
    """Send SIGTERM, and SIGKILL after `grace_s`; returns when all have ended (or 5 s after the SIGKILL)."""
    wanted = list(processes)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for each in wanted:
            each.send(number)
        if wait_gone(wanted, patience_s):
            return


def wait_gone(processes: Iterable[Process], patience_s: float) -> bool:
    """True when all have ended within `patience_s`."""
    left = list(processes)
    for _ in Deadline(patience_s).polls(0.02):
        left = [each for each in left if each.is_alive]
        if not left:
            return True
    return False


def with_descendants(roots: Iterable[Process]) -> list[Process]:
    """The given processes and everything below them in the tree."""
    pids: set[int] = set()
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            pids |= {root.pid, *(child.pid for child in psutil.Process(root.pid).children(recursive=True))}
    return [here for pid in sorted(pids) if (here := process(pid))]


def holding(path: Path, program: str) -> list[Process]:
    """Processes of a program (its name begins so) that have a file open."""
    found = []
    for each in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if each.info["name"].startswith(program) and any(file.path == str(path) for file in each.open_files()):
                found += [here] if (here := process(each.pid)) else []
    return found


def with_environment(any_of: Iterable[str], all_of: Iterable[str]) -> list[Process]:
    """Processes whose environment has one of `any_of` and all of `all_of`; each is `NAME=value` or `NAME=`.

    `NAME=` stands for any value.  This process and its ancestors are left out.
    """
    either, every = tuple(any_of), tuple(all_of)
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for each in psutil.process_iter(["environ"]):
        entries = [f"{name}={value}" for name, value in (each.info["environ"] or {}).items()]
        is_meant = any(_stands(item, entries) for item in either) and all(_stands(item, entries) for item in every)
        if is_meant and each.pid not in own:
            found += [here] if (here := process(each.pid)) else []
    return found


def _stands(item: str, entries: list[str]) -> bool:
    return any(entry.startswith(item) for entry in entries) if item.endswith("=") else item in entries


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on: state, parent, …, birth (index 19)."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    return None


# ----------------------------------------------------------------------------------------------------------- namespaces
#
# Commands that create and enter network namespaces; only root may run them.
#
# Input: processes that own a namespace.  Output: interfaces in it.  Guarantees: every interface belongs to the
# namespace of a process, or is the peer of one that does, so that it disappears with the process: a crash leaves none
# behind.

_SUBNETS = 512  # 198.18.0.0/15, which RFC 2544 keeps for tests of networks, in parts of 256 addresses
_PATIENCE_S = 5.0  # the kernel takes down a dead namespace in the background
_BRIDGE = "switch"


def require() -> None:
    """Raise ConfigError if this process may not make namespaces, or a program for it is missing."""
    missing = [name for name in ("ip", "nsenter", "unshare") if not Path(_program(name)).is_absolute()]
    if missing:
        raise ConfigError(f"networks of nodes need {', '.join(missing)}: install iproute2 and util-linux")
    if os.geteuid():
        raise ConfigError("networks of nodes need root, to create namespaces")
    done = _run(_program("unshare"), "--net", "--uts", "--mount", "true")
    if done.returncode:
        raise ConfigError(f"networks of nodes need root with all capabilities: {done.stderr.strip()}")


def hub_command() -> list[str]:
    """A process whose network namespace holds the switch that joins the nodes."""
    ip = _program("ip")
    script = f"{ip} link add {_BRIDGE} type bridge && {ip} link set {_BRIDGE} up && exec sleep infinity"
    return [_program("unshare"), "--net", "sh", "-c", script]


def node_command(node: str, hosts: Path) -> list[str]:
    """A process that holds network, host name and mounts of one node, also while its slurmd is dead."""
    # `slave`: later mounts of this machine appear in the node, but not the other way.
    words = (_program("unshare"), "--net", "--uts", "--mount", "--propagation", "slave")
    rename = "echo $0 > /proc/sys/kernel/hostname"
    script = f"{rename} && mount --bind $1 /etc/hosts && {_program('ip')} link set lo up && exec sleep infinity"
    return [*words, "sh", "-c", script, node, str(hosts)]


def inside(holder: Process) -> list[str]:
    """Words before a command that run it in a holder's node.

    Not `ip netns exec`: it mounts another /sys, in which slurmd finds no cgroups and dies.
    """
    return [_program("nsenter"), f"--target={holder.pid}", "--net", "--uts", "--mount"]


def is_ready(holder: Process | None) -> bool:
    """True when a process of `hub_command` or `node_command` has made its namespace."""
    if holder is None or not holder.is_alive:
        return False
    return Path(f"/proc/{holder.pid}/comm").read_text(encoding="ascii").strip() == "sleep"


def claim_subnet(hub: Process, label: str, wanted: str | None = None) -> str:
    """Join this machine to the switch by an interface whose name reserves the subnet; returns it: "198.18.77".

    The kernel gives every name once, so two clusters never have one subnet.  label: shown by `ip link`.  Raises
    RoleFailed: none is free, or the wanted one is not.
    """
    taken, first = _routed(), (hub.pid * 37 + hub.birth) % _SUBNETS
    order = [(first + k) % _SUBNETS for k in range(_SUBNETS)]
    candidates = [wanted] if wanted else [f"198.{18 + k // 256}.{k % 256}" for k in order]
    for _ in Deadline(_PATIENCE_S if wanted else 0.0).polls(0.05):
        for subnet in candidates:
            network = ipaddress.ip_network(f"{subnet}.0/24")
            if wanted is None and any(network.overlaps(other) for other in taken):
                continue
            if _join_host(hub, subnet, label):
                return subnet
    raise RoleFailed(f"no free subnet in 198.18.0.0/15{f' ({wanted}.0/24 is taken)' if wanted else ''}")


def plug(hub: Process, holder: Process, node: str, address: str) -> None:
    """Link a node to the switch, replacing an old link.  Raises RoleFailed."""
    _run(*_in_network(hub), _program("ip"), "link", "del", "dev", node)  # of an earlier holder; usually there is none
    add = f"link add dev {node} type veth peer name eth0 netns {holder.pid}"
    _batch(hub, add, f"link set dev {node} master {_BRIDGE} up")
    _batch(holder, f"addr add {address}/24 dev eth0", "link set eth0 up")


def forward(hub: Process, node: str, *, is_cut: bool) -> None:
    """Unplug a node from the switch, or plug it in again; the node's own interface stays up."""
    _batch(hub, f"link set dev {node} {'nomaster' if is_cut else f'master {_BRIDGE}'}")


def leave(hub: Process) -> None:
    """Remove this machine's interface now; the kernel would do so some moments after the hub's end."""
    _run(*_in_network(hub), _program("ip"), "link", "del", "dev", "host")


def interface_of(subnet: str) -> str:
    """This machine's interface in a cluster's subnet."""
    return "rlhpc-" + subnet.removeprefix("198.").replace(".", "-")


def _join_host(hub: Process, subnet: str, label: str) -> bool:
    name = interface_of(subnet)
    done = _run(
        _program("ip"), "link", "add", "dev", name, "type", "veth", "peer", "name", "host", "netns", str(hub.pid)
    )
    if done.returncode:
        if "exists" in done.stderr:
            return False
        raise RoleFailed(f"ip link add {name}: {done.stderr.strip()}")
    _batch(hub, f"link set dev host master {_BRIDGE} up")
    _batch(
        None,
        f"link set dev {name} alias {label}",
        f"addr add {machine_address(subnet)}/24 dev {name}",
        f"link set dev {name} up",
    )
    return True


def _routed() -> list[ipaddress.IPv4Network]:
    """Networks that this machine already has a route to."""
    lines = _run(_program("ip"), "-4", "route", "show", "table", "all").stdout.splitlines()
    words = [word for line in lines for word in line.split()[:2] if word[0].isdigit()]
    found = [ipaddress.IPv4Network(word, strict=False) for word in words]
    return [network for network in found if network.prefixlen]


def _in_network(holder: Process | None) -> list[str]:
    return [_program("nsenter"), f"--target={holder.pid}", "--net"] if holder else []


def _batch(holder: Process | None, *lines: str) -> None:
    """Commands of ip in a holder's network, or in this machine's.  Raises RoleFailed: one failed."""
    done = _run(*_in_network(holder), _program("ip"), "-batch", "-", given="\n".join(lines) + "\n")
    if done.returncode:
        raise RoleFailed(f"ip {'; '.join(lines)}: {done.stderr.strip().splitlines()[0]}")


def _run(*command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)


def _program(name: str) -> str:
    """Absolute path of a program; the bare name if it is not found."""
    return shutil.which(name, path=os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/sbin"])) or name
