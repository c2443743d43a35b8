"""Which of two starts is the later one."""

from __future__ import annotations

import pytest

from rlhpc.transport.sessions import another_of, is_earlier, order_of


@pytest.mark.parametrize(
    ("earlier", "later"),
    [("4711.0.0-z", "4711.0.1-a"), ("4711.0.9-z", "4711.1.0-a"), ("999.9.9-z", "4711.0.0-a"), ("0.2.0-a", "0.10.0-a")],
)
def test_jobs_come_before_restarts_and_those_before_starts(earlier: str, later: str):
    assert is_earlier(earlier, later)
    assert not is_earlier(later, earlier)


@pytest.mark.parametrize("text", ["", "a", "0-abc", "1.2-a", "1.2.3", "1.2.3-", "x.1.2-a", "1.2.3.4-a", "-1.2.3-a"])
def test_any_other_text_has_no_order(text: str):
    assert order_of(text) is None
    assert not is_earlier(text, "9.9.9-a")
    assert not is_earlier("1.1.1-a", text)


def test_equal_orders_are_in_no_order():
    assert not is_earlier("1.2.3-a", "1.2.3-b")


def test_another_incarnation_has_the_same_order():
    assert order_of(another_of("17.2.3-abc")) == (17, 2, 3)
    assert another_of("17.2.3-abc") != another_of("17.2.3-abc")
    assert another_of("x").startswith("x-")
