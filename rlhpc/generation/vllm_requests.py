"""A request in vLLM's terms: its sampling parameters, and what it has sampled so far.

Input: RolloutRequest.  Output: vllm.SamplingParams; tokens and log-probabilities of a request in flight, which vLLM's
front end collects until the end.  That collection is not a public interface: whatever is not found as expected there
is reported as "not known", and nothing else is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlhpc.data.tokenizer import Decode, StopSearch
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import FinishReason, Float32, Int32, Prefix, Rollout, RolloutRequest

# ----------------------------------------------------------------------------------------------------- finished request
#
# Join what an engine has sampled to the request, and to the prefix it continued.
#
# Input: RolloutRequest and the engine's arrays.  Output: Rollout.


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
        """The request up to its first `end` tokens, of which the last completes a stop string."""
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
        prompt_id=request.prompt.prompt_id,
        token_ids=token_ids,
        behaviour_logprobs=logprobs,
        versions=versions,
        loss_mask=np.ones(len(token_ids), np.bool_),
        finish_reason=_reason(request, finished.reason),
    )


def prefix_of(rollout: Rollout) -> Prefix:
    """The rollout's tokens as a prefix of one that another generator continues."""
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


# ------------------------------------------------------------------------------------------------------- version record
#
# Remember which policy version sampled which tokens of a request.
#
# Input: the number of tokens a request had when weights changed.  Output: one version per token.  Pure. Where vLLM
# keeps spans of its own the two must agree, except for a delay: new weights and their name reach the engine in two
# messages, and on a busy machine it decodes some tokens between them.  Ours is counted while the weights are loaded.


class Span(Protocol):
    """vLLM's record: output tokens [start, end) were sampled by `version`."""

    version: str
    start: int
    end: int


class VersionRecord:
    """The versions of one request in flight."""

    def __init__(self, policy_version: int) -> None:
        """A request submitted while `policy_version` is live."""
        self._starts: list[tuple[int, int]] = [(policy_version, 0)]  # (version, its first token)
        self._is_certain = True

    def weights_changed(self, policy_version: int, num_tokens: int | None) -> None:
        """Tokens from `num_tokens` on are of `policy_version`.

        None: the worker did not know the request.  It has either not begun, or has ended and its output is on the way.
        """
        if num_tokens is None:
            self._is_certain = False
        self._starts.append((policy_version, num_tokens or 0))

    def versions(self, num_tokens: int) -> Int32 | None:
        """Version of every token, int32 [num_tokens]; None where only spans can tell."""
        if not self._is_certain:
            return None
        versions = np.empty(num_tokens, np.int32)
        for version, start in self._starts:
            versions[start:] = version
        return versions

    def agrees_with(self, spans: Int32) -> bool:
        """True if vLLM's versions, int32 [num_tokens], tell of the same changes in the same order, none too early.

        Late ones are no contradiction, nor are changes so close together that it never named the one between.
        """
        changes = iter(self._starts)
        begins = [0, *(np.flatnonzero(spans[1:] != spans[:-1]) + 1).tolist()] if len(spans) else []
        return all(any(version == spans[begin] and start <= begin for version, start in changes) for begin in begins)


def versions_of_spans(spans: Sequence[Span], num_tokens: int) -> Int32:
    """Version of every token as vLLM reports it, int32 [num_tokens].  Raises ValueError if the spans leave a gap."""
    versions = np.empty(num_tokens, np.int32)
    covered = 0
    for span in spans:
        if span.start != covered:
            raise ValueError(f"weight spans leave a gap at token {covered}")
        versions[span.start : span.end] = int(span.version)
        covered = span.end
    if covered != num_tokens:
        raise ValueError(f"weight spans cover {covered} of {num_tokens} tokens")
    return versions


# ------------------------------------------------------------------------------------------------------------ in flight
#
# The engine's record of a request that is running in vLLM.
#
# Input: the request, its outcome, and the number of tokens it had when weights changed.  Output: the version of every
# token.


def by_either_name(counts: dict[str, int] | None) -> dict[str, int] | None:
    """Numbers of tokens by what vLLM calls a request, and by what we do: vLLM may add a hyphen and a suffix."""
    if counts is None:
        return None
    return {key: num_tokens for name, num_tokens in counts.items() for key in (name, name.rpartition("-")[0])}


