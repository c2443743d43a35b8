"""A process that receives weights as it is told: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import msgspec
import torch

from rlhpc.contracts import WeightReceiver
from rlhpc.errors import WeightsError
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.make import make_receiver


def fingerprint(weights: list[tuple[str, torch.Tensor]]) -> list[list[Any]]:
    return [[name, str(t.dtype), list(t.shape), hash_of(t)] for name, t in weights]


def hash_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def obey(command: dict[str, Any], receiver: WeightReceiver | None) -> tuple[Any, WeightReceiver | None]:
    if command["do"] == "join":
        group = msgspec.convert(command["group"], WeightGroup)
        receiver = make_receiver(group.transport, device=command["device"], timeout_s=command["timeout_s"])
        receiver.join(group, command["rank"])
        return "joined", receiver
    assert receiver is not None
    if command["do"] == "receive":
        return fingerprint(receiver.receive(msgspec.convert(command["manifest"], WeightManifest))), receiver
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
