"""Write a step's metrics under their stable names, over three axes.

Input: named numbers and sampled texts.  Output: calls of TensorBoardWriter.  An unknown name is a bug and is refused.
The key metrics appear three times: NAME over optimiser steps, by_tokens/NAME over trained tokens and by_seconds/NAME
over seconds, so that runs with other batch sizes or on other machines can be laid side by side.  Each axis has a
directory of its own, so that a resume can undo it (tensorboard_writer.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from numpy.typing import ArrayLike

from rlhpc.metrics.layout import dashboard
from rlhpc.metrics.names import HISTOGRAMS, Metric, find_metric
from rlhpc.metrics.tensorboard_writer import TensorBoardWriter

_LONGEST_TEXT = 4_000  # characters of a sample that are shown


class Sample(NamedTuple):
    """One completion to show; a plain tuple of the same four works as well."""

    prompt: str
    completion: str
    reward: float
    reference: str


class Seam(NamedTuple):
    """Where an attempt continues, on every axis."""

    step: int
    tokens: int  # trained so far
    seconds: float  # of all attempts so far


class Recorder:
    """Checks metric names; the writers handle the format."""

    def __init__(
        self,
        directory: Path,
        *,
        seam: Seam | None = None,
        find: Callable[[str], Metric] = find_metric,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Create event files and write the dashboard's layout.

        seam: of an attempt that is not the first; what was written after it is undone.  `find` returns a metric's row
        or raises KeyError.  Raises RunDirectoryError if a file cannot be created.
        """
        self._find = find
        self._writer = TensorBoardWriter(directory, wall_clock)
        self._by_tokens = TensorBoardWriter(directory / "by_tokens", wall_clock)
        self._by_seconds = TensorBoardWriter(directory / "by_seconds", wall_clock)
        if seam is not None:  # steps are counted from 0; the point of a step stands at what it has come to
            self._writer.undo_from(seam.step)
            self._by_tokens.undo_from(seam.tokens + 1)
            self._by_seconds.undo_from(int(seam.seconds) + 1)
        self._writer.layout(dashboard())

    def step(self, step: int, scalars: Mapping[str, float], tokens: int, seconds: float) -> None:
        """Write the metrics of one optimiser step.

        tokens: trained so far; seconds: of all attempts so far.  They are the other two axes.
        Raises KeyError naming a metric that is not in the table; nothing is written then.
        """
        keys = {name: value for name, value in scalars.items() if self._find(name).on_every_axis}
        self._writer.scalars(step, scalars)
        if keys:
            self._by_tokens.scalars(tokens, {f"by_tokens/{name}": value for name, value in keys.items()})
            self._by_seconds.scalars(int(seconds), {f"by_seconds/{name}": value for name, value in keys.items()})

    def histogram(self, name: str, step: int, values: ArrayLike) -> None:
        """Write a distribution.  Raises KeyError if the name is not among names.HISTOGRAMS."""
        if name not in HISTOGRAMS:
            raise KeyError(f"histogram {name!r} is not in rlhpc/metrics/names.py")
        self._writer.histogram(name, step, values)

    def samples(self, step: int, samples: Sequence[tuple[str, str, float, str]]) -> None:
        """Write completions as text, one tag for each place in the list."""
        for index, sample in enumerate(samples):
            self._writer.text(f"samples/{index}", step, sample_markdown(Sample(*sample)))

    def guard(self, step: int, text: str) -> None:
        """Write what the guard did at a step, as text."""
        self._writer.text("guard/event", step, _verbatim(text))

    def config(self, text: str) -> None:
        """Write the resolved configuration as text."""
        self._writer.text("run/config", 0, _verbatim(text))

    def resumed(self, step: int, attempt: int) -> None:
        """Mark where this attempt continues."""
        self._writer.mark_resume(step, attempt)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything is written or lost; False if that took longer."""
        return all(writer.flush(timeout_s) for writer in self._writers)

    def close(self, timeout_s: float = 10.0) -> None:
        """Close the writers.  Idempotent."""
        for writer in self._writers:
            writer.close(timeout_s)

    @property
    def _writers(self) -> tuple[TensorBoardWriter, ...]:
        return self._writer, self._by_tokens, self._by_seconds


def sample_markdown(sample: Sample) -> str:
    """Format a sample so that nothing in it is read as Markdown."""
    blocks = [f"**reward {sample.reward:g}**"]
    for title in ("reference", "prompt", "completion"):
        blocks += [title, _verbatim(getattr(sample, title))]
    return "\n\n".join(blocks)


def _verbatim(text: str) -> str:
    """An indented block: unlike a fence, no text can end it."""
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}… ({len(text)} characters)"
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
