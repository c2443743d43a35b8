"""Compare checkpoints with segments, and what several files record of the same group.

Input: Evidence.  A checkpoint is a cut of the run: a group admitted before it is either open in it, or in a segment
that it relies on, and never both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from launch.checks.audit.checkpoint import CheckpointEvidence
from launch.checks.audit.columns import GroupColumn
from launch.checks.audit.conservation import Places
from launch.checks.audit.evidence import Evidence
from launch.checks.audit.journal import MEMBERS
from launch.checks.audit.report import Check, Offence
from launch.checks.audit.segments import fate_at, offence_at
from launch.common.counted import counted


def checkpoints(evidence: Evidence) -> Check:
    """Compare each checkpoint with the segments before it."""
    check = Check("checkpoints agree")
    check.looked_at = counted(len(evidence.checkpoints.sound), "checkpoint")
    for name, why in evidence.checkpoints.unreadable:
        check.accuse(Offence(f"cannot be read: {why}", file=f"checkpoints/{name}"))
    for place, saved in enumerate(evidence.checkpoints.sound):
        _look_at(check, evidence, saved, is_newest=place == 0)
    check.is_seen = bool(evidence.checkpoints.states)
    return check


def _look_at(check: Check, evidence: Evidence, saved: CheckpointEvidence, *, is_newest: bool) -> None:
    file = f"checkpoints/{saved.name}/controller.json"
    rows = evidence.segments.rows
    before = rows[rows["index"] < saved.next_segment]
    for row in before[np.isin(before["group"], list(saved.open_groups))]:
        fate = fate_at(row["step"])
        text = f"group {row['group']} is open in {saved.name}, but is recorded as {fate} in a segment before it"
        check.accuse(offence_at(row, text, forbids_going_on=is_newest))
    for row in before[before["step"] >= saved.step]:
        text = f"step {row['step']} is in a segment before {saved.name}, which continues with step {saved.step}"
        check.accuse(offence_at(row, text, forbids_going_on=is_newest))
    for row in before[before["group"] >= saved.next_group]:
        text = f"group {row['group']} is in a segment before {saved.name}, which has admitted {saved.next_group}"
        check.accuse(offence_at(row, text, forbids_going_on=is_newest))
    if not evidence.first_segment:
        _look_at_counts(check, evidence, saved, before, file)
    _look_at_members(check, evidence, saved, file)
    if saved.manifest_step != saved.step:
        check.accuse(
            Offence(f"COMPLETE is of step {saved.manifest_step}, controller.json of step {saved.step}", file=file)
        )
    if saved.manifest_version != saved.version:
        check.accuse(
            Offence(f"COMPLETE is of version {saved.manifest_version}, controller.json of {saved.version}", file=file)
        )
    if saved.num_drawn != saved.next_group:
        text = f"{saved.num_drawn} prompts were drawn and {saved.next_group} groups admitted"
        check.accuse(Offence(text, file=file))


def _look_at_counts(
    check: Check, evidence: Evidence, saved: CheckpointEvidence, before: NDArray[np.void], file: str
) -> None:
    """Compare the numbers of trained and dropped groups, and the version that results."""
    trained = before[before["step"] >= 0]
    if len(trained) != saved.num_trained:
        text = f"{saved.num_trained} groups were trained by then, and segments before it have {len(trained)}"
        check.accuse(Offence(text, step=saved.step, file=file))
    reasons = evidence.segments.reasons
    found = {reason: int((before["reason"] == number).sum()) for number, reason in enumerate(reasons)}
    found = {reason: count for reason, count in found.items() if count}
    if found != {reason: count for reason, count in saved.dropped.items() if count}:
        text = f"{saved.dropped} groups were dropped by then, and segments before it have {found}"
        check.accuse(Offence(text, step=saved.step, file=file))
    _, first = np.unique(trained["step"], return_index=True)
    version = int((trained["applied"][first] == 1).sum())
    if version != saved.version:
        text = f"the version is {saved.version}, and segments before it have {version} steps that were applied"
        check.accuse(Offence(text, step=saved.step, file=file))
    if saved.totals.steps != saved.step:
        check.accuse(Offence(f"totals count {saved.totals.steps} steps, and it is of step {saved.step}", file=file))
    num_rollouts = int(trained["num_members"].sum())
    if saved.totals.rollouts_trained != num_rollouts:
        text = f"totals count {saved.totals.rollouts_trained} trained rollouts, segments before it {num_rollouts}"
        check.accuse(Offence(text, file=file))


def _look_at_members(check: Check, evidence: Evidence, saved: CheckpointEvidence, file: str) -> None:
    """Check that the rollouts that the ledger counts are in buffered.h5."""
    wanted = sorted(group.group * MEMBERS + index for group in saved.open_groups.values() for index in group.delivered)
    found = saved.buffered.tolist()
    for key in sorted({*wanted} ^ {*found}):
        group, sample = divmod(key, MEMBERS)
        there = "not in buffered.h5" if key in wanted else "in buffered.h5, and not delivered by the ledger"
        check.accuse(Offence(f"sample {sample} of group {group} is {there}", group=group, sample=sample, file=file))
    if len(found) != len({*found}):
        check.accuse(Offence("buffered.h5 has a rollout twice", file=file))


def identities(evidence: Evidence, places: Places) -> Check:
    """Compare what segments, events, checkpoints and journal say of each group: its prompt, its version at admission.

    Prompts of a dataset are drawn in one order, so that their numbers grow with those of the groups.
    """
    check = Check("prompts and admissions agree")
    prompts, versions, num_compared = GroupColumn(), GroupColumn(), 0
    length = len(places.of)
    rows = evidence.segments.rows
    rows = rows[rows["group"] < length]
    prompts.fill(rows["group"], rows["prompt"])
    versions.fill(rows["group"], rows["admitted_version"])
    events = evidence.events
    for column, theirs, what in (
        (prompts, events.prompt_of, "prompt"),
        (versions, events.version_of, "version at admission"),
    ):
        mine, said = column.upto(length), theirs.upto(length)
        is_known = (mine >= 0) & (said >= 0)
        num_compared += int(is_known.sum())
        for group in np.flatnonzero(is_known & (mine != said)).tolist():
            row = rows[rows["group"] == group][0]
            text = f"group {group}: {what} {mine[group]} in the segment, {said[group]} in the events"
            check.accuse(offence_at(row, text))
        column.fill(np.flatnonzero((mine < 0) & (said >= 0)), said[(mine < 0) & (said >= 0)])
    _compare_checkpoints(check, evidence, prompts, versions)
    num_compared += _compare_journal(check, evidence, prompts, versions)
    known = prompts.upto(length)
    groups, num_datasets = np.flatnonzero(known >= 0), len(evidence.config.data)
    for dataset in range(num_datasets):
        own = groups[known[groups] % num_datasets == dataset]
        for place in np.flatnonzero(np.diff(known[own]) <= 0).tolist():
            group, before = int(own[place + 1]), int(own[place])
            text = f"group {group} has prompt {known[group]}, and group {before} before it has {known[before]}"
            check.accuse(Offence(text, group=group))
    for offence in evidence.contradictions:
        check.accuse(offence)
    check.looked_at = f"{counted(len(groups), 'group')}, {counted(num_compared, 'comparison')}"
    return check


def _compare_checkpoints(check: Check, evidence: Evidence, prompts: GroupColumn, versions: GroupColumn) -> None:
    for saved in evidence.checkpoints.sound[:1]:
        for group in saved.open_groups.values():
            for column, mine, what in (
                (prompts, group.prompt, "prompt"),
                (versions, group.admitted_version, "version at admission"),
            ):
                if column[group.group] < 0:
                    column[group.group] = mine
                elif column[group.group] != mine:
                    text = f"group {group.group}: {what} {mine} in the checkpoint, {column[group.group]} elsewhere"
                    check.accuse(Offence(text, group=group.group, file=f"checkpoints/{saved.name}/controller.json"))


def _compare_journal(check: Check, evidence: Evidence, prompts: GroupColumn, versions: GroupColumn) -> int:
    rows, events = evidence.journal.rows, evidence.events
    num_compared = 0
    for column, name, what in (
        (prompts, "prompt", "prompt"),
        (versions, "admitted_version", "version at admission"),
    ):
        length = max(column.length, int(rows["group"].max(initial=-1)) + 1)
        said = column.upto(length)[rows["group"]]
        # A rollout of a group that a later attempt admitted again: the first admission never reached the disk.
        is_void = rows["attempt"] < events.admitted_by.upto(length)[rows["group"]]
        if name == "admitted_version":  # the group came back, and the rollout arrived before its turn
            is_void |= events.first_version_of.upto(length)[rows["group"]] == rows[name]
        differs = (said >= 0) & (said != rows[name]) & ~is_void
        differs &= events.are_whole  # otherwise a restart takes a neighbour's version
        num_compared += int((said >= 0).sum())
        for row in rows[differs]:
            text = f"group {row['group']}: {what} {row[name]} in the journal, {column[int(row['group'])]} elsewhere"
            check.accuse(evidence.journal.offence_at(row, text))
    return num_compared
