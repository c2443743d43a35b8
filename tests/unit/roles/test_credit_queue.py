"""Whoever has most credit comes first, however it changes, at a cost that does not grow with their number."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlhpc.roles.controller.dispatcher import SPARE, CreditQueue

NAMES = [f"generator-{number}" for number in range(5)]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-2, 6))))
def test_it_is_always_the_generator_with_most_credit_of_equals_the_first(changes: list[tuple[str, int]]) -> None:
    credit: dict[str, int] = dict.fromkeys(NAMES, 3)
    queue = CreditQueue(credit.__getitem__)
    queue.look_at_all(NAMES)
    for name, new in changes:
        credit[name] = new
        queue.look_at(name)
        best = max(NAMES, key=credit.__getitem__)
        assert queue.most() == ((best, credit[best]) if credit[best] > 0 else None)
    assert len(queue._heap) <= 2 * len(NAMES) + SPARE


def test_credit_that_has_shrunk_unseen_is_not_given_away_twice() -> None:
    credit = {"a": 5, "b": 4}
    queue = CreditQueue(credit.__getitem__)
    queue.look_at_all(credit)
    credit["a"] = 0
    assert queue.most() == ("b", 4)


def test_who_is_set_aside_comes_back_when_it_is_looked_at() -> None:
    queue = CreditQueue({"a": 5, "b": 4}.__getitem__)
    queue.look_at_all("ab")
    queue.set_aside("a")
    assert queue.most() == ("b", 4)
    queue.look_at("a")
    assert queue.most() == ("a", 5)


@pytest.mark.parametrize("num_generators", [8, 512])
def test_a_lease_looks_at_few_generators_however_many_there_are(num_generators: int) -> None:
    looks, credit = Counter[str](), dict.fromkeys(map(str, range(num_generators)), 0)

    def credit_of(name: str) -> int:
        looks[name] += 1
        return credit[name]

    queue = CreditQueue(credit_of)
    queue.look_at_all(credit)
    looks.clear()
    for turn in range(1000):  # a sample arrives, another one is leased
        name = str(turn * 7 % num_generators)
        credit[name] += 1
        queue.look_at(name)
        assert queue.most() == (name, 1)
        credit[name] -= 1
        queue.look_at(name)
    assert looks.total() <= 3 * 1000
