"""How fast the reference trainer is on one core, beside plain transformers on the same packed rows.

    OMP_NUM_THREADS=1 python -m bench.trainer_reference

Prints tokens/s of a whole optimiser step (forward, backward, AdamW), best of five.  "plain transformers" gives the
packed row with position_ids and no cache, so that HF builds its own [T, T] mask, and makes all logits.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import (
    clipped_loss,
    clipped_surrogate,
    draw_samples,
    num_loss_tokens,
    pack_row,
    tiny_config,
)

REPEATS = 5


def draw_row(num_tokens: int, mean_length: int, seed: int) -> PackedMicrobatch:
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) + 3 * mean_length // 2 <= num_tokens:
        lengths.append(int(rng.integers(mean_length // 2, 3 * mean_length // 2)))
    return pack_row(draw_samples(lengths, seed=seed))


def best_of(step: Callable[[], object]) -> float:
    step()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def plain_step(directory: Path, rows: list[PackedMicrobatch]) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        for row in rows:
            tokens, positions = (torch.from_numpy(a.astype(np.int64))[None] for a in (row.token_ids, row.position_ids))
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0].float()
            chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
            current = torch.cat([chosen.new_zeros(1), chosen])
            behaviour, advantages, mask = (
                torch.from_numpy(a) for a in (row.behaviour_logprobs, row.advantages, row.loss_mask)
            )
            loss, _ = clipped_surrogate(
                current, behaviour=behaviour, proximal=behaviour, advantages=advantages, loss_mask=mask
            )
            torch.autograd.backward(loss / num_loss_tokens(rows))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--mean-length", type=int, default=60)
    parser.add_argument("--skip-plain", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [draw_row(4096, options.mean_length, 0), draw_row(2048, options.mean_length, 1)]
    num_tokens = sum(len(row.token_ids) for row in rows)
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_tiny_checkpoint(Path(scratch), hidden=128, layers=options.layers)
        backend = open_backend(tiny_config(directory), RankContext())
        num_parameters = sum(int(np.prod(spec.shape)) for spec in backend.tensor_specs())
        print(
            f"{num_parameters} parameters, {num_tokens} tokens in {sum(len(r.cu_seqlens) - 1 for r in rows)} segments"
        )

        def step() -> None:
            backend.step(
                rows,
                clipped_loss,
                proximal=None,
                num_loss_tokens=num_loss_tokens(rows),
                learning_rate=1e-4,
                weight_decay=0.0,
                max_grad_norm=1.0,
            )

        timings = {"step": step, "log-probabilities": lambda: backend.logprobs(rows)}
        if not options.skip_plain:
            timings["plain transformers step"] = plain_step(directory, rows)
        for name, action in timings.items():
            seconds = best_of(action)
            print(f"{name:26s} {seconds:7.3f} s   {num_tokens / seconds:9.0f} tokens/s")


if __name__ == "__main__":
    main()
