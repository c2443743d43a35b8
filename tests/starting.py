"""`make quick` holds tests to their mark: one that starts a program or a process is marked `starts` and left out.

Without this check it would fill up with them again.
"""

from __future__ import annotations

import _posixsubprocess
import multiprocessing.forkserver
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

WAYS: tuple[tuple[Any, str], ...] = (
    (_posixsubprocess, "fork_exec"),  # multiprocessing, by spawn
    (subprocess, "_fork_exec"),
    (os, "posix_spawn"),
    (os, "fork"),
    (multiprocessing.forkserver, "connect_to_new_process"),
)


class StartingIsMarked:
    """A plugin: starting fails in a test that is not marked."""

    def __init__(self) -> None:
        self._test = ""  # that may start nothing

    def pytest_configure(self) -> None:
        """From now on every way to start a process looks whether it is open."""
        for module, name in WAYS:
            setattr(module, name, self._watched(getattr(module, name)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Its fixtures count as the test's."""
        self._test = item.nodeid
        try:
            return (yield)
        finally:
            self._test = ""

    def _watched(self, way: Callable[..., Any]) -> Callable[..., Any]:
        def start(*arguments: Any, **keywords: Any) -> Any:
            if test := self._test:
                self._test = ""  # what pytest itself starts to report it
                pytest.fail(f"{test} starts a process and is not marked `starts`: `make quick` would run it")
            return way(*arguments, **keywords)

        return start
