"""What a generator may forget: only what the controller has on disk, whatever the order of things."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base import patience
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import START, open_journal, read_history
from rlhpc.protocol.errors import JournalError
from rlhpc.protocol.messages import LEASES, Delivered, Delivery
from rlhpc.roles.controller.persistence import DiskLane, Journaling
from rlhpc.roles.generator import sampling as outbox_module
from rlhpc.roles.generator.sampling import Outbox
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import scored


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
            self.journal.add(delivery.scored, 0)
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


async def test_a_rollout_is_on_disk_before_its_generator_may_forget_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with running(pair):
        for index in range(3):
            await pair.outbox.deliver(pair.client, scored(index, 0), 0)
        assert pair.outbox.num_kept == 3
        for _ in range(3):
            await pair.hear()
        number = 0
        while number < 3:
            number = await pair.acknowledged()
            assert pair.on_disk() >= number
        assert pair.outbox.num_kept == 0


async def test_nothing_is_acknowledged_beyond_a_delivery_that_did_not_arrive(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for index in range(3):
        await pair.outbox.deliver(pair.client, scored(index, 0), 0)
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
        await pair.outbox.deliver(pair.client, scored(0, 0), 0)
        await pair.hear()
        assert (await pair.client.receive(PATIENCE_S)).number == 1  # lost with a connection
        repeating = asyncio.create_task(pair.outbox.repeat(pair.client))
        await pair.hear(has=False)
        assert await pair.acknowledged() == 1
        repeating.cancel()
    assert pair.outbox.num_kept == 0


async def test_a_silence_makes_the_generator_send_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "SILENCE_S", 0.05)
    pair = Pair(tmp_path)
    await pair.outbox.deliver(pair.client, scored(0, 0), 0)
    await pair.leases.receive()  # lost
    repeating = asyncio.create_task(pair.outbox.repeat(pair.client))
    for _ in range(3):
        assert (await pair.hear(has=False)).number == 1
    repeating.cancel()


async def test_the_next_controller_gets_what_the_last_one_did_not_acknowledge(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with running(pair):
        await pair.outbox.deliver(pair.client, scored(0, 0), 0)
        await pair.hear()
        assert await pair.acknowledged() == 1
    for index in (1, 2):
        await pair.outbox.deliver(pair.client, scored(index, 0), 0)  # and the controller is killed
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
            await pair.outbox.deliver(pair.client, scored(index, 0), 0)
            await pair.hear()
        while await pair.acknowledged() < 5:
            pass
        old, pair.outbox = pair.outbox, Outbox()
        await pair.outbox.deliver(pair.client, scored(5, 0), 0)
        await pair.leases.receive()  # lost
        await pair.outbox.deliver(pair.client, scored(6, 0), 0)
        await pair.hear()
        await pair.journaling.durable()
        await old.deliver(pair.client, scored(7, 0), 0)
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
        await pair.outbox.deliver(pair.client, scored(0, 0), 0)
        await pair.hear()
        await pair.journaling.durable()
        assert await pair.acknowledged() == 1
    assert caplog.text.count("No space left on device; 1 stay in memory") == 2
    assert ["trying again for" in each for each in troubles[:3]] == [False, True, True]
    assert pair.journaling.disk_trouble == ""
    assert pair.on_disk() == 1


async def test_a_disk_that_refuses_for_too_long_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    pair = Pair(tmp_path)
    pair.journaling._patience._limit_s = 0.05
    pair.layout.rollouts.rmdir()
    async with running(pair) as task:
        await pair.outbox.deliver(pair.client, scored(0, 0), 0)
        await pair.hear()
        with pytest.raises(JournalError, match="cannot be written"):
            await asyncio.wait_for(task, PATIENCE_S)
