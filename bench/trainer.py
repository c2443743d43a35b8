"""The step of the Megatron backend beside the same step written straight onto Megatron-Core's schedule.

    python -m bench.trainer [--layouts dp1 tp2 pp2] [--model tiny] [--tokens 2048] [--rows 4] [--repeats 7]
    python -m bench.trainer --device cuda --dtype bfloat16 --model qwen3-0.6b --layouts dp1 --tokens 16384 --rows 4 \
        --parts 4
    python -m bench.trainer --device cuda --dtype bfloat16 --model qwen3-4b --layouts dp1 --offload --alone
    python -m bench.trainer --device cuda --dtype bfloat16 --model qwen2.5-7b --layouts dp1 --alone --rank 32 \
        --form merged

Both take the same rows through the same model, layout and optimiser in the same processes, turn about.  "direct" is
what one writes by hand when nothing else is wanted: rows made ready beforehand, one loss, Megatron's own
optimizer.step(); no metrics, no vote; --alone, where a second optimiser has no room, and --rank, of LoRA adapters on
attention and MLP, leave it out.  Prints tokens/s (median and range) and the ratio; seconds in which the trainer yields
all tensors of a version, sent to nobody; with --parts also the time of a step whose rows come in parts
(admission.step_parts), over that of a whole step; on CUDA also MFU: model FLOPs (6 per parameter and token without the
embedding, 4 of a frozen one, and attention's 12 · heads · head size per token pair that is looked at, counted once for
forward and twice for backward) over the GPU's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.figures import tell
from rlhpc.config.tables import TrainerConfig
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from tests.unit.training.packed_rows import (
    clipped_loss,
    clipped_surrogate,
    draw_samples,
    num_loss_tokens,
    pack_row,
    tiny_config,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp1": {"num_ranks": 1},
    "dp2": {"num_ranks": 2},
    "tp2": {"num_ranks": 2, "tensor_parallel": 2},
    "sp": {"num_ranks": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"num_ranks": 2, "pipeline_parallel": 2},
    "cp2": {"num_ranks": 2, "context_parallel": 2},
}
# hidden, intermediate, layers, heads, key heads, head size, vocabulary; weights are random
MODELS = {
    "tiny": (256, 768, 4, 8, 4, 32, 8_000),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 64, 151_936),  # with Qwen3's norms of heads and without biases
    "qwen2.5-7b": (3584, 18_944, 28, 28, 4, 128, 152_064),
}
PEAK_BF16_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}  # dense, from the makers' data sheets
VERSION = "a version"  # the name of its seconds among those of steps
STEP = {"learning_rate": 1e-6, "weight_decay": 0.1, "max_grad_norm": 1.0}


@dataclass(frozen=True)
class Task:
    """One layout to be measured."""

    model: Path
    keys: dict[str, Any]
    dtype: str
    rows: list[PackedMicrobatch]
    repeats: int
    parts: int
    is_alone: bool  # nothing written by hand beside it
    rank: int  # of adapters; 0: all weights are trained
    form: str  # of versions
    scratch: Path


def make_model(directory: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    hidden, intermediate, layers, heads, key_heads, head_dim, vocabulary = MODELS[name]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=name != "qwen2.5-7b",
    )
    disable_progress_bar()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU draws a billion numbers in a minute
        Qwen3ForCausalLM(config).to(dtype).save_pretrained(directory)
    torch.cuda.empty_cache()  # does nothing where CUDA is not in use
    return directory


def draw_row(num_tokens: int, vocabulary: int, seed: int) -> PackedMicrobatch:
    """Segments of mixed lengths that fill a row."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        length = int(random.integers(num_tokens // 16, num_tokens // 3))
        lengths.append(min(length, left) if left - length >= 2 else left)
    return pack_row(draw_samples(lengths, vocabulary=vocabulary, seed=seed))


