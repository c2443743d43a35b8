"""Time in which this process could hear nobody is nobody's silence."""

from __future__ import annotations

import asyncio

from rlhpc.protocol.messages import Heartbeat, Hello
from rlhpc.roles.controller.dispatcher import AwakeClock, ProcessRegistry
from tests.unit.buffer.rollout_samples import ManualClock

DEAD_AFTER_S = 10.0


def live(clock: ManualClock, awake: AwakeClock, seconds: int) -> None:
    for _ in range(10 * seconds):
        clock.advance(0.1)
        awake.look()


def test_time_is_counted_whole_while_somebody_looks_and_a_pause_counts_for_one_stretch() -> None:
    clock = ManualClock()
    awake = AwakeClock(clock, longest_s=1.0)
    began = awake()
    live(clock, awake, 7)
    assert abs(awake() - began - 7) < 1e-6
    clock.advance(3600)
    assert abs(awake() - began - 8) < 1e-6  # also before anybody has looked
    awake.look()
    assert abs(awake() - began - 8) < 1e-6
    live(clock, awake, 2)
    assert abs(awake() - began - 10) < 1e-6


def test_nobody_is_silent_after_a_pause_of_our_own_and_who_stays_silent_then_is() -> None:
    clock = ManualClock()
    awake = AwakeClock(clock, longest_s=1.0)
    registry = ProcessRegistry("hash", DEAD_AFTER_S, awake)
    for replica in (0, 1):
        registry.register(f"generator-{replica}", Hello("generator", replica, "a", "hash", 1, "here", 1))
    live(clock, awake, 1)
    clock.advance(6 * DEAD_AFTER_S)
    assert registry.silent() == []
    awake.look()
    assert registry.silent() == []
    for _ in range(10):
        live(clock, awake, 1)
        registry.record("generator-1", Heartbeat("running", "", 0))
    assert registry.silent() == ["generator-0"]


async def test_a_clock_that_is_run_keeps_up_with_the_loop() -> None:
    loop = asyncio.get_running_loop()
    awake = AwakeClock(loop.time, longest_s=5.0)
    running = asyncio.create_task(awake.run())
    began, awake_began, begun = loop.time(), awake(), loop.time()
    await asyncio.sleep(0.3)
    before, awake_s, after = loop.time(), awake() - awake_began, loop.time()
    assert before - begun - 1e-6 <= awake_s <= after - began + 1e-6
    running.cancel()
