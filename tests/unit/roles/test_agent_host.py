"""The process that starts agents: what it cannot start costs it nothing, and what it has loaded its agents share."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from rlhpc.agents.host import AgentProcesses, Ended, Host
from tests.patience import PATIENCE_S


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


@pytest.mark.starts
async def test_agents_share_what_was_loaded_and_no_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "import os, random, numpy.random\nLOADED_BY = os.getpid()\ndef draw(record):\n"
    module += "    return {'reward': 0, 'detail': f'{LOADED_BY} {random.random()} {numpy.random.random()}'}\n"
    (tmp_path / "agents_that_draw.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    processes, told = AgentProcesses("agents_that_draw:draw", ()), asyncio.Queue[Ended]()
    for session in range(8):
        await processes.start(str(session), "{}", {}, told.put_nowait)
    async with asyncio.timeout(PATIENCE_S):
        ended = [await told.get() for _ in range(8)]
    await processes.close()
    hosts, python, numpy = zip(*(json.loads(each.said)["detail"].split() for each in ended), strict=True)
    assert (len({*hosts}), len({*python}), len({*numpy})) == (1, 8, 8)


@pytest.mark.starts
async def test_agents_of_a_host_that_cannot_be_listened_to_have_ended_and_the_next_one_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agents_that_wait.py").write_text("import time\ndef wait(record):\n    time.sleep(record['s'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    processes, told = AgentProcesses("agents_that_wait:wait", ()), asyncio.Queue[Ended]()

    def fail(_: Ended) -> None:
        raise MemoryError

    await processes.start("waits", '{"s": 3600}', {}, told.put_nowait)
    await processes.start("ends", '{"s": 0}', {}, fail)
    async with asyncio.timeout(PATIENCE_S):
        assert "the process that starts agents ended with status" in (await told.get()).fault
        await processes.start("again", '{"s": 0}', {}, told.put_nowait)
        assert (await told.get()).fault == ""
    assert processes.num_hosts == 2
    await processes.close()


@pytest.mark.starts
async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    processes, told = AgentProcesses("", (str(tmp_path / "solve"),)), asyncio.Queue[Ended]()
    await processes.start("one", "{}", {}, told.put_nowait)
    async with asyncio.timeout(PATIENCE_S):
        ended = await told.get()
    await processes.close()
    assert ended.fault == f"it ended with exit status 127: {tmp_path / 'solve'}: No such file or directory"
