"""Standard output that cannot take what is printed, and names that cannot be opened: locale, reader, disk."""

from __future__ import annotations

import io
import os
import sys

from launch.common.text_table import escaped
from rlhpc.exit_status import EXIT_CONFIG


def print_whatever_the_locale() -> None:
    """Of letters that it has not (LANG=en_US is Latin-1), print the numbers, as Python does on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_or_lose(text: str) -> None:
    """Print it; where nobody can read it any more it is lost, and the exit status says what it would say anyway."""
    try:
        print(text, flush=True)
    except OSError:
        flush_or_give_up()


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
    sys.stderr.write(f"rlhpc: {escaped(words)}\n")
    return EXIT_CONFIG


def _of_a_name(error: UnicodeEncodeError) -> str:
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        raise error
    return (
        f"{error.object!r}: this Python's names of files are in {encoding} (LC_ALL, PYTHONUTF8), so it cannot open "
        "this one; PYTHONUTF8=1 in the environment makes them UTF-8"
    )
