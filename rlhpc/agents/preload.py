"""Loads once what every agent would load, in the process whose forks they are, and runs Python programs in such forks.

    host.py ── import agent.preload ── rehearse() ── fork ──▶ run_program(), or the call of a function

An interpreter that starts costs an agent a second of processor time and 50 MB; a fork costs what it changes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import http.server
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlhpc.base.processes import end_with_parent
from rlhpc.base.user_code import load_module, try_out
from rlhpc.protocol.errors import ConfigError

# -------------------------------------------------------------------------------------------------------------- modules


def preload(modules: Sequence[str]) -> None:
    """Import the modules of agent.preload.  Raises ConfigError, with the line where an import failed."""
    for name in modules:
        load_module(f"agent.preload={name!r}", name)


# ------------------------------------------------------------------------------------------------------------ rehearsal
#
# Clients of APIs import half of themselves, and build their models of replies, with the first request: 0.2 s and 15 MB.
# So those that are loaded make a request here, to a server that gives one answer, and forks find all that done.

_LOOPBACK = "127.0.0.1"
_PATIENCE_S = 10.0
_MESSAGES: Any = [{"role": "user", "content": ""}]
_TURN = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ""}}
_ANSWERS = {
    "/v1/chat/completions": {
        "id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [_TURN],
    },
    "/v1/messages": {
        "id": "0", "type": "message", "role": "assistant", "model": "policy", "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": ""}],
        "usage": {"input_tokens": 0, "output_tokens": 0},
    },
}  # fmt: skip


def rehearse() -> None:
    """Have those clients make a request whose packages are loaded.  A failed rehearsal only saves nothing."""
    for package, ask in {"openai": _ask_openai, "anthropic": _ask_anthropic}.items():
        if package in sys.modules:
            with contextlib.suppress(ConfigError), _answering() as address, _without_proxies():
                try_out("agent.preload", package, "a request", partial(ask, address))


def _ask_openai(address: str) -> None:
    from openai import AsyncOpenAI, OpenAI  # here: it is loaded only where an agent loads it

    how: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": "none", "max_retries": 0, "timeout": _PATIENCE_S}

    async def ask() -> None:
        async with AsyncOpenAI(**how) as client:
            await client.chat.completions.create(model="policy", messages=_MESSAGES)

    with OpenAI(**how) as client:
        client.chat.completions.create(model="policy", messages=_MESSAGES)
    asyncio.run(ask())


def _ask_anthropic(address: str) -> None:
    from anthropic import Anthropic, AsyncAnthropic  # here: likewise

    how: dict[str, Any] = {"base_url": address, "api_key": "none", "max_retries": 0, "timeout": _PATIENCE_S}

    async def ask() -> None:
        async with AsyncAnthropic(**how) as client:
            await client.messages.create(model="policy", messages=_MESSAGES, max_tokens=1)

    with Anthropic(**how) as client:
        client.messages.create(model="policy", messages=_MESSAGES, max_tokens=1)
    asyncio.run(ask())


class _Answer(http.server.BaseHTTPRequestHandler):
    """Answers every request to one of these paths alike."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(_ANSWERS[self.path]).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def _answering() -> Iterator[str]:
    """Address of a server in a process of its own, which is killed at the end of the block."""
    with http.server.HTTPServer((_LOOPBACK, 0), _Answer) as server:
        pid = os.fork()
        if not pid:
            try:
                end_with_parent()
                server.serve_forever()
            finally:
                os._exit(0)
        try:
            yield f"http://{_LOOPBACK}:{server.server_port}"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Reach this node directly, in the block."""
    known = dict(os.environ)
    os.environ.update(no_proxy="*", NO_PROXY="*")
    try:
        yield
    finally:
        for name in ("no_proxy", "NO_PROXY"):
            os.environ.pop(name)
            if name in known:
                os.environ[name] = known[name]


# ------------------------------------------------------------------------------------------------------------- programs


def run_program(words: Sequence[str]) -> int:
    """Run a Python program in this process, as `python WORDS` does; return its exit status.

    words: FILE, or -m and MODULE, and arguments.  Its non-daemon threads have ended then, and what it registered with
    atexit has run; the interpreter is not torn down, which would copy every page that it shares.
    """
    try:
        _run_main(words)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        status = 1
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the program, or nobody reads it
            stream.flush()
    return status & 0xFF


def _run_main(words: Sequence[str]) -> None:
    if words[0] == "-m":
        sys.argv = [*words[1:]]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = [*words]
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
