"""Whether the files that an audit relies on are whole, as `rlhpc check RUN_DIR` sees it.

Input: Evidence.  Quick: what can be opened, and sizes of checkpoints; otherwise every checksum.
"""

from __future__ import annotations

from launch.checks.audit.evidence import Evidence, Progress
from launch.checks.audit.report import Check, Offence
from launch.checks.journal_check import journal_rows
from launch.checks.run_check import checkpoint_row
from launch.checks.run_rows import Verdict, listed
from launch.common.counted import counted
from rlhpc.training.checkpoint.directory import Fate


def files(evidence: Evidence, progress: Progress) -> Check:
    """Name what is missing or damaged."""
    check = Check("files")
    rollouts, read = evidence.layout.rollouts.name, "sizes and heads" if evidence.is_quick else "checksums"
    for index in evidence.missing_segments:
        check.accuse(Offence("is missing", file=f"{rollouts}/{evidence.layout.segment(index).name}"))
    for name, why in evidence.segments.unreadable:
        check.accuse(Offence(why, file=f"{rollouts}/{name}"))
    for state in evidence.checkpoints.states:
        row = checkpoint_row(state, is_chosen=False)
        if row.verdict is Verdict.DAMAGED:
            check.accuse(Offence(row.text, step=state.step, file=f"checkpoints/{row.name}"))
        elif state.fate is Fate.UNDONE:
            check.remarks.append(f"{row.name}: {row.text}")
    for attempt in evidence.events.attempts.values():
        if attempt.damaged_lines:
            text = f"lines {listed(attempt.damaged_lines)} are damaged: the checksums differ"
            check.accuse(Offence(text, file=f"{rollouts}/{attempt.path.name}", row=attempt.damaged_lines[0]))
    _look_at_journal(check, evidence, progress)
    if evidence.events.unknown:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(evidence.events.unknown.items()))
        check.accuse(Offence(f"events of another version of rlhpc: {kinds}"))
    check.looked_at = (
        f"{read} of {counted(evidence.segments.num_files, 'segment')}, "
        f"{counted(len(evidence.journal.paths), 'journal file')}, "
        f"{counted(len(evidence.events.attempts), 'event log')}, "
        f"{counted(len(evidence.checkpoints.states), 'checkpoint')}"
    )
    return check


def _look_at_journal(check: Check, evidence: Evidence, progress: Progress) -> None:
    if evidence.is_quick:
        for text in evidence.journal.unreadable:
            check.accuse(Offence(text))
        return
    for row in journal_rows(evidence.layout, progress):
        if row.verdict is Verdict.DAMAGED:
            check.accuse(Offence(row.text, file=f"{evidence.layout.rollouts.name}/{row.name}"))
