"""Draw six charts of a run from its TensorBoard files into one picture, for a report or a machine without a browser.

`python examples/draw_charts.py RUN_DIR OUT.png`.  docs/metrics.md says what each name means, docs/operating.md how to
read it.  Needs matplotlib, which `make setup` and the extra `demo` bring.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# Title and the metrics that share a chart.
CHARTS = {
    "reward": ("reward/mean", "reward_part/answer", "reward_part/working"),
    "zero-variance groups": ("reward/zero_variance_share",),
    "staleness": ("staleness/bound", "staleness/max", "staleness/mean"),
    "idle": ("trainer/idle_ratio", "generator/idle_ratio"),
    "entropy": ("trainer/entropy",),
    "divergence of sampler and trainer": ("policy/mismatch_kl",),
}


def read_scalars(run_dir: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of every metric of a run, by name; steps that a resume has undone are left out."""
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: ([e.step for e in events.Scalars(name)], [e.value for e in events.Scalars(name)]) for name in names}


def draw(scalars: dict[str, tuple[list[int], list[float]]], picture: Path) -> list[str]:
    """Draw CHARTS into a PNG; returns the names that the run has not written."""
    figure = Figure(figsize=(10.0, 5.6), dpi=110, layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 3).flat, CHARTS.items(), strict=True):
        for name in names:
            if name in scalars:
                axes.plot(*scalars[name], label=name, linewidth=1.4)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    figure.supxlabel("optimiser step", fontsize=9)
    figure.savefig(picture)
    return [name for names in CHARTS.values() for name in names if name not in scalars]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw six charts of a run into one picture.")
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("picture", type=Path, metavar="OUT.png", help="picture to write")
    typed = parser.parse_args()
    if missing := draw(read_scalars(typed.run), typed.picture):
        print("not written by this run:", ", ".join(missing))
