"""A request between its RolloutRequest and its Rollout: versions of its tokens, seeds, and what an engine has sampled.

Input: RolloutRequest, and an engine's tokens.  Output: Rollout.  Independent of the library that samples.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhpc.base.hf_config import language_model
from rlhpc.data.tokenizer import Decode, StopSearch
from rlhpc.protocol.contracts import RowScore, TopTokens
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import FinishReason, Float32, Int32, Prefix, Rollout, RolloutRequest

Number = TypeVar("Number", np.int32, np.float32)

# ----------------------------------------------------------------------------------------------------- finished request
#
# Join an engine's sampled tokens with the request, and with the prefix that it continued.
#
# Input: RolloutRequest and the engine's arrays.  Output: Rollout.


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """Tokens that a core has sampled; the request may not have ended."""

    token_ids: list[int]  # [n]
    logprobs: Float32  # [n] natural log
    finish_reason: str = "abort"


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Tokens sampled after prompt and prefix."""

    token_ids: Int32  # [n]
    logprobs: Float32  # [n] natural log
    versions: Int32  # [n]
    reason: str  # as the engine names it: "stop", "length", "abort"

    @classmethod
    def of_part(cls, completion: PartialCompletion, versions: Int32) -> FinishedRequest:
        """Join a core's completion, or a part of one, with the versions of its tokens."""
        tokens = np.asarray(completion.token_ids, np.int32)
        return cls(tokens, completion.logprobs, versions, completion.finish_reason)

    @classmethod
    def nothing(cls, reason: str) -> FinishedRequest:
        """A request of which no token was sampled."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), reason)


def searched(request: RolloutRequest, decode: Decode) -> tuple[RolloutRequest, StopSearch]:
    """Begin the search for the request's stop strings, with its prefix; return the request, its prefix cut behind one.

    A prefix with a stop string (from a run resumed with other stop strings) is a whole completion: the search has an
    end, and nothing is to be sampled.  Raises ValueError for a prefix of several rows: an engine continues one.
    """
    sampling, prefix = request.sampling, request.prefix
    if prefix is not None and len(prefix.row_starts):
        raise ValueError(f"{request.request_id}: a prefix of {len(prefix.rows)} rows, of which an engine continues one")
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

    Raises EngineError if arrays disagree, the reason is unknown, or a log-probability is not finite: the logits were
    not finite then, and the whole step that trains this rollout would be skipped.
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
        prompt_id=request.prompt.prompt_id,
        token_ids=token_ids,
        behaviour_logprobs=logprobs,
        versions=versions,
        loss_mask=np.ones(len(token_ids), np.bool_),
        finish_reason=_reason(request, finished.reason),
    )


def prefix_of(rollout: Rollout) -> Prefix:
    """The rollout's tokens as a prefix for another generator to continue."""
    return Prefix(rollout.token_ids, rollout.behaviour_logprobs, rollout.versions, rollout.row_starts)


def prefix_up_to(rollout: Rollout, version: int) -> Prefix:
    """Each row's tokens before the first one sampled by a later version; none: an empty prefix."""
    whole = prefix_of(rollout)
    rows = [whole.row(row) for row in whole.rows]
    ends = [int(np.searchsorted(row.versions, version, side="right")) for row in rows]  # versions never decrease
    return Prefix.of_rows([row.row(slice(end)) for row, end in zip(rows, ends, strict=True)])


def piece_of(request: RolloutRequest, sampled: FinishedRequest, start: int) -> Prefix:
    """The completion so far, from token `start` on; sampled: tokens behind the prefix, not before `start`."""
    own, prefix = Prefix(sampled.token_ids, sampled.logprobs, sampled.versions), request.prefix
    if prefix is None or start >= request.num_done:
        return own
    return prefix.row(slice(start, None)).followed_by(own)


def _reason(request: RolloutRequest, word: str) -> FinishReason:
    try:
        return FinishReason(word)
    except ValueError:
        raise EngineError(f"{request.request_id}: the engine ended it for an unknown reason: {word!r}") from None


