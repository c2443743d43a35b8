"""A service: starts the engine of its [[service]] and answers HTTP requests until it is asked to stop.

Input: JSON in the format of vLLM's server (models.py).  Output: log-probabilities of a teacher, replies of a judge,
scores of a reward model.  Its address and its key are in the run's rendezvous directory from when the engine is ready
until the service leaves.  It keeps its engine when the controller is replaced (lifecycle.py); an engine that dies, or
answers nothing, ends the process, and the supervisor starts it again.

    GET /health, /v1/models                      any
    POST /tokenize                               any whose checkpoint has a tokenizer
    POST /v1/completions                         teacher
    POST /v1/chat/completions                    judge
    POST /classify, /pooling                     reward

Every path but /health wants the key (Authorization: Bearer …).  400: never right; 503: to be tried again, here or at
another replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhpc.base.host_address import host_address
from rlhpc.base.patience import patiently_aside
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.protocol.errors import ConfigError, EngineError, RoleFailed
from rlhpc.protocol.messages import CONTROL, Heartbeat
from rlhpc.roles.lifecycle import (
    ControllerSession,
    RoleContext,
    beat,
    heed_controller,
    hello,
    run_loop,
    serve_controllers,
    stop_event,
    unless_stopped,
)
from rlhpc.roles.service.models import Answer, ServedModel, start_model
from rlhpc.transport.http_server import HttpServer, Refused, has_bearer, json_reply, read_json
from rlhpc.transport.service_address import ServiceAddress, publish_address, withdraw_address

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("rlhpc.service")
MAX_REQUEST_BYTES = 32 << 20
LEAVE_S = 5.0  # for requests under way when the service leaves
WRITE_S = 2.0  # for replies that are being sent when the server is closed
PULSE_S = 30.0  # between two trials of the engine
SILENT_S, SLICES = 300.0, 60  # for its answer
Ask = Callable[[dict[str, Any]], Awaitable[Answer]]


def run(context: RoleContext) -> None:
    """Answer until asked to stop."""
    run_loop(_serve(context))


def own_service(context: RoleContext) -> ServiceConfig:
    """Return the table of this process's service.  Raises ConfigError: the run starts none of this name."""
    found = [each for each in context.config.started_services if each.name == context.service]
    if not found:
        legal = ", ".join(each.name for each in context.config.started_services) or "none"
        raise ConfigError(f"--service {context.service!r}: this run starts no such service; legal: {legal}")
    return found[0]


async def _serve(context: RoleContext) -> None:
    service = own_service(context)
    # As in a generator: until the engine is there, SIGTERM ends this process by its default.
    model = await start_model(context.config, service, replica=context.replica)
    stop = stop_event()
    try:
        endpoint = ServiceEndpoint(context, model)
        await endpoint.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(endpoint.until_dead())
                await serve_controllers(context, stop, partial(_serve_one, endpoint))
                watching.cancel()
        finally:
            await endpoint.leave()
    finally:
        await model.close()


async def _serve_one(endpoint: ServiceEndpoint, session: ControllerSession) -> None:
    """Report to one controller; requests are answered meanwhile, before, and after."""
    control = await unless_stopped(session.stop, asyncio.create_task(session.connect(CONTROL)))
    if control is None:
        return
    async with AsyncExitStack() as stack:
        stack.push_async_callback(control.close)
        await endpoint.publish()  # a new attempt has cleared the directory
        await control.send(hello(session.context))
        interval_s = session.context.config.transport.heartbeat_s
        await session.until_over(beat(control, interval_s, endpoint.heartbeat), heed_controller(control, session))


