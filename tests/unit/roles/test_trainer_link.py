"""How long the controller waits for its trainer, and what it says when it does not come."""

from __future__ import annotations

import asyncio

import pytest

from rlhpc.protocol.errors import ChannelTimeout
from rlhpc.protocol.messages import BATCHES, TrainerReady
from rlhpc.roles.controller.batches import RANK_0, TrainerLink
from rlhpc.roles.controller.weight_sync import FIRST_MEMBER_S, WeightSyncLimits
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import MANIFEST

READY = TrainerReady(0, MANIFEST, "")


async def test_ranks_that_do_not_come_are_named() -> None:
    link = TrainerLink(MemoryServer(BATCHES))
    with pytest.raises(ChannelTimeout, match=r"trainer-0, trainer-3 have not connected after 0\.02 s"):
        await link.ready(0.02, lambda: ["trainer-0", "trainer-3"])


async def test_a_trainer_that_is_there_may_load_for_as_long_as_it_takes() -> None:
    batches = MemoryServer(BATCHES)
    waiting = asyncio.create_task(TrainerLink(batches).ready(0.01, list))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await batches.connect(RANK_0).send(READY)
    assert await asyncio.wait_for(waiting, PATIENCE_S) == READY


async def test_a_trainer_that_is_quick_is_not_asked_for() -> None:
    batches = MemoryServer(BATCHES)
    await batches.connect(RANK_0).send(READY)
    assert await TrainerLink(batches).ready(5.0, lambda: ["nobody"]) == READY


def test_generators_may_turn_up_as_late_as_anybody_and_load_for_minutes() -> None:
    assert WeightSyncLimits.of(120.0, 5.0) == WeightSyncLimits(FIRST_MEMBER_S, 5.0)
    assert WeightSyncLimits.of(1800.0, 5.0).first_member_s == 1800.0
