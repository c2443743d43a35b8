"""Join what an engine has sampled to the request, and to the prefix it continued.

Input: RolloutRequest and the engine's arrays.  Output: Rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhpc.errors import EngineError
from rlhpc.stop_strings import Decode, StopSearch
from rlhpc.types import FinishReason, Float32, Int32, Prefix, Rollout, RolloutRequest


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Tokens sampled after prompt and prefix."""

    token_ids: Int32  # [n]
    logprobs: Float32  # [n] natural log
    versions: Int32  # [n]
    reason: str  # as the engine names it: "stop", "length", "abort"

    @classmethod
    def of_vllm(cls, completion: Any, versions: Int32) -> FinishedRequest:
        """Convert vLLM's CompletionOutput, asked for with logprobs=0 and flat_logprobs."""
        flat, logprobs = completion.logprobs, np.empty(0, np.float32)
        if completion.token_ids:
            logprobs = np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices)]
        tokens = np.asarray(completion.token_ids, np.int32)
        return cls(token_ids=tokens, logprobs=logprobs, versions=versions, reason=completion.finish_reason)

    def up_to(self, end: int) -> FinishedRequest:
        """Without what was sampled after its first `end` tokens, of which the last completes a stop string."""
        return FinishedRequest(self.token_ids[:end], self.logprobs[:end], self.versions[:end], "stop")

    @classmethod
    def nothing(cls, reason: str) -> FinishedRequest:
        """No token was sampled."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), reason)


def searched(request: RolloutRequest, decode: Decode) -> tuple[RolloutRequest, StopSearch]:
    """Begin the search for the request's stop strings, with its prefix; return the request without what is behind one.

    A prefix with a stop string, which a run has that was resumed with other ones, is a whole completion: the search has
    an end, and nothing is to be sampled.
    """
    sampling, prefix = request.sampling, request.prefix
    search = StopSearch(decode, sampling.stop_strings)
    if prefix is None or not sampling.stop_strings:
        return request, search
    end = search.read(prefix.token_ids[sampling.searched_from :].tolist())
    if end is not None:
        kept = slice(sampling.searched_from + end)
        prefix = Prefix(prefix.token_ids[kept], prefix.behaviour_logprobs[kept], prefix.versions[kept])
    return replace(request, prefix=prefix), search


def rollout_of(request: RolloutRequest, finished: FinishedRequest) -> Rollout:
    """The whole completion, prefix included.

    Raises EngineError if arrays disagree, the reason is unknown, or a log-probability is not finite: then the logits
    were not, and the step of every rollout that is trained beside this one would be skipped.
    """
    length = len(finished.token_ids)
    if len(finished.logprobs) != length or len(finished.versions) != length:
        raise EngineError(
            f"{request.request_id}: {length} tokens, {len(finished.logprobs)} log-probabilities, "
            f"{len(finished.versions)} versions"
        )
    if not np.isfinite(finished.logprobs).all():
        place = int(np.flatnonzero(~np.isfinite(finished.logprobs))[0])
        raise EngineError(
            f"{request.request_id}: the log-probability of sampled token {place} is {finished.logprobs[place]}: the "
            f"engine's logits are not finite, by weights of version {finished.versions[place]} or by its device"
        )
    token_ids, logprobs, versions = finished.token_ids, finished.logprobs, finished.versions
    prefix = request.prefix
    if prefix is not None:
        token_ids = np.concatenate([prefix.token_ids, token_ids])
        logprobs = np.concatenate([prefix.behaviour_logprobs, logprobs])
        versions = np.concatenate([prefix.versions, versions])
    return Rollout(
        group_id=request.group_id,
        sample_index=request.sample_index,
        prompt=request.prompt,
        token_ids=token_ids,
        behaviour_logprobs=logprobs,
        versions=versions,
        loss_mask=np.ones(len(token_ids), np.bool_),
        finish_reason=_reason(request, finished.reason),
    )


def prefix_of(rollout: Rollout) -> Prefix:
    """The same tokens as a prefix of a rollout that another generator continues."""
    return Prefix(rollout.token_ids, rollout.behaviour_logprobs, rollout.versions)


def prefix_of_failed(prefix: Prefix | None, rollout: Rollout) -> Prefix | None:
    """What another try goes on from: the rollout, or the prefix that it failed to repeat to the end; None: no turn."""
    if not rollout.loss_mask.any():
        return prefix
    num_tokens = len(rollout.token_ids)
    is_repeated = prefix is not None and np.array_equal(prefix.token_ids[:num_tokens], rollout.token_ids)
    return prefix if is_repeated else prefix_of(rollout)


def prefix_up_to(rollout: Rollout, version: int) -> Prefix:
    """The tokens before the first that a later version has sampled; versions never decrease."""
    end = int(np.searchsorted(rollout.versions, version, side="right"))
    return Prefix(rollout.token_ids[:end], rollout.behaviour_logprobs[:end], rollout.versions[:end])


def piece_of(request: RolloutRequest, sampled: FinishedRequest, start: int) -> Prefix:
    """The completion so far, from token `start` on; sampled: what lies behind the prefix, and not before `start`."""
    own, prefix = Prefix(sampled.token_ids, sampled.logprobs, sampled.versions), request.prefix
    if prefix is None or start >= request.num_done:
        return own
    return Prefix(
        np.concatenate([prefix.token_ids[start:], own.token_ids]),
        np.concatenate([prefix.behaviour_logprobs[start:], own.behaviour_logprobs]),
        np.concatenate([prefix.versions[start:], own.versions]),
    )


def _reason(request: RolloutRequest, word: str) -> FinishReason:
    try:
        return FinishReason(word)
    except ValueError:
        raise EngineError(f"{request.request_id}: the engine ended it for an unknown reason: {word!r}") from None
