"""The controller's part of a checkpoint: ledger, prompt cursor, counters, and what a resume undoes.

What was in flight is granted again after a resume, under the same group ids; what was finished and not used is in the
checkpoint; segments sealed later are set aside, since their steps are repeated.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.buffer.segment_files import set_aside_lost_segments
from rlhpc.errors import CheckpointError
from rlhpc.files import write_atomically
from rlhpc.run_layout import RunLayout

log = logging.getLogger("rlhpc.checkpoint")
STATE_FILE = "controller.json"


@dataclass(frozen=True, slots=True)
class RunState:
    """The controller's part of a checkpoint."""

    step: int  # the step a resume begins with
    policy_version: int
    buffer: dict[str, Any]
    prompts: dict[str, Any]
    membership: dict[str, Any]
    totals: dict[str, Any]


def read_run_state(layout: RunLayout, step: int) -> RunState:
    """Read the controller's part.  Raises CheckpointError."""
    path = layout.checkpoint(step) / STATE_FILE
    try:
        return RunState(**json.loads(path.read_bytes()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def set_aside_later_segments(layout: RunLayout, state: RunState | None, attempt: int) -> int:
    """Set aside what a resume undoes and return the number of the first segment to write."""
    first = int(state.buffer["next_segment_index"]) if state is not None else 0
    lost = set_aside_lost_segments(layout.rollouts, first, attempt)
    if lost:
        log.warning("%d segments of undone steps are set aside in %s", len(lost), lost[0].parent)
    return first


def write_run_state(directory: Path, state: RunState) -> None:
    """Write the controller's part.  Raises OSError."""
    document = {name: getattr(state, name) for name in RunState.__slots__}
    write_atomically(directory / STATE_FILE, json.dumps(document).encode())
