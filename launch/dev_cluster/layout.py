"""Every path of a dev cluster, defined once.

Input: the cluster's directory.  Guarantees that every unix socket below it fits into Linux's limit of 107 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhpc.errors import RunDirectoryError

# The longest socket is the one of a step: ROOT/spool/train99/train99_67108863.4294967291.9 has to fit into 107 bytes.
LONGEST_ROOT = 63


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Paths below one cluster's directory.  Creates nothing until `make`."""

    root: Path

    def __post_init__(self) -> None:
        """Raises RunDirectoryError: not absolute, too long for sockets, or not to be written in slurm.conf."""
        text = str(self.root)
        if not self.root.is_absolute():
            raise RunDirectoryError(f"{text}: legal: an absolute path for a cluster's directory")
        if len(text.encode()) > LONGEST_ROOT:
            raise RunDirectoryError(
                f"{text}: {len(text.encode())} bytes; unix sockets below it leave room for {LONGEST_ROOT}: "
                "choose a shorter path, for example in /tmp"
            )
        if any(character in text for character in " ,=#%\"'\\\n"):
            raise RunDirectoryError(f"{text}: slurm.conf cannot hold a path with blanks, quotes or any of , = # % \\")

    @property
    def description(self) -> Path:
        """The cluster's description as JSON; its presence marks the directory as ours."""
        return self.root / "cluster.json"

    @property
    def slurm_conf(self) -> Path:
        """The file for SLURM_CONF."""
        return self.root / "etc" / "slurm.conf"

    @property
    def activate(self) -> Path:
        """Shell commands that point a shell to the cluster."""
        return self.root / "activate"

    @property
    def gres_conf(self) -> Path:
        """GPUs of every node."""
        return self.root / "etc" / "gres.conf"

    @property
    def cgroup_conf(self) -> Path:
        """cgroup.conf, which disables cgroups."""
        return self.root / "etc" / "cgroup.conf"

    @property
    def subnet(self) -> Path:
        """First three numbers of the nodes' addresses, where they have a network."""
        return self.root / "etc" / "subnet"

    @property
    def hosts(self) -> Path:
        """/etc/hosts of nodes that have a network."""
        return self.root / "etc" / "hosts"

    @property
    def state(self) -> Path:
        """The controller's state: jobs survive its restart."""
        return self.root / "state"

    @property
    def munge(self) -> Path:
        """Key, socket and log of munged; closed to writing by others."""
        return self.root / "munge"

    @property
    def munge_key(self) -> Path:
        """Secret that all daemons share, 0400."""
        return self.munge / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """Where clients and daemons have their credentials made."""
        return self.munge / "munge.sock"

    @property
    def run(self) -> Path:
        """One file per living daemon."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        """Two files per daemon: its log, and what it printed."""
        return self.root / "log"

    @property
    def slurmdbd_conf(self) -> Path:
        """Of the accounting daemon, 0600; must lie beside slurm.conf."""
        return self.root / "etc" / "slurmdbd.conf"

    @property
    def database(self) -> Path:
        """MariaDB's files, where there is accounting."""
        return self.root / "db"

    @property
    def database_socket(self) -> Path:
        """The database's only socket."""
        return self.database / "mysql.sock"

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
