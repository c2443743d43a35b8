"""HTTP servers of a run: on a port that the kernel chooses, for clients that have the key.

Input: routes, and who is allowed.  Output: JSON.  A request without the right key gets a 401 before its body is read;
any other refusal is an error in the form of OpenAI's API, {"error": {"message", "type", "param", "code"}}, or in one of
the server's own.  No reply shows versions of libraries.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlhpc.base.processes import allow_many_connections
from rlhpc.protocol.errors import RoleFailed

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
IDLE_CONNECTION_S = 75.0
BODY_S = 60.0  # for the body of a request to arrive


class Refused(Exception):
    """A refused request; status, code and message are for the client."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _OnlyOurs(logging.LoggerAdapter[logging.Logger]):
    """Drops records of requests that are not HTTP: anyone who reaches the port could fill the log with tracebacks."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log as a logger does."""
        if not isinstance(kwargs.get("exc_info"), HttpProcessingError):
            super().log(level, msg, *args, **kwargs)


def openai_error(status: int, message: str, code: str) -> dict[str, Any]:
    """Return an error in the form of OpenAI's API; from 500 on it is the server's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


ErrorBody = Callable[[web.Request, int, str, str], Mapping[str, Any]]  # request, status, message, code


class HttpServer:
    """An HTTP server that is open from open() to close(); routes are added before."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        is_allowed: Callable[[web.Request], bool],
        max_request_bytes: int,
        limit: str,
        ends_abandoned: bool = False,
        shutdown_s: float = 0.1,
        error_body: ErrorBody = lambda _request, *error: openai_error(*error),
    ) -> None:
        """limit: name of max_request_bytes in refusals.  ends_abandoned: cancel the work for clients that hang up.

        shutdown_s: for requests under way when the server is closed.
        """
        self._log, self._is_allowed, self._limit = log, is_allowed, f"{limit}={max_request_bytes}"
        self._ends_abandoned, self._shutdown_s, self._error_body = ends_abandoned, shutdown_s, error_body
        self._app = web.Application(middlewares=[self._guarded], client_max_size=max_request_bytes)
        self._app.on_response_prepare.append(_without_server)
        self._runner: web.AppRunner | None = None
        self.address = ""  # http://HOST:PORT, once it is open

    def post(self, path: str, handler: Handler) -> None:
        """Serve POST requests of a path."""
        self._app.router.add_post(path, handler, expect_handler=self._expect)

    def get(self, path: str, handler: Handler) -> None:
        """Serve GET requests of a path."""
        self._app.router.add_get(path, handler)

    async def open(self, host: str) -> None:
        """Listen on a free port of this address.  Raises RoleFailed."""
        allow_many_connections()  # each connection holds one
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=IDLE_CONNECTION_S,
            shutdown_timeout=self._shutdown_s,
            logger=_OnlyOurs(self._log, {}),
            handler_cancellation=self._ends_abandoned,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise RoleFailed(f"cannot listen on {host}: {error}") from error
        port = self._runner.addresses[0][1]
        self.address = f"http://{host}:{port}"

    async def close(self) -> None:
        """Refuse further requests, and end those under way.  Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer "Expect: 100-continue": 401 without the right key, as for any request."""
        if not self._is_allowed(request):
            return web.Response(status=401)
        if request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._is_allowed(request):
            return web.Response(status=401)
        try:
            return await handler(request)
        except Refused as refusal:
            status, message, code = refusal.status, str(refusal), refusal.code
        except web.HTTPException as error:
            status, message, code = error.status, f"{request.method} {request.path}: {error.reason}", "no_such_thing"
            if status == 413:
                message, code = f"the request is longer than {self._limit}", "request_too_large"
        return web.json_response(self._error_body(request, status, message, code), status=status)


def has_bearer(request: web.Request, key: str) -> bool:
    """Return whether the request has this key; takes as long for any wrong one."""
    kind, _, said = request.headers.get("Authorization", "").partition(" ")
    is_right = _is_key(said, key)
    return is_right and kind.lower() == "bearer"


def has_api_key(request: web.Request, key: str) -> bool:
    """Return whether the request has this key as Anthropic's clients send it; takes as long for any wrong one."""
    return _is_key(request.headers.get("x-api-key", ""), key)


def _is_key(said: str, key: str) -> bool:
    return hmac.compare_digest(said.strip().encode(errors="replace"), key.encode())


async def read_json(request: web.Request) -> Any:
    """Return the request's body.  Raises Refused: it is no JSON, no valid text, or does not arrive within BODY_S."""
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError as error:
        raise Refused(f"the body has not arrived within {BODY_S:g} s", status=408, code="request_timeout") from error
    try:
        return _without_halves(json.loads(body))
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


def json_reply(answer: str | Mapping[str, Any]) -> web.Response:
    """Return a reply of this JSON; a text is sent as it is."""
    return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer), content_type="application/json")
