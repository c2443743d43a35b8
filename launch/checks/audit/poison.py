"""Prompts that kill generators: those dropped for it, and those under suspicion now.

Input: Evidence, strikes.jsonl.  Nothing here is a violation.
"""

from __future__ import annotations

from launch.checks.audit.evidence import Evidence
from launch.checks.audit.report import Check
from launch.checks.run_rows import listed
from launch.common.counted import counted
from rlhpc.buffer.lost_leases import LostLeaseFile, Suspicion
from rlhpc.buffer.resolved import DropReason


def poison(evidence: Evidence) -> Check:
    """List these prompts."""
    check = Check("poison and quarantine")
    rows, names = evidence.segments.rows, evidence.segments.reasons
    code = names.index(DropReason.POISON) if DropReason.POISON in names else -2
    dropped = rows[rows["reason"] == code]
    if len(dropped):
        groups, prompts = listed(dropped["group"].tolist()), listed(dropped["prompt"].tolist())
        check.remarks.append(f"dropped as poison: groups {groups} (prompts {prompts})")
    strikes: dict[str, Suspicion] = {}
    for suspicion in LostLeaseFile(evidence.layout.strikes).read():
        strikes[suspicion.prompt] = suspicion
    suspects = [each for each in strikes.values() if each.strikes > 1]
    if suspects:
        words = ", ".join(f"{each.prompt} ({each.strikes} deaths)" for each in suspects[:10])
        check.remarks.append(
            f"{counted(len(suspects), 'prompt')} under suspicion, granted with few others or alone: {words}"
        )
    check.looked_at = (
        f"{counted(len(dropped), 'group')} dropped as poison, {counted(len(suspects), 'prompt')} under suspicion"
    )
    return check
