"""How long sampling stops for a version that is there: copies to where kernels read, beside vLLM's layerwise reload.

    python -m bench.reload [MODEL] [--dtype float32] [--rounds 5] [--layers 24 --hidden 128]

MODEL: an HF checkpoint directory; without one, a random model of the given size.  One engine in this process, on CUDA
if there is one; its own weights are loaded from host memory, as from a shadow, turn about.  Prints milliseconds of a
load (median and range), by the clock and of CPU, and the ratio.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.figures import tell
from tests.tiny_models import make_tiny_checkpoint

Weights = list[tuple[str, torch.Tensor]]


def start(model: Path, dtype: str) -> Any:
    """vLLM's worker, in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from vllm import LLM  # its environment is set

    llm = LLM(str(model), dtype=dtype, enforce_eager=True, max_model_len=64, max_num_seqs=8)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    worker.bench_keeps = llm
    return worker


def weights_of(model: Path, dtype: str) -> Weights:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    weights = [(name, tensor.detach().clone()) for name, tensor in loaded.named_parameters()]
    return [(name, tensor.pin_memory()) for name, tensor in weights] if torch.cuda.is_available() else weights


def timed(load: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds by the clock, and of this process's CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    load()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - cpu)


def compare(model: Path, options: argparse.Namespace) -> None:
    worker, weights = start(model, options.dtype), weights_of(model, options.dtype)
    from rlhpc.generation.reload_plan import WeightReload  # after vLLM's environment is set

    reload = WeightReload(worker.model_runner.get_model(), worker.vllm_config, worker.model_config, worker.device)
    reload.load(weights)
    num_bytes = sum(tensor.nbytes for _, tensor in weights)
    print(f"{len(weights)} tensors, {num_bytes / 1e6:,.0f} MB, {worker.device}; {reload.way}")
    ways: dict[str, Callable[[], None]] = {
        "vLLM's layerwise reload": lambda: reload.load_arriving(weights),
        "ours": lambda: reload.load(weights),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, load in ways.items():
            found[name].append(timed(load))
    medians = {}
    for name, times in found.items():
        clock, cpu = zip(*times, strict=True)
        medians[name] = statistics.median(clock)
        print(
            f"{name:24} {medians[name]:8.1f} ms ({min(clock):.1f} to {max(clock):.1f}), "
            f"{statistics.median(cpu):.1f} ms of CPU"
        )
    ratio = medians["vLLM's layerwise reload"] / medians["ours"]
    print(f"{ratio:.2f} times as fast")
    tell("reload, times vLLM's", ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory() as name:
        model = options.model
        if model is None:
            model = make_tiny_checkpoint(Path(name), family="qwen3", hidden=options.hidden, layers=options.layers)
        compare(model, options)


if __name__ == "__main__":
    main()
