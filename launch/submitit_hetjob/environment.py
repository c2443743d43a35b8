"""How a task of a heterogeneous job reacts to signals.

There are three signals.  The warning (USR2): rank 0 stores its checkpoint, writes a note and exits; the other ranks
continue, because rank 0 may need them.  SIGTERM, which Slurm sends before it takes nodes away: the same.  USR1, sent by
the supervisor: exit.
submitit would requeue the job from inside the task; that cancels a heterogeneous job on Slurm 25.11 and newer, so the
note asks the supervisor to do it from the batch step once every task has ended (launch/submitit_hetjob/supervisor.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from types import FrameType

from launch.submitit_hetjob.step import LEAVE_SIGNAL, LEAVES_VARIABLE, note_path
from launch.submitit_hetjob.submitit_seams import Handler, TaskEnvironment
from rlhpc.files import write_atomically


class HeterogeneousSlurmJobEnvironment(TaskEnvironment):
    """submitit.JobEnvironment() inside a component: job id of the whole, ranks and nodes of the component."""

    def listen(self, checkpoint: Handler, ignore: Handler) -> None:
        """Bind the three signals, and deliver those that have arrived since the process started."""
        warning = self.warning_signal
        signal.signal(signal.SIGCONT, ignore)  # Slurm sends it before every SIGTERM
        signal.signal(LEAVE_SIGNAL, _leave)
        if os.environ.get(LEAVES_VARIABLE):  # others store checkpoints; this component is simply run again
            signal.signal(signal.SIGTERM, self._be_taken_away)
            signal.signal(warning, ignore)
        elif self.global_rank == 0:
            once = _Once(checkpoint, ignore)
            signal.signal(signal.SIGTERM, once)
            signal.signal(warning, once)
        else:
            signal.signal(signal.SIGTERM, partial(self._follow_rank_0, ignore))
            signal.signal(warning, checkpoint)  # which logs that only rank 0 handles it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {warning, signal.SIGTERM, LEAVE_SIGNAL})

    def ask_for_another_life(self, countdown: int) -> None:
        """Leave the note that the supervisor looks for when this component has ended."""
        _let_finish()
        note = note_path(self.paths.folder, self.job_id)
        write_atomically(note, json.dumps({"remaining_timeouts": int(countdown)}).encode())
        for number in (self.warning_signal, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # an interpreter that exits removes handlers, but not this

    def _follow_rank_0(self, ignore: Handler, signum: int, frame: FrameType | None) -> None:
        # Rank 0 may need this rank for its checkpoint; staying after that would cost the job KillWait seconds.
        if note_path(self.paths.folder, self.job_id).exists():
            _leave(signum, frame)
        ignore(signum, frame)

    def _be_taken_away(self, signum: int, frame: FrameType | None) -> None:
        # Slurm wants the nodes.  Without a note the supervisor, which may have got no signal, would see a failure.
        if self.global_rank == 0:
            self.ask_for_another_life(0)
        _leave(signum, frame)

    def hold_signals(self) -> None:
        """Block signals until `listen`: before it, they would end the process without a checkpoint."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {self.warning_signal, signal.SIGTERM, LEAVE_SIGNAL})


class _Once:
    """The first signal stores the checkpoint; a later one must not start a second write into the same file."""

    def __init__(self, checkpoint: Handler, ignore: Handler) -> None:
        self._checkpoint, self._ignore = checkpoint, ignore
        self._has_begun = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._has_begun:
            self._ignore(signum, frame)
            return
        self._has_begun = True
        self._checkpoint(signum, frame)


def _leave(signum: int, frame: FrameType | None) -> None:
    _let_finish()
    sys.exit(128 + signum)


def _let_finish() -> None:
    """From here on the supervisor's request to exit does not interrupt cleaning up; after a while it kills."""
    signal.signal(LEAVE_SIGNAL, signal.SIG_IGN)
