"""A controller that is stopped while a write is under way loses nothing, writes nothing twice, and ends well.

Each kind of file is held in the middle of a write, by another thread than the event loop's, while the stop comes and
the controller says farewell and closes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlhpc.buffer.lost_leases import LineFile
from rlhpc.roles.controller import frame
from rlhpc.roles.controller.run_status import TimelineEntry
from tests.patience import PATIENCE_S
from tests.simulator.real_time import Attempted, RealTime, WatchedDisk
from tests.unit.roles.small_ring import prompt

CLOSING_FOR_S = 0.2  # before the write goes on
HELD = (
    "journal_0",
    "events_0",
    "segment_0",
    "partials_0",
    "lost_leases.jsonl",
    "status.json",
    "timeline.jsonl",
    "controller.json",  # of a checkpoint
    "COMPLETE",
)
SECTIONS = {
    "checkpoint": {"every_steps": 1},
    "buffer": {"segment_groups": 1, "partial_interval_tokens": 1, "partial_interval_s": 0.01},
}


async def until(disk: WatchedDisk) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not disk.is_holding.is_set():  # noqa: ASYNC110  a thread says so
            await asyncio.sleep(0.002)


@pytest.mark.starts
@pytest.mark.parametrize("held", HELD)
def test_a_stop_in_the_middle_of_a_write_neither_overlaps_nor_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setattr(frame, "SHOWN_S", 0.05)
    run, disk = RealTime(tmp_path / "run", 1, **SECTIONS), WatchedDisk(held=held)

    async def stop(attempted: Attempted) -> None:
        attempted.controller.state.lost_leases.record_death([(prompt(0), 1)])
        await until(disk)
        attempted.stop._request(0.0)  # as when the patience of an interrupt is over
        while not attempted.is_closing:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        asyncio.get_running_loop().run_in_executor(None, release)

    def release() -> None:
        """From a thread, for the event loop may be what waits."""
        disk._is_free.wait(CLOSING_FOR_S)
        disk.release()

    async def nothing(_: Attempted) -> None:
        pass

    with disk.installed():
        assert run.attempt(stop) == 0
    assert disk.is_holding.is_set()
    assert disk.overlaps == []
    assert run.problem() == ""
    assert run.attempt(nothing) == 0
    assert run.layout.summary.exists()
    assert run.problem() == ""
    lines = LineFile(run.layout.timeline, TimelineEntry).read()
    assert len(lines) == len({(line.unix_time_s, line.event, line.name) for line in lines})
