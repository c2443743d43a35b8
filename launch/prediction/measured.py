"""Rates and lengths of an existing run, from the files that it has written.

Input: a run directory, also of a running run.  Output: figures by the names of Rates, and the groups that it resolved.
The first tenth of the steps is left out: they include compilation, and the ring is not full yet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.prediction.lengths import DrawnGroup, RecordedLengths
from launch.prediction.rates import Figure
from launch.prediction.ring import RingShape
from launch.reading.run_figures import RunFigures, columns_of_segments, read_figures
from rlhpc.buffer.resolved import DropReason
from rlhpc.errors import ConfigError
from rlhpc.metrics.curves import Curve
from rlhpc.packing.cost import FlopCost
from rlhpc.run_layout import RunLayout

FEWEST_STEPS = 10
_COLUMNS = (
    "groups/group_id",
    "groups/consumed_step",
    "groups/drop_reason",
    "groups/prompt_offsets",
    "groups/rollout_offsets",
    "rollouts/token_offsets",
)
_NUM_BLOCKS = 20  # of steps; the slope of an engine's step is fitted to their means
_WIDE, _CLEAR = 1.3, 0.7  # largest over smallest number decoded together, correlation: below these there is no slope
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Group:
    group_id: int
    step: int  # −1: dropped
    drawn: DrawnGroup


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one run."""

    figures: dict[str, Figure]  # by the names of Rates
    decoded_together: float  # by an engine, on average
    tells_slope: bool  # False: engine_sample_s is 0 because it is not known
    lengths: RecordedLengths
    run: RunFigures


