"""The law: every group that was drawn is in exactly one of {trained, dropped, buffered, in flight}.

Input: Evidence.  Output: where each group is, from the strongest witness to the weakest: a segment, the events since
the newest checkpoint, that checkpoint, an admission.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launch.checks.audit.evidence import Evidence
from launch.checks.audit.journal import MEMBERS
from launch.checks.audit.report import Check, Offence
from launch.checks.audit.segments import fate_at, offence_at
from launch.common.counted import counted

MISSING, TRAINED, DROPPED, BUFFERED, IN_FLIGHT = range(5)
WORDS = ("missing", "trained", "dropped", "buffered", "in_flight")


@dataclass(frozen=True, slots=True)
class Places:
    """Where every group is."""

    of: NDArray[np.int8]  # by group
    first: int  # the first group that is accounted for: earlier ones were not looked at
    dropped: dict[str, int]  # reason → groups
    num_beyond: int  # groups in segments that neither events nor checkpoint know yet

    def counts(self) -> dict[str, int]:
        """Groups per place."""
        return {word: int((self.of[self.first :] == place).sum()) for place, word in enumerate(WORDS)}


def conservation(evidence: Evidence) -> tuple[Check, Places]:
    """Put every group in its place, and accuse those that have none or two."""
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
    step_of, dropped_by = events.step_of.upto(num_drawn), events.dropped_by.upto(num_drawn)
    of[~is_sealed & (step_of >= 0)] = _place_of_steps(evidence, step_of[~is_sealed & (step_of >= 0)])
    of[(of == MISSING) & (dropped_by >= 0)] = DROPPED
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
    trained = {step for step, known in evidence.events.steps.items() if known.is_trained}
    return np.array([TRAINED if step in trained else BUFFERED for step in steps.tolist()], np.int8)


def _reasons(evidence: Evidence, of: NDArray[np.int8], reason_of: NDArray[np.int64]) -> dict[str, int]:
    dropped: dict[str, int] = {}
    by_event = evidence.events.reason_of.upto(len(of))
    is_sealed = reason_of >= 0
    for names, codes, chosen in (
        (evidence.segments.reasons, reason_of, (of == DROPPED) & is_sealed),
        (evidence.events.reasons, by_event, (of == DROPPED) & ~is_sealed),
    ):
        for number, count in enumerate(np.bincount(codes[chosen], minlength=len(names)) if len(names) else []):
            if count:
                dropped[names[number]] = dropped.get(names[number], 0) + int(count)
    return dropped


def _is_open(evidence: Evidence, num_drawn: int) -> NDArray[np.bool_]:
    """Groups that may be in flight: those open in the newest checkpoint, and those admitted after it."""
    events, newest = evidence.events, evidence.checkpoints.newest
    is_open: NDArray[np.bool_] = events.admitted_by.upto(num_drawn) >= 0
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
    return newest.next_group  # resolved ones below it may stand in segments that were not read


def _accuse_missing(check: Check, evidence: Evidence, places: Places, step_of: NDArray[np.int64]) -> None:
    missing = np.flatnonzero(places.of[places.first :] == MISSING) + places.first
    newest = evidence.checkpoints.newest
    for group in missing.tolist():
        if evidence.events.knows_all and evidence.events.admitted_by[group] < 0:
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
        if places.of[group] != MISSING:  # said already
            fate = fate_at(step_of[group]) if places.of[group] == TRAINED else WORDS[places.of[group]]
            text = f"group {group}, {fate} by the events, is in no segment, and not open in {newest.name}"
            check.accuse(Offence(text, group=group, step=int(step_of[group])))


def _accuse_never_admitted(check: Check, evidence: Evidence, places: Places) -> None:
    """Groups are admitted in order: from the first admission on that events have, they must have all."""
    events, newest = evidence.events, evidence.checkpoints.newest
    if not events.are_whole or not (events.knows_all or events.num_admitted):
        return
    num_known = max(events.num_admitted, newest.next_group if newest else 0)  # its events were on disk before it
    is_known = events.admitted_by.upto(num_known) >= 0
    for group in (np.flatnonzero(~is_known[events.first_admitted :]) + events.first_admitted).tolist():
        if places.of[group] != MISSING or group < places.first:
            check.accuse(Offence(f"group {group} is {WORDS[places.of[group]]}, and no event admits it", group=group))


def _accuse_open_at_end(check: Check, evidence: Evidence, places: Places) -> None:
    if not evidence.is_complete:
        return
    for group in np.flatnonzero(np.isin(places.of, (BUFFERED, IN_FLIGHT))).tolist():
        check.accuse(Offence(f"the run is complete, and group {group} is {WORDS[places.of[group]]}", group=group))
