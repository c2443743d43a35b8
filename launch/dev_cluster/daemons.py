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

from launch.dev_cluster import accounting, namespaces
from launch.dev_cluster.installation import Installation
from launch.dev_cluster.layout import ClusterLayout
from launch.dev_cluster.processes import Process, end, read_record, slurm_user, wait_gone, write_record
from rlhpc.deadline import Deadline
from rlhpc.errors import RoleFailed, RunDirectoryError
from rlhpc.files import write_atomically

HUB, MUNGED, CONTROLLER = "network", "munged", "slurmctld"
BEFORE_NODES = (HUB, MUNGED, accounting.DATABASE, accounting.DAEMON, CONTROLLER)  # in the order of their start
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
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # whose status we have to fetch

    def start(self, name: str) -> None:
        """Start the daemon of that name, unless it lives.  Returns at once.  Raises SlurmMissing."""
        if (living := self.find(name)) and living.is_alive:
            return
        self._reap(name)
        if name == MUNGED:
            self._make_key()
        environment = {**self._installation.environment(os.environ), "SLURM_CONF": str(self._layout.slurm_conf)}
        if name == accounting.DATABASE:
            accounting.prepare_database(self._layout, self._installation, slurm_user(), environment)
        if name == accounting.DAEMON:  # the client library looks here for "localhost"
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
        except BaseException:  # survived: nothing; what has no record, nobody would end
            child.kill()
            self._reap(name)
            raise

    def find(self, name: str) -> Process | None:
        """The process recorded for a daemon, dead or alive; None: never started, or ended in good order."""
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
        """SIGTERM, SIGKILL after 10 s or at once, and forget them."""
        end([found for name in names if (found := self.find(name))], 0.0 if at_once else _TERM_S)
        self._forget(*names)

    def kill(self, name: str) -> None:
        """SIGKILL, as a crash would.  Raises RunDirectoryError: it does not run."""
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
        if name == accounting.DATABASE:
            command = accounting.database_command(layout, self._installation, slurm_user())
            return [*command, *accounting.serve_arguments(layout)]
        if name == accounting.DAEMON:
            return [program("slurmdbd"), "-D"]
        if name == CONTROLLER:
            return [program("slurmctld"), "-D", "-f", str(layout.slurm_conf)]
        if name == HUB:
            return namespaces.hub_command()
        if name.startswith(holder_of("")):
            return namespaces.node_command(name.removeprefix(holder_of("")), layout.hosts)
        node = name.removeprefix(daemon_of(""))
        holder = self.find(holder_of(node))
        # An unpacked slurmd would look for its helper in /usr/sbin.
        helper = ["-d", program("slurmstepd")] if self._installation.prefix else []
        entry = namespaces.inside(holder) if holder else []
        return [*entry, program("slurmd"), "-D", "-f", str(layout.slurm_conf), "-N", node, *helper]

    def _make_key(self) -> None:
        if not self._layout.munge_key.exists():
            write_atomically(self._layout.munge_key, secrets.token_bytes(128), mode=0o400)

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

    The sockets are bound without SO_REUSEADDR, so that no second reservation gets the port, and given it afterwards,
    so that Slurm's daemons, which set it, do.  Raises RunDirectoryError: not enough free ports.
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
