"""The content of a run's report, before it is text or a page.

Input: a run directory.  Output: RunReport.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.common.counted import three_digits
from launch.reading.advice import advice_for
from launch.reading.happenings import Happening, Story, read_story
from launch.reading.hours import Hours, hours_of
from launch.reading.run_figures import RunFigures, read_figures
from launch.reading.timeline_chart import clock
from launch.run_files.run_state import run_name
from rlhpc.metrics.progress import format_count, format_duration
from rlhpc.run_layout import RunLayout

Evaluations = Mapping[str, Mapping[int, Mapping[str, Any]]]  # dataset → step → figure → value, low, high
MOST_MARKS = 60


@dataclass(frozen=True, slots=True)
class RunReport:
    """The report of one run, at the moment of reading."""

    figures: RunFigures
    story: Story
    hours: Hours
    advice: list[str]
    evaluations: Evaluations

    @property
    def marks(self) -> list[tuple[int, Happening]]:
        """Events, numbered, oldest first; if there are too many, only faults, and only the last of these."""
        told = [each for each in self.story.happenings if not each.is_planned]
        if len(told) > MOST_MARKS:
            told = [each for each in told if each.is_fault][-MOST_MARKS:]
        return [*enumerate(told, 1)]

    @property
    def num_faults_left_out(self) -> int:
        """Earlier ones than the marks, for which there is no room."""
        return len(self.story.faults) - sum(each.is_fault for _, each in self.marks)

    @property
    def headline(self) -> list[tuple[str, str]]:
        """(name, value) of the key figures, the most important first."""
        return _headline(self.figures, self.story)


def read_report(layout: RunLayout, evaluations: Evaluations) -> RunReport:
    """Read a run.  Raises ConfigError: no run is here; OSError."""
    figures = read_figures(layout)
    story = read_story(layout, figures.curves)
    return RunReport(figures, story, hours_of(layout, story, figures.curves), advice_for(figures), evaluations)


def as_text(report: RunReport, num_shown: int = 25) -> list[str]:
    """For a terminal: figures, events, recommendations."""
    width = max(len(name) for name, _ in report.headline)
    lines = [f"{name:<{width}}  {value}" for name, value in report.headline]
    marks = report.marks
    lines += ["", "What happened"] if marks else []
    if report.num_faults_left_out:
        earlier = report.num_faults_left_out + max(0, len(marks) - num_shown)
        lines.append(f"  ({earlier} earlier faults; --html FILE shows the last {len(marks)})")
    elif len(marks) > num_shown:
        lines.append(f"  ({len(marks) - num_shown} earlier ones: --html FILE shows them)")
    lines += [f"  {clock(each.unix_time_s, with_day=True)}  {each.who}: {each.brief}" for _, each in marks[-num_shown:]]
    if report.hours.by_use:
        lines += ["", f"{report.hours.unit}"]
        lines += [
            f"  {three_digits(hours):>8}  {use}"
            for use, hours in sorted(report.hours.by_use.items(), key=lambda each: -each[1])
        ]
    lines += ["", "Recommendations"]
    return lines + [f"  {said}" for said in report.advice or ["none: no process idles, and no metric is out of bounds"]]


def _headline(figures: RunFigures, story: Story) -> list[tuple[str, str]]:
    status = figures.status

    def last(name: str) -> float:
        return figures.curves[name].last if name in figures.curves else math.nan

    settings = figures.settings.get("run", {})
    total = status.get("num_steps") or settings.get("num_steps", "?")
    reward = figures.curves.get("reward/mean")
    rows = [
        ("run", run_name(figures.settings, figures.layout.root)),
        ("phase", "complete" if figures.summary else str(status.get("phase", "not begun"))),
        ("steps", f"{figures.num_steps} of {total}, policy version {status.get('version', '?')}"),
    ]
    if reward is not None:
        values = reward.values[np.isfinite(reward.values)]
        tenth = max(1, len(values) // 10)
        rows += [("reward", f"{values[:tenth].mean():.3f} → {values[-tenth:].mean():.3f}")] * bool(len(values))
    rows += [
        (
            "rollouts",
            f"{figures.sampled.num_rollouts:,} in segments, {figures.sampled.lengths_trained.total():,} trained",
        ),
        ("staleness", f"{last('staleness/mean'):.2f} on average lately; bound {last('staleness/bound'):.0f}"),
        (
            "idle",
            f"generators {_share(figures, 'generator/idle_ratio')}, trainer {_share(figures, 'trainer/idle_ratio')}",
        ),
        ("speed", f"{_rate(last('trainer/tokens_per_s'))} trained, {_rate(last('generator/tokens_per_s'))} sampled"),
        ("time", f"{format_duration(max(0.0, story.end_s - story.begin_s))} since the beginning"),
        ("faults", f"{len(story.faults)}"),
    ]
    of_run, *of_figures = rows  # a run may be called nanogpt
    return [of_run, *((name, value) for name, value in of_figures if "nan" not in value)]


def _share(figures: RunFigures, name: str) -> str:
    mean = figures.mean_of(name)
    return "not known" if mean is None else f"{mean:.0%}"


def _rate(value: float) -> str:
    return "nan" if math.isnan(value) else f"{format_count(value)} tok/s"
