"""The law: every group that was drawn is in exactly one of {trained, dropped, buffered, in flight}.

Input: Evidence.  Output: the place of each group, by the strongest evidence: a segment, the events since the newest
checkpoint, that checkpoint, an admission.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launch.common.text import counted, numbered, shortened
from launch.verify.evidence import MEMBERS, CheckpointEvidence, Evidence, fate_at, offence_at
from launch.verify.report import Check, Offence, listed
from launch.verify.steps import Course
from launch.verify.timeline import column
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.lost_leases import LostLeaseFile

# --------------------------------------------------------------------------------------------------------------- poison
#
# Prompts on which generators or reward workers died, and groups that were dropped for lack of a verdict.
#
# Input: Evidence, lost_leases.jsonl.  Nothing here is a violation; groups dropped for one of these reasons were not
# trained.


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
    suspicions = LostLeaseFile(evidence.layout.lost_leases).suspicions()
    max_attempts = evidence.config.admission.max_attempts
    quarantined = [each for each in suspicions if each.is_quarantined(max_attempts)]
    suspects = [each for each in suspicions if each.lost_leases > 1 and each not in quarantined]
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


# --------------------------------------------------------------------------------------------------------- conservation


Groups = NDArray[np.int64]  # a number for each group; -1: not known
MISSING, TRAINED, DROPPED, BUFFERED, IN_FLIGHT = range(5)
WORDS = ("missing", "trained", "dropped", "buffered", "in_flight")


@dataclass(frozen=True, slots=True)
class Places:
    """The place of every group."""

    of: NDArray[np.int8]  # by group
    first: int  # the first group that is accounted for: earlier ones were not checked
    dropped: dict[str, int]  # reason → groups
    num_beyond: int  # groups in segments that neither events nor checkpoint know yet

    def counts(self) -> dict[str, int]:
        """Groups per place."""
        return {word: int((self.of[self.first :] == place).sum()) for place, word in enumerate(WORDS)}


def conservation(evidence: Evidence) -> tuple[Check, Places]:
    """Determine the place of every group, and report groups without a place or with two."""
    check = Check("conservation")
    events, newest = evidence.events, evidence.checkpoints.newest
    rows = evidence.segments.rows
    num_drawn = max(events.num_admitted, newest.next_group if newest else 0)
    of = np.full(num_drawn, MISSING, np.int8)
    inside = rows[rows["group"] < num_drawn]
    of[inside["group"][inside["step"] >= 0]] = TRAINED
    of[inside["group"][inside["reason"] >= 0]] = DROPPED
    reason_of = np.full(num_drawn, -1, np.int64)
    reason_of[inside["group"]] = inside["reason"]
    _accuse_two_places(check, evidence)
    is_sealed = of != MISSING
    step_of, is_dropped = column(events.fold.step_of, num_drawn), _is_in(events.fold.dropped, num_drawn)
    of[~is_sealed & (step_of >= 0)] = _place_of_steps(evidence, step_of[~is_sealed & (step_of >= 0)])
    of[(of == MISSING) & is_dropped] = DROPPED
    dropped = _reasons(evidence, of, reason_of)
    of[(of == MISSING) & _is_open(evidence, num_drawn)] = IN_FLIGHT
    _look_at_members(evidence, of, dropped)
    first = _first_group(evidence)
    places = Places(of, first, dropped, int((rows["group"] >= num_drawn).sum()))
    _accuse_missing(check, evidence, places, step_of)
    _accuse_never_admitted(check, evidence, places)
    _accuse_open_at_end(check, evidence, places)
    counts = places.counts()
    listed = ", ".join(
        f"{counts[word]} {word.replace('_', ' ')}" for word in WORDS if word != "missing" or counts[word]
    )
    check.looked_at = f"{counted(num_drawn - first, 'group')}: {listed}"
    if places.num_beyond:
        check.remarks.append(f"{counted(places.num_beyond, 'group')} resolved after the last event that is on disk")
    return check, places


def _is_in(groups: Mapping[int, object], length: int) -> NDArray[np.bool_]:
    """Mask [length] of the groups from 0 to length − 1 that are in a mapping."""
    is_there: NDArray[np.bool_] = column(groups, length, lambda _: 1) > 0
    return is_there


def _accuse_two_places(check: Check, evidence: Evidence) -> None:
    rows = evidence.segments.rows
    ids, counts = np.unique(rows["group"], return_counts=True)
    for row in rows[np.isin(rows["group"], ids[counts > 1])]:
        text = f"group {row['group']} is in segments {counts[np.searchsorted(ids, row['group'])]} times"
        check.accuse(offence_at(row, text))
    for row in rows[(rows["step"] >= 0) == (rows["reason"] >= 0)]:
        text = f"group {row['group']} is {'trained and dropped' if row['step'] >= 0 else 'neither trained nor dropped'}"
        check.accuse(offence_at(row, text))


def _place_of_steps(evidence: Evidence, steps: NDArray[np.int64]) -> NDArray[np.int8]:
    """The places of groups that no segment has: trained, or in the batch of a step that is not trained."""
    trained = {step for step, _, _ in evidence.events.trained_steps()}
    return np.array([TRAINED if step in trained else BUFFERED for step in steps.tolist()], np.int8)


def _reasons(evidence: Evidence, of: NDArray[np.int8], reason_of: NDArray[np.int64]) -> dict[str, int]:
    """Number of dropped groups by reason: a segment's, or else that of the event."""
    is_sealed, dropped = reason_of >= 0, Counter[str]()
    for number in reason_of[(of == DROPPED) & is_sealed].tolist():
        dropped[evidence.segments.reasons[number]] += 1
    for group in np.flatnonzero((of == DROPPED) & ~is_sealed).tolist():
        dropped[evidence.events.fold.dropped[group].value] += 1
    return dict(dropped)


