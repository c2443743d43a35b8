"""The processes of a generator's agents, as the generator sees them: started, ended, killed.

Input: a session and its record.  Output: how its process ended, once.  They are children of one host (host.py), which
is started with the first of them, and again after it has died; then every agent that it had has died, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.errors import RoleFailed
from rlhpc.python_child import child_command, child_environment

log = logging.getLogger("rlhpc.agents")
START_TIMEOUT_S = 120.0  # for the user's imports
_LONGEST_LINE = 1 << 20  # of the host's; what agents print is cut before


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    status: int  # negative: by this signal
    said: str  # the end of what it has printed
    why: str = ""  # where there was no process at all

    @property
    def fault(self) -> str:
        """What is wrong with that; "" for nothing."""
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

    def __init__(self, function: str, command: Sequence[str]) -> None:
        """function: package.module:function, or "", then command is executed."""
        self._what = (function,) if function else ("--", *command)
        self._told: dict[str, Told] = {}
        self._host: Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.num_hosts = 0

    async def start(self, session: str, record: str, variables: dict[str, str], told: Told) -> None:
        """Start an agent; told: called once, when it has ended.  Raises RoleFailed if there can be none."""
        async with self._starting:
            if self._host is None:
                await self._open()
        self._told[session] = told
        self._say(start=session, record=record, variables=variables)

    async def try_start(self) -> None:
        """Import the user's module and start no agent.  Raises RoleFailed if none could be started."""
        await self._open()
        await self.close()

    def kill(self, session: str) -> None:
        """It is not wanted any more, and nobody is told how it ends."""
        if self._told.pop(session, None) is not None:
            self._say(kill=session)

    async def close(self) -> None:
        """Kill all of them, and wait until the host is gone.  Idempotent."""
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
            *child_command("rlhpc.roles.generator.agents.host", str(os.getpid()), *self._what),
            stdin=PIPE,
            stdout=PIPE,
            env=child_environment(CUDA_VISIBLE_DEVICES=""),  # the engine's are not theirs
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
        """Tell how agents end, until the host does; one that cannot be listened to any more is killed."""
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
    """Signals between SIGRTMIN and SIGRTMAX have a number alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


async def _why_not_ready(host: Process) -> str:
    """Wait until it has imported the user's module; "" once it has."""
    assert host.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await host.stdout.readline()
    except TimeoutError:
        return f"its module was not imported within {START_TIMEOUT_S:g} s"
    return str(json.loads(line)["ready"]) if line else "the process that holds agents died before it was ready"
