"""Standard streams that are closed or cannot take what is printed, and names that cannot be opened."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from launch.common.text_table import escaped
from rlhpc.exit_status import EXIT_CONFIG


def print_whatever_happens() -> None:
    """Of letters that the locale lacks (LANG=en_US is Latin-1) print the numbers; of closed streams make empty ones.

    Python has None in the place of a stream that is closed (`2>&-`, or a daemon's), and the next file that is opened
    would take its descriptor: a socket of this process would become the standard error of those that it starts.
    """
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _open_what_is_closed() -> None:
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(nowhere, True)
    os.close(nowhere)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123  for as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123


def print_or_lose(text: str) -> None:
    """Print it; where nobody can read it any more it is lost, and the exit status says what it would say anyway."""
    try:
        print(text, flush=True)
    except OSError:
        flush_or_give_up()


def say_or_lose(text: str) -> None:
    """The same on standard error, which may be a pipe that nobody reads any more, or a full disk."""
    with suppress(OSError, ValueError):  # ValueError: closed
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def flush_or_give_up() -> None:
    """Write what is buffered, or drop it: Python would try again at exit, and complain on stderr."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def refused_by_the_system(error: OSError | UnicodeEncodeError) -> int:
    """Say in one line what the system refused; returns the exit status.  Raises an error of encoding that is ours."""
    if isinstance(error, UnicodeEncodeError):
        words = _of_a_name(error)
    else:
        flush_or_give_up()
        if isinstance(error, BrokenPipeError):  # `rlhpc status … | head`
            return 0
        where = f"{error.filename}: " if error.filename is not None else ""
        words = f"{where}{error.strerror or error}"
        if isinstance(error, FileNotFoundError) and error.filename is None:  # of getcwd alone
            words = "the current directory has been deleted: go to another, or name whole paths"
    say_or_lose(f"rlhpc: {escaped(words)}")
    return EXIT_CONFIG


def _of_a_name(error: UnicodeEncodeError) -> str:
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        raise error
    return (
        f"{error.object!r}: this Python's names of files are in {encoding} (LC_ALL, PYTHONUTF8), so it cannot open "
        "this one; PYTHONUTF8=1 in the environment makes them UTF-8"
    )
