"""The figures of a run, gathered once: curves, distributions of what was trained, totals, settings.

Input: a run directory, also of a running run.  Output: RunFigures.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.run_files.run_state import read_document
from launch.view.standing import done_evaluations
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.segments import read_columns
from rlhpc.config.file import read_resolved
from rlhpc.config.rules import Config
from rlhpc.metrics.curves import Curve, CurveTable, read_curves, tabulated
from rlhpc.protocol.errors import ConfigError, SegmentError

# --------------------------------------------------------------------------------------------------------- metric table
#
# The metrics of a run as one table: those of training, and those of evaluations made while it trained.
#
# Input: a run directory, also of a running run, and patterns of names.  Output: CurveTable.


def metric_table(layout: RunLayout, patterns: Sequence[str] = ()) -> CurveTable:
    """Metrics whose names match one of the patterns (*, ?, [seq]; * also matches slashes); without patterns, all.

    Steps that a resume has undone are left out, attempts joined.  Figures of an evaluation are at the step of its
    checkpoint.
    Raises RunDirectoryError: no run is here; ConfigError: it has written nothing yet, or a pattern matches nothing;
    OSError.
    """
    layout.require_run()
    curves = read_curves(layout.tensorboard) | _of_evaluations(layout)
    if not curves:
        raise ConfigError(f"{layout.root}: no metrics yet: the first ones are written after the first step")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in curves):
            raise ConfigError(f"--tag {pattern!r}: no metric of this run matches{hint(pattern, [*curves])}")
    is_wanted = {name: not patterns or any(fnmatchcase(name, each) for each in patterns) for name in curves}
    return tabulated({name: curve for name, curve in curves.items() if is_wanted[name]})


def _of_evaluations(layout: RunLayout) -> dict[str, Curve]:
    """Without points of models that are not the run's any more: nothing in the event files says which these are."""
    curves = read_curves(layout.evaluations / layout.tensorboard.name)
    undone = defaultdict[str, list[int]](list)
    for each in done_evaluations(layout) if curves else ():
        if each.is_undone:
            for figure in each.figures:
                undone[f"evaluation/{each.name}/{figure}"].append(each.step)
    for name in undone.keys() & curves.keys():
        curve, is_kept = curves[name], ~np.isin(curves[name].steps, undone[name])
        curves[name] = Curve(curve.steps[is_kept], curve.values[is_kept], curve.unix_times_s[is_kept])
    return {name: curve for name, curve in curves.items() if len(curve.steps)}


def hint(pattern: str, names: list[str]) -> str:
    """What may be meant instead of a name, or pattern, that none of these matches."""
    close = difflib.get_close_matches(pattern, names, n=1)
    families = sorted({name.partition("/")[0] for name in names})
    return f" (did you mean {close[0]}?)" if close else f"; it has {', '.join(f'{each}/*' for each in families)}"


# ---------------------------------------------------------------------------------------------------------- run figures


_COLUMNS = (
    "groups/admitted_version",
    "groups/consumed_step",
    "groups/trained_version",
    "groups/rollout_offsets",
    "groups/drop_reason",
    "rollouts/token_offsets",
    "rollouts/finish_reason",
)


@dataclass(slots=True)
class Sampled:
    """The content of segments, as counts of rollouts, since a long run has a hundred million."""

    staleness: Counter[int] = field(default_factory=Counter)  # versions → trained rollouts
    lengths_trained: Counter[int] = field(default_factory=Counter)  # tokens of completions → trained rollouts
    lengths_dropped: Counter[int] = field(default_factory=Counter)  # the same of the others
    dropped: Counter[str] = field(default_factory=Counter)  # reason → groups
    num_groups: int = 0

    @property
    def num_rollouts(self) -> int:
        """Rollouts in segments, trained or not."""
        return self.lengths_trained.total() + self.lengths_dropped.total()


@dataclass(slots=True)
class RunFigures:
    """The figures of a run directory."""

    layout: RunLayout
    curves: dict[str, Curve]
    sampled: Sampled
    status: dict[str, Any]  # status.json; {} if there is none
    summary: dict[str, Any]  # summary.json; {} while the run is not complete
    settings: dict[str, Any]  # [config.json] as it stands, by section
    config: Config | None  # None: it cannot be read

    @property
    def num_steps(self) -> int:
        """Steps done."""
        told = self.status.get("step")
        return max([told if isinstance(told, int) else 0, *(int(c.steps[-1]) + 1 for c in self.curves.values())])

    def mean_of(self, name: str) -> float | None:
        """Mean over the second half of the steps, where a run has settled.  None: the metric was not written."""
        curve = self.curves.get(name)
        if curve is None:
            return None
        half = curve.values[len(curve.values) // 2 :]
        half = half[np.isfinite(half)]
        return float(half.mean()) if half.size else None


def read_figures(layout: RunLayout) -> RunFigures:
    """Read a run.  Raises RunDirectoryError: no run is here; OSError."""
    layout.require_run()
    try:
        config = read_resolved(layout)[0]
    except ConfigError:
        config = None
    return RunFigures(
        layout,
        read_curves(layout.tensorboard),
        read_sampled(layout),
        read_document(layout.status),
        read_document(layout.summary),
        settings_of(layout),
        config,
    )


def settings_of(layout: RunLayout) -> dict[str, Any]:
    """The resolved run file, by section and key; without what is of another form where it is damaged."""
    settings = read_document(layout.config).get("config")
    if not isinstance(settings, dict):
        return {}
    return {name: keys for name, keys in settings.items() if isinstance(keys, dict | list)}


def read_sampled(layout: RunLayout) -> Sampled:
    """Read single columns of segments, without checksums; unreadable parts are left out."""
    sampled = Sampled()
    for path in sorted(layout.rollouts.glob("segment_*.h5")):
        try:
            columns = read_columns(path, _COLUMNS)
        except SegmentError:
            continue
        sizes = np.diff(columns["groups/rollout_offsets"])
        lengths = np.diff(columns["rollouts/token_offsets"])
        age = columns["groups/trained_version"] - columns["groups/admitted_version"]
        has_age = columns["groups/trained_version"] >= 0  # the others trained no step
        is_of_trained = np.repeat(columns["groups/consumed_step"] >= 0, sizes)
        _count(sampled.staleness, np.repeat(age[has_age], sizes[has_age]))
        _count(sampled.lengths_trained, lengths[is_of_trained])
        _count(sampled.lengths_dropped, lengths[~is_of_trained])
        sampled.dropped.update(str(reason) for reason in columns["groups/drop_reason"] if reason)
        sampled.num_groups += len(sizes)
    return sampled


def _count(how_often: Counter[int], values: NDArray[np.int64]) -> None:
    for value, number in zip(*(each.tolist() for each in np.unique(values, return_counts=True)), strict=True):
        how_often[value] += number
