"""The process that starts agents: what it cannot start costs it nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from rlhpc.roles.generator.agents.host import Host


def test_an_agent_that_cannot_be_forked_leaves_no_open_file_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    inbox, outbox = os.pipe()
    host = Host(None, ("true",), inbox, outbox)
    monkeypatch.setattr(os, "fork", no_process)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        host._start("one", "{}", {})
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    said = json.loads(os.read(inbox, 1 << 16).splitlines()[0])
    assert (said["ended"], said["why"]) == ("one", "no process can be started: Resource temporarily unavailable")
    for descriptor in (inbox, outbox):
        os.close(descriptor)
