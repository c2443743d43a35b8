"""Running rollouts on the wire, in the ledger and on disk, so that no death loses more of them than the last interval.

In this file: their encoding; prefixes made of the pieces that generators report; files of pieces.

    rollouts/partials_000000.log, partials_000001.log …      a record (log.py) each for some pieces

A file begins with everything known so far, then new pieces are appended; once it has grown to several times its first
size, the next file begins, and older ones are deleted: disk use is never much more than the running rollouts.
Guarantees: a written piece survives the death of this process and of its machine; a damaged record costs its pieces and
those that continue them, and is never misread.  Nothing waits for these files: after a failed write the next file
begins with everything known then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from rlhpc.base.native import crc32
from rlhpc.base.ownership import Fence
from rlhpc.buffer.batches import GroupRecord
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.log import FramedRecord, LogContent, LogEncoder, LogKind, LogWriter, damage_in_words, read_log
from rlhpc.protocol.errors import JournalError
from rlhpc.protocol.types import Int32, Prefix, UInt8

# -------------------------------------------------------------------------------------------------------- partial codec
#
# Compact encoding of the tokens of running rollouts since the last report, for wire and disk.
#
#   PartialRollout, several  ⇄  bytes: a table, a line each, runs of versions, token ids, log-probabilities; deflated
#
# A partial rollout states the number of tokens of its row before its own, and their checksum: it continues only those,
# so that the receiver detects lost, duplicate or late reports, and two drafts of the same row are never joined.  Rows
# (types.py) grow side by side; the first piece of a further row states the checksum of all rows before it.  A row may
# stand beside those of another draft: it is exact by itself, and a dialogue that does not repeat it drops it.  The four
# bytes of a number are stored separately (shuffled), as in segments.  Pure.


LEVEL = 2  # 5.3 bytes a token instead of 6.3 at level 1; higher ones gain nothing
MAX_BYTES = 1 << 28  # of a report before deflating, at most
_LINE_FIELDS = 7  # group, sample, prompt, start, tokens, checksum of those before, runs of versions
_PIECE_HEAD = np.dtype("<i8")
_NOT_DEFLATED: Any = zlib_ng.error  # whose type the stub states wrongly


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A part of a completion that is still being sampled."""

    group_id: int
    sample_index: int
    prompt_id: int
    start: int  # tokens of the row before this piece; 0, of the first row: it replaces whatever is known
    before: int  # id_checksum of these; of the first piece of a further row, rows_checksum of the rows before
    tokens: (
        Prefix  # from `start` on; none: it has grown, and which tokens is not known.  A whole one may have many rows
    )
    row: int = 0  # in the order in which they began

    @property
    def is_whole(self) -> bool:
        """True if it begins with the first token of all."""
        return self.start == 0 and self.row == 0

    @property
    def end(self) -> int:
        """Tokens of the row with this piece, of the longest one of a whole."""
        longest: int = max(row.stop - row.start for row in self.tokens.rows)
        return self.start + longest

    def follows(self, known: Prefix | None) -> bool:
        """True if the piece continues the known prefix, or replaces it."""
        if self.is_whole:
            return True
        if known is None or self.row > len(rows := known.rows):
            return False
        if self.row == len(rows):
            return self.start == 0 and rows_checksum(id_checksum(known.token_ids[row]) for row in rows) == self.before
        token_ids = known.token_ids[rows[self.row]]
        return len(token_ids) == self.start and id_checksum(token_ids) == self.before

    def by_row(self) -> list[PartialRollout]:
        """Itself, or a whole one as a piece for each of its rows, which follow one another."""
        if not len(self.tokens.row_starts):
            return [self]
        assert self.is_whole
        found, checksums = list[PartialRollout](), list[int]()
        for row, own in enumerate(self.tokens.rows):
            before = rows_checksum(checksums) if row else 0
            found.append(replace(self, before=before, tokens=self.tokens.row(own), row=row))
            checksums.append(id_checksum(self.tokens.token_ids[own]))
        return found


def id_checksum(token_ids: Int32, before: int = 0) -> int:
    """CRC32 of token ids that follow those with checksum `before`; the same however a completion is cut into pieces."""
    return crc32(np.ascontiguousarray(token_ids, "<i4").data, before)


def rows_checksum(checksums: Iterable[int]) -> int:
    """Checksum of rows, from the id_checksum of each."""
    return crc32(np.array(list(checksums), "<i8").data)


