"""The supervisor of a run without Slurm: all processes on this machine, for as long as the user's command runs.

    Ctrl-C                            the controller writes its state; everything has ended within ten seconds
    Ctrl-C twice                      everything is killed
    any of these during the start     the start ends at once, and the run is stopped where it was
    `rlhpc stop`, SIGTERM, SIGHUP,    the controller finishes its step and saves
    or a warning of a scheduler
    another start takes the run over  everything is killed

Everything else is as in the supervisor of a Slurm job (controller_job.py): generators and reward services are
restarted; if the controller or a trainer fails, a new attempt begins, within a retry budget.  Python 3.9 and the
standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from launch.common.text import LONGEST_TEMPORARY_PATH
from launch.run_files.plan_file import read_plan
from launch.run_files.run_state import Attempt, Cause, Log, Outcome, append_event, read_progress
from launch.slurm.queue import NoTimeLimit, ThisJob
from launch.supervisor.controller_job import ControllerJobSupervisor
from launch.supervisor.processes import ENDS, WARNINGS, Signals, StopSignal, Tether
from rlhpc.base.patience import patiently, seen
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import OwnershipLost

# Events that are expected, or repeated by the next one.
_QUIET = {"attempt_end", "part_missed", "part_left", "verdict"}


class LocalSignals(Signals):
    """Signals of a terminal, also of its end, and work to do while the supervisor waits."""

    sender = "SIGTERM"

    def __init__(
        self, while_waiting: Sequence[Callable[[], None]] = (), check_owner: Callable[[], None] = lambda: None
    ) -> None:
        """while_waiting: called several times a second.  Both may raise OwnershipLost."""
        super().__init__()
        self.attend(while_waiting, check_owner)
        self._lost_to, self._raises = "", False

    def attend(self, while_waiting: Sequence[Callable[[], None]], check_owner: Callable[[], None]) -> None:
        """Call these from now on, as in the constructor."""
        self._while_waiting, self._check_owner = while_waiting, check_owner

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and other requests to end in the block."""
        handlers = dict.fromkeys((*ENDS, *WARNINGS), self._end) | {signal.SIGINT: self._interrupt}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: the run outlives its terminal
            del handlers[signal.SIGHUP]
        # If a parent has set it to be ignored, every process seems to end with status 0.
        before = [(signal.SIGCHLD, signal.signal(signal.SIGCHLD, signal.SIG_DFL))]
        before += [(number, signal.signal(number, handler)) for number, handler in handlers.items()]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Have signals raise StopSignal in the block, which reads for minutes without checking flags."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def sleep(self, seconds: float) -> None:
        """Wait, at most until the next signal."""
        super().sleep(seconds)
        for call in self._while_waiting:
            self._hear(call)

    def lost_to(self) -> str:
        """The owner that has taken the run over, in words; "" if none has."""
        self._hear(self._check_owner)
        return self._lost_to

    def _hear(self, call: Callable[[], None]) -> None:
        """Make a call that displays or renews; if the file system refuses, the next call does it."""
        try:
            seen(call, None)
        except OwnershipLost as error:
            self._lost_to = self._lost_to or str(error)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.sender = signal.Signals(number).name
        super()._end(number, frame)  # first: if the exception is lost in a finaliser, the supervisor sees the flag
        self._raise(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        self._wake()
        self._raise(number)

    def _raise(self, number: int) -> None:
        if self._raises:
            raise StopSignal(number)


class TerminalLog(Log):
    """Prints the supervisor's events for the user, and records them."""

    def __init__(self, tell: Callable[[str], None], first: int, path: Path) -> None:
        """tell: prints a line.  first: the attempt that the user started.  path: file for the events."""
        self.attempt = -1
        self._tell, self._first, self._path = tell, first, path

    def say(self, event: str, text: str) -> None:
        """Record an event, and print it unless it is obvious or the next one repeats it."""
        with suppress(OSError):  # the disk is full: print it anyway
            append_event(self._path, event, text, attempt=self.attempt)
        if event not in _QUIET and (event != "attempt" or self.attempt != self._first):
            self._tell(text)


def supervise_locally(
    layout: RunLayout,
    attempt: Attempt,
    tell: Callable[[str], None],
    signals: LocalSignals,
    *,
    descriptors: tuple[int, ...],
    begins: Callable[[str], None],
) -> int:
    """Run the plan in layout.local_plan, whose first attempt has begun; returns the exit status of the command.

    descriptors: open files that every process of the run keeps open.  begins: called with the owner of each attempt.
    Returns 0: the run is complete, or was stopped with nothing lost; 130: stopped, and killed before it could save; 4:
    another start has taken the run over; otherwise the status of the process that failed (128 + signal).
    """
    plan = patiently(lambda: read_plan(layout.local_plan, "local"), layout.local_plan)
    job = ThisJob.without_slurm()
    temporary = private_temporary_directory()
    lock = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)  # systemd-tmpfiles does not clean a locked directory
    tether = Tether(descriptors, {"TMPDIR": str(temporary)})
    log = TerminalLog(tell, attempt.index, layout.job_events("local"))
    supervisor = ControllerJobSupervisor(
        plan, job, NoTimeLimit(), log, signals, first=attempt, tether=tether, begins=begins
    )
    try:
        with signals.listening():
            outcome = supervisor.run()
    finally:
        os.close(lock)
        shutil.rmtree(temporary, ignore_errors=True)
    if outcome.cause is Cause.COMPLETE:
        return 0
    if outcome.cause in (Cause.STOP, Cause.SIGNAL, Cause.ABORT, Cause.INTERRUPTED):
        if outcome.status in (None, 128 + signal.SIGKILL):  # of its controller: the latter if it took too long
            note_stop(layout)
            return Cause.INTERRUPTED.status if outcome.status else 0
        outcome = Outcome(Cause.FAILED, supervisor.controller_summary, outcome.status)
    log.say("verdict", f"{outcome.cause.name.lower()}: {outcome.text}")
    tell(outcome.text)
    status = outcome.status or outcome.cause.status
    return Cause.FAILED.status if status == Cause.INTERRUPTED.status else status  # nobody has pressed Ctrl-C


def note_stop(layout: RunLayout) -> None:
    """Record a stop by a signal like a request of `rlhpc stop`, for later questions about the run's end."""
    progress = seen(lambda: read_progress(layout), None)
    if progress is None or not progress.is_over:
        with suppress(OSError):
            layout.stop_request.touch()


def private_temporary_directory() -> Path:
    """Make the directory for all temporary files of a run, mode 0700; the caller deletes it at the end.

    vLLM leaves sockets between its processes behind and sends pickles over them: other users must not reach them.
    """
    directory = Path(tempfile.mkdtemp(prefix="rlhpc-"))
    if len(str(directory)) <= LONGEST_TEMPORARY_PATH - 12:  # each process has a directory of its own in it
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="rlhpc-", dir="/tmp"))
