"""Draw the learning curve of a demo run.

Input: rewards by version.  Output: a PNG file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

_SMOOTHED_OVER = 9  # versions on either side of the running mean together


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
