"""Say to vLLM how a completion is drawn and where it ends.

Eats RolloutRequest, makes vllm.SamplingParams.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from rlhpc.types import RolloutRequest


def vllm_sampling_params(request: RolloutRequest, model_stop_token_ids: Set[int]) -> Any:
    """For what is left of the request after its prefix, which vLLM takes for a part of the prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    num_done = len(request.prefix.token_ids) if request.prefix is not None else 0
    return SamplingParams(
        max_tokens=sampling.max_tokens - num_done,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=sorted({*sampling.stop_token_ids, *model_stop_token_ids}),
        ignore_eos=True,  # end-of-sequence tokens are among stop_token_ids: one rule instead of two
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        # Cheaper than a stream, and vLLM keeps all that is wanted until the end.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def end_of_sequence_ids(model: Path) -> frozenset[int]:
    """Those that the checkpoint itself names; chat models often have several."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model / name
        if path.exists():
            ids = json.loads(path.read_text()).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