def joined(known: Prefix | None, partial: PartialRollout) -> Prefix:
    """The known prefix, extended or replaced by a piece that follows it."""
    if partial.is_whole or known is None:
        return partial.tokens
    rows = [known.row(row) for row in known.rows]
    if partial.row == len(rows):
        return Prefix.of_rows([*rows, partial.tokens])
    rows[partial.row] = rows[partial.row].followed_by(partial.tokens)
    return Prefix.of_rows(rows)


def up_to_version(prefix: Prefix, newest: int) -> Prefix | None:
    """Each row's tokens before the first one sampled by a version above `newest`; None: there are none."""
    is_newer = prefix.versions > newest
    if is_newer.any():
        rows = prefix.rows
        ends = [row.start + int(is_newer[row].argmax()) if is_newer[row].any() else row.stop for row in rows]
        prefix = Prefix.of_rows([prefix.row(slice(row.start, end)) for row, end in zip(rows, ends, strict=True)])
    return prefix if len(prefix.token_ids) else None


def encode_partials(partials: Sequence[PartialRollout]) -> tuple[bytes, int]:
    """Return (bytes, number of bytes before they were deflated)."""
    partials = [piece for each in partials for piece in each.by_row()]
    runs = [_runs_of(each.tokens.versions) for each in partials]
    table = [
        (
            each.group_id,
            each.sample_index,
            each.prompt_id,
            each.start,
            len(each.tokens.token_ids),
            each.before,
            len(own),
        )
        for each, (own, _) in zip(partials, runs, strict=True)
    ]
    numbers = [len(partials), *(number for line in table for number in line)]
    rows = [each.row for each in partials] if any(each.row for each in partials) else []
    parts = [
        np.asarray(numbers, _PIECE_HEAD).tobytes(),
        _joined(values for values, _ in runs).astype("<i4").tobytes(),
        _joined(lengths for _, lengths in runs).astype("<i4").tobytes(),
        _shuffled(_joined(each.tokens.token_ids for each in partials).astype("<i4")),
        _shuffled(_joined((each.tokens.behaviour_logprobs for each in partials), np.float32).astype("<f4")),
        np.asarray(rows, _PIECE_HEAD).tobytes(),
    ]
    plain = b"".join(parts)
    return zlib_ng.compress(plain, LEVEL), len(plain)


def decode_partials(data: bytes | memoryview, num_bytes: int) -> list[PartialRollout]:
    """Undo encode_partials, with a piece for each row.  num_bytes: size before deflating, as announced.

    Raises ValueError, and nothing else.
    """
    plain = _inflated(data, num_bytes)
    (count,) = _take(plain, 0, _PIECE_HEAD, 1)
    table = _take(plain, 8, _PIECE_HEAD, int(count) * _LINE_FIELDS).reshape(-1, _LINE_FIELDS)
    if (table[:, :5] < 0).any() or (table[:, 5:] < 0).any() or table[:, 4:].max(initial=0) > MAX_BYTES << 4:
        raise ValueError("negative or impossible numbers")
    num_runs, num_tokens = int(table[:, 6].sum()), int(table[:, 4].sum())
    at = 8 + table.nbytes
    values, lengths = (
        _take(plain, at, np.dtype("<i4"), num_runs),
        _take(plain, at + 4 * num_runs, np.dtype("<i4"), num_runs),
    )
    at += 8 * num_runs
    token_ids = _unshuffled(_take(plain, at, np.dtype("u1"), 4 * num_tokens), np.dtype("<i4"))
    logprobs = _unshuffled(_take(plain, at + 4 * num_tokens, np.dtype("u1"), 4 * num_tokens), np.dtype("<f4"))
    rows = [0] * int(count)  # of pieces of which all are of first rows, and of earlier versions of rlhpc
    if (at := at + 8 * num_tokens) != len(plain):
        rows = _take(plain, at, _PIECE_HEAD, int(count)).tolist()
        if at + 8 * int(count) != len(plain) or min(rows) < 0:
            raise ValueError("bytes are left over, or a negative row")
    found, token, run = [], 0, 0
    for (group_id, sample_index, prompt_id, start, length, before, runs), row in zip(table.tolist(), rows, strict=True):
        versions = _versions(values[run : run + runs], lengths[run : run + runs], length)
        mine = slice(token, token + length)
        tokens = _checked(Prefix(token_ids[mine].copy(), logprobs[mine].copy(), versions))
        found.append(PartialRollout(group_id, sample_index, prompt_id, start, before, tokens, row))
        token, run = token + length, run + runs
    return found


