"""Output of commands: words, JSON, tables, a pager, streams that may be closed.

In this file: numbers with nouns; JSON; optional packages; the pager; paths as users type them; aligned tables, and
durations in words; standard output.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any
from unicodedata import category, east_asian_width

from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError

# -------------------------------------------------------------------------------------------------------------- counted
#
# Numbers with their nouns, in messages.  Python 3.9 and the standard library.


def counted(number: int, noun: str) -> str:
    """ "1 step", "2 steps"; noun: in the singular, with a plural that adds s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def three_digits(number: float) -> str:
    """Three significant digits, but all digits from a thousand on: 0.075, 12.3, 1,234, 12,288."""
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def numbered(noun: str, first: int, last: int) -> str:
    """ "step 5", "steps 5 to 7"."""
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


# ------------------------------------------------------------------------------------------------------------ json text
#
# JSON for other programs: valid for any measured values.
#
# Input: dictionaries, lists and plain values.  Output: text.


def json_text(document: object, indent: int | None = None) -> str:
    """Format as JSON, with null for NaN and infinities, which JSON lacks."""
    return json.dumps(_finite(document), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


# ----------------------------------------------------------------------------------------------------- optional package
#
# Optional packages: imported where used, with an error that says how to install them.


def optional_module(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package.  Raises ConfigError naming the extra that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed ({error}): pip install 'rlhpc[{extra}]'") from error


# ---------------------------------------------------------------------------------------------------------------- pager
#
# Print more lines than fit on a screen, through the user's pager if stdout is a terminal.
#
# Lines are passed on as they come: the first screen appears before the last line is ready, and leaving the pager early
# ends the work.


def print_paged(lines: Iterable[str], environment: Mapping[str, str] = os.environ) -> None:
    """Print through $PAGER (default: less, which only pages more than a screen), or plainly if stdout is no terminal.

    Raises OSError only when printing plainly.
    """
    command = shlex.split(environment.get("PAGER", "less"))
    if sys.stdout.isatty() and command and command != ["cat"]:
        pager = _started(command, environment)
        if pager is not None:
            _feed(pager, lines)
            return
    for line in lines:
        print(line)


def _started(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str] | None:
    """Start a pager; None if there is no such program."""
    # As git does: less exits if everything fits on one screen.
    settings = {"LESS": "FRX", "LESSCHARSET": "utf-8", **environment}
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, env=settings, text=True, encoding="utf-8", errors="replace"
        )
    except OSError:
        return None


def _feed(pager: subprocess.Popen[str], lines: Iterable[str]) -> None:
    assert pager.stdin is not None
    try:
        for line in lines:
            pager.stdin.write(f"{line}\n")
        pager.stdin.close()
    except BrokenPipeError:  # the user left the pager
        pass
    except KeyboardInterrupt:  # less continues with the lines so far
        pass
    finally:
        _wait(pager)


def _wait(pager: subprocess.Popen[str]) -> None:
    while True:
        try:
            pager.communicate()
        except KeyboardInterrupt:  # for the pager, where it means "stop searching"
            continue
        except (BrokenPipeError, ValueError):  # closed already
            pager.wait()
        return


# ---------------------------------------------------------------------------------------------------------------- paths
#
# Paths: as users type them, times of changes, and the length of temporary ones.

LONGEST_TEMPORARY_PATH = 60  # a unix socket's path has 107 bytes, and vLLM's names have 36


def as_typed(path: Path) -> Path:
    """The path relative to the current directory if it is below it; absolute if the current directory is gone."""
    with suppress(FileNotFoundError, ValueError):
        return path.relative_to(Path.cwd())
    return path


def quoted(path: Path) -> str:
    """The path quoted as a word of a shell command."""
    return shlex.quote(str(path))


def file_and_settings(words: Sequence[str], what: str) -> tuple[Path | None, list[str]]:
    """The file among the words of a command, if there is one, and the overrides.  Raises ConfigError: several files.

    what: legal words, for people: "site file, and overrides (key=value)".
    """
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"{files[1]!r}: legal: at most one {what}")
    return Path(files[0]) if files else None, [word for word in words if "=" in word]


