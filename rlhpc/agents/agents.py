"""Sessions of a generator's agents: a process, an address, a key, and a rollout for each.

Input: RolloutRequest.  Output: an AgentSession for its dialogue, as long as the context lasts.
Endpoint and processes are started with the first session.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from rlhpc.agents.anthropic_format import MESSAGES, error_body
from rlhpc.agents.host import AgentProcesses, Ended
from rlhpc.agents.openai_format import CHAT, TEXT
from rlhpc.agents.responses_format import RESPONSES, response_id
from rlhpc.agents.rows import FIRST
from rlhpc.agents.session import AgentSession, Judge, SessionRules, last_line, outcome_of
from rlhpc.agents.turns import AgentRequest, AgentTurn, Form, SamplingSettings, event
from rlhpc.base.host_address import host_address
from rlhpc.config.rules import Config
from rlhpc.config.tables import AGENT
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.types import RolloutRequest
from rlhpc.rewards.outcomes import DIED, INVALID, RAISED, NoReward, TaskCounts
from rlhpc.transport.http_server import HttpServer, Refused, has_api_key, has_bearer, openai_error, read_json

# ------------------------------------------------------------------------------------------------------------- endpoint
#
# The endpoint of a generator, as OpenAI's and Anthropic's clients know it, only for the agents of its own rollouts.
#
#     POST /SESSION/v1/chat/completions    the policy's next turn
#     POST /SESSION/v1/responses           the same, as a response
#     POST /SESSION/v1/messages            the same, as a message of Anthropic's API
#     POST /SESSION/v1/completions         the same after a plain text or token ids
#     POST /SESSION/v1/messages/count_tokens
#     GET  /SESSION/v1/models              one name; any other is accepted, too
#     POST /SESSION/v1/reward              what the rollout has earned, as a reward function may return it, in JSON
#
# Every request carries the key of its session (Authorization: Bearer …, or x-api-key).  Keys are made from a secret
# that this process draws when it starts and keeps to itself.  A request without the right key gets a 401 without
# details.

log = logging.getLogger("rlhpc.agents")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Access:
    """Address and key with which an agent reaches its session; the key is not for logs."""

    address: str  # for Anthropic's clients, which add /v1 themselves
    key: str

    @property
    def base_url(self) -> str:
        """Address for OpenAI's clients."""
        return f"{self.address}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of an agent, by which clients find the endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.address,
            "ANTHROPIC_API_KEY": self.key,
            **_without_proxy(self.address),
        }