def measure(layout: RunLayout, cost: FlopCost) -> Measured:
    """Measure a run.  cost: of the model.  Raises ConfigError: no run is here, or it is too young or too old."""
    run = read_figures(layout)
    steps = run.curves.get("time/step_s")
    if run.config is None:
        raise ConfigError(f"--from {layout.root}: its {layout.config.name} was written by another version")
    if steps is None or len(steps.steps) < FEWEST_STEPS:
        number = 0 if steps is None else len(steps.steps)
        raise ConfigError(f"--from {layout.root}: {number} steps are done; legal: a run of {FEWEST_STEPS} or more")
    first = int(steps.steps[len(steps.steps) // 10])
    found = _groups(layout)
    source = f"{layout.root}, steps {first} to {steps.steps[-1]}"
    trained = [group for group in found if group.step >= first]
    if not trained:
        raise ConfigError(f"--from {layout.root}: its segments have no trained group; legal: a run with some on disk")
    # Dropped groups belong to no step: take those of the same period, or their share would be too large.
    oldest, newest = min(group.group_id for group in trained), max(group.group_id for group in trained)
    groups = trained + [group for group in found if group.step < 0 and oldest <= group.group_id <= newest]
    table = _Table(run, first)
    engines = _engines(table)
    values = {
        "engine_step_s": engines.token_s - engines.slope_s * engines.decoded_together,
        "engine_sample_s": engines.slope_s,
        "prefill_token_s": 0.0,  # what it takes to read prompts is in the time of a token
        **_of_verifiers(table),
        **_of_trainer(table, trained, RingShape.of(run.config, cost)),
        **_of_weights(table),
        **_of_start(layout, steps),
    }
    figures = {name: Figure(value, source) for name, value in values.items()}
    lengths = RecordedLengths([group.drawn for group in groups], source)
    return Measured(figures, engines.decoded_together, engines.slope_s > 0, lengths, run)


class _Table:
    """Metrics of the steps that count, one row per step."""

    def __init__(self, run: RunFigures, first: int) -> None:
        self._run, steps = run, run.curves["time/step_s"].steps
        self.steps = steps[steps >= first]

    def __getitem__(self, name: str) -> Float64:
        """A metric of these steps; nan where it was not written."""
        found = np.full(len(self.steps), np.nan)
        curve = self._run.curves.get(name)
        if curve is not None:
            known = np.isin(curve.steps, self.steps)
            found[np.searchsorted(self.steps, curve.steps[known])] = curve.values[known]
        return found

    def mean(self, name: str) -> float | None:
        """The mean of a metric; None: it was never written."""
        values = self[name]
        return float(np.nanmean(values)) if np.isfinite(values).any() else None

    def tasks(self, family: str) -> list[str]:
        """Metrics of a family."""
        return [name for name in self._run.curves if name.startswith(f"{family}/")]

    @property
    def root(self) -> str:
        """The run directory, for messages."""
        return str(self._run.layout.root)


# ------------------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True, slots=True)
class _Engines:
    token_s: float
    decoded_together: float
    slope_s: float


def _engines(table: _Table) -> _Engines:
    """Means, and b of a + b·n by least squares over blocks of steps, where n has varied enough to tell; else 0."""
    together, token_s = table["generator/decoded_together"], table["generator/token_s"]
    busy_s = table["time/step_s"] * table["generator/live"] * (1 - table["generator/idle_ratio"])
    known = np.isfinite(together) & np.isfinite(token_s) & (busy_s > 0)
    if not known.any():
        raise ConfigError(
            f"--from {table.root}: no generator/token_s in its TensorBoard files, which earlier versions did not "
            "write; legal: a run of this version, or [rates] in the site file"
        )
    together, token_s, busy_s = together[known], token_s[known], busy_s[known]
    decoding_s = together * busy_s
    num_tokens = decoding_s / token_s
    mean_s, mean_n = float(decoding_s.sum() / num_tokens.sum()), float(decoding_s.sum() / busy_s.sum())
    blocks = [
        np.array([each.sum() for each in np.array_split(one, _NUM_BLOCKS)]) for one in (decoding_s, busy_s, num_tokens)
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        n, tau = blocks[0] / blocks[1], blocks[0] / blocks[2]
    is_told = np.isfinite(n) & np.isfinite(tau)
    return _Engines(mean_s, mean_n, min(_slope(n[is_told], tau[is_told]), mean_s / mean_n))


def _of_verifiers(table: _Table) -> dict[str, float]:
    means = [table.mean(name) for name in table.tasks("verifier_mean_s")]
    known = [mean for mean in means if mean is not None]
    return {"judge_s": float(np.mean(known))} if known else {}


def _slope(n: Float64, tau: Float64) -> float:
    """The slope of tau over n; 0 if it cannot be told."""
    if len(n) < 5 or n.min() <= 0 or n.max() / n.min() < _WIDE or tau.std() == 0:
        return 0.0
    if np.corrcoef(n, tau)[0, 1] < _CLEAR:
        return 0.0
    return max(0.0, float(np.polyfit(n, tau, 1)[0]))


# ------------------------------------------------------------------------------------------------------------- trainer


def _of_trainer(table: _Table, trained: list[_Group], shape: RingShape) -> dict[str, float]:
    """Pack the batches again, as they were, and compare the time of each step with the cost of its batch."""
    batches: dict[int, list[DrawnGroup]] = {}
    for group in trained:
        batches.setdefault(group.step, []).append(group.drawn)
    steps = zip(table.steps.tolist(), table["trainer/step_s"].tolist(), table["trainer/step_parts"], strict=True)
    pairs = [
        (_pflops(batches[step], 1 if np.isnan(num_parts) else int(num_parts), shape), seconds)
        for step, seconds, num_parts in steps
        if len(batches.get(step, ())) == shape.admission.groups_per_step and np.isfinite(seconds)
    ]
    if not pairs:
        raise ConfigError(f"--from {table.root}: its segments have no complete batch of these steps")
    pflops, took_s = np.array(pairs).T
    slope, fixed = took_s.mean() / pflops.mean(), 0.0
    if len(pairs) >= FEWEST_STEPS and pflops.std() > 0.05 * pflops.mean():
        fitted, intercept = np.polyfit(pflops, took_s, 1)
        if fitted > 0 and intercept > 0:
            slope, fixed = fitted, intercept
    return {"trainer_step_s": float(fixed), "trainer_pflop_s": float(slope), "between_steps_s": _between(table)}


def _pflops(batch: list[DrawnGroup], num_parts: int, shape: RingShape) -> float:
    """Of a batch that was trained in parts: which groups were in which is not written; short ones finish first."""
    if num_parts > 1:
        batch = sorted(batch, key=lambda group: int(group.tokens.max()))
    parts = np.array_split(np.arange(len(batch)), min(num_parts, len(batch)))
    return sum(shape.pflops(np.concatenate([batch[place].trained_tokens for place in part])) for part in parts)


def _between(table: _Table) -> float:
    """The part of a step outside its named parts; the median, since some steps include checkpoints."""
    parts = [table[name] for name in ("time/wait_for_groups_s", "trainer/step_s")]
    working_s = np.nansum([*parts, table["time/pack_s"]], axis=0)
    live_s = np.nan_to_num(table["time/wait_for_weights_s"])
    waited_s = np.maximum(0.0, live_s - working_s)  # for the previous version to be live, before the next is published
    packed_s = np.nan_to_num(table["time/pack_s"])
    rest = table["time/step_s"] - working_s - waited_s - np.nan_to_num(table["weights/publish_s"]) + packed_s
    return max(0.0, float(np.nanmedian(rest)))


# ------------------------------------------------------------------------------------------------------------- the rest


def _of_weights(table: _Table) -> dict[str, float]:
    """Rates of publications and checkpoints."""
    names = {"publish_s": "weights/publish_s", "live_s": "time/wait_for_weights_s", "pause_s": "weights/pause_s"}
    found = {name: table.mean(metric) for name, metric in names.items()}
    saves = np.unique(table["time/checkpoint_s"])
    saves = saves[np.isfinite(saves) & (saves > 0)]
    if saves.size:
        found["save_s"] = float(saves.mean())
    return {name: max(0.0, value) for name, value in found.items() if value is not None}


def _of_start(layout: RunLayout, steps: Curve) -> dict[str, float]:
    """Seconds until the first step began, from the beginning of the attempt that made it; those before have failed."""
    began_s = float(steps.unix_times_s[0] - steps.values[0])
    try:
        whole = (line for line in layout.attempts.read_bytes().splitlines() if line.endswith(b"}"))
        lines: list[dict[str, Any]] = list(map(json.loads, whole))
        line = [each for each in lines if each["unix_time_s"] < began_s][-1]
        is_from_start = line["resume_step"] is None and steps.steps[0] == 0
        return {"start_s": began_s - float(line["unix_time_s"])} if is_from_start else {}
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return {}


def _groups(layout: RunLayout) -> list[_Group]:
    """Trained and zero-variance groups, complete ones only; damaged files are skipped."""
    found = []
    for columns in columns_of_segments(layout, _COLUMNS):
        lengths = np.diff(columns["rollouts/token_offsets"])
        prompts = np.diff(columns["groups/prompt_offsets"])
        borders = columns["groups/rollout_offsets"]
        for at, reason in enumerate(columns["groups/drop_reason"]):
            tokens = lengths[borders[at] : borders[at + 1]].astype(np.int64)
            if not len(tokens) or str(reason) not in ("", DropReason.NO_SPREAD.value):
                continue
            drawn = DrawnGroup(int(prompts[at]), tokens, has_spread=not reason)
            found.append(_Group(int(columns["groups/group_id"][at]), int(columns["groups/consumed_step"][at]), drawn))
    return found
