"""Disk work of the controller: lanes, the journal and what generators may forget, reports of running rollouts."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.base import patience
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.history import START, read_history
from rlhpc.buffer.prefixes import (
    PartialIntake,
    PartialLog,
    PartialRollout,
    encode_partials,
    partial_paths,
    read_partials,
)
from rlhpc.buffer.rollout_journal import open_journal
from rlhpc.protocol.errors import JournalError
from rlhpc.protocol.messages import LEASES, CancelGroup, Delivered, Delivery, LeaseProgress, ShowWhole
from rlhpc.protocol.types import Prefix, SamplingParams
from rlhpc.roles.controller import persistence
from rlhpc.roles.controller.persistence import DiskLane, DiskWriter, Journaling, PartialKeeping
from rlhpc.roles.generator.sampling import Outbox
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.buffer.rollout_samples import ManualClock, make_draft, make_ledger, make_prompt, part_of, piece_of
from tests.unit.roles.small_ring import make_buffer, prompt, scored, small_config

# ---------------------------------------------------------------------------------------------------------------- lanes
#
# Lanes of disk work: in order, never two at a time, and done whoever waits for it.


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


async def test_a_job_that_is_done_is_not_waited_for_whatever_callbacks_are_still_to_come() -> None:
    """A loop that does not keep their order took its disk for one that has not answered (seed 382 of the simulator)."""
    disk = DiskWriter()
    job = asyncio.get_running_loop().create_future()
    disk.partials._unfinished.add(job)
    assert disk.partials.unfinished == {job}
    job.set_result(None)
    assert await disk.close(0.0) == []


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


# --------------------------------------------------------------------------------------------------- journal and outbox
#
# What a generator may forget: only what the controller has on disk, whatever the order of things.


class Pair:
    """A controller's journal and a generator's outbox, over a channel."""

    def __init__(self, root: Path) -> None:
        self.layout = RunLayout(root)
        self.layout.rollouts.mkdir()
        self.journal = open_journal(self.layout, "small", 0, 0, None)
        self.leases = MemoryServer(LEASES)
        self.client: Any = self.leases.connect("generator-0")
        self.journaling = Journaling(self.journal, self.leases, asyncio.get_running_loop().time, DiskLane("journal"))
        self.outbox = Outbox()

    async def hear(self, *, has: bool = True) -> Delivery:
        """Receive a delivery as the controller does; has: it is wanted."""
        _, delivery = await self.leases.receive(PATIENCE_S)
        assert isinstance(delivery, Delivery)
        if has:
            self.journal.add(delivery.scored, prompt(delivery.scored.rollout.prompt_id), 0)
        self.journaling.received("generator-0", delivery)
        return delivery

    async def acknowledged(self) -> int:
        message = await self.client.receive(PATIENCE_S)
        assert isinstance(message, Delivered)
        self.outbox.acknowledged(message)
        return message.number

    def on_disk(self) -> int:
        return len(read_history(self.layout.rollouts, START).rollouts)


@asynccontextmanager
async def running(pair: Pair) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(pair.journaling.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, JournalError):
            await task


async def test_nothing_is_acknowledged_beyond_a_delivery_that_did_not_arrive(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for index in range(3):
        await pair.outbox.deliver(pair.client, prompt(index), scored(index, 0), 0)
    await pair.hear()
    await pair.leases.receive()  # lost
    await pair.hear()
    async with running(pair):
        assert await pair.acknowledged() == 1
        assert pair.outbox.num_kept == 2
        repeating = asyncio.create_task(pair.outbox.repeat(pair.client))
        await pair.hear()
        assert (await pair.hear(has=False)).number == 3  # a second copy
        while await pair.acknowledged() < 3:
            pass
        repeating.cancel()
    assert pair.outbox.num_kept == 0
    assert pair.on_disk() == 3


async def test_a_generator_whose_acknowledgement_was_lost_gets_another_when_it_delivers_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with running(pair):
        await pair.outbox.deliver(pair.client, prompt(0), scored(0, 0), 0)
        await pair.hear()
        assert (await pair.client.receive(PATIENCE_S)).number == 1  # lost with a connection
        repeating = asyncio.create_task(pair.outbox.repeat(pair.client))
        await pair.hear(has=False)
        assert await pair.acknowledged() == 1
        repeating.cancel()
    assert pair.outbox.num_kept == 0


async def test_the_next_controller_gets_what_the_last_one_did_not_acknowledge(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with running(pair):
        await pair.outbox.deliver(pair.client, prompt(0), scored(0, 0), 0)
        await pair.hear()
        assert await pair.acknowledged() == 1
    for index in (1, 2):
        await pair.outbox.deliver(pair.client, prompt(index), scored(index, 0), 0)  # and the controller is killed
    successor = MemoryServer(LEASES)
    pair.leases, pair.client = successor, successor.connect("generator-0")
    pair.journaling = Journaling(pair.journal, successor, asyncio.get_running_loop().time, DiskLane("journal"))
    repeating = asyncio.create_task(pair.outbox.repeat(pair.client))
    async with running(pair):
        assert [(await pair.hear()).number for _ in range(2)] == [2, 3]
        while await pair.acknowledged() < 3:
            pass
    repeating.cancel()
    assert pair.outbox.num_kept == 0


async def test_a_generator_that_was_started_again_is_not_told_to_forget_what_its_predecessor_delivered(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path)
    async with running(pair):
        for index in range(5):
            await pair.outbox.deliver(pair.client, prompt(index), scored(index, 0), 0)
            await pair.hear()
        while await pair.acknowledged() < 5:
            pass
        old, pair.outbox = pair.outbox, Outbox()
        await pair.outbox.deliver(pair.client, prompt(5), scored(5, 0), 0)
        await pair.leases.receive()  # lost
        await pair.outbox.deliver(pair.client, prompt(6), scored(6, 0), 0)
        await pair.hear()
        await pair.journaling.durable()
        await old.deliver(pair.client, prompt(7), scored(7, 0), 0)
        old.acknowledged(Delivered(9, "another"))
        assert (pair.outbox.num_kept, old.num_kept) == (2, 1)


async def test_a_disk_that_refuses_is_tried_again_and_nothing_is_acknowledged_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.05)
    pair, real, refusals, troubles = Pair(tmp_path), os.fdatasync, iter(range(2)), []

    def fdatasync(descriptor: int) -> None:
        troubles.append(pair.journaling.disk_trouble)
        if next(refusals, None) is not None:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    async with running(pair):
        await pair.outbox.deliver(pair.client, prompt(0), scored(0, 0), 0)
        await pair.hear()
        await pair.journaling.durable()
        assert await pair.acknowledged() == 1
    assert caplog.text.count("No space left on device; 1 stays in memory") == 2
    assert ["trying again for" in each for each in troubles[:3]] == [False, True, True]
    assert pair.journaling.disk_trouble == ""
    assert pair.on_disk() == 1


async def test_a_disk_that_refuses_for_too_long_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    pair = Pair(tmp_path)
    pair.journaling._patience._limit_s = 0.05
    pair.layout.rollouts.rmdir()
    async with running(pair) as task:
        await pair.outbox.deliver(pair.client, prompt(0), scored(0, 0), 0)
        await pair.hear()
        with pytest.raises(JournalError, match="cannot be written"):
            await asyncio.wait_for(task, PATIENCE_S)


# ------------------------------------------------------------------------------------------ reports of running rollouts
#
# What the controller does with reports of running rollouts: kept in memory at once, on disk soon, in nobody's way.


DRAFT = make_draft(0, 120)
NEWEST = 6


def report_of(*pieces: PartialRollout) -> LeaseProgress:
    data, num_bytes = encode_partials(pieces)
    return LeaseProgress(np.frombuffer(data, np.uint8), num_bytes, 0)


class Controller:
    """Its part that has to do with partial rollouts; group 0 is granted to generator-0, with two members."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "rollouts"
        self.directory.mkdir()
        PartialLog(self.directory, 0).begin([piece_of(DRAFT, 0, 30, member=(7, 1))])  # left by the attempt before
        ledger = make_ledger(ManualClock(), sampling=lambda _: SamplingParams(max_tokens=200))
        self.buffer = make_buffer(small_config(), root, ledger)
        self.buffer.admit(make_prompt(0), 4)
        self.buffer.ledger.grant("generator-0", 2)
        self.leases, self.num_commits = MemoryServer(LEASES), 0
        self.generator = self.leases.connect("generator-0")
        self.keeping = PartialKeeping(
            PartialIntake(self.buffer.ledger, 200),
            PartialLog(self.directory, 1),
            self.leases,
            DiskLane("partials"),
            timeline=0,
            newest_version=lambda: NEWEST,
            commit_groups=self.commit_groups,
        )

    def commit_groups(self) -> None:
        self.num_commits += 1

    async def takes(self, *pieces: PartialRollout) -> None:
        await self.keeping.receive("generator-0", report_of(*pieces))

    def on_disk(self, index: int = 0) -> int:
        """Tokens of a member of group 0."""
        known, problems = read_partials(self.directory)
        assert problems == []
        return known[0, index].end if (0, index) in known else 0

    async def until_on_disk(self, num_tokens: int, index: int = 0) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.on_disk(index) != num_tokens:  # noqa: ASYNC110 - a thread writes it
                await asyncio.sleep(0.01)


