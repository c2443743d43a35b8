"""How many failures a run may have.  Reset by progress, not by time: a run that keeps failing at the same step ends.

Kept in the run directory, so that it survives requeues.
"""

from __future__ import annotations

import json
from contextlib import suppress

from rlhpc.files import write_atomically
from rlhpc.run_layout import RunLayout

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0


class RetryBudget:
    """Counts failures since the last new checkpoint."""

    def __init__(self, layout: RunLayout, max_retries: int) -> None:
        self._path, self._max_retries = layout.failures, max_retries
        try:
            document = json.loads(self._path.read_bytes())
            self.failures, self._step = int(document["failures"]), int(document["saved_step"])
        except (OSError, ValueError, KeyError):
            self.failures, self._step = 0, -1

    def take(self, saved_step: int) -> float | None:
        """Use up one retry.  Returns the seconds to pause before it; None: none is left.

        saved_step: of the newest complete checkpoint.  If the disk is full, the count is kept only in memory.
        """
        if saved_step > self._step:
            self.failures = 0
        self.failures, self._step = self.failures + 1, saved_step
        document = {"failures": self.failures, "saved_step": saved_step}
        with suppress(OSError):
            write_atomically(self._path, json.dumps(document).encode())
        if self.failures > self._max_retries:
            return None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 4.0 ** (self.failures - 1))
