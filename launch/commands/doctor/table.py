"""Findings as a table for people: status, check, result, and what to do.

Input: Findings.  Output: text and an exit status.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from launch.checks.finding import Finding

_CHECK, _LEAST = 30, 40  # columns of the check; the least for result and remedy together


def render(findings: Sequence[Finding], width: int = 120) -> str:
    """One row a finding, wrapped to `width` columns."""
    check = min(_CHECK, max((len(finding.key) for finding in findings), default=5))
    room = max(_LEAST, width - len("fail  ") - check - 4)
    result, remedy = room - room * 2 // 5, room * 2 // 5
    rows = [_row(("", "check", "result", "what to do"), check, result, remedy)]
    rows += [
        _row((finding.verdict, finding.key, _text(finding), finding.remedy), check, result, remedy)
        for finding in findings
    ]
    return "\n".join([*rows, summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """How many of each."""
    counts = {name: sum(finding.verdict == name for finding in findings) for name in ("pass", "warn", "fail")}
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if anything fails; a warning does not."""
    return int(any(finding.verdict == "fail" for finding in findings))


def _text(finding: Finding) -> str:
    return f"{finding.value}: {finding.text}" if finding.value else finding.text


def _row(cells: tuple[str, str, str, str], check: int, result: int, remedy: int) -> str:
    verdict, key, text, what = cells
    columns = [textwrap.wrap(text, result) or [""], textwrap.wrap(what, remedy) or [""]]
    names = textwrap.wrap(key, check) or [""]
    lines = []
    for index in range(max(len(names), *map(len, columns))):
        first = verdict if index == 0 else ""
        parts = [column[index] if index < len(column) else "" for column in (names, *columns)]
        lines.append(f"{first:<6}{parts[0]:<{check}}  {parts[1]:<{result}}  {parts[2]}".rstrip())
    return "\n".join(lines)
