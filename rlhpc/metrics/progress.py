"""The live progress line of a run.

Input: metrics of a step, or what the run is waiting for before the first one.  Output: text, written to a stream.  On a
terminal the line is rewritten in place, and items that do not fit are left out; in a log file, lines are infrequent, so
that a week's log stays readable.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rlhpc.contracts import Clock

_CLEAR_LINE = "\r\x1b[K"
_QUIET_S = 30.0  # least time between two lines in a log, except for the first and the last step


@dataclass(frozen=True, slots=True)
class Progress:
    """Metrics of one finished step."""

    step: int  # steps done
    num_steps: int
    reward: float
    trainer_tokens_per_s: float
    generator_tokens_per_s: float
    staleness: float  # the worst of the run so far, in versions
    eta_s: float | None


class ProgressLine:
    """Writes the line.  Errors of the stream are ignored: they must not end a run."""

    def __init__(self, stream: TextIO, is_terminal: bool, num_steps: int, clock: Clock = time.monotonic) -> None:
        """is_terminal: whether the stream understands a carriage return (stream.isatty())."""
        self._stream, self._is_terminal, self._num_steps, self._clock = stream, is_terminal, num_steps, clock
        self._last_s: float | None = None  # when the last line was written
        self._last_phase = ""
        self._is_open = False  # something stands on the terminal's line

    def update(self, progress: Progress) -> None:
        """Show the metrics of a finished step, if it is time to."""
        if self._is_terminal:
            self._rewrite(parts_of(progress))
        elif self._last_phase or self._is_due(progress.step):
            self._last_s, self._last_phase = self._clock(), ""
            self._write(" | ".join(parts_of(progress)) + "\n")

    def wait(self, phase: str, waits_for: str) -> None:
        """Show what the run does before it trains.  In a log, a line for each phase, and now and then another."""
        parts = [phase, waits_for] if waits_for else [phase]
        if self._is_terminal:
            self._rewrite(parts)
        elif phase != self._last_phase or self._is_due(0):
            self._last_s, self._last_phase = self._clock(), phase
            self._write(" | ".join(parts) + "\n")

    def finish(self) -> None:
        """Finish the last line, so that later output starts on a new one."""
        if self._is_open:
            self._is_open = False
            self._write("\n")

    def _rewrite(self, parts: Sequence[str]) -> None:
        self._is_open = True
        self._write(_CLEAR_LINE + fitting(parts, shutil.get_terminal_size().columns - 1))

    def _is_due(self, step: int) -> bool:
        return self._last_s is None or step >= self._num_steps or self._clock() - self._last_s >= _QUIET_S

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: closed
            return


def parts_of(progress: Progress) -> list[str]:
    """What the line says, the most important first.

    Example: step 120/2000 | 3 h 05 min left | reward 0.412 | staleness 1.2 | generate 48.1k tok/s | train 13.2k tok/s
    """
    left = [] if progress.eta_s is None else [f"{format_duration(progress.eta_s)} left"]
    return [
        f"step {progress.step}/{progress.num_steps}",
        *left,
        f"reward {progress.reward:.3f}",
        f"staleness {progress.staleness:.1f}",
        f"generate {format_count(progress.generator_tokens_per_s)} tok/s",
        f"train {format_count(progress.trainer_tokens_per_s)} tok/s",
    ]


def fitting(parts: Sequence[str], width: int) -> str:
    """As many parts as there is room for, whole; the first one is cut off where even that is too long."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(" | ") + len(part) > width:
            break
        line += f" | {part}"
    return line[:width]


def format_count(count: float) -> str:
    """Three digits and a power of a thousand: 950, 13.2k, 1.05M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size * 0.9995:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """Two units at most: 45 s, 12 min, 3 h 05 min, 2 d 04 h."""
    minutes = round(seconds / 60)
    if seconds < 59.5:
        return f"{max(0, round(seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"
