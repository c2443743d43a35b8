"""`rlhpc check RUN_DIR`: read all files that a run has written and report damage.

Input: the directory of a run, alive or not.  Output: one row per item checked.
Guarantees: it changes nothing.  Writes and deletions of a live run are no damage: files count once they have their
final names, and files deleted before they could be read are left out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from launch.common.text import counted
from launch.run_directory.inputs import differences, look_at_inputs, read_inputs
from launch.run_directory.prepare import num_attempts
from launch.verify.evidence import Evidence, Progress
from launch.verify.report import Check, FileVerdict, Offence, ReadProgress, Row, from_to, listed
from launch.verify.timeline import beginning_that_is_needed, event_rows, first_rollout, journal_rows, replay_cost
from rlhpc.base.files import openness
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.log import damage_in_words
from rlhpc.buffer.prefixes import PartialFile, partial_paths, read_partial_file, read_partials
from rlhpc.buffer.segments import read_segment, segment_paths
from rlhpc.config.file import read_resolved
from rlhpc.protocol.errors import CheckpointError, ConfigError, JournalError, RunDirectoryError, SegmentError
from rlhpc.roles.controller.state import read_saved_state
from rlhpc.training.checkpoint_directory import (
    CheckpointState,
    Fate,
    KnownCheckpoints,
    leftovers_of,
    what_was_set_aside,
)
from rlhpc.transport.security import refuse_loose_keys

# -------------------------------------------------------------------------------------------------------- partial check
#
# The partial rollouts of a run: every record by its checksum.
#
#     rollouts/partials_NNNNNN.log ─▶ rows of `rlhpc check RUN_DIR`
#
# Guarantees: a running or killed run is sound: the end of a file may be half written, and a file is deleted once the
# next one has the running rollouts.


def partial_rows(layout: RunLayout, progress: ReadProgress) -> Iterator[Row]:
    """Read every record."""
    paths = partial_paths(layout.rollouts) if layout.rollouts.is_dir() else []
    is_sound = True
    for path in paths:
        progress(path.name)
        try:
            file = read_partial_file(path)
            file = read_partial_file(path) if file.log.damage else file  # perhaps it was being written
        except JournalError as error:
            if path.exists():  # else replaced by the next one meanwhile
                is_sound = False
                yield Row("partials", path.name, FileVerdict.DAMAGED, str(error))
            continue
        if file.log.damage:
            is_sound &= file.log.is_torn
            yield _damage_of(file)
    if paths and is_sound:
        known = read_partials(layout.rollouts)[0].values()
        tokens = counted(sum(len(each.tokens.token_ids) for each in known), "token")
        text = f"{counted(len(known), 'rollout')} of {tokens}, all checksums right"
        yield Row("partials", from_to(paths), FileVerdict.SOUND, text)


def _damage_of(file: PartialFile) -> Row:
    path, where = file.log.path, damage_in_words(file.log.damage)
    if file.log.is_torn:
        text = f"{where} at its end: half written when its process ended, or being written now"
        return Row("partials", path.name, FileVerdict.NOTE, text)
    text = f"{path}: {where} are damaged: their rollouts are sampled again"
    return Row("partials", path.name, FileVerdict.DAMAGED, text)


# ------------------------------------------------------------------------------------------------------------ run check


def check_run(layout: RunLayout, progress: ReadProgress) -> list[Row]:
    """Check all files; progress: called with the file being read.  Raises RunDirectoryError: not a run directory."""
    layout.require_run()
    first = first_rollout(layout)
    parts = (_rights, _settings, _inputs, _attempts, _checkpoints, _segments)
    rows = [row for part in parts for row in part(layout, progress)]
    step = chosen_step(rows)
    rows += _segments_that_are_needed(layout, step)
    rows += [*journal_rows(layout, progress), *beginning_that_is_needed(layout, step, first)]
    rows += [*event_rows(layout, progress), *partial_rows(layout, progress)]
    return [*rows, *replay_cost(layout, step), *_leftovers(layout)]


def chosen_step(rows: list[Row]) -> int | None:
    """Step of the checkpoint that a resume takes, the newest sound one; None if it begins at step 0 or is refused."""
    sound = (row for row in rows if row.part == "checkpoints" and row.verdict is FileVerdict.SOUND)
    return next((int(row.name.removeprefix("step_")) for row in sound), None)


def _rights(layout: RunLayout, progress: ReadProgress) -> Iterator[Row]:
    """Rows on the rights of other users."""
    if text := openness(layout.root, looks_inside=True).text:
        yield Row("rights", layout.root.name, FileVerdict.NOTE, text)
    owner = layout.root.stat().st_uid
    if owner != os.geteuid():
        text = f"belongs to user {owner}, who alone can say whether their keys are private"
        yield Row("rights", layout.root.name, FileVerdict.NOTE, text)
    elif layout.secrets.exists():
        try:
            refuse_loose_keys(layout.secrets)
        except RunDirectoryError as error:
            yield Row("rights", layout.secrets.name, FileVerdict.DAMAGED, str(error))


def _settings(layout: RunLayout, progress: ReadProgress) -> Iterator[Row]:
    try:
        config, digest = read_resolved(layout)
    except ConfigError as error:
        yield Row("settings", layout.config.name, FileVerdict.DAMAGED, str(error))
    else:
        yield Row("settings", layout.config.name, FileVerdict.SOUND, f"{config.run.name}, hash {digest}")


def _inputs(layout: RunLayout, progress: ReadProgress) -> Iterator[Row]:
    name = layout.inputs.name
    try:
        config, noted = read_resolved(layout)[0], read_inputs(layout)
        if noted is None:
            yield Row("inputs", name, FileVerdict.NOTE, "none recorded; the next resume records the current ones")
            return
        progress(f"model {config.model.path} and data {', '.join(each.place for each in config.data)}")
        lines = differences(noted, look_at_inputs(config, noted))
    except ConfigError:
        return  # its row stands above
    except RunDirectoryError as error:
        yield Row("inputs", name, FileVerdict.DAMAGED, str(error))
        return
    for line in lines:
        yield Row("inputs", name, FileVerdict.DAMAGED, f"a resume is refused: {line}")
    if not lines:
        text = (
            f"{counted(len(noted.model), 'file')} of the model, {len(noted.data)} of the dataset: as at the first start"
        )
        yield Row("inputs", name, FileVerdict.SOUND, text)


def _attempts(layout: RunLayout, progress: ReadProgress) -> Iterator[Row]:
    name = layout.attempts.name
    try:
        known = num_attempts(layout)
        lines = layout.attempts.read_text(encoding="utf-8").splitlines() if known else []
        indices = [json.loads(line)["index"] for line in lines]
    except FileNotFoundError:
        text = f"{layout.attempts} is missing, though there are events of attempts in {layout.rollouts.name}/"
        yield Row("attempts", name, FileVerdict.DAMAGED, text)
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Row("attempts", name, FileVerdict.DAMAGED, f"{layout.attempts}: cannot be read: {error!r}")
        return
    if not known:
        yield Row("attempts", name, FileVerdict.NOTE, "no attempt has begun")
        return
    if indices != list(range(len(indices))):
        text = f"{layout.attempts}: attempts are numbered {indices}, expected 0 to {len(indices) - 1} in order"
        yield Row("attempts", name, FileVerdict.DAMAGED, text)
        return
    last = json.loads(lines[-1])["resume_step"]
    begun = f"the last began {f'from step {last}' if last is not None else 'at step 0'}"
    yield Row("attempts", name, FileVerdict.SOUND, f"{len(indices)}; {begun}")


def _checkpoints(layout: RunLayout, progress: ReadProgress) -> Iterator[Row]:
    known, newest = KnownCheckpoints(layout.checkpoints), True
    for step, path in reversed(known.steps()):
        progress(path.name)
        for state in known.newest_first(step.__eq__):
            if not path.exists():
                continue  # pruned meanwhile
            yield checkpoint_row(state, is_chosen=newest and state.fate is Fate.SOUND)
            newest = newest and state.fate is not Fate.SOUND


def checkpoint_row(state: CheckpointState, *, is_chosen: bool) -> Row:
    """Row of a checkpoint; is_chosen: a resume starts from it."""
    name = state.path.name
    match state.fate:
        case Fate.SOUND:
            text = "a resume starts from here" if is_chosen else "older than the one resumed from"
            return Row("checkpoints", name, FileVerdict.SOUND, text)
        case Fate.UNDONE:
            return Row("checkpoints", name, FileVerdict.NOTE, f"a resume sets it aside: {state.problem}")
        case Fate.UNREADABLE:
            return Row("checkpoints", name, FileVerdict.DAMAGED, f"a resume is refused: {state.problem}")
    return Row("checkpoints", name, FileVerdict.DAMAGED, f"a resume sets it aside: {state.problem}")


def _segments(layout: RunLayout, progress: ReadProgress) -> Iterator[Row]:
    try:
        paths = segment_paths(layout.rollouts)
    except SegmentError as error:
        yield Row("segments", layout.rollouts.name, FileVerdict.DAMAGED, str(error))
        paths = sorted(layout.rollouts.glob("segment_*.h5"))
    groups: Counter[int] = Counter()
    num_damaged = 0
    for number, path in enumerate(paths, start=1):
        progress(f"{path.name} ({number} of {len(paths)})")
        try:
            groups.update(resolved.group.group_id for resolved in read_segment(path))
        except SegmentError as error:
            if path.exists():  # else it was set aside meanwhile
                num_damaged += 1
                yield Row("segments", path.name, FileVerdict.DAMAGED, str(error))
    twice = sorted(group for group, count in groups.items() if count > 1)
    if twice:
        text = f"groups that are in segments twice: {listed(twice)}"
        yield Row("segments", layout.rollouts.name, FileVerdict.DAMAGED, text)
    if paths and not num_damaged:
        text = f"{counted(len(groups), 'group')}, all checksums right"
        yield Row("segments", from_to(paths), FileVerdict.SOUND, text)


def _segments_that_are_needed(layout: RunLayout, step: int | None) -> Iterator[Row]:
    """Rows on missing segments that the chosen checkpoint needs, if the last ones are missing, which leaves no gap."""
    try:
        first_free = 0 if step is None else int(read_saved_state(layout, step).buffer["next_segment_index"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return  # it was pruned meanwhile, or is of another version: a resume reports it
    missing = [index for index in range(first_free) if not layout.segment(index).exists()]
    if missing:
        text = f"{layout.segment(missing[0])} is missing: the checkpoint of step {step} was taken after {first_free}"
        yield Row("segments", layout.rollouts.name, FileVerdict.DAMAGED, text)


def _leftovers(layout: RunLayout) -> Iterator[Row]:
    """Rows on files that no resume reads."""
    for path in what_was_set_aside(layout.checkpoints):
        yield Row("leftovers", path.name, FileVerdict.NOTE, f"set aside, {_size_of(path)}; no longer needed")
    for path in leftovers_of(layout.checkpoints):
        text = f"being written or deleted, or left behind, {_size_of(path)}; the next checkpoint deletes what is dead"
        yield Row("leftovers", path.name, FileVerdict.NOTE, text)
    for path in _being_prepared(layout):
        text = "being written, or left behind; the next resume deletes what is dead"
        yield Row("leftovers", str(path.relative_to(layout.root)), FileVerdict.NOTE, text)
    for path in sorted(layout.rollouts.glob("lost_attempt_*")):
        text = f"rollouts after the checkpoint of that resume, {_size_of(path)}; no longer needed"
        yield Row("leftovers", path.name, FileVerdict.NOTE, text)


def _being_prepared(layout: RunLayout) -> list[Path]:
    """Files and checkpoints without their final name, most of them in an owner's staging directory (ownership.py)."""
    found = [*layout.rollouts.glob("*.partial"), *layout.root.glob(".*.tmp")]
    for directory in (layout.root, layout.rollouts, layout.checkpoints):
        for pattern in (".owner_*/*", ".owner_*/.*", ".gone_*"):
            found += directory.glob(pattern)
    return sorted({*found})


