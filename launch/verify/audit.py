"""Audit a run directory: gather evidence, apply every check.

Guarantees: reads only, takes no lock, needs no running process; the run may be going on, dead, or on another machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, TextIO

from launch.common.text import aligned, columns_of, counted, cut_to, printable, quoted, without_dots
from launch.run_directory.prepare import ResumePoint
from launch.run_files.run_state import is_supervised
from launch.verify.evidence import Depth, Progress, gather
from launch.verify.files import check_run, chosen_step, files
from launch.verify.laws import checkpoints, conservation, identities, members, poison, staleness, versions
from launch.verify.report import Audit, Check, CheckVerdict, FileVerdict, Offence, Row
from launch.verify.steps import LostRollouts, lengths, order, steps
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import ConfigError, RlhpcError, RunDirectoryError
from rlhpc.training.checkpoint_directory import KnownCheckpoints

# ------------------------------------------------------------------------------------------------------------ check run
#
# `rlhpc check RUN_DIR`: find damage in a run directory; a table for people, JSON for programs, progress meanwhile.


SOUND, DAMAGE = 0, 1
QUIET_S = 2.0  # shorter work shows no progress
EVERY_S = 10.0  # between lines if the stream is no terminal


def check_run_directory(options: argparse.Namespace) -> int:
    """Print the check of a run directory; returns 1 if anything is damaged.  Raises ConfigError."""
    if options.overrides or options.site:
        raise ConfigError(f"{options.run_file}: a run directory takes neither overrides nor --site; legal: --json")
    return report_run(RunLayout(without_dots(options.run_file)), as_json=options.json)


class ProgressNote:
    """Shows the file being read: one changing line on a terminal, a line now and then elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._said_at = time.monotonic() + QUIET_S - (0.0 if self._is_terminal else EVERY_S)
        self._width = 0

    def __call__(self, text: str) -> None:
        """Show a line, unless another was shown a moment ago."""
        now = time.monotonic()
        if now - self._said_at < (0.1 if self._is_terminal else EVERY_S):
            return
        self._said_at = now
        line = printable(f"reading {text}")
        if self._is_terminal:
            line = cut_to(line, shutil.get_terminal_size().columns - 1)  # of two lines "\r" would leave the first
        width = columns_of(line)
        self._stream.write(f"\r{line}{' ' * (self._width - width)}" if self._is_terminal else f"{line}\n")
        self._stream.flush()
        self._width = max(self._width, width)

    def close(self) -> None:
        """Remove the line."""
        if self._is_terminal and self._width:
            self._stream.write(f"\r{'':<{self._width}}\r")
            self._stream.flush()


def report_run(layout: RunLayout, *, as_json: bool) -> int:
    """Check a run and print; returns 0 if it is sound, 1 if there is damage.  Raises ConfigError: not a run."""
    with closing(ProgressNote(sys.stderr)) as progress:
        rows = check_run(layout, progress)
    is_damaged = any(row.verdict is FileVerdict.DAMAGED for row in rows)
    print(files_as_document(layout, rows, is_damaged=is_damaged) if as_json else files_as_table(layout, rows))
    return DAMAGE if is_damaged else SOUND


def files_as_table(layout: RunLayout, rows: Sequence[Row]) -> str:
    """Lay the rows out for people; the last line is the sum."""
    parts = ["", *(row.part for row in rows)]
    lines = aligned(
        [(row.part if row.part != before else "", row.name, row.verdict.value, row.text)
         for row, before in zip(rows, parts, strict=False)]
    )  # fmt: skip
    num_damaged = sum(row.verdict is FileVerdict.DAMAGED for row in rows)
    step = chosen_step(list(rows))
    resume = f"a resume starts from step {step}" if step is not None else "there is no checkpoint to resume from"
    lines.append(f"{layout.root}: {f'{num_damaged} damaged' if num_damaged else 'sound'}; {resume}")
    return "\n".join(lines)


def files_as_document(layout: RunLayout, rows: Sequence[Row], *, is_damaged: bool) -> str:
    """The findings on files as JSON."""
    document = {
        "run_dir": str(layout.root),
        "is_damaged": is_damaged,
        "resume_step": chosen_step(list(rows)),
        "rows": [asdict(row) | {"verdict": row.verdict.value} for row in rows],
    }
    return json.dumps(document, indent=1)


# -------------------------------------------------------------------------------------------------------------- history


