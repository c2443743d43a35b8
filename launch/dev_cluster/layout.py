"""Every path of a dev cluster, defined once.

Input: the cluster's directory.  Guarantees that every unix socket below it fits into Linux's limit of 107 bytes.
"""

from __future__ import annotations

from pathlib import Path

from rlhpc.errors import RunDirectoryError

# The longest socket is the one of a step: ROOT/spool/train99/train99_67108863.4294967291.9 has to fit into 107 bytes.
LONGEST_ROOT = 63


class ClusterLayout:
    """Paths below one cluster's directory.  Creates nothing until `make`."""

    def __init__(self, root: Path) -> None:
        """Raises RunDirectoryError: not absolute, too long for sockets, or not to be written in slurm.conf."""
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
        self.munge_socket = self.munge / "munge.sock"  # where clients and daemons have their credentials made
        self.run = root / "run"  # one file per living daemon
        self.logs = root / "log"  # two files per daemon: its log, and what it printed
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
