from __future__ import annotations

import asyncio
import time

import pytest

from rlhpc.generation import vllm_engine
from rlhpc.generation.vllm_engine import EngineSilent, answered, comes


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "ANSWER_S", 0.5)


async def test_an_answer_comes_through_and_so_does_an_error() -> None:
    async def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert await answered(asyncio.sleep(0.05, "done"), 0.0) == "done"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await answered(fail(), 0.0)


async def test_who_does_not_answer_is_given_up_and_asked_no_longer() -> None:
    asked = asyncio.get_running_loop().create_future()
    with pytest.raises(EngineSilent, match=r"no answer within 0\.5 s"):
        await answered(asked, 0.0)
    await asyncio.sleep(0)
    assert asked.cancelled()


async def test_an_engine_may_wait_as_long_as_a_broadcast_takes() -> None:
    assert await answered(asyncio.sleep(0.7, "done"), 10.0) == "done"


async def test_a_pause_of_this_process_is_no_silence_of_the_engine() -> None:
    asked = asyncio.ensure_future(answered(asyncio.sleep(0.2, "done"), 0.0))
    await asyncio.sleep(0.01)
    time.sleep(1.0)  # noqa: ASYNC251 - as after SIGSTOP: time has passed, and nothing has run
    assert await asked == "done"


async def test_who_stops_waiting_stops_asking() -> None:
    asked = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(answered(asked, 0.0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert asked.cancelled()


async def test_an_event_comes_or_not_and_a_cancellation_at_the_same_moment_is_heard() -> None:
    """A loop that had not heard it would go on for ever, and its task group wait for it."""
    event = asyncio.Event()
    assert not await comes(event, 0.01)
    waiting = asyncio.ensure_future(comes(event, 60.0))
    await asyncio.sleep(0.01)
    event.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await comes(event, 0.01)
