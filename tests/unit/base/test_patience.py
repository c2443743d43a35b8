"""Which errors of a file system are waited out, and how long a wait may last."""

from __future__ import annotations

import asyncio
import errno
import math
import time
from collections.abc import Callable, Iterator

import pytest

from rlhpc.base import patience
from rlhpc.base.patience import Deadline, briefly, passes, patiently, patiently_aside, patiently_here, seen
from rlhpc.protocol.errors import ConfigError, OwnershipLost, RunDirectoryError, SegmentError

# ------------------------------ Which errors of a file system are waited out, for how long, and what is said meanwhile

PASSING = "ESTALE EIO EACCES ENOSPC EDQUOT EROFS ETIMEDOUT EHOSTDOWN ENOTCONN ENOMEM EAGAIN EINTR ENXIO ENODEV EMFILE"
LASTING = "EINVAL ENAMETOOLONG ENOTDIR ELOOP EEXIST EXDEV EFBIG"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)


def refusing(number: int, times: int) -> Callable[[], str]:
    """What raises this error so often, then returns."""
    answers: Iterator[int] = iter(range(times + 1))

    def do() -> str:
        if next(answers) < times:
            raise OSError(number, errno.errorcode[number], "/run/file")
        return "done"

    return do


def of(error: OSError, kind: type[Exception] = SegmentError) -> Exception:
    """An error of ours that this one is the cause of."""
    ours = kind("cannot be written")
    ours.__cause__ = error
    return ours


@pytest.mark.parametrize("name", PASSING.split())
def test_what_may_be_true_only_now_is_waited_out(name: str) -> None:
    number = getattr(errno, name)
    assert patiently(refusing(number, 3), "file") == "done"
    assert passes(of(OSError(number, "")))


@pytest.mark.parametrize("name", LASTING.split())
def test_a_request_that_is_wrong_is_not_repeated(name: str) -> None:
    with pytest.raises(OSError, match=name):
        patiently(refusing(getattr(errno, name), 1), "file")


def test_patience_ends_with_the_error_itself_when_it_is_over_and_says_what_it_waits_for() -> None:
    assert not any(map(passes, (ConfigError("x"), OwnershipLost("x"), ValueError("x"), OSError("of h5py, no number"))))
    assert not passes(of(OSError(errno.ENOENT, ""), RunDirectoryError), is_there=False)
    with pytest.raises(OSError, match="EIO"):
        patiently(refusing(errno.EIO, 1000), "file", limit_s=0.02)
    with pytest.raises(OSError, match="EIO"):
        patiently(refusing(errno.EIO, 1), "file", is_over=lambda: True)
    look = refusing(errno.ESTALE, 1)
    assert [seen(look, "unseen"), seen(look, "unseen")] == ["unseen", "done"]


def test_it_is_said_which_file_why_and_what_happens_next(caplog: pytest.LogCaptureFixture) -> None:
    patiently(refusing(errno.ESTALE, 1), "/run/status.json")
    assert "/run/status.json: [Errno 116] ESTALE: '/run/file'; trying again for 300 s, next in" in caplog.text


def test_what_has_to_be_there_and_is_missing_is_waited_for_less_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MISSING_S", 0.02)
    with pytest.raises(FileNotFoundError):
        patiently(refusing(errno.ENOENT, 1000), "file")
    with pytest.raises(FileNotFoundError):
        patiently(refusing(errno.ENOENT, 1), "file", is_there=False)


def test_a_person_waits_briefly_and_not_for_what_a_person_can_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert briefly(refusing(errno.ESTALE, 2), "file") == "done"
    for number in (errno.EACCES, errno.EROFS, errno.ENOENT):
        with pytest.raises(OSError, match=errno.errorcode[number]):
            briefly(refusing(number, 1), "file")
    monkeypatch.setattr(patience, "BRIEF_S", 0.02)
    with pytest.raises(OSError, match="ENOSPC"):
        briefly(refusing(errno.ENOSPC, 1000), "file")


def test_an_event_loop_goes_on_meanwhile() -> None:
    async def count(until: asyncio.Future[str]) -> int:
        number = 0
        while not until.done():
            await asyncio.sleep(0)
            number += 1
        return number

    async def both() -> None:
        for way in (patiently_aside, patiently_here):
            waiting = asyncio.ensure_future(way(refusing(errno.EIO, 3), "file"))
            assert await count(waiting) > 3
            assert waiting.result() == "done"

    asyncio.run(both())


# ------------------------------ How long a wait may last: hardly a test here waits, for its clock moves when it sleeps


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


def test_a_deadline_shrinks_with_its_clock_never_below_nothing_and_without_a_limit_never_ends(hand: Hand) -> None:
    deadline = Deadline(5.0, hand)
    assert (deadline.limit_s, deadline.passed_s, deadline.left_s, deadline.is_over) == (5.0, 0.0, 5.0, False)
    hand.now_s += 4.0
    assert (deadline.limit_s, deadline.passed_s, deadline.left_s, deadline.is_over) == (5.0, 4.0, 1.0, False)
    hand.now_s += 1.0  # the last moment is over, as it is for a limit of nothing
    assert (deadline.passed_s, deadline.left_s, deadline.is_over) == (5.0, 0.0, True)
    hand.now_s += 60.0
    assert (deadline.limit_s, deadline.passed_s, deadline.left_s, deadline.is_over) == (5.0, 65.0, 0.0, True)
    deadline = Deadline(3600.0)
    first_s = deadline.left_s
    time.sleep(0.001)
    assert 0.0 < deadline.left_s < first_s <= 3600.0


def test_without_a_limit_nothing_is_ever_over(hand: Hand) -> None:
    deadline = Deadline(math.inf, hand)
    hand.now_s += 1e9
    assert (deadline.left_s, deadline.is_over) == (math.inf, False)


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
