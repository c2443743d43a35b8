"""Order the starts of a process: which of two is the later one.

Input: incarnation texts: "JOB.RESTART.START-UUID", as a supervisor counts starts (a local run: "0.ATTEMPT.0-UUID").
Any other text has no order.  Does not rely on clocks: nodes of a cluster disagree on the time, not on counts.
"""

from __future__ import annotations

import re
import uuid

_ORDERED = re.compile(r"([0-9]{1,18})\.([0-9]{1,9})\.([0-9]{1,9})-.+")

Order = tuple[int, int, int]  # job, its restart, start within it


def order_of(incarnation: str) -> Order | None:
    """Return the sort key of a start, or None for a text without order."""
    parts = _ORDERED.fullmatch(incarnation)
    if parts is None:
        return None
    job, restart, start = map(int, parts.groups())
    return job, restart, start


def is_earlier(incarnation: str, other: str) -> bool:
    """True if it was started before the other.  False if one of them has no order, or both have the same."""
    order, other_order = order_of(incarnation), order_of(other)
    return order is not None and other_order is not None and order < other_order


def is_same_start(incarnation: str, other: str) -> bool:
    """True if both belong to one process, which started over without being restarted (another_of)."""
    return order_of(incarnation) is not None and order_of(incarnation) == order_of(other)


def another_of(incarnation: str) -> str:
    """Return a new incarnation of the same order, for a process that starts over without being restarted."""
    return f"{incarnation.split('-', 1)[0]}-{uuid.uuid4().hex[:12]}"
