"""Save and restore the whole run at a step boundary: trainer, ledger, buffered rollouts, prompt cursor, counters.

A checkpoint is one directory, complete or ignored.  What was in flight is granted again after a resume, under the same
group ids; what was finished and not used is in the checkpoint; segments sealed later are set aside, for they belong to
steps that are done again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.buffer.rollout_buffer import RolloutBuffer
from rlhpc.buffer.segment_files import set_aside_lost_segments
from rlhpc.contracts import PromptSource
from rlhpc.errors import CheckpointError
from rlhpc.files import write_atomically
from rlhpc.messages import SaveCheckpoint, SaveReport
from rlhpc.roles.trainer_link import TrainerLink
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint_directory import begin, complete, prune
from rlhpc.weights.membership import Membership

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
    """Put away what a resume undoes and return the number of the first segment to write."""
    first = int(state.buffer["next_segment_index"]) if state is not None else 0
    lost = set_aside_lost_segments(layout.rollouts, first, attempt)
    if lost:
        log.warning("%d segments of undone steps are set aside in %s", len(lost), lost[0].parent)
    return first


class CheckpointWriter:
    """Writes checkpoints of one run; called between two steps, when nothing is being trained."""

    def __init__(
        self,
        layout: RunLayout,
        keep: int,
        trainer: TrainerLink,
        buffer: RolloutBuffer,
        prompts: PromptSource,
        membership: Membership,
        totals: Callable[[], dict[str, Any]],
    ) -> None:
        self._layout, self._keep, self._trainer = layout, keep, trainer
        self._buffer, self._prompts, self._membership, self._totals = buffer, prompts, membership, totals

    async def write(self, step: int, policy_version: int) -> None:
        """Write one, complete it, delete those that are superseded.  Raises CheckpointError; older ones stay usable."""
        final = self._layout.checkpoint(step)
        temporary = begin(final)
        # The controller's part is taken in one go, before anything can be delivered.
        self._buffer.save_buffered(temporary, step)
        state = RunState(
            step=step,
            policy_version=policy_version,
            buffer=self._buffer.state(step),
            prompts=self._prompts.state(),
            membership=self._membership.state(),
            totals=self._totals(),
        )
        _write_state(temporary, state)
        report = await self._trainer.ask(SaveCheckpoint(step, str(temporary)), SaveReport)
        if report.error:
            raise CheckpointError(f"{final}: the trainer could not save: {report.error}")
        complete(temporary, final, {"step": step, "policy_version": policy_version})
        prune(self._layout.checkpoints, self._keep)
        log.info("checkpoint %s complete in %.2f s", final.name, report.seconds)


def _write_state(directory: Path, state: RunState) -> None:
    document = {name: getattr(state, name) for name in RunState.__slots__}
    write_atomically(directory / STATE_FILE, json.dumps(document).encode())
