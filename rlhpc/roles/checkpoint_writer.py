"""Save the whole run at a step boundary: one directory, complete or ignored.

    write ──▶ controller's part, trainer's snapshot ──▶ next step …        training waits for this much
                              └──▶ SaveReport ──▶ complete ──▶ prune        in the background

Promises: one checkpoint is written at a time; nothing that an older checkpoint needs is deleted before the new one is
complete, for a run that is killed in between goes on from the older one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from rlhpc.errors import CheckpointError
from rlhpc.messages import SaveCheckpoint, SaveReport, SnapshotTaken
from rlhpc.ownership import Fence
from rlhpc.roles.books import Books
from rlhpc.roles.run_state import RunState, write_run_state
from rlhpc.roles.trainer_link import TrainerLink
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint_directory import begin, complete, prune

log = logging.getLogger("rlhpc.checkpoint")


class CheckpointWriter:
    """Writes checkpoints of one run."""

    def __init__(
        self, layout: RunLayout, keep: int, trainer: TrainerLink, books: Books, fence: Fence | None = None
    ) -> None:
        self._layout, self._keep, self._trainer, self._books = layout, keep, trainer, books
        self._fence = fence
        self._step = -1  # of the last one
        self._report: asyncio.Future[SaveReport] | None = None
        self._completing: asyncio.Task[None] | None = None
        self.write_s = 0.0  # of the last one that is complete: from its snapshot on
        self.longest_s = 0.0  # of all that are complete: from the request on

    @property
    def awaits_trainer(self) -> bool:
        """True while the trainer is writing: until its SaveReport is heard."""
        return self._report is not None and not self._report.done()

    async def write(self, step: int, policy_version: int) -> None:
        """Begin one; called between two steps, when nothing is being trained.

        Waits for the end of the one before.  Raises CheckpointError if that or this one's beginning fails; older ones
        stay usable.
        """
        await self.finish()
        requested = time.monotonic()
        books, final = self._books, self._layout.checkpoint(step)
        self._check_ownership()
        temporary = begin(final, self._fence.staging(final.parent) if self._fence is not None else None)
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
        self._step, self._report = step, asyncio.get_running_loop().create_future()
        self._completing = asyncio.create_task(self._complete(self._report, temporary, final, state, requested))
        taken = await self._trainer.ask(SaveCheckpoint(step, str(temporary)), SnapshotTaken)
        log.info("checkpoint %s begun, snapshot in %.3f s", final.name, taken.seconds)

    def hear(self, report: SaveReport) -> None:
        """The trainer has ended writing."""
        if report.step == self._step and self._report is not None and not self._report.done():
            self._report.set_result(report)

    def raise_failure(self) -> None:
        """Raise the CheckpointError of the last one, if it has failed by now."""
        if self._completing is not None and self._completing.done():
            self._completing.result()

    async def finish(self) -> None:
        """Wait until the last one is complete.  Raises CheckpointError if it failed."""
        if self._completing is not None:
            await self._completing

    def _check_ownership(self) -> None:
        """Raises OwnershipLost: checkpoints here are another attempt's to make and to delete."""
        if self._fence is not None:
            self._fence.check()

    async def _complete(
        self, reported: asyncio.Future[SaveReport], temporary: Path, final: Path, state: RunState, requested: float
    ) -> None:
        began = time.monotonic()
        report = await reported
        if report.error:
            raise CheckpointError(f"{final}: the trainer could not save: {report.error}")
        self._check_ownership()
        # Threads, because one reads every byte again and the other deletes many: the loop has rollouts to take in.
        await asyncio.to_thread(
            complete, temporary, final, {"step": state.step, "policy_version": state.policy_version}
        )
        self.longest_s = max(self.longest_s, time.monotonic() - requested)
        self._check_ownership()
        await asyncio.to_thread(prune, self._layout.checkpoints, self._keep)
        self.write_s = time.monotonic() - began
        log.info("checkpoint %s complete after %.2f s, trainer's part %.2f s", final.name, self.write_s, report.seconds)
