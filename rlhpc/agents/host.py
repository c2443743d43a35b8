"""The process that starts agents, one process each, and reports how they end.

    generator ── Start, Kill: JSON lines ──▶ host ── fork ──▶ agent, agent, …
              ◀── Ready, Ended: JSON lines ──     ◀─ last line of what it prints, exit status

Started by AgentProcesses as `python -m rlhpc.agents.host PARENT_PID PRELOAD FUNCTION|-- COMMAND…`; PRELOAD: names of
modules, with commas.  A function's module is imported once, here, and each call runs in a fork of this process: an
agent costs no imports.  With PRELOAD, a Python program runs in a fork likewise (preload.py).  The host has one thread
and no event loop, so that forks are sound.  Every agent leads a process group of its own, which is killed when
the agent ends or is to be killed; all groups are killed when standard input closes, or the generator dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import logging
import os
import selectors
import signal
import sys
import tempfile
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from rlhpc.agents.preload import preload, rehearse, run_program
from rlhpc.base.processes import child_command, child_environment, die_with, end_with_parent, keep_pipes, stay_at
from rlhpc.base.user_code import load, try_out
from rlhpc.protocol.errors import ConfigError, RoleFailed

# ------------------------------------------------------------------------------------------------------------ processes
#
# The processes of a generator's agents, as the generator sees them: started, ended, killed.
#
# Input: a session and its record.  Output: the end of its process, once.  Agents are children of one host, which is
# started with the first agent, and again after it has died, together with all its agents.

log = logging.getLogger("rlhpc.agents")
START_TIMEOUT_S = 120.0  # for the user's imports
_LONGEST_LINE = 1 << 20  # from the host, which cuts the output of agents


@dataclass(frozen=True, slots=True)
class Ended:
    """End of an agent's process."""

    status: int  # negative: by this signal
    said: str  # the end of its output
    why: str = ""  # reason if there was no process at all

    @property
    def fault(self) -> str:
        """Description of a failed end; "" for success."""
        if self.why:
            return self.why
        if self.status < 0:
            return f"it died of signal {_name_of(-self.status)}"
        last = self.said.strip().splitlines()[-1:]
        return f"it ended with exit status {self.status}: {last[0][:200] if last else ''}".rstrip(": ") * (
            self.status != 0
        )


Told = Callable[[Ended], None]


