"""The live progress line of a run.

Input: metrics of a step.  Output: text, written to a stream.  On a terminal the line is rewritten in place; in a log
file a whole line comes now and then, so that a week's log can be read.
"""

from __future__ import annotations

import shutil
import time
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
    staleness: float  # of the last batch, in versions
    eta_s: float | None


class ProgressLine:
    """Writes the line.  Errors of the stream are ignored: they must not end a run."""

    def __init__(self, stream: TextIO, is_terminal: bool, num_steps: int, clock: Clock = time.monotonic) -> None:
        """is_terminal: whether the stream understands a carriage return (stream.isatty())."""
        self._stream, self._is_terminal, self._num_steps, self._clock = stream, is_terminal, num_steps, clock
        self._last_s: float | None = None  # when the last line was written

    def update(
        self,
        step: int,
        reward: float,
        trainer_tokens_per_s: float,
        generator_tokens_per_s: float,
        staleness: float,
        eta_s: float | None,
    ) -> None:
        """Show the metrics of a finished step, if it is time to."""
        progress = Progress(
            step, self._num_steps, reward, trainer_tokens_per_s, generator_tokens_per_s, staleness, eta_s
        )
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(_CLEAR_LINE + format_progress(progress)[:width])
        elif self._is_due(step):
            self._last_s = self._clock()
            self._write(format_progress(progress) + "\n")

    def finish(self) -> None:
        """Finish the last line, so that later output starts on a new one."""
        if self._is_terminal:
            self._write("\n")

    def _is_due(self, step: int) -> bool:
        return self._last_s is None or step >= self._num_steps or self._clock() - self._last_s >= _QUIET_S

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: closed
            return


def format_progress(progress: Progress) -> str:
    """Return the line, without an end of line.

    Example: step 120/2000 | reward 0.412 | train 13.2k tok/s | generate 48.1k tok/s | staleness 1.2 | 3 h 05 min left
    """
    left = "" if progress.eta_s is None else f" | {format_duration(progress.eta_s)} left"
    return (
        f"step {progress.step}/{progress.num_steps} | reward {progress.reward:.3f}"
        f" | train {format_count(progress.trainer_tokens_per_s)} tok/s"
        f" | generate {format_count(progress.generator_tokens_per_s)} tok/s"
        f" | staleness {progress.staleness:.1f}{left}"
    )


def format_count(count: float) -> str:
    """Three digits and a power of a thousand: 950, 13.2k, 1.05M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
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
