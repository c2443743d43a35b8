"""Remember which policy version sampled which tokens of a request.

Input: the number of tokens a request had when weights changed.  Output: one version per token.  Pure.
Where vLLM keeps spans of its own the two must agree, except for a delay: new weights and their name reach the engine in
two messages, and on a busy machine it decodes some tokens between them.  Ours is counted while the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rlhpc.types import Int32


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
