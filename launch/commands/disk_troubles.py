"""Why a run cannot write: what it says itself, or what a look at its disk says.

A full disk refuses status.json too, so that the run can tell nobody: a status that is old may mean that.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlhpc.files import write_synced
from rlhpc.run_layout import RunLayout

OLD_S = 10.0  # age of a status that its controller cannot be writing any more
_PROBE_BYTES = 16 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_troubles(layout: RunLayout, status: Mapping[str, Any]) -> Sequence[str]:
    """In words, each; none: nothing is known to be wrong.  Writes a file for a moment if the status is old."""
    said: Sequence[str] = status.get("disk_troubles", ())
    is_over = status.get("phase") == "stopped" or layout.summary.exists()
    if said or is_over or not time.time() - status.get("unix_time_s", time.time()) > OLD_S:
        return said
    full = _is_full(layout)
    return [f"{full} in {layout.root}, where the run can write nothing any more, its status neither"] if full else ()


def _is_full(layout: RunLayout) -> str:
    """What the system says, "" if there is room.  Not asked of statvfs, which knows of no quota."""
    probe = layout.root / f".probe.{uuid.uuid4().hex[:12]}.tmp"
    try:
        write_synced(probe, bytes(_PROBE_BYTES))
    except OSError as error:  # another user's directory says nothing
        return os.strerror(error.errno) if error.errno in _FULL else ""
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return ""
