"""All files that an audit reads, in an order that gives no false alarms on a running run.

    attempts ─▶ events ─▶ journal ─▶ checkpoints ─▶ segments ─▶ events again ─▶ attempts again

A run writes in a fixed order: rollouts, then the event about them; segments, then the checkpoint that relies on them;
then it deletes journal files that the checkpoint makes superfluous.  Reading in the order above finds everything
written before: rollouts of an event are in the journal, which is read after it, or in the checkpoint and segments,
which are read later still.  If segments are ahead of the first reading of the events, the second one catches up.  A
resume moves files; if one began meanwhile, everything is read again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.run_directory.prepare import num_attempts
from launch.verify.report import Offence
from launch.verify.timeline import EventEvidence, column, joined, read_settled_journal, reduced
from rlhpc.base.native import crc32
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.buffer import BUFFERED_FILE
from rlhpc.buffer.history import EventFold, Position
from rlhpc.buffer.journal import JournalContent, journal_paths, read_journal
from rlhpc.buffer.segment_format import ROUTE_COLUMNS, ROW_COLUMNS, TEACHER_COLUMNS, routes_of, teachers_of
from rlhpc.buffer.segments import read_raw_columns, segment_paths
from rlhpc.config.file import read_resolved
from rlhpc.config.rules import Config
from rlhpc.models.routes import fault_of
from rlhpc.protocol.errors import CheckpointError, JournalError, RunDirectoryError, SegmentError
from rlhpc.protocol.types import TeacherScores, Verdict, row_fault
from rlhpc.roles.controller.state import STATE_FILE, Totals, read_saved_state
from rlhpc.training.checkpoint_directory import (
    COMPLETE,
    CheckpointState,
    Fate,
    FileRecord,
    KnownCheckpoints,
    check_file,
)

# -------------------------------------------------------------------------------------------------------------- journal
#
# The rollouts of the journal as columns: all arrived ones, and those that count.
#
# Input: rollouts/journal_*.log.  Output: a few numbers for each rollout.  The quick way reads no tokens; the full way
# verifies every checksum, and leaves damaged rollouts out.


MEMBERS = 1 << 20  # group · MEMBERS + sample is the key of a rollout
JOURNAL_ROW = np.dtype(
    [
        ("sequence", "<i8"),
        ("group", "<i8"),
        ("prompt", "<i8"),
        ("sample", "<i8"),
        ("admitted_version", "<i8"),
        ("num_tokens", "<i8"),
        ("reward", "<f8"),
        ("is_error", "?"),  # the verifier's
        ("oldest", "<i8"),  # version of a token; -1: not looked at, or no tokens
        ("newest", "<i8"),
        ("is_sorted", "?"),  # in every row
        ("has_odd_rows", "?"),
        ("teacher", "<i8"),  # CRC32 of what its teacher has said; -1: not looked at, or no teacher
        ("is_teacher_faulty", "?"),
        ("attempt", "<i8"),
        ("file", "<i4"),
        ("row", "<i4"),
    ]
)


@dataclass(slots=True)
class JournalEvidence:
    """Rollouts of the journal, which segments may not have yet."""

    paths: list[Path] = field(default_factory=list)
    rows: NDArray[Any] = field(default_factory=lambda: np.empty(0, JOURNAL_ROW))  # those that count, in order
    unreadable: list[str] = field(default_factory=list)

    @property
    def keys(self) -> NDArray[np.int64]:
        """Keys of the rollouts that count."""
        return keys_of(self.rows["group"], self.rows["sample"])

    def offence_at(self, row: NDArray[np.void] | np.void, text: str) -> Offence:
        """Offence of a rollout, at its row of `rows`."""
        file = f"rollouts/{self.paths[int(row['file'])].name}"
        return Offence(text, group=int(row["group"]), sample=int(row["sample"]), file=file, row=int(row["row"]))


def keys_of(groups: NDArray[Any], samples: NDArray[Any]) -> NDArray[np.int64]:
    """Keys of rollouts: group · MEMBERS + sample."""
    result: NDArray[np.int64] = groups.astype(np.int64) * MEMBERS + samples
    return result


def read_journal_evidence(rollouts: Path, events: EventEvidence, *, is_quick: bool) -> JournalEvidence:
    """Read all journal files.  Raises OSError."""
    found, parts = JournalEvidence(), []
    for path in journal_paths(rollouts) if rollouts.is_dir() else []:
        try:
            content = read_journal(path, is_mapped=True, is_verified=False) if is_quick else read_settled_journal(path)
        except JournalError as error:
            if path.exists():  # else deleted, since a checkpoint has made it superfluous
                found.unreadable.append(str(error))
            continue
        rows = rollout_rows(content, is_quick=is_quick)
        rows["attempt"], rows["file"] = content.attempt, len(found.paths)
        rows["row"] = rows["sequence"] - content.first_sequence
        found.paths.append(path)
        parts.append(rows)
    found.rows = _that_count(joined(parts, JOURNAL_ROW), events.fold)
    return found


def _that_count(rows: NDArray[Any], fold: EventFold) -> NDArray[Any]:
    counts = rows["sequence"] > fold.num_void
    for attempt in np.unique(rows["attempt"]):
        last = fold.last_rollout_that_counts(int(attempt))
        if last is not None:
            counts &= (rows["attempt"] != attempt) | (rows["sequence"] <= last)
    return rows[counts]


def rollout_rows(content: JournalContent, *, is_quick: bool) -> NDArray[Any]:
    """The rollouts of a file as JOURNAL_ROW, without file and row.  is_quick: without versions and teachers."""
    rows = np.zeros(len(content.records), JOURNAL_ROW)
    rows["oldest"] = rows["newest"] = rows["teacher"] = -1
    rows["is_sorted"] = True
    for row, record in zip(rows, content.records, strict=True):
        rollout, versions = record.scored.rollout, record.scored.rollout.versions
        row["sequence"], row["group"], row["sample"] = record.sequence, rollout.group_id, rollout.sample_index
        row["prompt"], row["admitted_version"] = rollout.prompt_id, record.admitted_version
        row["num_tokens"], row["reward"] = len(versions), record.scored.reward
        row["is_error"] = record.scored.verdict is Verdict.VERIFIER_ERROR
        row["has_odd_rows"] = bool(rollout.row_fault)
        if len(versions) and not is_quick:
            row["oldest"], row["newest"] = versions.min(), versions.max()
            row["is_sorted"] = all((np.diff(versions[each]) >= 0).all() for each in rollout.rows)
        if (teacher := record.scored.teacher) is not None and not is_quick:
            row["teacher"] = _crc_of(teacher)
            row["is_teacher_faulty"] = bool(teacher.fault(len(rollout.token_ids)))
    return rows


def _crc_of(teacher: TeacherScores) -> int:
    """CRC32 of all numbers of a teacher."""
    crc = 0
    for values in (teacher.logprobs, teacher.flat_top_ids, teacher.flat_top_logprobs):
        crc = crc32(np.ascontiguousarray(values).data, crc)
    return crc


# ----------------------------------------------------------------------------------------------------------- checkpoint
#
# Groups in the checkpoints of a run: open ones, and numbers of trained and dropped ones.
#
# Input: checkpoints/step_*/{COMPLETE, controller.json, buffered.h5}.  The quick way compares sizes of files, the full
# way reads every byte.


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group that was neither trained nor dropped."""

    group: int
    prompt: int
    admitted_version: int
    delivered: tuple[int, ...]
    size: int  # members, delivered or not


