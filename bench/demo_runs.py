"""Runs of the demo's task for experiments with several settings and seeds: each is made once, and taken up again.

Input: overrides of configs/demo.toml.  Output: a complete run directory.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from launch.demo.run import NUM_PROBLEMS, RUN_FILE
from launch.demo.task import running_mean, write_dataset
from launch.demo.warm_start import make_model
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import Trained, event_paths, read_events

GOAL = 0.8  # reward, or accuracy
SMOOTHED_OVER = 9  # versions
LAST = 10  # versions whose mean is the final reward


def make_demo_model(root: Path) -> Path:
    """The demo's warm start, in `root`; it is made once."""
    make_model(root / "model", on_step=lambda phase, done, loss: None)
    return root / "model"


def environment() -> dict[str, str]:
    """Of a run whose reward function is one of bench: where its processes find that."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def complete_run(directory: Path, words: Sequence[str]) -> RunLayout:
    """Run to the end, from where it is.  Raises SystemExit with the last of its output if that fails."""
    layout = RunLayout(directory)
    if layout.summary.exists():
        return layout
    words = [f"run.name={directory.name}", f"run.directory={directory}", *words]
    again = "--resume" if layout.attempts.exists() else "--fresh"
    command = [sys.executable, "-m", "launch.cli", "run", str(RUN_FILE), *words, again]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return layout


def runs_of_arms(
    root: Path, arms: Mapping[str, Sequence[str]], *, num_seeds: int, num_steps: int
) -> Iterator[tuple[str, int, RunLayout]]:
    """Complete runs of every arm (name → overrides) and seed, one after the other: arm, seed, its directory."""
    model, data = make_demo_model(root), root / "train.jsonl"
    write_dataset(data, NUM_PROBLEMS, seed=0)
    own = [f"run.num_steps={num_steps}", f"model.path={model}", f"data.path={data}"]
    for seed, (arm, words) in product(range(num_seeds), arms.items()):
        yield arm, seed, complete_run(root / f"{arm}-{seed}", [f"run.seed={seed}", *own, *words])


@dataclass(frozen=True, slots=True)
class Rewards:
    """Of a complete run."""

    curve: tuple[float, ...]  # running mean by version
    final: float
    rollouts: float  # finished, those included that were replaced
    rollouts_to_goal: float  # nan: it did not get there

    @classmethod
    def of(cls, layout: RunLayout) -> Rewards:
        """Read summary.json."""
        by_version = json.loads(layout.summary.read_bytes())["reward_by_version"]
        rewards, rollouts = [mean for _, mean, _ in by_version], np.cumsum([count for _, _, count in by_version])
        curve = running_mean(rewards, SMOOTHED_OVER)
        reached = next((float(rollouts[i]) for i, value in enumerate(curve) if value >= GOAL), math.nan)
        return cls(tuple(curve), float(np.mean(rewards[-LAST:])), float(rollouts[-1]), reached)


def trained_metrics(layout: RunLayout) -> Iterator[Mapping[str, float]]:
    """What the trainer reported of each step."""
    for path in event_paths(layout.rollouts):
        for event in read_events(path).events.values():
            if isinstance(event, Trained):
                yield event.metrics


def known(values: Iterable[float]) -> list[float]:
    """Those that are not nan."""
    return [value for value in values if not math.isnan(value)]


def mean_and_deviation(values: Sequence[float], form: str) -> str:
    """Over seeds; a dash where there is none."""
    if not values:
        return "–"
    return f"{statistics.fmean(values):{form}} ± {statistics.pstdev(values):{form}}"
