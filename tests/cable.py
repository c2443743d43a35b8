"""A TCP forwarder between two ends of ours that can be cut, fall silent, and dribble.

It runs in a thread of its own, so that a blocking test can use it as well as one with an event loop.  A silent cable
holds what it was given, as a network does whose packets are sent again later; with `forget` that is gone and the
connection is reset when the cable works again, as a firewall does that has lost its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

CHUNK_BYTES = 1 << 16
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class Cable:
    """Forwards from a port of its own to a target.  Use as a context manager."""

    def __init__(self, target: str) -> None:
        """target: "tcp://host:port"."""
        host, port = target.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self.num_connections = 0
        self.num_bytes = 0  # that were forwarded, both ways
        self._writers: list[asyncio.StreamWriter] = []
        self._chunk_bytes, self._pause_s = CHUNK_BYTES, 0.0
        self._loop = asyncio.new_event_loop()
        self._works = asyncio.Event()
        self._works.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cable")

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._forward, "127.0.0.1", 0), self._loop
        ).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        """What the connecting end is told instead of the target."""
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset every connection; new ones work."""
        self._do(self._reset)

    def fall_silent(self) -> None:
        """Forward nothing more, neither of these connections nor of new ones; nobody is told."""
        self._do(self._works.clear)

    def work_again(self, *, forget: bool = False) -> None:
        """Forward what was held; forget: reset those connections instead, and lose it."""
        if forget:
            self._do(self._reset)
        self._do(self._works.set)

    def dribble(self, chunk_bytes: int, pause_s: float) -> None:
        """From now on forward so many bytes at a time, with a pause after each."""
        self._chunk_bytes, self._pause_s = chunk_bytes, pause_s

    def _do(self, what: Callable[[], Any]) -> None:
        async def do() -> None:
            what()

        asyncio.run_coroutine_threadsafe(do(), self._loop).result()

    def _reset(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        self._writers.clear()

    async def _forward(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(near_out)
        with contextlib.suppress(OSError, asyncio.CancelledError):  # the second: the cable is put away
            await self._works.wait()
            far_in, far_out = await asyncio.open_connection(*self._target)
            if near_out.transport.is_closing():
                far_out.transport.abort()
                return
            self._writers.append(far_out)
            await asyncio.gather(self._copy(near_in, far_out), self._copy(far_in, near_out))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(self._chunk_bytes):
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
                await self._works.wait()
                sink.write(data)
                self.num_bytes += len(data)
                await sink.drain()
        sink.close()

    async def _close(self) -> None:
        self._server.close()
        self._works.set()
        self._reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
