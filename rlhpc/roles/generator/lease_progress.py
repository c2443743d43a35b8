"""Report what is sampled of running rollouts, so that neither a deadline nor a death restarts them from the beginning.

Input: an engine, and the requests in flight.  Output: LeaseProgress, one for all rollouts that have news, whose leases
it renews.
Guarantee: a rollout is reported before it has grown by more than partial_interval_tokens, or for longer than
partial_interval_s, since its last report; only new tokens are sent.  A controller that lacks the beginning asks for it
(`show_whole`).

A rollout that is started again is likely to be shorter than the one that was lost, since long rollouts are lost more
often: the policy would learn from rollouts that are shorter than its own (docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rlhpc.buffer.partial_codec import PartialRollout, encode_partials, id_checksum
from rlhpc.config_sections import AdmissionConfig, BufferConfig
from rlhpc.contracts import Clock, GenerationEngine
from rlhpc.messages import LeaseProgress
from rlhpc.types import Prefix, RolloutRequest

LOOKS_PER_INTERVAL = 8
LONGEST_LOOK_S = 0.25
MOST_TOKENS = 1 << 20  # of one report
AT_ONCE = float("-inf")  # when a rollout was reported that has to be reported now
_NO_TOKENS = Prefix(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(slots=True)
class _Reported:
    """How far a rollout was reported."""

    request: RolloutRequest
    num_shown: int  # tokens that the controller has
    checksum: int  # of their ids
    num_counted: int  # tokens at the last report, shown or not
    at_s: float  # when that was
    num_seen: int  # tokens at the last look


class ProgressReporter:
    """Compares rollouts in flight with what was last reported of them."""

    def __init__(
        self, engine: GenerationEngine, admission: AdmissionConfig, buffer: BufferConfig, clock: Clock
    ) -> None:
        self._engine, self._clock = engine, clock
        self._interval_s = min(buffer.partial_interval_s, admission.longest_report_interval_s)
        self._interval_tokens = buffer.partial_interval_tokens
        self._reported: dict[str, _Reported] = {}
        self.look_s = min(LONGEST_LOOK_S, self._interval_s / LOOKS_PER_INTERVAL)  # seconds between calls of report()

    @property
    def num_unreported(self) -> int:
        """Tokens that the death of this process would lose."""
        return sum(
            max(each.num_seen, self._engine.num_sampled(request_id)) - each.num_shown
            for request_id, each in self._reported.items()
        )

    def show_whole(self, members: Iterable[tuple[int, int]]) -> None:
        """Report these, (group, sample), from their first token on the next time."""
        for group_id, sample_index in members:
            reported = self._reported.get(f"{group_id}:{sample_index}")
            if reported is not None:
                reported.num_shown, reported.checksum, reported.at_s = 0, 0, AT_ONCE

    def begin_anew(self) -> None:
        """Report every rollout the next time: a controller comes that does not know who is sampling it."""
        for reported in self._reported.values():
            reported.at_s = AT_ONCE

    def report(self, in_flight: Iterable[RolloutRequest], timeline: int) -> LeaseProgress | None:
        """The news of all rollouts, if one of them has to be reported now.  timeline: of the weights they are of."""
        grown = self._look({request.request_id: request for request in in_flight})
        now = self._clock()
        if not any(self._urgency(reported, growth, now) >= 1.0 for _, reported, growth in grown):
            return None
        pieces, room = list[PartialRollout](), MOST_TOKENS
        for request, reported, growth in grown:
            # Those that are half due go with the others: so reports are few, and rollouts fall into step.
            if room > 0 and self._urgency(reported, growth, now) >= 0.5:
                piece = self._piece(request, reported, now)
                pieces += [piece] if piece is not None else []
                room -= len(piece.tokens.token_ids) if piece is not None else 0
        if not pieces:
            return None
        data, num_bytes = encode_partials(pieces)
        return LeaseProgress(np.frombuffer(data, np.uint8), num_bytes, timeline)

    def _look(self, requests: dict[str, RolloutRequest]) -> list[tuple[RolloutRequest, _Reported, int]]:
        """Rollouts that have tokens to report, with their growth since the last look."""
        for request_id in self._reported.keys() - requests.keys():
            del self._reported[request_id]
        grown = []
        for request_id, request in requests.items():
            reported = self._reported.get(request_id)
            if reported is None or reported.request is not request:
                done = request.num_done
                checksum = id_checksum(request.prefix.token_ids) if request.prefix is not None else 0
                reported = self._reported[request_id] = _Reported(request, done, checksum, done, self._clock(), done)
            num_tokens = self._engine.num_sampled(request_id)
            growth = max(0, num_tokens - reported.num_seen)
            reported.num_seen = max(num_tokens, reported.num_seen)
            if num_tokens > reported.num_counted or reported.at_s == AT_ONCE:
                grown.append((request, reported, growth))
        return grown

    def _urgency(self, reported: _Reported, growth: int, now: float) -> float:
        """1.0: by the next look it may have grown by more than an interval, or for longer."""
        tokens = (reported.num_seen - reported.num_shown + growth) / self._interval_tokens
        return max(tokens, self._lateness(reported, now))

    def _lateness(self, reported: _Reported, now: float) -> float:
        return (now - reported.at_s + self.look_s) / self._interval_s

    def _piece(self, request: RolloutRequest, reported: _Reported, now: float) -> PartialRollout | None:
        """None: the engine cannot tell the tokens now, as while weights change, and the lease need not be renewed."""
        start, before = reported.num_shown, reported.checksum
        tokens = self._engine.progress(request.request_id, start)
        if tokens is None and self._lateness(reported, now) < 1.0:
            return None
        tokens = tokens or _NO_TOKENS
        reported.num_shown += len(tokens.token_ids)
        reported.checksum = id_checksum(tokens.token_ids, before)
        reported.num_counted, reported.at_s = reported.num_seen, now
        return PartialRollout(request.group_id, request.sample_index, request.prompt.prompt_id, start, before, tokens)