class DirectStep:
    """The same step, written straight onto Megatron-Core, on parameters and an optimiser of its own."""

    def __init__(self, backend: Any, trainer: TrainerConfig, rows: list[PackedMicrobatch], dtype: torch.dtype) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from rlhpc.training.megatron.attention import LocalRow
        from rlhpc.training.megatron.model import HeadRequest, build_chunks

        wrapped, layout, device = backend._schedule._chunks, backend._layout, backend._device
        config = wrapped[0].config
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        copies = build_chunks(backend._model.config, config, trainer, device)
        with torch.no_grad():
            for copy, chunk in zip(copies, wrapped, strict=True):
                for mine, theirs in zip(copy.parameters(), chunk.module.parameters(), strict=True):
                    mine.copy_(theirs)
        self.chunks = [DistributedDataParallel(config=config, ddp_config=buffers, module=copy) for copy in copies]
        settings = OptimizerConfig(
            optimizer="adam",
            lr=STEP["learning_rate"],
            weight_decay=STEP["weight_decay"],
            clip_grad=STEP["max_grad_norm"],
            adam_beta2=0.95,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(settings, self.chunks, use_gloo_process_groups=False)
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                group["fused"] = True
        config.finalize_model_grads_func = lambda chunks, _, **words: finalize_model_grads(chunks, None, **words)
        context_rank = backend._schedule._context_rank
        self.local = [LocalRow.of(row, row.loss_mask, layout, context_rank, device) for row in rows]
        self.facts = [
            {
                name: torch.from_numpy(getattr(row, name)).to(device)
                for name in ("behaviour_logprobs", "advantages", "loss_mask")
            }
            for row in rows
        ]
        self.request = HeadRequest(1.0, backend._settings.chunk_tokens, want_entropy=True)
        self.num_loss_tokens, self.backend = num_loss_tokens(rows) * layout.data, backend

    def __call__(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(range(len(self.local))),
            model=self.chunks[0],
            num_microbatches=len(self.local),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()

    def _forward(self, indices: Any, chunk: Any) -> Any:
        from rlhpc.training.megatron.attention import whole_row

        index = next(indices)

        def judge(output: Any) -> Any:
            logprobs, facts, schedule = output[0], self.facts[index], self.backend._schedule
            current = whole_row(
                logprobs, self.backend._layout, schedule._context_rank, schedule._context_group, len(facts["loss_mask"])
            )
            loss, _ = clipped_surrogate(
                current,
                behaviour=facts["behaviour_logprobs"],
                proximal=current.detach(),
                advantages=facts["advantages"],
                loss_mask=facts["loss_mask"],
            )
            return loss / self.num_loss_tokens, torch.zeros((), dtype=torch.int), None

        return chunk(self.local[index], self.request), judge


def on_rank(rank: int, task: Task, pipe: Connection) -> None:
    torch.set_num_threads(1)
    keys = {**task.keys, "backend": "megatron"}
    config = tiny_config(task.model, dtype=task.dtype, lora={"rank": task.rank}, form=task.form, **keys)
    address = f"file://{task.scratch / 'store'}"
    backend: Any = open_backend(config, RankContext(rank, config.trainer.num_ranks, address))
    tokens = num_loss_tokens(task.rows) * backend.dp_size

    def ours() -> None:
        backend.step(task.rows, clipped_loss, proximal=behaviour(task.rows), num_loss_tokens=tokens, **STEP)

    def in_parts() -> None:
        *parts, last = [task.rows[i : i + a_part] for i in range(0, len(task.rows), a_part)]
        for number, rows in enumerate(parts):
            words = {"num_loss_tokens": tokens, "is_first": number == 0}
            backend.accumulate(rows, clipped_loss, proximal=behaviour(rows), **words)
        backend.step(last, clipped_loss, proximal=behaviour(last), num_loss_tokens=tokens, **STEP)

    a_part = -(-len(task.rows) // task.parts)
    ours()
    peak = torch.cuda.max_memory_allocated() if backend.device == "cuda" else 0  # before the other has taken any
    contenders = [("ours", ours)]
    if not (task.is_alone or task.rank):
        contenders.append(("direct", DirectStep(backend, config.trainer, task.rows, getattr(torch, task.dtype))))
    if task.parts > 1:
        contenders.append(("in parts", in_parts))
    times: dict[str, list[float]] = {name: [] for name, _ in contenders}
    for repeat in range(task.repeats + 2):
        for name, step in contenders if repeat % 2 else reversed(contenders):
            seconds = timed(step, backend._device)
            if repeat >= 2:  # the first two warm up
                times[name].append(seconds)
    times[VERSION] = [
        timed(lambda: [None for _ in backend.weights()], backend._device) for _ in range(1 + task.repeats)
    ][1:]
    pipe.send((times, peak, torch.cuda.get_device_name() if peak else ""))
    backend.close()


def behaviour(rows: list[PackedMicrobatch]) -> list[torch.Tensor]:
    return [torch.from_numpy(row.behaviour_logprobs) for row in rows]


def timed(step: Any, device: torch.device) -> float:
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - began


def measure(task: Task) -> tuple[dict[str, list[float]], int, str]:
    context = multiprocessing.get_context("spawn")
    ranks = []
    for rank in range(task.keys["num_ranks"]):
        here, there = context.Pipe()
        process = context.Process(target=on_rank, args=(rank, task, there))
        process.start()
        there.close()
        ranks.append((process, here))
    answers: list[tuple[dict[str, list[float]], int, str]] = [pipe.recv() for _, pipe in ranks]
    for process, _ in ranks:
        process.join()
    return answers[0]


def model_flops(name: str, rows: list[PackedMicrobatch], rank: int = 0) -> float:
    """Of one step over these rows: forward and backward, without what recompute adds; rank: of adapters, or 0."""
    hidden, intermediate, layers, heads, key_heads, head_dim, vocabulary = MODELS[name]
    attention = hidden * head_dim * (2 * heads + 2 * key_heads)
    matrices = layers * (attention + 3 * hidden * intermediate)
    tokens = sum(len(row.token_ids) for row in rows)
    head_tokens = sum(int(row.loss_mask.sum()) for row in rows)
    pairs = sum(int((np.diff(row.cu_seqlens).astype(np.int64) ** 2).sum()) / 2 for row in rows)  # causal
    adapters = rank * layers * (4 * hidden + 2 * head_dim * (heads + key_heads) + 3 * (hidden + intermediate))
    of_matrices = (4.0 if rank else 6.0) * (matrices * tokens + hidden * vocabulary * head_tokens)
    return of_matrices + 6.0 * adapters * tokens + 12.0 * layers * heads * head_dim * pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["dp1", "tp2", "pp2"], choices=LAYOUTS)
    parser.add_argument("--model", default="tiny", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=2048, help="of one row")
    parser.add_argument("--rows", type=int, default=4, help="micro-batches of one rank and step")
    parser.add_argument("--parts", type=int, default=1, help="of a step, at most --rows")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--offload", action="store_true", help="the optimiser is in host memory")
    parser.add_argument("--alone", action="store_true", help="without the step written by hand")
    parser.add_argument("--rank", type=int, default=0, help="of LoRA adapters; 0: all weights are trained")
    parser.add_argument("--form", default="adapter", choices=["adapter", "merged"], help="of versions with --rank")
    options = parser.parse_args()
    rows = [draw_row(options.tokens, MODELS[options.model][-1], seed) for seed in range(options.rows)]
    tokens = sum(len(row.token_ids) for row in rows)
    print(
        f"{options.model}, {options.rows} rows of {options.tokens} tokens a rank, {options.dtype} on {options.device}, "
        f"recompute {options.recompute}{', optimiser in host memory' if options.offload else ''}"
        f"{f', adapters of rank {options.rank}, versions {options.form}' if options.rank else ''}"
    )
    print(
        f"{'layout':8}{'ours tok/s':>12}{'range':>18}{'direct tok/s':>14}{'range':>18}"
        f"{'ratio':>8}{'MFU':>7}{'peak GiB':>10}{'version s':>11}{'parts/whole':>14}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", options.model, getattr(torch, options.dtype))
        for layout in options.layouts:
            place = Path(scratch) / layout
            place.mkdir()
            keys = {
                **LAYOUTS[layout],
                "device": options.device,
                "recompute_activations": options.recompute,
                "token_budget": options.tokens,
                "optimizer_offload": options.offload,
            }
            task = Task(
                model, keys, options.dtype, rows, options.repeats, options.parts, options.alone, options.rank,
                options.form, place,
            )  # fmt: skip
            times, peak, gpu = measure(task)
            replicas = keys["num_ranks"] if layout.startswith("dp") else 1
            flops = model_flops(options.model, rows, options.rank) * replicas
            print(render(layout, times, tokens * replicas, flops, keys, peak, gpu))
            tell("trainer yields a version in, s", statistics.median(times[VERSION]))
            tell_figures(times["ours"], tokens * replicas, flops / keys["num_ranks"], peak, gpu)


def tell_figures(seconds: list[float], tokens: int, flops: float, peak: int, gpu: str) -> None:
    """Tell what one rank does with its card.  flops: of this rank."""
    median = statistics.median(seconds)
    tell("trainer tokens/s", tokens / median)
    if peak:
        tell("trainer GiB", peak / 2**30)
    if fastest := peak_flops_of(gpu):
        tell("trainer share of the dense peak", flops / median / fastest)


def peak_flops_of(gpu: str) -> float | None:
    """Return the dense bf16 peak of a card of this name; None where no data sheet is known."""
    return next((peak_flops for name, peak_flops in PEAK_BF16_FLOPS.items() if name in gpu), None)


def render(
    layout: str, times: dict[str, list[float]], tokens: int, flops: float, keys: dict[str, Any], peak: int, gpu: str
) -> str:
    def cell(name: str) -> str:
        if name not in times:
            return f"{'–':>14}{'–':>18}"
        rates = [tokens / seconds for seconds in times[name]]
        width = 12 if name == "ours" else 14
        return f"{statistics.median(rates):>{width},.0f}{f'{min(rates):,.0f}–{max(rates):,.0f}':>18}"

    # Pairs were timed one right after the other: the median of their ratios is steadier than a ratio of medians.
    ratios = [d / o for o, d in zip(times["ours"], times.get("direct", ()), strict=False)]
    ratio = f"{statistics.median(ratios):.3f}" if ratios else "–"
    fastest = peak_flops_of(gpu)
    mfu = f"{flops / statistics.median(times['ours']) / keys['num_ranks'] / fastest:.1%}" if fastest else "–"
    memory = f"{peak / 2**30:.1f}" if peak else "–"
    pairs = zip(times.get("in parts", ()), times["ours"], strict=False)
    parts = f"{statistics.median(p / o for p, o in pairs):.3f}" if "in parts" in times else "–"
    version = f"{statistics.median(times[VERSION]):.3f}"
    return f"{layout:8}{cell('ours')}{cell('direct')}{ratio:>8}{mfu:>7}{memory:>10}{version:>11}{parts:>14}"


if __name__ == "__main__":
    main()
