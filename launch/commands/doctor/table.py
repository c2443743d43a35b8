"""Findings as a table for people: status, check, result, and what to do.

Input: Findings.  Output: text and an exit status.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.checks.finding import Finding
from launch.common.text_table import aligned, wrapped

_CHECK, _LEAST = 30, 40  # columns of the check; the least for result and remedy together


def render(findings: Sequence[Finding], width: int = 120) -> str:
    """One row a finding, wrapped to `width` columns."""
    check = min(_CHECK, max((len(finding.key) for finding in findings), default=5))
    room = max(_LEAST, width - len("fail  ") - check - 4)
    widths = (4, check, room - room * 2 // 5, room * 2 // 5)
    rows = wrapped(("", "check", "result", "what to do"), widths)
    for finding in findings:
        rows += wrapped((finding.verdict, finding.key, _text(finding), finding.remedy), widths)
    return "\n".join([*aligned(rows), summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """How many of each."""
    counts = {name: sum(finding.verdict == name for finding in findings) for name in ("pass", "warn", "fail")}
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if anything fails; a warning does not."""
    return int(any(finding.verdict == "fail" for finding in findings))


def _text(finding: Finding) -> str:
    return f"{finding.value}: {finding.text}" if finding.value else finding.text