def without_dots(path: Path) -> Path:
    """Absolute path, with ".." resolved as the file system does: `link/..` is the parent of the link's target."""
    return path.resolve() if ".." in path.parts else path.absolute()


def written_unix_s(path: Path) -> float:
    """Time of a file's or directory's last change; 0 if it does not exist or is not accessible."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# ----------------------------------------------------------------------------------------------------------- text table

_CONTROL = r"\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_OBEYED = re.compile(rf"[{_CONTROL}\x1b]")
_OBEYED_BUT_COLOURS = re.compile(rf"[{_CONTROL}]|\x1b(?!\[[0-9;]*m)")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines, one per row, with two spaces between columns, none at the end.  Rows have equally many cells."""
    if not rows:
        return []
    widths = [max(columns_of(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(map(_filled, row, widths)).rstrip() for row in rows]


def columns_of(text: str) -> int:
    """Width of a text in terminal columns: two for a wide letter, none for a combining character."""
    if text.isascii():
        return len(text)
    return sum(0 if category(each) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(each) in "WF") for each in text)


def cut_to(text: str, width: int) -> str:
    """The longest beginning of a text that fits into this many columns."""
    while columns_of(text) > width:
        text = text[:-1]
    return text


def _filled(cell: str, width: int) -> str:
    return cell + " " * (width - columns_of(cell))


def wrapped(cells: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """Break one row into several, each cell between words to at most its width; no row if all cells are empty."""
    columns = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths)]
    return list(zip_longest(*columns, fillvalue=""))


def span(seconds: int) -> str:
    """A duration in words: 1 min 05 s, 3 h 05 min, 2 d 04 h."""
    for unit, lower, size in (("d", "h", 86400), ("h", "min", 3600), ("min", "s", 60)):
        if seconds >= size:
            rest = seconds % size // {"h": 3600, "min": 60, "s": 1}[lower]
            return f"{seconds // size} {unit} {rest:02d} {lower}"
    return f"{seconds} s"


def printable(text: str) -> str:
    """The text on one line, without control and unencodable characters, which names of files and logs may have."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def printable_line(text: str, longest: int = 160) -> str:
    """A line with its spaces, without control characters; cut if it is too long."""
    rest = len(text) - longest
    cut = text if rest <= 0 else f"{text[:longest]} … and {rest:,} characters"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def escaped(text: str, *, keeps_colours: bool = False) -> str:
    """Lines without terminal control and unencodable characters: logs contain sampled text."""
    pattern = _OBEYED_BUT_COLOURS if keeps_colours else _OBEYED
    return pattern.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def shortened(text: str, most: int = 400) -> str:
    """Return a text, such as an error, as one line of at most this many characters."""
    words = " ".join(text.split())
    return words if len(words) <= most else f"{words[: most - 2]} …"


# ------------------------------------------------------------------------------------------------------ standard output
#
# Standard streams that are closed or fail, and names that cannot be opened.


def print_whatever_happens() -> None:
    """Print escapes for letters that the locale lacks (LANG=en_US is Latin-1); replace closed streams by empty ones.

    For a closed stream (`2>&-`, or a daemon's) Python has None, and the next opened file would take its descriptor:
    a socket of this process would become the standard error of its children.
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
    """Print a text; without a reader it is lost, and the exit status is the same."""
    try:
        print(text, flush=True)
    except OSError:
        flush_or_give_up()


def say_or_lose(text: str) -> None:
    """Print a text on standard error; without a reader (a closed pipe, a full disk) it is lost."""
    with suppress(OSError, ValueError):  # ValueError: closed
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def flush_or_give_up() -> None:
    """Flush buffered output, or drop it if that fails: Python would try again at exit, and print an error."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def refused_by_the_system(error: OSError | UnicodeEncodeError) -> int:
    """Print a line about an OSError; returns the exit status.  Re-raises encoding errors that are bugs of ours."""
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
