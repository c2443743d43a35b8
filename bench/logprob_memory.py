"""Peak memory of log-probabilities of a 32k-token row over a vocabulary of 150k, against the bound that we promise.

    OMP_NUM_THREADS=1 python -m bench.logprob_memory [--tokens 32768] [--vocabulary 150000] [--chunk 256] [--hidden 32]

Every tensor-parallel size runs in processes of its own, one per rank.  The bound of a rank is two chunks of its logits,
2 × (chunk × vocabulary / TP) × 4 bytes, plus the hidden states; entropy is wanted.  "peak" is the rise of the resident
set above what it was with hidden states, head and targets in place, as the kernel keeps it (VmHWM, Linux only): it
holds whatever torch, its matrix library and gloo allocate, and after backward both gradients.  The last columns are the
bound's share that is used, and seconds.  Exits with 1 if a peak is above its bound.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed

from rlhpc.training.logprob import VocabularyShard, chunked_logprobs
from tests.unit.training.rank_processes import run_ranks

MIB = 2**20


@dataclass(frozen=True)
class Size:
    tokens: int
    vocabulary: int
    chunk: int
    hidden: int

    def bound(self, num_ranks: int) -> int:
        """Bytes."""
        rows = -(-self.vocabulary // num_ranks)
        return 2 * 4 * min(self.chunk, self.tokens) * rows + 4 * self.tokens * self.hidden


WARM = Size(tokens=64, vocabulary=64, chunk=64, hidden=64)


@dataclass
class Phase:
    rise: int = 0  # bytes of the resident set
    seconds: float = 0.0


def resident(field: str) -> int:
    """Bytes: VmRSS now, VmHWM the highest since the last reset."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def watched(before: int) -> Iterator[Phase]:
    phase, began = Phase(), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    yield phase
    phase.rise, phase.seconds = resident("VmHWM") - before, time.perf_counter() - began


def run(rank: int, num_ranks: int, size: Size) -> tuple[Phase, Phase]:
    measure(rank, num_ranks, WARM)  # what torch loads or sets up on first use is not ours
    return measure(rank, num_ranks, size)


def measure(rank: int, num_ranks: int, size: Size) -> tuple[Phase, Phase]:
    rows = -(-size.vocabulary // num_ranks)
    assert distributed.group.WORLD is not None
    shard = VocabularyShard.of(distributed.group.WORLD, rows, size.vocabulary)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, generator=generator).requires_grad_()
    targets = torch.randint(0, size.vocabulary, (size.tokens,), generator=generator)
    head = torch.randn(rows, size.hidden, generator=generator.manual_seed(rank)).requires_grad_()
    before = resident("VmRSS")
    with watched(before) as forward:
        found, _ = chunked_logprobs(
            hidden, head, targets, temperature=1.0, chunk_tokens=size.chunk, want_entropy=True, shard=shard
        )
    with watched(before) as backward:
        torch.autograd.backward(found.sum())
    assert found.isfinite().all()
    return forward, backward


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    size = Size(options.tokens, options.vocabulary, options.chunk, options.hidden)
    whole = 4 * size.tokens * size.vocabulary
    print(f"{size}; all logits at once would be {whole / MIB:,.0f} MiB")
    print(f"{'TP':>3} {'rank':>4} {'phase':<9}{'peak MiB':>9}{'bound MiB':>10}{'share':>7}{'s':>7}")
    shares = []
    for num_ranks in options.tensor_parallel:
        bound = size.bound(num_ranks)
        with tempfile.TemporaryDirectory() as scratch:
            phases = run_ranks(num_ranks, run, Path(scratch), size, timeout_s=1800)
        for rank, pair in enumerate(phases):
            for name, phase in zip(("forward", "backward"), pair, strict=True):
                shares.append(phase.rise / bound)
                megabytes = f"{phase.rise / MIB:9.1f}{bound / MIB:10.1f}"
                print(f"{num_ranks:>3} {rank:>4} {name:<9}{megabytes}{shares[-1]:7.2f}{phase.seconds:7.1f}")
    return int(max(shares) > 1)


if __name__ == "__main__":
    sys.exit(main())
