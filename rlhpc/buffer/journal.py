"""The journal: every rollout of a run as it arrived, in files of records (log.py), and back.

    rollouts/journal_000000.log, …    a GroupPrompt before the first rollout of its group in a file; StoredRollouts

Input: JournalRecord.  Output: the number up to which rollouts are on disk; records read back, and what is damaged.
Guarantees: a rollout up to that number survives the death of this process, and of its machine.  A failed write, e.g. on
a full disk, changes nothing that was durable, and the next try writes the same rollouts to the same place.
A file is written by one attempt; the next attempt begins another.  A damaged record costs its rollout, or, if it is a
prompt's, the rollouts of its group in that file; all others are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.base.ownership import Fence
from rlhpc.buffer.log import FramedRecord, LogContent, LogEncoder, LogKind, LogWriter, read_head, read_log
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.types import Prompt, ScoredRollout

FILE_BYTES = 32 << 20  # of a file, at most, unless one rollout has more


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """A delivered rollout, and the prompt and version of its group."""

    sequence: int  # number of the rollout in the run, from 1, in the order of arrival
    scored: ScoredRollout
    prompt: Prompt  # of the group
    admitted_version: int  # of the group


@dataclass(frozen=True, slots=True)
class GroupPrompt:
    """A record: the prompt that the rollouts of a group answer."""

    group_id: int
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A record: a rollout, whose number is the record's."""

    admitted_version: int  # of the group
    scored: ScoredRollout


JOURNAL = LogKind("journal", "rollouts", (GroupPrompt, StoredRollout))


def journal_paths(directory: Path) -> list[Path]:
    """The journal files of a rollouts directory, in order.  Raises OSError."""
    return JOURNAL.paths(directory)


# --------------------------------------------------------------------------------------------------------------- writer


class JournalFiles:
    """The only writer of a run's journal.  One thread at a time."""

    def __init__(
        self,
        directory: Path,
        *,
        run_name: str,
        attempt: int,
        first_sequence: int = 1,
        file_bytes: int = FILE_BYTES,
        fence: Fence | None = None,
        wall_clock: Clock = time.time,
    ) -> None:
        """first_sequence: number of the next rollout.  Creates no file until there is something to write."""
        self._encoder, self._file_bytes = LogEncoder(JOURNAL, attempt), file_bytes
        self._writer = LogWriter(
            JOURNAL, directory, run_name=run_name, attempt=attempt, fence=fence, wall_clock=wall_clock
        )
        self._next_sequence = first_sequence
        self._groups = set[int]()  # whose prompt is in the file

    @property
    def next_sequence(self) -> int:
        """Number of the rollout that is appended next: all below it are on disk."""
        return self._next_sequence

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Write rollouts, numbered from next_sequence on; return once they are on disk.

        Raises JournalError when that fails: rollouts below next_sequence, which may have grown, are on disk; append the
        others again.  OwnershipLost: another attempt owns the run directory, and none of these rollouts counts.
        """
        while records:
            if not self._writer.num_bytes:
                self._writer.begin(first=records[0].sequence)
                self._groups.clear()
            count, found, groups = self._fitting(records)
            self._writer.append(found)
            self._groups |= groups
            self._next_sequence += count
            records = records[count:]
            if records:
                self._writer.close()

    def close(self) -> None:
        """Close the file.  Idempotent."""
        self._writer.close()

    def _fitting(self, records: Sequence[JournalRecord]) -> tuple[int, list[FramedRecord], set[int]]:
        """The first rollouts that fit into the file: how many, their records, and the groups that are new in the file.

        An empty file has room for one, however long it is.
        """
        found, groups, end = list[FramedRecord](), set[int](), self._writer.num_bytes
        for count, record in enumerate(records):
            group_id, mine = record.scored.rollout.group_id, list[FramedRecord]()
            if group_id not in self._groups and group_id not in groups:
                mine.append(self._encoder.encode(GroupPrompt(group_id, record.prompt), record.sequence))
            stored = StoredRollout(record.admitted_version, record.scored)
            mine.append(self._encoder.encode(stored, record.sequence))
            end += sum([each.num_bytes for each in mine])
            if end > self._file_bytes and (found or self._groups):
                return count, found, groups
            groups.add(group_id)
            found += mine
        return len(records), found, groups


# --------------------------------------------------------------------------------------------------------------- reader


@dataclass(frozen=True, slots=True)
class JournalContent:
    """Content of one file."""

    attempt: int  # that wrote it
    first_sequence: int  # number of its first rollout
    records: list[JournalRecord]
    log: LogContent


def read_journal(path: Path, *, is_mapped: bool = False, is_verified: bool = True) -> JournalContent:
    """The undamaged content of a file.

    is_mapped: arrays are views of the mapped file (read_log).  is_verified: False: checksums are not compared, and with
    is_mapped only accessed bytes are read.  Raises JournalError: the file is not a journal, is of another version, or
    cannot be read.
    """
    content = read_log(path, JOURNAL, is_mapped=is_mapped, is_verified=is_verified)
    prompts, records = dict[int, Prompt](), list[JournalRecord]()
    for sequence, message in content.messages():
        if isinstance(message, GroupPrompt):
            prompts[message.group_id] = message.prompt
            continue
        rollout = message.scored.rollout
        prompt = prompts.get(rollout.group_id)
        if prompt is not None and prompt.prompt_id == rollout.prompt_id:
            records.append(JournalRecord(sequence, message.scored, prompt, message.admitted_version))
    first = content.head.first or (records[0].sequence if records else 1)
    return JournalContent(content.head.attempt, first, records, content)


def read_first_sequence(path: Path) -> int:
    """Number of the first rollout of a file.  Raises as read_journal, and if its first bytes are damaged."""
    return read_head(path, JOURNAL).first


def read_journals(directory: Path) -> Iterator[JournalContent]:
    """All files of a run, in order.  Raises JournalError, OSError."""
    for path in journal_paths(directory):
        yield read_journal(path)
