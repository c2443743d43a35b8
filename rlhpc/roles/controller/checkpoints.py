"""Save the whole run at a step boundary: one directory, complete or ignored.

    write ──▶ controller's part, trainer's snapshot ──▶ next step …        training waits for this much
                              └──▶ SaveReport ──▶ complete ──▶ prune        in the background

Guarantees: one checkpoint is written at a time; nothing that an older checkpoint needs is deleted before the new one is
complete, for a run that is killed in between goes on from the older one; a checkpoint that cannot be written to disk is
skipped and another is tried soon; only when this has gone on for long is it an error.  All input and output is done in
lanes (persistence.py): the event loop must receive rollouts and heartbeats, however slow the disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlhpc.base.ownership import Fence
from rlhpc.base.patience import Patience
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.errors import CheckpointError, JournalError, SegmentError
from rlhpc.protocol.messages import SaveCheckpoint, SaveReport, SnapshotTaken
from rlhpc.roles.controller.batch_maker import TrainerLink
from rlhpc.roles.controller.persistence import LONGEST_CHECKPOINT_PAUSE_S, DiskWriter, at_once
from rlhpc.training.checkpoint_directory import KnownCheckpoints, begin, complete, discard, prune

# ---------------------------------------------------------------------------------------------------------- checkpoints

log = logging.getLogger("rlhpc.checkpoint")
LAST_SAVE_POLL_S = 0.2


class FrozenPart(Protocol):
    """The controller's part of one checkpoint, as it was when the checkpoint was requested."""

    def prepare(self) -> None:
        """Write what must be on disk before the checkpoint; in the lane of segments.  Raises SegmentError."""

    def write(self, directory: Path) -> None:
        """Write the part, in the lane of checkpoints.  Raises SegmentError, OSError."""


class OwnPart(Protocol):
    """The controller's side of saving: takes its snapshot, and says which checkpoints and files may be deleted."""

    @property
    def attempt(self) -> int:
        """Number of this attempt of the run."""

    @property
    def keeps_all(self) -> bool:
        """True while no checkpoint may be deleted."""

    @property
    def spared(self) -> Collection[int]:
        """Steps whose checkpoints are not deleted, however old they are."""

    def freeze(self, step: int, policy_version: int) -> FrozenPart:
        """Take a snapshot, before anything can be delivered."""

    def delete_needless(self, steps: Sequence[int]) -> None:
        """Delete files that no checkpoint of these steps needs.  Raises CheckpointError, JournalError, OSError."""

    def left_out(self) -> None:
        """Count a checkpoint that could not be written."""