class AgentServer:
    """HTTP server for the sessions of a generator."""

    def __init__(self, *, run: SamplingSettings, max_request_bytes: int) -> None:
        self._run, self._secret = run, secrets.token_bytes(32)
        self._sessions: dict[str, AgentSession] = {}
        self._server = HttpServer(
            log,
            is_allowed=self._is_allowed,
            max_request_bytes=max_request_bytes,
            limit="agent.max_request_bytes",
            error_body=_error_body,
        )
        for path, form in (("chat/completions", CHAT), ("completions", TEXT), ("messages", MESSAGES)):
            self._server.post(f"/{{session}}/v1/{path}", partial(self._answer, form))
        self._server.post("/{session}/v1/responses", self._respond)
        self._server.post("/{session}/v1/messages/count_tokens", self._count)
        self._server.post("/{session}/v1/reward", self._reward)
        self._server.get("/{session}/v1/models", self._models)

    async def open(self, reach: str) -> None:
        """Listen on a port that the kernel chooses; reach: generation.endpoint.  Raises RoleFailed."""
        host = LOOPBACK if reach == "local" else host_address()
        try:
            await self._server.open(host)
        except RoleFailed as error:
            raise RoleFailed(f"the endpoint for agents {error}") from error
        log.info("agents sample at %s", self.address)

    @property
    def address(self) -> str:
        """http://HOST:PORT, once it is open."""
        return self._server.address

    async def close(self) -> None:
        """Refuse further requests, and end those under way.  Idempotent."""
        await self._server.close()

    def admit(self, session: AgentSession) -> Access:
        """Accept requests to a session from now on, with this key."""
        self._sessions[session.name] = session
        return Access(f"{self.address}/{session.name}", self._key_of(session.name))

    def dismiss(self, session: AgentSession) -> None:
        """Refuse further requests to a session."""
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]

    # --------------------------------------------------------------------------------------------------- who may enter

    def _key_of(self, name: str) -> str:
        return "sk-" + hmac.digest(self._secret, name.encode(), "sha256").hex()

    def _is_allowed(self, request: web.Request) -> bool:
        name = request.path.removeprefix("/").partition("/")[0]  # of CONNECT and of "*" there is no path
        key = self._key_of(name)
        return has_bearer(request, key) or has_api_key(request, key)

    # -------------------------------------------------------------------------------------------------- what is offered

    def _session(self, request: web.Request) -> AgentSession:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise Refused("the session is over", status=410, code="session_over")
        return session

    async def _answer(self, form: Form, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = form.read(await read_json(request), self._run)
        return await self._told(form, request, session, asked, await session.ask(asked))

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = RESPONSES.read(await read_json(request), self._run)
        turn = await session.ask(session.responses.continued(asked))
        session.responses.keep(response_id(session.name, turn), asked, turn)
        return await self._told(RESPONSES, request, session, asked, turn)

    @staticmethod
    async def _told(
        form: Form, request: web.Request, session: AgentSession, asked: AgentRequest, turn: AgentTurn
    ) -> web.StreamResponse:
        """The reply with a turn."""
        if not asked.is_streamed:
            return web.json_response(form.whole(session.name, turn, asked))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        for piece in form.pieces(session.name, turn, asked):
            await stream.write(event(piece))
        await stream.write_eof(form.ending)
        return stream

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = MESSAGES.read(await read_json(request), self._run)
        return web.json_response({"input_tokens": session.count(asked)})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            outcome = outcome_of(await read_json(request))
        except NoReward as error:
            raise Refused(f"no reward: {error}") from error
        session.report(outcome)
        return web.json_response({"is_reported": True})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rlhpc"}
        model |= {"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}  # for Anthropic's
        more = {"has_more": False, "first_id": "policy", "last_id": "policy"}
        return web.json_response({"object": "list", "data": [model], **more})


def _error_body(request: web.Request, status: int, message: str, code: str) -> dict[str, Any]:
    """An error in the shape of the API that was asked."""
    is_anthropic = "/v1/messages" in request.path or "anthropic-version" in request.headers
    return (error_body if is_anthropic else openai_error)(status, message, code)


# --------------------------------------------------------------------------------------------------------------- agents

MOST_TEMPLATES = 64  # sets of tools


class Agents:
    """The agents of one generator; lives on when its controller changes."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        agent = config.agent
        self._config, self._tokenizer = config, tokenizer
        self._endpoint: AgentServer | None = None
        self._processes = AgentProcesses(agent.function, agent.command, agent.preload)
        self._templates: dict[str, DialogueTemplate] = {}
        self._rules = SessionRules(
            config.environment.call_form,
            agent.turn_timeout_s,
            self._template_for,
            max_rows=agent.max_rows,
            max_turns=config.environment.max_turns,
        )
        self.counts = TaskCounts()  # sessions, their failures and further rows, under the name "agent"
        self._places, self._opening = asyncio.Semaphore(agent.max_sessions), asyncio.Lock()
        self._placed: set[str] = set()  # sessions with a place

    @asynccontextmanager
    async def session(self, request: RolloutRequest, judge: Judge | None) -> AsyncIterator[AgentSession]:
        """Session of a rollout's agent, which starts at the first wait and is killed at the end of the block.

        judge: scores the last turn, if the dataset has such a task.
        """
        session = AgentSession(
            secrets.token_hex(8),
            self._rules,
            judge,
            partial(self._begin, request.prompt.reference),
            max_tokens=request.sampling.max_tokens,
        )
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
        await self._processes.start(session.name, record, access.variables, partial(_ended, session))

    def _finish(self, session: AgentSession) -> None:
        self._processes.kill(session.name)
        if self._endpoint is not None:
            self._endpoint.dismiss(session)
        session.close()
        if session.name in self._placed:
            self._placed.remove(session.name)
            self._places.release()
        if session.is_settled:
            opened = Counter(f"rows_{row.why}" for row in session.rows.all if row.why != FIRST)
            self.counts.count(AGENT, session.waited_s, session.failure, costs=opened)

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
