"""Send a version as deltas over a process group: both ends.

Input: blocks that hold the same version on all ranks; output: the next version in them.  For every bucket two
broadcasts: int64 [2], bytes of the delta (0: too much has changed) and its checksum; then the delta, or the whole
bucket.  A bucket is sent while the next is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlhpc.errors import TornWeights
from rlhpc.weights.broadcast_header import SIGN_SHIFT
from rlhpc.weights.buckets import Bucket
from rlhpc.weights.checksum import checksum64
from rlhpc.weights.flat_tensors import fill_block
from rlhpc.weights.host_image import MAX_SHARE
from rlhpc.weights.out_of_memory import room_for
from rlhpc.weights.process_group import SideGroup


class OutOfStep(Exception):
    """This rank does not know what is broadcast next, and must leave the group."""


def send_deltas(
    group: SideGroup, buckets: tuple[Bucket, ...], weights: Iterator[tuple[str, Tensor]], image: list[Tensor]
) -> tuple[list[int], int]:
    """Broadcast the changes to the image, which becomes the new version.

    Returns the checksums of the whole buckets, and the bytes sent.  Raises GroupFailed.
    """
    from rlhpc.weights.delta_codec import DeltaEncoder  # numba takes half a second to load

    encoder, sums, num_bytes = DeltaEncoder(MAX_SHARE), list[int](), 0
    largest = max((bucket.num_bytes for bucket in buckets), default=0)
    with room_for(f"a bucket of {largest} bytes on the trainer"):
        scratch = torch.zeros(largest, dtype=torch.uint8)
    arrivals: list[list[Callable[[], None]]] = []
    try:
        for bucket, block in zip(buckets, image, strict=True):
            fresh = scratch[: bucket.num_bytes]
            fill_block(bucket, weights, fresh)
            coded = encoder.encode(block, fresh)
            sent = block if coded is None else coded
            head = [0, 0] if coded is None else [coded.numel(), checksum64(coded) - SIGN_SHIFT]
            if len(arrivals) > 1:
                _finish(arrivals.pop(0))
            arrivals.append([group.begin_broadcast(torch.tensor(head)), group.begin_broadcast(sent)])
            num_bytes += sent.numel()
            sums.append(checksum64(block))
        for each in arrivals:
            _finish(each)
    finally:
        arrivals.clear()  # as in group_publisher.py
    return sums, num_bytes


def _finish(waits: list[Callable[[], None]]) -> None:
    for wait in waits:
        wait()


class DeltaArrivals:
    """The receiving end, for one version."""

    def __init__(self, broadcast: Callable[[Tensor], None], largest: int) -> None:
        """broadcast: takes part in one.  largest: bytes of a bucket.  Raises GroupFailed: no room."""
        self._broadcast = broadcast
        with room_for("a delta"):
            self._memory = torch.empty(int(MAX_SHARE * largest) + 64, dtype=torch.uint8)

    def receive(self, block: Tensor) -> Callable[[], None]:
        """Receive one bucket.  Returns a function that updates the block (may raise TornWeights).

        A bucket that is sent whole is in the block already.  Raises OutOfStep.
        """
        head = torch.zeros(2, dtype=torch.int64)
        self._broadcast(head)
        size, want = int(head[0]), int(head[1]) + SIGN_SHIFT
        if not 0 <= size <= self._memory.numel():
            raise OutOfStep(f"a delta of {size} bytes for a bucket of {block.numel()}")
        coded = self._memory[:size]
        self._broadcast(coded if size else block)

        def put() -> None:
            from rlhpc.weights.delta_codec import apply_delta  # numba takes half a second to load

            if size and (got := checksum64(coded)) != want:
                raise TornWeights(f"a delta has checksum {got:016x}, not {want:016x}")
            if size:
                apply_delta(coded, block)

        return put
