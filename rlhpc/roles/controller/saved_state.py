"""The controller's part of a checkpoint: ledger, prompt cursor, counters of the run; and what a resume undoes.

What was in flight is granted again after a resume, under the same group ids; what was finished and not used is in the
checkpoint; segments sealed later are set aside, since their steps are repeated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.buffer.history import Position, delete_old_journals
from rlhpc.buffer.segment_files import set_aside_lost_segments
from rlhpc.errors import CheckpointError
from rlhpc.files import write_atomically
from rlhpc.run_layout import RunLayout

log = logging.getLogger("rlhpc.checkpoint")
STATE_FILE = "controller.json"


@dataclass(slots=True)
class Totals:
    """Counters of a whole run, all attempts together: they grow from step to step."""

    steps: int = 0  # trained or skipped
    skipped_steps: int = 0
    rollouts_trained: int = 0
    rollouts_spanning_update: int = 0  # of those trained: tokens of two or more versions
    staleness_max: int = 0
    tokens_generated: int = 0  # completion tokens that reached the controller
    tokens_trained: int = 0  # prompt and completion tokens
    groups_dropped: int = 0
    groups_without_spread: int = 0
    leases_regranted: int = 0
    tokens_lost: int = 0  # with generators that died, as of their last heartbeats: they are sampled again
    packing_fill_sum: float = 0.0
    trainer_idle_s: float = 0.0
    generator_idle_s: float = 0.0  # summed over generators
    generator_s: float = 0.0  # summed over generators
    training_s: float = 0.0  # from the first live version to the last step
    wall_s: float = 0.0  # of the controllers, start-up included
    checkpoints_failed: int = 0  # skipped because they could not be written
    canaries_failed: int = 0  # generators whose weights were found wrong
    last_reward: float = 0.0  # mean of the rollouts that came in during the last step

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @property
    def packing_fill(self) -> float:
        """Mean over steps."""
        return self.packing_fill_sum / max(1, self.steps)

    @property
    def trainer_idle_ratio(self) -> float:
        """Share of training time in which the trainer had no batch."""
        return self.trainer_idle_s / self.training_s if self.training_s else 0.0

    @property
    def generator_idle_ratio(self) -> float:
        """Share of training time in which a generator had nothing to sample, mean over generators."""
        return self.generator_idle_s / self.generator_s if self.generator_s else 0.0


@dataclass(frozen=True, slots=True)
class SavedState:
    """The controller's part of a checkpoint."""

    step: int  # the step a resume begins with
    policy_version: int
    buffer: dict[str, Any]
    prompts: dict[str, Any]
    membership: dict[str, Any]
    totals: dict[str, Any]
    guard: dict[str, Any]
    progress: dict[str, Any]  # of schedules

    @property
    def position(self) -> Position:
        """Of the journal: what came later is not in this checkpoint."""
        return Position(**self.buffer["journal"])


def read_saved_state(layout: RunLayout, step: int) -> SavedState:
    """Read the controller's part.  Raises CheckpointError."""
    path = layout.checkpoint(step) / STATE_FILE
    try:
        return SavedState(**json.loads(path.read_bytes()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def delete_needless_journals(layout: RunLayout, steps: Sequence[int]) -> None:
    """Delete the journal files that none of these checkpoints needs for going on.

    Raises CheckpointError, JournalError, OSError.
    """
    positions = [read_saved_state(layout, step).position for step in steps]
    if positions:
        delete_old_journals(layout.rollouts, min(positions, key=lambda position: position.num_rollouts))


def set_aside_later_segments(layout: RunLayout, state: SavedState | None, attempt: int) -> int:
    """Set aside what a resume undoes and return the number of the first segment to write."""
    first = int(state.buffer["next_segment_index"]) if state is not None else 0
    lost = set_aside_lost_segments(layout.rollouts, first, attempt)
    if lost:
        log.info("%d segments later than the checkpoint are set aside in %s", len(lost), lost[0].parent)
    return first


def write_saved_state(directory: Path, state: SavedState) -> None:
    """Write the controller's part.  Raises OSError."""
    document = {name: getattr(state, name) for name in SavedState.__slots__}
    write_atomically(directory / STATE_FILE, json.dumps(document).encode())