def _is_open(evidence: Evidence, num_drawn: int) -> NDArray[np.bool_]:
    """Groups that may be in flight: those open in the newest checkpoint, and those admitted after it."""
    events, newest = evidence.events, evidence.checkpoints.newest
    is_open = _is_in(events.fold.admitted, num_drawn)
    if events.knows_all and not events.are_whole:
        is_open[:] = True  # a restart admits groups that are missing between others
    if newest is not None:
        is_open[: newest.next_group] = False
        is_open[[group for group in newest.open_groups if group < num_drawn]] = True
    return is_open


def _look_at_members(evidence: Evidence, of: NDArray[np.int8], dropped: dict[str, int]) -> None:
    """Groups in flight with all members count as buffered, those with a verifier error as dropped."""
    keys, rows = evidence.delivered_keys, evidence.journal.rows
    delivered = np.bincount(keys[keys < len(of) * MEMBERS] // MEMBERS, minlength=len(of)) if len(of) else keys
    of[(of == IN_FLIGHT) & (delivered >= evidence.sizes(len(of)))] = BUFFERED
    failed = np.unique(rows["group"][rows["is_error"] & (rows["group"] < len(of))])
    failed = failed[np.isin(of[failed], (BUFFERED, IN_FLIGHT))]
    of[failed] = DROPPED
    if len(failed):
        dropped["verifier_error"] = dropped.get("verifier_error", 0) + len(failed)


def _first_group(evidence: Evidence) -> int:
    """The first group that is accounted for; older ones are not if only the newest segments were read."""
    newest = evidence.checkpoints.newest
    if not evidence.first_segment or newest is None:
        return 0
    return newest.next_group  # resolved groups below it may be in segments that were not read


def _accuse_missing(check: Check, evidence: Evidence, places: Places, step_of: NDArray[np.int64]) -> None:
    missing = np.flatnonzero(places.of[places.first :] == MISSING) + places.first
    newest = evidence.checkpoints.newest
    for group in missing.tolist():
        if evidence.events.knows_all and group not in evidence.events.fold.admitted:
            text = f"group {group} was drawn and is in no event, checkpoint or segment"
        elif newest is not None and group < newest.next_group:
            text = f"group {group} is in no segment, and not open in {newest.name}"
        else:
            text = f"group {group} was drawn, and nothing says what became of it"
        check.accuse(Offence(text, group=group))
    if newest is None:
        return
    known = np.zeros(newest.next_group, bool)
    sealed = evidence.segments.rows["group"]
    known[sealed[sealed < newest.next_group]] = True
    known[[group for group in newest.open_groups if group < newest.next_group]] = True
    for group in (np.flatnonzero(~known[places.first :]) + places.first).tolist():
        if places.of[group] != MISSING:  # already reported
            fate = fate_at(step_of[group]) if places.of[group] == TRAINED else WORDS[places.of[group]]
            text = f"group {group}, {fate} by the events, is in no segment, and not open in {newest.name}"
            check.accuse(Offence(text, group=group, step=int(step_of[group])))


def _accuse_never_admitted(check: Check, evidence: Evidence, places: Places) -> None:
    """Report missing admissions: groups are admitted in order, so events have all from their first one on."""
    events, newest = evidence.events, evidence.checkpoints.newest
    if not events.are_whole or not (events.knows_all or events.num_admitted):
        return
    num_known = max(events.num_admitted, newest.next_group if newest else 0)  # events are on disk before a checkpoint
    is_known = _is_in(events.fold.admitted, num_known)
    for group in (np.flatnonzero(~is_known[events.first_admitted :]) + events.first_admitted).tolist():
        if places.of[group] != MISSING or group < places.first:
            check.accuse(Offence(f"group {group} is {WORDS[places.of[group]]}, and no event admits it", group=group))


def _accuse_open_at_end(check: Check, evidence: Evidence, places: Places) -> None:
    if not evidence.is_complete:
        return
    for group in np.flatnonzero(np.isin(places.of, (BUFFERED, IN_FLIGHT))).tolist():
        check.accuse(Offence(f"the run is complete, and group {group} is {WORDS[places.of[group]]}", group=group))


# ------------------------------------------------------------------------------------------------------------ agreement
#
# Compare checkpoints with segments, and records of the same group in several files.
#
# Input: Evidence.  A checkpoint is a cut of the run: a group admitted before it is either open in it, or in a segment
# that it relies on, and never both.


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
    _compare_members(check, evidence, saved, file)
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


def _compare_members(check: Check, evidence: Evidence, saved: CheckpointEvidence, file: str) -> None:
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
    """Compare each group's prompt and version at admission in segments, events, checkpoints and journal.

    Prompts of a dataset are drawn in one order, so that their numbers grow with those of the groups.
    """
    check = Check("prompts and admissions agree")
    length, num_compared = len(places.of), 0
    rows, admitted = evidence.segments.rows, evidence.events.fold.admitted
    rows = rows[rows["group"] < length]
    prompts, versions = (np.full(_num_groups(evidence, length), -1, np.int64) for _ in range(2))
    prompts[rows["group"]], versions[rows["group"]] = rows["prompt"], rows["admitted_version"]
    for mine, said, what in (
        (prompts[:length], column(admitted, length, lambda each: each.prompt), "prompt"),
        (versions[:length], column(admitted, length, lambda each: each.version), "version at admission"),
    ):
        is_known = (mine >= 0) & (said >= 0)
        num_compared += int(is_known.sum())
        for group in np.flatnonzero(is_known & (mine != said)).tolist():
            row = rows[rows["group"] == group][0]
            text = f"group {group}: {what} {mine[group]} in the segment, {said[group]} in the events"
            check.accuse(offence_at(row, text))
        mine[mine < 0] = said[mine < 0]
    _compare_checkpoints(check, evidence, prompts, versions)
    num_compared += _compare_journal(check, evidence, prompts, versions)
    known = prompts[:length]
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


def _num_groups(evidence: Evidence, num_drawn: int) -> int:
    """Number of groups: one more than the highest id in any file."""
    named = [int(evidence.journal.rows["group"].max(initial=-1))]
    named += [group for saved in evidence.checkpoints.sound[:1] for group in saved.open_groups]
    return max(num_drawn, max(named) + 1)


def _compare_checkpoints(check: Check, evidence: Evidence, prompts: Groups, versions: Groups) -> None:
    for saved in evidence.checkpoints.sound[:1]:
        for group in saved.open_groups.values():
            for known, mine, what in (
                (prompts, group.prompt, "prompt"),
                (versions, group.admitted_version, "version at admission"),
            ):
                if known[group.group] < 0:
                    known[group.group] = mine
                elif known[group.group] != mine:
                    text = f"group {group.group}: {what} {mine} in the checkpoint, {known[group.group]} elsewhere"
                    check.accuse(Offence(text, group=group.group, file=f"checkpoints/{saved.name}/controller.json"))


def _compare_journal(check: Check, evidence: Evidence, prompts: Groups, versions: Groups) -> int:
    rows, events = evidence.journal.rows, evidence.events
    admitted_by = column(events.fold.admitted_by, len(prompts))[rows["group"]]
    first_version_of = column(events.fold.first_version_of, len(prompts))[rows["group"]]
    num_compared = 0
    for known, name, what in (
        (prompts, "prompt", "prompt"),
        (versions, "admitted_version", "version at admission"),
    ):
        said = known[rows["group"]]
        # A rollout of a group that a later attempt admitted again: the first admission never reached the disk.
        is_void = rows["attempt"] < admitted_by
        if name == "admitted_version":  # a restored group, whose rollout arrived before its turn
            is_void |= first_version_of == rows[name]
        differs = (said >= 0) & (said != rows[name]) & ~is_void
        differs &= events.are_whole  # otherwise a restart takes a neighbour's version
        num_compared += int((said >= 0).sum())
        for row in rows[differs]:
            text = f"group {row['group']}: {what} {row[name]} in the journal, {known[row['group']]} elsewhere"
            check.accuse(evidence.journal.offence_at(row, text))
    return num_compared


# ------------------------------------------------------------------------------------------------------------- rollouts
#
# Members of groups, staleness, and the versions that tokens were sampled with.
#
# Input: Evidence.  A version is published once the step that makes it is applied.  So no token may be of a later
# version than the one trained by its step, nor of an earlier one than was live at its group's admission.


def members(evidence: Evidence, places: Places) -> Check:
    """Check that each trained group has exactly the wanted samples, without duplicates."""
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
    unrouted = evidence.segments.num_rollouts - evidence.segments.num_routed
    if evidence.config.buffer.keep_routes and unrouted and not evidence.is_quick:
        check.remarks.append(
            f"{counted(unrouted, 'rollout')} in segments without routes, which buffer.keep_routes asks for: those "
            "that a resume took from the journal have none"
        )
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
    for row in rows[rows["is_teacher_faulty"]]:
        text = f"group {row['group']}: sample {row['sample']}: numbers of its teacher are missing, or not finite"
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

    Only for steps trained at the first reading of events, since the journal was read after it.  Returns their number.
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
    step_of = column(events.fold.step_of, len(places.of))
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
    """Check the staleness of each trained group: from its admission, and from its oldest token."""
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
    for step, taken, known in evidence.events.trained_steps():
        if step in sealed:
            continue
        for group in taken.groups:
            num_recorded += 1
            admitted = evidence.events.fold.admitted.get(group)
            if admitted is not None and known.version - admitted.version > bound:
                text = (
                    f"group {group}, admitted at version {admitted.version}, trained version {known.version} at step "
                    f"{step}: staleness {known.version - admitted.version}, admission.max_staleness={bound}"
                )
                attempt, number = evidence.events.taken_at[step]
                file = f"rollouts/{evidence.events.attempts[attempt].path.name}"
                check.accuse(Offence(text, group=group, step=step, file=file, row=number))
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
    """Check that every version of a token or an admission was published."""
    check = Check("weight versions")
    rows, events = evidence.segments.rows, evidence.events
    newest = max([course.version, *(known.next_version for _, _, known in events.trained_steps())])
    check.looked_at = numbered("version", 0, newest) if newest >= 0 else "versions, none of which is known"
    check.looked_at += "; tokens were not read" if evidence.is_quick else ""
    allowed = events.fold.lost_version  # of steps that were lost with some rollouts; their complete groups are used
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
    for row in rows[rows["has_odd_rows"]]:
        text = f"group {row['group']}: sample {row['sample']} has rows that do not fit its tokens"
        check.accuse(evidence.journal.offence_at(row, text))
    is_open = np.isin(rows["group"], np.flatnonzero(np.isin(places.of, (BUFFERED, IN_FLIGHT))))
    for row in rows[is_open & ((rows["newest"] > top) | (rows["admitted_version"] > top))]:
        newest = max(row["newest"], row["admitted_version"])
        text = f"group {row['group']}: sample {row['sample']} is of version {newest}, which never was"
        check.accuse(evidence.journal.offence_at(row, text))
