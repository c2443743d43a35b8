"""Sampling parameters of a request, in vLLM's terms.

Input: RolloutRequest.  Output: vllm.SamplingParams.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.types import RolloutRequest


def vllm_sampling_params(request: RolloutRequest, model_stop_token_ids: Set[int], run_seed: int | None = None) -> Any:
    """For the rest of the request after its prefix, which vLLM treats as part of the prompt.

    run_seed: makes the draw reproducible for the same request; None: the engine's own randomness.
    """
    # vLLM is imported after its environment is set (vllm_process.py).
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens - request.num_done,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=sorted({*sampling.stop_token_ids, *model_stop_token_ids}),
        ignore_eos=True,  # end-of-sequence tokens are among stop_token_ids: one rule instead of two
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        seed=None if run_seed is None else sample_seed(run_seed, request),
        # Cheaper than a stream, and vLLM keeps everything until the end.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sample_seed(run_seed: int, request: RolloutRequest) -> int:
    """Differs between members and prefixes: a continuation must not repeat the random numbers of its prefix."""
    entropy = np.random.SeedSequence([run_seed, request.group_id, request.sample_index, request.num_done])
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))


def end_of_sequence_ids(model: Path) -> frozenset[int]:
    """End-of-sequence tokens named by the checkpoint; chat models often have several."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model / name
        if path.exists():
            ids = json.loads(path.read_text()).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
