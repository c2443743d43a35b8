"""How long a wait may last: hardly a test here waits, for its clock moves when it sleeps."""

import math
import time

import pytest

from rlhpc.base.patience import Deadline


class Hand:
    """A clock that is moved by hand, in whole seconds: sums of them are exact."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []
        self.num_looks = 0

    def __call__(self) -> float:
        self.num_looks += 1
        assert self.num_looks < 25, "a loop that does not sleep by this clock would never end"
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def hand() -> Hand:
    return Hand()


def test_what_is_left_shrinks_with_the_callers_clock_and_never_below_nothing(hand: Hand) -> None:
    deadline = Deadline(5.0, hand)
    assert (deadline.limit_s, deadline.passed_s, deadline.left_s, deadline.is_over) == (5.0, 0.0, 5.0, False)
    hand.now_s += 4.0
    assert (deadline.limit_s, deadline.passed_s, deadline.left_s, deadline.is_over) == (5.0, 4.0, 1.0, False)
    hand.now_s += 1.0  # the last moment is over, as it is for a limit of nothing
    assert (deadline.passed_s, deadline.left_s, deadline.is_over) == (5.0, 0.0, True)
    hand.now_s += 60.0
    assert (deadline.limit_s, deadline.passed_s, deadline.left_s, deadline.is_over) == (5.0, 65.0, 0.0, True)


def test_without_a_limit_nothing_is_ever_over(hand: Hand) -> None:
    deadline = Deadline(math.inf, hand)
    hand.now_s += 1e9
    assert (deadline.left_s, deadline.is_over) == (math.inf, False)


def test_its_own_clock_goes_on_by_itself() -> None:
    deadline = Deadline(3600.0)
    first_s = deadline.left_s
    time.sleep(0.001)
    assert 0.0 < deadline.left_s < first_s <= 3600.0


@pytest.mark.parametrize(("limit_s", "num_looks"), [(-1.0, 1), (0.0, 1), (2.0, 2), (3.0, 3), (4.0, 3)])
def test_a_loop_looks_at_once_and_once_more_after_its_last_pause(hand: Hand, limit_s: float, num_looks: int) -> None:
    looks = [hand.now_s for _ in Deadline(limit_s, hand).polls(2.0, hand.sleep)]
    assert looks == [1000.0 + 2.0 * k for k in range(num_looks)]
    assert hand.slept == [2.0] * (num_looks - 1)


def test_time_that_a_look_takes_counts(hand: Hand) -> None:
    looks = 0
    for _ in Deadline(10.0, hand).polls(1.0, hand.sleep):
        looks += 1
        hand.now_s += 9.0
    assert (looks, hand.slept) == (2, [1.0])


def test_a_wait_ends_with_the_look_that_finds_it_so(hand: Hand) -> None:
    assert Deadline(10.0, hand).wait_for(lambda: hand.now_s >= 1003.0, 1.0, hand.sleep)
    assert hand.slept == [1.0, 1.0, 1.0]


def test_what_becomes_so_in_the_last_pause_was_in_time(hand: Hand) -> None:
    assert Deadline(3.0, hand).wait_for(lambda: hand.now_s >= 1004.0, 2.0, hand.sleep)


def test_a_wait_that_finds_nothing_ends_at_its_limit(hand: Hand) -> None:
    assert not Deadline(3.0, hand).wait_for(lambda: False, 1.0, hand.sleep)
    assert hand.slept == [1.0, 1.0, 1.0]
