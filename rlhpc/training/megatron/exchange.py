"""Small messages between all ranks of the trainer, as JSON over gloo.

Input: values that JSON can represent.  Output: the same on other ranks.  For metrics and sizes; tensors are sent
separately.  Floats arrive bit for bit, nan and inf included.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.training.process_group import COLLECTIVE_TIMEOUT, open_gloo_group


class Exchange:
    """A separate gloo group, so that no message comes between two collectives of the model."""

    def __init__(self) -> None:
        """A collective of the default process group."""
        self._group = open_gloo_group(COLLECTIVE_TIMEOUT)

    def from_rank(self, source: int, message: Any) -> Any:
        """Return the message of rank `source` on every rank; the others' is ignored.  A collective."""
        content = _encode(message) if dist.get_rank() == source else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor(len(content))
        dist.broadcast(length, source, group=self._group)
        if dist.get_rank() != source:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, source, group=self._group)
        return _decode(content)

    def of_all(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, in rank order, on every rank.  A collective."""
        content = _encode(message)
        lengths = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, torch.tensor(len(content)), group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.cat([content, content.new_zeros(longest - len(content))])
        contents = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(contents, padded, group=self._group)
        return [_decode(content[:length]) for content, length in zip(contents, lengths, strict=True)]


def _encode(message: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
