"""A request in vLLM's terms: its sampling parameters, and what it has sampled so far.

Input: RolloutRequest.  Output: vllm.SamplingParams; tokens and log-probabilities of a request in flight, which vLLM's
front end collects until the end.  That collection is not a public interface: whatever is not found as expected there
is reported as "not known", and nothing else is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.errors import EngineError
from rlhpc.types import Float32, Int32, RolloutRequest


def vllm_sampling_params(
    request: RolloutRequest,
    model_stop_token_ids: Set[int],
    run_seed: int | None = None,
    *,
    is_streamed: bool = False,
) -> Any:
    """Parameters for the rest of a request after its prefix, which vLLM treats as part of the prompt.

    run_seed: makes the draw reproducible for the same request; None: the engine's own randomness.  is_streamed: there
    is an output, of all tokens so far, after every step; otherwise only the last one.
    """
    # vLLM is imported after its environment is set (vllm_process.py).
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens - request.num_done,
        temperature=sampling.temperature,
        # The whole distribution: log-probabilities over a part of it would be renormalised, the trainer's are not, and
        # every importance ratio would be too small by the mass that was kept.
        top_p=1.0,
        top_k=0,
        stop_token_ids=sorted({*sampling.stop_token_ids, *model_stop_token_ids}),
        ignore_eos=True,  # end-of-sequence tokens are among stop_token_ids: one rule instead of two
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        seed=None if run_seed is None else sample_seed(run_seed, request),
        # Cheaper than a stream, and vLLM keeps everything until the end.
        output_kind=RequestOutputKind.CUMULATIVE if is_streamed else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nobody else has them
    )


def scoring_params() -> Any:
    """Parameters for a row whose own tokens are to be scored: the one that vLLM samples after them is not used."""
    # As above.
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,  # of the row's own tokens only
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def row_logprobs(prompt_logprobs: Any, token_ids: Int32) -> Float32:
    """vLLM's log-probabilities of a prompt as float32 [T], 0 on the first token.  Raises EngineError if some lack."""
    found = np.zeros(len(token_ids), np.float32)
    if isinstance(prompt_logprobs, np.ndarray) and len(prompt_logprobs) == len(token_ids) - 1:
        found[1:] = prompt_logprobs
        return found
    if prompt_logprobs is None or len(prompt_logprobs) != len(token_ids):
        raise EngineError(f"vLLM gave no log-probabilities for a row of {len(token_ids)} tokens")
    for place, token in enumerate(token_ids.tolist()[1:], start=1):
        found[place] = prompt_logprobs[place][token].logprob
    return found


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


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The fields of a CompletionOutput that are known so far."""

    token_ids: list[int]
    logprobs: Any  # flat
    finish_reason: str = "abort"
    weight_versions: Any = None  # spans

    def up_to(self, end: int) -> PartialCompletion | None:
        """Its first `end` tokens; None: there are none."""
        if end <= 0:
            return None
        return replace(
            self,
            token_ids=self.token_ids[:end],
            logprobs=FlatPart(self.logprobs.logprobs, self.logprobs.start_indices[:end]),
        )


def num_tokens(llm: Any, request_id: str) -> int:
    """Number of tokens sampled for this request; 0: none, or this vLLM does not report it."""
    if (own := getattr(llm, "num_tokens", None)) is not None:  # of core_thread.py, which stands for vLLM's front end
        return int(own(request_id))
    detokenizer = getattr(_state_of(llm, request_id), "detokenizer", None)
    return len(detokenizer.output_token_ids) if detokenizer is not None else 0


def has_begun(llm: Any, request_id: str) -> bool | None:
    """Whether vLLM has sampled a token for this request; None: it has none of this name, or does not tell."""
    detokenizer = getattr(_state_of(llm, request_id), "detokenizer", None)
    return None if detokenizer is None else bool(detokenizer.output_token_ids)


@dataclass(frozen=True, slots=True)
class FlatPart:
    """Log-probabilities of some tokens, as vLLM keeps those of all."""

    logprobs: list[float]
    start_indices: Sequence[int]


def partial_completion(llm: Any, request_id: str, first: int = 0) -> PartialCompletion | None:
    """The tokens sampled for this request from number `first` on; None if there are none, or vLLM does not tell."""
    if (own := getattr(llm, "sampled_so_far", None)) is not None:  # as above
        found: PartialCompletion | None = own(request_id, first)
        return found
    state = _state_of(llm, request_id)
    detokenizer = getattr(state, "detokenizer", None)
    logprobs = getattr(getattr(state, "logprobs_processor", None), "logprobs", None)
    if detokenizer is None or logprobs is None:
        return None
    starts = getattr(logprobs, "start_indices", ())
    token_ids = detokenizer.output_token_ids[first:]
    if not token_ids or len(starts) != first + len(token_ids):
        return None
    begin = starts[first]  # a long completion is not copied for its last tokens
    part = FlatPart(logprobs.logprobs[begin:], [start - begin for start in starts[first:]])
    return PartialCompletion(list(token_ids), part)


def stopped_completion(llm: Any, request_id: str, completion: Any) -> PartialCompletion:
    """What vLLM has sampled for a request that is about to be aborted, as it is now: vLLM's own goes on to grow."""
    num_known, spans = len(completion.token_ids), getattr(completion, "weight_versions", None)
    if completion.finish_reason is None:
        spans = spans_so_far(llm, request_id, num_known)
    part = FlatPart(completion.logprobs.logprobs[:], completion.logprobs.start_indices[:num_known])
    return PartialCompletion(completion.token_ids[:num_known], part, "stop", spans)


@dataclass(slots=True)
class SpanSoFar:
    """Output tokens [start, end) were sampled by `version`, as vLLM names it."""

    version: str
    start: int
    end: int


def spans_so_far(llm: Any, request_id: str, num_tokens: int) -> list[SpanSoFar] | None:
    """vLLM's own record of which weights sampled the first num_tokens; None: this vLLM keeps none."""
    starts = getattr(_state_of(llm, request_id), "weight_version_starts", None)
    if not starts:
        return None
    ends = [*(start for _, start in starts[1:]), num_tokens]
    return [SpanSoFar(version, start, end) for (version, start), end in zip(starts, ends, strict=True)]


def _state_of(llm: Any, request_id: str) -> Any:
    processor = getattr(llm, "output_processor", None)
    states = getattr(processor, "request_states", {})
    internal = [request_id, *getattr(processor, "external_req_ids", {}).get(request_id, ())]
    return next((states[name] for name in internal if name in states), None)
