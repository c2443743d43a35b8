"""`rlhpc audit RUN_DIR`: prove from files that every prompt of a run is in exactly one place.

Input: a run directory.  Output: a table for people, or JSON (docs/audit.md).
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from typing import Any

from launch.checks.audit.evidence import Depth
from launch.checks.audit.history import audit_run
from launch.checks.audit.report import Audit, Check, Offence, Verdict
from launch.commands.check_run import ProgressNote
from launch.common.counted import counted
from launch.common.text_table import aligned
from rlhpc.run_layout import RunLayout

CLEAN, VIOLATED = 0, 1
SCHEMA = 1  # of the JSON document
MOST_LINES = 10  # offences of a check that the table shows


def report_audit(layout: RunLayout, *, is_quick: bool, as_json: bool) -> int:
    """Audit a run and print; returns 0 if it is clean, 1 if something is violated.  Raises ConfigError: not a run."""
    with closing(ProgressNote(sys.stderr)) as progress:
        audit = audit_run(layout, Depth(is_quick=is_quick), progress)
    print(json.dumps(as_document(layout, audit, is_quick=is_quick), indent=1) if as_json else as_table(layout, audit))
    return CLEAN if audit.is_clean else VIOLATED


def as_table(layout: RunLayout, audit: Audit) -> str:
    """Lay the checks out for people, offences below; the last line is the sum."""
    lines = aligned([(check.name, check.verdict.value, check.looked_at) for check in audit.checks])
    for check in audit.checks:
        lines += [f"{check.name}: {remark}" for remark in check.remarks]
    for check in audit.checks:
        lines += [f"VIOLATED {check.name}: {line_of(offence)}" for offence in check.offences[:MOST_LINES]]
        if check.num_offences > MOST_LINES:
            lines.append(f"VIOLATED {check.name}: {check.num_offences - MOST_LINES} more; --json has them")
    broken = [check.name for check in audit.checks if check.verdict is Verdict.VIOLATED]
    sums = counted(audit.num_steps, "step") + (f", version {audit.version}" if audit.version >= 0 else "")
    remarked = [check.name for check in audit.checks if check.verdict is Verdict.REMARK]
    clean = "clean" + (f", with remarks on {', '.join(remarked)}" if remarked else "")
    verdict = f"VIOLATED: {', '.join(broken)}" if broken else clean
    lines.append(f"{layout.root}: {verdict}; {sums}")
    return "\n".join(lines)


def line_of(offence: Offence) -> str:
    """With the file and the row."""
    where = f"{offence.file}{f', {_row(offence)} {offence.row}' if offence.row >= 0 else ''}: " if offence.file else ""
    return where + offence.text


def as_document(layout: RunLayout, audit: Audit, *, is_quick: bool) -> dict[str, Any]:
    """The same for programs."""
    return {
        "schema": SCHEMA,
        "run_dir": str(layout.root),
        "is_clean": audit.is_clean,
        "is_quick": is_quick,
        "num_steps": audit.num_steps,
        "policy_version": audit.version if audit.version >= 0 else None,
        "resume_step": audit.resume_step,
        "groups": {**audit.places, "dropped_because": audit.dropped},
        "lengths": audit.lengths,
        "checks": [_check(check) for check in audit.checks],
    }


def _check(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "verdict": check.verdict.value,
        "looked_at": check.looked_at,
        "remarks": check.remarks,
        "num_offences": check.num_offences,
        "offences": [_offence(offence) for offence in check.offences],
    }


def _offence(offence: Offence) -> dict[str, Any]:
    facts = asdict(offence)
    del facts["forbids_going_on"]
    return {name: value for name, value in facts.items() if value not in (-1, "")}


def _row(offence: Offence) -> str:
    return "line" if offence.file.endswith(".jsonl") else "row"
