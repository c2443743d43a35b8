"""The metrics of a run as one table: those of training, and those of evaluations made while it trained.

Input: a run directory, also of a running run, and patterns of names.  Output: CurveTable.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np

from launch.reading.evaluations import done_evaluations
from rlhpc.errors import ConfigError
from rlhpc.metrics.curve_table import CurveTable, tabulated
from rlhpc.metrics.curves import Curve, read_curves
from rlhpc.run_layout import RunLayout


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
