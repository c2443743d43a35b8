"""A process that receives weights as it is told: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from contextlib import closing
from typing import Any

import msgspec
import torch

from rlhpc.protocol.contracts import WeightReceiver
from rlhpc.protocol.errors import GroupFailed, WeightsError
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.weights.factory import make_receiver
from rlhpc.weights.memory import HostShadow, fresh_blocks, named_tensors, room_for

SHADOW = HostShadow(is_pinned=False)
SIGNALS = {"dies at": signal.SIGKILL, "stops at": signal.SIGSTOP}


def fingerprint(weights: list[tuple[str, torch.Tensor]]) -> list[list[Any]]:
    return [[name, str(t.dtype), list(t.shape), hash_of(t)] for name, t in weights]


def hash_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def received(receiver: WeightReceiver, manifest: WeightManifest, staging: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a version, as an engine's worker would come by them.

    staging "no room N": memory ends at bucket N.  "fails at N": what is done with bucket N raises.  "dies at N" and
    "stops at N": a signal ends, or stops, this process when it has bucket N.
    """
    words, _, number = staging.rpartition(" ")
    if words:
        return failing(receiver, manifest, words, int(number))
    if staging == "shadow":
        SHADOW.receive(receiver, manifest)
        return SHADOW.take()
    with closing(receiver.receive(manifest, fresh_blocks(manifest))) as arriving:
        return list(named_tensors(manifest, arriving))


def failing(
    receiver: WeightReceiver, manifest: WeightManifest, how: str, bucket: int
) -> list[tuple[str, torch.Tensor]]:
    roomy = fresh_blocks(manifest)

    def allocate(index: int, device: torch.device) -> torch.Tensor:
        with room_for(f"bucket {index}"):
            if how == "no room" and index == bucket:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return roomy(index, device)

    with closing(receiver.receive(manifest, allocate)) as arriving:
        for index, _ in enumerate(arriving):
            if how == "fails at" and index == bucket:
                raise GroupFailed("a layer could not be put together")
            if how in SIGNALS and index == bucket:
                os.kill(os.getpid(), SIGNALS[how])
    raise AssertionError("nothing failed")


def obey(command: dict[str, Any], receiver: WeightReceiver | None) -> tuple[Any, WeightReceiver | None]:
    if command["do"] == "join":
        group = msgspec.convert(command["group"], WeightGroup)
        receiver = make_receiver(group.transport, device=command["device"], timeout_s=command["timeout_s"])
        receiver.join(group, command["rank"])
        return "joined", receiver
    assert receiver is not None
    if command["do"] == "receive":
        manifest = msgspec.convert(command["manifest"], WeightManifest)
        return fingerprint(received(receiver, manifest, command["staging"])), receiver
    receiver.leave()
    return "left", receiver


def main() -> None:
    torch.set_num_threads(1)
    receiver: WeightReceiver | None = None
    print(json.dumps({"ok": "ready"}), flush=True)
    for line in sys.stdin:
        try:
            result, receiver = obey(json.loads(line), receiver)
            print(json.dumps({"ok": result}), flush=True)
        except WeightsError as error:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)


if __name__ == "__main__":
    main()
