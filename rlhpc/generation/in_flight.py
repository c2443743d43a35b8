"""The engine's record of a request that is running in vLLM.

Input: the request, its outcome, and the number of tokens it had when weights changed.  Output: the version of every
token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from rlhpc.generation.version_record import VersionRecord, versions_of_spans
from rlhpc.types import Int32, RolloutRequest


def by_either_name(counts: dict[str, int] | None) -> dict[str, int] | None:
    """Numbers of tokens by what vLLM calls a request, and by what we do: vLLM may add a hyphen and a suffix."""
    if counts is None:
        return None
    return {key: num_tokens for name, num_tokens in counts.items() for key in (name, name.rpartition("-")[0])}


@dataclass(slots=True)
class InFlight:
    """A request that vLLM has, or is about to be given."""

    request: RolloutRequest
    record: VersionRecord
    is_submitted: bool = False
    has_output: bool = False
    is_aborted: bool = False  # by who asked for it
    begins_anew: bool = False  # aborted by us, to be given to vLLM again
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, policy_version: int) -> None:
        """It is given to vLLM now, while this version is live."""
        self.record, self.is_submitted = VersionRecord(policy_version), True

    def must_run_again(self, finish_reason: str | None) -> bool:
        """True if this is the end of a request that begins anew; asked once.

        One that vLLM has sampled whole before it heard of our abort is as good.
        """
        is_ours = self.begins_anew and not self.is_aborted and finish_reason == "abort"
        self.begins_anew, self.is_submitted = False, self.is_submitted and not is_ours
        return is_ours

    def versions(self, spans: Any, num_tokens: int) -> Int32:
        """Version of every token, int32 [num_tokens].  spans: vLLM's own record; None: it keeps none.

        Raises ValueError if the two records contradict each other.
        """
        own = self.record.versions(num_tokens)
        theirs = versions_of_spans(spans, num_tokens) if spans is not None else own
        if theirs is None or (own is not None and not self.record.agrees_with(theirs)):
            raise ValueError(f"{self.request.request_id}: versions by our count {own} contradict vLLM's {theirs}")
        return theirs if own is None else own
