"""`rlhpc check RUN_DIR`: find damage in a run directory; a table for people, JSON for programs, progress meanwhile."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TextIO

from launch.checks.run_check import check_run, chosen_step
from launch.checks.run_rows import Row, Verdict
from launch.common.paths import without_dots
from launch.common.text_table import aligned, columns_of, cut_to, printable
from rlhpc.errors import ConfigError
from rlhpc.run_layout import RunLayout

SOUND, DAMAGE = 0, 1
QUIET_S = 2.0  # what is done sooner needs no progress
EVERY_S = 10.0  # between lines where the stream is no terminal


def check_run_directory(options: argparse.Namespace) -> int:
    """Print the check of a run directory; returns 1 if anything is damaged.  Raises ConfigError."""
    if options.overrides or options.site:
        raise ConfigError(f"{options.run_file}: a run directory takes neither overrides nor --site; legal: --json")
    return report_run(RunLayout(without_dots(options.run_file)), as_json=options.json)


class ProgressNote:
    """Says what is being read: one changing line on a terminal, a line now and then elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._said_at = time.monotonic() + QUIET_S - (0.0 if self._is_terminal else EVERY_S)
        self._width = 0

    def __call__(self, text: str) -> None:
        """Say it, unless something was said a moment ago."""
        now = time.monotonic()
        if now - self._said_at < (0.1 if self._is_terminal else EVERY_S):
            return
        self._said_at = now
        line = printable(f"reading {text}")
        if self._is_terminal:
            line = cut_to(line, shutil.get_terminal_size().columns - 1)  # of two lines "\r" would leave the first
        width = columns_of(line)
        self._stream.write(f"\r{line}{' ' * (self._width - width)}" if self._is_terminal else f"{line}\n")
        self._stream.flush()
        self._width = max(self._width, width)

    def close(self) -> None:
        """Take the line away."""
        if self._is_terminal and self._width:
            self._stream.write(f"\r{'':<{self._width}}\r")
            self._stream.flush()


def report_run(layout: RunLayout, *, as_json: bool) -> int:
    """Check a run and print; returns 0 if it is sound, 1 if there is damage.  Raises ConfigError: not a run."""
    with closing(ProgressNote(sys.stderr)) as progress:
        rows = check_run(layout, progress)
    is_damaged = any(row.verdict is Verdict.DAMAGED for row in rows)
    print(as_document(layout, rows, is_damaged=is_damaged) if as_json else as_table(layout, rows))
    return DAMAGE if is_damaged else SOUND


def as_table(layout: RunLayout, rows: Sequence[Row]) -> str:
    """Lay the rows out for people; the last line is the sum."""
    parts = ["", *(row.part for row in rows)]
    lines = aligned(
        [(row.part if row.part != before else "", row.name, row.verdict.value, row.text)
         for row, before in zip(rows, parts, strict=False)]
    )  # fmt: skip
    num_damaged = sum(row.verdict is Verdict.DAMAGED for row in rows)
    step = chosen_step(list(rows))
    resume = f"a resume starts from step {step}" if step is not None else "there is no checkpoint to resume from"
    lines.append(f"{layout.root}: {f'{num_damaged} damaged' if num_damaged else 'sound'}; {resume}")
    return "\n".join(lines)


def as_document(layout: RunLayout, rows: Sequence[Row], *, is_damaged: bool) -> str:
    """The same as JSON."""
    document = {
        "run_dir": str(layout.root),
        "is_damaged": is_damaged,
        "resume_step": chosen_step(list(rows)),
        "rows": [asdict(row) | {"verdict": row.verdict.value} for row in rows],
    }
    return json.dumps(document, indent=1)
