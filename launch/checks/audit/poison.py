"""Prompts that generators or reward workers died of, and groups that were dropped because nothing could judge them.

Input: Evidence, strikes.jsonl.  Nothing here is a violation; what was dropped for one of these reasons was not trained.
"""

from __future__ import annotations

from launch.checks.audit.evidence import Evidence
from launch.checks.audit.report import Check
from launch.checks.run_rows import listed
from launch.common.counted import counted
from launch.common.text_table import shortened
from rlhpc.buffer.lost_leases import LostLeaseFile
from rlhpc.buffer.resolved import DropReason

_MOST_SHOWN = 10  # prompts
_DROPPED = {
    DropReason.POISON: "dropped as poison, their prompts quarantined",
    DropReason.VERIFIER_ERROR: "dropped because no verifier, environment or agent could judge them",
}


def poison(evidence: Evidence) -> Check:
    """List groups and prompts."""
    check = Check("poison and quarantine")
    rows, names = evidence.segments.rows, evidence.segments.reasons
    looked_at = []
    for reason, words in _DROPPED.items():
        code = names.index(reason) if reason in names else -2
        dropped = rows[rows["reason"] == code]
        looked_at.append(f"{counted(len(dropped), 'group')} dropped as {reason.replace('_', ' ')}")
        if len(dropped):
            share = f"{len(dropped):,} of {counted(len(rows), 'group')} that are over"
            groups, prompts = listed(dropped["group"].tolist()), listed(dropped["prompt"].tolist())
            check.remarks.append(f"{words}: {share}: {groups} (prompts {prompts})")
    suspicions = LostLeaseFile(evidence.layout.strikes).suspicions()
    max_attempts = evidence.config.admission.max_attempts
    quarantined = [each for each in suspicions if each.is_quarantined(max_attempts)]
    suspects = [each for each in suspicions if each.strikes > 1 and each not in quarantined]
    for found, words in (
        (quarantined, "quarantined, sampled again only after a resume with --lift-quarantine"),
        (suspects, "under suspicion, granted with few others or alone"),
    ):
        if found:
            shown = "; ".join(shortened(each.text) for each in found[:_MOST_SHOWN])
            check.remarks.append(f"{counted(len(found), 'prompt')} {words}: {shown}")
    looked_at.append(f"{counted(len(quarantined), 'prompt')} quarantined, {len(suspects)} under suspicion")
    check.looked_at = ", ".join(looked_at)
    return check
