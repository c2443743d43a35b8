"""One dev cluster: start it, query it, end it.

Input: a directory and a shape.  Guarantees: all files are below the directory; only recorded processes and those of the
cluster's own jobs are ever signalled; `stop` leaves none of them; job ids continue from the last start.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import psutil

from launch.private_slurm import processes
from launch.private_slurm import shape as accounting
from launch.private_slurm.daemons import (
    BEFORE_NODES,
    CONTROLLER,
    HUB,
    MUNGED,
    Daemons,
    Network,
    daemon_of,
    reserved_ports,
)
from launch.private_slurm.packages import Installation, obtain
from launch.private_slurm.processes import Process, holding, slurm_user, wait_gone, with_descendants, with_environment
from launch.private_slurm.shape import (
    LOOPBACK,
    ClusterLayout,
    ClusterShape,
    Description,
    Ground,
    cgroup_conf,
    check_own_name,
    check_owner,
    default_shape,
    gres_conf,
    slurm_conf,
)
from rlhpc.base.patience import Deadline
from rlhpc.base.processes import own_user
from rlhpc.protocol.errors import ConfigError, RoleFailed, RunDirectoryError

# -------------------------------------------------------------------------------------------------------------- cluster

_BROKEN = ("inval", "drain", "fail", "error")  # node states that do not change by waiting
_UP = ("idle", "planned", "mixed", "allocated", "completing")
IDLE = ("idle", "planned")  # planned: idle with a job to come, and for a moment after that job is gone
_TIMED_OUT = "Socket timed out"  # in what a command says if slurmctld did not answer in time
_COMMAND_S = 60.0


class DevCluster:
    """A cluster in a directory.  As a context manager it is started on entry and ended on exit."""

    def __init__(self, root: Path, description: Description, *, dies_with_parent: bool = False) -> None:
        """Used by `create` and `open`."""
        self.layout = ClusterLayout(root)
        self.shape = description.shape
        self.installation = Installation(Path(description.prefix) if description.prefix else None)
        self.daemons = Daemons(self.layout, self.installation, dies_with_parent=dies_with_parent)
        self.network = Network(self.layout, self.daemons, self.shape) if self.shape.has_networks else None
        self._first_job_id = description.first_job_id
        self._dies_with_parent = dies_with_parent
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    def create(
        cls, root: Path, shape: ClusterShape, installation: Installation, *, dies_with_parent: bool = False
    ) -> Self:
        """Take a new or empty directory.

        dies_with_parent: a process of its own ends jobs and daemons if this one is killed; for tests.
        Raises RunDirectoryError: it holds something, or its path is too long; ConfigError: networks without root.
        """
        if shape.has_networks:
            processes.require()
        root = root.resolve()  # processes are found again by the real paths of their open files
        layout = ClusterLayout(root)
        check_owner(root)
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise RunDirectoryError(f"{root}: exists and is not a dev cluster; choose a new or empty directory")
        layout.make()
        # As on a real site; different in each cluster and process, so that leftovers of jobs are not mixed up.
        first_job_id = 1_000_000 + (int(time.time()) + os.getpid() % 1000 * 9000) % 9_000_000
        prefix = str(installation.prefix) if installation.prefix else None
        description = Description(shape, prefix, first_job_id)
        layout.description.write_bytes(description.encode())
        return cls(root, description, dies_with_parent=dies_with_parent)

    @classmethod
    def open(cls, root: Path) -> Self:
        """The running or ended cluster of a directory.  Raises RunDirectoryError: there is none."""
        root = root.resolve()
        check_owner(root)
        try:
            return cls(root, Description.decode(ClusterLayout(root).description.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            raise RunDirectoryError(f"{root}: no dev cluster here; `rlhpc cluster up {root}` creates one") from None
        except ValueError as error:
            raise RunDirectoryError(f"{root}/cluster.json: damaged ({error}); delete {root}") from None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------------------ start and end

    def start(self, wait_s: float = 30.0) -> float:
        """Start every daemon and wait until all nodes are idle; returns the seconds that took.

        Raises RoleFailed: a daemon died or nodes stay away (everything is ended again); RunDirectoryError: it runs.
        """
        if self.is_running:
            raise RunDirectoryError(
                f"{self.layout.root}: already running; `rlhpc cluster down {self.layout.root}` ends it"
            )
        began = time.monotonic()
        if self.network:
            processes.require()
        check_own_name(self.installation.version)
        self._forget_last_life()
        if self._dies_with_parent:
            self._guard = self._guarded()
        try:
            if self.network:  # its addresses go into slurm.conf
                self.daemons.start(HUB)
                self.network.serve(HUB, wait_s)
            with reserved_ports(2 + len(self.shape.nodes)) as ports:
                self._write_files(ports)
                self.repair(wait_s)
        except BaseException:  # nothing is survived, but no daemon may be left behind
            self.stop()
            raise
        return time.monotonic() - began

    def repair(self, wait_s: float = 30.0) -> list[str]:
        """Restart the daemons that have died; returns their names.  Jobs continue.  Raises RoleFailed."""
        missing = self.revive(wait_s)
        self.wait_up(wait_s)
        return missing

    def revive(self, wait_s: float = 30.0) -> list[str]:
        """Restart dead daemons without waiting for the nodes."""
        strays = self.network.end_strays() if self.network else []
        missing = [name for name in self.daemon_names if name in strays or not self.daemons.is_alive(name)]
        for name in missing:
            self.daemons.start(name)
            self._wait_for_service(name, wait_s)
        return missing

    def stop(self, *, at_once: bool = False) -> None:
        """Cancel all jobs, end their remaining processes, then every daemon.  Does nothing if nothing runs.

        at_once: kill everything without asking Slurm first.
        """
        if not at_once and self.is_reachable():
            self.cancel_all()
            patience = Deadline(self.shape.times.kill_wait_s + 3.0)
            patience.wait_for(lambda: not self.run("squeue", "--noheader", check=False).strip(), 0.1)
        # A process that left its session is not seen by Slurm's tracking; it still carries our name in its environment.
        leftovers = with_descendants([*self.job_processes(), *self.step_daemons()])
        for each in leftovers:
            each.send(signal.SIGKILL)
        wait_gone(leftovers, 5.0)
        names = list(self.daemons.recorded())
        self.daemons.end(*[name for name in names if name not in BEFORE_NODES], at_once=at_once)
        if self.network:
            self.network.close()
        for name in reversed(BEFORE_NODES):
            self.daemons.end(*[each for each in names if each == name], at_once=at_once)
        if self._guard:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    def cancel_all(self) -> None:
        """Ask Slurm to end every job; returns before they have ended."""
        jobs = sorted(set(self.run("squeue", "--noheader", "--format=%A", check=False).split()))
        if jobs:
            self.run("scancel", *jobs, check=False)

    def delete(self) -> None:
        """End everything and delete the directory."""
        self.stop()
        shutil.rmtree(self.layout.root)

    # ------------------------------------------------------------------------------------------------------ questions

    @property
    def is_running(self) -> bool:
        """True while any of its daemons lives."""
        return any(found.is_alive for found in self.daemons.recorded().values())

    @property
    def daemon_names(self) -> list[str]:
        """All daemons in the order in which they start."""
        absent = {HUB} if self.network is None else set()
        absent |= set() if self.shape.has_accounting else {accounting.DATABASE, accounting.DAEMON}
        first = [name for name in BEFORE_NODES if name not in absent]
        return [*first, *(self.network.holders if self.network else []), *map(daemon_of, self.shape.nodes)]

    @property
    def export_lines(self) -> list[str]:
        """Shell commands for using the cluster."""
        extra = [f'export {name}="{value}${{{name}:+:${name}}}"' for name, value in self.installation.variables.items()]
        return [f"export SLURM_CONF={self.layout.slurm_conf}", *extra]

    def environment(self) -> dict[str, str]:
        """This process's environment, pointing to the cluster; for any program that calls Slurm's commands."""
        return {**self.installation.environment(os.environ), "SLURM_CONF": str(self.layout.slurm_conf)}

    def run(self, *command: str, check: bool = True, timeout_s: float = _COMMAND_S) -> str:
        """Run one of Slurm's commands; returns what it printed.  Raises RoleFailed: exit status not 0, or too slow.

        Commands wait only five seconds for an answer, too short on a loaded machine: all but submissions are repeated.
        """
        for _ in Deadline(timeout_s).polls(0.5):
            done = self._run_once(command, timeout_s)
            may_repeat = command[0] != "sbatch" or "--test-only" in command
            if not done.returncode or _TIMED_OUT not in done.stderr or not may_repeat:
                break
        if check and done.returncode:
            raise RoleFailed(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _run_once(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        words, environment = [self.installation.program(command[0]), *command[1:]], self.environment()
        try:
            return subprocess.run(
                words, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise RoleFailed(f"{' '.join(command)}: no answer in {timeout_s:.0f} s") from None

    def is_reachable(self) -> bool:
        """True if the controller accepts connections; asking a dead one with Slurm's commands takes 9 s and more."""
        if not self.daemons.is_alive(CONTROLLER):
            return False
        return _accepts(_value(self.layout.slurm_conf, "SlurmctldPort"))

    def wait_answer(self, wait_s: float = 30.0) -> None:
        """Return when the controller accepts connections.  Raises RoleFailed."""
        for _ in Deadline(wait_s).polls(0.05):
            if self.is_reachable():
                return
            self.daemons.raise_for_dead()
        raise RoleFailed(f"the controller does not answer: {self.daemons.last_error(CONTROLLER)}")

    def node_states(self) -> dict[str, str]:
        """State of every node as `sinfo` shows it: idle, mixed, allocated, down, down*, …

        Without the "-" of newer releases, which says that a job is planned for it.
        """
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False).splitlines()
        rows = [line.split() for line in lines if len(line.split()) == 2]
        return {node: state.removesuffix("-") for node, state in rows}

    def wait_idle(self, wait_s: float = 30.0) -> None:
        """Return when every node is idle.  Raises RoleFailed with the reason."""
        self.wait_up(wait_s, IDLE)

    def wait_up(self, wait_s: float = 30.0, states: Sequence[str] = _UP) -> None:
        """Return when every node is in one of `states`.  Raises RoleFailed with the reason."""
        for _ in Deadline(wait_s).polls(0.05):
            self.daemons.raise_for_dead()
            found = self.node_states() if self.is_reachable() else {}
            if len(found) == len(self.shape.nodes) and set(found.values()) <= set(states):
                return
            broken = {node: state for node, state in found.items() if state.startswith(_BROKEN)}
            if broken:
                break
        reasons = self.run("sinfo", "--list-reasons", "--noheader", "--format=%N: %E", check=False).strip()
        wanted, seen = " or ".join(states), broken or found or "the controller does not answer"
        raise RoleFailed(
            f"nodes not {wanted} after {wait_s:.0f} s: {seen} {reasons} ({self.daemons.last_error(CONTROLLER)})"
        )

    def step_daemons(self, node: str | None = None) -> list[Process]:
        """slurmstepd processes, of one node or of all: each holds its node's log open."""
        nodes = [node] if node else self.shape.nodes
        return [found for each in nodes for found in holding(self.layout.log(daemon_of(each)), "slurmstepd")]

    def job_processes(self, node: str | None = None) -> list[Process]:
        """Processes of jobs, of one node or of all, including those that have left their session."""
        ours = (f"SLURM_CONF={self.layout.slurm_conf}", f"SLURM_CLUSTER_NAME={self._name}")
        return with_environment(ours, ("SLURM_JOB_ID=", *([f"SLURMD_NODENAME={node}"] if node else [])))

    # ------------------------------------------------------------------------------------------------------ internals

    @property
    def _name(self) -> str:
        return "dev" + hashlib.sha256(os.fsencode(self.layout.root)).hexdigest()[:8]

    def _guarded(self) -> subprocess.Popen[bytes]:
        """Start the process that ends the cluster when this one is gone."""
        program = f"from {__name__} import end_after; end_after({os.getpid()}, {str(self.layout.root)!r})"
        return subprocess.Popen([sys.executable, "-c", program], start_new_session=True)

    def _wait_for_service(self, name: str, wait_s: float) -> None:
        """Wait until later daemons can use a daemon."""
        layout = self.layout
        if self.network and name in (HUB, *self.network.holders):
            self.network.serve(name, wait_s)
        if name == MUNGED:
            self.daemons.wait_until(layout.munge_socket.is_socket, name, wait_s)
        if name == accounting.DATABASE:
            self.daemons.wait_until(layout.database_socket.is_socket, name, wait_s)
        if name == accounting.DAEMON:
            port = _value(layout.slurmdbd_conf, "DbdPort")
            self.daemons.wait_until(lambda: _accepts(port), name, wait_s)
            user, account = slurm_user(), accounting.ACCOUNT
            for what in (
                ("add", "cluster", self._name),
                ("add", "account", account),
                ("add", "user", user, f"account={account}"),
                ("modify", "user", "where", f"name={user}", "set", f"defaultaccount={account}"),
            ):
                self.run("sacctmgr", "--immediate", *what, check=False)  # also fails if it exists already

    def _write_files(self, ports: list[int]) -> None:
        layout, shape = self.layout, self.shape
        layout.make()
        ground = Ground(
            cluster_name=self._name,
            user=slurm_user(),
            plugins=self.installation.plugins,
            version=self.installation.version,
            controller_port=ports[0],
            node_ports=dict(zip(shape.nodes, ports[2:], strict=True)),
            accounting_port=ports[1] if shape.has_accounting else None,
            first_job_id=self._first_job_id,
            subnet=self.network.subnet if self.network else LOOPBACK,
        )
        layout.slurm_conf.write_text(slurm_conf(shape, layout, ground), encoding="utf-8")
        if shape.has_accounting:
            layout.slurmdbd_conf.touch(0o600)
            text = accounting.slurmdbd_conf(layout, ground.user, ground.plugins, ports[1])
            layout.slurmdbd_conf.write_text(text, encoding="utf-8")
        layout.gres_conf.write_text(gres_conf(shape, layout), encoding="utf-8")
        layout.activate.write_text("".join(f"{line}\n" for line in self.export_lines), encoding="utf-8")
        layout.cgroup_conf.write_text(cgroup_conf(ground.version), encoding="utf-8")
        for group in shape.groups:
            for node in group.nodes:
                layout.spool(node).mkdir(parents=True, exist_ok=True)
                layout.devices(node).mkdir(parents=True, exist_ok=True)
                for index in range(group.gpus):
                    device = layout.devices(node) / f"nvidia{index}"
                    if not device.is_symlink():
                        device.symlink_to("/dev/null")  # slurmd asks for a device file and follows links

    def _forget_last_life(self) -> None:
        """Remove records of daemons that no longer exist, as after a reboot."""
        for name in self.daemons.recorded():
            self.layout.pid_file(name).unlink()
        for path in (self.layout.munge_socket, self.layout.database_socket, self.layout.subnet):
            path.unlink(missing_ok=True)


