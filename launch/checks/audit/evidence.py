"""Everything that an audit reads, in an order that gives no false alarms on a running run.

    attempts ─▶ events ─▶ journal ─▶ checkpoints ─▶ segments ─▶ events again ─▶ attempts again

A run writes in a fixed order: rollouts, then the event about them; segments, then the checkpoint that relies on them;
then it deletes journal files that the checkpoint makes superfluous.  Reading in the order above finds everything that
was written by then: what an event is about is in the journal, which is read after it, or in the checkpoint and
segments, which are read later still.  Where segments are ahead of the first look at the events, the second look catches
up.  A resume moves files; if one began meanwhile, everything is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.checks.audit.checkpoint import Checkpoints, read_checkpoints
from launch.checks.audit.events import EventEvidence
from launch.checks.audit.journal import JournalEvidence, read_journal_evidence
from launch.checks.audit.report import Offence
from launch.checks.audit.segments import SegmentEvidence
from launch.run_directory.attempt_number import num_attempts
from rlhpc.buffer.segment_files import segment_paths
from rlhpc.config import Config
from rlhpc.config_file import read_resolved
from rlhpc.errors import RunDirectoryError, SegmentError
from rlhpc.run_layout import RunLayout

Progress = Callable[[str], None]  # is told what is being read
Found = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]
MOST_LOOKS = 5  # at a run that is started over and over meanwhile


@dataclass(slots=True)
class Evidence:
    """What the files of a run say."""

    layout: RunLayout
    config: Config
    is_quick: bool
    is_complete: bool  # the run has ended with its last step
    events: EventEvidence
    journal: JournalEvidence
    checkpoints: Checkpoints
    segments: SegmentEvidence
    missing_segments: list[int] = field(default_factory=list)
    first_segment: int = 0  # earlier ones were not looked at
    contradictions: list[Offence] = field(default_factory=list)  # between journal and segments
    is_being_resumed: bool = False  # files are being set aside, or that was interrupted

    @property
    def delivered_keys(self) -> NDArray[np.int64]:
        """Of the rollouts in the journal or the newest checkpoint's buffer, each once, ascending."""
        newest = self.checkpoints.newest
        return np.union1d(self.journal.keys, newest.buffered if newest else self.journal.keys[:0])

    def sizes(self, num_groups: int) -> NDArray[np.int64]:
        """Rollouts wanted of each group, by id, from events, the newest checkpoint and segments.

        For a group of which nothing is known, the largest legal size.
        """
        is_known = self.events.admitted_by.upto(num_groups) >= 0
        sizes = np.maximum(self.events.size_of.upto(num_groups), self.config.admission.group_size)
        sizes[~is_known] = self.config.largest_group
        newest, rows = self.checkpoints.newest, self.segments.rows
        for group, saved in (newest.open_groups if newest is not None else {}).items():
            if group < num_groups:
                sizes[group] = saved.size
        known = rows[rows["group"] < num_groups]
        sizes[known["group"]] = known["size"]
        return sizes


@dataclass(frozen=True, slots=True)
class Depth:
    """How much is read."""

    is_quick: bool = False  # no payload: neither tokens nor checksums
    last_segments: int | None = None  # before the newest checkpoint; None: all


def gather(layout: RunLayout, depth: Depth, progress: Progress, found: Found) -> Evidence:
    """Read a run; found: is told keys, lengths and rewards of the rollouts in segments.

    Raises ConfigError: config.json is damaged; RunDirectoryError: it keeps changing; OSError.
    """
    for _ in range(MOST_LOOKS):
        before = _stamp(layout)
        try:
            evidence = _look(layout, depth, progress, found)
        except FileNotFoundError:  # a file disappeared while it was read
            if _stamp(layout) == before:
                raise
            continue
        if _stamp(layout) == before:
            return evidence
    raise RunDirectoryError(f"{layout.root}: the run is started again and again while it is read; try again later")


