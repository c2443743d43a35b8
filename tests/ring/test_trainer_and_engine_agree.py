"""The trainer's log-probabilities are the engine's: the same tokens, the same version, packed rows of mixed lengths."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rlhpc.algorithms.samples import to_samples
from rlhpc.config import Config
from rlhpc.packing.cost import FlopCost
from rlhpc.packing.pack import pack
from rlhpc.run_layout import RunLayout
from rlhpc.types import (
    Float32,
    PackedBatch,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    ScoredRollout,
    Verdict,
)
from tests.tiny_models import make_tiny_checkpoint

TOLERANCE_NATS = 1e-4
TEMPERATURE = 0.8


@pytest.mark.vllm
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_fp32_logprobs_of_engine_and_trainer_differ_by_at_most_a_ten_thousandth(family: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    make_tiny_checkpoint(checkpoint, family=family)
    config = _config(tmp_path, checkpoint)
    rollouts = asyncio.run(_sample(config, tmp_path))
    lengths = {len(rollout.token_ids) for rollout in rollouts}
    assert len(lengths) > 5
    batch = _packed(rollouts, config)
    trained = _trainer_logprobs(config, batch, tmp_path)
    rows = [row for rank in batch.ranks for row in rank]
    differences = [
        np.abs(mine - row.behaviour_logprobs)[row.loss_mask] for mine, row in zip(trained, rows, strict=True)
    ]
    assert sum(len(d) for d in differences) == sum(len(rollout.token_ids) for rollout in rollouts)
    assert max(float(d.max()) for d in differences) <= TOLERANCE_NATS


async def _sample(config: Config, directory: Path) -> list[Rollout]:
    from rlhpc.generation.make import start_engine

    engine = await start_engine(config, seed=3, layout=RunLayout(directory / "run"))
    try:
        requests = [
            RolloutRequest(
                group_id=index,
                sample_index=0,
                prompt=Prompt(index, "any", np.arange(5, 7 + index, dtype=np.int32), ""),
                sampling=SamplingParams(max_tokens=8 + 9 * (index % 7), temperature=TEMPERATURE),
            )
            for index in range(16)
        ]
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))
    finally:
        await engine.close()


def _packed(rollouts: list[Rollout], config: Config) -> PackedBatch:
    samples = []
    for rollout in rollouts:
        scored = ScoredRollout(rollout, 1.0, Verdict.CORRECT)
        group = RolloutGroup(rollout.group_id, rollout.prompt, 0, (scored,))
        samples += to_samples(group, lambda rewards: np.ones_like(rewards))
    return pack(samples, token_budget=config.trainer.token_budget, num_ranks=1, cost=FlopCost(1.0, 0.0), step=0,
                policy_version=0)  # fmt: skip


def _trainer_logprobs(config: Config, batch: PackedBatch, directory: Path) -> list[Float32]:
    from rlhpc.training.make import open_backend

    backend = open_backend(config, rank=0, world_size=1, store_address=f"file://{directory}/store")
    try:
        return [values.numpy() for values in backend.logprobs(batch.ranks[0])]
    finally:
        backend.close()


def _config(directory: Path, checkpoint: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "agree", "directory": directory / "run", "num_steps": 1},
            "model": {"path": checkpoint, "dtype": "float32"},
            "data": {"path": directory / "none.jsonl", "task": "integer_arithmetic"},
            "generation": {
                "max_prompt_tokens": 32,
                "max_completion_tokens": 96,
                "max_num_seqs": 16,
                "temperature": TEMPERATURE,
                "kv_cache_bytes": 64 << 20,
            },
            "admission": {"groups_per_step": 2, "group_size": 2},
            "trainer": {"token_budget": 256},
        }
    )
