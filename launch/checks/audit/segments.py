"""The segments of a run as columns over all groups, read one file at a time.

Input: rollouts/segment_*.h5, all schemas.  Output: what became of each group and where it is stored, rules that its
members break, and how long completions were.  Tokens of one file are in memory at a time; what stays is 60 bytes a
group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.checks.audit.columns import joined, reduced
from launch.checks.audit.journal import MEMBERS, keys_of
from launch.checks.audit.report import Offence
from rlhpc.buffer.segment_reader import read_raw_columns
from rlhpc.errors import SegmentError

GROUP_COLUMNS = ("group_id", "prompt_id", "admitted_version", "consumed_step", "drop_reason", "trained_version", "applied", "group_size", "rollout_offsets")  # fmt: skip  # noqa: E501
MEMBER_COLUMNS = ("sample_index", "reward", "verdict", "token_offsets")
ROW = np.dtype(
    [
        ("group", "<i8"),
        ("prompt", "<i8"),
        ("admitted_version", "<i8"),
        ("step", "<i8"),  # -1: dropped
        ("reason", "<i4"),  # index into `reasons`; -1: trained
        ("version", "<i8"),  # that was trained; -1: none
        ("applied", "<i4"),
        ("num_members", "<i4"),
        ("size", "<i4"),  # members that were wanted
        ("attempt", "<i4"),
        ("index", "<i4"),  # of the segment
        ("row", "<i4"),  # in `groups`
        ("oldest", "<i8"),  # version of a token of any member; -1: not looked at, or no tokens
        ("newest", "<i8"),
    ]
)


@dataclass(slots=True)
class SegmentEvidence:
    """What became of groups, according to segments."""

    parts: list[NDArray[Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (file, why)
    offences: list[Offence] = field(default_factory=list)  # of members that break a rule; row: in `rollouts`
    num_rollouts: int = 0
    lengths: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # "trained" or a reason → completions by length
    num_files: int = 0

    @property
    def rows(self) -> NDArray[Any]:
        """One row per group, in the order in which they were resolved."""
        if len(self.parts) != 1:
            self.parts = [joined(self.parts, ROW)]
        return self.parts[0]

    def read(self, path: Path, index: int, group_size: int, *, is_quick: bool, witness: Witness | None = None) -> None:
        """Add a file; one that is damaged is noted, one that is gone is not.  witness: sees each file's rollouts."""
        names = [f"groups/{name}" for name in GROUP_COLUMNS] + [f"rollouts/{name}" for name in MEMBER_COLUMNS]
        try:
            names += [] if is_quick else ["rollouts/versions"]
            attributes, columns = read_raw_columns(path, names, is_verified=not is_quick)
        except SegmentError as error:
            if path.exists():  # else it was set aside meanwhile
                self.unreadable.append((path.name, str(error)))
            return
        self.num_files += 1
        rows = self._group_rows(columns, int(attributes.get("run_attempt", 0)), index, group_size)
        offsets = columns["groups/rollout_offsets"]
        owner = np.repeat(np.arange(len(rows)), np.diff(offsets))  # row of each rollout's group
        samples, token_offsets = columns["rollouts/sample_index"], columns["rollouts/token_offsets"]
        keys = keys_of(rows["group"][owner], samples)
        self._accuse_samples(rows, owner, samples)
        self._count_lengths(rows, owner, np.diff(token_offsets))
        if not is_quick:
            self._look_at_versions(rows, owner, samples, columns["rollouts/versions"], token_offsets)
        if witness is not None:
            witness(path, keys, columns["rollouts/reward"], np.diff(token_offsets))
        self.num_rollouts += len(samples)
        self.parts.append(rows)

    def _group_rows(self, columns: dict[str, NDArray[Any]], attempt: int, index: int, group_size: int) -> NDArray[Any]:
        rows = np.zeros(len(columns["groups/group_id"]), ROW)
        rows["group"], rows["prompt"] = columns["groups/group_id"], columns["groups/prompt_id"]
        rows["admitted_version"], rows["step"] = columns["groups/admitted_version"], columns["groups/consumed_step"]
        rows["version"], rows["applied"] = columns["groups/trained_version"], columns["groups/applied"]
        rows["num_members"] = np.diff(columns["groups/rollout_offsets"])
        rows["size"] = np.maximum(columns["groups/group_size"], group_size)
        rows["attempt"], rows["index"], rows["row"] = attempt, index, np.arange(len(rows))
        rows["oldest"] = rows["newest"] = rows["reason"] = -1
        for reason in np.unique(columns["groups/drop_reason"]):
            if reason:
                rows["reason"][columns["groups/drop_reason"] == reason] = self._number_of(reason.decode())
        return rows

    def _number_of(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)

    def _accuse_samples(self, rows: NDArray[Any], owner: NDArray[Any], samples: NDArray[Any]) -> None:
        """Report members that are outside their group's size, and those that are there twice."""
        sizes = rows["size"][owner]
        for row in np.flatnonzero((samples < 0) | (samples >= sizes)):
            self._accuse(f"of a group of {sizes[row]}", rows, owner, samples, int(row))
        within = owner.astype(np.int64) * MEMBERS + samples
        order = np.argsort(within, kind="stable")
        for row in order[1:][within[order][1:] == within[order][:-1]]:
            self._accuse("is in its group twice", rows, owner, samples, int(row))

    def _look_at_versions(
        self,
        rows: NDArray[Any],
        owner: NDArray[Any],
        samples: NDArray[Any],
        versions: NDArray[Any],
        offsets: NDArray[Any],
    ) -> None:
        falls = np.flatnonzero(np.diff(versions) < 0) + 1  # tokens that are older than the one before
        falls = falls[~np.isin(falls, offsets)]
        for row in np.unique(np.searchsorted(offsets, falls, side="right") - 1):
            self._accuse("has tokens of a version after tokens of a later one", rows, owner, samples, int(row))
        for name, ufunc, start in (("oldest", np.minimum, 1 << 60), ("newest", np.maximum, -1)):
            of_rollout = reduced(ufunc, versions, offsets, start)
            of_group = np.full(len(rows), start, np.int64)
            ufunc.at(of_group, owner, of_rollout)
            rows[name] = np.where(of_group == 1 << 60, -1, of_group)

    def _count_lengths(self, rows: NDArray[Any], owner: NDArray[Any], lengths: NDArray[Any]) -> None:
        of_rollout = rows["reason"][owner]
        for reason in np.unique(of_rollout):
            name = "trained" if reason < 0 else self.reasons[reason]
            self.lengths[name] = added(self.lengths.get(name), np.bincount(lengths[of_rollout == reason]))

    def _accuse(self, text: str, rows: NDArray[Any], owner: NDArray[Any], samples: NDArray[Any], row: int) -> None:
        group, sample, file = int(rows["group"][owner[row]]), int(samples[row]), segment_name(int(rows["index"][0]))
        text = f"group {group}: sample {sample} {text}"
        self.offences.append(Offence(text, group=group, sample=sample, file=file, row=row))


Witness = Callable[[Path, NDArray[np.int64], NDArray[Any], NDArray[Any]], None]  # path, keys, rewards, lengths


def added(left: NDArray[np.int64] | None, right: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of two histograms."""
    if left is None:
        return right
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def offence_at(row: NDArray[np.void] | np.void, text: str, *, forbids_going_on: bool = False) -> Offence:
    """One of a group, at its row of SegmentEvidence.rows."""
    group, step, file = int(row["group"]), int(row["step"]), segment_name(int(row["index"]))
    return Offence(text, group, step, file=file, row=int(row["row"]), forbids_going_on=forbids_going_on)


def fate_at(step: int) -> str:
    """What became of a group, in words; below 0: no step trained it."""
    return f"trained at step {step}" if step >= 0 else "dropped"


def segment_name(index: int) -> str:
    """Path of a segment, relative to the run directory."""
    return f"rollouts/segment_{index:06d}.h5"