@pytest.fixture
async def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Controller]:
    monkeypatch.setattr(persistence, "BATCH_S", 0.01)
    monkeypatch.setattr(persistence, "REFUSED_PAUSE_S", 0.02)
    controller = Controller(tmp_path)
    running = asyncio.create_task(controller.keeping.run())
    yield controller
    running.cancel()
    await controller.keeping.close(is_complete=False)


async def test_reports_are_on_disk_soon_and_so_are_the_admissions_that_they_need(it: Controller) -> None:
    await it.takes(piece_of(DRAFT, 0, 50))
    assert it.num_commits == 1
    await it.until_on_disk(50)
    await it.takes(piece_of(DRAFT, 50, 80))
    await it.takes(piece_of(DRAFT, 80, 90), piece_of(DRAFT, 0, 10, member=(0, 1)))
    await it.until_on_disk(90)
    await it.until_on_disk(10, index=1)


async def test_what_this_attempt_did_not_take_up_is_gone_at_once(it: Controller) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while [path.name for path in partial_paths(it.directory)] != ["partials_000001.log"]:  # noqa: ASYNC110 - a thread
            await asyncio.sleep(0.01)
    assert read_partials(it.directory) == ({}, [])


async def test_a_generator_whose_beginning_is_not_known_is_asked_for_the_whole(it: Controller) -> None:
    await it.takes(piece_of(DRAFT, 30, 50))
    assert await it.generator.receive(PATIENCE_S) == ShowWhole(((0, 0),))
    await it.takes(piece_of(DRAFT, 0, 60))
    await it.until_on_disk(60)


