"""Read the tokens that vLLM has sampled so far for a request in flight.

Its front end collects tokens and log-probabilities of every request until the end; this looks at that collection.  This
is not a public interface: whatever is not found as expected is reported as "not known", and nothing else is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The fields of a CompletionOutput that are known so far."""

    token_ids: list[int]
    logprobs: Any  # flat
    finish_reason: str = "abort"


def num_tokens(llm: Any, request_id: str) -> int:
    """Number of tokens sampled for this request; 0: none, or this vLLM does not report it."""
    detokenizer = getattr(_state_of(llm, request_id), "detokenizer", None)
    return len(detokenizer.output_token_ids) if detokenizer is not None else 0


def partial_completion(llm: Any, request_id: str) -> PartialCompletion | None:
    """The tokens sampled for this request; None if there are none, or this vLLM does not report them."""
    state = _state_of(llm, request_id)
    detokenizer = getattr(state, "detokenizer", None)
    logprobs = getattr(getattr(state, "logprobs_processor", None), "logprobs", None)
    if detokenizer is None or logprobs is None:
        return None
    token_ids = list(detokenizer.output_token_ids)
    is_whole = token_ids and len(getattr(logprobs, "start_indices", ())) == len(token_ids)
    return PartialCompletion(token_ids, logprobs) if is_whole else None


def _state_of(llm: Any, request_id: str) -> Any:
    processor = getattr(llm, "output_processor", None)
    states = getattr(processor, "request_states", {})
    internal = [request_id, *getattr(processor, "external_req_ids", {}).get(request_id, ())]
    return next((states[name] for name in internal if name in states), None)
