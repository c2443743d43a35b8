"""Sessions of a generator's agents: a process, an address, a key, and a rollout for each.

Input: RolloutRequest.  Output: an AgentSession that is the environment of its dialogue, as long as the context lasts.
Endpoint and processes are started with the first session.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlhpc.agents.host import AgentProcesses, Ended
from rlhpc.agents.openai_format import (
    AgentRequest,
    AgentTurn,
    Refused,
    SamplingSettings,
    chunks,
    completion,
    event,
    read_request,
    read_text_request,
    text_chunks,
    text_completion,
)
from rlhpc.agents.session import AgentSession, Judge, SessionRules, last_line, outcome_of
from rlhpc.base.host_address import host_address
from rlhpc.config.rules import Config
from rlhpc.config.tables import AGENT
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.types import RolloutRequest
from rlhpc.rewards.outcomes import DIED, INVALID, RAISED, NoReward, TaskCounts

# ------------------------------------------------------------------------------------------------------------- endpoint
#
# The OpenAI-compatible endpoint of a generator, only for the agents of its own rollouts.
#
#     POST /SESSION/v1/chat/completions    the policy's next turn
#     POST /SESSION/v1/completions         the same after a plain text or token ids
#     GET  /SESSION/v1/models              one name; any other is accepted, too
#     POST /SESSION/v1/reward              what the rollout has earned, as a reward function may return it, in JSON
#
# Every request carries the key of its session (Authorization: Bearer …).  Keys are made from a secret that this process
# draws when it starts and keeps to itself.  A request without the right key gets a 401 without details.

log = logging.getLogger("rlhpc.agents")
LOOPBACK = "127.0.0.1"
IDLE_CONNECTION_S = 75.0
SHUTDOWN_S = 0.1  # for requests under way; their sessions are over
_Read = Callable[[object, SamplingSettings], AgentRequest]
_Whole = Callable[[str, AgentTurn, AgentRequest], dict[str, Any]]
_Pieces = Callable[[str, AgentTurn, AgentRequest], Iterator[dict[str, Any]]]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Access:
    """Address and key with which an agent reaches its session; the key is not for logs."""

    base_url: str
    key: str


class _OnlyOurs(logging.LoggerAdapter[logging.Logger]):
    """Drops records of requests that are not HTTP: anyone who reaches the port could fill the log with tracebacks."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log as a logger does."""
        if not isinstance(kwargs.get("exc_info"), HttpProcessingError):
            super().log(level, msg, *args, **kwargs)


class AgentServer:
    """HTTP server for the sessions of a generator."""

    def __init__(self, *, run: SamplingSettings, max_request_bytes: int) -> None:
        self._run, self._max_request_bytes = run, max_request_bytes
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, AgentSession] = {}
        self._runner: web.AppRunner | None = None
        self.address = ""  # http://HOST:PORT, once it is open

    async def open(self, reach: str) -> None:
        """Listen on a port that the kernel chooses; reach: generation.endpoint.  Raises RoleFailed."""
        app = web.Application(middlewares=[self._guarded], client_max_size=self._max_request_bytes)
        app.router.add_post("/{session}/v1/chat/completions", self._complete, expect_handler=self._expect)
        app.router.add_post("/{session}/v1/completions", self._complete_text, expect_handler=self._expect)
        app.router.add_post("/{session}/v1/reward", self._reward, expect_handler=self._expect)
        app.router.add_get("/{session}/v1/models", self._models)
        app.on_response_prepare.append(_without_server)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=IDLE_CONNECTION_S,
            shutdown_timeout=SHUTDOWN_S,
            logger=_OnlyOurs(log, {}),
        )
        await self._runner.setup()
        host = LOOPBACK if reach == "local" else host_address()
        site = web.TCPSite(self._runner, host, 0)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise RoleFailed(f"the endpoint for agents cannot listen on {host}: {error}") from error
        port = self._runner.addresses[0][1]
        self.address = f"http://{host}:{port}"
        log.info("agents sample at %s", self.address)

    async def close(self) -> None:
        """Refuse further requests, and end those under way.  Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()

    def admit(self, session: AgentSession) -> Access:
        """Accept requests to a session from now on, with this key."""
        self._sessions[session.name] = session
        return Access(f"{self.address}/{session.name}/v1", self._key_of(session.name))

    def dismiss(self, session: AgentSession) -> None:
        """Refuse further requests to a session."""
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]

    # --------------------------------------------------------------------------------------------------- who may enter

    def _key_of(self, name: str) -> str:
        return "sk-" + hmac.digest(self._secret, name.encode(), "sha256").hex()

    def _is_allowed(self, request: web.Request) -> bool:
        name = request.path.removeprefix("/").partition("/")[0]  # of CONNECT and of "*" there is no path
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        wanted = self._key_of(name)
        is_right = hmac.compare_digest(key.strip().encode(errors="replace"), wanted.encode())
        return is_right and kind.lower() == "bearer"

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer "Expect: 100-continue": 401 without the right key, as for any request."""
        if not self._is_allowed(request):
            return web.Response(status=401)
        if request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if not self._is_allowed(request):
            return web.Response(status=401)
        try:
            return await handler(request)
        except Refused as refusal:
            return _error(refusal.status, str(refusal), refusal.code)
        except web.HTTPException as error:
            if error.status == 413:
                said = f"the request is longer than agent.max_request_bytes={self._max_request_bytes}"
                return _error(413, said, "request_too_large")
            return _error(error.status, f"{request.method} {request.path}: {error.reason}", "no_such_thing")

    # -------------------------------------------------------------------------------------------------- what is offered

    def _session(self, request: web.Request) -> AgentSession:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise Refused("the session is over", status=410, code="session_over")
        return session

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, read_request, completion, chunks)

    async def _complete_text(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, read_text_request, text_completion, text_chunks)

    async def _answered(self, request: web.Request, read: _Read, whole: _Whole, pieces: _Pieces) -> web.StreamResponse:
        session = self._session(request)
        asked = read(_without_halves(await _json(request)), self._run)
        turn = await session.ask(asked)
        if not asked.is_streamed:
            return web.json_response(whole(session.name, turn, asked))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        for chunk in pieces(session.name, turn, asked):
            await stream.write(event(chunk))
        await stream.write(event(None))
        await stream.write_eof()
        return stream

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            outcome = outcome_of(await _json(request))
        except NoReward as error:
            raise Refused(f"no reward: {error}") from error
        session.report(outcome)
        return web.json_response({"is_reported": True})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rlhpc"}
        return web.json_response({"object": "list", "data": [model]})


