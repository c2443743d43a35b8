"""Serve one controller after another: how generators and reward services outlive the controller.

A *session* is the service of one controller, from connecting to its channels until one of these ends it:

    a signal, or StopRole(run_is_over)    the process leaves
    StopRole, but the run goes on         it looks for the next controller
    another incarnation in rendezvous/    the same: ours was killed and could not send StopRole
    a channel that fails                  the same; the next one is possibly the same controller again

Each session has its own incarnation, of the same order: a controller that knows the one before treats it as dead and
reclaims its leases.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypedDict, TypeVar

from rlhpc.base.files import keep_others_from_writing, leave_no_core_file, make_private, openness
from rlhpc.base.ownership import Fence
from rlhpc.base.patience import Deadline, passes, patiently, patiently_aside, seen
from rlhpc.base.processes import end_with_parent
from rlhpc.base.run_directory import RunLayout
from rlhpc.base.user_code import code_digest
from rlhpc.config.file import read_resolved
from rlhpc.config.rules import Config
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.contracts import ClientChannel
from rlhpc.protocol.errors import (
    EXIT_ALONE,
    EXIT_BUG,
    EXIT_CONFIG,
    EXIT_FAULT,
    EXIT_FENCED,
    ChannelError,
    ChannelTimeout,
    ConfigError,
    GuardStop,
    OwnershipLost,
    RlhpcError,
    RoleFailed,
    RunDirectoryError,
    StarvedError,
)
from rlhpc.protocol.messages import ChannelSpec, Heartbeat, Hello, Reregister, StopRole
from rlhpc.transport.open import Endpoint, FoundClient, connect, successor
from rlhpc.transport.sessions import another_of

# ---------------------------------------------------------------------------------------------------------------- guard
#
# Orphan guard: ends this process when its parent is gone, or another attempt owns the run.
#
# Input: the parent's pid and the fence.  A thread checks every LOOK_S and, if either holds, ends the process, whatever
# library call the other threads are in.  Signals and the checks before each write come first (lifecycle.py,
# ownership.py); the guard is for a process that reacts to neither because it was stopped, imports a library or waits in
# a collective.
#
# It also creates again the TMPDIR with which this process and its children were started, if a cleaner has deleted it.


log = logging.getLogger("rlhpc.role")
GUARD_LOOK_S = 0.5
FENCE_LOOK_S = 1.0
ORPHAN_GRACE_S = 3.0  # for the orderly exit after the signal of the parent's death
NUM_DOUBTS = 3  # consecutive looks without any owner: NFS, or a directory being replaced, may show none once


class Guard(threading.Thread):
    """Thread that ends the process when it is orphaned; start it once."""

    def __init__(self, fence: Fence | None) -> None:
        """fence: the run's owner; None for a process that outlives attempts."""
        super().__init__(name="guard", daemon=True)
        self._fence, self._parent = fence, os.getppid()
        temporary = os.environ.get("TMPDIR")
        self._temporary = Path(temporary) if temporary else None

    def run(self) -> None:
        """Look until there is a reason to end."""
        fence_looked_at = 0.0
        num_lost = 0
        while True:
            time.sleep(GUARD_LOOK_S)
            self._keep_temporary_directory()
            if os.getppid() != self._parent:
                log.warning("the parent of this process is gone: ending in %g s", ORPHAN_GRACE_S)
                time.sleep(ORPHAN_GRACE_S)
                end_now()
            if self._fence is not None and time.monotonic() - fence_looked_at >= FENCE_LOOK_S:
                fence_looked_at = time.monotonic()
                num_lost = num_lost + 1 if self._is_lost(self._fence) else 0
                if num_lost >= NUM_DOUBTS:
                    end_now()

    def _keep_temporary_directory(self) -> None:
        if self._temporary is None or self._temporary.is_dir():
            return
        with suppress(OSError):
            make_private(self._temporary)
            log.warning("%s was deleted, and is made again", self._temporary)

    def _is_lost(self, fence: Fence) -> bool:
        try:
            fence.check()
        except OwnershipLost as error:
            log.error("%s", error)  # noqa: TRY400  a traceback would say nothing
            return True
        except OSError as error:  # the filesystem does not answer: then this process cannot write there either
            log.warning("%s: %s", fence.layout.owner, error)
        return False


def end_now() -> None:
    """SIGKILL for this process, and for its children if it leads a process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------ lifecycle
#
# How every process of a run starts, learns that it should stop, and ends.
#
# Input: the command line of one role.  Output: a RoleContext.  Exit status of a role: 0 stopped on request or
# finished, 2 wrong settings, 3 failure of the environment, 4 another attempt has taken the run over, 5 another role
# did not appear in time, 70 internal error.


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
    """A process's identity, its run and its settings."""

    role: str
    replica: int
    num_ranks: int  # processes that share this role's work; trainer only
    attempt: int
    resume_step: int | None  # checkpoint to continue from
    incarnation: str
    layout: RunLayout
    config: Config
    config_hash: str
    # Seconds that this process waits for another to appear; then it fails and names the missing one.
    meet_timeout_s: float = MEET_TIMEOUT_S
    # Owner of the run directory, in whose name this process writes; "": it outlives attempts and writes nothing.
    owner: str = ""
    code: str = ""  # digest of the code that this process runs
    service: str = ""  # name of the [[service]] of which this process is a replica

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
        """Name of this process on every channel."""
        return f"{self.role}-{self.replica}"


