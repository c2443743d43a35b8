import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.metrics.meters import Eta, LoopLag, Rate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_forgets_what_is_older_than_its_window():
    rate = Rate(10.0, now=0.0)
    rate.add(1.0, 50)
    assert rate.per_second(5.0) == 10.0  # over the time since the start
    rate.add(9.0, 50)
    assert rate.per_second(10.0) == 10.0
    assert rate.per_second(12.0) == 5.0
    assert rate.per_second(100.0) == 0.0


def test_a_rate_over_no_time_is_zero():
    rate = Rate(10.0, now=5.0)
    rate.add(5.0, 50)
    assert rate.per_second(5.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1e6)), max_size=50))
def test_a_rate_is_what_lies_in_the_window_over_the_window(events):
    rate, now = Rate(10.0, now=0.0), 20.0
    kept = []
    for gap_s, amount in events:
        now += gap_s
        rate.add(now, amount)
        kept.append((now, amount))
    expected = sum(amount for when, amount in kept if when > now - 10.0) / 10.0
    assert rate.per_second(now) == pytest.approx(expected, abs=1e-3)


async def test_loop_lag_is_how_late_a_sleep_ends():
    clock, lags = Clock(), iter([0.0, 2.0, 0.5])

    async def sleep(seconds: float) -> None:
        lag_s = next(lags, None)
        if lag_s is None:
            await asyncio.Event().wait()
        clock.now += seconds + lag_s

    lag = LoopLag(clock, 0.1, sleep)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    assert lag.take() == pytest.approx(2.0)
    assert lag.take() == 0.0
    clock.now += 7.1  # the loop is stuck just now
    assert lag.take() == pytest.approx(7.0)
    task.cancel()


def test_the_estimate_follows_the_pace_of_the_last_steps():
    eta = Eta(num_steps=100, window_steps=2)
    assert eta.remaining_s() is None
    eta.step_done(1, now=1000.0)  # the engines have started
    assert eta.remaining_s() is None
    eta.step_done(2, now=1010.0)
    assert eta.remaining_s() == 980.0
    eta.step_done(3, now=1011.0)
    eta.step_done(4, now=1012.0)
    assert eta.remaining_s() == 96.0
    eta.step_done(100, now=1100.0)
    assert eta.remaining_s() == 0.0
