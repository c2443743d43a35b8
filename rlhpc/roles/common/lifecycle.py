"""How every process of a run starts, learns that it should stop, and ends.

Input: the command line of one role.  Output: a RoleContext.  Exit status of a role: 0 stopped on request or finished, 2
wrong settings, 3 failure of the environment, 4 another attempt has taken the run over, 5 another role did not appear in
time, 70 internal error.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypedDict, TypeVar

from rlhpc.code_digest import code_digest
from rlhpc.config import Config
from rlhpc.config_file import read_resolved
from rlhpc.config_sections import TransportConfig
from rlhpc.deadline import Deadline
from rlhpc.errors import (
    ChannelTimeout,
    ConfigError,
    GuardStop,
    OwnershipLost,
    RlhpcError,
    StarvedError,
)
from rlhpc.exit_status import EXIT_ALONE, EXIT_BUG, EXIT_CONFIG, EXIT_FAULT, EXIT_FENCED
from rlhpc.ownership import Fence
from rlhpc.parent_death import end_with_parent
from rlhpc.patience import passes, patiently, seen
from rlhpc.privacy import keep_others_from_writing, leave_no_core_file, openness
from rlhpc.roles.common.guard import Guard
from rlhpc.run_layout import RunLayout

Result = TypeVar("Result")
MEET_TIMEOUT_S = 120.0  # without a supervisor's limit
INTERRUPT_PATIENCE_S = 3.0  # for the step that is being trained
_THREADS = ("guard", "zap")  # they end with the process: without them it is left alone, or lets nobody in
LOOK_S = 0.2  # polling interval, for a signal that shortens the limit


class Listener(TypedDict):
    """Arguments of transport.open.open_server that are the same for all channels of a process."""

    layout: RunLayout
    config: TransportConfig
    replica: int
    incarnation: str


class Caller(Listener):
    """Arguments of transport.open.connect that are the same for all channels of a process."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Who this process is, and in which run."""

    role: str
    replica: int
    num_ranks: int  # processes that share this role's work; trainer only
    attempt: int
    resume_step: int | None  # checkpoint to continue from
    incarnation: str
    layout: RunLayout
    config: Config
    config_hash: str
    # How long this process waits for another to appear; then it fails and names the missing one.
    meet_timeout_s: float = MEET_TIMEOUT_S
    # Of the run directory, under which this process writes; "": it outlives attempts and writes nothing.
    owner: str = ""
    code: str = ""  # digest of the code that this process runs

    @property
    def listener(self) -> Listener:
        """The identity with which this process opens channels to others."""
        return Listener(
            layout=self.layout,
            config=self.config.transport,
            replica=self.replica,
            incarnation=self.incarnation,
        )

    @property
    def caller(self) -> Caller:
        """The identity with which this process connects."""
        return Caller(role=self.role, **self.listener)

    @property
    def fence(self) -> Fence | None:
        """The ownership check before each change of the run directory."""
        return Fence(self.layout, self.owner) if self.owner else None

    @property
    def name(self) -> str:
        """Name on every channel."""
        return f"{self.role}-{self.replica}"


def parse_role(arguments: list[str]) -> RoleContext:
    """Read the command line of a role process and the run directory it names.  Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m rlhpc.roles", description=__doc__)
    parser.add_argument("role", choices=("controller", "generator", "reward", "trainer"))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--resume-step", type=int, default=None)
    parser.add_argument("--incarnation", default=None, help="JOB.RESTART.START of a supervisor; a later one fences it")
    parser.add_argument("--owner", default="", help="of the run directory: the attempt that this process belongs to")
    parser.add_argument("--meet-timeout-s", type=float, default=MEET_TIMEOUT_S)
    options = parser.parse_args(arguments)
    layout = RunLayout(options.run_dir.absolute())
    config, digest = patiently(lambda: read_resolved(layout), layout.config)
    return RoleContext(
        role=options.role,
        replica=options.replica,
        num_ranks=options.num_ranks,
        attempt=options.attempt,
        resume_step=options.resume_step,
        incarnation=f"{options.incarnation or f'0.{options.attempt}.0'}-{uuid.uuid4().hex[:12]}",
        layout=layout,
        config=config,
        config_hash=digest,
        meet_timeout_s=options.meet_timeout_s,
        owner=options.owner,
        code=code_digest(),
    )


def run_role(context: RoleContext, work: Callable[[RoleContext], None]) -> int:
    """Do a role's work in a process of its own; return its exit status, with which the process then leaves at once."""
    # All roles die at once: none is left to finish the step that SIGTERM would let the controller wait for.
    end_with_parent(signal.SIGINT if context.role == "controller" else signal.SIGTERM)
    faulthandler.register(signal.SIGQUIT)  # kill -QUIT prints every thread's stack
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {context.name} %(name)s %(levelname)s %(message)s"
    )
    log = logging.getLogger("rlhpc.lifecycle")
    log.info("started: pid %d, incarnation %s, attempt %d", os.getpid(), context.incarnation, context.attempt)
    end_with_threads()
    leave_no_core_file()
    keep_others_from_writing()
    if (rights := seen(lambda: openness(context.layout.root), None)) is not None and rights.text:
        log.warning("%s", rights.text)
    Guard(context.fence).start()

    def checked_work() -> None:
        if (fence := context.fence) is not None:
            patiently(fence.check, context.layout.owner)
        work(context)

    return exit_status_of(checked_work, log)


