"""The quick audit at the beginning of a resume: refuse what resuming would make worse, warn of the rest.

Input: a run directory and the point to resume from.  Reads the segments after the newest checkpoint, and the last ones
before it.  A resume is refused if it would train something a second time: if the chosen checkpoint has groups as open,
or steps as not yet done, that segments before it record as done.  Missing data stay missing whether or not the run
resumes; damage is reported by the resume itself.
"""

from __future__ import annotations

from collections.abc import Callable

from launch.checks.audit.evidence import Depth
from launch.checks.audit.history import audit_run
from launch.checks.audit.report import Verdict
from launch.common.paths import quoted
from launch.run_directory.checkpoint_choice import ResumePoint
from rlhpc.errors import RlhpcError, RunDirectoryError
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint.directory import KnownCheckpoints

DEPTH = Depth(is_quick=True, last_segments=16)


def look_before_going_on(layout: RunLayout, resume_from: ResumePoint, tell: Callable[[str], None]) -> None:
    """Audit the point that a resume starts from; tell is called with each warning.

    Raises RunDirectoryError: the resume would train something a second time.
    """
    if not layout.is_run or resume_from.from_start:
        return
    try:
        audit = audit_run(layout, DEPTH, lambda _: None)  # quick: there is no progress to tell
    except (RlhpcError, OSError) as error:  # a resume that needs it reports it better
        tell(f"the history of the run cannot be audited: {error}")
        return
    forbidding = [each for check in audit.checks for each in check.offences if each.forbids_going_on]
    if forbidding and resume_from.step is None:
        others = [step for step, _ in KnownCheckpoints(layout.checkpoints).steps() if step != audit.resume_step]
        older = f"resume from an older one, --step N of {', '.join(map(str, others))}, or " if others else ""
        raise RunDirectoryError(
            f"{layout.root}: resuming from its newest checkpoint would train something twice: {forbidding[0].text}; "
            f"{older}start over with --from-start; `rlhpc audit {quoted(layout.root)}` lists everything"
        )
    for check in audit.checks:
        if check.verdict is Verdict.VIOLATED and check.name != "files":
            count = f" and {check.num_offences - 1} more" if check.num_offences > 1 else ""
            first = f"{check.offences[0].text}{count}"
            tell(f"audit: {check.name}: {first}; `rlhpc audit {quoted(layout.root)}` lists everything")
