"""Members of a weight group that go deaf: they stop in the middle of a broadcast, and die with their connections open.

A line of JSON in, lines of JSON out.  Every member is a fork of this process.  Before it says that it is deaf it forks
a child that keeps gloo's connections: when the member is killed they stay open, and gloo notices nothing, as NCCL does
not where GPUs reach each other's memory.  The children end with this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.weights.broadcast import GroupPublisher, GroupReceiver
from rlhpc.weights.group import SideGroup
from rlhpc.weights.memory import fresh_blocks

TIMEOUT_S = 600.0  # of the group: nothing that a test waits for takes so long
CPU = torch.device("cpu")


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def go_deaf(group: SideGroup | None, until_end: int) -> None:
    """Never returns."""
    assert group is not None
    if os.fork() == 0:
        assert group._lifeline is not None
        group._lifeline.close()
        os.read(until_end, 1)
        os._exit(0)
    say(deaf=os.getpid())
    while True:
        signal.pause()


def publish(directory: str, manifest: WeightManifest, stop_at: int, until_end: int) -> None:
    """Send the tensors before `stop_at`; -1: not even the header."""
    publisher = GroupPublisher("gloo", Path(directory), TIMEOUT_S, device=CPU)
    say(group=msgspec.to_builtins(publisher.open(WeightGroup(1, "gloo", "", ("g",), (1,)))))
    publisher.form()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for index, spec in enumerate(manifest.tensors):
            if index == stop_at:
                go_deaf(publisher._group, until_end)
            yield spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))

    if stop_at < 0:
        go_deaf(publisher._group, until_end)
    publisher.publish(manifest, weights())


def receive(group: WeightGroup, manifest: WeightManifest, stop_at: int, until_end: int) -> None:
    """Take the buckets up to `stop_at`; -1: not even the header."""
    receiver = GroupReceiver("gloo", CPU, TIMEOUT_S)
    receiver.join(group, 1)
    if stop_at < 0:
        go_deaf(receiver._group, until_end)
    for index, _ in enumerate(receiver.receive(manifest, fresh_blocks(manifest))):
        if index == stop_at:
            go_deaf(receiver._group, until_end)


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    until_end, held_open = os.pipe()
    for line in sys.stdin:
        command = json.loads(line)
        if os.fork():
            continue
        os.close(held_open)
        manifest = msgspec.convert(command["manifest"], WeightManifest)
        if command["do"] == "publish":
            publish(command["directory"], manifest, command["stop_at"], until_end)
        else:
            receive(msgspec.convert(command["group"], WeightGroup), manifest, command["stop_at"], until_end)
        os._exit(0)


if __name__ == "__main__":
    main()
