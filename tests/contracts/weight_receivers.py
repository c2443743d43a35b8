"""Receivers in processes of their own, and a publisher here, for the weight transport suites."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from rlhpc.protocol.contracts import WeightPublisher
from rlhpc.protocol.types import TensorSpec, WeightGroup, WeightManifest

SCRIPT = Path(__file__).with_name("weight_receiver_process.py")
Weights = list[tuple[str, torch.Tensor]]


class ReceiverProcess:
    """One engine worker, told what to do."""

    def __init__(self, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        """variables: of the environment, beside those of this process."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the receiver process has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def wake(self) -> None:
        """Let it go on after it has stopped itself."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Broadcast:
    """A publisher in this process and receivers in others."""

    def __init__(
        self,
        publisher: WeightPublisher,
        transport: str,
        receivers: list[ReceiverProcess],
        timeout_s: float,
        device: str,
        staging: str = "shadow",
    ) -> None:
        self.publisher, self.transport, self.receivers = publisher, transport, receivers
        self.timeout_s, self.device, self.staging = timeout_s, device, staging

    def form(self, epoch: int, receivers: list[ReceiverProcess] | None = None) -> None:
        self.receivers = self.receivers if receivers is None else receivers
        names = tuple(f"generator-{index}" for index in range(len(self.receivers)))
        group = self.publisher.open(WeightGroup(epoch, self.transport, "", names, (1,) * len(names)))
        for name, receiver in zip(names, self.receivers, strict=True):
            rank = group.first_rank(name)
            receiver.tell(
                "join",
                group=msgspec.to_builtins(group),
                rank=rank,
                timeout_s=self.timeout_s,
                device=self._device_of(rank),
            )
        self.publisher.form()
        assert [receiver.answer() for receiver in self.receivers] == [{"ok": "joined"}] * len(self.receivers)

    def _device_of(self, rank: int) -> str:
        """Return the receiver's device: with NCCL one after the other, else that of all."""
        return f"cuda:{rank % torch.cuda.device_count()}" if self.transport == "nccl" else self.device

    def draw(self, seed: int) -> Weights:
        """Return weights where the publisher has them."""
        return draw_weights(seed, self.device)

    def tell_all(self, manifest: WeightManifest) -> None:
        for receiver in self.receivers:
            self.tell(receiver, manifest)

    def tell(self, receiver: ReceiverProcess, manifest: WeightManifest, staging: str = "") -> None:
        receiver.tell("receive", manifest=msgspec.to_builtins(manifest), staging=staging or self.staging)


def draw_weights(seed: int, device: str = "cpu") -> Weights:
    """A few tensors of several types and shapes, one larger than a bucket, one of odd size, one scalar."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    return [
        ("model.embed_tokens.weight", drawn(300, 64)),
        ("model.norm.weight", drawn(7)),
        ("model.scale", drawn(1).view(())),
        ("model.layers.0.proj.weight", drawn(33, 5).to(torch.bfloat16)),
        ("model.layers.0.bias", drawn(3).to(torch.bfloat16)),
        ("lm_head.weight", drawn(64, 300).t()),  # not contiguous
    ]


def specs_of(weights: Weights) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in weights)


def counting(weights: Weights, drawn: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        drawn.append(name)
        yield name, tensor
