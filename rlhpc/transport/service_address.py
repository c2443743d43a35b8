"""Addresses of the run's services: where each process of a [[service]] answers HTTP requests, and with which key.

    a service process ── publish ──▶ rendezvous/service-K.json ── addresses_of(NAME) ──▶ generators, reward workers

A file is written whole and replaced by the process's next incarnation.  It is a hint, which may outlive its process: a
client that gets no answer reads the files again.  Light enough for reward workers: no sockets, no pydantic.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhpc.base.files import write_atomically
from rlhpc.base.patience import seen

ADDRESS_PATTERN = "service-*.json"


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """The place where a process of a service answers."""

    service: str  # name of its [[service]]
    replica: int  # number of the process: service-REPLICA
    url: str  # "http://HOST:PORT/v1"
    key: str  # to be sent as "Authorization: Bearer KEY"
    model: str  # name by which requests refer to its model
    incarnation: str
    pid: int
    host: str


def publish_address(directory: Path, address: ServiceAddress) -> None:
    """Publish the address, readable by the run's owner only, in place of an earlier incarnation's.  Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(_file(directory, address.replica), json.dumps(asdict(address)).encode(), mode=0o600)


def withdraw_address(directory: Path, address: ServiceAddress) -> None:
    """Withdraw the address, but not that of a later incarnation.  Idempotent."""
    if address in addresses_of(directory, address.service):
        _file(directory, address.replica).unlink(missing_ok=True)


def addresses_of(directory: Path, service: str) -> list[ServiceAddress]:
    """Return the addresses of a service, by number; without those that are missing or unreadable at the moment."""
    found, none = list[ServiceAddress](), list[Path]()
    for file in seen(lambda: sorted(directory.glob(ADDRESS_PATTERN)), none):
        with suppress(OSError, ValueError, TypeError):
            found.append(ServiceAddress(**json.loads(file.read_bytes())))
    return sorted((each for each in found if each.service == service), key=lambda each: each.replica)


def _file(directory: Path, replica: int) -> Path:
    return directory / f"service-{replica}.json"
