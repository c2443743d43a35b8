from __future__ import annotations

import asyncio

import pytest

from rlhpc.protocol.errors import ChannelClosed, ChannelTimeout
from rlhpc.transport.sockets import TAKES_BEFORE_YIELD, Inbox


async def test_items_come_out_in_order():
    inbox: Inbox[int] = Inbox(10, "test")
    for number in range(5):
        inbox.put(number)
    assert [await inbox.take(1) for _ in range(5)] == list(range(5))


async def test_a_timeout_names_the_channel():
    with pytest.raises(ChannelTimeout, match=r"leases of controller-0: no message within 0.01 s"):
        await Inbox[int](1, "leases of controller-0").take(0.01)


async def test_each_waiting_take_gets_one_item():
    inbox: Inbox[int] = Inbox(10, "test")
    takes = [asyncio.create_task(inbox.take(1)) for _ in range(3)]
    await asyncio.sleep(0)
    inbox.put(1)
    await asyncio.sleep(0)
    inbox.put(2)
    inbox.put(3)
    assert sorted(await asyncio.gather(*takes)) == [1, 2, 3]


async def test_an_item_is_not_lost_with_the_take_that_it_woke():
    inbox: Inbox[int] = Inbox(10, "test")
    first, second = asyncio.create_task(inbox.take(None)), asyncio.create_task(inbox.take(1))
    await asyncio.sleep(0)
    inbox.put(7)
    first.cancel()
    assert await second == 7


async def test_closing_wakes_every_take():
    inbox: Inbox[int] = Inbox(10, "test")
    takes = [asyncio.create_task(inbox.take(None)) for _ in range(3)]
    await asyncio.sleep(0)
    inbox.close()
    for take in takes:
        with pytest.raises(ChannelClosed):
            await take


async def test_a_backlog_leaves_other_tasks_their_turn():
    inbox: Inbox[int] = Inbox(10_000, "test")
    for number in range(10 * TAKES_BEFORE_YIELD):
        inbox.put(number)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(10 * TAKES_BEFORE_YIELD):
        await inbox.take(1)
    task.cancel()
    assert turns >= 9


async def test_room_is_announced_once_a_full_inbox_is_half_empty():
    announced = []
    inbox: Inbox[int] = Inbox(4, "test", lambda: announced.append(len(inbox)))
    for number in range(3):
        inbox.put(number)
    await inbox.take(1)
    assert announced == []  # it was never full
    inbox.put(3)
    inbox.put(4)
    assert not inbox.has_room()
    for _ in range(4):
        await inbox.take(1)
    assert announced == [2]
