"""Trainer ranks on GPUs: one process and one GPU each, and what they do in these tests.

Every backend runs in processes of its own, also alone: DeepSpeed chooses its accelerator once for a process, NCCL keeps
its communicators, and peaks of memory are a process's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhpc.protocol.contracts import StepResult
from rlhpc.training.backends import compute_deterministically
from rlhpc.training.trainer_state import read_checkpoint
from tests.contracts.part_scenarios import train_in_parts
from tests.contracts.reference_scenarios import ask_a_reference
from tests.contracts.trainer_cluster import Rank
from tests.contracts.trainer_scenarios import NanGradientOn, Rows, resume, save_midway, train
from tests.unit.training.packed_rows import draw_samples, pack_row

VOCABULARY = 1000


def rows_of(seed: int, count: int = 2) -> Rows:
    """Rows of mixed lengths: one token, short and long segments, totals that nothing divides."""
    lengths = [(200, 37, 1, 330, 64, 5), (129, 256, 2, 91, 31), (411, 17, 88, 3), (64, 64, 64, 1, 250)]
    return [
        pack_row(draw_samples(lengths[(seed + index) % 4], vocabulary=VOCABULARY, seed=10 * seed + index))
        for index in range(count)
    ]


def make_random_qwen3(directory: Path, *, layers: int, hidden: int = 1024) -> Path:
    """Of Qwen3-0.6B's sizes but for its depth: 0.16 B of embedding and 16 M for each layer."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def masters_in(directory: Path) -> dict[tuple[str, str], Tensor]:
    """Float32 state by kind and HF name."""
    return {(kind, name): tensor.clone() for kind, name, tensor in read_checkpoint(directory, None).tensors()}


def masters_after(rank: Rank, *, steps: list[Rows], **settings: Any) -> Any:
    """Gradient norms, and on rank 0 the float32 state after these steps, each kernel the same in every run."""
    return _masters_after(rank, [partial(train, rows=rows) for rows in steps], **settings)


def masters_after_parts(rank: Rank, *, parts: list[Rows], **settings: Any) -> Any:
    """As masters_after, of one step that comes in parts."""
    return _masters_after(rank, [partial(train_in_parts, parts=parts)], **settings)


def _masters_after(rank: Rank, steps: list[Callable[..., StepResult]], *, model: Path, **settings: Any) -> Any:
    compute_deterministically()
    backend = rank.open(model, **settings)
    norms = [step(rank, backend, learning_rate=1e-3).grad_norm for step in steps]
    backend.save(rank.scratch / "checkpoint").result()
    state = masters_in(rank.scratch / "checkpoint") if backend.is_rank_zero else {}
    backend.close()
    torch.use_deterministic_algorithms(False)
    return norms, state


def ask_the_same(rank: Rank, **settings: Any) -> Any:
    """ask_a_reference, each kernel the same in every run: after two steps other sums would be other bits."""
    return _deterministically(ask_a_reference, rank, **settings)


def save_twice(rank: Rank, *, model: Path, steps: list[Rows], **settings: Any) -> Any:
    """The same state saved while nothing happens, and while three steps are taken; whether both files are the same."""
    backend = rank.open(model, **settings)
    for rows in steps[:2]:
        train(rank, backend, rows)
    backend.save(rank.scratch / "quiet").result()
    future = backend.save(rank.scratch / "busy")
    applied = [train(rank, backend, rows).applied for rows in steps[2:]]
    future.result()
    is_rank_zero = backend.is_rank_zero
    backend.close()
    assert all(applied)
    return not is_rank_zero or _equal(masters_in(rank.scratch / "quiet"), masters_in(rank.scratch / "busy"))


def save_and_go_on(rank: Rank, *, directory: Path, **settings: Any) -> Any:
    """save_midway, each kernel the same in every run."""
    return _deterministically(save_midway, rank, directory=directory, **settings)


def go_on_from(rank: Rank, *, directory: Path, **settings: Any) -> Any:
    """resume, each kernel the same in every run."""
    return _deterministically(resume, rank, directory=directory, **settings)


def _deterministically(scenario: Callable[..., Any], rank: Rank, **arguments: Any) -> Any:
    compute_deterministically()
    seen = scenario(rank, **arguments)
    torch.use_deterministic_algorithms(False)
    return seen


def skip_a_nan_gradient(rank: Rank, *, model: Path, steps: list[Rows], **settings: Any) -> Any:
    """One good step, one whose gradient is nan on the last rank alone, one good: (applied, nothing changed)."""
    backend = rank.open(model, **settings)
    applied = [train(rank, backend, steps[0]).applied]
    backend.save(rank.scratch / "before").result()
    applied.append(train(rank, backend, steps[1], NanGradientOn(rank.world_size - 1, rank.rank)).applied)
    backend.save(rank.scratch / "after").result()
    applied.append(train(rank, backend, steps[2]).applied)
    is_rank_zero = backend.is_rank_zero
    backend.close()
    return applied, not is_rank_zero or _equal(masters_in(rank.scratch / "before"), masters_in(rank.scratch / "after"))


def peak_of_a_step(rank: Rank, *, model: Path, rows: Rows, **settings: Any) -> int:
    """Bytes that tensors took at the fullest moment of the second step, weights included."""
    backend = rank.open(model, **settings)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        assert train(rank, backend, rows).applied
    peak = torch.cuda.max_memory_allocated()
    backend.close()
    return peak


def relative_distance(found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Of the two ends, over the length of the way from `start` to `wanted`; L2 over all tensors."""
    apart = sum((found[name].double() - wanted[name].double()).square().sum() for name in wanted)
    moved = sum((start[name].double() - wanted[name].double()).square().sum() for name in wanted)
    return float((apart / moved).sqrt())


def _equal(left: dict[tuple[str, str], Tensor], right: dict[tuple[str, str], Tensor]) -> bool:
    return bool(left) and left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
