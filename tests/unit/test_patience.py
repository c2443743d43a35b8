"""Which errors of a file system are waited out, for how long, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator

import pytest

from rlhpc.base import patience
from rlhpc.base.patience import briefly, passes, patiently, patiently_aside, patiently_here, seen
from rlhpc.protocol.errors import ConfigError, OwnershipLost, RunDirectoryError, SegmentError

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


def test_errors_that_no_file_system_is_behind_do_not_pass() -> None:
    assert not any(map(passes, (ConfigError("x"), OwnershipLost("x"), ValueError("x"), OSError("of h5py, no number"))))
    assert not passes(of(OSError(errno.ENOENT, ""), RunDirectoryError), is_there=False)


def test_it_is_said_which_file_why_and_what_happens_next(caplog: pytest.LogCaptureFixture) -> None:
    patiently(refusing(errno.ESTALE, 1), "/run/status.json")
    assert "/run/status.json: [Errno 116] ESTALE: '/run/file'; trying again for 300 s, next in" in caplog.text


def test_the_end_of_patience_is_the_error_itself() -> None:
    with pytest.raises(OSError, match="EIO"):
        patiently(refusing(errno.EIO, 1000), "file", limit_s=0.02)


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


def test_nobody_waits_once_it_is_over() -> None:
    with pytest.raises(OSError, match="EIO"):
        patiently(refusing(errno.EIO, 1), "file", is_over=lambda: True)


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


def test_what_only_shows_is_seen_the_next_time() -> None:
    look = refusing(errno.ESTALE, 1)
    assert [seen(look, "unseen"), seen(look, "unseen")] == ["unseen", "done"]
