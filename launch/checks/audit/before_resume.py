"""The quick audit that a resume begins with: refuse what going on would make worse, warn of the rest.

Input: a run directory and the point that the user wants to go on from.  Of segments those after the newest checkpoint
are read, and the last ones before it.  Going on is refused where it would train something a second time: where the
checkpoint that is taken holds groups as open, or steps as still to be done, that segments before it hold as done.
What is missing is missing whether or not the run goes on; what is damaged, the resume says itself.
"""

from __future__ import annotations

from collections.abc import Callable

from launch.checks.audit.evidence import Depth
from launch.checks.audit.history import audit_run
from launch.checks.audit.report import Verdict
from launch.run_directory.checkpoint_choice import ResumePoint
from rlhpc.errors import RlhpcError, RunDirectoryError
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.directory import KnownCheckpoints

DEPTH = Depth(is_quick=True, last_segments=16)


def look_before_going_on(layout: RunLayout, resume_from: ResumePoint, tell: Callable[[str], None]) -> None:
    """Audit what a resume goes on from; tell is called with each warning.

    Raises RunDirectoryError: it would train something a second time.
    """
    if not layout.is_run or resume_from.from_start:
        return
    try:
        audit = audit_run(layout, DEPTH, _unheard)
    except (RlhpcError, OSError) as error:  # what it needs itself, a resume will miss as well, and say it better
        tell(f"the history of the run cannot be audited: {error}")
        return
    forbidding = [each for check in audit.checks for each in check.offences if each.forbids_going_on]
    if forbidding and resume_from.step is None:
        others = [step for step, _ in KnownCheckpoints(layout.checkpoints).steps() if step != audit.resume_step]
        older = f"go on from an older one, --step N of {', '.join(map(str, others))}, or " if others else ""
        raise RunDirectoryError(
            f"{layout.root}: going on from its newest checkpoint would train something twice: {forbidding[0].text}; "
            f"{older}begin anew with --from-start; `rlhpc audit {layout.root}` names everything"
        )
    for check in audit.checks:
        if check.verdict is Verdict.VIOLATED and check.name != "files":
            count = f" and {check.num_offences - 1} more" if check.num_offences > 1 else ""
            first = f"{check.offences[0].text}{count}"
            tell(f"audit: {check.name}: {first}; `rlhpc audit {layout.root}` names everything")


def _unheard(_: str) -> None:
    """Takes what is being read: it does not take long."""
