"""What shows a run elsewhere: a page in Chromium without a window; a server of Weights and Biases on this machine."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

# ------------------------ A page as a browser shows it: Chromium without a window, in a process that ends with the page

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FOUND = next((path for path in map(shutil.which, _NAMES) if path), None)

needs_browser = pytest.mark.skipif(_FOUND is None, reason="no Chromium here: apt-get install chromium")


def dom_of(page: Path, fragment: str = "", *, profile: Path) -> str:
    """The document once its scripts have run.  profile: a directory of its own."""
    return _run("--dump-dom", page, fragment, profile)


def picture_of(page: Path, fragment: str = "", *, profile: Path, size: tuple[int, int] = (1400, 900)) -> Path:
    """A PNG beside the profile."""
    picture = profile.with_suffix(".png")
    width, height = size
    _run(f"--screenshot={picture}", page, fragment, profile, f"--window-size={width},{height}")
    return picture


class Texts(HTMLParser):
    """Texts of the elements whose id, class or tag is one name, each with all that is in it."""

    def __init__(self, document: str, name: str) -> None:
        super().__init__()
        self._name, self._depth, self.found = name, 0, list[str]()
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        is_it = self._name in (tag, known.get("id"), *(known.get("class") or "").split())
        if is_it and not self._depth:
            self.found.append("")
        if (is_it or self._depth) and tag not in ("br", "img", "input", "meta", "link", "hr"):
            self._depth += 1

    def handle_endtag(self, tag: str) -> None:
        self._depth -= self._depth > 0

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.found[-1] += data


def texts_in(document: str, name: str) -> list[str]:
    """Texts of the elements of this id, class or tag, in order."""
    return Texts(document, name).found


def asks_the_network(page: str) -> list[str]:
    """Addresses that a page loads something from."""
    return re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:)[^"'\s>]+|url\((?!["']?data:)[^)]*\)|@import\b""", page)


def _run(action: str, page: Path, fragment: str, profile: Path, *more: str) -> str:
    assert _FOUND is not None
    command = [
        _FOUND,
        "--headless=new",
        "--no-sandbox",  # tests may run as root, and the page is ours
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--virtual-time-budget=20000",
        f"--user-data-dir={profile}",
        *more,
        action,
        f"{page.as_uri()}{fragment}",
    ]
    done = subprocess.run(command, capture_output=True, timeout=150, check=True)
    return done.stdout.decode()


# ------------------- A server of Weights & Biases as far as a run needs one, on this machine: what it is sent, it keeps

API_KEY = "a" * 40
_VIEWER = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}


class WandbServer(ThreadingHTTPServer):
    """history: rows of the one run; ids: names under which runs were begun."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.grown = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": API_KEY,
            "WANDB_MODE": "online",
            "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1",
        }

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "rlhpc", "entity": {"id": "e", "name": "me"}}
        if "upsertBucket" in query:
            self.ids.append(variables["name"])
            bucket = {"id": "b", "name": variables["name"], "displayName": variables["displayName"], "config": "{}"}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0, "project": project}, "inserted": True}}
        if "RunResumeStatus" in query and self.history:
            tail = json.dumps([json.dumps(self.history[-1])])
            lines = {"logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(self.history)}
            bucket = {"id": "b", "name": variables["name"], "displayName": "first", "summaryMetrics": "{}", **lines}
            bucket |= {"historyTail": tail, "eventsTail": "[]", "config": "{}", "tags": [], "wandbConfig": '{"t": 1}'}
            return {"model": {**project, "bucket": bucket}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/file/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if "viewer" in query:
            return {"viewer": _VIEWER, "serverInfo": {"cliVersionInfo": {"max_cli_version": "9"}}}
        return {}

    def stream(self, document: dict[str, Any]) -> None:
        lines = (document.get("files", {}).get("wandb-history.jsonl") or {}).get("content", [])
        with self.grown:
            self.history += map(json.loads, lines)
            self.grown.notify_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        document = self._content()
        if self.path == "/graphql":
            asked = json.loads(document)
            return self._reply({"data": self.server.graphql(asked["query"], asked.get("variables") or {})})
        if self.path.endswith("/file_stream"):
            self.server.stream(json.loads(document))
        return self._reply({"exitcode": None, "limits": {}})

    def do_PUT(self) -> None:
        self._content()
        self._reply({})

    def _content(self) -> bytes:
        content = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def _reply(self, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving() -> Iterator[WandbServer]:
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