def _checked(tokens: Prefix) -> Prefix:
    if len(tokens.token_ids) and tokens.token_ids.min() < 0:
        raise ValueError("a negative token id")
    if not np.isfinite(tokens.behaviour_logprobs).all():
        raise ValueError("a log-probability that is not finite")
    return tokens


def _runs_of(versions: Int32) -> tuple[Int32, Int32]:
    """(value of each run, length of each run)."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    return versions[starts], np.diff(starts, append=len(versions)).astype(np.int32)


def _versions(values: NDArray[Any], lengths: NDArray[Any], length: int) -> Int32:
    if (lengths < 1).any() or int(lengths.sum(dtype=np.int64)) != length:
        raise ValueError("runs of versions that do not fit their tokens")
    return np.repeat(values, lengths).astype(np.int32)


def _joined(arrays: Iterable[NDArray[Any]], kind: Any = np.int32) -> NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *arrays])


def _shuffled(values: NDArray[Any]) -> bytes:
    return values.view(np.uint8).reshape(-1, 4).T.tobytes()


def _unshuffled(data: NDArray[Any], kind: np.dtype[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(data.reshape(4, -1).T).reshape(-1).view(kind)


def _take(plain: bytes, offset: int, kind: np.dtype[Any], count: int) -> NDArray[Any]:
    if count < 0 or offset + count * kind.itemsize > len(plain):
        raise ValueError("cut off")
    return np.frombuffer(plain, kind, count, offset)


def _inflated(data: bytes | memoryview, num_bytes: int) -> bytes:
    if not 8 <= num_bytes <= MAX_BYTES:
        raise ValueError(f"{num_bytes} bytes, legal: 8 to {MAX_BYTES}")
    inflater = zlib_ng.decompressobj()
    try:
        plain = inflater.decompress(data, num_bytes + 1)
    except _NOT_DEFLATED as error:
        raise ValueError(f"not deflated: {error}") from error
    if len(plain) != num_bytes or not inflater.eof or inflater.unused_data:
        raise ValueError(f"not the {num_bytes} bytes that were announced")
    return plain


# ------------------------------------------------------------------------------------------------------- partial intake
#
# Assemble the pieces of running rollouts that generators report into prefixes, from which others can continue.
#
#     PartialRollout ─▶ prefix of a member, in the ledger ─▶ the lease that is granted after a death
#
# Guarantees: a prefix is a gapless beginning of one draft: a piece that does not continue it changes nothing, and its
# sender is asked for all tokens.  Only the holder of a member changes its prefix; a generator that reports a free
# member becomes its holder.


Member = tuple[int, int]  # group, sample index


@dataclass(slots=True)
class Receipt:
    """Result of receiving a report."""

    kept: list[PartialRollout] = field(default_factory=list)  # pieces that changed a prefix
    wanted: list[Member] = field(default_factory=list)  # members whose beginning is not known here
    refused: list[str] = field(default_factory=list)  # descriptions of impossible pieces
    unwanted: list[int] = field(default_factory=list)  # groups that are finished or dropped
    num_adopted: int = 0  # members that were free


class PartialIntake:
    """Receives pieces, and knows the prefix of every member that is being sampled."""

    def __init__(self, ledger: AdmissionLedger, max_tokens: int) -> None:
        """max_tokens: of a completion."""
        self._ledger, self._max_tokens = ledger, max_tokens

    def receive(self, holder: str, partials: Sequence[PartialRollout], newest_version: int) -> Receipt:
        """Extend the prefixes of members that this generator holds, and renew their leases.

        newest_version: newest version that any generator can have sampled with.  Ignored: members of other generators,
        and groups not admitted yet: a controller that lost an admission will admit the same prompt again.
        """
        receipt = Receipt()
        for partial in partials:
            group = self._ledger.open_record(partial.group_id)
            if group is None:
                if partial.group_id < self._ledger.next_group_id and partial.group_id not in receipt.unwanted:
                    receipt.unwanted.append(partial.group_id)
                continue
            if odd := self._oddity(partial, group, newest_version):
                receipt.refused.append(f"sample {partial.sample_index} of group {partial.group_id}: {odd}")
                continue
            member = group.members[partial.sample_index]
            if member.is_free:
                self._ledger.adopt(holder, partial.group_id, partial.sample_index)
                receipt.num_adopted += 1
            if member.holder != holder:
                continue
            prefix = None
            if len(partial.tokens.token_ids):
                if partial.follows(member.prefix):
                    prefix = joined(member.prefix, partial)
                    receipt.kept.append(partial)
                else:
                    receipt.wanted.append((partial.group_id, partial.sample_index))
            self._ledger.renew(holder, partial.group_id, (partial.sample_index,), (prefix,))
        return receipt

    def whole(self, members: Iterable[Member]) -> list[PartialRollout]:
        """The prefixes of these members, if they have one and their group is still open."""
        found = []
        for group_id, index in members:
            group = self._ledger.open_record(group_id)
            prefix = group.members[index].prefix if group is not None and index < len(group.members) else None
            if group is not None and prefix is not None:
                found.append(PartialRollout(group_id, index, group.prompt.prompt_id, 0, 0, prefix))
        return found

    def all(self) -> list[PartialRollout]:
        """The prefixes of all unfinished members."""
        groups = [(group_id, self._ledger.open_record(group_id)) for group_id in self._ledger.open_groups()]
        return self.whole((group_id, i) for group_id, group in groups if group for i in range(len(group.members)))

    def restore(self, partials: Mapping[Member, PartialRollout], newest_version: int) -> list[PartialRollout]:
        """Give unfinished members their prefixes of an earlier attempt of the run; return these.

        newest_version: newest version that this attempt has or will repeat; cut before the first token of a newer one.
        """
        members = []
        for (group_id, index), partial in partials.items():
            group = self._ledger.open_record(group_id)
            if group is None or self._oddity(partial, group, None) or not group.members[index].is_free:
                continue
            prefix = up_to_version(partial.tokens, newest_version)
            if prefix is not None:
                self._ledger.hand_back("", group_id, (index,), (prefix,))
                members.append((group_id, index))
        return self.whole(members)

    def _oddity(self, partial: PartialRollout, group: GroupRecord, newest_version: int | None) -> str:
        """Description of what is wrong with a piece; "": nothing."""
        versions = partial.tokens.versions
        if partial.sample_index >= len(group.members):
            return f"the group has {len(group.members)}"
        if partial.prompt_id != group.prompt.prompt_id:
            return f"it continues prompt {partial.prompt_id}, not {group.prompt.prompt_id}"
        if partial.end > self._max_tokens:
            return f"{partial.end} tokens, more than the {self._max_tokens} that a row of a completion may have"
        if len(versions) and versions.min() < group.admitted_version:
            return f"version {versions.min()} sampled it, and {group.admitted_version} was live when it was admitted"
        if len(versions) and newest_version is not None and versions.max() > newest_version:
            return f"version {versions.max()} sampled it, and the newest is {newest_version}"
        return ""


# -------------------------------------------------------------------------------------------------------- partial files


@dataclass(frozen=True, slots=True)
class StoredPieces:
    """Some pieces, in a record."""

    pieces: UInt8  # encode_partials
    num_bytes: int  # size of these before deflating


PARTIALS = LogKind("partials", "partial rollouts", (StoredPieces,))
_TOKENS_A_RECORD = 1 << 20
LEAST_BYTES = 4 << 20  # minimum size of a file before the next one begins
GROWTH = 4  # and minimum growth, relative to its first size


@dataclass(frozen=True, slots=True)
class PartialFile:
    """Content of a file."""

    attempt: int  # that wrote it
    partials: list[PartialRollout]  # in the order of writing
    log: LogContent


def partial_paths(directory: Path) -> list[Path]:
    """The files of a rollouts directory, in order.  Raises OSError."""
    return PARTIALS.paths(directory)


def read_partial_file(path: Path) -> PartialFile:
    """Every undamaged record of a file.  Raises JournalError: the file cannot be read, or is of another version."""
    content, partials = read_log(path, PARTIALS), list[PartialRollout]()
    for number, stored in content.messages():
        try:
            partials += decode_partials(stored.pieces.data, stored.num_bytes)
        except ValueError as error:
            raise JournalError(f"{path}, record {number}: {error}; is it of another version of rlhpc?") from error
    return PartialFile(content.head.attempt, partials, content)


def read_partials(directory: Path, first_attempt: int = 0) -> tuple[dict[Member, PartialRollout], list[str]]:
    """The last known prefix of each member, as a piece from its first token on; and descriptions of damage.

    It may have many rows.  Includes members that were finished later.  first_attempt: files of earlier attempts do
    not count.  Raises OSError.
    """
    known, problems = dict[Member, PartialRollout](), list[str]()
    for path in partial_paths(directory):
        try:
            file = read_partial_file(path)
        except JournalError as error:
            if not path.exists():  # a newer file, perhaps not yet there at the first look, holds all of it
                return read_partials(directory, first_attempt)
            problems.append(str(error))
            continue
        if file.log.damage:
            where = damage_in_words(file.log.damage)
            problems.append(f"{path}: {where} are damaged, or were being written when their writer died")
        for piece in file.partials if file.attempt >= first_attempt else ():
            before = known.get((piece.group_id, piece.sample_index))
            tokens = before.tokens if before is not None else None
            if piece.follows(tokens):
                known[piece.group_id, piece.sample_index] = PartialRollout(
                    piece.group_id, piece.sample_index, piece.prompt_id, 0, 0, joined(tokens, piece)
                )
    return known, problems


class PartialLog:
    """The only writer of an attempt's files.  One thread at a time."""

    def __init__(self, directory: Path, attempt: int, fence: Fence | None = None, run_name: str = "") -> None:
        """Create no file until there is something to write."""
        self._directory, self._encoder = directory, LogEncoder(PARTIALS, attempt)
        self._writer = LogWriter(PARTIALS, directory, run_name=run_name, attempt=attempt, fence=fence)
        self._num_records = self._most_bytes = 0  # of the file

    @property
    def is_empty(self) -> bool:
        """True if there is no file, not even of an earlier attempt.  Raises OSError."""
        return not partial_paths(self._directory)

    @property
    def wants_all(self) -> bool:
        """True if `begin` is to be called next, with everything known: there is no file, or it has grown too large."""
        return self._writer.num_bytes >= self._most_bytes

    def append(self, pieces: Sequence[PartialRollout]) -> None:
        """Write pieces and return once they are on disk.

        Raises JournalError: the pieces are given up, and `wants_all` is True.  OwnershipLost.
        """
        try:
            with self._writer.writing():
                self._writer.refuse_if_lost()
            self._writer.append(self._records_of(pieces))
        except JournalError:
            self.close()
            raise

    def begin(self, everything: Sequence[PartialRollout]) -> None:
        """Begin a file with everything known, and delete older files.  Raises as `append`."""
        self.close()
        with self._writer.writing():
            older = partial_paths(self._directory)
        self._writer.begin(records=self._records_of(everything))
        self._most_bytes = max(LEAST_BYTES, GROWTH * self._writer.num_bytes)
        self._delete(older)

    def discard(self) -> None:
        """Delete all files, when nothing is running any more.  Raises as `append`."""
        self.close()
        with self._writer.writing():
            older = partial_paths(self._directory)
        self._delete(older)

    def close(self) -> None:
        """Close the file.  Idempotent."""
        self._num_records = self._most_bytes = 0
        self._writer.close()

    def _delete(self, paths: Sequence[Path]) -> None:
        try:
            with self._writer.writing():
                self._writer.refuse_if_lost()
                for path in paths:
                    path.unlink(missing_ok=True)
        except JournalError:
            self.close()
            raise

    def _records_of(self, pieces: Sequence[PartialRollout]) -> list[FramedRecord]:
        """Records of limited size each: a reader needs memory for one at a time."""
        records = []
        for some in _cut_file(pieces):
            data, num_bytes = encode_partials(some)
            self._num_records += 1
            records.append(
                self._encoder.encode(StoredPieces(np.frombuffer(data, np.uint8), num_bytes), self._num_records)
            )
        return records


def _cut_file(pieces: Sequence[PartialRollout]) -> list[list[PartialRollout]]:
    found, room = [list[PartialRollout]()], _TOKENS_A_RECORD
    for piece in pieces:
        if room <= 0:
            found.append([])
            room = _TOKENS_A_RECORD
        found[-1].append(piece)
        room -= len(piece.tokens.token_ids)
    return found
