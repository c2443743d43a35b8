"""Members of groups, staleness, and the versions that tokens were sampled with.

Input: Evidence.  A version is published once the step that makes it is applied.  So no token may be of a later version
than the one trained by the step that used it, nor of an earlier one than was live when its group was admitted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from launch.checks.audit.conservation import BUFFERED, IN_FLIGHT, TRAINED, Places
from launch.checks.audit.evidence import Evidence
from launch.checks.audit.journal import MEMBERS
from launch.checks.audit.report import Check, Offence
from launch.checks.audit.segments import offence_at
from launch.checks.audit.steps import Course
from launch.common.counted import counted, numbered


def members(evidence: Evidence, places: Places) -> Check:
    """Each trained group has exactly the distinct samples that were wanted of it."""
    check = Check("members")
    rows = evidence.segments.rows
    for offence in evidence.segments.offences:
        check.accuse(offence)
    for row in rows[(rows["step"] >= 0) & (rows["num_members"] != rows["size"])]:
        text = (
            f"group {row['group']}, trained at step {row['step']}, has {row['num_members']} of {row['size']} rollouts"
        )
        check.accuse(offence_at(row, text))
    _look_at_journal(check, evidence)
    num_waiting = _look_for_unsealed(check, evidence, places)
    check.looked_at = (
        f"{counted(evidence.segments.num_rollouts, 'rollout')} in segments, "
        f"{len(evidence.journal.rows)} in the journal; {counted(num_waiting, 'group')} trained that no segment has yet"
    )
    return check


def _look_at_journal(check: Check, evidence: Evidence) -> None:
    rows = evidence.journal.rows
    sizes = evidence.sizes(int(rows["group"].max(initial=-1)) + 1)[rows["group"]]
    for place in np.flatnonzero((rows["sample"] < 0) | (rows["sample"] >= sizes)):
        row = rows[place]
        text = f"group {row['group']}: sample {row['sample']} of a group of {sizes[place]}"
        check.accuse(evidence.journal.offence_at(row, text))
    keys = evidence.journal.keys
    arranged = np.argsort(keys, kind="stable")
    first, second = arranged[:-1], arranged[1:]
    # Two attempts may have the same key: the second one found the first one's row damaged, or its group not admitted.
    is_twice = (keys[first] == keys[second]) & (rows["attempt"][first] == rows["attempt"][second])
    for row in rows[second[is_twice]]:
        check.accuse(evidence.journal.offence_at(row, f"group {row['group']}: sample {row['sample']} arrived twice"))


def _look_for_unsealed(check: Check, evidence: Evidence, places: Places) -> int:
    """Check that groups trained after the newest checkpoint are in the journal, or in the checkpoint's buffer.

    Only for steps that were trained at the first look, since the journal was read after it.  Returns their number.
    """
    if evidence.is_being_resumed:
        check.remarks.append(
            "a resume is setting files aside, or was interrupted at that: the journal may be incomplete"
        )
        return 0
    newest, events = evidence.checkpoints.newest, evidence.events
    is_sealed = np.zeros(len(places.of), bool)
    groups = evidence.segments.rows["group"]
    is_sealed[groups[groups < len(is_sealed)]] = True
    first = newest.step if newest is not None else 0
    step_of = events.step_of.upto(len(places.of))
    is_waiting = (places.of == TRAINED) & ~is_sealed & (step_of >= first) & (step_of <= events.trained_at_first)
    waiting = np.flatnonzero(is_waiting)
    sizes = evidence.sizes(len(places.of))[waiting]
    indices = np.arange(sizes.max(initial=0))
    is_found = np.isin(waiting[:, None] * MEMBERS + indices, evidence.delivered_keys)
    is_lost = ~is_found & (indices < sizes[:, None])
    for place in np.flatnonzero(is_lost.any(axis=1)).tolist():
        group, samples = int(waiting[place]), np.flatnonzero(is_lost[place]).tolist()
        text = (
            f"group {group} was trained at step {step_of[group]}; its samples {samples} are in no segment, and not "
            "readable in the journal"
        )
        check.accuse(Offence(text, group=group, step=int(step_of[group])))
    return len(waiting)


def staleness(evidence: Evidence) -> Check:
    """How far the version trained is from that of the admission, and of the oldest token, of each trained group."""
    check = Check("staleness")
    rows, bound = evidence.segments.rows, evidence.config.admission.max_staleness
    trained = rows[(rows["step"] >= 0) & (rows["version"] >= 0)]
    stale = trained["version"] - trained["admitted_version"]
    for row, steps in zip(trained[stale > bound], stale[stale > bound], strict=True):
        text = (
            f"group {row['group']}, admitted at version {row['admitted_version']}, trained version {row['version']} at "
            f"step {row['step']}: staleness {steps}, admission.max_staleness={bound}"
        )
        check.accuse(offence_at(row, text))
    _look_at_oldest_tokens(check, trained[stale <= bound], bound)
    num_recorded = 0
    sealed = {*rows["step"].tolist()}
    for step, known in evidence.events.trained_steps():
        if step in sealed:
            continue
        for group in known.groups:
            num_recorded += 1
            admitted = evidence.events.version_of[group]
            if admitted >= 0 and known.version - admitted > bound:
                text = (
                    f"group {group}, admitted at version {admitted}, trained version {known.version} at step {step}: "
                    f"staleness {known.version - admitted}, admission.max_staleness={bound}"
                )
                file = f"rollouts/{evidence.events.attempts[known.attempt].path.name}"
                check.accuse(Offence(text, group=group, step=step, file=file, row=known.line))
    worst = int(stale.max(initial=0))
    check.looked_at = f"{len(trained) + num_recorded} trained groups, bound {bound}, most {worst}"
    return check


def _look_at_oldest_tokens(check: Check, trained: NDArray[np.void], bound: int) -> None:
    stale = trained[(trained["oldest"] >= 0) & (trained["version"] - trained["oldest"] > bound)]
    for row in stale:
        text = (
            f"group {row['group']} has tokens of version {row['oldest']}, and trained version {row['version']} at step "
            f"{row['step']}: staleness {row['version'] - row['oldest']}, admission.max_staleness={bound}"
        )
        check.accuse(offence_at(row, text))


def versions(evidence: Evidence, places: Places, course: Course) -> Check:
    """Every version that a token or an admission names was published."""
    check = Check("weight versions")
    rows, events = evidence.segments.rows, evidence.events
    newest = max([course.version, *(known.next_version for _, known in events.trained_steps())])
    check.looked_at = numbered("version", 0, newest) if newest >= 0 else "versions, none of which is known"
    check.looked_at += "; tokens were not read" if evidence.is_quick else ""
    allowed = events.lost_version  # of steps that were lost with some rollouts; their complete groups are used
    top, num_lost = max(newest, allowed) if newest >= 0 else 1 << 60, 0
    known = rows[(rows["step"] >= 0) & (rows["version"] >= 0)]
    for name, what in (("newest", "a token"), ("admitted_version", "its admission")):
        for row in known[known[name] > known["version"]]:
            if row[name] <= allowed:
                num_lost += 1
                continue
            text = (
                f"group {row['group']}: {what} is of version {row[name]}, and step {row['step']} trained version "
                f"{row['version']}"
            )
            check.accuse(offence_at(row, text))
    dropped = rows[rows["reason"] >= 0]
    for name, what in (("newest", "a token"), ("admitted_version", "its admission")):
        for row in dropped[dropped[name] > top]:
            check.accuse(offence_at(row, f"group {row['group']}: {what} is of version {row[name]}, which never was"))
    for row in rows[(rows["oldest"] >= 0) & (rows["oldest"] < rows["admitted_version"])]:
        if row["admitted_version"] <= allowed:
            continue
        text = f"group {row['group']}, admitted at version {row['admitted_version']}, has tokens of {row['oldest']}"
        check.accuse(offence_at(row, text))
    _look_at_journal_versions(check, evidence, places, top)
    if num_lost:
        check.remarks.append(f"{counted(num_lost, 'group')} with tokens of versions that were lost with their steps")
    return check


def _look_at_journal_versions(check: Check, evidence: Evidence, places: Places, top: int) -> None:
    rows = evidence.journal.rows
    for row in rows[~rows["is_sorted"]]:
        text = f"group {row['group']}: sample {row['sample']} has tokens of a version after tokens of a later one"
        check.accuse(evidence.journal.offence_at(row, text))
    is_open = np.isin(rows["group"], np.flatnonzero(np.isin(places.of, (BUFFERED, IN_FLIGHT))))
    for row in rows[is_open & ((rows["newest"] > top) | (rows["admitted_version"] > top))]:
        newest = max(row["newest"], row["admitted_version"])
        text = f"group {row['group']}: sample {row['sample']} is of version {newest}, which never was"
        check.accuse(evidence.journal.offence_at(row, text))
