"""How many bfloat16 weights a step of Adam changes, what a delta of them takes, and what it costs to make and to apply.

    python -m bench.weight_changes [--learning-rate 1e-6] [--steps 20] [--layers 1]

Float32 masters in the shapes of layers of Qwen2.5-0.5B, drawn from N(0, 0.02²), Adam with the betas of a run file, on
gradients that are noise: the worst case, since updates of one sign soon leave the range in which a number is rounded to
itself.  "wire" is the delta's share of the bytes; GB/s are of the whole image by CPU time of one core, checksum of the
whole included, on both ends; "memcpy" is torch's copy of the same bytes in the same step.  What comes out is compared
with what went in, bit for bit, at every step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.figures import tell
from rlhpc.weights.checksums import checksum64
from rlhpc.weights.deltas import MAX_SHARE, DeltaEncoder, apply_delta, num_changes

SHAPES = [(896, 896), (128, 896), (128, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864), (896,), (896,)]
BETAS, EPSILON = (0.9, 0.95), 1e-8
SETTLED_STEP = 5  # from which Adam's moments are those of a run under way


class Masters:
    """One vector of float32 weights with Adam's moments."""

    def __init__(self, num_layers: int) -> None:
        number = num_layers * sum(torch.Size(shape).numel() for shape in SHAPES)
        self._generator = torch.Generator().manual_seed(0)
        self.weights = 0.02 * torch.randn(number, generator=self._generator)
        self._mean, self._square, self._step = torch.zeros(number), torch.zeros(number), 0

    def step(self, learning_rate: float) -> None:
        """One step on noise."""
        gradient = torch.randn(self.weights.shape, generator=self._generator)
        self._step += 1
        self._mean.lerp_(gradient, 1 - BETAS[0])
        self._square.lerp_(gradient.square(), 1 - BETAS[1])
        mean, square = (m / (1 - b**self._step) for m, b in zip((self._mean, self._square), BETAS, strict=True))
        self.weights -= learning_rate * mean / (square.sqrt() + EPSILON)

    def block(self) -> Tensor:
        """In bfloat16, as bytes of a bucket: uint8 [n], a multiple of 16."""
        data = self.weights.bfloat16().view(torch.uint8)
        return torch.cat([data, torch.zeros(-data.numel() % 16, dtype=torch.uint8)])


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def apply_and_check(delta: Tensor, block: Tensor) -> None:
    """What a receiver does."""
    apply_delta(delta, block)
    checksum64(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=1)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    masters = Masters(wanted.layers)
    image, encoder = masters.block(), DeltaEncoder(MAX_SHARE)
    held, copy = image.clone(), image.clone()
    size = image.numel()
    encoder.encode(copy.clone(), copy)  # compiles
    print(f"{size / 1e6:.0f} MB, learning rate {wanted.learning_rate:g}")
    print(f"{'step':>4}{'changed':>10}{'wire':>9}{'encode GB/s':>13}{'apply GB/s':>12}{'memcpy GB/s':>13}")
    shares, encodes = list[float](), list[float]()
    for step in range(1, wanted.steps + 1):
        masters.step(wanted.learning_rate)
        fresh = masters.block()
        began = time.thread_time()
        delta = encoder.encode(image, fresh)
        checksum64(image)
        encoding = time.thread_time() - began
        if delta is None:
            print(f"{step:>4}   sent whole")
            held.copy_(fresh)
            continue
        applying = seconds(partial(apply_and_check, delta, held))
        assert torch.equal(held, fresh), "not bit for bit"
        copying = seconds(partial(copy.copy_, fresh))
        changed, wire = num_changes(delta) / (size / 2), delta.numel() / size
        speeds = [size / each / 1e9 for each in (encoding, applying, copying)]
        print(f"{step:>4}{changed:>10.2%}{wire:>9.2%}{speeds[0]:>13.1f}{speeds[1]:>12.1f}{speeds[2]:>13.1f}")
        if step >= SETTLED_STEP:
            shares.append(wire)
            encodes.append(speeds[0])
    if shares:
        tell("delta share", max(shares))
        tell("delta encode GB/s", statistics.median(encodes))


if __name__ == "__main__":
    main()
