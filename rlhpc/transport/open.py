"""Open channels of roles: bind the server end, or connect to one.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlhpc.base.files import is_listed, write_atomically
from rlhpc.base.patience import Deadline, passes, seen
from rlhpc.base.processes import allow_many_connections
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.contracts import BlockingClientChannel, ServerChannel
from rlhpc.protocol.errors import ChannelTimeout, ConfigError, ProtocolError, RunDirectoryError
from rlhpc.protocol.messages import ChannelSpec
from rlhpc.transport.channel import ZmqBlockingClient, ZmqClient, ZmqServer
from rlhpc.transport.sessions import is_earlier, peer_name

# ----------------------------------------------------------------------------------------------------------- rendezvous
#
# How roles find each other: one small file per bound socket in the run directory.
#
# A file is written whole (temporary name, fsync, rename) and overwritten by the server's next incarnation.  It is a
# hint: it may outlive its server, so a client waits for the handshake and then reads the file again (open.py).


POLL_S, LATER_POLL_S = 0.05, 1.0
QUICK_S = 10.0  # after that poll slowly: a server may take hours, and many clients share the filesystem


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The place where a server end listens."""

    channel: str
    role: str
    replica: int
    address: str
    incarnation: str
    pid: int
    host: str

    @property
    def name(self) -> str:
        """Name of the role instance."""
        return peer_name(self.role, self.replica)


def publish(directory: Path, endpoint: Endpoint) -> None:
    """Publish the endpoint, replacing an older incarnation's.  Makes the directory, 0700, if needed."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = _file(directory, endpoint.channel, endpoint.replica)
    write_atomically(file, msgspec.json.encode(endpoint), mode=0o600)


def withdraw(directory: Path, endpoint: Endpoint) -> None:
    """Withdraw the endpoint, but not a newer incarnation's.  Idempotent."""
    if find(directory, endpoint.channel, endpoint.replica) == endpoint:
        _file(directory, endpoint.channel, endpoint.replica).unlink(missing_ok=True)


def find(directory: Path, channel: str, replica: int = 0) -> Endpoint | None:
    """Return the endpoint of a server replica, or None: there is none, or it cannot be seen at the moment.

    Raises ProtocolError for a malformed file.
    """
    file = _file(directory, channel, replica)
    content = seen(lambda: file.read_bytes() if is_listed(file) else None, None)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=Endpoint)
    except msgspec.MsgspecError as error:
        raise ProtocolError(str(file), "endpoint", str(error)) from error


def successor(directory: Path, endpoint: Endpoint) -> Endpoint | None:
    """Return the successor of this server, or None: another incarnation, not of an earlier start.

    Returns None for a file that is missing or cannot be read at the moment.
    """
    try:
        found = find(directory, endpoint.channel, endpoint.replica)
    except ProtocolError:
        return None
    if found is None or found.incarnation == endpoint.incarnation:
        return None
    return None if is_earlier(found.incarnation, endpoint.incarnation) else found


async def await_endpoint(
    directory: Path,
    channel: str,
    role: str,
    replica: int = 0,
    *,
    deadline: Deadline,
    gone: str = "",
) -> Endpoint:
    """Wait for an endpoint, but not that of the incarnation `gone`.  Raises ChannelTimeout that says who is missing."""
    while (endpoint := find(directory, channel, replica)) is None or endpoint.incarnation == gone:
        _raise_if_unopened(deadline, directory, channel, peer_name(role, replica))
        await asyncio.sleep(_poll_interval_s(deadline))
    return endpoint


def await_endpoint_blocking(
    directory: Path, channel: str, role: str, replica: int = 0, *, deadline: Deadline
) -> Endpoint:
    """Do what await_endpoint does, without an event loop."""
    while (endpoint := find(directory, channel, replica)) is None:
        _raise_if_unopened(deadline, directory, channel, peer_name(role, replica))
        time.sleep(_poll_interval_s(deadline))
    return endpoint


def _poll_interval_s(deadline: Deadline) -> float:
    return POLL_S if deadline.passed_s < QUICK_S else LATER_POLL_S


def _raise_if_unopened(deadline: Deadline, directory: Path, channel: str, name: str) -> None:
    if deadline.is_over:
        raise ChannelTimeout(
            f"{name} has not opened channel {channel!r} after {deadline.limit_s:g} s: "
            f"{_file(directory, channel, 0).parent} has no address for it; see its log"
        )


def _file(directory: Path, channel: str, replica: int) -> Path:
    return directory / f"{channel}-{replica}.json"


# ----------------------------------------------------------------------------------------------------------------- open


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
    """Do what connect does, for a role without an event loop."""
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