def parse_role(arguments: list[str]) -> RoleContext:
    """Read the command line of a role process and the run directory it names.  Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m rlhpc.roles", description=__doc__)
    parser.add_argument("role", choices=("controller", "generator", "reward", "service", "trainer"))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--service", default="", help="name of the [[service]] that this process is a replica of")
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
        service=options.service,
    )


def run_role(context: RoleContext, work: Callable[[RoleContext], None]) -> int:
    """Do a role's work in this process; return the exit status, with which the process then leaves at once."""
    # All roles end at once here: none is left to finish the step for which SIGTERM would let the controller wait.
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
    """End this process without the exit handlers of libraries.

    torch's handlers abort NCCL's groups, which may hang as long as other ranks are in a collective (NVIDIA/nccl#1777),
    while these wait for this rank until the controller misses its heartbeats.  An interpreter that has loaded vLLM
    needs seconds to exit, of the ten that Ctrl-C promises, and a signal that arrives meanwhile kills it.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def exit_status_of(work: Callable[[], None], log: logging.Logger) -> int:
    """Do the work and return the exit status for its process; the reason is the last line of its log."""
    try:
        work()
    except ConfigError as error:
        log.error("settings: %s", error)  # noqa: TRY400  the message is for the user; a traceback would bury it
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 0
    except (RlhpcError, BaseExceptionGroup) as error:
        first = first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(first, GuardStop | StarvedError):  # those are decisions, not faults
            log.exception("failed")
        log.error(_in_one_line(first))  # noqa: TRY400  repeated, as the last line
        return _status_of(first)
    except Exception as error:  # nothing is survived: the process ends, but its log must say why
        status = _status_of(error)
        log.exception("bug" if status == EXIT_BUG else "failed")
        log.error(_in_one_line(error))  # noqa: TRY400  repeated, as the last line
        return status
    log.info("ended")
    return 0


def _status_of(error: BaseException) -> int:
    if isinstance(error, ConfigError | StarvedError | GuardStop):  # a restart would not help
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
    """Join a message of several lines to one: the launcher shows the last line of a log."""
    return f"{type(error).__name__}: " + "; ".join(line.strip() for line in str(error).splitlines())


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a role's coroutine in an event loop of its own; an exception in a callback of the loop ends the process.

    asyncio alone would log it and go on without the callback's work: a pipe would never be read again while heartbeats
    go on.  A restart of the process is better, whichever callback has failed.
    """
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(_end_after)
        runner.run(work)


def _end_after(loop: asyncio.AbstractEventLoop, said: dict[str, Any]) -> None:
    """Log asyncio's error and end the process, except for a lost connection or an exception of an unawaited task."""
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
    """End this process when one of its threads runs out of memory, or fails while nothing waits for it."""

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
    finally:  # there may be no memory for the log line either
        os._exit(status)


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM, SIGINT and Slurm's notices set; call it inside the running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, event.set)
    return event


