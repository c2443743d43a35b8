"""The engine's record of a request that is running in vLLM.

Input: the request, its outcome, and the number of tokens it had when weights changed.  Output: the version of every
token.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlhpc.generation.version_record import VersionRecord, versions_of_spans
from rlhpc.stop_strings import StopSearch
from rlhpc.types import Int32, RolloutRequest


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
        """Without a token it begins anew: keys and values of its prompt would be of older weights than its tokens."""
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
