"""A teacher behind HTTP whose log-probabilities are a function of the row, and which misbehaves as it is told.

python -m tests.unit.roles.teacher_server RENDEZVOUS REPLICA [SECONDS]    one of a run's processes, until it is ended
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from rlhpc.transport.service_address import ServiceAddress, publish_address

NAME = "larger"
KEY = "secret"
Reply = dict[str, Any]


def logprob_of(row: list[int], place: int) -> float:
    """Log-probability of a token of a row; another one after another beginning."""
    return -1.0 - ((sum(row[: place + 1]) * 31 + place * 7) % 97) / 97


def entry_of(row: list[int], place: int, num_top: int) -> dict[str, Any]:
    """vLLM's entry of a token: its own log-probability, and those of the num_top most likely tokens."""
    own = {str(row[place]): {"logprob": logprob_of(row, place), "rank": num_top + 3, "decoded_token": None}}
    likely = {
        str(1000 + 10 * place + rank): {"logprob": -0.125 * rank, "rank": rank, "decoded_token": None}
        for rank in range(1, num_top + 1)
    }
    return own | likely


def reply_to(body: dict[str, Any]) -> Reply:
    """The reply of a server that is sound."""
    row, num_top = body["prompt"], body["prompt_logprobs"]
    entries = [None, *(entry_of(row, place, num_top) for place in range(1, len(row)))]
    return {"model": body["model"], "choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]}


class TeacherServer:
    """Answers requests; the first ones as `faults` say, each a function of the request and the sound reply."""

    def __init__(self, *faults: Callable[[web.Request, Reply], Awaitable[web.StreamResponse]], key: str = KEY) -> None:
        self.faults, self.key, self.seconds = list(faults), key, 0.0
        self.asked: list[dict[str, Any]] = []
        self.num_abandoned = self.num_answered = 0
        self.url = ""

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[TeacherServer]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    def publish(self, rendezvous: Path, replica: int = 0) -> ServiceAddress:
        address = ServiceAddress(NAME, replica, self.url, self.key, NAME, str(os.getpid()), os.getpid(), "here")
        publish_address(rendezvous, address)
        return address

    async def _models(self, request: web.Request) -> web.Response:
        names = (NAME, "its-other-name")
        return web.json_response({"data": [{"id": name, "root": "/models/larger"} for name in names]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization", "") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        body = await request.json()
        self.asked.append(body)
        try:
            if self.faults:
                return await self.faults.pop(0)(request, reply_to(body))
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.num_abandoned += 1
            raise
        self.num_answered += 1
        return web.json_response(reply_to(body))


async def _serve(rendezvous: Path, replica: int, seconds: float) -> None:
    server = TeacherServer()
    server.seconds = seconds
    async with server.running():
        server.publish(rendezvous, replica)
        print(socket.gethostname(), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0))
