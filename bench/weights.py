"""How fast a new version of the weights gets from the trainer's memory into a generator's, on one host.

    python -m bench.weights [--megabytes 1024] [--receivers 1 …] [--bucket-megabytes 64] [--versions 5]
    python -m bench.weights --device cuda --transports nccl ipc

A process for each receiver; publisher and receivers go through the code of a run: buckets, checksums, votes.  The
denominator is one memcpy of the same bytes in the same run, taken between versions, so that a busy machine slows both.
"first" is the first version, whose memory nobody has touched; "ratio" is memcpy / median of the others: 1 would be a
single copy without any check.  "CPU" is the CPU time of all processes over that of the memcpy, which holds on a busy
machine too: with two cores to itself a transport cannot do better than 2 / CPU; "publisher" is the publisher's share of
it, which says who passes the bytes on where there are several receivers.  The clock runs from the publisher's call to
the last receiver's word that all agrees.  On CUDA weights, buckets and copies are in device memory; by NCCL publisher
and receivers that share a card are hosts of their own, and what is measured is sockets (tests/gpu/one_card.py).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, get_args

import torch

from bench.figures import tell
from rlhpc.config.tables import WeightsConfig
from rlhpc.protocol.types import TensorSpec, WeightGroup, WeightManifest
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher, make_receiver
from rlhpc.weights.memory import HostShadow, fresh_blocks, named_tensors
from tests.gpu.one_card import Cards

TENSOR_BYTES = 8 << 20
TIMEOUT_S = 120.0

Transport = Literal["gloo", "ipc", "nccl"]


@dataclass
class Figures:
    """Seconds of one transport."""

    published: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # of all processes, per second of CPU of a memcpy
    publisher_cpu: list[float] = field(default_factory=list)  # the same, of the publisher

    @property
    def ratio(self) -> float:
        return statistics.median(self.copied) / statistics.median(self.published[1:])


def receive(pipe: Connection, transport: Transport, rank: int, device: str, environment: Mapping[str, str]) -> None:
    """A generator's end: on CPU one HostShadow for all versions, on CUDA the buckets as they arrive."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    if device == "cuda" and transport == "nccl":
        device = f"cuda:{rank % torch.cuda.device_count()}"
    receiver = make_receiver(transport, device=device, timeout_s=TIMEOUT_S)
    shadow = HostShadow(is_pinned=False)
    receiver.join(pipe.recv(), rank)
    while (manifest := pipe.recv()) is not None:
        began = time.process_time()
        if device == "cpu":
            shadow.receive(receiver, manifest)
            last = shadow.take()[-1][1]
        else:
            with closing(receiver.receive(manifest, fresh_blocks(manifest))) as arriving:
                *_, (_, last) = named_tensors(manifest, arriving)
        pipe.send((last.flatten()[-1].item(), time.process_time() - began))
    receiver.leave()


def measure(
    transport: Transport, manifest: WeightManifest, num_receivers: int, num_versions: int, device: str = "cpu"
) -> Figures:
    figures = Figures()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_receivers)]
    hosts = [host_of(transport, rank, 1 + num_receivers) for rank in range(1 + num_receivers)]
    os.environ.update(hosts[0])
    processes = [
        context.Process(target=receive, args=(theirs, transport, rank, device, hosts[rank]), daemon=True)
        for rank, (_, theirs) in enumerate(pipes, 1)
    ]
    for process in processes:
        process.start()
    weights = [
        (spec.name, torch.empty(spec.shape, dtype=torch.bfloat16, device=device).fill_(0)) for spec in manifest.tensors
    ]
    copy = [torch.empty_like(tensor).fill_(0) for _, tensor in weights]
    with tempfile.TemporaryDirectory() as directory:
        config = WeightsConfig(transport=transport, timeout_s=TIMEOUT_S)
        publisher = make_publisher(config, directory=Path(directory), device=device)
        names = tuple(f"generator-{index}" for index in range(num_receivers))
        group = publisher.open(WeightGroup(1, transport, "", names, (1,) * num_receivers))
        for ours, _ in pipes:
            ours.send(group)
        publisher.form()
        for version in range(num_versions):
            for _, tensor in weights:
                tensor.fill_(version)
            settle(device)
            this = replace(manifest, policy_version=version)
            began, cpu = time.perf_counter(), time.process_time()
            for ours, _ in pipes:
                ours.send(this)
            publisher.publish(this, iter(weights))
            arrived = [ours.recv() for ours, _ in pipes]
            figures.published.append(time.perf_counter() - began)
            own_cpu = time.process_time() - cpu
            assert [value for value, _ in arrived] == [float(version)] * num_receivers
            began, cpu_of_copy = time.perf_counter(), time.process_time()
            for target, (_, tensor) in zip(copy, weights, strict=True):
                target.copy_(tensor)
            settle(device)
            figures.copied.append(time.perf_counter() - began)
            cpu_of_copy = max(1e-9, time.process_time() - cpu_of_copy)
            figures.cpu.append((own_cpu + sum(seconds for _, seconds in arrived)) / cpu_of_copy)
            figures.publisher_cpu.append(own_cpu / cpu_of_copy)
        for ours, _ in pipes:
            ours.send(None)
        publisher.dissolve()
    for process in processes:
        process.join(10)
    return figures


def host_of(transport: Transport, rank: int, num_ranks: int) -> dict[str, str]:
    """Return the variables that connect ranks on one card by NCCL.  Raises SystemExit where nothing does."""
    if transport != "nccl":
        return {}
    if reason := cards_here().why_not(num_ranks):
        raise SystemExit(f"nccl: {reason}")
    return cards_here().environment(rank, num_ranks)


@cache
def cards_here() -> Cards:
    """Look once, before this process has given itself a name."""
    return Cards.here()


def settle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--receivers", type=int, nargs="*", default=[1])
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--transports", nargs="*", choices=get_args(Transport), default=["gloo", "ipc"])
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    count = max(1, (wanted.megabytes << 20) // TENSOR_BYTES)
    specs = [TensorSpec(f"w{index}", "bfloat16", (TENSOR_BYTES // 2048, 1024)) for index in range(count)]
    manifest = make_manifest(0, 1, specs, wanted.bucket_megabytes << 20)
    print(f"{wanted.megabytes} MB, buckets of {wanted.bucket_megabytes} MB, on {wanted.device}")
    heads = {"receivers": 10, "first s": 9, "median s": 9, "memcpy s": 9, "ratio": 8, "CPU": 8, "publisher": 10}
    print(f"{'transport':<12}" + "".join(f"{head:>{width}}" for head, width in heads.items()), flush=True)
    for transport, receivers in itertools.product(wanted.transports, wanted.receivers):
        figures = measure(transport, manifest, receivers, wanted.versions, wanted.device)
        first, others = figures.published[0], statistics.median(figures.published[1:])
        if receivers == 1:
            tell(f"weights by {transport} over memcpy", figures.ratio)
            tell(f"weights by {transport}, GB/s", wanted.megabytes * 2**20 / 1e9 / others)
        copied, cpu = statistics.median(figures.copied), statistics.median(figures.cpu[1:])
        print(
            f"{transport:<12}{receivers:>10}{first:>9.2f}{others:>9.2f}{copied:>9.3f}{figures.ratio:>8.3f}{cpu:>8.1f}"
            f"{statistics.median(figures.publisher_cpu[1:]):>10.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
