"""Write a step's metrics under their stable names, over optimiser steps.

Input: named numbers and sampled texts.  Output: calls of TensorBoardWriter.  An unknown name is a bug and is refused.
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


class Recorder:
    """Checks metric names; the writers handle the format."""

    def __init__(
        self,
        directory: Path,
        *,
        seam: int | None = None,
        find: Callable[[str], Metric] = find_metric,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Create event files and write the dashboard's layout.

        seam: the step at which an attempt that is not the first continues; what was written from it on is undone.
        `find` returns a metric's row or raises KeyError.  Raises RunDirectoryError if a file cannot be created.
        """
        self._find = find
        self._writer = TensorBoardWriter(directory, wall_clock)
        if seam is not None:
            self._writer.undo_from(seam)
        self._writer.layout(dashboard())

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the metrics of one optimiser step.

        Raises KeyError naming a metric that is not in the table; nothing is written then.
        """
        for name in scalars:
            self._find(name)
        self._writer.scalars(step, scalars)

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
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Close the writer.  Idempotent."""
        self._writer.close(timeout_s)


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