def leave_at_once(status: int) -> NoReturn:
    """End this process without what libraries do when Python exits.

    torch aborts NCCL's groups there, which may hang as long as other ranks are in a collective (NVIDIA/nccl#1777),
    while these wait for this rank until the controller misses its heartbeats.  An interpreter that has loaded vLLM
    needs seconds to exit, of the ten that Ctrl-C promises, and dies of a request to end that comes meanwhile.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def exit_status_of(work: Callable[[], None], log: logging.Logger) -> int:
    """Do it and return the exit status of its process; the reason is the last line of its log."""
    try:
        work()
    except ConfigError as error:
        log.error("settings: %s", error)  # noqa: TRY400  the message is for the user; a traceback would bury it
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 0
    except (RlhpcError, BaseExceptionGroup) as error:
        first = first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(first, GuardStop | StarvedError):  # these are decisions, and no faults
            log.exception("failed")
        log.error(_in_one_line(first))  # noqa: TRY400  said once more, as the last line
        return _status_of(first)
    except Exception as error:  # survived: nothing; the process ends, but its log must say why
        status = _status_of(error)
        log.exception("bug" if status == EXIT_BUG else "failed")
        log.error(_in_one_line(error))  # noqa: TRY400  said once more, as the last line
        return status
    log.info("ended")
    return 0


def _status_of(error: BaseException) -> int:
    if isinstance(error, ConfigError | StarvedError | GuardStop):  # another try would not help
        return EXIT_CONFIG
    if isinstance(error, ChannelTimeout):
        return EXIT_ALONE
    if isinstance(error, OwnershipLost):
        return EXIT_FENCED
    return EXIT_FAULT if isinstance(error, RlhpcError) or passes(error) else EXIT_BUG


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a task group that is not itself a group; our own kinds before others."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, RlhpcError)), leaves[0])


def _in_one_line(error: BaseException) -> str:
    """The launcher shows the last line of a log, so a message of several lines is joined to one."""
    return f"{type(error).__name__}: " + "; ".join(line.strip() for line in str(error).splitlines())


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a role's coroutine in an event loop of its own; an exception in a callback of the loop ends the process.

    By itself asyncio logs it and goes on, without what the callback was to do: a pipe that is never read again, while
    heartbeats tell that all is well.  Another start of the process is better, whatever the callback belongs to.
    """
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(_end_after)
        runner.run(work)


def _end_after(loop: asyncio.AbstractEventLoop, said: dict[str, Any]) -> None:
    """Log what asyncio says, and end the process, unless it is a lost connection or the result of a forgotten task."""
    error = said.get("exception")
    is_out_of_memory = isinstance(error, MemoryError)
    if not is_out_of_memory and "handle" not in said:
        loop.default_exception_handler(said)
        return
    try:
        loop.default_exception_handler(said)
    finally:
        _end_of(error, f"in the event loop: {said.get('message', '')}")


def end_with_threads() -> None:
    """End this process when a thread of it runs out of memory, or one fails that nobody waits for."""

    def end_after(failed: threading.ExceptHookArgs) -> None:
        name = failed.thread.name if failed.thread is not None else ""
        try:
            threading.__excepthook__(failed)
        finally:
            if isinstance(failed.exc_value, MemoryError) or name in _THREADS:
                _end_of(failed.exc_value, f"in the thread {name!r}")

    threading.excepthook = end_after


def _end_of(error: BaseException | None, where: str) -> NoReturn:
    """End this process; the reason is the last line of its log."""
    status = EXIT_FAULT if isinstance(error, MemoryError) else EXIT_BUG
    try:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        logging.getLogger("rlhpc.lifecycle").error("%s, %s", what, where)
        leave_at_once(status)
    finally:  # there may be no memory for words either
        os._exit(status)


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM, SIGINT and Slurm's notices set; call it inside the running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, event.set)
    return event


class StopRequest:
    """The controller's: SIGTERM asks it to finish the step and save, SIGINT to end within seconds.

    SIGTERM has no limit: the supervisor knows how much time is left, and interrupts.
    """

    def __init__(self) -> None:
        """Listen for both signals; call it inside the running loop."""
        self.event = asyncio.Event()
        self._deadline = Deadline(math.inf)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._request, math.inf)
        loop.add_signal_handler(signal.SIGINT, self._request, INTERRUPT_PATIENCE_S)

    async def wait_for(self, work: asyncio.Task[None]) -> None:
        """Wait for the end of `work` for as long as the signals allow; a signal meanwhile may shorten it."""
        while not work.done() and not self._deadline.is_over:
            await asyncio.wait((work,), timeout=min(self._deadline.left_s, LOOK_S))

    def _request(self, patience_s: float) -> None:
        if patience_s < self._deadline.left_s:
            self._deadline = Deadline(patience_s)
        self.event.set()


async def run_until(stop: asyncio.Event, *loops: Coroutine[None, None, None]) -> None:
    """Run endless loops side by side until `stop` is set; the first one that fails ends the others and is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        await stop.wait()
        for task in tasks:
            task.cancel()


async def unless_stopped(stop: asyncio.Event, task: asyncio.Task[Result]) -> Result | None:
    """Return what the task returns, or cancel it and return None when `stop` is set first."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait((task,))
    return None
