"""The evaluations of a run that are done, from their directories.

Input: a run directory.  Output: DoneEvaluation.  One whose step a later attempt has undone is marked: its model is not
the run's any more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlhpc.evaluation.settings import SUMMARY
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.timeline import Timeline

_DIRECTORY = re.compile(r".*-step_(\d{6,})-(.+)")  # RunLayout.checkpoint's digits: "step_2" may be in a name


@dataclass(frozen=True, slots=True)
class DoneEvaluation:
    """One dataset, at one step."""

    name: str  # of the dataset
    step: int
    figures: dict[str, Any]  # each with value, low, high
    is_undone: bool


def done_evaluations(layout: RunLayout) -> Iterator[DoneEvaluation]:
    """In no order; what is damaged, or begun anew, is left out.  Raises OSError: attempts.jsonl cannot be read."""
    timeline = Timeline.read(layout.attempts)
    for path in layout.evaluations.glob(f"*/{SUMMARY}"):
        if match := _DIRECTORY.fullmatch(path.parent.name):
            try:
                document, step = json.loads(path.read_bytes()), int(match[1])
                figures = {name: worth for name, worth in document["figures"].items() if _has_interval(worth)}
                is_undone = timeline.undone_by(step, document.get("attempt")) is not None
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            yield DoneEvaluation(match[2], step, figures, is_undone)


def _has_interval(worth: object) -> bool:
    return isinstance(worth, dict) and all(isinstance(worth.get(key), int | float) for key in ("value", "low", "high"))
