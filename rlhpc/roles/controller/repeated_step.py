"""Compare a step that was trained again with what was recorded of it the first time."""

from __future__ import annotations

import logging
import math

from rlhpc.buffer.history import RecordedStep
from rlhpc.messages import StepReport

log = logging.getLogger("rlhpc.train_loop")

# Relative: kernels and reductions may differ between machines and layouts, and what was trained in parts is repeated as
# a whole, in other rows (in bfloat16 that has moved a norm by 4e-3 of it).
TOLERANCES = {"loss": 1e-3, "grad_norm": 1e-2}
ABSOLUTE = 1e-3


def compare(
    recorded: RecordedStep, groups: list[int], trained_version: int, report: StepReport, *, exact: bool
) -> None:
    """Say where the two differ.  exact: run.deterministic; otherwise within tolerances."""
    differences = []
    if sorted(recorded.groups) != sorted(groups):
        differences.append(f"groups {sorted(recorded.groups)} then, {sorted(groups)} now")
    if (then := recorded.trained) is not None:
        if (trained_version, report.applied) != (then.version, then.applied):
            was = f"version {then.version}, {'applied' if then.applied else 'skipped'}"
            differences.append(f"{was} then, version {trained_version}, applied {report.applied} now")
        for name, relative in TOLERANCES.items():
            near = {"rel_tol": 0.0, "abs_tol": 0.0} if exact else {"rel_tol": relative, "abs_tol": ABSOLUTE}
            a, b = then.metrics.get(name), report.metrics.get(name)
            if a is not None and b is not None and not math.isclose(a, b, **near):
                differences.append(f"{name} {a:.9g} then, {b:.9g} now")
    if differences:
        log.warning("step %d, repeated, went differently: %s", report.step, "; ".join(differences))
