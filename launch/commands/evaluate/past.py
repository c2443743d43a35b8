"""Results of a run's evaluations so far, from their directories.

Input: a run directory.  Output: figures by dataset and step; lines for people.  Steps that a later attempt has undone
are left out: their models are not the run's any more.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

from rlhpc.evaluation.settings import SUMMARY
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.timeline import Timeline

_DIRECTORY = re.compile(r".*-step_(\d+)-(.+)")


def past_evaluations(layout: RunLayout) -> dict[str, dict[int, dict[str, Any]]]:
    """Figures by name of the dataset and step, ascending, of evaluations that are done."""
    timeline = Timeline.read(layout.attempts)
    found: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in layout.evaluations.glob(f"*/{SUMMARY}"):
        if match := _DIRECTORY.fullmatch(path.parent.name):
            try:
                document, step = json.loads(path.read_bytes()), int(match[1])
                figures = dict(document["figures"])
            except (OSError, ValueError, KeyError, TypeError):  # begun anew, or damaged
                continue
            if timeline.undone_by(step, document.get("attempt")) is None:
                found[match[2]][step] = figures
    return {name: dict(sorted(steps.items())) for name, steps in sorted(found.items())}


def past_values(layout: RunLayout, name: str, figure: str) -> dict[int, float]:
    """One figure of one dataset by step."""
    steps = past_evaluations(layout).get(name, {})
    return {step: float(figures[figure]["value"]) for step, figures in steps.items() if figure in figures}


def lines_about(past: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """A line for each dataset: the newest figure, and the best one."""
    return [f"evaluation  {name}: {_newest(steps)}" for name, steps in past.items() if any(steps.values())]


def _newest(steps: dict[int, dict[str, Any]]) -> str:
    step, figures = [(step, figures) for step, figures in steps.items() if figures][-1]
    figure, newest = next(iter(figures.items()))
    values = {at: each[figure]["value"] for at, each in steps.items() if figure in each}
    best = max(values, key=lambda at: values[at])
    said = f"{figure} {newest['value']:.3f} [{newest['low']:.3f}, {newest['high']:.3f}] at step {step}"
    return said if best == step else f"{said}; the best was {values[best]:.3f} at step {best}"
