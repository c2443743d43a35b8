"""Results of a run's evaluations so far, from their directories.

Input: a run directory.  Output: figures by dataset and step; lines for people.  Steps that a later attempt has undone
are left out: their models are not the run's any more.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from launch.reading.evaluations import done_evaluations
from rlhpc.run_layout import RunLayout


def past_evaluations(layout: RunLayout) -> dict[str, dict[int, dict[str, Any]]]:
    """Figures by name of the dataset and step, ascending, of evaluations that are done."""
    found: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for each in done_evaluations(layout):
        if not each.is_undone:
            found[each.name][each.step] = each.figures
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
