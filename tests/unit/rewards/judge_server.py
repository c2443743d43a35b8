"""A small HTTP server that answers as an OpenAI-compatible endpoint does, or fails as one can, by a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """script: what each request is answered with, the last entry for ever; see _Handler.

    A text is the judge's reply, a number a status, "slow", "dribble", "close", "garbage" and "redirect" what they say;
    "hung 503" is an error whose text never comes, bytes are a body, and a function makes one of these of the request.
    """

    daemon_threads = True

    def __init__(self, *script: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.headers: dict[str, str] = {}  # of failures
        self.times: list[float] = []
        self.is_over = threading.Event()
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # who asked has gone, which is what some tests are about


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        judge = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with judge.lock:
            judge.requests.append({"path": self.path, **body})
            judge.keys.append(self.headers.get("Authorization"))
            judge.times.append(time.monotonic())
            answer = judge.script.pop(0) if len(judge.script) > 1 else judge.script[0]
        answer = answer({"path": self.path, **body}) if callable(answer) else answer
        if isinstance(answer, int):
            self._send(answer, b'{"error": "no"}', judge.headers)
        elif answer == "slow":
            judge.is_over.wait()
        elif answer == "dribble":
            self.send_response(200)
            self.end_headers()
            while not judge.is_over.wait(0.05):
                self.wfile.write(b" ")
        elif answer == "hung 503":
            self.send_response(503)
            self.end_headers()
            judge.is_over.wait()
        elif answer == "close":
            self.close_connection = True
        elif isinstance(answer, bytes):
            self._send(200, answer)
        elif answer == "garbage":
            self._send(200, b"<html>busy</html>")
        elif answer == "redirect":
            self._send(302, b"", {"Location": f"http://127.0.0.1:{judge.server_port}/elsewhere"})
        else:
            usage = {"prompt_tokens": 100, "completion_tokens": 7}
            message = {"choices": [{"message": {"role": "assistant", "content": answer}}], "usage": usage}
            self._send(200, json.dumps(message).encode())

    def do_GET(self) -> None:
        self.server.requests.append({"path": self.path})
        self._send(200, b'{"object": "list", "data": [{"id": "listed"}]}')

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@contextmanager
def judging(*script: Any) -> Iterator[JudgeServer]:
    with JudgeServer(*script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            thread.join()