def end_after(parent: int, root: str) -> None:
    """Wait for the end of a process, then end the cluster of a directory, if there is one.

    Daemons have a signal for the death of their parent; jobs have left it, and would go on without a controller.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(parent).wait()
    with contextlib.suppress(RunDirectoryError):
        DevCluster.open(Path(root)).stop(at_once=True)


def _value(path: Path, key: str) -> int:
    """A number in one of Slurm's files."""
    return int(path.read_text(encoding="utf-8").split(f"{key}=", 1)[1].split()[0])


def _accepts(port: int) -> bool:
    """True if something listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- commands
#
# The commands `rlhpc cluster up | status | down`.
#
# Input: parsed options.  Output: printed text and the exit status.


def act(options: argparse.Namespace) -> int:
    """Run the requested command; returns the exit status."""
    return {"up": up, "status": status, "down": down}[options.action](options)


def up(options: argparse.Namespace) -> int:
    """Start a cluster, or restart its dead daemons; print how to use it."""
    root = directory(options)
    counts = {name: getattr(options, name) for name in ("train", "gen", "cpu", "gpus")}
    asked = {name: count for name, count in counts.items() if count is not None}
    shape = replace(default_shape(**asked), has_accounting=options.accounting, has_networks=options.networks)
    if ClusterLayout(root).description.exists():
        cluster = DevCluster.open(root)
        if (asked or options.accounting or options.networks) and shape != cluster.shape:
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
