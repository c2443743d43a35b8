"""Repeat an access to the run directory while the file system refuses it: which errors pass, and for how long.

A shared file system refuses for seconds or minutes and then goes on: a server that is restarted, a handle that has
become stale, a quota, a mount that has lost its ticket.  Everything that reads or writes a run directory goes through
one of these, by what depends on it:

    the run, and its caller may wait       patiently(do, what)              repeated for five minutes, then raised
    the run, in an event loop              await patiently_aside(do, what)  the same, in threads; patiently_here: in it;
                                                                            patiently_awaited: what is awaited
    the run, and its caller is a loop      Patience                         counts failures, says when to try again
    a command of a user that begins a run  briefly(do, what)                for seconds, unless the user can mend it
    nothing: a display, a repeated check   seen(look, otherwise)            returns `otherwise`; a later look may do

Other commands repeat nothing: they end at once, and the error says why.  Repeating does not weaken the fence: a
process that cannot read who owns the run does not write (ownership.py).  Python 3.9 and the standard library.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Optional, TypeVar

from rlhpc.protocol.errors import RlhpcError

# ------------------------------------------------------------------------------------------------------------- deadline
#
# Time limits for waits.
#
# Input: a limit in seconds from now; optionally a clock and a sleep function.  Output: the time left, and loops that
# poll until then.  Guarantees: such a loop polls at least once, however short the limit, and once more after its last
# pause. Python 3.9 and the standard library.


Sleep = Callable[[float], object]  # seconds


def pause(seconds: float) -> None:
    """Sleep by the clock of this module, which may be a simulated one."""
    time.sleep(seconds)


class Deadline:
    """The end of a wait that begins now."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """limit_s: math.inf never ends.  clock: seconds since an arbitrary moment."""
        self.limit_s = limit_s
        self._clock, self._began_s = clock, clock()

    @property
    def passed_s(self) -> float:
        """Seconds since the wait began."""
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds left; 0 once it is over."""
        return max(0.0, self.limit_s - self.passed_s)

    @property
    def is_over(self) -> bool:
        """True if no time is left."""
        return self.passed_s >= self.limit_s

    def polls(self, every_s: float, sleep: Sleep = pause) -> Iterator[None]:
        """Yield at once, and then after every pause of `every_s` that begins before the end."""
        yield
        while not self.is_over:
            sleep(every_s)
            yield

    def wait_for(self, is_so: Callable[[], bool], every_s: float, sleep: Sleep = pause) -> bool:
        """Poll until the condition is true; False: not in time."""
        return any(is_so() for _ in self.polls(every_s, sleep))


# ------------------------------------------------------------------------------------------------------------- patience


log = logging.getLogger("rlhpc.patience")
Result = TypeVar("Result")
Clock = Callable[[], float]

DISK_PATIENCE_S = 300.0
MISSING_S = 30.0  # for a missing file that must exist: longer than a client's caches, short enough for a waiting person
BRIEF_S = 15.0
LONG_S = 60.0  # before a call that took longer to fail, the file system worked for a time
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 4.0  # the run goes on within five seconds of an answer

# Lasting errors: the request is wrong, or asks for a feature that the file system lacks.  All others may
# pass: ESTALE, EIO, ETIMEDOUT, ENOSPC, EDQUOT, EROFS, EACCES, EHOSTDOWN, ENOTCONN, ENOMEM, ENFILE …
_LASTING = frozenset(
    {
        *(errno.EINVAL, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EBADF, errno.EFAULT),
        *(errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EEXIST, errno.ENOTEMPTY, errno.EFBIG, errno.EMLINK),
        *(errno.ESPIPE, errno.EPIPE, errno.EILSEQ, errno.EOVERFLOW, errno.ENOEXEC, errno.ECHILD, errno.ESRCH),
    }
)


_OF_A_PERSON = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT})


def passes(error: BaseException, *, is_there: bool = True) -> bool:
    """True if the same call may succeed soon: for an OSError, and an error of ours that is caused by one.

    is_there: the file must exist, so that ENOENT may pass, too (a server's cache, a directory that is being replaced).
    """
    number = _errno_of(error)
    return number is not None and number not in _LASTING and (is_there or number != errno.ENOENT)


def _errno_of(error: BaseException) -> Optional[int]:  # noqa: UP045  Python 3.9
    """The errno of an OSError, or of the OSError that caused an error of ours; else None."""
    if isinstance(error, OSError):
        return error.errno
    return _errno_of(error.__cause__) if isinstance(error, RlhpcError) and error.__cause__ is not None else None