@dataclass(frozen=True, slots=True)
class CheckpointEvidence:
    """A checkpoint that a resume may continue from."""

    name: str
    step: int
    version: int
    next_group: int  # all groups below it were admitted
    open_groups: dict[int, SavedGroup]
    num_trained: int
    dropped: dict[str, int]
    next_segment: int  # segments below it have the trained and dropped groups
    position: Position
    num_drawn: int  # prompts
    totals: Totals
    manifest_step: int  # in COMPLETE
    manifest_version: int
    buffered: NDArray[np.int64]  # keys of the rollouts in buffered.h5


@dataclass(slots=True)
class Checkpoints:
    """All checkpoints of a run, newest first."""

    states: list[CheckpointState] = field(default_factory=list)
    sound: list[CheckpointEvidence] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (name, why)

    @property
    def newest(self) -> CheckpointEvidence | None:
        """The checkpoint that a resume continues from; None: it begins at step 0, or is refused."""
        return self.sound[0] if self.sound else None


def read_checkpoints(layout: RunLayout, *, is_quick: bool) -> Checkpoints:
    """The checkpoints that exist now.  Raises OSError; FileNotFoundError: one was deleted meanwhile, read again."""
    found = Checkpoints()
    known = KnownCheckpoints(layout.checkpoints, read_up_to_bytes=0 if is_quick else math.inf)
    for state in known.newest_first():
        if not state.path.exists():
            continue  # pruned meanwhile
        found.states.append(state)
        if state.fate is not Fate.SOUND:
            continue
        try:
            found.sound.append(_read(layout, state))
        except (CheckpointError, SegmentError, KeyError, TypeError, ValueError) as error:
            if state.path.exists():
                found.unreadable.append((state.path.name, str(error) or repr(error)))
    return found