def _look(layout: RunLayout, depth: Depth, progress: Progress, found: Found) -> Evidence:
    config, _ = read_resolved(layout)
    is_complete, num_begun = layout.summary.exists(), num_attempts(layout)
    progress("events")
    events = EventEvidence(layout.rollouts)
    events.look()
    progress("journal")
    journal = read_journal_evidence(layout.rollouts, events, is_quick=depth.is_quick)
    progress("checkpoints")
    checkpoints = read_checkpoints(layout, is_quick=depth.is_quick)
    evidence = Evidence(layout, config, depth.is_quick, is_complete, events, journal, checkpoints, SegmentEvidence())
    _read_segments(evidence, depth, progress, found)
    progress("events")
    events.look(is_last=True)
    aside = layout.rollouts / f"lost_attempt_{num_begun}"  # of the attempt that is about to begin
    newest = layout.rollouts / f"lost_attempt_{num_begun - 1}"
    has_begun = events.newest_attempt >= num_begun - 1
    evidence.is_being_resumed = aside.exists() or (newest.exists() and not has_begun)
    return evidence


def _read_segments(evidence: Evidence, depth: Depth, progress: Progress, found: Found) -> None:
    layout, newest = evidence.layout, evidence.checkpoints.newest
    paths = dict(_numbered(layout.rollouts))
    needed = max([newest.next_segment if newest else 0, *(index + 1 for index in paths)])
    evidence.missing_segments = sorted({*range(needed)} - paths.keys())
    if depth.last_segments is not None and newest is not None:
        evidence.first_segment = max(0, newest.next_segment - depth.last_segments)
    witness, group_size = _Witness(evidence, found), evidence.config.admission.group_size
    for index, path in sorted(paths.items()):
        if evidence.first_segment <= index < needed:
            progress(f"{path.name} (of {len(paths)})")
            evidence.segments.read(path, index, group_size, is_quick=depth.is_quick, witness=witness)


def _numbered(rollouts: Path) -> list[tuple[int, Path]]:
    try:
        paths = segment_paths(rollouts)
    except SegmentError:  # one is missing: said elsewhere
        paths = sorted(rollouts.glob("segment_*.h5"))
    return [(int(path.stem.removeprefix("segment_")), path) for path in paths]


class _Witness:
    """Compares rollouts of segments with those of the journal: they are written twice."""

    def __init__(self, evidence: Evidence, found: Found) -> None:
        self._evidence, self._found = evidence, found
        keys = evidence.journal.keys
        order = np.argsort(keys, kind="stable")
        first = np.ones(len(keys), bool)
        first[1:] = keys[order][1:] != keys[order][:-1]
        # Rollouts with the same key, which only a damaged journal has, are not compared.
        is_single = first & np.append(first[1:], True)
        self._rows = evidence.journal.rows[order[is_single]]
        self._keys = keys[order[is_single]]

    def __call__(self, path: Path, keys: NDArray[np.int64], rewards: NDArray[Any], lengths: NDArray[Any]) -> None:
        self._found(keys, lengths, rewards)
        places = np.searchsorted(self._keys, keys)
        places[places == len(self._keys)] = 0
        if not len(self._keys):
            return
        known = np.flatnonzero(self._keys[places] == keys)
        theirs = self._rows[places[known]]
        same_reward = (theirs["reward"] == rewards[known]) | (np.isnan(theirs["reward"]) & np.isnan(rewards[known]))
        differs = ~(same_reward & (theirs["num_tokens"] == lengths[known]))
        for row, other in zip(known[differs], theirs[differs], strict=True):
            text = (
                f"{int(lengths[row])} tokens and reward {float(rewards[row]):g}; the journal has "
                f"{int(other['num_tokens'])} and {float(other['reward']):g}"
            )
            where = f"rollouts/{path.name}"
            offence = Offence(text, group=int(other["group"]), sample=int(other["sample"]), file=where, row=int(row))
            self._evidence.contradictions.append(offence)


def _stamp(layout: RunLayout) -> tuple[object, ...]:
    """Changes when a resume begins or moves a file."""
    aside = sorted(layout.rollouts.glob("lost_attempt_*/*")) if layout.rollouts.is_dir() else []
    renamed = sorted(path.name for path in layout.checkpoints.glob("step_*.*")) if layout.checkpoints.is_dir() else []
    return layout.attempts.read_bytes() if layout.attempts.exists() else b"", tuple(aside), tuple(renamed)