class CheckpointWriter:
    """Writes checkpoints of one run."""

    def __init__(
        self,
        layout: RunLayout,
        keep: int,
        trainer: TrainerLink,
        own: OwnPart,
        disk: DiskWriter,
        *,
        fence: Fence | None = None,
        clock: Clock = time.monotonic,
        durable: Callable[[], Awaitable[None]] = at_once,
    ) -> None:
        """durable: returns once the journal has all that a checkpoint refers to; a resume continues from there."""
        self._durable, self._disk = durable, disk
        self._layout, self._keep, self._trainer, self._own = layout, keep, trainer, own
        self._fence, self._known = fence, KnownCheckpoints(layout.checkpoints)
        self._step = -1  # of the last checkpoint
        self._report: asyncio.Future[SaveReport] | None = None
        self._completing: asyncio.Task[None] | None = None
        self._failure: CheckpointError | None = None  # of the last checkpoint
        self._patience = Patience(clock, LONGEST_CHECKPOINT_PAUSE_S)
        self.write_s = 0.0  # of the last complete checkpoint, from its snapshot on
        self.longest_s = 0.0  # of all complete checkpoints, from the request on

    @property
    def awaits_trainer(self) -> bool:
        """True while the trainer is writing: until its SaveReport has arrived."""
        return self._report is not None and not self._report.done()

    @property
    def has_failed(self) -> bool:
        """True if the last checkpoint is known to have failed."""
        return self._failure is not None

    @property
    def disk_trouble(self) -> str:
        """Reason why the last checkpoint could not be written, and what happens next; "" if it was written."""
        return self._patience.trouble

    @property
    def is_overdue(self) -> bool:
        """True if the last checkpoint could not be written and it is time to try again, at whatever step."""
        return self.has_failed and self._patience.may_try

    async def write(self, step: int, policy_version: int) -> None:
        """Begin a checkpoint; called between two steps, when nothing is being trained.

        Waits until the one before has ended.  One that cannot be started is skipped; older ones stay usable.
        Raises CheckpointError if saving has failed for too long, OwnershipLost.
        """
        await self._ended()
        self._failure = None
        requested, final = time.monotonic(), self._layout.checkpoint(step)
        frozen = self._own.freeze(step, policy_version)
        try:
            temporary = await self._write_own(frozen, final)
        except CheckpointError as error:
            self._leave_out(error)
            self.raise_failure()
            return
        self._step, self._report = step, asyncio.get_running_loop().create_future()
        manifest = {"step": step, "policy_version": policy_version, "attempt": self._own.attempt}
        self._completing = asyncio.create_task(self._complete(self._report, temporary, final, manifest, requested))
        taken = await self._trainer.ask(SaveCheckpoint(step, str(temporary)), SnapshotTaken)
        log.info("checkpoint %s begun, snapshot in %.3f s", final.name, taken.seconds)

    def reported(self, report: SaveReport) -> None:
        """Take the trainer's report: its part is written, or could not be."""
        if report.step == self._step and self._report is not None and not self._report.done():
            self._report.set_result(report)

    def raise_failure(self) -> None:
        """Raise the last checkpoint's CheckpointError if saving has failed for too long."""
        if self._failure is not None and self._patience.is_exhausted:
            raise self._failure

    async def has_succeeded(self) -> bool:
        """Wait for the end of the last checkpoint; return whether it is complete."""
        await self._ended()
        return not self.has_failed

    async def write_surely(self, step: int, policy_version: int) -> None:
        """Write the run's last checkpoint, trying again while the disk refuses.  Returns when it is complete.

        Raises CheckpointError if the disk refuses for too long.
        """
        await self.write(step, policy_version)
        while not await self.has_succeeded():
            self.raise_failure()
            if self.is_overdue:
                await self.write(step, policy_version)
            else:
                await asyncio.sleep(LAST_SAVE_POLL_S)

    async def finish(self) -> None:
        """Wait until the last checkpoint is complete.  Raises CheckpointError if it failed."""
        await self._ended()
        if self._failure is not None:
            raise self._failure

    def give_up(self) -> None:
        """Begin no more jobs for the checkpoint that is being written; a job begun in its lane is finished."""
        if self._completing is not None:
            self._completing.cancel()

    # ------------------------------------------------------------------------------------------------------- internals

    async def _write_own(self, frozen: FrozenPart, final: Path) -> Path:
        """Write the controller's part; return the directory to complete the checkpoint in.

        Raises CheckpointError, leaving nothing behind, or OwnershipLost.
        """
        try:
            await self._disk.segments.run(frozen.prepare)
        except SegmentError as error:
            raise CheckpointError(f"{final}: the controller could not save: {error}") from error
        return await self._disk.checkpoints.run(self._begun_with, frozen, final)

    def _begun_with(self, frozen: FrozenPart, final: Path) -> Path:
        self._check_ownership()
        temporary = begin(final, self._fence.staging(final.parent) if self._fence is not None else None)
        try:
            frozen.write(temporary)
        except (SegmentError, OSError) as error:
            discard(temporary)
            raise CheckpointError(f"{final}: the controller could not save: {error}") from error
        return temporary

    async def _ended(self) -> None:
        """Wait until the last checkpoint is complete or has failed."""
        if self._completing is not None:
            await self._completing

    def _check_ownership(self) -> None:
        """Raise OwnershipLost if another attempt owns the run, CheckpointError if the owner cannot be read."""
        if self._fence is None:
            return
        try:
            self._fence.check()
        except OSError as error:
            raise CheckpointError(f"{self._layout.owner}: whose the run is cannot be read: {error}") from error

    async def _complete(
        self,
        reported: asyncio.Future[SaveReport],
        temporary: Path,
        final: Path,
        manifest: Mapping[str, int],
        requested: float,
    ) -> None:
        began = time.monotonic()
        report = await reported
        await self._durable()
        if problem := await self._disk.checkpoints.run(self._put_together, report, temporary, final, manifest):
            self._leave_out(problem)
            return
        self._patience.succeeded()
        self.longest_s = max(self.longest_s, time.monotonic() - requested)
        try:
            await self._disk.checkpoints.run(self._check_ownership if self._own.keeps_all else self._delete_needless)
        except (CheckpointError, JournalError, OSError) as error:
            log.warning("%s", error)
        self.write_s = time.monotonic() - began
        log.info("checkpoint %s complete after %.2f s, trainer's part %.2f s", final.name, self.write_s, report.seconds)

    def _put_together(
        self, report: SaveReport, temporary: Path, final: Path, manifest: Mapping[str, int]
    ) -> CheckpointError | None:
        """Complete the checkpoint, reading every byte again; if that fails, delete it and return the reason."""
        problem: CheckpointError | None = None
        if report.error:
            problem = CheckpointError(f"{final}: the trainer could not save: {report.error}")
        else:
            try:
                self._check_ownership()
                complete(temporary, final, manifest)
            except CheckpointError as error:
                problem = error
        if problem is None:
            self._known.note_sound(final)
        else:
            discard(temporary)
        return problem

    def _delete_needless(self) -> None:
        """Delete older checkpoints and journals than are kept.  Raises CheckpointError, JournalError, OSError."""
        self._check_ownership()
        prune(self._layout.checkpoints, self._keep, self._known, self._own.spared)
        self._own.delete_needless([step for step, _ in self._known.steps()])

    def _leave_out(self, error: CheckpointError) -> None:
        """Skip this checkpoint; files that older ones need are kept."""
        self._failure = error
        self._patience.failed(error)
        self._own.left_out()
        log.error("left out: %s", self._patience.trouble)
