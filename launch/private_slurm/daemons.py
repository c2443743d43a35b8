"""The daemons of one cluster: start, find by record, and end each of them.

Input: Installation and ClusterLayout.  A daemon is identified by the file in run/ that holds its pid and start time, so
that any process of the same user can watch or end it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.private_slurm import processes, shape
from launch.private_slurm.packages import Installation
from launch.private_slurm.processes import Process, end, read_record, slurm_user, wait_gone, write_record
from launch.private_slurm.shape import ClusterLayout, ClusterShape, machine_address
from rlhpc.base.files import write_atomically
from rlhpc.base.patience import Deadline
from rlhpc.protocol.errors import RoleFailed, RunDirectoryError

# -------------------------------------------------------------------------------------------------------------- daemons

HUB, MUNGED, CONTROLLER = "network", "munged", "slurmctld"
BEFORE_NODES = (HUB, MUNGED, shape.DATABASE, shape.DAEMON, CONTROLLER)  # in the order of their start
_LOWEST_PORT = 10_000
_TERM_S = 10.0


def daemon_of(node: str) -> str:
    """Name of a node's daemon."""
    return f"slurmd-{node}"


def holder_of(node: str) -> str:
    """Name of the process that holds a node's network."""
    return f"{HUB}-{node}"


class Daemons:
    """Starts and ends daemons of one cluster.

    dies_with_parent: they get SIGTERM when the thread that started them ends; for tests, which may be killed.
    """

    def __init__(self, layout: ClusterLayout, installation: Installation, *, dies_with_parent: bool = False) -> None:
        self._layout, self._installation = layout, installation
        self._dies_with_parent = dies_with_parent and shutil.which("setpriv") is not None
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # to be reaped by us

    def start(self, name: str) -> None:
        """Start the daemon of that name, unless it lives.  Returns at once.  Raises SlurmMissing."""
        if (living := self.find(name)) and living.is_alive:
            return
        self._reap(name)
        if name == MUNGED and not self._layout.munge_key.exists():
            write_atomically(self._layout.munge_key, secrets.token_bytes(128), mode=0o400)
        environment = {**self._installation.environment(os.environ), "SLURM_CONF": str(self._layout.slurm_conf)}
        if name == shape.DATABASE:
            shape.prepare_database(self._layout, self._installation, slurm_user(), environment)
        if name == shape.DAEMON:  # the client library looks here for "localhost"
            environment["MYSQL_UNIX_PORT"] = str(self._layout.database_socket)
        guard = ["setpriv", "--pdeathsig", "TERM"] if self._dies_with_parent else []
        with self._layout.output(name).open("ab") as output:
            child = subprocess.Popen(
                [*guard, *self._command(name)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self._layout.root,
                start_new_session=True,
            )
        self._children[name] = child
        try:
            write_record(self._layout.pid_file(name), child.pid)
        except BaseException:  # nothing is survived; a daemon without a record would never be ended
            child.kill()
            self._reap(name)
            raise

    def find(self, name: str) -> Process | None:
        """The process recorded for a daemon, dead or alive; None: never started, or ended properly."""
        return read_record(self._layout.pid_file(name))

    def is_alive(self, name: str) -> bool:
        """True while it runs."""
        found = self.find(name)
        return found is not None and found.is_alive

    def recorded(self) -> dict[str, Process]:
        """Every daemon that has a record, in the order of their start."""
        names = sorted(path.stem for path in self._layout.run.glob("*.pid"))
        names.sort(key=lambda name: BEFORE_NODES.index(name) if name in BEFORE_NODES else len(BEFORE_NODES))
        return {name: found for name in names if (found := self.find(name))}

    def end(self, *names: str, at_once: bool = False) -> None:
        """End daemons by SIGTERM, SIGKILL after 10 s or at once, and remove their records."""
        end([found for name in names if (found := self.find(name))], 0.0 if at_once else _TERM_S)
        self._forget(*names)

    def kill(self, name: str) -> None:
        """End a daemon by SIGKILL, to simulate a crash.  Raises RunDirectoryError: it does not run."""
        found = self.find(name)
        if found is None or not found.is_alive:
            raise RunDirectoryError(f"{self._layout.root}: {name} is not running")
        found.send(signal.SIGKILL)
        wait_gone([found], 5.0)
        self._forget(name)

    def wait_until(self, is_ready: Callable[[], bool], name: str, patience_s: float) -> None:
        """Return when a daemon is serving.  Raises RoleFailed."""
        for _ in Deadline(patience_s).polls(0.02):
            if is_ready():
                return
            if not self.is_alive(name):
                raise RoleFailed(f"{name} ended by itself: {self.last_error(name)}")
        raise RoleFailed(f"{name} is not ready after {patience_s:.0f} s: {self.last_error(name)}")

    def raise_for_dead(self) -> None:
        """Raises RoleFailed with the last message of a recorded daemon that is dead."""
        for name, found in self.recorded().items():
            if not found.is_alive:
                raise RoleFailed(f"{name} ended by itself: {self.last_error(name)}")

    def last_error(self, name: str) -> str:
        """The last error in a daemon's logs, and where they are."""
        lines: list[str] = []
        for path in (self._layout.log(name), self._layout.output(name)):
            if path.exists():
                lines += path.read_text(encoding="utf-8", errors="replace").splitlines()
        grave = [line for line in lines if "fatal" in line or "rror" in line]
        return f"{(grave or lines or ['no output'])[-1].strip()} (logs: {self._layout.logs}/{name}.*)"

    def _command(self, name: str) -> list[str]:
        layout, program = self._layout, self._installation.program
        if name == MUNGED:
            munge = layout.munge
            return [
                *(program("munged"), "--foreground", "--force", "--num-threads=2"),
                *(f"--key-file={layout.munge_key}", f"--socket={layout.munge_socket}"),
                *(f"--pid-file={munge}/munged.pid", f"--log-file={layout.log(MUNGED)}"),
                f"--seed-file={munge}/munged.seed",
            ]
        if name == shape.DATABASE:
            command = shape.database_command(layout, self._installation, slurm_user())
            return [*command, *shape.serve_arguments(layout)]
        if name == shape.DAEMON:
            return [program("slurmdbd"), "-D"]
        if name == CONTROLLER:
            return [program("slurmctld"), "-D", "-f", str(layout.slurm_conf)]
        if name == HUB:
            return processes.hub_command()
        if name.startswith(holder_of("")):
            return processes.node_command(name.removeprefix(holder_of("")), layout.hosts)
        node = name.removeprefix(daemon_of(""))
        holder = self.find(holder_of(node))
        # An unpacked slurmd would look for its helper in /usr/sbin.
        helper = ["-d", program("slurmstepd")] if self._installation.prefix else []
        entry = processes.inside(holder) if holder else []
        return [*entry, program("slurmd"), "-D", "-f", str(layout.slurm_conf), "-N", node, *helper]

    def _forget(self, *names: str) -> None:
        for name in names:
            self._reap(name)
            self._layout.pid_file(name).unlink(missing_ok=True)

    def _reap(self, name: str) -> None:
        if child := self._children.pop(name, None):
            child.wait()


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free TCP ports below the ephemeral range, kept from every other cluster while the context lasts.

    The sockets are bound without SO_REUSEADDR, so that no second reservation gets the port; the option is set
    afterwards, so that Slurm's daemons, which set it, can bind.  Raises RunDirectoryError: not enough free ports.
    """
    low, high = _LOWEST_PORT, _lowest_ephemeral_port()
    held: list[socket.socket] = []
    try:
        for _ in range(100 * count):
            if len(held) == count:
                break
            candidate = socket.socket()
            try:
                candidate.bind(("", low + secrets.randbelow(high - low)))
            except OSError:
                candidate.close()
                continue
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.append(candidate)
        if len(held) < count:
            raise RunDirectoryError(f"only {len(held)} of {count} TCP ports between {low} and {high} are free")
        yield [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def _lowest_ephemeral_port() -> int:
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    low = int(path.read_text(encoding="ascii").split()[0]) if path.exists() else 32_768
    return low if low >= _LOWEST_PORT + 1000 else 61_000


# -------------------------------------------------------------------------------------------------------------- network
#
# The network of a dev cluster: a switch, and for every node a namespace with its own address and host name.
#
# Input: the daemons' records.  Each namespace is held by an otherwise idle process that is recorded, watched, restarted
# and ended like any daemon; private_slurm/processes.py has the commands.


class Network:
    """Joins the nodes' namespaces.  Their holders are started and ended by Daemons under the names in `names`."""

    def __init__(self, layout: ClusterLayout, daemons: Daemons, shape: ClusterShape) -> None:
        self._layout, self._daemons, self._shape = layout, daemons, shape

    @property
    def holders(self) -> list[str]:
        """Names of the processes that hold nodes."""
        return [holder_of(node) for node in self._shape.nodes]

    @property
    def subnet(self) -> str:
        """First three numbers of every address."""
        return self._layout.subnet.read_text(encoding="ascii").strip()

    def serve(self, name: str, wait_s: float) -> None:
        """Join the namespace of a holder that has just been started.  Raises RoleFailed."""
        self._daemons.wait_until(lambda: processes.is_ready(self._daemons.find(name)), name, wait_s)
        if name != HUB:
            self._plug(name)
            return
        # A restarted switch finds the addresses in slurm.conf, and nodes without a link.
        before = self.subnet if self._layout.subnet.exists() else None
        subnet = processes.claim_subnet(self._holder(HUB), str(self._layout.root), before)
        self._layout.subnet.write_text(f"{subnet}\n", encoding="ascii")
        self._layout.hosts.write_text(self._hosts(subnet), encoding="ascii")
        for holder in self.holders:
            if self._daemons.is_alive(holder):
                self._plug(holder)

    def end_strays(self) -> list[str]:
        """End every slurmd whose node's holder is gone: its network is unreachable; returns names."""
        dead = [node for node in self._shape.nodes if not self._daemons.is_alive(holder_of(node))]
        names = [daemon_of(node) for node in dead if self._daemons.is_alive(daemon_of(node))]
        self._daemons.end(*names)
        return names

    def forward(self, node: str, *, is_cut: bool) -> None:
        """Cut a node off from every other one and from this machine, or heal that."""
        processes.forward(self._holder(HUB), node, is_cut=is_cut)

    def close(self) -> None:
        """Remove this machine's interface, if there is one."""
        hub = self._daemons.find(HUB)
        if hub and hub.is_alive:
            processes.leave(hub)

    def _plug(self, holder: str) -> None:
        node = holder.removeprefix(holder_of(""))
        address = self._shape.address(node, self.subnet)
        processes.plug(self._holder(HUB), self._holder(holder), node, address)

    def _hosts(self, subnet: str) -> str:
        """Text of a node's /etc/hosts: it cannot reach a name server."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{self._shape.address(node, subnet)} {node}" for node in self._shape.nodes]
        return "\n".join([*lines, f"{machine_address(subnet)} {socket.gethostname()}"]) + "\n"

    def _holder(self, name: str) -> Process:
        found = self._daemons.find(name)
        if found is None or not found.is_alive:
            raise RoleFailed(
                f"{self._layout.root}: {name} is not running; `rlhpc cluster up {self._layout.root}` restarts it"
            )
        return found
