"""When the successor of a job may start.  Pure."""

from __future__ import annotations

import math

LARGEST_SHARE = 0.5  # of a job's life that its successor may run beside it
MINUTE_S = 60


def successor_after_min(life_s: float, overlap_s: float) -> int | None:
    """Whole minutes from the start of a job of this length until its successor may start; None: at its end.

    Slurm counts whole minutes (--dependency=after:JOB+MINUTES), so that the overlap may be up to a minute longer than
    requested.  life_s: seconds, infinite without a time limit; a little less than the limit where a supervisor has
    measured it.
    """
    if not overlap_s or not math.isfinite(life_s):
        return None
    limit_s = MINUTE_S * math.ceil(life_s / MINUTE_S)
    return int((limit_s - min(overlap_s, LARGEST_SHARE * limit_s)) // MINUTE_S) or None
