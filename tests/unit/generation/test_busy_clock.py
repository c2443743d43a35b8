from __future__ import annotations

from rlhpc.generation.busy_clock import BusyClock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_counts_while_anything_is_in_hand() -> None:
    clock = Clock()
    busy = BusyClock(clock)
    clock.now += 5
    busy.enter()
    clock.now += 1
    busy.enter()
    clock.now += 1
    busy.leave()
    clock.now += 1
    assert busy.seconds == 3
    busy.leave()
    clock.now += 5
    assert busy.seconds == 3


def test_pauses_do_not_count() -> None:
    clock = Clock()
    busy = BusyClock(clock)
    busy.enter()
    clock.now += 1
    busy.pause()
    clock.now += 5
    busy.enter()
    assert busy.seconds == 1
    busy.resume()
    clock.now += 1
    assert busy.seconds == 2
