"""Standard output that cannot take what is printed: its locale, its reader, its disk."""

from __future__ import annotations

import io
import os
import sys


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
