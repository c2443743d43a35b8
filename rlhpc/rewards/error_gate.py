"""Wait while verifiers fail too often, and stop a run if they go on; else a broken one looks like a worse policy.

Input: verdicts, and groups that are refused because their prompt is quarantined.  Output: whether leases may be
granted; StarvedError or RoleFailed.  Looks at the last `window` verdicts; the limit is a share of the whole window, so
that one early error does not stop a run, while a verifier that always fails is found after max_share · window.  Errors
are counted by cause: the kind of failure (failures.py), QUARANTINED, LEASES_LOST.

    open ── too many errors ──▶ waiting: a lease now and then ── a verdict, or patience_s are over ──▶ trying
     ▲                             ▲                                                                     │
     │                             └── too many errors, patience_s since the first are not over ─────────┤
     └── few errors for half of patience_s, or a whole window without too many ──────────────────────────┴─▶ raises

A generator on which all agents fail while others have verdicts (its node lacks what they need) fails fast, and would be
given most leases: after errors in a row it is given none for a while, longer each time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from rlhpc.contracts import Clock
from rlhpc.errors import RoleFailed, StarvedError
from rlhpc.rewards.failures import INVALID
from rlhpc.types import Verdict

log = logging.getLogger("rlhpc.rewards")

QUARANTINED = "quarantined"  # cause: nothing was sampled, because of what happened before
LEASES_LOST = "leases_lost"  # cause: a sample was leased so often in vain
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # between two leases while it waits
MOST_IN_A_ROW = 8  # errors of one generator, in as many verdicts of others
LONGEST_BRAKE_S = 60.0  # for a generator
_UNNAMED = "verifier_error"
_SHOWN_DETAILS = 3


@dataclass(slots=True)
class _Row:
    """Errors of one generator since its last verdict."""

    num_verdicts_before: int  # of all, when it began
    num_errors: int = 0
    pause_s: float = 0.0
    free_at_s: float = -math.inf  # it is given no lease before


class ErrorGate:
    """Counts errors among the last verdicts."""

    def __init__(
        self, max_share: float, window: int = 200, *, patience_s: float = 0.0, clock: Clock = time.monotonic
    ) -> None:
        """max_share: highest share of errors that is tolerated, 0–1 (rewards.max_error_share).

        patience_s: for which it waits from the first time on that there are more (rewards.error_patience_s).
        """
        self._max_share, self._window = max_share, window
        self._patience_s, self._clock = patience_s, clock
        self._last: deque[str] = deque(maxlen=window)  # causes since it has last waited; "": a verdict
        self._recent: deque[bool] = deque(maxlen=window)  # the same without a break, for people: whether it is an error
        self._details: dict[str, None] = {}  # errors that differ, since it has last waited; the last one last
        self._num_since_verdict = 0  # errors
        self._began_s: float | None = None  # when there were first too many
        self._ended_s = 0.0  # when it has last ceased to wait
        self._waits = False  # for the first verdict
        self._pause_s = self._next_lease_s = 0.0
        self._rows: dict[str, _Row] = {}  # by generator
        self._num_verdicts = 0
        self.causes: Counter[str] = Counter()  # errors since the start of the attempt
        self.latest = ""  # the last error, in words

    def count(self, verdict: Verdict, detail: str = "", failure: str = "", holder: str = "") -> None:
        """Record one verdict; `detail` is shown if the gate closes, failure is its kind; holder: who has sampled it."""
        is_error = verdict is Verdict.VERIFIER_ERROR
        if is_error:
            self._brake(holder, detail)
        else:
            self._num_verdicts += 1
            self._rows.pop(holder, None)
        self._count((failure or _UNNAMED) if is_error else "", detail)

    def _brake(self, holder: str, detail: str) -> None:
        """Count an error of a generator; of many while others have verdicts, have it pause."""
        row, now_s = self._rows.setdefault(holder, _Row(self._num_verdicts)), self._clock()
        row.num_errors += 1
        is_alone = self._num_verdicts - row.num_verdicts_before >= MOST_IN_A_ROW
        if is_alone and row.num_errors >= MOST_IN_A_ROW and now_s >= row.free_at_s:
            row.pause_s = min(LONGEST_BRAKE_S, 2 * row.pause_s or FIRST_PAUSE_S)
            row.free_at_s = now_s + row.pause_s
            said = holder, row.num_errors, row.pause_s, detail
            log.warning("%s: %d errors in a row while others have verdicts: no lease for %.0f s; the latest: %s", *said)

    def count_refused(self, cause: str, why: str) -> None:
        """Record a group that was dropped without a verdict; cause: QUARANTINED or LEASES_LOST."""
        self._count(cause, why)

    def _count(self, cause: str, detail: str) -> None:
        self._recent.append(bool(cause))
        if cause:
            self.causes[cause] += 1
            self._details.pop(detail, None)
            self._details[detail] = None
            if len(self._details) > _SHOWN_DETAILS:
                del self._details[next(iter(self._details))]
            self.latest = detail
        if cause and self.is_waiting:
            return  # one of those that were sampled meanwhile, or tried
        if self._waits and not cause:
            self._waits, self._ended_s = False, self._clock()
            log.warning("there are verdicts again, after %.0f s", self._waited_s)
        self._last.append(cause)
        self._num_since_verdict = self._num_since_verdict + 1 if cause else 0

    @property
    def error_share(self) -> float:
        """Share of errors among the verdicts in the window; 0 before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for what fails."""
        return self._waits and self._waited_s < self._patience_s

    def may_lease(self, holder: str) -> bool:
        """Whether a generator may be granted a lease now: while the gate waits, one of all is from time to time."""
        if self.is_waiting:
            return self._clock() >= self._next_lease_s
        row = self._rows.get(holder)
        return row is None or self._clock() >= row.free_at_s

    def lease_granted(self) -> None:
        """A lease was granted: while it waits, the next one follows after a longer pause."""
        if self.is_waiting:
            self._next_lease_s = self._clock() + self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def document(self) -> dict[str, Any]:
        """For status.json: errors of the attempt by cause, the last one; how long it has waited, and who pauses."""
        more: dict[str, Any] = {}
        if self.is_waiting:
            more |= {"waited_s": round(self._waited_s), "patience_s": self._patience_s}
        if paused := sorted(name for name, row in self._rows.items() if row.pause_s):
            more["paused"] = paused
        return {"causes": dict(self.causes), "latest": self.latest, **more}

    def check(self, most_in_a_row: int = 0) -> None:
        """Wait if more than max_share · window of the last verdicts are errors; raise if that has lasted too long.

        most_in_a_row: errors without a verdict between them that are too many whatever max_share is; 0: any number.
        Raises RoleFailed; StarvedError where another attempt would not help: most of the errors are refusals, none is a
        verdict, or it has waited already.  Where all are invalid, it does not wait either: a function that returns
        what is no reward does so however long one waits.
        """
        num_errors = len(self._last) - self._last.count("")
        is_closed = num_errors > self._max_share * self._window
        is_starved = 0 < most_in_a_row <= self._num_since_verdict
        if not (is_closed or is_starved):
            if self._is_over(num_errors):
                self._began_s = None
            return
        is_refused = self._last.count(QUARANTINED) * 2 > num_errors
        is_invalid = {*self._last} == {INVALID}
        if not (is_refused or is_invalid) and self._may_wait():
            self._wait(self._too_many(num_errors) if is_closed else self._in_a_row())
            return
        waited = f", {self._waited_s:.0f} s after the first" if self._began_s is not None else ""
        if is_closed:
            kind = StarvedError if is_refused or is_invalid or waited else RoleFailed
            raise kind(f"{self._too_many(num_errors)}{waited}, so rewards say nothing about the policy; {self._said()}")
        raise StarvedError(f"{self._in_a_row()}{waited}: no batch can be filled; {self._said()}")

    def _is_over(self, num_errors: int) -> bool:
        """Whether what has failed works again for so long that it may fail another time."""
        size = len(self._last)
        if num_errors == size or self._waits:
            return False
        is_sound = size >= self._max_share * self._window and 2 * num_errors <= self._max_share * size
        return size == self._window or (is_sound and self._clock() - self._ended_s >= self._patience_s / 2)

    @property
    def _waited_s(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s

    def _may_wait(self) -> bool:
        if self._began_s is None and self._patience_s > 0:
            self._began_s = self._clock()
        return self._waited_s < self._patience_s

    def _wait(self, why: str) -> None:
        left_s = self._patience_s - self._waited_s
        log.warning("%s: waiting for up to %.0f s (rewards.error_patience_s); %s", why, left_s, self._said())
        self._last.clear()
        self._details.clear()
        self._num_since_verdict, self._waits = 0, True
        self._pause_s, self._next_lease_s = 2 * FIRST_PAUSE_S, self._clock() + FIRST_PAUSE_S

    def _too_many(self, num_errors: int) -> str:
        return (
            f"rewards.max_error_share={self._max_share:g}: {num_errors} of the last {len(self._last)} verdicts are "
            f"verifier errors (window {self._window}; {_counted(Counter(self._last))})"
        )

    def _in_a_row(self) -> str:
        return (
            f"{self._num_since_verdict} errors in a row and no verdict between them (of the attempt: "
            f"{_counted(self.causes)})"
        )

    def _said(self) -> str:
        remedy = ""  # first: details may be long, and whoever shows a last line may cut it
        if QUARANTINED in self._last:
            remedy = "quarantined prompts are listed by `rlhpc status`, and sampled again after a resume with "
            remedy += "--lift-quarantine; "
        return f"{remedy}the latest: {'; '.join(self._details)}"


def _counted(causes: Counter[str]) -> str:
    return ", ".join(f"{cause.replace('_', ' ')} {number}" for cause, number in causes.most_common() if cause)
