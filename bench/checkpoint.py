"""How long a checkpoint holds training up, beside a plain copy of the same bytes; and how long it is written.

    OMP_NUM_THREADS=1 python -m bench.checkpoint [--parameters 20e6] [--ranks 1 2]

Prints per number of ranks: milliseconds of save() and of torch's copy_ between the same number of bytes, their ratio
(the slowest rank's; at most 1.4 is promised), and the speed of the writing in the background.  Both are measured in
turns; the figure is the best of the rounds' medians.  Two ranks want four idle cores: their threads count, too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.figures import tell
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.backends import read_rng
from rlhpc.training.background_save import BackgroundSaver, open_save_group
from rlhpc.training.checkpoint_tensors import Shard, ShardedTensorSpec
from rlhpc.training.trainer_state import STATE_KINDS
from tests.unit.training.rank_processes import run_ranks

ROUNDS, REPEATS = 9, 3
CPU = torch.device("cpu")
# The matrices of one layer, in units of the width; norms come to them, for the small pieces that they are.
LAYER = {"q": (1, 1), "k": (0.25, 1), "v": (0.25, 1), "o": (1, 1), "gate": (3, 1), "up": (3, 1), "down": (1, 3)}
WIDTH = 512


@dataclass(frozen=True)
class Timing:
    """Of one rank."""

    save_s: float
    copy_s: float
    write_s: float
    own_bytes: int
    file_bytes: int

    @property
    def ratio(self) -> float:
        return self.save_s / self.copy_s


def shapes_of(num_parameters: float) -> list[tuple[int, ...]]:
    """Matrices and norms of as many layers as make up so many parameters."""
    layer = [(int(rows * WIDTH), int(columns * WIDTH)) for rows, columns in LAYER.values()]
    num_layers = max(1, round(num_parameters / sum(rows * columns for rows, columns in layer)))
    return [shape for _ in range(num_layers) for shape in (*layer, (WIDTH,), (WIDTH,))]


def cut(index: int, shape: tuple[int, ...], world_size: int) -> ShardedTensorSpec:
    """A tensor of which every rank has an equal run of rows."""
    num_elements = torch.Size(shape).numel() // world_size
    return ShardedTensorSpec(
        (TensorSpec(f"t{index:04d}", "float32", shape),),
        tuple(Shard(rank, num_elements) for rank in range(world_size)),
        partial(whole, shape),
    )


def whole(shape: tuple[int, ...], pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    yield (pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))).view(shape)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(rank: int, world_size: int, num_parameters: float, scratch: Path) -> Timing:
    items = [cut(index, shape, world_size) for index, shape in enumerate(shapes_of(num_parameters))]
    sizes = [item.shards[rank].num_elements for item in items]
    state = {kind: torch.randn(sum(sizes)) for kind in STATE_KINDS}
    views = {kind: flat.split_with_sizes(sizes) for kind, flat in state.items()}
    copies = {kind: torch.ones_like(flat) for kind, flat in state.items()}
    saver = BackgroundSaver(items, lambda kind, i: (views[kind][i],), device=CPU, group=open_save_group())

    def copy() -> None:
        for kind, flat in state.items():
            copies[kind].copy_(flat)

    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        saves, plain = [], []
        for _ in range(REPEATS):
            rng = read_rng(CPU)
            align()
            plain.append(seconds(copy))
            align()
            began = time.perf_counter()
            future = saver.save(scratch / "given_up", num_steps_applied=1, rng=rng)
            saves.append(time.perf_counter() - began)
            future.cancel()
            saver.wait()
        rounds.append((statistics.median(saves), statistics.median(plain)))
    began = time.perf_counter()
    files = saver.save(scratch / "whole", num_steps_applied=1, rng=rng).result()
    write_s = time.perf_counter() - began
    saver.close()
    own_bytes = sum(flat.nbytes for flat in state.values())
    return Timing(min(s for s, _ in rounds), min(c for _, c in rounds), write_s, own_bytes, sum(files.values()))


def align() -> None:
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=20e6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'ranks':>5} {'MB a rank':>9} {'save ms':>8} {'copy ms':>8} {'ratio':>6} {'written MB/s':>12}")
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            if num_ranks == 1:
                timings = [measure(0, 1, options.parameters, scratch)]
            else:
                timings = run_ranks(num_ranks, measure, scratch, options.parameters, scratch, timeout_s=600)
        worst, lead = max(timings, key=lambda timing: timing.ratio), timings[0]
        tell("checkpoint over copy", worst.ratio)
        print(
            f"{num_ranks:>5} {worst.own_bytes / 1e6:>9.0f} {1e3 * worst.save_s:>8.1f} {1e3 * worst.copy_s:>8.1f} "
            f"{worst.ratio:>6.2f} {lead.file_bytes / lead.write_s / 1e6:>12.0f}"
        )


if __name__ == "__main__":
    main()
