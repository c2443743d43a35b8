"""Report the result of a demo run: a table for the terminal and a plot of the learning curve.

Input: summary.json as a dictionary.  Output: text and a PNG file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SMOOTHED_OVER = 9  # versions on either side of the running mean together

_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("steps", "optimiser steps", lambda v: f"{v:,.0f}"),
    ("rollouts_trained", "rollouts trained", lambda v: f"{v:,.0f}"),
    ("reward_first_tenth", "reward, first tenth of steps", lambda v: f"{v:.3f}"),
    ("reward_last_tenth", "reward, last tenth of steps", lambda v: f"{v:.3f}"),
    ("staleness_max", "staleness, worst (versions)", lambda v: f"{v:.0f}"),
    ("staleness_bound", "staleness, bound (versions)", lambda v: f"{v:.0f}"),
    ("rollouts_spanning_update", "rollouts that span a weight update", lambda v: f"{v:.0%}"),
    ("packing_fill", "packing fill", lambda v: f"{v:.0%}"),
    ("generator_tokens_per_s", "generated tokens per second", lambda v: f"{v:,.0f}"),
    ("trainer_tokens_per_s", "trained tokens per second", lambda v: f"{v:,.0f}"),
    ("generator_idle_ratio", "generators idle", lambda v: f"{v:.0%}"),
    ("trainer_idle_ratio", "trainer idle", lambda v: f"{v:.0%}"),
    ("training_s", "training (s)", lambda v: f"{v:.0f}"),
    ("wall_s", "run, engines' start included (s)", lambda v: f"{v:.0f}"),
)


def render_table(summary: Mapping[str, Any]) -> str:
    """One line a figure, names to the left, numbers flush right; figures that are missing are left out."""
    rows = [(label, form(float(summary[key]))) for key, label, form in _ROWS if _is_number(summary.get(key))]
    left, right = max(len(label) for label, _ in rows), max(len(value) for _, value in rows)
    rule = "─" * (left + right + 3)
    return "\n".join((rule, *(f"{label:<{left}}   {value:>{right}}" for label, value in rows), rule))


def draw_learning_curve(path: Path, versions: Sequence[int], rewards: Sequence[float]) -> None:
    """Draw mean reward over policy version, with a running mean, into a PNG.  Raises OSError."""
    from matplotlib.figure import Figure  # half a second to import, and needed once

    figure = Figure(figsize=(7.0, 4.0), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(versions, rewards, ".", color="#9bb8d3", markersize=5, label="each version")
    axes.plot(versions, running_mean(rewards, _SMOOTHED_OVER), color="#1f4e79", linewidth=2, label="running mean")
    axes.set(xlabel="policy version (optimiser steps applied)", ylabel="mean reward", ylim=(0, 1.02))
    axes.set_title("Every rollout counts for the version that admitted it", fontsize=10, loc="left")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over a centred window of `width` values, shorter at both ends."""
    array, half = np.asarray(values, float), width // 2
    return [float(array[max(0, i - half) : i + half + 1].mean()) for i in range(len(array))]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