class StopRequest:
    """Signals to the controller: SIGTERM asks it to finish the step and save, SIGINT to end within seconds.

    SIGTERM has no limit: the supervisor knows how much time is left, and sends SIGINT.
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


# ------------------------------------------------------------------------------------------------------------ heartbeat
#
# Register with the controller and send heartbeats.
#
# One connection on the control channel: Hello first, then a Heartbeat every heartbeat_s.


def hello(context: RoleContext, weight_devices: tuple[str, ...] = ()) -> Hello:
    """Return the first message of this process.  weight_devices: devices that receive weights, by worker rank."""
    return Hello(
        role=context.role,
        replica=context.replica,
        incarnation=context.incarnation,
        config_hash=context.config_hash,
        pid=os.getpid(),
        host=socket.gethostname(),
        num_weight_ranks=len(weight_devices),
        weight_devices=weight_devices,
        code=context.code,
        service=context.service,
    )


async def beat(control: ClientChannel, interval_s: float, current: Callable[[], Heartbeat]) -> None:
    """Send a heartbeat now and every `interval_s`, endlessly.  Raises ChannelClosed, ChannelFull."""
    while True:
        await control.send(current())
        await asyncio.sleep(interval_s)


# --------------------------------------------------------------------------------------------------- controller session


ADDRESS_LOOK_S = 1.0  # between looks at the addresses of connected processes
FOLLOW_TIMEOUT_S = 10.0  # to connect to a restarted server: another one may have restarted as well


class ControllerSession:
    """The session with one controller."""

    def __init__(self, context: RoleContext, stop: asyncio.Event, gone: str = "") -> None:
        """gone: incarnation of a controller known to be dead."""
        self.context, self.stop = context, stop
        self.gone = gone
        self.is_last = False
        self._over = asyncio.Event()
        self._controller: list[Endpoint] = []  # its endpoints to which we are connected, the control channel last

    async def connect(
        self, spec: ChannelSpec, server_replica: int = 0, *, gone: str = "", timeout_s: float | None = None
    ) -> FoundClient:
        """Connect to a server.  timeout_s: None for the time that roles wait for each other.

        Raises ChannelTimeout that names the missing process, RoleFailed if the settings of the run have changed.
        """
        is_controllers = spec.server == "controller"
        channel = await connect(
            spec,
            **self.context.caller,
            server_replica=server_replica,
            timeout_s=self.context.meet_timeout_s if timeout_s is None else timeout_s,
            gone=self.gone if is_controllers else gone,
            awaits_keys=True,
        )
        if is_controllers:
            self._controller.append(channel.endpoint)
            try:
                await self._refuse_other_settings()
            except BaseException:  # a cancelled connect, too, must not leave a socket behind
                await channel.close()
                raise
        return channel

    async def until_over(self, *loops: Coroutine[None, None, None]) -> None:
        """Run endless loops side by side until the session is over; the first failure is raised, in a group."""
        await run_until(self._over, self._heed(self.stop), self._watch(), *loops)

    def asked_to_stop(self, message: StopRole) -> None:
        """End the session at the controller's request."""
        if not self._over.is_set():
            log.info("asked to stop: %s", message.reason)
            self.is_last |= message.run_is_over
            self._leave_controller(self._controller[-1])

    def failed(self, error: BaseException) -> None:
        """End the session: a channel has failed.  The controller itself may be alive."""
        log.warning("a channel failed: %s", error)
        self.gone = ""
        self._over.set()

    async def _heed(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.is_last = True
        self._over.set()

    async def _watch(self) -> None:
        """Watch for another controller in place of ours; off the event loop, as the filesystem may be slow."""
        while True:
            await asyncio.sleep(ADDRESS_LOOK_S)
            for endpoint in self._controller:
                if await asyncio.to_thread(successor, self.context.layout.rendezvous, endpoint) is not None:
                    log.info("%s was started again", endpoint.name)
                    self._leave_controller(endpoint)
                    return

    def _leave_controller(self, endpoint: Endpoint) -> None:
        self.gone = endpoint.incarnation
        self._over.set()

    async def _refuse_other_settings(self) -> None:
        """Raise RoleFailed if a resume has changed the settings: this process has those of its start."""
        layout = self.context.layout
        _, digest = await patiently_aside(lambda: read_resolved(layout), layout.config)
        if digest != self.context.config_hash:
            raise RoleFailed(f"the run's settings have changed ({digest}) since {self.context.name} was started")


async def serve_controllers(
    context: RoleContext, stop: asyncio.Event, serve: Callable[[ControllerSession], Awaitable[None]]
) -> None:
    """Serve one controller after the other, until the run is over or `stop` is set.

    serve: connects, works until its session is over, and closes its channels.  Its exceptions are raised, except
    channel errors within a task group, which end the session.
    """
    session = ControllerSession(context, stop)
    while True:
        try:
            await serve(session)
        except BaseExceptionGroup as group:
            if group.split(ChannelError)[1] is not None:
                raise
            session.failed(first_leaf(group))
        if session.is_last or stop.is_set():
            return
        log.info("looking for the next controller, for %g s at most", context.meet_timeout_s)
        next_context = dataclasses.replace(context, incarnation=another_of(context.incarnation))
        session = ControllerSession(next_context, stop, gone=session.gone)


async def heed_controller(control: ClientChannel, session: ControllerSession) -> None:
    """Say Hello again when asked to, and end the session at StopRole; endlessly."""
    while True:
        message = await control.receive()
        if isinstance(message, Reregister):
            await control.send(hello(session.context))
        elif isinstance(message, StopRole):
            session.asked_to_stop(message)


async def follow_services(
    session: ControllerSession,
    spec: ChannelSpec,
    services: list[FoundClient],
    replace: Callable[[FoundClient, FoundClient], Awaitable[None]],
) -> None:
    """Reconnect to each server replica that was restarted, endlessly; `replace` takes (old channel, new channel)."""
    directory = session.context.layout.rendezvous
    while True:
        await asyncio.sleep(ADDRESS_LOOK_S)
        for replica, old in enumerate(services):
            if await asyncio.to_thread(successor, directory, old.endpoint) is None:
                continue
            try:
                new = await session.connect(spec, replica, gone=old.endpoint.incarnation, timeout_s=FOLLOW_TIMEOUT_S)
            except (ChannelError, RunDirectoryError) as error:  # it has died again, or a new attempt is making its keys
                log.warning("%s was started again and cannot be reached: %s", old.endpoint.name, error)
                continue
            log.info("%s was started again", old.endpoint.name)
            services[replica] = new
            await replace(old, new)
