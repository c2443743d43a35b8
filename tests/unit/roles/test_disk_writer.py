"""Lanes of disk work: in order, never two at a time, and done whoever waits for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from rlhpc.roles.controller.persistence import DiskLane, DiskWriter
from tests.patience import PATIENCE_S


class Gate:
    """Jobs that note when they begin and end, and wait in between."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def hold(self, name: str) -> str:
        self.seen.append(f"{name} begins")
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        self.seen.append(f"{name} ends")
        return name

    async def until_held(self) -> None:
        await asyncio.to_thread(self.has_begun.wait, PATIENCE_S)


async def test_the_job_of_a_cancelled_task_is_done_before_the_next_one_begins() -> None:
    lane, gate = DiskLane("any"), Gate()
    writing = asyncio.create_task(lane.run(gate.hold, "first"))
    waiting = asyncio.create_task(lane.run(gate.seen.append, "second"))
    await gate.until_held()
    for task in (writing, waiting):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    last = asyncio.create_task(lane.run(gate.seen.append, "last"))
    await asyncio.sleep(0)
    assert gate.seen == ["first begins"]
    gate.may_end.set()
    await last
    assert gate.seen == ["first begins", "first ends", "second", "last"]


async def test_a_lane_waits_for_no_other() -> None:
    disk, gate = DiskWriter(), Gate()
    checkpoint = asyncio.create_task(disk.checkpoints.run(gate.hold, "checkpoint"))
    await gate.until_held()
    assert await asyncio.wait_for(disk.journal.run(lambda: "commit"), PATIENCE_S) == "commit"
    assert not checkpoint.done()
    gate.may_end.set()
    assert await checkpoint == "checkpoint"


async def test_what_a_job_raises_reaches_its_task_or_the_log(caplog: pytest.LogCaptureFixture) -> None:
    lane, gate = DiskLane("journal"), Gate()

    def fail() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        await lane.run(fail)
    held = asyncio.create_task(lane.run(gate.hold, "first"))
    failing = asyncio.create_task(lane.run(fail))
    await gate.until_held()
    failing.cancel()
    await asyncio.wait((failing,))
    gate.may_end.set()
    await held
    await lane.run(lambda: None)
    assert "journal: a write that nobody waited for any more has failed: the disk is full" in caplog.text


async def test_closing_waits_for_all_that_was_given_and_names_what_hangs() -> None:
    disk, gate = DiskWriter(), Gate()
    hanging = asyncio.create_task(disk.segments.run(gate.hold, "segment"))
    done = asyncio.create_task(disk.notes.run(gate.seen.append, "status"))
    await gate.until_held()
    assert await disk.close(0.05) == ["segments"]
    assert "status" in gate.seen
    await done
    gate.may_end.set()
    assert await asyncio.wait_for(hanging, PATIENCE_S) == "segment"
    assert await disk.close(PATIENCE_S) == []


@pytest.mark.starts
def test_a_job_that_never_ends_keeps_no_process_from_ending() -> None:
    program = """
import asyncio, threading
from rlhpc.roles.controller.persistence import DiskWriter

async def main():
    disk = DiskWriter()
    asyncio.ensure_future(disk.journal.run(threading.Event().wait))
    await asyncio.sleep(0)
    print(await disk.close(0.1))

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=10 * PATIENCE_S)
    assert (ended.stdout, ended.returncode) == ("['journal']\n", 0), ended.stderr