class Patience:
    """Tolerance for one thing that fails, from its first failure until it succeeds."""

    def __init__(
        self, clock: Clock = time.monotonic, longest_pause_s: float = LONGEST_PAUSE_S, limit_s: float = DISK_PATIENCE_S
    ) -> None:
        self._clock, self._limit_s, self._longest_pause_s = clock, limit_s, longest_pause_s
        self._failing_since: Optional[float] = None  # noqa: UP045  Python 3.9 evaluates it
        self.pause_s = 0.0  # seconds to wait after the last failure: doubles with every failure
        self._failed_at = 0.0
        self.trouble = ""  # why the last try failed and what happens next, for logs and people; "": it succeeded

    @property
    def may_try(self) -> bool:
        """True unless a try has failed very recently."""
        return self._failing_since is None or self._clock() - self._failed_at >= self.pause_s

    @property
    def is_exhausted(self) -> bool:
        """True if the last try failed and none has succeeded for too long."""
        return self._failing_since is not None and self._failed_at - self._failing_since > self._limit_s

    def failed(self, error: Exception) -> None:
        """Count a failed try, and set the next pause."""
        self._failed_at = self._clock()
        if self._failing_since is None:
            self._failing_since, self.pause_s = self._failed_at, 0.0
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), self._longest_pause_s)
        left_s = self._limit_s - (self._failed_at - self._failing_since)
        next_try = f"trying again for {left_s:.0f} s, next in {self.pause_s:.0f} s"
        self.trouble = f"{error}; {'not tried again' if self.is_exhausted else next_try}"

    def succeeded(self) -> None:
        """Reset after a try that succeeded."""
        self._failing_since, self.trouble = None, ""


class _Repeating(Patience):
    """Patience with one call that is repeated until it succeeds; raises the error once patience ends."""

    def __init__(
        self,
        what: object,
        clock: Clock,
        *,
        lasting: frozenset[int] = _LASTING,
        limit_s: Optional[float] = None,  # noqa: UP045
    ) -> None:
        """lasting: errors that are raised at once.  limit_s: None for DISK_PATIENCE_S."""
        limit_s = DISK_PATIENCE_S if limit_s is None else limit_s
        super().__init__(clock, limit_s=limit_s)
        self._what, self._lasting, self._most_s = what, lasting, limit_s
        self._began_s = self._clock()  # the last call

    def wait_after(self, error: Exception) -> float:
        """Seconds to wait before the next call."""
        number = _errno_of(error)
        if number is None or number in self._lasting:
            raise error
        if self._clock() - self._began_s > LONG_S:
            self.succeeded()
        self._limit_s = min(self._most_s, MISSING_S) if number == errno.ENOENT else self._most_s
        self.failed(error)
        if self.is_exhausted:
            raise error
        log.warning("%s: %s", self._what, self.trouble)
        self._began_s = self._clock() + self.pause_s
        return self.pause_s


def _never() -> bool:
    return False


def patiently(
    do: Callable[[], Result],
    what: object,
    *,
    is_there: bool = True,
    limit_s: Optional[float] = None,  # noqa: UP045  Python 3.9
    sleep: Sleep = pause,
    is_over: Callable[[], bool] = _never,
) -> Result:
    """Return what `do` returns, called again with growing pauses while the file system refuses.

    what: the path, or what is done, for the log.  is_there: False where ENOENT is an answer.  limit_s: None for
    DISK_PATIENCE_S.  is_over: returns True once nobody waits any more.  Raises what `do` raises: at once if the error
    does not pass, after MISSING_S if something is missing, else after limit_s or when is_over().
    """
    lasting = _LASTING if is_there else _LASTING | {errno.ENOENT}
    return _patiently(do, _Repeating(what, time.monotonic, lasting=lasting, limit_s=limit_s), sleep, is_over)


def _patiently(
    do: Callable[[], Result], patience: _Repeating, sleep: Sleep = pause, is_over: Callable[[], bool] = _never
) -> Result:
    while True:
        try:
            return do()
        except (OSError, RlhpcError) as error:
            if is_over():
                raise
            pause_s = patience.wait_after(error)
        sleep(pause_s)


def briefly(do: Callable[[], Result], what: object) -> Result:
    """Return what `do` returns, as `patiently` does, where a person waits: for BRIEF_S at most.

    Raises errors that a person can mend at once: rights, a read-only file system, a name.
    """
    return _patiently(do, _Repeating(what, time.monotonic, lasting=_LASTING | _OF_A_PERSON, limit_s=BRIEF_S))


async def patiently_aside(do: Callable[[], Result], what: object) -> Result:
    """Return the result of `do`, called in threads, and again while the file system refuses.  Never blocks the loop.

    If cancelled, a running call continues in its thread.  Raises as `patiently` does.
    """
    import asyncio  # which supervisors need not load

    return await patiently_awaited(lambda: asyncio.to_thread(do), what)


async def patiently_here(do: Callable[[], Result], what: object) -> Result:
    """Return the result of `do`, called in the event loop itself, which runs between two tries: for quick calls."""

    async def once() -> Result:
        return do()

    return await patiently_awaited(once, what)


async def patiently_awaited(
    do: Callable[[], Awaitable[Result]],
    what: object,
    *,
    limit_s: Optional[float] = None,  # noqa: UP045
) -> Result:
    """Return what `do` returns, awaited, again while the file system refuses.  Raises as `patiently` does."""
    import asyncio  # as above

    patience = _Repeating(what, asyncio.get_running_loop().time, limit_s=limit_s)
    while True:
        try:
            return await do()
        except (OSError, RlhpcError) as error:
            pause_s = patience.wait_after(error)
        await asyncio.sleep(pause_s)


def seen(look: Callable[[], Result], otherwise: Result) -> Result:
    """Return look(), or `otherwise` if the file system refuses it now: for displays and repeated checks."""
    try:
        return look()
    except OSError:
        return otherwise
    except RlhpcError as error:
        if not passes(error):
            raise
        return otherwise
