"""Compare a step that was trained again with what was recorded of it the first time."""

from __future__ import annotations

import logging
import math

from rlhpc.buffer.history import RecordedStep
from rlhpc.messages import StepReport

log = logging.getLogger("rlhpc.train_loop")

COMPARED = ("loss", "grad_norm")
TOLERANCE = 1e-3  # relative and absolute: kernels and reductions may differ between machines and layouts


def compare(
    recorded: RecordedStep, groups: list[int], trained_version: int, report: StepReport, *, exact: bool
) -> None:
    """Say where the two differ.  exact: run.deterministic; otherwise within TOLERANCE."""
    differences = []
    if sorted(recorded.groups) != sorted(groups):
        differences.append(f"groups {sorted(recorded.groups)} then, {sorted(groups)} now")
    if (then := recorded.trained) is not None:
        if (trained_version, report.applied) != (then.version, then.applied):
            was = f"version {then.version}, {'applied' if then.applied else 'skipped'}"
            differences.append(f"{was} then, version {trained_version}, applied {report.applied} now")
        tolerance = 0.0 if exact else TOLERANCE
        for name in COMPARED:
            a, b = then.metrics.get(name), report.metrics.get(name)
            if a is not None and b is not None and not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance):
                differences.append(f"{name} {a:.9g} then, {b:.9g} now")
    if differences:
        log.warning("step %d, repeated, went differently: %s", report.step, "; ".join(differences))