class ServiceEndpoint:
    """The HTTP server of one model: who may ask, who is being answered, and how it ends."""

    def __init__(
        self, context: RoleContext, model: ServedModel, *, leave_s: float = LEAVE_S, pulse_s: float = PULSE_S
    ) -> None:
        self._context, self._model, self._leave_s, self._pulse_s = context, model, leave_s, pulse_s
        self._key = "sk-" + secrets.token_hex(32)
        self._num_asked = self._num_answered = self._num_refused = 0
        self._is_leaving, self._publishing = False, threading.Lock()
        self._is_idle = asyncio.Event()
        self._death: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self._server = HttpServer(
            log,
            is_allowed=lambda request: request.path == "/health" or has_bearer(request, self._key),
            max_request_bytes=MAX_REQUEST_BYTES,
            limit="the limit of a service",
            ends_abandoned=True,
            shutdown_s=WRITE_S,
        )
        self._server.get("/health", self._health)
        self._server.get("/v1/models", self._models)
        for path, ask in model.routes.items():
            self._server.post(path, partial(self._answer, ask))
        self.address: ServiceAddress | None = None

    async def open(self) -> None:
        """Listen, and publish the address.  Raises RoleFailed, OSError."""
        service, host = self._context.service, host_address()
        try:
            await self._server.open(host)
        except RoleFailed as error:
            raise RoleFailed(f"the service {service} {error}") from error
        self.address = ServiceAddress(
            service=service,
            replica=self._context.replica,
            url=f"{self._server.address}/v1",
            key=self._key,
            model=service,
            incarnation=self._context.incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        await self.publish()
        log.info("%s answers at %s", service, self.address.url)

    async def publish(self) -> None:
        """Publish the address, in place of an earlier incarnation's."""
        address, directory = self.address, self._context.layout.rendezvous
        assert address is not None, "publish() before open()"

        def publish() -> None:
            with self._publishing:  # in a thread that goes on if its caller is cancelled
                if not self._is_leaving:
                    publish_address(directory, address)

        await patiently_aside(publish, directory)

    async def leave(self) -> None:
        """Refuse requests from now on, let those under way end for at most leave_s, and close.  Idempotent."""
        with self._publishing:
            self._is_leaving = True
        if self.address is not None:
            withdraw_address(self._context.layout.rendezvous, self.address)
            self.address = None
        if self._num_asked and not self._death.done():
            self._is_idle.clear()
            try:
                async with asyncio.timeout(self._leave_s):
                    await self._is_idle.wait()
            except TimeoutError:
                log.warning("%d requests are not answered after %g s", self._num_asked, self._leave_s)
        await self._server.close()

    async def until_dead(self) -> None:
        """Wait for the end of the engine, which a request meets, or a trial every pulse_s.  Raises its EngineError."""
        while not self._death.done():
            await asyncio.wait({self._death}, timeout=self._pulse_s)
            if not self._death.done() and (error := await self._try_engine()) and not self._death.done():
                self._death.set_result(error)
        raise self._death.result()

    async def _try_engine(self) -> EngineError | None:
        """Have the engine compute something small; return why it counts as dead.

        A pause of this process, however long, counts for a slice of the patience.
        """
        trial = asyncio.ensure_future(self._model.compute_something())
        either: set[asyncio.Future[Any]] = {trial, self._death}
        try:
            for _ in range(SLICES):
                await asyncio.wait(either, timeout=SILENT_S / SLICES, return_when=FIRST_COMPLETED)
                if trial.done():
                    trial.result()
                    return None
                if self._death.done():
                    return self._death.result()
            return EngineError(f"the engine has not answered within {SILENT_S:g} s")
        except EngineError as error:
            return error
        finally:
            trial.cancel()

    def heartbeat(self) -> Heartbeat:
        """Heartbeat with the requests under way, and what was answered so far."""
        load = self._model.load()
        return Heartbeat(
            state="draining" if self._is_leaving else "running",
            waits_for="" if self._num_asked else "requests",
            policy_version=-1,
            metrics={
                "running": float(min(self._num_asked, load.max_running)),
                "waiting": float(max(0, self._num_asked - load.max_running)),
                "answered": float(self._num_answered),
                "refused": float(self._num_refused),
                "tokens": float(load.num_tokens),
            },
        )

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        if self._is_leaving:
            raise _leaving()
        return json_reply("{}")

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        model = {
            "id": self._context.service,
            "object": "model",
            "created": 0,
            "owned_by": "rlhpc",
            "max_model_len": self._model.max_tokens,
        }
        return json_reply({"object": "list", "data": [model]})

    async def _answer(self, ask: Ask, request: web.Request) -> web.StreamResponse:
        if self._is_leaving:
            raise _leaving()
        body = await read_json(request)
        self._num_asked += 1
        try:
            answer = await ask(self._checked(body))
        except EngineError as error:
            if not self._death.done():
                self._death.set_result(error)
            raise Refused(f"the engine of {self._context.service} has died", status=503, code="engine_died") from error
        except Refused:
            self._num_refused += 1
            raise
        finally:
            self._num_asked -= 1
            if not self._num_asked:
                self._is_idle.set()
        self._num_answered += 1
        return json_reply(answer)

    def _checked(self, body: object) -> dict[str, Any]:
        """Return the body of a request for this model.  Raises Refused."""
        if self._is_leaving:  # while the body arrived
            raise _leaving()
        if not isinstance(body, dict):
            raise Refused("the body is no JSON object")
        name = body.get("model")
        if name not in (None, "", self._context.service):
            raise Refused(
                f"model={name!r}: not here; legal: {self._context.service!r}", status=404, code="model_not_found"
            )
        return body


def _leaving() -> Refused:
    return Refused("this replica of the service is leaving; ask again", status=503, code="leaving")