def _size_of(directory: Path) -> str:
    num_bytes = 0
    for file in directory.rglob("*"):
        try:
            num_bytes += file.stat().st_size if file.is_file() else 0
        except OSError:  # deleted meanwhile
            continue
    return f"{num_bytes / 1e6:,.1f} MB"


# ---------------------------------------------------------------------------------------------------------------- files
#
# Check that the files that an audit relies on are whole, as `rlhpc check RUN_DIR` does.
#
# Input: Evidence.  Quick: whether files can be opened, and sizes of checkpoints; otherwise every checksum.


def files(evidence: Evidence, progress: Progress) -> Check:
    """List missing and damaged files."""
    check = Check("files")
    rollouts, read = evidence.layout.rollouts.name, "sizes and heads" if evidence.is_quick else "checksums"
    for index in evidence.missing_segments:
        check.accuse(Offence("is missing", file=f"{rollouts}/{evidence.layout.segment(index).name}"))
    for name, why in evidence.segments.unreadable:
        check.accuse(Offence(why, file=f"{rollouts}/{name}"))
    for state in evidence.checkpoints.states:
        row = checkpoint_row(state, is_chosen=False)
        if row.verdict is FileVerdict.DAMAGED:
            check.accuse(Offence(row.text, step=state.step, file=f"checkpoints/{row.name}"))
        elif state.fate is Fate.UNDONE:
            check.remarks.append(f"{row.name}: {row.text}")
    for attempt in evidence.events.attempts.values():
        if attempt.damage:
            text = f"{damage_in_words(attempt.damage)} are damaged: the checksums differ"
            check.accuse(Offence(text, file=f"{rollouts}/{attempt.path.name}"))
    _look_at_journal(check, evidence, progress)
    if evidence.events.unknown:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(evidence.events.unknown.items()))
        check.accuse(Offence(f"events of another version of rlhpc: {kinds}"))
    check.looked_at = (
        f"{read} of {counted(evidence.segments.num_files, 'segment')}, "
        f"{counted(len(evidence.journal.paths), 'journal file')}, "
        f"{counted(len(evidence.events.attempts), 'event log')}, "
        f"{counted(len(evidence.checkpoints.states), 'checkpoint')}"
    )
    return check


def _look_at_journal(check: Check, evidence: Evidence, progress: Progress) -> None:
    if evidence.is_quick:
        for text in evidence.journal.unreadable:
            check.accuse(Offence(text))
        return
    for row in journal_rows(evidence.layout, progress):
        if row.verdict is FileVerdict.DAMAGED:
            check.accuse(Offence(row.text, file=f"{evidence.layout.rollouts.name}/{row.name}"))
