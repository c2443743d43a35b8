"""Save the whole run at a step boundary: one directory, complete or ignored."""

from __future__ import annotations

import logging

from rlhpc.errors import CheckpointError
from rlhpc.messages import SaveCheckpoint, SaveReport
from rlhpc.roles.books import Books
from rlhpc.roles.run_state import RunState, write_run_state
from rlhpc.roles.trainer_link import TrainerLink
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint_directory import begin, complete, prune

log = logging.getLogger("rlhpc.checkpoint")


class CheckpointWriter:
    """Writes checkpoints of one run; called between two steps, when nothing is being trained."""

    def __init__(self, layout: RunLayout, keep: int, trainer: TrainerLink, books: Books) -> None:
        self._layout, self._keep, self._trainer, self._books = layout, keep, trainer, books

    async def write(self, step: int, policy_version: int) -> None:
        """Write one, complete it, delete those that are superseded.  Raises CheckpointError; older ones stay usable."""
        books, final = self._books, self._layout.checkpoint(step)
        temporary = begin(final)
        # The controller's part is taken in one go, before anything can be delivered.
        books.buffer.save_buffered(temporary, step)
        state = RunState(
            step=step,
            policy_version=policy_version,
            buffer=books.buffer.state(step),
            prompts=books.prompts.state(),
            membership=books.membership.state(),
            totals=books.totals.to_json(),
        )
        write_run_state(temporary, state)
        report = await self._trainer.ask(SaveCheckpoint(step, str(temporary)), SaveReport)
        if report.error:
            raise CheckpointError(f"{final}: the trainer could not save: {report.error}")
        complete(temporary, final, {"step": step, "policy_version": policy_version})
        prune(self._layout.checkpoints, self._keep)
        log.info("checkpoint %s complete, trainer's part in %.2f s", final.name, report.seconds)
