"""How busy the generators were between two readings of the counters in their heartbeats.

Counters start at 0 with every incarnation; the first reading of an incarnation counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.roles.controller.process_registry import ProcessRegistry


@dataclass(frozen=True, slots=True)
class Activity:
    """The work of all generators between two readings."""

    seconds: float = 0.0  # summed over generators
    idle_s: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class _Reading:
    incarnation: str
    heard_at: float
    busy_s: float
    tokens: float


class GeneratorMeter:
    """Compares heartbeats with those of the previous reading."""

    def __init__(self, registry: ProcessRegistry) -> None:
        self._registry = registry
        self._last: dict[str, _Reading] = {}

    def look(self) -> Activity:
        """Return the work since the previous reading."""
        seconds = idle_s = tokens = 0.0
        for name in self._registry.names("generator"):
            member = self._registry.member(name)
            if member is None:
                continue
            metrics = member.beat.metrics
            now = _Reading(
                member.hello.incarnation, member.heard_at, metrics.get("busy_s", 0.0), metrics.get("tokens", 0.0)
            )
            before = self._last.get(name)
            self._last[name] = now
            if before is None or before.incarnation != now.incarnation:
                continue
            elapsed = now.heard_at - before.heard_at
            seconds += elapsed
            idle_s += max(0.0, elapsed - (now.busy_s - before.busy_s))
            tokens += now.tokens - before.tokens
        return Activity(seconds, idle_s, tokens)
