"""Choose how weights travel, by name."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhpc.config import WeightsConfig
from rlhpc.contracts import WeightPublisher, WeightReceiver
from rlhpc.errors import ConfigError
from rlhpc.weights.device_scope import indexed
from rlhpc.weights.disk import DiskPublisher, DiskReceiver
from rlhpc.weights.group_publisher import GroupPublisher
from rlhpc.weights.group_receiver import GroupReceiver
from rlhpc.weights.ipc import IpcPublisher, IpcReceiver

TRANSPORTS = ("gloo", "nccl", "ipc", "disk")


def resolve_transport(transport: str, device: str, shares_gpu: bool) -> str:
    """Replace "auto": gloo on CPU; on CUDA nccl with a GPU per rank, ipc where trainer and engine share one.

    Raises ConfigError for a transport that cannot work there.
    """
    on_cuda = torch.device(device).type == "cuda"
    if transport == "auto":
        return ("ipc" if shares_gpu else "nccl") if on_cuda else "gloo"
    if transport not in TRANSPORTS:
        raise ConfigError(f"weights.transport={transport!r}; legal: auto, {', '.join(TRANSPORTS)}")
    if transport == "nccl" and not on_cuda:
        raise ConfigError("weights.transport='nccl' on CPU; legal: auto, gloo, disk")
    if transport == "nccl" and shares_gpu:
        raise ConfigError("weights.transport='nccl' with trainer and engine on one GPU; legal: auto, ipc, gloo, disk")
    return transport


def make_publisher(
    weights: WeightsConfig, *, directory: Path, device: str, shares_gpu: bool = False, host: str = ""
) -> WeightPublisher:
    """The trainer's end.

    directory: the run's weights directory.  device: "cpu" or "cuda", where the trainer yields its tensors.
    host: address under which other machines reach this one; "" is right when all members run on this machine.
    The size of buckets comes with the manifest.
    """
    transport = resolve_transport(weights.transport, device, shares_gpu)
    if transport == "ipc":
        return IpcPublisher(directory, indexed(device), weights.timeout_s)
    if transport == "disk":
        return DiskPublisher(directory, weights.timeout_s)
    return GroupPublisher(transport, directory, weights.timeout_s, device=indexed(device), host=host)


def make_receiver(transport: str, *, device: str, timeout_s: float) -> WeightReceiver:
    """An engine worker's end.  transport: a WeightGroup's; where it meets the publisher comes with the group.

    device: the worker's; "cuda" without an index is the calling thread's current GPU, whatever thread receives later.
    Raises ConfigError for an unknown transport.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"weights.transport={transport!r}; legal: {', '.join(TRANSPORTS)}")
    if transport == "ipc":
        return IpcReceiver(indexed(device), timeout_s)
    if transport == "disk":
        return DiskReceiver(timeout_s)
    return GroupReceiver(transport, indexed(device), timeout_s)
