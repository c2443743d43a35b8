"""A page as a browser shows it: Chromium without a window, in a process that ends with the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

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
