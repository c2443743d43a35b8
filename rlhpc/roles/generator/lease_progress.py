"""Report the progress of long rollouts to the controller, so that neither a deadline nor a death restarts them from the
beginning.

A rollout that is started again is likely to be shorter than the one that was lost, since long rollouts are lost more
often: the policy would learn from rollouts that are shorter than its own (docs/algorithms.md).
Every interval a few bytes per rollout renew its lease.  Its tokens are sent each time they have grown by half, so that
in total at most three times the tokens of a rollout are sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rlhpc.contracts import GenerationEngine
from rlhpc.messages import LeaseProgress
from rlhpc.types import Prefix, RolloutRequest

REPORTS_PER_DEADLINE = 4  # two reports may be lost
LONGEST_INTERVAL_S = 30.0
FIRST_TOKENS = 64  # shorter rollouts are quickly sampled again
GROWTH = 1.5
MOST_TOKENS = 1 << 20  # of one round of reports


def report_interval_s(lease_deadline_s: float) -> float:
    """Seconds between two rounds of reports."""
    return min(LONGEST_INTERVAL_S, lease_deadline_s / REPORTS_PER_DEADLINE)


class ProgressReporter:
    """Compares rollouts in flight with what was last reported of them."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._num_seen: dict[str, int] = {}  # request id → tokens at the last look
        self._num_sent: dict[str, int] = {}  # request id → tokens that the controller has

    def reports(self, in_flight: Iterable[RolloutRequest]) -> list[LeaseProgress]:
        """One message for each group of which some rollout has grown since the last call."""
        requests = {request.request_id: request for request in in_flight}
        for known in (self._num_seen, self._num_sent):
            for request_id in known.keys() - requests.keys():
                del known[request_id]
        room = MOST_TOKENS
        grown: dict[int, list[tuple[int, Prefix | None]]] = defaultdict(list)
        for request_id, request in requests.items():
            num_tokens = self._engine.num_sampled(request_id)
            if num_tokens <= self._num_seen.get(request_id, request.num_done):
                continue
            self._num_seen[request_id] = num_tokens
            sent = self._num_sent.get(request_id, request.num_done)
            is_news = max(FIRST_TOKENS, GROWTH * sent) <= num_tokens <= room
            prefix = self._engine.progress(request_id) if is_news else None
            if prefix is not None:
                self._num_sent[request_id] = num_tokens
                room -= num_tokens
            grown[request.group_id].append((request.sample_index, prefix))
        return [
            LeaseProgress(group_id, tuple(index for index, _ in members), tuple(prefix for _, prefix in members))
            for group_id, members in grown.items()
        ]
