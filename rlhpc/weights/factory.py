"""Create weight publishers and receivers by the name of the transport."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config.tables import WeightsConfig
from rlhpc.protocol.contracts import WeightPublisher, WeightReceiver
from rlhpc.protocol.errors import ConfigError
from rlhpc.weights.broadcast import GroupPublisher, GroupReceiver
from rlhpc.weights.choice import TRANSPORTS
from rlhpc.weights.deltas import HostImage
from rlhpc.weights.ipc import IpcPublisher, IpcReceiver
from rlhpc.weights.memory import indexed


def make_publisher(weights: WeightsConfig, *, directory: Path, device: str, host: str = "") -> WeightPublisher:
    """The trainer's end.

    weights: with the transport that choice.py chose, not "auto".
    directory: the run's weights directory.  device: "cpu" or "cuda", where the trainer yields its tensors.
    host: address at which other machines reach this one; "" if all members run on this machine.
    The manifest gives the size of buckets.  Raises ConfigError for an unknown transport.
    """
    transport = _known(weights.transport)
    if transport == "ipc":
        return IpcPublisher(directory, indexed(device), weights.timeout_s)
    image = HostImage(weights.full_every) if weights.sends_changes else None
    return GroupPublisher(transport, directory, weights.timeout_s, device=indexed(device), host=host, image=image)


def make_receiver(transport: str, *, device: str, timeout_s: float) -> WeightReceiver:
    """An engine worker's end.  transport: a WeightGroup's; the address of the publisher comes with the group.

    device: the worker's; "cuda" without an index is the calling thread's current GPU, whatever thread receives later.
    Raises ConfigError for an unknown transport.
    """
    if _known(transport) == "ipc":
        return IpcReceiver(indexed(device), timeout_s)
    return GroupReceiver(transport, indexed(device), timeout_s)


def _known(transport: str) -> str:
    if transport not in TRANSPORTS:
        raise ConfigError(f"weights.transport={transport!r}; legal: {', '.join(TRANSPORTS)}")
    return transport