def _read(layout: RunLayout, state: CheckpointState) -> CheckpointEvidence:
    manifest = json.loads((state.path / COMPLETE).read_bytes())
    check_file(state.path / STATE_FILE, FileRecord(*manifest["files"][STATE_FILE]), verify_content=True)
    saved = read_saved_state(layout, state.step)
    ledger = saved.buffer["ledger"]
    names = ["rollouts/group_id", "rollouts/sample_index"]
    _, columns = read_raw_columns(state.path / BUFFERED_FILE, names, is_verified=False)  # COMPLETE has its checksum
    return CheckpointEvidence(
        name=state.path.name,
        step=saved.step,
        version=saved.policy_version,
        next_group=int(ledger["next_group_id"]),
        open_groups={int(group["group_id"]): _saved_group(group) for group in ledger["groups"]},
        num_trained=int(ledger["num_released"]),
        dropped={str(reason): int(count) for reason, count in ledger["dropped"].items()},
        next_segment=int(saved.buffer["next_segment_index"]),
        position=saved.position,
        num_drawn=_num_drawn(saved.prompts),
        totals=Totals(**saved.totals),
        manifest_step=int(manifest["step"]),
        manifest_version=int(manifest["policy_version"]),
        buffered=np.sort(keys_of(columns[names[0]], columns[names[1]])),
    )


def _num_drawn(prompts: dict[str, Any]) -> int:
    if (datasets := prompts.get("datasets")) is not None:
        return sum(map(_num_drawn, datasets))
    return int(prompts["cursor"]) - int(prompts["left_out"])


def _saved_group(state: dict[str, Any]) -> SavedGroup:
    return SavedGroup(
        int(state["group_id"]),
        int(state["prompt"]["prompt_id"]),
        int(state["admitted_version"]),
        tuple(int(index) for index in state["delivered"]),
        len(state["lost_leases"]),
    )


# ------------------------------------------------------------------------------------------------------------- segments
#
# The segments of a run as columns over all groups, read one file at a time.
#
# Input: rollouts/segment_*.h5, all schemas.  Output: fate and place of each group, rules broken by its members, and
# lengths of completions.  Tokens of one file are in memory at a time; 60 bytes a group are kept.


GROUP_COLUMNS = ("group_id", "prompt_id", "admitted_version", "consumed_step", "drop_reason", "trained_version", "applied", "group_size", "rollout_offsets")  # fmt: skip  # noqa: E501
MEMBER_COLUMNS = ("sample_index", "reward", "verdict", "token_offsets")
FULL_COLUMNS = ["rollouts/versions", *TEACHER_COLUMNS, "groups/prompt_offsets", *ROUTE_COLUMNS, *ROW_COLUMNS]
SEGMENT_ROW = np.dtype(
    [
        ("group", "<i8"),
        ("prompt", "<i8"),
        ("admitted_version", "<i8"),
        ("step", "<i8"),  # -1: dropped
        ("reason", "<i4"),  # index into `reasons`; -1: trained
        ("version", "<i8"),  # that was trained; -1: none
        ("applied", "<i4"),
        ("num_members", "<i4"),
        ("size", "<i4"),  # wanted members
        ("attempt", "<i4"),
        ("index", "<i4"),  # of the segment
        ("row", "<i4"),  # in `groups`
        ("oldest", "<i8"),  # version of a token of any member; -1: not looked at, or no tokens
        ("newest", "<i8"),
    ]
)


