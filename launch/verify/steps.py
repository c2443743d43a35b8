"""Steps: none is missing or duplicated, each has its groups, and begins with the version made by the one before.

Input: Evidence.  Segments and events agree: segments hold the groups of each attempt in the order in which its events
resolved them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.common.text import counted
from launch.verify.evidence import Evidence, added, fate_at, keys_of, offence_at, rollout_rows, segment_name
from launch.verify.report import Check, Offence
from launch.verify.timeline import joined
from rlhpc.buffer.journal import read_journal
from rlhpc.buffer.segments import read_raw_columns
from rlhpc.protocol.errors import JournalError, SegmentError

# -------------------------------------------------------------------------------------------------------------- lengths
#
# Compare lengths of lost or dropped rollouts with trained ones: losing by length is a bias.
#
# Input: completion lengths as histograms.  Output: for each kind, count, mean and median, and a comparison with trained
# rollouts: the share of pairs in which it is the longer one (Vargha & Delaney 2000; 0.5: no difference), with the
# rank-sum test's z (Mann & Whitney 1947, ties corrected).
#
# Unintended losses get a remark if all of this holds: the share is 0.14 from 0.5 or farther, which Vargha
# and Delaney call a medium difference; |z| ≥ 4, since rollouts of one group resemble each other and a test that
# assumes independence overstates; and they are at least 1 % of the trained ones: fewer cannot move the mean length by
# more than 1 % of the difference.  Zero-variance groups are dropped on purpose, because of their rewards.


UNCHOSEN = ("lost", "verifier_error", "poison")
MEDIUM, SURE, NOTEWORTHY = 0.14, 4.0, 0.01
LOST = np.dtype([("key", "<i8"), ("length", "<i8"), ("reward", "<f8")])


class LostRollouts:
    """Rollouts that are only in lost_attempt_N/, without those that a repeated step has written again."""

    def __init__(self, rollouts: Path) -> None:
        parts = [*map(_of_segment, rollouts.glob("lost_attempt_*/segment_*.h5"))]
        parts += map(_of_journal, rollouts.glob("lost_attempt_*/journal_*.log"))
        self.rows = np.unique(joined(parts, LOST))

    def found(self, keys: NDArray[Any], lengths: NDArray[Any], rewards: NDArray[Any]) -> None:
        """Remove rollouts that are in the current timeline."""
        if len(self.rows):
            self.rows = np.setdiff1d(self.rows, _rows(keys, lengths, rewards))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """A histogram of their lengths."""
        return np.bincount(self.rows["length"]) if len(self.rows) else np.zeros(1, np.int64)


def lengths(evidence: Evidence, lost: LostRollouts) -> tuple[Check, dict[str, dict[str, float]]]:
    """Describe the lengths of each kind, and remark on losses that differ."""
    check = Check("length bias")
    rows = evidence.journal.rows
    lost.found(evidence.journal.keys, rows["num_tokens"], rows["reward"])
    histograms = {**evidence.segments.lengths}
    if lost.lengths.sum():
        histograms["lost"] = lost.lengths
    trained = histograms.get("trained", np.zeros(1, np.int64))
    figures = {}
    for kind, histogram in histograms.items():
        figures[kind] = describe(histogram)
        if kind == "trained" or not histogram.sum() or not trained.sum():
            continue
        share, z = compare(histogram, trained)
        figures[kind] |= {"longer_share": share, "z": z}
        is_known = histogram.sum() >= NOTEWORTHY * trained.sum()
        if kind in UNCHOSEN and is_known and abs(share - 0.5) >= MEDIUM and abs(z) >= SURE:
            which = "longer" if share > 0.5 else "shorter"
            check.remarks.append(
                f"rollouts that are {kind} are {which} than those trained: in {share:.0%} of pairs they are the longer "
                f"one, z {z:.1f}"
            )
    check.looked_at = "; ".join(
        f"{kind} {figure['count']:.0f}, mean {figure['mean']:.1f}, median {figure['median']:.0f}"
        for kind, figure in figures.items()
    )
    return check, figures


def describe(histogram: NDArray[np.int64]) -> dict[str, float]:
    """Number, mean and median of lengths."""
    count = int(histogram.sum())
    if not count:
        return {"count": 0, "mean": 0.0, "median": 0.0}
    mean = float((np.arange(len(histogram)) * histogram).sum() / count)
    return {"count": count, "mean": mean, "median": float(np.searchsorted(np.cumsum(histogram), (count + 1) // 2))}


def compare(left: NDArray[np.int64], right: NDArray[np.int64]) -> tuple[float, float]:
    """(share of pairs in which the left one is longer, ties half; z of the rank-sum test)."""
    both = added(left, right)
    left, right = (np.concatenate([each, np.zeros(len(both) - len(each), np.int64)]) for each in (left, right))
    num_left, num_right = float(left.sum()), float(right.sum())
    below = np.cumsum(right) - right
    pairs = float((left * (below + right / 2)).sum())
    total = num_left + num_right
    ties = float((both.astype(np.float64) ** 3 - both).sum()) / (total * (total - 1)) if total > 1 else 0.0
    variance = num_left * num_right / 12 * (total + 1 - ties)
    z = (pairs - num_left * num_right / 2) / math.sqrt(variance) if variance > 0 else 0.0
    return pairs / (num_left * num_right), z


def _rows(keys: NDArray[Any], lengths: NDArray[Any], rewards: NDArray[Any]) -> NDArray[Any]:
    rows = np.empty(len(keys), LOST)
    rows["key"], rows["length"], rows["reward"] = keys, lengths, np.nan_to_num(rewards)
    return rows


def _of_segment(path: Path) -> NDArray[Any]:
    names = ["rollouts/group_id", "rollouts/sample_index", "rollouts/token_offsets", "rollouts/reward"]
    try:
        _, columns = read_raw_columns(path, names, is_verified=False)
    except SegmentError:
        return np.empty(0, LOST)  # damaged: it is not needed
    groups, samples, offsets, rewards = (columns[name] for name in names)
    return _rows(keys_of(groups, samples), np.diff(offsets), rewards)


def _of_journal(path: Path) -> NDArray[Any]:
    try:
        rows = rollout_rows(read_journal(path, is_mapped=True, is_verified=False), is_quick=True)
    except JournalError:
        return np.empty(0, LOST)
    return _rows(keys_of(rows["group"], rows["sample"]), rows["num_tokens"], rows["reward"])


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True, slots=True)
class Course:
    """All steps of a run."""

    num_steps: int
    version: int  # after the last one; -1: not known


@dataclass(frozen=True, slots=True)
class SealedStep:
    """A step in segments."""

    groups: list[int]
    version: int
    applied: bool
    file: str
    row: int
    is_uniform: bool  # all rows have the same version and applied


def steps(evidence: Evidence) -> tuple[Check, Course]:
    """Check every step."""
    check = Check("steps")
    for offence in evidence.events.offences:
        check.accuse(offence)
    sealed, recorded = dict(_sealed_steps(evidence)), {step for step, _, _ in evidence.events.trained_steps()}
    first = min(sealed, default=0) if evidence.first_segment else 0
    last = max([*sealed, *recorded, first - 1])
    version, last_sealed = 0 if not first else -1, max(sealed, default=-1)
    for step in range(first, last + 1):
        if step not in sealed and step not in recorded:
            check.accuse(Offence(f"step {step} is missing", step=step))
            version = -1
            continue
        if step in sealed:
            _look_at_groups(check, evidence, step, sealed[step], is_last=step == last_sealed)
        version = _look_at_version(check, step, version, sealed.get(step), evidence)
    check.looked_at = f"{counted(last + 1 - first, 'step')}, {len(sealed)} in segments, {len(recorded)} in events"
    if evidence.events.fold.lost_version >= 0:
        check.remarks.append("steps that were recorded are void, since rollouts of them were lost")
    return check, Course(last + 1, version)


def order(evidence: Evidence) -> Check:
    """Compare segments with events, attempt by attempt, group by group."""
    check = Check("segments follow events")
    rows, num_compared = evidence.segments.rows, 0
    for number, attempt in evidence.events.attempts.items():
        if not evidence.events.is_whole(number) or evidence.first_segment:
            continue
        mine = rows[rows["attempt"] == number]
        groups, fates = np.asarray(attempt.order), np.asarray(attempt.fates)
        mine = mine[_num_restored(evidence, number, mine) :]
        length = min(len(mine), len(groups))
        said = np.where(mine["step"] >= 0, mine["step"], -2)
        differs = (mine["group"][:length] != groups[:length]) | (said[:length] != fates[:length])
        num_compared += length
        if differs.any():
            _accuse_order(check, mine[int(differs.argmax())], groups, fates, int(differs.argmax()))
        elif len(mine) > length:
            _look_beyond(check, evidence, mine[length:])
    check.looked_at = f"{counted(num_compared, 'group')} in the order in which events resolved them"
    check.is_seen = bool(evidence.events.attempts) and not evidence.first_segment
    if not evidence.events.are_whole:
        check.remarks.append("events of some attempts are damaged: those were not compared")
    return check


def _num_restored(evidence: Evidence, number: int, mine: NDArray[np.void]) -> int:
    """Number of groups already dropped when an attempt began: by an earlier attempt, a verdict or the guard."""
    events, reasons = evidence.events, evidence.segments.reasons
    untold = [reasons.index(reason) for reason in ("verifier_error", "guard") if reason in reasons]
    is_restored = (mine["step"] < 0) & (np.isin(mine["reason"], untold) | (not events.are_whole))
    for earlier, attempt in events.attempts.items():
        if earlier < number:
            dropped = np.asarray(attempt.order)[np.asarray(attempt.fates) == -2]
            is_restored |= (mine["step"] < 0) & np.isin(mine["group"], dropped)
    is_restored &= ~np.isin(mine["group"], np.asarray(events.attempts[number].order))
    return len(mine) if is_restored.all() else int((~is_restored).argmax())


def _accuse_order(check: Check, row: np.void, groups: NDArray[np.int64], fates: NDArray[np.int64], place: int) -> None:
    due, found = (f"group {groups[place]}, {fate_at(fates[place])}", f"group {row['group']}, {fate_at(row['step'])}")
    check.accuse(offence_at(row, f"{due}, is next according to the events, but here is {found}"))


def _look_beyond(check: Check, evidence: Evidence, rest: NDArray[np.void]) -> None:
    """Report segments that are ahead of the events by more than one commit: at most one step."""
    known = max(evidence.events.fold.batches, default=-1)
    for row in rest[rest["step"] > known + 1][:1]:
        text = f"step {row['step']} is in a segment, and events end with step {known}"
        check.accuse(offence_at(row, text))


def _sealed_steps(evidence: Evidence) -> Iterator[tuple[int, SealedStep]]:
    rows = evidence.segments.rows
    trained = rows[rows["step"] >= 0]
    trained = trained[np.argsort(trained["step"], kind="stable")]
    if not len(trained):
        return
    numbers, starts = np.unique(trained["step"], return_index=True)
    is_uniform = np.ones(len(numbers), bool)
    for name in ("version", "applied"):
        is_uniform &= np.minimum.reduceat(trained[name], starts) == np.maximum.reduceat(trained[name], starts)
    for place, (number, part) in enumerate(zip(numbers.tolist(), np.split(trained, starts[1:]), strict=True)):
        first, applied = part[0], int(part[0]["applied"]) != 0
        file, row = segment_name(int(first["index"])), int(first["row"])
        groups = part["group"].tolist()
        yield number, SealedStep(groups, int(first["version"]), applied, file, row, bool(is_uniform[place]))


def _look_at_groups(check: Check, evidence: Evidence, step: int, sealed: SealedStep, *, is_last: bool) -> None:
    """Compare the groups of a step with admission.groups_per_step and with the events."""
    known, expected = evidence.events.fold.batches.get(step), evidence.config.admission.groups_per_step
    if known is not None:
        for group in sorted({*sealed.groups}.difference(known.groups)):
            text = f"group {group} is recorded as trained at step {step}, but events say {sorted(known.groups)}"
            check.accuse(Offence(text, group=group, step=step, file=sealed.file, row=sealed.row))
    is_cut = is_last and not evidence.is_complete  # the rest of it may not be sealed yet
    is_cut |= bool(evidence.first_segment)  # or be in a segment that was not looked at
    num_groups = len({*sealed.groups})
    if sealed.applied and (num_groups > expected or (num_groups < expected and not is_cut)):
        text = f"step {step} has {num_groups} groups, admission.groups_per_step={expected}: {sealed.groups}"
        check.accuse(Offence(text, step=step, file=sealed.file, row=sealed.row))
    if not sealed.is_uniform:
        text = f"groups of step {step} differ in trained_version or applied"
        check.accuse(Offence(text, step=step, file=sealed.file, row=sealed.row))


def _look_at_version(check: Check, step: int, version: int, sealed: SealedStep | None, evidence: Evidence) -> int:
    """Check the version that a step trained; return the version after it; -1: not known."""
    fold = evidence.events.fold
    known = fold.trained.get(step) if step in fold.batches else None
    file, row = (sealed.file, sealed.row) if sealed is not None else ("", -1)
    said = [(each.version, each.applied) for each in (sealed, known) if each is not None and each.version >= 0]
    if not said:
        return -1
    trained, applied = said[0]
    if said[-1] != said[0]:
        text = (
            f"step {step} trained version {trained}, applied {applied}, and by the events version {said[-1][0]}, "
            f"applied {said[-1][1]}"
        )
        check.accuse(Offence(text, step=step, file=file, row=row))
    if version not in (-1, trained):
        text = f"step {step} trained version {trained}, and the steps before it made version {version}"
        check.accuse(Offence(text, step=step, file=file, row=row))
    return trained + applied