class AgentProcesses:
    """Belongs to one event loop, and to the thread that runs it."""

    def __init__(self, function: str, command: Sequence[str], modules: Sequence[str] = ()) -> None:
        """function: package.module:function; "": command is executed instead.  modules: agent.preload."""
        self._what = (",".join(modules), *((function,) if function else ("--", *command)))
        self._told: dict[str, Told] = {}
        self._host: Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.num_hosts = 0

    async def start(self, session: str, record: str, variables: dict[str, str], told: Told) -> None:
        """Start an agent; told: called once, when it has ended.  Raises RoleFailed if it cannot be started."""
        async with self._starting:
            if self._host is None:
                await self._open()
        self._told[session] = told
        self._say(start=session, record=record, variables=variables)

    async def try_start(self) -> None:
        """Import the user's modules and start no agent.  Raises RoleFailed if none could be started."""
        await self._open()
        await self.close()

    def kill(self, session: str) -> None:
        """Kill the agent of a session; its end is not reported."""
        if self._told.pop(session, None) is not None:
            self._say(kill=session)

    async def close(self) -> None:
        """Kill all agents, and wait until the host is gone.  Idempotent."""
        self._told.clear()
        host, listening = self._host, self._listening
        if host is not None:
            assert host.stdin is not None
            host.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await host.wait()
            with contextlib.suppress(ProcessLookupError):
                host.kill()
            await host.wait()
        if listening is not None:
            await asyncio.wait((listening,))

    async def _open(self) -> None:
        """Start the host and wait until it has imported the user's module."""
        host = await asyncio.create_subprocess_exec(
            *child_command("rlhpc.agents.host", str(os.getpid()), *self._what),
            stdin=PIPE,
            stdout=PIPE,
            env=child_environment(CUDA_VISIBLE_DEVICES=""),  # the engine's GPUs are not for agents
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        why = "it was not waited for"
        try:
            why = await _why_not_ready(host)
        finally:
            if why:
                with contextlib.suppress(ProcessLookupError):
                    host.kill()
        if why:
            await host.wait()
            raise RoleFailed(f"no agent can be started: {why}")
        self._host, self.num_hosts = host, self.num_hosts + 1
        self._listening = asyncio.create_task(self._listen(host))

    async def _listen(self, host: Process) -> None:
        """Pass on the ends of agents until the host ends; a host whose output cannot be read is killed."""
        has_ended = False
        try:
            await self._pass_on(host)
            has_ended = True
        finally:
            if not has_ended:
                with contextlib.suppress(ProcessLookupError):
                    host.kill()
            status = await host.wait()
            self._host = None
            if self._told:
                log.warning("the process that starts agents ended with status %d", status)
            for told in [self._told.pop(session) for session in list(self._told)]:
                told(Ended(-1, "", f"the process that starts agents ended with status {status}"))

    async def _pass_on(self, host: Process) -> None:
        assert host.stdout is not None
        while line := await host.stdout.readline():
            message = json.loads(line)
            told = self._told.pop(message["ended"], None)
            if told is not None:
                told(Ended(message["status"], message["said"], message["why"]))

    def _say(self, **message: Any) -> None:
        if self._host is not None and self._host.stdin is not None:
            self._host.stdin.write(json.dumps(message).encode() + b"\n")


def _name_of(number: int) -> str:
    """Name of a signal; those between SIGRTMIN and SIGRTMAX have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


async def _why_not_ready(host: Process) -> str:
    """Wait until the host has imported the user's module; returns "", or the error."""
    assert host.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await host.stdout.readline()
    except TimeoutError:
        return f"its module was not imported within {START_TIMEOUT_S:g} s"
    return str(json.loads(line)["ready"]) if line else "the process that holds agents died before it was ready"


# ----------------------------------------------------------------------------------------------------------------- host

MOST_KEPT = 1 << 16  # bytes of an agent's output, from the end
LONGEST_TEXT = 500  # characters of a text that an agent's function returns; the limit of details (session.py)
_PIECE = 1 << 16
_PARENT_DIED = signal.SIGHUP
_LEFT_TO_THE_GENERATOR = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # Slurm signals every process
_RAISED = 1  # exit status of an agent that was a function
_NO_PROGRAM = 127  # as in a shell


@dataclass(slots=True)
class _Agent:
    """A running agent."""

    pid: int
    output: int  # reading end of its pipe
    said: bytes = b""
    is_told: bool = False  # its pipe has reached the end


class Host:
    """Running agents, by session."""

    def __init__(
        self,
        function: Callable[[Any], object] | None,
        command: Sequence[str],
        inbox: int,
        outbox: int,
        *,
        forks_programs: bool = False,
    ) -> None:
        """inbox, outbox: file descriptors for JSON lines.  forks_programs: the command is Python's, run in a fork."""
        self._function, self._command, self._forks_programs = function, command, forks_programs
        self._inbox, self._outbox = inbox, outbox
        self._agents: dict[str, _Agent] = {}
        self._selector = selectors.DefaultSelector()
        self._unread, self._is_open = b"", True

    def run(self) -> None:
        """Serve until the inbox ends."""
        self._selector.register(self._inbox, selectors.EVENT_READ, self._obey)
        self._selector.register(_woken_by_children(), selectors.EVENT_READ, self._bury)
        try:
            while self._is_open:
                for key, _ in self._selector.select():
                    if isinstance(key.data, str):
                        if (agent := self._agents.get(key.data)) is not None:
                            self._read(agent)
                    else:
                        key.data(key.fd)
        finally:
            for agent in self._agents.values():
                _kill(agent.pid)

    def say(self, **message: Any) -> None:
        """Write one line to the generator."""
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._outbox, line) :]

    def _obey(self, inbox: int) -> None:
        piece = os.read(inbox, _PIECE)
        self._is_open = bool(piece)
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for message in map(json.loads, lines):
            if "start" in message:
                self._start(message["start"], message["record"], message["variables"])
            elif (agent := self._agents.get(message["kill"])) is not None:
                _kill(agent.pid)

    def _start(self, session: str, record: str, variables: Mapping[str, str]) -> None:
        pipe: tuple[int, ...] = ()
        try:
            output, its_output = pipe = os.pipe()
            pid = os.fork()
        except OSError as error:  # no more processes, or descriptors
            for descriptor in pipe:
                os.close(descriptor)
            self.say(ended=session, status=-1, said="", why=f"no process can be started: {error.strerror}")
            return
        if not pid:
            self._become(record, variables, its_output)
        os.close(its_output)
        os.set_blocking(output, False)
        self._agents[session] = _Agent(pid, output)
        self._selector.register(output, selectors.EVENT_READ, session)

    def _bury(self, wakings: int) -> None:
        """Report the agents that have ended, once a child has."""
        with contextlib.suppress(BlockingIOError):
            os.read(wakings, _PIECE)
        for session, agent in list(self._agents.items()):
            if os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill(agent.pid)  # processes that it left behind; its pid is not reused before it is waited for
            _, status = os.waitpid(agent.pid, 0)
            self._read(agent)
            if not agent.is_told:
                self._selector.unregister(agent.output)
            os.close(agent.output)
            del self._agents[session]
            said = agent.said.decode(errors="replace")
            self.say(ended=session, status=os.waitstatus_to_exitcode(status), said=said, why="")

    def _read(self, agent: _Agent) -> None:
        """Read an agent's output; keep the last MOST_KEPT bytes."""
        with contextlib.suppress(BlockingIOError):
            while not agent.is_told:
                piece = os.read(agent.output, _PIECE)
                agent.said = (agent.said + piece)[-MOST_KEPT:]
                if not piece:
                    agent.is_told = True
                    self._selector.unregister(agent.output)

    # --------------------------------------------------------------------------------------------------- in the agent

    def _become(self, record: str, variables: Mapping[str, str], output: int) -> NoReturn:
        """Run the agent in the fork; never returns."""
        status = 70
        try:
            os.setsid()
            end_with_parent()
            signal.set_wakeup_fd(-1)
            for number in (*_LEFT_TO_THE_GENERATOR, _PARENT_DIED, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.environ.update(variables)
            for descriptor in (self._inbox, self._outbox):
                os.close(descriptor)
            if self._function is None:
                _connect(record, output)
                if not self._forks_programs:
                    self._execute(output)
            _draw_anew()
            program = self._command[1:]
            status = run_program(program) if self._function is None else _call(self._function, record, output)
        except BaseException:  # noqa: BLE001  a copy of the host must never return into its loop
            traceback.print_exc()
        finally:
            os._exit(status)

    def _execute(self, output: int) -> NoReturn:
        try:
            os.execvp(self._command[0], list(self._command))
        except OSError as error:  # it existed when the run was checked, perhaps on another node
            os.write(output, f"{self._command[0]}: {error.strerror}".encode())
        os._exit(_NO_PROGRAM)


def _connect(record: str, output: int) -> None:
    """Make the record the standard input of a program, and the pipe its standard output."""
    # Not a pipe, which would block on a long record that the program does not read.
    with tempfile.TemporaryFile() as file:
        file.write(record.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.dup2(output, 1)


def _draw_anew() -> None:
    """Reseed the random numbers of libraries that the host has loaded, which would be equal in all forks.

    Python seeds its own (random) at each fork.
    """
    for name in ("numpy.random", "torch"):
        library = sys.modules.get(name)
        if library is not None:
            library.seed()


def _woken_by_children() -> int:
    """A descriptor that becomes readable when a child has ended."""
    wakings, wakes = os.pipe()
    for descriptor in (wakings, wakes):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return wakings


def _call(function: Callable[[Any], object], record: str, output: int) -> int:
    """Call the function: its result becomes the last line of output, an exception's name and text likewise."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 0
    try:
        said = try_out(
            "agent.function", getattr(function, "__name__", "?"), "a record", lambda: _returned(function, record)
        )
    except ConfigError as error:
        traceback.print_exception(error.__cause__)
        said, status = f"{type(error.__cause__).__name__}: {error.__cause__}", _RAISED
    sys.stdout.flush()
    sys.stderr.flush()
    line = said.replace("\n", " ").encode(errors="replace")[:MOST_KEPT]
    while line:
        line = line[os.write(output, line) :]
    return status


def _returned(function: Callable[[Any], object], record: str) -> str:
    """Result of the function, as JSON."""
    returned = function(json.loads(record))
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    plain = _plain(returned)
    if isinstance(plain, dict):  # the whole line has to fit into MOST_KEPT
        plain = {key: value[:LONGEST_TEXT] if isinstance(value, str) else value for key, value in plain.items()}
    return json.dumps(plain)


def _plain(returned: object) -> object:
    """A RewardOutcome as a dict; anything else unchanged."""
    if hasattr(returned, "__dataclass_fields__"):
        names = ("reward", "is_correct", "detail")
        return {**getattr(returned, "parts", {}), **{name: getattr(returned, name) for name in names}}
    return returned


def _kill(pid: int) -> None:
    """Kill an agent's process group, or the agent alone if it does not lead one yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(parent_pid: int, what: Sequence[str]) -> int:
    """Serve until the pipe closes.  Returns the exit status."""
    stay_at(_LEFT_TO_THE_GENERATOR)
    signal.signal(_PARENT_DIED, _leave)
    die_with(parent_pid, _PARENT_DIED)
    inbox, outbox = keep_pipes()
    modules = tuple(filter(None, what[0].split(",")))
    function, command = (None, what[2:]) if what[1] == "--" else (what[1], ())
    host = Host(None, command, inbox, outbox)
    try:
        loaded = None
        preload(modules)
        if function is not None:
            loaded = try_out("agent.function", function, "its import", lambda: load("agent.function", function))
            _refuse_parameters(function, loaded)
    except ConfigError as error:
        host.say(ready=str(error.__cause__ if isinstance(error.__cause__, ConfigError) else error))
        return 1
    rehearse()
    # Loaded modules share memory with every agent, unless the garbage collector writes into it.
    gc.collect()
    gc.freeze()
    host = Host(loaded, command, inbox, outbox, forks_programs=bool(modules))
    host.say(ready="")
    host.run()
    return 0


def _refuse_parameters(name: str, function: Callable[..., object]) -> None:
    """Raise ConfigError for a function that cannot be called with a record."""
    try:
        inspect.signature(function).bind({})
    except TypeError as error:
        raise ConfigError(
            f"agent.function={name!r}: {error}; legal: a function that is called with the record alone"
        ) from error
    except ValueError:  # written in C: no signature
        return


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