# ------------------------------------------------------------------------------------------------------- version record
#
# Remember which policy version sampled which tokens of a request.
#
# Input: the number of tokens a request had when weights changed.  Output: one version per token.  Pure.


class VersionRecord:
    """The versions of one request in flight."""

    def __init__(self, policy_version: int) -> None:
        """policy_version: live when the request is submitted."""
        self._starts: list[tuple[int, int]] = [(policy_version, 0)]  # (version, its first token)

    def weights_changed(self, policy_version: int, num_tokens: int) -> None:
        """Record that tokens from `num_tokens` on are of `policy_version`."""
        self._starts.append((policy_version, num_tokens))

    def versions(self, num_tokens: int) -> Int32:
        """Version of every token, int32 [num_tokens]."""
        versions = np.empty(num_tokens, np.int32)
        for version, start in self._starts:
            versions[start:] = version
        return versions


@dataclass(slots=True)
class InFlight:
    """The engine's record of a request that its core has, or is about to be given."""

    request: RolloutRequest
    record: VersionRecord
    is_submitted: bool = False
    has_output: bool = False
    is_aborted: bool = False  # by its caller
    begins_anew: bool = False  # had no token when weights changed: aborted by us, to be submitted again
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    came_back: asyncio.Event = field(default_factory=asyncio.Event)  # the core has returned a request that begins anew
    aborting: asyncio.Future[None] | None = None  # aborts a request that begins anew, until it has come back

    def submit(self, policy_version: int) -> None:
        """Record that the request is passed to the core now, while this version is live."""
        self.record, self.is_submitted = VersionRecord(policy_version), True

    def begin_anew(self) -> None:
        """Ignore the core's output and submit again: the prompt may be in the cache under an older version's name."""
        self.begins_anew = True
        self.came_back.clear()

    def may_keep(self) -> bool:
        """Return whether the output just received counts; called once per output."""
        self.came_back.set()
        self.is_submitted, self.begins_anew = not self.begins_anew, False
        return self.is_submitted

    def end(self) -> None:
        """Set the events: the request has ended."""
        self.ended.set()
        self.came_back.set()


# ---------------------------------------------------------------------------------------------------- scores and seeds


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a prompt, for every token but the first: of its own, then of the most likely."""

    token_ids: Int32  # [T − 1, 1 + k]
    logprobs: Float32  # [T − 1, 1 + k] natural log
    ranks: Int32  # [T − 1] of the prompt's own tokens


def row_score(version: int, scores: PromptScores | None, token_ids: Int32, top_k: int) -> RowScore:
    """Return the scores with the row's first token, which has none.  Raises EngineError if some lack."""
    if scores is None or len(scores.logprobs) != len(token_ids) - 1 or scores.logprobs.shape[1] <= top_k:
        raise EngineError(f"the engine gave no log-probabilities for a row of {len(token_ids)} tokens")

    def with_first(found: NDArray[Number]) -> NDArray[Number]:
        return np.concatenate([np.zeros_like(found, shape=(1, *found.shape[1:])), found])

    best = slice(1, 1 + top_k)
    top = TopTokens(with_first(scores.token_ids[:, best]), with_first(scores.logprobs[:, best])) if top_k else None
    return RowScore(version, with_first(scores.logprobs[:, 0]), with_first(scores.ranks), top)


def sample_seed(run_seed: int, request: RolloutRequest) -> int:
    """Differs between members, rows and prefixes: a continuation must not repeat the random numbers of its prefix."""
    where = [run_seed, request.group_id, request.sample_index, request.num_done]
    entropy = np.random.SeedSequence(where + [request.row] * (request.row > 0))
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))


def end_of_sequence_ids(model: Path) -> frozenset[int]:
    """End-of-sequence tokens named by the checkpoint; chat models often have several."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model / name
        if path.exists():
            ids = language_model(json.loads(path.read_text())).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
