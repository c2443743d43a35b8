"""Audit a run directory: gather evidence, apply every check.

Guarantees: reads only, takes no lock, needs no running process; the run may be going on, dead, or on another machine.
"""

from __future__ import annotations

from launch.checks.audit.agreement import checkpoints, identities
from launch.checks.audit.conservation import conservation
from launch.checks.audit.evidence import Depth, Progress, gather
from launch.checks.audit.files import files
from launch.checks.audit.lengths import LostRollouts, lengths
from launch.checks.audit.poison import poison
from launch.checks.audit.report import Audit
from launch.checks.audit.rollouts import members, staleness, versions
from launch.checks.audit.steps import order, steps
from rlhpc.run_layout import RunLayout


def audit_run(layout: RunLayout, depth: Depth, progress: Progress) -> Audit:
    """Look at everything; progress is told what is being read.

    Raises RunDirectoryError: not a run directory, or it is started again and again meanwhile; OSError.
    """
    layout.require_run()
    lost = LostRollouts(layout.rollouts)
    evidence = gather(layout, depth, progress, lost.found)
    law, places = conservation(evidence)
    course_check, course = steps(evidence)
    length_check, figures = lengths(evidence, lost)
    counts = places.counts()
    return Audit(
        checks=[
            law,
            course_check,
            order(evidence),
            checkpoints(evidence),
            identities(evidence, places),
            members(evidence, places),
            staleness(evidence),
            versions(evidence, places, course),
            files(evidence, progress),
            length_check,
            poison(evidence),
        ],
        places={"drawn": len(places.of)} | counts,
        dropped=places.dropped,
        num_steps=course.num_steps,
        version=course.version,
        resume_step=evidence.checkpoints.newest.step if evidence.checkpoints.newest is not None else None,
        lengths=figures,
    )
