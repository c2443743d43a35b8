"""Seeds of samples: the same for the same sample of a run, another for every other."""

from __future__ import annotations

import numpy as np

from rlhpc.generation.vllm_requests import sample_seed
from rlhpc.protocol.types import Prefix, Prompt, RolloutRequest, SamplingParams


def request_of(group_id: int, sample_index: int, num_done: int) -> RolloutRequest:
    done = np.zeros(num_done, np.int32)
    prefix = Prefix(done, done.astype(np.float32), done) if num_done else None
    prompt = Prompt(0, "any", np.zeros(1, np.int32), "")
    return RolloutRequest(group_id, sample_index, prompt, SamplingParams(max_tokens=99), prefix)


def test_a_seed_belongs_to_run_group_sample_and_prefix() -> None:
    where = [(r, g, s, d) for r in (0, 1) for g in range(20) for s in range(8) for d in (0, 1, 50)]
    seeds = [sample_seed(run_seed, request_of(*rest)) for run_seed, *rest in where]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [sample_seed(run_seed, request_of(*rest)) for run_seed, *rest in where]
    assert all(0 <= seed < 2**63 for seed in seeds)
