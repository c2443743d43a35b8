"""The local executor: start, watch and end every process of a run on this machine.

Input: RunPlan.  Output: the run's exit status.  Each process leads its own session, so that whatever it started (engine
workers, verifiers) ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

from launch.common.paths import LONGEST_TEMPORARY_PATH
from launch.plan.processes import ProcessPlan, RunPlan
from launch.run_directory.owner import RunOwner
from launch.run_files.exit_records import ExitRecord, last_error_line, write_record
from launch.run_files.run_state import wants_abort, wants_stop
from rlhpc.errors import OwnershipLost
from rlhpc.exit_status import EXIT_FENCED, EXIT_INTERRUPTED
from rlhpc.parent_death import end_with_parent

INTERRUPT_GRACE_S = 7.0  # after Ctrl-C: with start and end of the interpreter, inside the ten seconds promised
STOP_GRACE_S = 120.0  # after `rlhpc stop`: time to finish a step and save
FINISH_GRACE_S = 15.0  # after the controller has ended by itself


@dataclass(slots=True)
class _Running:
    plan: ProcessPlan
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    is_reported: bool = False


class LocalExecutor:
    """Runs one plan.  Use as a context manager: leaving it ends every process that is left."""

    def __init__(self, plan: RunPlan, tell: Callable[[str], None], owner: RunOwner) -> None:
        """`tell` takes lines for the user; `owner` is this process as the launcher of the run."""
        self._plan, self._tell, self._owner = plan, tell, owner
        self._running: list[_Running] = []
        self._interrupts = 0
        self._asked: set[signal.Signals] = set()  # of the controller
        self._deadline: float | None = None  # when what is left is killed
        self._failure, self._status = "", 0  # of the first process that failed
        self._old_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        """Start every process."""
        self._temporary = _private_temporary_directory()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        for process in self._plan.processes:
            self._start(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what is left, by process group."""
        for running in self._running:
            if not running.is_reported:  # otherwise its group is gone, and the id may have been reused
                self._signal_group(running, signal.SIGKILL)
            running.process.wait()
            running.log.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave us

    def wait(self, every: Callable[[], None]) -> int:
        """Watch until every process has ended; call `every` a few times a second.  Returns the exit status.

        0: the run is complete, or was stopped and has saved its state.  130: interrupted, and killed before it could.
        4: another launcher has taken the run over.  Otherwise the status of the first process that failed.
        """
        while any(running.process.poll() is None for running in self._running):
            self._notice_ends()
            self._obey_requests()
            self._is_lost(self._owner.renew)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._end_all(signal.SIGKILL)
            every()
            time.sleep(0.1)
        self._notice_ends()
        every()
        if self._failure:
            self._tell(self._failure)
            return self._status
        is_saved = all(r.process.returncode == 0 for r in self._running if r.plan.role == "controller")
        return 0 if is_saved else EXIT_INTERRUPTED

    # ------------------------------------------------------------------------------------------------------- internals

    def _start(self, plan: ProcessPlan) -> None:
        path = self._plan.layout.log(plan.role, plan.replica, self._plan.attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhpc.roles", *plan.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**plan.defaults, **os.environ, **plan.environment, "TMPDIR": str(self._temporary)},
            start_new_session=True,  # Ctrl-C reaches the launcher alone; the group can be ended as one
            pass_fds=self._owner.inherited,
            preexec_fn=partial(_die_with, os.getpid()),  # this process has one thread
        )
        self._running.append(_Running(plan, process, log))

    def _notice_ends(self) -> None:
        """React once to each process that has ended."""
        for running in self._running:
            status = running.process.poll()
            if status is None or running.is_reported:
                continue
            running.is_reported = True
            self._signal_group(running, signal.SIGKILL)  # children it may have left behind
            if running.plan.role == "controller" or (status and self._is_missed(running)):
                self._wind_up(running, status)
            elif status and self._deadline is None:
                self._tell(self._exit_summary(running, status) + "; the run continues without it")

    def _is_missed(self, running: _Running) -> bool:
        """True if the run cannot continue without this process, or it was the last of its role."""
        others = (r for r in self._running if r.plan.role == running.plan.role and r.process.poll() is None)
        return not running.plan.is_expendable or not any(others)

    def _wind_up(self, running: _Running, status: int) -> None:
        """The run is over.  After success the controller has told every role to exit; after a failure we do."""
        if status and self._is_lost(self._owner.check):
            return  # that is why it failed
        if status and self._deadline is None:
            self._failure, self._status = self._exit_summary(running, status), abs(status)
            self._record_failure(running.plan, status)
            for other in self._running:
                if other.process.poll() is None:
                    # SIGINT makes the controller exit at once: the step that it waits for will not be finished.
                    is_controller = other.plan.role == "controller"
                    self._signal_group(other, signal.SIGINT if is_controller else signal.SIGTERM)
        self._grant_grace(FINISH_GRACE_S)

    def _exit_summary(self, running: _Running, status: int) -> str:
        cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        path = self._plan.layout.log(running.plan.role, running.plan.replica, self._plan.attempt)
        return f"{running.plan.name} ended with {cause}: {last_error_line(path.read_bytes())} (log: {path})"

    def _record_failure(self, plan: ProcessPlan, status: int) -> None:
        """Write an exit record: a killed process logs nothing, and the controller exits cleanly."""
        layout, attempt = self._plan.layout, self._plan.attempt
        words = last_error_line(layout.log(plan.role, plan.replica, attempt).read_bytes())
        as_a_shell = 128 - status if status < 0 else status
        record = ExitRecord(plan.name, as_a_shell, words, starts=1, host=socket.gethostname(), job="")
        with contextlib.suppress(OSError):  # a full disk may be the cause of the failure
            write_record(layout.exit_record(plan.role, plan.replica, attempt), record)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C ends the run within seconds, a second one at once.  SIGTERM ends it gracefully, even if repeated."""
        if number == signal.SIGTERM:
            self._ask_for_the_end(signal.SIGTERM)
            return
        self._interrupts += 1
        if self._interrupts > 1:
            self._end_all(signal.SIGKILL)
        else:
            self._ask_for_the_end(signal.SIGINT)

    def _obey_requests(self) -> None:
        """React to `rlhpc stop`, once or repeated."""
        if wants_abort(self._plan.layout):
            self._ask_for_the_end(signal.SIGINT)
        elif wants_stop(self._plan.layout):
            self._ask_for_the_end(signal.SIGTERM)

    def _ask_for_the_end(self, number: signal.Signals) -> None:
        """SIGTERM: finish the step and save.  SIGINT: end within seconds, even if more time was granted before."""
        if number in self._asked or signal.SIGINT in self._asked:
            return
        self._asked.add(number)
        self._grant_grace(INTERRUPT_GRACE_S if number == signal.SIGINT else STOP_GRACE_S)
        for running in self._running:
            if running.plan.role == "controller":  # it tells the others when everything is saved
                self._signal_group(running, number)

    def _is_lost(self, look: Callable[[], None]) -> bool:
        """End everything if another start has taken the run over; `look` raises OwnershipLost then."""
        try:
            look()
        except OwnershipLost as error:
            if not self._failure:
                self._failure, self._status = str(error), EXIT_FENCED
            self._end_all(signal.SIGKILL)
            return True
        return False

    def _grant_grace(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _end_all(self, number: signal.Signals) -> None:
        for running in self._running:
            if running.process.poll() is None:
                self._signal_group(running, number)

    def _signal_group(self, running: _Running, number: signal.Signals) -> None:
        if number != signal.SIGKILL:
            if running.process.poll() is None:
                running.process.send_signal(number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the whole session is gone already
            os.killpg(running.process.pid, number)


def _die_with(launcher: int) -> None:
    """In the child before it becomes a role: die with the launcher, from the first instruction on.

    A role that has started replaces this by a signal of its own (lifecycle.py).
    """
    end_with_parent()
    if os.getppid() != launcher:  # it died before the kernel was asked
        os._exit(1)


def _private_temporary_directory() -> Path:
    """Make the directory for all temporary files of this attempt, mode 0700; it is deleted at the end.

    vLLM leaves the sockets between its processes behind, and sends pickle over them: no other user may reach them.
    """
    directory = Path(tempfile.mkdtemp(prefix="rlhpc-"))
    if len(str(directory)) <= LONGEST_TEMPORARY_PATH:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="rlhpc-", dir="/tmp"))
