"""The number of the next attempt: each writes a log of events of its own, and never into that of another.

Input: attempts.jsonl and the names of files of events.  Changes nothing.
"""

from __future__ import annotations

from rlhpc.buffer.event_log import attempt_of, event_paths
from rlhpc.files import is_absent
from rlhpc.run_layout import RunLayout


def num_attempts(layout: RunLayout) -> int:
    """Number of attempts that have begun: those noted, and those whose events are there though their lines are lost.

    Raises OSError.
    """
    noted = 0 if is_absent(layout.attempts) else len(layout.attempts.read_text().splitlines())
    paths = event_paths(layout.rollouts)
    return max(noted, attempt_of(paths[-1]) + 1 if paths else 0)
