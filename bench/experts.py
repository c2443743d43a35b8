"""Experts of one rank computed at once (grouped products) beside one after the other, forward and backward.

    OMP_NUM_THREADS=1 python -m bench.experts [--experts 32] [--hidden 256] [--width 96] [--tokens 512] [--repeats 9]
    python -m bench.experts --device cuda --dtype bfloat16 --experts 128 --hidden 2048 --width 768 --tokens 16384

By default a layer of Qwen3-30B-A3B at an eighth of its width; the second command is one in full.  Every token goes to 8
experts, drawn evenly, or most of them the same and a quarter of the experts never.  Both take turns on the same tokens
and weights.  Prints milliseconds (median, smallest to largest) and how many times as fast the grouped ones are.

torch has a kernel for groups on NVIDIA GPUs of compute capability 9.0 and 10.x, in bfloat16; elsewhere it loops over
the experts, and what is left to gain is what happens between the products.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.training.layer_functions import has_grouped_kernel
from rlhpc.training.megatron.backend import close_groups
from tests.unit.training.megatron.policy_ranks import draw_tokens, expert_pair

EXPERTS_PER_TOKEN = 8
ROUTINGS = {"even": 0.0, "skewed": 1.0}  # exponent of the law by which experts are drawn


@dataclass(frozen=True)
class Sizes:
    experts: int
    hidden: int
    width: int
    tokens: int


@contextmanager
def only_rank() -> Iterator[None]:
    """A process group of this process alone, and Megatron's groups closed again."""
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{Path(scratch) / 'store'}", rank=0, world_size=1)
        yield
        close_groups()
        dist.destroy_process_group()


def draw_counts(sizes: Sizes, exponent: float) -> list[int]:
    """Tokens of every expert."""
    weights = torch.arange(1, sizes.experts + 1, dtype=torch.float64) ** -exponent
    weights[sizes.experts * 3 // 4 :] *= exponent == 0
    few = min(EXPERTS_PER_TOKEN, int(weights.count_nonzero()))
    chosen = torch.multinomial(weights.expand(sizes.tokens, -1), few)
    return torch.bincount(chosen.flatten(), minlength=sizes.experts).tolist()


def milliseconds(experts: Any, counts: Tensor, inputs: tuple[Tensor, Tensor], gradient: Tensor) -> float:
    """Of one pass forward and backward, gradients dropped."""
    began = now(inputs[0].device)
    output, _ = experts(inputs[0], counts, inputs[1])
    torch.autograd.backward(output, gradient)
    passed = now(inputs[0].device) - began
    for tensor in (*inputs, *experts.parameters()):
        tensor.grad = None
    return passed * 1000


def now(device: torch.device) -> float:
    """Seconds, once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(
    sizes: Sizes, exponent: float, device: torch.device, dtype: torch.dtype, repeats: int
) -> tuple[list[float], list[float], int]:
    """Milliseconds one after the other and at once, turn about, and the number of experts without tokens."""
    pair = expert_pair(device, dtype, num_experts=sizes.experts, hidden=sizes.hidden, width=sizes.width)
    counts = draw_counts(sizes, exponent)
    inputs = draw_tokens(counts, sizes.hidden, device, dtype)
    gradient = torch.randn_like(inputs[0])
    times = [[milliseconds(each, torch.tensor(counts), inputs, gradient) for each in pair] for _ in range(repeats + 2)]
    one_by_one, at_once = ([each[index] for each in times[2:]] for index in (0, 1))
    return one_by_one, at_once, counts.count(0)


def shown(times: list[float]) -> str:
    return f"{statistics.median(times):8.2f} ({min(times):.2f} to {max(times):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    for name, value in (("experts", 32), ("hidden", 256), ("width", 96), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    if chosen.device == "cpu" and torch.cuda.is_available():
        parser.error("Megatron works on the GPU that it sees: hide it (CUDA_VISIBLE_DEVICES=), or --device cuda")
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    sizes = Sizes(chosen.experts, chosen.hidden, chosen.width, chosen.tokens)
    capability = torch.cuda.get_device_capability() if chosen.device == "cuda" else None
    is_chosen = has_grouped_kernel(capability, dtype, (sizes.hidden, sizes.width))
    print(f"{sizes}, {chosen.dtype} on {chosen.device}; the trainer groups here: {'yes' if is_chosen else 'no'}")
    torch.manual_seed(0)
    with only_rank():
        for routing, exponent in ROUTINGS.items():
            one_by_one, at_once, idle = measure(sizes, exponent, device, dtype, chosen.repeats)
            ratio = statistics.median(one_by_one) / statistics.median(at_once)
            print(
                f"{routing:7} {idle:3} without tokens   one after the other {shown(one_by_one)} ms   "
                f"at once {shown(at_once)} ms   {ratio:.2f} times as fast"
            )


if __name__ == "__main__":
    main()