def audit_run(layout: RunLayout, depth: Depth, progress: Progress) -> Audit:
    """Audit a run; progress: called with the file being read.

    Raises RunDirectoryError: not a run directory, or it is restarted again and again meanwhile; OSError.
    """
    layout.require_run()
    if is_supervised(layout):
        raise RunDirectoryError(
            f"{layout.root}: supervised fine-tuning, which samples nothing that could be lost; `rlhpc check "
            f"{quoted(layout.root)}` verifies its files"
        )
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


# -------------------------------------------------------------------------------------------------------- before resume
#
# The quick audit at the beginning of a resume: refuse if resuming would do harm, else warn.
#
# Input: a run directory and the point to resume from.  Reads the segments after the newest checkpoint, and the last
# ones before it.  A resume is refused if it would train something a second time: if the chosen checkpoint has groups
# as open, or steps as not yet done, that segments before it record as done.  Missing data stay missing whether or not
# the run resumes; damage is reported by the resume itself.


DEPTH = Depth(is_quick=True, last_segments=16)


def look_before_going_on(layout: RunLayout, resume_from: ResumePoint, tell: Callable[[str], None]) -> None:
    """Audit the point that a resume starts from; tell is called with each warning.

    Raises RunDirectoryError if the resume would train groups or steps a second time.
    """
    if not layout.is_run or resume_from.from_start or is_supervised(layout):  # the latter has no history but its steps
        return
    try:
        audit = audit_run(layout, DEPTH, lambda _: None)  # quick: no progress is shown
    except (RlhpcError, OSError) as error:  # the resume itself reports it better, if it matters
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
        if check.verdict is CheckVerdict.VIOLATED and check.name != "files":
            count = f" and {check.num_offences - 1} more" if check.num_offences > 1 else ""
            first = f"{check.offences[0].text}{count}"
            tell(f"audit: {check.name}: {first}; `rlhpc audit {quoted(layout.root)}` lists everything")


# ---------------------------------------------------------------------------------------------------------------- audit
#
# `rlhpc audit RUN_DIR`: prove from files that every prompt of a run is in exactly one place.
#
# Input: a run directory.  Output: a table for people, or JSON (docs/guarantees.md).


CLEAN, VIOLATED = 0, 1
SCHEMA = 1  # of the JSON document
MOST_LINES = 10  # offences of a check that the table shows


def audit(options: argparse.Namespace) -> int:
    """Audit a run and print; returns 0 if it is clean, 1 if something is violated.  Raises ConfigError: not a run."""
    layout, is_quick = options.layout, options.quick
    with closing(ProgressNote(sys.stderr)) as progress:
        found = audit_run(layout, Depth(is_quick=is_quick), progress)
    document = as_document(layout, found, is_quick=is_quick)
    print(json.dumps(document, indent=1) if options.json else as_table(layout, found))
    return CLEAN if found.is_clean else VIOLATED


def as_table(layout: RunLayout, audit: Audit) -> str:
    """Lay the checks out for people, offences below; the last line is the sum."""
    lines = aligned([(check.name, check.verdict.value, check.looked_at) for check in audit.checks])
    for check in audit.checks:
        lines += [f"{check.name}: {remark}" for remark in check.remarks]
    for check in audit.checks:
        lines += [f"VIOLATED {check.name}: {line_of(offence)}" for offence in check.offences[:MOST_LINES]]
        if check.num_offences > MOST_LINES:
            lines.append(f"VIOLATED {check.name}: {check.num_offences - MOST_LINES} more; --json has them")
    broken = [check.name for check in audit.checks if check.verdict is CheckVerdict.VIOLATED]
    sums = counted(audit.num_steps, "step") + (f", version {audit.version}" if audit.version >= 0 else "")
    remarked = [check.name for check in audit.checks if check.verdict is CheckVerdict.REMARK]
    clean = "clean" + (f", with remarks on {', '.join(remarked)}" if remarked else "")
    verdict = f"VIOLATED: {', '.join(broken)}" if broken else clean
    lines.append(f"{layout.root}: {verdict}; {sums}")
    return "\n".join(lines)


def line_of(offence: Offence) -> str:
    """The line with the file and the row."""
    where = f"{offence.file}{f', {_row(offence)} {offence.row}' if offence.row >= 0 else ''}: " if offence.file else ""
    return where + offence.text


def as_document(layout: RunLayout, audit: Audit, *, is_quick: bool) -> dict[str, Any]:
    """The audit for programs."""
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