async def _json(request: web.Request) -> Any:
    body = await request.read()
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error


def _without_halves(body: Any) -> Any:
    """Return the body.  Raises Refused: JSON can spell half a surrogate pair, which no tokenizer reads."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = str(error.object)[error.start]
        raise Refused(f"the body holds {half!r}, half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise Refused(f"the body is nested too deeply: {error}") from error
    return body


async def _without_server(_request: web.Request, response: web.StreamResponse) -> None:
    """Remove the Server header, which shows versions of libraries."""
    response.headers.pop("Server", None)


def _error(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


# --------------------------------------------------------------------------------------------------------------- agents

MOST_TEMPLATES = 64  # sets of tools


class Agents:
    """The agents of one generator; lives on when its controller changes."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        agent = config.agent
        self._config, self._tokenizer = config, tokenizer
        self._endpoint: AgentServer | None = None
        self._processes = AgentProcesses(agent.function, agent.command)
        self._templates: dict[str, DialogueTemplate] = {}
        self._rules = SessionRules(config.environment.call_form, agent.turn_timeout_s, self._template_for)
        self.counts = TaskCounts()  # sessions and their failures, under the name "agent"
        self._places, self._opening = asyncio.Semaphore(agent.max_sessions), asyncio.Lock()
        self._placed: set[str] = set()  # sessions with a place

    @asynccontextmanager
    async def session(self, request: RolloutRequest, judge: Judge | None) -> AsyncIterator[AgentSession]:
        """Session of a rollout's agent, which starts at the first wait and is killed at the end of the block.

        judge: scores the last turn, if the dataset has such a task.
        """
        session = AgentSession(secrets.token_hex(8), self._rules, judge, partial(self._begin, request.prompt.reference))
        try:
            yield session
        finally:
            self._finish(session)

    async def _begin(self, record: str, session: AgentSession) -> None:
        """Wait for a place, and start the process.  Raises RoleFailed if it cannot be started."""
        await self._places.acquire()
        self._placed.add(session.name)
        endpoint = await self._open()
        access = endpoint.admit(session)
        variables = {
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_KEY": access.key,
            **_without_proxy(access.base_url),
        }
        await self._processes.start(session.name, record, variables, partial(_ended, session))

    def _finish(self, session: AgentSession) -> None:
        self._processes.kill(session.name)
        if self._endpoint is not None:
            self._endpoint.dismiss(session)
        session.close()
        if session.name in self._placed:
            self._placed.remove(session.name)
            self._places.release()
        if session.is_settled:
            self.counts.count(AGENT, session.waited_s, session.failure)

    async def close(self) -> None:
        """End all of them.  Idempotent."""
        await self._processes.close()
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _open(self) -> AgentServer:
        async with self._opening:
            if self._endpoint is None:
                generation, agent = self._config.generation, self._config.agent
                endpoint = AgentServer(
                    run=SamplingSettings(generation.temperature, generation.stop),
                    max_request_bytes=agent.max_request_bytes,
                )
                await endpoint.open(generation.endpoint)
                self._endpoint = endpoint
            return self._endpoint

    def _template_for(self, tools: Sequence[Mapping[str, Any]]) -> DialogueTemplate:
        """Template with these tools, cached.  Raises ConfigError if the chat template refuses them."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._templates:
            if len(self._templates) >= MOST_TEMPLATES:
                self._templates.pop(next(iter(self._templates)))
            self._templates[key] = DialogueTemplate(self._tokenizer, tools)
        return self._templates[key]


def _without_proxy(url: str) -> dict[str, str]:
    """Environment variables that exempt this address from a site's http_proxy."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = known if known.strip() == "*" else ",".join(filter(None, (known, urlsplit(url).hostname)))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def _ended(session: AgentSession, ended: Ended) -> None:
    """End the session of a process that has ended: its output is its report, unless it has reported before."""
    if ended.fault:
        session.fail(ended.fault, RAISED if ended.status > 0 else DIED)
        return
    try:
        session.report(last_line(ended.said))
    except NoReward as error:
        session.fail(str(error), INVALID)
