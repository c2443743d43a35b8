"""Routing replay: mismatch with and without it, bytes of routes, and what they cost on their way.

    python -m bench.routing_replay [--dtype bfloat16] [--experts 64] [--top-k 4] [--layers 4] [--hidden 128]
        [--prompts 16] [--completion-tokens 96] [--seed 0] [--path-only]

vLLM samples completions with a drawn mixture, and tells their experts; the trainer, the same weights in the same dtype,
computes their log-probabilities with these experts and with its own.  Mismatch is policy/mismatch_kl of a run's first
step: the mean of r − 1 − log r over sampled tokens, r = π_trainer / π_engine.  Weights are drawn so wide that experts
count (initializer_range 0.1): how often scores nearly tie depends on the number of experts and layers.
--path-only: no engine; sizes and times of the shape of Qwen3-30B-A3B, 48 mixtures of 128 experts, 8 a token.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.algorithms.packing import FlopCost, pack
from rlhpc.config.rules import Config
from rlhpc.models.routes import MixtureForm
from rlhpc.protocol.contracts import TrainerBackend
from rlhpc.protocol.messages import BatchRows, Delivery
from rlhpc.protocol.types import (
    FinishReason,
    PackedMicrobatch,
    Prompt,
    Rollout,
    RolloutRequest,
    SamplingParams,
    ScoredRollout,
    TrainingSample,
    Verdict,
)
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from rlhpc.training.route_replay import row_experts, without_routes
from rlhpc.transport.codec import Codec
from tests.tiny_models import make_tiny_checkpoint

PROMPT_TOKENS = 24
LARGE = MixtureForm(tuple(range(48)), 128, 8)  # Qwen3-30B-A3B
LARGE_TOKENS = 2048  # of a rollout
REPEATS = 5


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing_replay")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    for name, default in (("experts", 64), ("top-k", 4), ("layers", 4), ("hidden", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--completion-tokens", type=int, default=96)
    parser.add_argument("--path-only", action="store_true")
    options = parser.parse_args()
    show_path()
    if not options.path_only:
        with tempfile.TemporaryDirectory() as directory:
            show_mismatch(options, Path(directory))
    return 0


# ----------------------------------------------------------------------------------------------------------------- path


def show_path() -> None:
    """Print bytes of a rollout of the large shape, and times of each stage of its way."""
    rng = np.random.default_rng(0)
    order = rng.random((LARGE_TOKENS - 1, len(LARGE.layers), LARGE.num_experts)).argpartition(LARGE.top_k, axis=2)
    experts = np.ascontiguousarray(order[:, :, : LARGE.top_k].astype(np.int16))
    routes = LARGE.pack(experts)
    plain = _rollout(None)
    with_routes = replace(plain, routes=routes)
    raw, packed = LARGE.bytes_per_token * (LARGE_TOKENS - 1), len(routes.packed)
    print(f"a rollout of {LARGE_TOKENS} tokens, {_named(LARGE)}:")
    print(f"  ids {raw:,} bytes, packed {packed:,} ({packed / raw:.0%}), {packed / (LARGE_TOKENS - 1):.0f} a token")
    print(f"  generator: pack {_ms(lambda: LARGE.pack(experts)):.1f} ms, in a thread beside sampling")
    for name, rollout in (("without", plain), ("with", with_routes)):
        print(f"  controller, {name} routes: {_times_of_controller(rollout)}")
    (row,) = _rows([_sample(with_routes)]).rows
    print(f"  trainer: unpack {_ms(lambda: row_experts(row, LARGE)):.1f} ms for each pass over it")


def _times_of_controller(rollout: Rollout) -> str:
    """Describe what a rollout costs the controller."""
    deliveries, sent = Codec([Delivery]), Codec([BatchRows])
    frames = deliveries.encode(Delivery(1, 1, "bench", 0, 0, ScoredRollout(rollout, 1.0, Verdict.CORRECT)), 1)
    sample = _sample(rollout)
    rows = BatchRows(1, (_rows([sample]),))
    received = _ms(lambda: deliveries.decode(frames, "generator"))
    laid_out, encoded = _ms(lambda: _rows([sample])), _ms(lambda: sent.encode(rows, 1))
    return (
        f"{sum(map(len, frames)):,} bytes received in {received * 1e3:.0f} µs, laid out in {laid_out * 1e3:.0f} µs, "
        f"sent to a rank in {encoded * 1e3:.0f} µs"
    )


def _named(form: MixtureForm) -> str:
    return f"{len(form.layers)} mixtures of {form.num_experts} experts, {form.top_k} a token"


def _rollout(routes: Any) -> Rollout:
    rng, length = np.random.default_rng(1), LARGE_TOKENS - PROMPT_TOKENS
    return Rollout(
        group_id=0,
        sample_index=0,
        prompt_id=0,
        token_ids=rng.integers(0, 150_000, length).astype(np.int32),
        behaviour_logprobs=-rng.random(length).astype(np.float32),
        versions=np.zeros(length, np.int32),
        loss_mask=np.ones(length, np.bool_),
        finish_reason=FinishReason.STOP,
        routes=routes,
    )


def _sample(rollout: Rollout) -> TrainingSample:
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    mask = np.concatenate([np.zeros(PROMPT_TOKENS, np.bool_), rollout.loss_mask])

    def behind(values: Any, fill: float) -> Any:
        return np.concatenate([np.full(PROMPT_TOKENS, fill, values.dtype), values])

    return TrainingSample(
        group_id=rollout.group_id,
        sample_index=rollout.sample_index,
        token_ids=np.concatenate([prompt, rollout.token_ids]),
        loss_mask=mask,
        behaviour_logprobs=behind(rollout.behaviour_logprobs, 0),
        advantages=mask.astype(np.float32),
        versions=behind(rollout.versions, -1),
        routes=rollout.routes,
    )


def _rows(samples: list[TrainingSample], token_budget: int = 4096) -> Any:
    return pack(samples, token_budget=token_budget, num_ranks=1, cost=FlopCost(1.0, 0.0))


def _ms(call: Callable[[], object]) -> float:
    """Least CPU time of a few runs, milliseconds: other work on the machine does not count."""
    call()
    best = float("inf")
    for _ in range(REPEATS):
        began = time.process_time()
        call()
        best = min(best, time.process_time() - began)
    return best * 1e3


# ------------------------------------------------------------------------------------------------------------- mismatch


def show_mismatch(options: argparse.Namespace, directory: Path) -> None:
    """Sample with vLLM, score with the trainer; print mismatch with the engine's experts and with the trainer's own."""
    model = make_tiny_checkpoint(
        directory / "model",
        "qwen3_moe",
        hidden=options.hidden,
        layers=options.layers,
        tied=False,
        seed=options.seed,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
    )
    config, form = _config(model, options), MixtureForm.of_replayed(model)
    requests = _requests(options)
    rollouts = asyncio.run(_sampled(config, requests))
    samples = [
        replace(_sample(rollout), token_ids=np.concatenate([request.prompt.token_ids, rollout.token_ids]))
        for request, rollout in zip(requests, rollouts, strict=True)
    ]
    rows = list(_rows(samples, config.trainer.token_budget).rows)
    backend = open_backend(config, RankContext(0, 1, f"file://{directory / 'store'}"))
    own_rows = without_routes(rows)
    given, own = _kl(backend, rows), _kl(backend, own_rows)
    flipped = _share_of_flips(backend, rows, form)
    with_ms, without_ms = _ms(lambda: backend.logprobs(rows)), _ms(lambda: backend.logprobs(own_rows))
    num_bytes = np.mean([len(rollout.routes.packed) for rollout in rollouts if rollout.routes is not None])
    backend.close()
    print(f"{_named(form)}, hidden {options.hidden}, {options.dtype}: {len(rollouts)} rollouts of at most "
          f"{options.completion_tokens} tokens")  # fmt: skip
    print(f"  choices of the trainer that differ from the engine's: {flipped:.2%} of tokens and layers")
    print(f"  mismatch KL {own:.3e} without replay, {given:.3e} with: ratio {given / own:.3f}")
    print(f"  routes {num_bytes:,.0f} bytes a rollout; forward pass {without_ms:.1f} ms without, "
          f"{with_ms:.1f} ms with")  # fmt: skip


def _config(model: Path, options: argparse.Namespace) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "bench", "num_steps": 1, "seed": options.seed},
            "model": {"path": model, "dtype": options.dtype},
            "data": {"path": model, "task": "none"},
            "algorithm": {"routing_replay": True},
            "generation": {
                "max_prompt_tokens": PROMPT_TOKENS,
                "max_completion_tokens": options.completion_tokens,
                "max_num_seqs": 16,
                "kv_cache_bytes": 64 << 20,
            },
            "admission": {"groups_per_step": 2, "group_size": 2},
            "trainer": {"backend": "reference", "token_budget": 1024, "device": "cpu"},
        }
    )


def _requests(options: argparse.Namespace) -> list[RolloutRequest]:
    rng, sampling = np.random.default_rng(options.seed), SamplingParams(max_tokens=options.completion_tokens)
    prompts = [
        Prompt(number, "none", rng.integers(4, 100, PROMPT_TOKENS).astype(np.int32), "")
        for number in range(options.prompts)
    ]
    return [RolloutRequest(prompt.prompt_id, index, prompt, sampling) for prompt in prompts for index in range(2)]


async def _sampled(config: Config, requests: list[RolloutRequest]) -> list[Rollout]:
    from rlhpc.generation.vllm_engine import VllmEngine  # not for --path-only

    engine = await VllmEngine.start(config, seed=config.run.seed)
    try:
        return list(await asyncio.gather(*map(engine.generate, requests)))
    finally:
        await engine.close()


def _kl(backend: TrainerBackend, rows: list[PackedMicrobatch]) -> float:
    """Mean of r − 1 − log r over loss tokens."""
    log_ratios = [
        (logprobs.double() - torch.from_numpy(row.behaviour_logprobs.astype(np.float64)))[
            torch.from_numpy(row.loss_mask)
        ]
        for logprobs, row in zip(backend.logprobs(rows), rows, strict=True)
    ]
    log_ratio = torch.cat(log_ratios)
    return float((torch.expm1(log_ratio) - log_ratio).mean())


def _share_of_flips(backend: Any, rows: list[PackedMicrobatch], form: MixtureForm) -> float:
    """Share of tokens and layers whose experts the trainer would choose otherwise, given those of the layers before."""
    replay, own = backend._replay, list[Tensor]()
    answer = replay.answer

    def noted(place: int, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        own.append(chosen.sort(-1).values)
        found: tuple[Tensor, Tensor] = answer(place, scores, chosen)
        return found

    replay.answer = noted
    num_differing = num_choices = 0
    for row in rows:
        own.clear()
        backend.logprobs([row])
        told = torch.from_numpy(row_experts(row, form))
        known = told[:, 0, 0] >= 0
        mine = torch.stack([each.view(-1, form.top_k) for each in own], 1)
        differs = (mine != told).any(-1)[known]
        num_differing, num_choices = num_differing + int(differs.sum()), num_choices + differs.numel()
    replay.answer = answer
    return num_differing / num_choices


if __name__ == "__main__":
    sys.exit(main())
