"""Whether lost or dropped rollouts are longer or shorter than trained ones: losing by length is a bias.

Input: completion lengths as histograms.  Output: for each kind, count, mean and median, and a comparison with trained
rollouts: the share of pairs in which it is the longer one (Vargha & Delaney 2000; 0.5: no difference), with the
rank-sum test's z (Mann & Whitney 1947, ties corrected).

Losses that were not intended get a remark if all of this holds: the share is 0.14 from 0.5 or farther, which Vargha and
Delaney call a medium difference; |z| ≥ 4, since rollouts of one group resemble each other and a test that assumes
independence overstates; and they are at least 1 % of what was trained: fewer cannot move its mean length by more than 1
% of the difference.  Groups without spread are dropped because of their rewards: that is meant to select.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.checks.audit.columns import joined
from launch.checks.audit.evidence import Evidence
from launch.checks.audit.journal import keys_of
from launch.checks.audit.report import Check
from launch.checks.audit.segments import added
from rlhpc.buffer.journal_reader import read_rollout_rows
from rlhpc.buffer.segment_reader import read_raw_columns
from rlhpc.errors import JournalError, SegmentError

UNCHOSEN = ("lost", "verifier_error", "poison")
MEDIUM, SURE, NOTEWORTHY = 0.14, 4.0, 0.01
LOST = np.dtype([("key", "<i8"), ("length", "<i8"), ("reward", "<f8")])


class LostRollouts:
    """Rollouts that are only in lost_attempt_N/: a repeated step writes the same rollouts again."""

    def __init__(self, rollouts: Path) -> None:
        parts = [*map(_of_segment, rollouts.glob("lost_attempt_*/segment_*.h5"))]
        parts += map(_of_journal, rollouts.glob("lost_attempt_*/journal_*.h5"))
        self.rows = np.unique(joined(parts, LOST))

    def found(self, keys: NDArray[Any], lengths: NDArray[Any], rewards: NDArray[Any]) -> None:
        """Remove rollouts that are in the timeline that counts."""
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
        _, rows = read_rollout_rows(path)
    except JournalError:
        return np.empty(0, LOST)
    rows = rows[rows["sequence"] > 0]
    return _rows(keys_of(rows["group_id"], rows["sample_index"]), rows["num_tokens"], rows["reward"])
