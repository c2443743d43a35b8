"""Who gets the next idle worker."""

from __future__ import annotations

import asyncio

import pytest

from rlhpc.protocol.errors import RoleFailed
from rlhpc.rewards.pool import Turns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waits(turns: Turns[int], *tasks: str) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(turns.take(task)) for task in tasks]


async def test_tasks_come_in_turn_however_many_completions_one_of_them_has():
    turns: Turns[int] = Turns()
    calls = waits(turns, *["slow"] * 5, "quick")
    await settle()
    turns.add(1)
    turns.add(2)
    await settle()
    assert [call.done() for call in calls] == [True, False, False, False, False, True]
    turns.give_back("quick", calls[-1].result())  # nobody else waits
    await settle()
    assert calls[1].done()


async def test_a_task_that_lost_a_worker_gets_one_at_a_time_until_it_gives_one_back():
    turns: Turns[int] = Turns()
    turns.add(1)
    assert await turns.take("hangs") == 1
    turns.lose("hangs")
    calls = waits(turns, "hangs", "hangs", "quick")
    for worker in (2, 3, 4):
        turns.add(worker)
    await settle()
    assert [call.done() for call in calls] == [True, False, True]
    turns.lose("hangs")  # it hung once more: the next one, alone again
    await settle()
    assert calls[1].done()
    turns.give_back("hangs", 4)  # in time: as many as there are
    more = waits(turns, "hangs", "hangs")
    turns.add(5)
    await settle()
    assert all(call.done() for call in more)


async def test_a_cancelled_wait_takes_no_worker_with_it():
    turns: Turns[int] = Turns()
    first, second = waits(turns, "a", "a")
    await settle()
    first.cancel()
    turns.add(1)  # before the cancelled one has run
    await settle()
    assert second.result() == 1
    third, fourth = waits(turns, "a", "a")
    await settle()
    turns.add(2)
    third.cancel()  # it has been served, and does not know yet
    await settle()
    assert third.cancelled()
    assert fourth.result() == 2


async def test_after_the_end_nobody_waits():
    turns: Turns[int] = Turns()
    (call,) = waits(turns, "a")
    await settle()
    turns.end("closed")
    for waiting in (call, *waits(turns, "b")):
        with pytest.raises(RoleFailed, match="closed"):
            await waiting


async def test_a_worker_is_exchanged_for_one_that_is_idle_and_for_no_other():
    turns: Turns[int] = Turns()
    turns.add(1)
    turns.add(2)
    taken = await turns.take("dialogue")
    assert (taken, turns.exchange(taken, 2)) == (1, 2)
    assert turns.exchange(2, 3) == 2
    assert await turns.take("other") == 1  # it is idle again
    assert turns.exchange(1, 2) == 1
