"""Stop a run whose verifier fails too often; otherwise a broken verifier looks like a policy that got worse.

Input: verdicts.  Raises RoleFailed.  Looks at the last `window` verdicts; the limit is a share of the whole window, so
that one early error does not stop a run, while a verifier that always fails is found after max_share · window.
"""

from __future__ import annotations

from collections import deque

from rlhpc.errors import RoleFailed
from rlhpc.types import Verdict

_SHOWN_DETAILS = 3


class ErrorGate:
    """Counts verifier errors among the last verdicts."""

    def __init__(self, max_share: float, window: int = 200) -> None:
        """max_share: highest share of verifier errors that is tolerated, 0–1 (rewards.max_error_share)."""
        self._max_share, self._window = max_share, window
        self._is_error: deque[bool] = deque(maxlen=window)
        self._num_errors = 0
        self._details: deque[str] = deque(maxlen=_SHOWN_DETAILS)

    def count(self, verdict: Verdict, detail: str = "") -> None:
        """Record one verdict; `detail` is shown if the gate closes."""
        if len(self._is_error) == self._window:
            self._num_errors -= self._is_error[0]
        is_error = verdict is Verdict.VERIFIER_ERROR
        self._is_error.append(is_error)
        self._num_errors += is_error
        if is_error:
            self._details.append(detail)

    @property
    def error_share(self) -> float:
        """Share of verifier errors among the verdicts in the window; 0 before the first."""
        return self._num_errors / len(self._is_error) if self._is_error else 0.0

    def check(self) -> None:
        """Raise RoleFailed if more than max_share · window of the last verdicts are verifier errors."""
        if self._num_errors <= self._max_share * self._window:
            return
        details = "; ".join(dict.fromkeys(self._details))
        raise RoleFailed(
            f"rewards.max_error_share={self._max_share:g}: {self._num_errors} of the last {len(self._is_error)} "
            f"verdicts are verifier errors (window {self._window}), so rewards say nothing about the policy; "
            f"the latest: {details}"
        )
