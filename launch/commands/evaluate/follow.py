"""`rlhpc evaluate RUN_DIR DATA --follow`: evaluate what a run saves, while it trains.

Input: a run directory.  Output: an evaluation of the newest checkpoint, again and again until the run is over; curves
for TensorBoard; the best model so far, as an HF checkpoint; an end of the run where it gets no better.  A checkpoint is
one weight version, and engines of our own sample it: the run does not notice.  All state is in the evaluations on disk.

    RUN_DIR/evaluations/tensorboard/…                  evaluation/DATA/FIGURE against the step
    RUN_DIR/evaluations/best-DATA/, rlhpc_figures.json in it
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.commands.evaluate.evaluation import Evaluation, plan_evaluation
from launch.commands.evaluate.report import Report
from launch.commands.evaluate.target import find_target
from launch.commands.stop import stop_run
from launch.common.paths import without_dots
from rlhpc.errors import CheckpointError, ConfigError
from rlhpc.evaluation.settings import SUMMARY
from rlhpc.files import write_atomically
from rlhpc.metrics.tensorboard_writer import TensorBoardWriter
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.directory import KnownCheckpoints

FIGURES = "rlhpc_figures.json"  # in the best model's directory
LOOK_S = 5.0
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Following:
    """How a run is followed."""

    every: int  # least number of steps between two evaluations
    best: str | None  # figure whose best model is kept
    stop_after: int | None  # evaluations in a row without a better one: the run is stopped
    patience_s: float  # without a sign of life of the run


def following(options: argparse.Namespace) -> Following | None:
    """None: the run is not followed.  Raises ConfigError for options that mean nothing together."""
    given = {"--every": options.every, "--keep-best": options.keep_best, "--stop-after": options.stop_after}
    if not options.follow:
        for option, value in given.items():
            if value is not None:
                raise ConfigError(f"{option} {value}: how a run is followed; use it with --follow")
        return None
    for option, value in (("--step", options.step), ("--out", options.out), ("--site", options.site)):
        if value is not None:
            raise ConfigError(f"{option} {value}: not with --follow, which evaluates the newest checkpoints, here")
    if options.stop_after is not None and options.keep_best is None:
        raise ConfigError(f"--stop-after {options.stop_after}: no better in what? Use it with --keep-best FIGURE")
    for option, value in (("--every", options.every), ("--stop-after", options.stop_after)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}; legal: 1 or more")
    return Following(options.every or 1, options.keep_best, options.stop_after, options.patience_s)


def follow_run(options: argparse.Namespace, how: Following, tell: Tell) -> int:
    """Returns 0 when the run is complete or was stopped, 1 when it has given no sign of life for too long."""
    layout = RunLayout(without_dots(options.model))
    if not layout.is_run:
        raise ConfigError(f"--follow: {layout.root} is no run directory")
    steps, life = _Steps(layout, how.every), _Life(layout, how.patience_s)
    curves = TensorBoardWriter(layout.root / "evaluations" / "tensorboard")
    try:
        while True:
            is_complete = layout.summary.exists()
            step = steps.due()
            if step is not None:
                steps.last = step
                _evaluate(layout, step, options, how, curves, tell)
            elif is_complete:
                return 0
            elif not life.shows:
                tell(f"{layout.root}: no sign of life for {how.patience_s:g} s; not followed any more")
                return 1
            else:
                time.sleep(LOOK_S)
            if how.best is not None and how.stop_after is not None:
                past = _past(layout, options.data, how.best)
                if _is_no_better(past, how.stop_after):
                    tell(f"{how.best} is no better than {max(past.values()):.3f} for {how.stop_after} evaluations")
                    return stop_run(layout, now=False, tell=tell)
    finally:
        curves.close()


def _evaluate(
    layout: RunLayout, step: int, options: argparse.Namespace, how: Following, curves: TensorBoardWriter, tell: Tell
) -> None:
    def done(report: Report, model: Path) -> None:
        name = f"evaluation/{evaluation.settings.config.data[0].path.stem}"
        curves.scalars(step, {f"{name}/{figure}": each.value for figure, each in report.figures.items()})
        curves.flush()
        if how.best is not None:
            _keep_if_best(layout, evaluation, report, model, how.best, tell)

    try:
        evaluation = plan_evaluation(find_target(layout.root, step), options)
        report = evaluation.report(tell, done=done)
    except CheckpointError as error:  # the run has deleted it, or it is damaged; the next one comes
        tell(f"step {step} is not evaluated: {error}")
        return
    print(json.dumps(report.as_json()) if options.json else report.as_text(), flush=True)


def _keep_if_best(
    layout: RunLayout, evaluation: Evaluation, report: Report, model: Path, figure: str, tell: Tell
) -> None:
    if figure not in report.figures:
        raise ConfigError(f"--keep-best {figure}: not a figure of this evaluation; legal: {', '.join(report.figures)}")
    data, value = evaluation.settings.config.data[0].path, report.figures[figure].value
    others = _past(layout, data, figure)
    if any(value <= other for other in others.values()):
        return
    place = layout.root / "evaluations" / f"best-{data.stem}"
    write_atomically(model / FIGURES, json.dumps(report.as_json(), indent=1).encode())
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    model.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    tell(f"{place}: the best model so far, {figure} {value:.3f}")


def _past(layout: RunLayout, data: Path, figure: str) -> dict[int, float]:
    """The figure by step, of the evaluations on this dataset that are done."""
    found: dict[int, float] = {}
    for step, directory in _evaluations(layout, data):
        try:
            document = json.loads((directory / SUMMARY).read_bytes())
            found[step] = float(document["figures"][figure]["value"])
        except (FileNotFoundError, KeyError):
            continue
    return dict(sorted(found.items()))


def _evaluations(layout: RunLayout, data: Path) -> Iterator[tuple[int, Path]]:
    for directory in (layout.root / "evaluations").glob(f"*-step_*-{data.stem}"):
        number = directory.name.removesuffix(f"-{data.stem}").rpartition("step_")[2]
        if number.isdecimal():
            yield int(number), directory


def _is_no_better(past: dict[int, float], num_evaluations: int) -> bool:
    values = list(past.values())
    if len(values) <= num_evaluations:
        return False
    return max(values[-num_evaluations:]) <= max(values[:-num_evaluations])


class _Steps:
    """Which checkpoint is due."""

    def __init__(self, layout: RunLayout, every: int) -> None:
        self._checkpoints, self._every = layout.checkpoints, every
        self.last: int | None = None

    def due(self) -> int | None:
        """The newest one, if it is far enough from the last."""
        if not self._checkpoints.is_dir():
            return None
        steps = [step for step, _ in KnownCheckpoints(self._checkpoints).steps()]
        newest = max(steps, default=None)
        if newest is None or (self.last is not None and newest < self.last + self._every):
            return None
        return newest


class _Life:
    """Whether a run has shown that it lives, by the file that its controller writes twice a second."""

    def __init__(self, layout: RunLayout, patience_s: float) -> None:
        self._status, self._patience_s = layout.status, patience_s
        self._seen, self._seen_s = -1, time.monotonic()

    @property
    def shows(self) -> bool:
        """False once it has not changed for too long."""
        now = time.monotonic()
        changed = self._status.stat().st_mtime_ns if self._status.exists() else -1
        if changed != self._seen:
            self._seen, self._seen_s = changed, now
        return now - self._seen_s < self._patience_s
