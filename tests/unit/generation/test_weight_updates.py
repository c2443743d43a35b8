"""An update that has begun to load ends whole or torn, whoever stops waiting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from rlhpc.config.rules import Config
from rlhpc.generation.weight_updates import PauseSwitch, WeightUpdates
from rlhpc.generation.worker_extension import BUSY, DONE, READY, TORN
from rlhpc.metrics.meters import BusyClock
from rlhpc.weights.buckets import make_manifest
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import small_config

MANIFEST = make_manifest(7, 1, (), 1)


class OneWorker:
    """vLLM with one worker, whose load ends when a test says so, and how."""

    def __init__(self, outcome: str) -> None:
        self.outcome, self.is_loading, self.may_end = outcome, asyncio.Event(), asyncio.Event()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answers: dict[str, Any] = {"rlhpc_num_preemptions": 0, "rlhpc_held_checksum": (0, {}), "rlhpc_permit": None}
        answers["rlhpc_way_of_loading"] = "copies"
        if method == "rlhpc_begin_receive":
            return [(DONE if args[1] == "shadow" else READY, "")]
        if method == "rlhpc_load":
            self.is_loading.set()
            await self.may_end.wait()
            return [(0.0, None)]
        if method == "rlhpc_poll":
            self.is_loading.set()
            return [(self.outcome, "the publisher is gone") if self.may_end.is_set() else (BUSY, "")]
        return [answers[method]]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        pass

    async def resume_generation(self) -> None:
        pass


async def call(work: Awaitable[Any]) -> Any:
    return await work


def updates_of(llm: OneWorker, staging: str, adopted: list[int]) -> WeightUpdates:
    async def adopt(version: int, _counts: dict[str, int] | None) -> None:
        adopted.append(version)

    settings = small_config().model_dump(mode="json")
    settings["weights"]["staging"] = staging
    switch = PauseSwitch(llm, call, BusyClock(time.monotonic, 1))
    return WeightUpdates(llm, call, switch, adopt, config=Config.model_validate(settings), clock=time.monotonic)


@pytest.mark.parametrize(("staging", "outcome"), [("paused", TORN), ("paused", DONE), ("shadow", DONE)])
@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_who_is_cancelled_while_weights_are_loaded_ends_cancelled_and_the_engine_knows_what_it_has(
    staging: str, outcome: str, num_cancels: int
) -> None:
    """A session that is over ends so: a failure in place of the cancellation would be reported, and waited on."""
    llm, adopted = OneWorker(outcome), list[int]()
    updates = updates_of(llm, staging, adopted)
    receiving = asyncio.create_task(updates.receive(MANIFEST))
    await asyncio.wait_for(llm.is_loading.wait(), PATIENCE_S)
    for _ in range(num_cancels):
        receiving.cancel()
        await asyncio.sleep(0.01)
    llm.may_end.set()
    await asyncio.wait({receiving}, timeout=PATIENCE_S)
    assert receiving.cancelled()
    assert (adopted, updates.is_torn) == (([], True) if outcome == TORN else ([7], False))