@pytest.mark.parametrize(
    "message",
    [
        LeaseProgress(np.frombuffer(b"nothing of ours", np.uint8), 100, 0),
        LeaseProgress(np.empty(0, np.uint8), 0, 0),
        LeaseProgress(report_of(piece_of(DRAFT, 0, 50)).pieces, 1 << 40, 0),
        report_of(PartialRollout(0, 0, 7, 0, 0, part_of(DRAFT, 0, 50))),
        report_of(
            PartialRollout(0, 0, 0, 0, 0, Prefix(DRAFT.token_ids, DRAFT.behaviour_logprobs * np.nan, DRAFT.versions))
        ),
    ],
    ids=["not ours", "empty", "too large", "another prompt", "not a number"],
)
async def test_an_odd_report_is_refused_and_told_once(
    it: Controller, caplog: pytest.LogCaptureFixture, message: LeaseProgress
) -> None:
    for _ in range(3):
        await it.keeping.receive("generator-0", message)
    (record,) = caplog.records
    assert "generator-0: its reports of running rollouts are refused" in record.message
    assert it.on_disk() == 0


async def test_a_report_of_weights_that_do_not_count_changes_nothing(
    it: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    it.buffer.ledger.forget_holder("generator-0")
    await it.keeping.receive("generator-0", replace(report_of(piece_of(DRAFT, 0, 50)), timeline=3))
    assert it.buffer.ledger.outstanding("generator-0") == 0
    assert it.num_commits == 0
    assert not caplog.records


async def test_a_generator_that_goes_on_with_what_nobody_wants_is_told(it: Controller) -> None:
    it.buffer.drop(0, DropReason.POISON)
    await it.takes(piece_of(DRAFT, 0, 50))
    assert await it.generator.receive(PATIENCE_S) == CancelGroup(0)


async def test_a_disk_that_refuses_costs_one_warning_and_later_all_is_there_again(
    it: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await it.takes(piece_of(DRAFT, 0, 50))
    await it.until_on_disk(50)
    num_refused = 0

    def refuse(*_: Any) -> None:
        nonlocal num_refused
        num_refused += 1
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("rlhpc.buffer.log.write_at", refuse)
        full.setattr("rlhpc.buffer.log.make_file", refuse)
        for start in range(50, 80, 10):
            await it.takes(piece_of(DRAFT, start, start + 10))
        async with asyncio.timeout(PATIENCE_S):
            while num_refused < 3:  # noqa: ASYNC110 - a thread counts
                await asyncio.sleep(0.01)
        assert it.on_disk() == 50
    await it.until_on_disk(80)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "No space left on device" in record.message
    assert "nothing else is lost" in record.message


async def test_a_run_that_is_complete_leaves_none(it: Controller) -> None:
    await it.takes(piece_of(DRAFT, 0, 50))
    await it.until_on_disk(50)
    await it.keeping.close(is_complete=True)
    assert partial_paths(it.directory) == []
