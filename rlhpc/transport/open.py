"""How roles open channels: bind the server end, or connect to one.

Input: a ChannelSpec, the run's layout and its [transport] settings.  Output: channels that are published, found,
encrypted and admitted.  Guarantees: a client is returned only after the server has admitted it; if the address is that
of a dead server, the file is read again until the server is back or the time is over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from typing import Any

from rlhpc.config_sections import TransportConfig
from rlhpc.contracts import BlockingClientChannel, ServerChannel
from rlhpc.deadline import Deadline
from rlhpc.errors import ChannelTimeout, ConfigError, ProtocolError, RunDirectoryError
from rlhpc.open_files import allow_many_connections
from rlhpc.patience import passes
from rlhpc.run_layout import RunLayout
from rlhpc.topology import ChannelSpec
from rlhpc.transport.rendezvous import (
    Endpoint,
    await_endpoint,
    await_endpoint_blocking,
    publish,
    withdraw,
)
from rlhpc.transport.sessions import peer_name
from rlhpc.transport.zmq_client import ZmqBlockingClient, ZmqClient
from rlhpc.transport.zmq_server import ZmqServer

log = logging.getLogger("rlhpc.transport")
ATTEMPT_S = 2.0  # wait for a handshake before checking whether the address has changed
PAUSE_S = 0.1  # between attempts; a new key is admitted within zap.REREAD_AFTER_S


class PublishedServer(ZmqServer):
    """A ZmqServer whose address is in the rendezvous directory while it is open."""

    def __init__(self, spec: ChannelSpec, layout: RunLayout, endpoint: dict[str, Any], **options: Any) -> None:
        """Bind, then publish.  options: those of ZmqServer.  Raises OSError, which leaves nothing open."""
        super().__init__(spec, **options)
        self._directory = layout.rendezvous
        self.endpoint = Endpoint(address=self.address, **endpoint)
        try:
            publish(self._directory, self.endpoint)
        except OSError:
            self.close_now()
            raise

    async def close(self) -> None:
        """Withdraw the address, if the filesystem lets us, then close."""
        try:
            withdraw(self._directory, self.endpoint)
        except (OSError, ProtocolError) as error:  # it is a hint, and may outlive us
            log.warning("%s: the address stays: %s", self.endpoint.name, error)
        await super().close()


class FoundClient(ZmqClient):
    """A ZmqClient that knows which incarnation of the server it is connected to."""

    def __init__(self, spec: ChannelSpec, endpoint: Endpoint, **identity: Any) -> None:
        """Begin to connect.  identity: keywords of ZmqClient."""
        self.endpoint = endpoint
        super().__init__(spec, endpoint.address, **identity)


def open_server(
    spec: ChannelSpec,
    *,
    layout: RunLayout,
    config: TransportConfig,
    replica: int,
    incarnation: str,
    interface: str | None = None,
) -> ServerChannel:
    """Bind as ``{spec.server}-{replica}`` and publish the address.  Call it in the loop that will use the channel.

    interface: IPv4 address to listen at under tcp; None: the address of this host's name.
    Raises the process's limit of open files.  Raises RunDirectoryError for keys, ConfigError for an address that cannot
    be bound, OSError for one that cannot be published; nothing is open then.
    """
    allow_many_connections()
    endpoint = {
        "channel": spec.name,
        "role": spec.server,
        "replica": replica,
        "incarnation": incarnation,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    name = peer_name(spec.server, replica)
    return PublishedServer(
        spec,
        layout,
        endpoint,
        name=name,
        config=config,
        secrets=layout.secrets,
        clock=time.monotonic,
        interface=interface,
    )


async def connect(
    spec: ChannelSpec,
    *,
    layout: RunLayout,
    config: TransportConfig,
    role: str,
    replica: int,
    incarnation: str,
    server_replica: int = 0,
    timeout_s: float,
    gone: str = "",
    awaits_keys: bool = False,
) -> FoundClient:
    """Find the server, connect as ``{role}-{replica}`` and wait until it has admitted us.

    gone: incarnation of a server that is known to be dead; its address is ignored.
    awaits_keys: wait for missing keys, too, for example while a new attempt of the run creates its own.
    Raises ChannelTimeout that says who is missing or why it does not answer, RunDirectoryError for keys, ConfigError
    for an address that cannot be reached from this host.
    """
    deadline = Deadline(timeout_s)
    while True:
        endpoint = await await_endpoint(
            layout.rendezvous, spec.name, spec.server, server_replica, deadline=deadline, gone=gone
        )
        left_s = deadline.left_s
        identity = _identity(layout, config, role, replica, incarnation, endpoint)
        try:
            client = FoundClient(spec, endpoint, **identity)
        except RunDirectoryError as error:  # its keys
            if left_s <= 0 or not passes(error, is_there=awaits_keys):
                raise
            await asyncio.sleep(PAUSE_S)
            continue
        try:
            why = await client.admission(min(ATTEMPT_S, left_s))
        except BaseException:  # a cancelled connect must not leave a socket behind
            await client.close()
            raise
        if not why:
            return client
        await client.close()
        _raise_if_late(deadline, endpoint, why)
        await asyncio.sleep(PAUSE_S)


def connect_blocking(
    spec: ChannelSpec,
    *,
    layout: RunLayout,
    config: TransportConfig,
    role: str,
    replica: int,
    incarnation: str,
    server_replica: int = 0,
    timeout_s: float,
) -> BlockingClientChannel:
    """Like connect, for a role without an event loop."""
    deadline = Deadline(timeout_s)
    while True:
        endpoint = await_endpoint_blocking(layout.rendezvous, spec.name, spec.server, server_replica, deadline=deadline)
        left_s = deadline.left_s
        identity = _identity(layout, config, role, replica, incarnation, endpoint)
        try:
            client = ZmqBlockingClient(spec, endpoint.address, **identity)
        except RunDirectoryError as error:  # its keys
            if left_s <= 0 or not passes(error, is_there=False):
                raise
            time.sleep(PAUSE_S)
            continue
        why = client.admission(min(ATTEMPT_S, left_s))
        if not why:
            return client
        client.close()
        _raise_if_late(deadline, endpoint, why)
        time.sleep(PAUSE_S)


def _identity(
    layout: RunLayout, config: TransportConfig, role: str, replica: int, incarnation: str, endpoint: Endpoint
) -> dict[str, Any]:
    """Keywords of both clients.  Raises ConfigError if the address cannot be reached from here."""
    is_local_only = endpoint.address.startswith(("ipc:", "tcp://127."))
    if is_local_only and endpoint.host != socket.gethostname():
        raise ConfigError(
            f"{endpoint.name} listens at {endpoint.address} on {endpoint.host}, which {socket.gethostname()} cannot "
            "reach; transport.kind must be 'tcp', with an address that other hosts know"
        )
    return {
        "name": peer_name(role, replica),
        "incarnation": incarnation,
        "server_name": endpoint.name,
        "config": config,
        "secrets": layout.secrets,
    }


def _raise_if_late(deadline: Deadline, endpoint: Endpoint, why: str) -> None:
    if deadline.is_over:
        raise ChannelTimeout(
            f"{endpoint.name} (process {endpoint.pid} on {endpoint.host}, incarnation {endpoint.incarnation}) did not "
            f"admit us to channel {endpoint.channel!r} within {deadline.limit_s:g} s: {why} at {endpoint.address}"
        )
