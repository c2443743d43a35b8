"""How roles find each other: one small file per bound socket in the run directory.

A file is written whole (temporary name, fsync, rename) and overwritten by the server's next incarnation.  It is a hint:
it may outlive its server, so a client waits for the handshake and then reads the file again (open.py).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlhpc.deadline import Deadline
from rlhpc.errors import ChannelTimeout, ProtocolError
from rlhpc.files import is_listed, write_atomically
from rlhpc.patience import seen
from rlhpc.transport.incarnation import is_earlier
from rlhpc.transport.sessions import peer_name

POLL_S, LATER_POLL_S = 0.05, 1.0
QUICK_S = 10.0  # after that poll slowly: a server may take hours, and many clients share the filesystem


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server end listens."""

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
        _raise_if_late(deadline, directory, channel, peer_name(role, replica))
        await asyncio.sleep(_poll_interval_s(deadline))
    return endpoint


def await_endpoint_blocking(
    directory: Path, channel: str, role: str, replica: int = 0, *, deadline: Deadline
) -> Endpoint:
    """Like await_endpoint, without an event loop."""
    while (endpoint := find(directory, channel, replica)) is None:
        _raise_if_late(deadline, directory, channel, peer_name(role, replica))
        time.sleep(_poll_interval_s(deadline))
    return endpoint


def _poll_interval_s(deadline: Deadline) -> float:
    return POLL_S if deadline.passed_s < QUICK_S else LATER_POLL_S


def _raise_if_late(deadline: Deadline, directory: Path, channel: str, name: str) -> None:
    if deadline.is_over:
        raise ChannelTimeout(
            f"{name} has not opened channel {channel!r} after {deadline.limit_s:g} s: "
            f"{_file(directory, channel, 0).parent} has no address for it; see its log"
        )


def _file(directory: Path, channel: str, replica: int) -> Path:
    return directory / f"{channel}-{replica}.json"
