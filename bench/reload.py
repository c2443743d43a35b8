"""How long sampling stops for a version that is there: copies to where kernels read, beside vLLM's layerwise reload.

    python -m bench.reload [MODEL] [--dtype float32] [--rounds 5] [--layers 24 --hidden 128] [--rank 16]

MODEL: an HF checkpoint directory; without one, a random model of the given size.  One engine in this process, on CUDA
if there is one; its own weights are loaded from host memory, as from a shadow, turn about.  Prints milliseconds of a
load (median and range), by the clock and of CPU, and the ratio.  With --rank also of a version that is LoRA adapters of
attention and MLP, written to the slot of a second engine, and its bytes.
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


def start(model: Path, dtype: str, **arguments: Any) -> Any:
    """vLLM's worker, in this process; arguments: of its engine."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from vllm import LLM  # its environment is set

    llm = LLM(str(model), dtype=dtype, enforce_eager=True, max_model_len=64, max_num_seqs=8, **arguments)
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
    medians = in_turn(ways, options.rounds)
    ratio = medians["vLLM's layerwise reload"] / medians["ours"]
    print(f"{ratio:.2f} times as fast")
    tell("reload, times vLLM's", ratio)
    if options.rank:
        adapters(model, options, [(name, tuple(tensor.shape)) for name, tensor in weights], num_bytes, medians["ours"])


def adapters(
    model: Path,
    options: argparse.Namespace,
    tensors: list[tuple[str, tuple[int, ...]]],
    num_bytes: int,
    whole_ms: float,
) -> None:
    """tensors: of the model, num_bytes in all, which take so many milliseconds."""
    from rlhpc.config.tables_algorithm import LoraConfig
    from rlhpc.generation.adapter_slot import AdapterSlot
    from rlhpc.models.adapter import ENGINE_RANKS, adapter_specs, chosen_layers, matrices_of
    from rlhpc.protocol.types import AdapterForm
    from rlhpc.weights.buckets import make_manifest, manifest_bytes

    layers = chosen_layers(LoraConfig(rank=options.rank), matrices_of(dict(tensors)))
    room = min(each for each in ENGINE_RANKS if each >= options.rank)
    names = sorted({name.rpartition(".")[2] for name in layers})
    worker = start(model, options.dtype, enable_lora=True, max_lora_rank=room, lora_target_modules=names)
    slot = AdapterSlot(worker.model_runner, rank=options.rank, modules=layers, base="")
    specs = adapter_specs(layers, options.rank)
    manifest = make_manifest(1, 1, specs, 256 << 20, AdapterForm(options.rank, 1.0, ""))
    given = [(spec.name, torch.randn(spec.shape)) for spec in specs]
    if torch.cuda.is_available():
        given = [(name, tensor.pin_memory()) for name, tensor in given]
    ours = in_turn({f"adapters of rank {options.rank}": lambda: slot.load(given, manifest)}, options.rounds)
    share = manifest_bytes(manifest) / num_bytes
    faster = whole_ms / min(ours.values())
    print(f"{manifest_bytes(manifest) / 1e6:,.1f} MB, {share:.2%} of all weights; {faster:.1f} times as fast as these")


def in_turn(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, after one that does not count."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for load in ways.values():
        load()
    for _ in range(rounds):
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
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rank", type=int, default=0)
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
