from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from rlhpc.generation.weight_updates import PauseSwitch
from rlhpc.metrics.meters import BusyClock


class RecordingLlm:
    """vLLM's two calls; it refuses what would be a mistake."""

    def __init__(self) -> None:
        self.is_paused = False
        self.num_calls = 0

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache, self.is_paused) == ("keep", False, False)
        self.is_paused, self.num_calls = True, self.num_calls + 1

    async def resume_generation(self) -> None:
        assert self.is_paused
        self.is_paused, self.num_calls = False, self.num_calls + 1


async def call(work: Awaitable[Any]) -> Any:
    return await work


@pytest.fixture
def llm() -> RecordingLlm:
    return RecordingLlm()


@pytest.fixture
def switch(llm: RecordingLlm) -> PauseSwitch:
    return PauseSwitch(llm, call, BusyClock(lambda: 0.0, 1))


async def test_an_engine_goes_on_when_the_last_one_lets_go(llm: RecordingLlm, switch: PauseSwitch) -> None:
    await switch.hold("caller")
    await switch.hold("update")
    await switch.release("caller")
    assert llm.is_paused
    await switch.release("update")
    assert not llm.is_paused
    assert llm.num_calls == 2


async def test_holding_and_releasing_twice_is_once(llm: RecordingLlm, switch: PauseSwitch) -> None:
    for _ in range(2):
        await switch.hold("caller")
    for _ in range(2):
        await switch.release("caller")
    assert llm.num_calls == 2


async def test_nobody_releases_for_another(llm: RecordingLlm, switch: PauseSwitch) -> None:
    await switch.hold("update")
    await switch.release("caller")
    assert llm.is_paused
    assert switch.is_paused
