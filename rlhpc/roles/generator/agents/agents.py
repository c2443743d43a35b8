"""Sessions of a generator's agents: a process, an address, a key, and a rollout for each.

Input: RolloutRequest.  Output: an AgentSession that is the environment of its dialogue, as long as the context lasts.
Endpoint and processes are started with the first session.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlhpc.config import Config
from rlhpc.config_data import AGENT
from rlhpc.data.dialogue_template import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.rewards.failures import DIED, INVALID, RAISED, TaskCounts
from rlhpc.rewards.returned import NoReward
from rlhpc.roles.generator.agents.processes import AgentProcesses, Ended
from rlhpc.roles.generator.agents.reports import last_line
from rlhpc.roles.generator.agents.requests import Sampled
from rlhpc.roles.generator.agents.session import AgentSession, Judge, Rules
from rlhpc.types import RolloutRequest

if TYPE_CHECKING:
    from rlhpc.roles.generator.agents.endpoint import Endpoint

MOST_TEMPLATES = 64  # sets of tools


class Agents:
    """Of one generator; outlives its sessions with controllers."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        agent = config.agent
        self._config, self._tokenizer = config, tokenizer
        self._endpoint: Endpoint | None = None
        self._processes = AgentProcesses(agent.function, agent.command)
        self._templates: dict[str, DialogueTemplate] = {}
        self._rules = Rules(config.environment.call_form, agent.turn_timeout_s, self._template_for)
        self.counts = TaskCounts()  # sessions and their failures, under the name "agent"
        self._places, self._opening = asyncio.Semaphore(agent.max_sessions), asyncio.Lock()
        self._placed: set[str] = set()  # sessions

    @asynccontextmanager
    async def session(self, request: RolloutRequest, judge: Judge | None) -> AsyncIterator[AgentSession]:
        """The agent of a rollout, which is started when it is waited for; what is left of it at the end is killed.

        judge: of the last turn, where the dataset's task is one.
        """
        session = AgentSession(secrets.token_hex(8), self._rules, judge, partial(self._begin, request.prompt.reference))
        try:
            yield session
        finally:
            self._finish(session)

    async def _begin(self, record: str, session: AgentSession) -> None:
        """Wait for a place, and start the process.  Raises RoleFailed if there can be none."""
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

    async def _open(self) -> Endpoint:
        async with self._opening:
            if self._endpoint is None:
                # Its library is of an extra, and nobody else's matter.
                from rlhpc.roles.generator.agents.endpoint import Endpoint

                generation, agent = self._config.generation, self._config.agent
                endpoint = Endpoint(
                    run=Sampled(generation.temperature, generation.stop), max_request_bytes=agent.max_request_bytes
                )
                await endpoint.open(generation.endpoint)
                self._endpoint = endpoint
            return self._endpoint

    def _template_for(self, tools: Sequence[Mapping[str, Any]]) -> DialogueTemplate:
        """Raises ConfigError if there is none with these tools."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._templates:
            if len(self._templates) >= MOST_TEMPLATES:
                self._templates.pop(next(iter(self._templates)))
            self._templates[key] = DialogueTemplate(self._tokenizer, tools)
        return self._templates[key]


def _without_proxy(url: str) -> dict[str, str]:
    """Variables by which a client goes to this address itself, where a site's http_proxy would send it elsewhere."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = known if known.strip() == "*" else ",".join(filter(None, (known, urlsplit(url).hostname)))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def _ended(session: AgentSession, ended: Ended) -> None:
    """The process is gone: what it has printed is its report, unless it has reported before."""
    if ended.fault:
        session.fail(ended.fault, RAISED if ended.status > 0 else DIED)
        return
    try:
        session.report(last_line(ended.said))
    except NoReward as error:
        session.fail(str(error), INVALID)
