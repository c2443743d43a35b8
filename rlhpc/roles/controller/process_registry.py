"""Registry of the run's processes, as the controller last heard of them.

Input: Hello and Heartbeat.  Output: which processes are registered, and which have gone silent.  Time is passed in.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rlhpc.contracts import Clock
from rlhpc.messages import Heartbeat, Hello
from rlhpc.transport.incarnation import is_earlier

log = logging.getLogger("rlhpc.process_registry")


@dataclass(slots=True)
class RoleProcess:
    """One process, as last heard of."""

    hello: Hello
    beat: Heartbeat
    heard_at: float


class ProcessRegistry:
    """Members by name; a newer incarnation of a name replaces the older one, never one of a later start."""

    def __init__(self, config_hash: str, dead_after_s: float, clock: Clock, code: str = "") -> None:
        """code: digest of the controller's own; "": not known."""
        self._config_hash, self._dead_after_s, self._clock, self._code = config_hash, dead_after_s, clock, code
        self._members: dict[str, RoleProcess] = {}
        self._latest: dict[str, str] = {}  # name → incarnation, including processes that are gone

    def is_superseded(self, name: str, hello: Hello) -> bool:
        """True for an incarnation that is older than one registered under this name."""
        return is_earlier(hello.incarnation, self._latest.get(name, ""))

    def is_of_other_code(self, hello: Hello) -> bool:
        """Whether this process was started from another version of rlhpc than the controller."""
        return bool(self._code) and hello.code != self._code

    def register(self, name: str, hello: Hello) -> bool:
        """Register a process.  False, without effect, if its settings differ or a later incarnation is registered."""
        if hello.config_hash != self._config_hash:
            log.error("%s has settings %s, the run has %s: not admitted", name, hello.config_hash, self._config_hash)
            return False
        if self.is_superseded(name, hello):
            log.error("%s, pid %d on %s: refused, a later incarnation is registered", name, hello.pid, hello.host)
            return False
        self._latest[name] = hello.incarnation
        known = self._members.get(name)
        if known is not None and known.hello.incarnation == hello.incarnation:  # it answers Reregister
            known.heard_at = self._clock()
            return True
        self._members[name] = RoleProcess(hello, Heartbeat("starting", "", -1), self._clock())
        log.info("%s registered: pid %d on %s", name, hello.pid, hello.host)
        if self.is_of_other_code(hello):
            log.warning(
                "%s, pid %d on %s, runs another version of rlhpc than the controller (code %s and %s): stop the run, "
                "and resume it when all nodes have the same",
                *(name, hello.pid, hello.host, hello.code or "without a digest", self._code),
            )
        return True

    def record(self, name: str, beat: Heartbeat) -> bool:
        """Record a heartbeat.  False, without effect, if the sender is not registered with this controller.

        So is one under whose name its predecessor is: its Hello was lost.
        """
        member = self._members.get(name)
        if member is None or beat.incarnation not in ("", member.hello.incarnation):
            return False
        member.beat, member.heard_at = beat, self._clock()
        return True

    def silent(self) -> list[str]:
        """Names that have been silent for dead_after_s."""
        oldest = self._clock() - self._dead_after_s
        return [name for name, member in self._members.items() if member.heard_at < oldest]

    def forget(self, name: str) -> None:
        """Remove a name.  Idempotent."""
        self._members.pop(name, None)

    def names(self, role: str | None = None) -> list[str]:
        """Names of all processes, or of those of one role."""
        return [name for name, member in self._members.items() if role in (None, member.hello.role)]

    def member(self, name: str) -> RoleProcess | None:
        """One process, if it is registered."""
        return self._members.get(name)

    def capacity(self, name: str) -> int:
        """Samples this generator is willing to hold."""
        member = self._members.get(name)
        return member.beat.capacity_samples if member is not None else 0

    def total(self, metric: str, role: str) -> float:
        """Sum of one heartbeat metric over all members of a role."""
        return sum(self._members[name].beat.metrics.get(metric, 0.0) for name in self.names(role))

    def totals(self, prefix: str, *roles: str) -> dict[str, float]:
        """Sums of all heartbeat metrics that begin so, over all members of these roles."""
        found: dict[str, float] = {}
        for name in (name for role in roles for name in self.names(role)):
            for metric, value in self._members[name].beat.metrics.items():
                if metric.startswith(prefix):
                    found[metric] = found.get(metric, 0.0) + value
        return found

    def report(self) -> list[dict[str, Any]]:
        """One row per process, for status.json."""
        now = self._clock()
        return [
            {
                "name": name,
                "state": member.beat.state,
                "waits_for": member.beat.waits_for,
                "version": member.beat.policy_version,
                "silent_s": round(now - member.heard_at, 1),
                "pid": member.hello.pid,
                "host": member.hello.host,
                "metrics": dict(member.beat.metrics),
            }
            for name, member in sorted(self._members.items())
        ]
