"""Stop a run whose verifiers fail too often; otherwise a broken one looks like a policy that got worse.

Input: verdicts, and groups that are refused because their prompt is quarantined.  Raises RoleFailed, or StarvedError
where another attempt would refuse the same prompts again.  Looks at the last `window` of these; the limit is a share of
the whole window, so that one early error does not stop a run, while a verifier that always fails is found after
max_share · window.  Errors are counted by cause: the kind of failure (failures.py), QUARANTINED, LEASES_LOST.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from rlhpc.errors import RoleFailed, StarvedError
from rlhpc.types import Verdict

QUARANTINED = "quarantined"  # cause: nothing was sampled, because of what happened before
LEASES_LOST = "leases_lost"  # cause: a sample was leased so often in vain
_UNNAMED = "verifier_error"
_SHOWN_DETAILS = 3


class ErrorGate:
    """Counts errors among the last verdicts."""

    def __init__(self, max_share: float, window: int = 200) -> None:
        """max_share: highest share of errors that is tolerated, 0–1 (rewards.max_error_share)."""
        self._max_share, self._window = max_share, window
        self._last: deque[str] = deque(maxlen=window)  # causes; "": a verdict
        self._details: deque[str] = deque(maxlen=_SHOWN_DETAILS)
        self._num_since_verdict = 0  # errors
        self.causes: Counter[str] = Counter()  # errors since the start of the attempt
        self.latest = ""  # the last error, in words

    def count(self, verdict: Verdict, detail: str = "", failure: str = "") -> None:
        """Record one verdict; `detail` is shown if the gate closes, failure is its kind."""
        is_error = verdict is Verdict.VERIFIER_ERROR
        self._count((failure or _UNNAMED) if is_error else "", detail)

    def count_refused(self, cause: str, why: str) -> None:
        """Record a group that was dropped without a verdict; cause: QUARANTINED or LEASES_LOST."""
        self._count(cause, why)

    def _count(self, cause: str, detail: str) -> None:
        self._last.append(cause)
        if not cause:
            self._num_since_verdict = 0
            return
        self._num_since_verdict += 1
        self.causes[cause] += 1
        self._details.append(detail)
        self.latest = detail

    @property
    def error_share(self) -> float:
        """Share of errors among the verdicts in the window; 0 before the first."""
        return self._num_errors / len(self._last) if self._last else 0.0

    @property
    def _num_errors(self) -> int:
        return len(self._last) - self._last.count("")

    def document(self) -> dict[str, Any]:
        """For status.json: errors of the attempt by cause, and the last one."""
        return {"causes": dict(self.causes), "latest": self.latest}

    def check(self, most_in_a_row: int = 0) -> None:
        """Raise RoleFailed if more than max_share · window of the last verdicts are errors.

        most_in_a_row: errors without a verdict between them that end a run whatever max_share is; 0: any number.
        Raises StarvedError for that, or if most of the errors are refusals.
        """
        if self._num_errors > self._max_share * self._window:
            is_starved = self._last.count(QUARANTINED) * 2 > self._num_errors
            raise (StarvedError if is_starved else RoleFailed)(
                f"rewards.max_error_share={self._max_share:g}: {self._num_errors} of the last {len(self._last)} "
                f"verdicts are verifier errors (window {self._window}; {_counted(Counter(self._last))}), so rewards "
                f"say nothing about the policy; {self._latest()}"
            )
        if most_in_a_row and self._num_since_verdict >= most_in_a_row:
            raise StarvedError(
                f"{self._num_since_verdict} errors in a row and no verdict between them (of the attempt: "
                f"{_counted(self.causes)}): no batch can be filled; {self._latest()}"
            )

    def _latest(self) -> str:
        remedy = ""
        if QUARANTINED in self._last:
            remedy = "; quarantined prompts are listed by `rlhpc status`, and sampled again after a resume with "
            remedy += "--lift-quarantine"
        return f"the latest: {'; '.join(dict.fromkeys(self._details))}{remedy}"


def _counted(causes: Counter[str]) -> str:
    return ", ".join(f"{cause.replace('_', ' ')} {number}" for cause, number in causes.most_common() if cause)
