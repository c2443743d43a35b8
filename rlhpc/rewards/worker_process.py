"""One worker process as its pool sees it: started, asked, killed.

Input: Request, Batch or Dialogue.  Output: Reply, Replies or Turn.  Every way in which a process can fail to answer
becomes WorkerLost; after that only kill() may be called.  One question at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from rlhpc.python_child import child_command, child_environment
from rlhpc.rewards.failures import DIED, TIMED_OUT
from rlhpc.rewards.frames import HEADER_BYTES, Ready, Replies, Reply, Turn, body_length

_READY = msgspec.msgpack.Decoder(Ready)
_REPLY: msgspec.msgpack.Decoder[Reply | Replies | Turn] = msgspec.msgpack.Decoder(Reply | Replies | Turn)
_Message = TypeVar("_Message")
_LAST_MOMENT_S = 10.0  # from the end of a pipe to that of its process, on a busy node


class WorkerLost(Exception):
    """The process died, did not reply in time or sent an invalid reply; never leaves this package."""

    def __init__(self, why: str, failure: str = DIED) -> None:
        """failure: TIMED_OUT or DIED."""
        super().__init__(why)
        self.failure = failure


class WorkerProcess:
    """A process that scores one completion at a time."""

    def __init__(self, process: Process) -> None:
        """Wrap a process that spawn() started."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._requests, self._replies = process, process.stdin, process.stdout

    @classmethod
    async def spawn(cls, tasks: Sequence[str], memory_limit_bytes: int, settings: Mapping[str, str]) -> WorkerProcess:
        """Start the process; it is not ready yet.  Call from the thread that lives as long as the workers shall.

        It leads a process group of its own, so that what a reward function starts dies with it.  It is set to die with
        the thread that starts it (PR_SET_PDEATHSIG counts threads, not processes).
        Raises OSError if no process can be started.
        """
        process = await asyncio.create_subprocess_exec(
            *child_command("rlhpc.rewards.worker", str(os.getpid()), str(memory_limit_bytes), *tasks),
            stdin=PIPE,
            stdout=PIPE,
            env=child_environment(**settings),
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self._process.pid

    async def wait_until_ready(self, timeout_s: float) -> tuple[str, ...]:
        """Wait until it has imported its reward functions; returns tasks that are batched.  Raises WorkerLost."""
        ready = await self._receive(_READY, timeout_s)
        if ready.error:
            raise WorkerLost(f"worker cannot start: {ready.error}")
        return ready.batched

    async def ask(self, request_frame: bytes, timeout_s: float) -> Reply | Replies | Turn:
        """Send an encoded Request, Batch or Dialogue; return its answer.

        Raises WorkerLost, in `timeout_s` at most, and a moment later where the process has closed its pipe.
        """
        self._requests.write(request_frame)
        return await self._receive(_REPLY, timeout_s)

    async def _receive(self, decoder: msgspec.msgpack.Decoder[_Message], timeout_s: float) -> _Message:
        try:
            async with asyncio.timeout(timeout_s):
                header = await self._replies.readexactly(HEADER_BYTES)
                body = await self._replies.readexactly(body_length(header))
            return decoder.decode(body)
        except TimeoutError:
            raise WorkerLost(f"no answer within {timeout_s:g} s; killed", TIMED_OUT) from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerLost(f"worker died: {await self._how_it_ended()}") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise WorkerLost(f"worker sent an invalid reply: {error}") from error

    async def kill(self) -> None:
        """End the process, and its whole group, now; wait until it is gone.  Idempotent."""
        # Its own exit leaves what it started behind in the group, so the group is signalled even then.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._requests.close()
        await self._process.wait()

    async def _how_it_ended(self) -> str:
        """Describe the end of a process that has closed its pipe, which it does a moment before it ends."""
        try:
            async with asyncio.timeout(_LAST_MOMENT_S):
                status = await self._process.wait()
        except TimeoutError:
            return "closed its pipe"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
