"""The network of a dev cluster: a switch, and for every node a namespace with its own address and host name.

Input: the daemons' records.  Each namespace is held by an otherwise idle process that is recorded, watched, restarted
and ended like any daemon; namespaces.py has the commands.
"""

from __future__ import annotations

import socket

from launch.dev_cluster import namespaces
from launch.dev_cluster.daemons import HUB, Daemons, daemon_of, holder_of
from launch.dev_cluster.layout import ClusterLayout
from launch.dev_cluster.processes import Process
from launch.dev_cluster.shape import ClusterShape, machine_address
from rlhpc.errors import RoleFailed


class Network:
    """Joins what its holders hold.  Holders are started and ended by Daemons under the names in `names`."""

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
        """Join what a holder that has just been started holds.  Raises RoleFailed."""
        self._daemons.wait_until(lambda: namespaces.is_ready(self._daemons.find(name)), name, wait_s)
        if name != HUB:
            self._plug(name)
            return
        # A switch that is started anew finds the addresses in slurm.conf, and the nodes without a link.
        before = self.subnet if self._layout.subnet.exists() else None
        subnet = namespaces.claim_subnet(self._holder(HUB), str(self._layout.root), before)
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
        namespaces.forward(self._holder(HUB), node, is_cut=is_cut)

    def close(self) -> None:
        """Take this machine's interface away.  Does nothing where there is none."""
        hub = self._daemons.find(HUB)
        if hub and hub.is_alive:
            namespaces.leave(hub)

    def _plug(self, holder: str) -> None:
        node = holder.removeprefix(holder_of(""))
        address = self._shape.address(node, self.subnet)
        namespaces.plug(self._holder(HUB), self._holder(holder), node, address)

    def _hosts(self, subnet: str) -> str:
        """Text of a node's /etc/hosts: there is no name server that it could reach."""
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
