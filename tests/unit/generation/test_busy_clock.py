from __future__ import annotations

from rlhpc.metrics.meters import BusyClock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_counts_while_anything_is_in_hand() -> None:
    clock = Clock()
    busy = BusyClock(clock, max_num_seqs=2)
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
    busy = BusyClock(clock, max_num_seqs=2)
    busy.enter()
    clock.now += 1
    busy.pause()
    clock.now += 5
    busy.enter()
    assert busy.seconds == 1
    busy.resume()
    clock.now += 1
    assert busy.seconds == 2


def test_each_request_that_is_decoded_counts_and_one_that_waits_for_a_place_does_not() -> None:
    clock = Clock()
    busy = BusyClock(clock, max_num_seqs=2)
    for _ in range(3):
        busy.enter()
        clock.now += 1
    assert (busy.seconds, busy.decoding_s) == (3, 1 + 2 + 2)
    busy.pause()
    clock.now += 5
    busy.resume()
    busy.leave()
    busy.leave()
    clock.now += 1
    assert (busy.seconds, busy.decoding_s) == (4, 6)