@dataclass(slots=True)
class SegmentEvidence:
    """Fates of groups, according to segments."""

    parts: list[NDArray[Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (file, why)
    offences: list[Offence] = field(default_factory=list)  # of members that break a rule; row: in `rollouts`
    num_rollouts: int = 0
    num_routed: int = 0  # rollouts with routes, unless it was the quick way
    lengths: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # "trained" or a reason → completions by length
    num_files: int = 0

    @property
    def rows(self) -> NDArray[Any]:
        """Rows, one per group, in the order in which they were resolved."""
        if len(self.parts) != 1:
            self.parts = [joined(self.parts, SEGMENT_ROW)]
        return self.parts[0]

    def read(self, path: Path, index: int, group_size: int, *, is_quick: bool, witness: Witness | None = None) -> None:
        """Add a file; a damaged one is noted, a deleted one is not.  witness: called with each file's rollouts."""
        names = [f"groups/{name}" for name in GROUP_COLUMNS] + [f"rollouts/{name}" for name in MEMBER_COLUMNS]
        try:
            names += [] if is_quick else FULL_COLUMNS
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
        teachers = np.full(len(samples), -1, np.int64)
        if not is_quick:
            starts = self._row_starts(rows, owner, samples, columns)
            self._look_at_versions(rows, owner, samples, columns["rollouts/versions"], token_offsets, starts)
            for row, teacher in teachers_of(columns):
                teachers[row] = _crc_of(teacher)
                if fault := teacher.fault(int(token_offsets[row + 1] - token_offsets[row])):
                    self._accuse(f"of a completion: {fault}", rows, owner, samples, row)
            self._look_at_routes(rows, owner, samples, columns, starts)
        if witness is not None:
            witness(path, keys, columns["rollouts/reward"], np.diff(token_offsets), teachers)
        self.num_rollouts += len(samples)
        self.parts.append(rows)

    def _row_starts(
        self, rows: NDArray[Any], owner: NDArray[Any], samples: NDArray[Any], columns: dict[str, NDArray[Any]]
    ) -> dict[int, NDArray[Any]]:
        """First tokens of further rows, of each rollout (by its place in the file) that has any."""
        lengths, cuts, found = np.diff(columns["rollouts/token_offsets"]), columns["rollouts/row_offsets"], {}
        for row in np.flatnonzero(np.diff(cuts)).tolist():
            starts = columns["rollouts/row_starts"][cuts[row] : cuts[row + 1]]
            if fault := row_fault(starts, int(lengths[row])):
                self._accuse(f"of a completion: {fault}", rows, owner, samples, row)
            else:
                found[row] = starts
        return found

    def _look_at_routes(
        self,
        rows: NDArray[Any],
        owner: NDArray[Any],
        samples: NDArray[Any],
        columns: dict[str, NDArray[Any]],
        starts: Mapping[int, NDArray[Any]],
    ) -> None:
        prompts = np.diff(columns["groups/prompt_offsets"])[owner]
        lengths = prompts + np.diff(columns["rollouts/token_offsets"])
        for row, of_row in starts.items():
            lengths[row] = prompts[row] + of_row[0]  # routes are of the first row
        for row, routes in routes_of(columns):
            self.num_routed += 1
            if fault := fault_of(routes, int(lengths[row])):
                self._accuse(fault, rows, owner, samples, row)

    def _group_rows(self, columns: dict[str, NDArray[Any]], attempt: int, index: int, group_size: int) -> NDArray[Any]:
        rows = np.zeros(len(columns["groups/group_id"]), SEGMENT_ROW)
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
        """Report members beyond their group's size, and duplicates."""
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
        starts: Mapping[int, NDArray[Any]],
    ) -> None:
        falls = np.flatnonzero(np.diff(versions) < 0) + 1  # tokens that are older than the one before
        begin = np.concatenate([offsets, *(offsets[row] + of_row for row, of_row in starts.items())])
        falls = falls[~np.isin(falls, begin)]
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


# Called with path, keys, rewards, lengths and CRC32s of teachers.
Witness = Callable[[Path, NDArray[np.int64], NDArray[Any], NDArray[Any], NDArray[np.int64]], None]


def added(left: NDArray[np.int64] | None, right: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of two histograms."""
    if left is None:
        return right
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def offence_at(row: NDArray[np.void] | np.void, text: str, *, forbids_going_on: bool = False) -> Offence:
    """Offence of a group, at its row of SegmentEvidence.rows."""
    group, step, file = int(row["group"]), int(row["step"]), segment_name(int(row["index"]))
    return Offence(text, group, step, file=file, row=int(row["row"]), forbids_going_on=forbids_going_on)


def fate_at(step: int) -> str:
    """Fate of a group, in words; step below 0: not trained."""
    return f"trained at step {step}" if step >= 0 else "dropped"


def segment_name(index: int) -> str:
    """Path of a segment, relative to the run directory."""
    return f"rollouts/segment_{index:06d}.h5"


# ------------------------------------------------------------------------------------------------------------- evidence


Progress = Callable[[str], None]  # called with the file being read
Found = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]
MOST_LOOKS = 5  # at a run that is restarted again and again


@dataclass(slots=True)
class Evidence:
    """Content of a run's files."""

    layout: RunLayout
    config: Config
    is_quick: bool
    is_complete: bool  # the run has ended with its last step
    events: EventEvidence
    journal: JournalEvidence
    checkpoints: Checkpoints
    segments: SegmentEvidence
    missing_segments: list[int] = field(default_factory=list)
    first_segment: int = 0  # earlier ones were not read
    contradictions: list[Offence] = field(default_factory=list)  # between journal and segments
    is_being_resumed: bool = False  # files are being set aside, perhaps by an interrupted resume

    @property
    def delivered_keys(self) -> NDArray[np.int64]:
        """Keys of the rollouts in the journal or the newest checkpoint's buffer, each once, ascending."""
        newest = self.checkpoints.newest
        return np.union1d(self.journal.keys, newest.buffered if newest else self.journal.keys[:0])

    def sizes(self, num_groups: int) -> NDArray[np.int64]:
        """Rollouts wanted of each group, by id, from events, the newest checkpoint and segments.

        For an unknown group, the largest legal size.
        """
        told = column(self.events.fold.admitted, num_groups, lambda admitted: admitted.size)
        sizes = np.where(told < 0, self.config.largest_group, np.maximum(told, self.config.admission.group_size))
        newest, rows = self.checkpoints.newest, self.segments.rows
        for group, saved in (newest.open_groups if newest is not None else {}).items():
            if group < num_groups:
                sizes[group] = saved.size
        known = rows[rows["group"] < num_groups]
        sizes[known["group"]] = known["size"]
        return sizes


@dataclass(frozen=True, slots=True)
class Depth:
    """Extent of an audit."""

    is_quick: bool = False  # no payload: neither tokens nor checksums
    last_segments: int | None = None  # before the newest checkpoint; None: all


def gather(layout: RunLayout, depth: Depth, progress: Progress, found: Found) -> Evidence:
    """Read a run; found: called with keys, lengths and rewards of the rollouts in segments.

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
    except SegmentError:  # one is missing: reported elsewhere
        paths = sorted(rollouts.glob("segment_*.h5"))
    return [(int(path.stem.removeprefix("segment_")), path) for path in paths]


class _Witness:
    """Compares rollouts of segments with those of the journal, since they are written twice."""

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

    def __call__(
        self,
        path: Path,
        keys: NDArray[np.int64],
        rewards: NDArray[Any],
        lengths: NDArray[Any],
        teachers: NDArray[np.int64],
    ) -> None:
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
            self._contradiction(path, int(row), other, text)
        for row in known[~differs & (theirs["teacher"] != teachers[known])]:
            other = self._rows[places[row]]
            self._contradiction(path, int(row), other, "other numbers of its teacher than the journal has")

    def _contradiction(self, path: Path, row: int, other: np.void, text: str) -> None:
        where = f"rollouts/{path.name}"
        offence = Offence(text, group=int(other["group"]), sample=int(other["sample"]), file=where, row=row)
        self._evidence.contradictions.append(offence)


def _stamp(layout: RunLayout) -> tuple[object, ...]:
    """Value that changes when a resume begins or moves a file."""
    aside = sorted(layout.rollouts.glob("lost_attempt_*/*")) if layout.rollouts.is_dir() else []
    renamed = sorted(path.name for path in layout.checkpoints.glob("step_*.*")) if layout.checkpoints.is_dir() else []
    return layout.attempts.read_bytes() if layout.attempts.exists() else b"", tuple(aside), tuple(renamed)