class Beginning(Enum):
    """Which weights the keys and values of a prompt are of, as far as it is known after an update."""

    KNOWN = "those of the version that is recorded"
    DOUBTED = "nobody knows whether it had begun when weights changed"
    ANEW = "it had not: it is aborted by us, to be submitted again"


@dataclass(slots=True)
class InFlight:
    """A request that vLLM has, or is about to be given."""

    request: RolloutRequest
    record: VersionRecord
    is_submitted: bool = False
    has_output: bool = False
    is_aborted: bool = False  # by who asked for it
    beginning: Beginning = Beginning.KNOWN
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    came_back: asyncio.Event = field(default_factory=asyncio.Event)  # from vLLM, of one that begins anew
    aborting: asyncio.Future[None] | None = None  # of one that begins anew: until it has come back
    search: StopSearch | None = None  # for stop strings, where it is made here, and not by the engine's thread
    num_before: int = 0  # tokens of the prefix that it has read
    _versions: tuple[int, int] = (0, 0)  # the one it was submitted under, the one that came then

    @property
    def num_searched(self) -> int:
        """Tokens after the prefix that may be shown: none of them is behind a stop string."""
        return self.search.num_tokens - self.num_before if self.search is not None else sys.maxsize

    def stopped_at(self, token_ids: Sequence[int]) -> int | None:
        """Search the tokens after the prefix that were not read yet; return how many are up to a stop string."""
        if self.search is None or self.search.read(token_ids[self.num_searched :]) is None:
            return None
        return self.num_searched

    def submit(self, policy_version: int, search: StopSearch | None = None) -> None:
        """It is given to vLLM now, while this version is live.  search: has read the prefix."""
        self.search, self.num_before = search, search.num_tokens if search is not None else 0
        self.record, self.is_submitted = VersionRecord(policy_version), True
        self._versions = policy_version, policy_version

    def end(self) -> None:
        """Nothing more happens to it."""
        self.ended.set()
        self.came_back.set()

    def weights_changed(self, policy_version: int, has_begun: bool | None) -> None:
        """Begin anew without a token: keys and values of its prompt would be of older weights than its tokens."""
        if has_begun:
            return
        self.beginning = Beginning.DOUBTED if has_begun is None else Beginning.ANEW
        self._versions = self._versions[0], policy_version
        self.came_back.clear()

    def may_keep(self, spans: Any, num_tokens: int) -> bool:
        """Whether this output counts; asked once per output.  spans: see `versions`.

        It does not if its first token is newer than the version it was submitted under, whose name its prompt has in
        vLLM's cache: vLLM had not added the request yet when weights changed, and heard of no abort.
        """
        beginning, self.beginning = self.beginning, Beginning.KNOWN
        is_doubted = beginning is Beginning.DOUBTED
        self.came_back.set()
        if beginning is Beginning.KNOWN or (is_doubted and spans is None):
            return True
        before, after = self._versions
        found = [int(span.version) for span in spans or ()] if num_tokens else []
        # One that had no token when weights were counted may get some before vLLM hears of the new version's name.
        is_older = before != after and set(found[:1] if is_doubted else found) == {before}
        self.is_submitted = is_older
        return is_older

    def versions_so_far(self, num_tokens: int, spans: Callable[[], Any]) -> Int32 | None:
        """Version of every token, int32 [num_tokens], by our count, else by vLLM's record; None if neither tells."""
        versions = self.record.versions(num_tokens)
        if versions is None and (known := spans()) is not None:
            with contextlib.suppress(ValueError):  # it says so again when the request ends, and then it matters
                versions = versions_of_spans(known, num_tokens)
        return versions

    def versions(self, spans: Any, num_tokens: int) -> Int32:
        """Version of every token, int32 [num_tokens].  spans: vLLM's own record; None: it keeps none.

        Raises ValueError if the two records contradict each other.
        """
        own = self.record.versions(num_tokens)
        if own is not None and spans is None:
            return own
        theirs = versions_of_spans(spans, num_tokens) if spans is not None else None
        if theirs is None or (own is not None and not self.record.agrees_with(theirs)):
            raise ValueError(f"{self.request.request_id}: versions by our count {own} contradict vLLM's {theirs}")
        return theirs if own is None else own


# --------------------------------------------------------------------------------------------------------- vllm request


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
    # vLLM is imported after its environment is set (vllm_start.py).
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
    if (own := getattr(llm, "num_tokens", None)) is not None:  # of vllm_core.py, which stands for vLLM's front end
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
