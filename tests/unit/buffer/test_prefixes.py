"""Partial rollouts: as bytes, on disk, and on their way; nothing is ever read as something else."""

from __future__ import annotations

import json
import random
import resource
import signal
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from crash_states import RecordedDisk, put
from rollout_samples import (
    ManualClock,
    is_beginning_of,
    make_draft,
    make_ledger,
    make_prompt,
    make_scored,
    make_writer,
    part_of,
    piece_of,
)

from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer import prefixes
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.log import HEAD_BYTES
from rlhpc.buffer.prefixes import (
    PartialIntake,
    PartialLog,
    PartialRollout,
    Receipt,
    decode_partials,
    encode_partials,
    id_checksum,
    joined,
    partial_paths,
    read_partial_file,
    read_partials,
    rows_checksum,
    up_to_version,
)
from rlhpc.protocol.errors import JournalError, OwnershipLost
from rlhpc.protocol.types import Prefix, SamplingParams

# ---------------------------------------------------------------------------------- Pieces of running rollouts as bytes

PIECES = [piece_of(make_draft(seed, 400), 3 * seed, 3 * seed + length) for seed, length in enumerate([0, 1, 7, 300])]


def with_tokens(**changes: object) -> PartialRollout:
    draft = make_draft(0, 5)
    fields = {name: getattr(draft, name) for name in Prefix.__slots__} | changes
    return PartialRollout(0, 0, 0, 0, 0, Prefix(**fields))  # type: ignore[arg-type]


def test_pieces_come_back_bit_for_bit_with_versions_that_change_back_up_to_the_newest_wanted() -> None:
    found = decode_partials(*encode_partials(PIECES))
    for mine, theirs in zip(found, PIECES, strict=True):
        names = ("group_id", "sample_index", "prompt_id", "start", "before")
        assert [getattr(mine, name) for name in names] == [getattr(theirs, name) for name in names]
        assert is_beginning_of(mine.tokens, theirs.tokens)
        assert len(mine.tokens.token_ids) == len(theirs.tokens.token_ids)
    assert decode_partials(*encode_partials([])) == []
    versions = np.array([7, 7, 8, 8, 7], np.int32)
    (found,) = decode_partials(*encode_partials([with_tokens(versions=versions)]))
    assert found.tokens.versions.tolist() == versions.tolist()
    prefix = with_tokens(versions=np.array([3, 3, 4, 5, 4], np.int32)).tokens
    for newest, length in ((9, 5), (5, 5), (4, 3), (3, 2)):
        kept = up_to_version(prefix, newest)
        assert kept is not None
        assert len(kept.token_ids) == len(kept.versions) == len(kept.behaviour_logprobs) == length
    assert up_to_version(prefix, 2) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"behaviour_logprobs": np.array([-1, -1, np.nan, -1, -1], np.float32)},
        {"behaviour_logprobs": np.array([-1, -1, -np.inf, -1, -1], np.float32)},
        {"token_ids": np.array([1, 2, 3, -4, 5], np.int32)},
    ],
)
def test_tokens_that_nobody_can_have_sampled_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"not finite|negative token"):
        decode_partials(*encode_partials([with_tokens(**changes)]))


def test_whatever_is_changed_is_refused_as_a_value_error_or_well_formed() -> None:
    rng, (data, num_bytes) = random.Random(0), encode_partials(PIECES)
    plain, num_refused = zlib.decompress(data), 0
    for _ in range(3000):
        changed = bytearray(plain)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = changed[: rng.choice((len(changed), rng.randrange(len(changed))))]
        try:
            decode_partials(zlib.compress(bytes(cut)), num_bytes)
        except ValueError:
            num_refused += 1
        changed = bytearray(data)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        try:
            decode_partials(bytes(changed), num_bytes)
        except ValueError:
            num_refused += 1
    assert num_refused > 3000


@pytest.mark.parametrize("told", [0, 100, (1 << 28) + 1, 1 << 40])
def test_a_few_bytes_that_would_become_many_are_refused(told: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        decode_partials(zlib.compress(bytes(1 << 22)), told)


# Rows that grow side by side.


def rows_of(*lengths: int) -> Prefix:
    return Prefix.of_rows([make_draft(seed, length) for seed, length in enumerate(lengths)])


def assert_same_prefix(mine: Prefix | None, theirs: Prefix) -> None:
    assert mine is not None
    for name in Prefix.__slots__:
        assert getattr(mine, name).dtype == getattr(theirs, name).dtype
        assert getattr(mine, name).tolist() == getattr(theirs, name).tolist()


def test_rows_that_grow_side_by_side_come_back_as_they_are() -> None:
    drafts, rng = [make_draft(seed, 90) for seed in range(3)], random.Random(4)
    shown, pieces, known = [0, 0, 0], list[PartialRollout](), None
    for row in [0, 1, 2, *(rng.randrange(3) for _ in range(15))]:
        if shown[row] == 90:
            continue
        end = min(90, shown[row] + rng.randrange(1, 20))
        before = id_checksum(drafts[row].token_ids[: shown[row]])
        if row and not shown[row]:
            before = rows_checksum(id_checksum(drafts[i].token_ids[: shown[i]]) for i in range(row))
        pieces.append(PartialRollout(0, 0, 0, shown[row], before, part_of(drafts[row], shown[row], end), row))
        shown[row] = end
    for piece in decode_partials(*encode_partials(pieces)):
        assert piece.follows(known)
        known = joined(known, piece)
    whole = Prefix.of_rows([part_of(draft, 0, end) for draft, end in zip(drafts, shown, strict=True)])
    assert_same_prefix(known, whole)


def test_a_whole_of_many_rows_is_a_piece_for_each_of_them() -> None:
    whole, known = PartialRollout(3, 1, 3, 0, 0, rows_of(5, 1, 70)), None
    found = decode_partials(*encode_partials([PIECES[1], whole]))
    assert [(each.group_id, each.row, each.start, each.end) for each in found[1:]] == [
        (3, 0, 0, 5),
        (3, 1, 0, 1),
        (3, 2, 0, 70),
    ]
    assert whole.end == 70
    for piece in found[1:]:
        assert piece.follows(known)
        known = joined(known, piece)
    assert_same_prefix(known, whole.tokens)


def test_a_row_of_one_draft_is_not_put_behind_the_rows_of_another() -> None:
    first, second, third = PartialRollout(0, 0, 0, 0, 0, rows_of(5, 6, 7)).by_row()
    known = joined(first.tokens, second)
    assert third.follows(known)
    assert not third.follows(first.tokens)  # a row between them is missing
    assert not third.follows(joined(known, third))  # it is there already: which of both is right?
    other = make_draft(9, 5)
    assert not second.follows(other)
    assert not third.follows(Prefix.of_rows([other, second.tokens]))
    late = PartialRollout(0, 0, 0, 6, id_checksum(second.tokens.token_ids), make_draft(8, 3), 1)
    assert late.follows(known)
    assert not replace(late, row=0).follows(known)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_of_one_draft_though_reports_are_lost_doubled_and_late(seed: int) -> None:
    """Two drafts, whose rows begin alike, are reported over the same wire; a lost piece is made up for by a whole."""
    rng, first = random.Random(seed), make_draft(0, 4)
    drafts = [[make_draft(10 * draft + row, 40, first) for row in range(4)] for draft in range(2)]
    shown, wire, known = [[4], [4]], list[PartialRollout](), None
    for _ in range(300):
        draft = rng.randrange(2)
        rows, ends = drafts[draft], shown[draft]
        row = rng.randrange(min(4, len(ends) + 1))
        if rng.random() < 0.05:
            whole = Prefix.of_rows([part_of(each, 0, end) for each, end in zip(rows, ends, strict=False)])
            wire += decode_partials(*encode_partials([PartialRollout(0, 0, 0, 0, 0, whole)]))
        elif row == len(ends):
            before = rows_checksum(id_checksum(rows[i].token_ids[:end]) for i, end in enumerate(ends))
            ends.append(rng.randrange(1, 9))
            wire.append(PartialRollout(0, 0, 0, 0, before, part_of(rows[row], 0, ends[row]), row))
        else:
            start, ends[row] = ends[row], min(40, ends[row] + rng.randrange(1, 9))
            before = id_checksum(rows[row].token_ids[:start])
            wire.append(PartialRollout(0, 0, 0, start, before, part_of(rows[row], start, ends[row]), row))
        if rng.random() < 0.1:
            wire.pop(rng.randrange(len(wire)))
        if wire and rng.random() < 0.1:
            wire.append(rng.choice(wire))
        while wire and rng.random() < 0.7:
            piece = wire.pop(0 if rng.random() < 0.9 else rng.randrange(len(wire)))
            if piece.follows(known):
                known = joined(known, piece)
                for place, own in enumerate(known.rows):
                    assert any(is_beginning_of(known.row(own), each[place]) for each in drafts)
    assert known is not None


def test_rows_on_disk_are_read_as_they_were_known_over_files_and_attempts(tmp_path: Path) -> None:
    whole = rows_of(30, 20, 10)
    parts = [[part_of(whole.row(row), 0, (row.stop - row.start) // 2) for row in whole.rows]]
    log = PartialLog(tmp_path, 0)
    log.begin([PartialRollout(0, 1, 0, 0, 0, Prefix.of_rows(parts[0]))])
    rest = [
        PartialRollout(0, 1, 0, len(part.token_ids), id_checksum(part.token_ids),
                       part_of(whole.row(row), len(part.token_ids), row.stop - row.start), number)
        for number, (part, row) in enumerate(zip(parts[0], whole.rows, strict=True))
    ]  # fmt: skip
    log.append(rest[::-1])
    log.close()
    known, problems = read_partials(tmp_path)
    assert problems == []
    assert_same_prefix(known[0, 1].tokens, whole)
    later = PartialLog(tmp_path, 1)
    later.begin([known[0, 1]])
    later.close()
    assert_same_prefix(read_partials(tmp_path, first_attempt=1)[0][0, 1].tokens, whole)


def test_of_every_row_what_newer_versions_have_sampled_is_cut_off() -> None:
    versions = np.array([3, 4, 6, 4, 5, 5, 7], np.int32)
    tokens = np.arange(7, dtype=np.int32)
    prefix = Prefix(tokens, -tokens.astype(np.float32), versions, np.array([3, 5], np.int32))
    for newest, kept, starts in ((7, [0, 1, 2, 3, 4, 5, 6], [3, 5]), (5, [0, 1, 3, 4, 5], [2, 4]), (3, [0], [])):
        found = up_to_version(prefix, newest)
        assert found is not None
        assert (found.token_ids.tolist(), found.row_starts.tolist()) == (kept, starts)
    assert up_to_version(prefix, 2) is None


def test_a_piece_follows_what_it_was_cut_from_and_nothing_else() -> None:
    draft, other = make_draft(1, 100), make_draft(2, 100)
    piece = piece_of(draft, 40, 60)
    assert piece.follows(part_of(draft, 0, 40))
    assert is_beginning_of(joined(part_of(draft, 0, 40), piece), draft)
    assert not piece.follows(part_of(draft, 0, 39))
    assert not piece.follows(part_of(draft, 0, 41))
    assert not piece.follows(part_of(other, 0, 40))
    assert not piece.follows(None)
    whole = piece_of(draft, 0, 50)
    assert whole.follows(part_of(other, 0, 80))
    assert is_beginning_of(joined(part_of(other, 0, 80), whole), draft)


# --------------------------------------------------------------------------------------------- Partial rollouts on disk

GOLDEN = Path(__file__).parent / "golden_partials"
DRAFTS = [make_draft(seed, 300) for seed in range(4)]


def pieces(start: int, end: int) -> list[PartialRollout]:
    """Of all drafts."""
    return [piece_of(draft, start, end, member=(member, 1)) for member, draft in enumerate(DRAFTS)]


def lengths(directory: Path, first_attempt: int = 0) -> list[int]:
    """How much is known of each draft; all that is, is right."""
    known, _ = read_partials(directory, first_attempt)
    for (group_id, index), piece in known.items():
        assert (index, piece.prompt_id, piece.start) == (1, group_id, 0)
        assert is_beginning_of(piece.tokens, DRAFTS[group_id])
    return [known[member, 1].end if (member, 1) in known else 0 for member in range(len(DRAFTS))]


def write_some(directory: Path) -> PartialLog:
    """20 tokens of each draft, then 40, 60, 80 and 100."""
    log = PartialLog(directory, 0)
    log.begin(pieces(0, 20))
    for start in (20, 40, 60, 80):
        log.append(pieces(start, start + 20))
    return log


def test_what_was_written_is_put_together_again(tmp_path: Path) -> None:
    write_some(tmp_path)
    assert lengths(tmp_path) == [100] * 4
    assert read_partials(tmp_path)[1] == []
    assert lengths(tmp_path, first_attempt=1) == [0] * 4  # of a timeline that was given up


def test_the_next_attempt_goes_on_and_what_was_before_is_deleted(tmp_path: Path) -> None:
    write_some(tmp_path).close()
    log = PartialLog(tmp_path, 1)
    assert log.wants_all
    log.begin(pieces(0, 100)[:2])
    log.append(pieces(100, 130)[:2])
    assert [path.name for path in partial_paths(tmp_path)] == ["partials_000001.log"]
    assert lengths(tmp_path) == [130, 130, 0, 0]
    assert lengths(tmp_path, first_attempt=1) == [130, 130, 0, 0]
    log.discard()
    assert partial_paths(tmp_path) == []


def test_files_do_not_grow_beyond_a_few_times_what_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_BYTES", 1000)
    log, num_begun, largest = PartialLog(tmp_path, 0), 0, 0
    for round_ in range(200):
        start = round_ % 10 * 10
        if log.wants_all:
            log.begin(pieces(0, start + 10))
            num_begun += 1
        else:
            log.append(pieces(start, start + 10))
        (path,) = partial_paths(tmp_path)
        largest = max(largest, path.stat().st_size)
        assert lengths(tmp_path) == [start + 10] * 4
    whole = sum(record.num_bytes for record in PartialLog(tmp_path, 0)._records_of(pieces(0, 100)))
    assert num_begun > 5
    assert largest < 5 * (HEAD_BYTES + whole)


# ----------------------------------------------------------------------------------------------------------- format


def test_files_of_this_version_are_read_for_ever() -> None:
    """What write_some() wrote when the format was made."""
    assert lengths(GOLDEN) == [100] * 4
    assert read_partials(GOLDEN)[1] == []


def test_the_page_of_the_format_says_enough_to_read_it_without_us() -> None:
    """rlhpc/buffer/README.md, taken literally."""
    (path,) = partial_paths(GOLDEN)
    data, at, found = path.read_bytes(), 1024, dict[int, list[tuple[int, float, int]]]()
    assert json.loads(data.split(b"\n")[1])["kind"] == "partials"
    while at < len(data):
        mark, crc, num_bytes, _ = struct.unpack_from("<4s3I", data, at)
        end = at + 16 + num_bytes
        assert mark in (b"RLHP", b"RLHS")
        assert crc == zlib.crc32(data[at + 8 : end])
        if not num_bytes:  # it only says that what is before it was synced
            at = end
            continue
        header_bytes, header = struct.unpack_from("<I", data, at + 28)[0], at + 48
        (_, length), num_inflated = msgspec.msgpack.decode(data[header : header + header_bytes]).values()
        first = header + -(-header_bytes // 8) * 8
        plain = zlib.decompress(data[first : first + length])
        assert len(plain) == num_inflated
        _read_pieces(plain, found)
        at = end
    for group_id, known in found.items():
        draft = DRAFTS[group_id]
        expected = zip(
            draft.token_ids.tolist(), draft.behaviour_logprobs.tolist(), draft.versions.tolist(), strict=True
        )
        assert known == [*expected][:100]


def _read_pieces(plain: bytes, found: dict[int, list[tuple[int, float, int]]]) -> None:
    (count,) = struct.unpack_from("<q", plain)
    rows = [struct.unpack_from("<7q", plain, 8 + 56 * row) for row in range(count)]
    place, num_runs, num_tokens = 8 + 56 * count, sum(row[6] for row in rows), sum(row[4] for row in rows)
    values, run_lengths = np.frombuffer(plain, "<i4", 2 * num_runs, place).reshape(2, num_runs)
    planes = np.frombuffer(plain, "u1", 8 * num_tokens, place + 8 * num_runs).reshape(2, 4, num_tokens)
    ids, logprobs = planes[0].T.tobytes(), planes[1].T.tobytes()
    columns = np.frombuffer(ids, "<i4"), np.frombuffer(logprobs, "<f4"), np.repeat(values, run_lengths)
    tokens = [*zip(*map(np.ndarray.tolist, columns), strict=True)]
    for group_id, _, _, start, length, before, _ in rows:
        known = found.setdefault(group_id, [])
        assert zlib.crc32(np.array([token for token, _, _ in known], "<i4").tobytes()) == before
        assert len(known) == start
        known += tokens[:length]
        del tokens[:length]


# ----------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("is_control", [False, True])
def test_every_state_that_a_power_cut_may_leave_holds_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_control: bool
) -> None:
    """Control: a disk that forgets what was synced is found out."""
    root, states = tmp_path / "rollouts", tmp_path / "states"
    root.mkdir()
    disk = RecordedDisk(root, monkeypatch, forgets_syncs=is_control)
    log = PartialLog(root, 0)
    log.begin(pieces(0, 20))
    disk.acknowledge(20)
    for start in (20, 40, 60, 80, 100, 120):
        if start == 80:
            log.begin(pieces(0, start + 20))
        else:
            log.append(pieces(start, start + 20))
        disk.acknowledge(start + 20)
    monkeypatch.undo()
    num_lost = 0
    for number, (files, acknowledged) in enumerate(disk.states(150, random.Random(5))):
        directory = states / str(number)
        directory.mkdir(parents=True)
        put(directory, files)
        for older in partial_paths(directory)[:-1]:  # the deletion of older ones may be on disk, or not
            if number % 2:
                older.unlink()
        num_lost += min(lengths(directory)) < max(acknowledged, default=0)
    assert (num_lost > 0) == is_control


def test_a_flipped_bit_costs_a_piece_and_those_after_it_and_is_told(tmp_path: Path) -> None:
    write_some(tmp_path).close()
    (path,) = partial_paths(tmp_path)
    whole, rng = path.read_bytes(), random.Random(3)
    places = [place for first, end in read_partial_file(path).log.places for place in range(first, end)]
    for _ in range(200):
        changed = bytearray(whole)
        changed[rng.choice(places)] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert max(lengths(tmp_path)) < 100
        _, problems = read_partials(tmp_path)
        assert len(problems) == 1
        assert str(path) in problems[0]


def test_a_file_that_is_cut_off_gives_what_lies_before_the_cut(tmp_path: Path) -> None:
    write_some(tmp_path).close()
    (path,) = partial_paths(tmp_path)
    whole, seen = path.read_bytes(), set()
    for end in range(HEAD_BYTES, len(whole), 37):
        path.write_bytes(whole[:end] + bytes(end % 3))
        found = lengths(tmp_path)
        assert len({*found}) == 1
        seen.add(found[0])
        file = read_partial_file(path)
        assert file.log.is_torn == bool(file.log.damage)
    assert seen == {0, 20, 40, 60, 80}


def test_records_of_another_version_are_refused_by_name(tmp_path: Path) -> None:
    log = write_some(tmp_path)
    odd = Prefix(DRAFTS[0].token_ids - 200_000, DRAFTS[0].behaviour_logprobs, DRAFTS[0].versions)
    log.append([PartialRollout(0, 0, 0, 0, 0, odd)])
    known, (problem,) = read_partials(tmp_path)
    assert known == {}
    assert "partials_000000.log, record" in problem
    assert "another version" in problem


# ------------------------------------------------------------------------------------------------------- no writing


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """No file may grow beyond 4 KB."""
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 10, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_a_disk_refuses_is_given_up_and_the_next_file_has_all(tmp_path: Path, file_size_limit: None) -> None:
    log = PartialLog(tmp_path, 0)
    log.begin(pieces(0, 20))
    with pytest.raises(JournalError, match="cannot be written"):
        log.append(pieces(20, 300))
    assert log.wants_all
    with pytest.raises(JournalError, match="cannot be written"):
        log.begin(pieces(0, 300))
    assert lengths(tmp_path) == [20] * 4
    log.begin(pieces(0, 100)[:1])  # others are finished
    assert lengths(tmp_path) == [100, 0, 0, 0]
    assert len([*tmp_path.iterdir()]) == 1


def test_whoever_lost_the_run_directory_writes_and_deletes_nothing(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    fence = Fence.take(layout, 0)
    log = PartialLog(layout.rollouts, 0, fence)
    log.begin(pieces(0, 20))
    successor = PartialLog(layout.rollouts, 1, Fence.take(layout, 1))
    for attempt in (lambda: log.append(pieces(20, 40)), lambda: log.begin(pieces(0, 40)), log.discard):
        with pytest.raises(OwnershipLost):
            attempt()
    assert lengths(layout.rollouts) == [20] * 4
    successor.begin(pieces(0, 30))
    assert lengths(layout.rollouts) == [30] * 4


def test_a_file_that_goes_while_it_is_looked_for_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer begins a new file, complete, and deletes those before."""
    PartialLog(tmp_path, 0).begin(pieces(0, 30))
    looks: list[list[Path]] = []

    def look_and_replace(directory: Path) -> list[Path]:
        looks.append(partial_paths(directory))
        if len(looks) == 1:
            PartialLog(tmp_path, 1).begin(pieces(0, 50))
        return looks[-1]

    monkeypatch.setattr("rlhpc.buffer.prefixes.partial_paths", look_and_replace)
    known, problems = read_partials(tmp_path)
    assert problems == []
    assert [each.end for each in known.values()] == [50] * 4
    assert len(looks) >= 2


# ----------------------------------------------------------------------------- Whatever becomes of reports on their way

MAX_TOKENS, ADMITTED, NEWEST = 200, 4, 6


class Door:
    """A buffer with groups 0 and 1, of two members each, granted to g-0 and g-1."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        ledger = make_ledger(self.clock, sampling=lambda _: SamplingParams(max_tokens=MAX_TOKENS), max_attempts=1000)
        self.buffer = RolloutBuffer(ledger, make_writer(directory))
        for group_id in range(2):
            self.buffer.admit(make_prompt(group_id), ADMITTED)
            self.buffer.ledger.grant(f"g-{group_id}", 2)
        self.intake = PartialIntake(self.buffer.ledger, MAX_TOKENS)

    def report(self, piece: PartialRollout, holder: str = "g-0") -> tuple[int, int, int]:
        """Number of pieces that were (kept, wanted whole, refused)."""
        receipt = self.intake.receive(holder, [piece], NEWEST)
        return len(receipt.kept), len(receipt.wanted), len(receipt.refused)

    def prefix(self, group_id: int = 0, index: int = 0) -> Prefix | None:
        record = self.buffer.ledger.open_record(group_id)
        assert record is not None
        return record.members[index].prefix


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


DRAFT = make_draft(0, 120)


def test_the_next_holder_gets_what_the_dead_one_had_reported(door: Door) -> None:
    assert door.report(piece_of(DRAFT, 0, 50)) == (1, 0, 0)
    assert door.report(piece_of(DRAFT, 50, 80)) == (1, 0, 0)
    door.buffer.ledger.forget_holder("g-0")
    lease = door.buffer.ledger.grant("g-2", 2)
    assert lease is not None
    first, second = lease.prefixes
    assert second is None
    assert first is not None
    assert len(first.token_ids) == 80
    assert is_beginning_of(first, DRAFT)


def test_who_goes_on_with_a_rollout_whose_lease_is_over_has_it_again(door: Door) -> None:
    """The lease expired, or the controller that had granted it is gone."""
    door.report(piece_of(DRAFT, 0, 50))
    door.buffer.ledger.forget_holder("g-0")
    assert door.report(piece_of(DRAFT, 50, 80)) == (1, 0, 0)
    assert door.buffer.ledger.outstanding("g-0") == 1
    assert door.report(piece_of(DRAFT, 0, 90), "g-2") == (0, 0, 0)  # too late: it has a holder
    lease = door.buffer.ledger.grant("g-2", 2)
    assert lease is not None
    assert lease.sample_indices == (1,)
    assert door.buffer.ledger.grant("g-2", 2) is None


def test_nobody_has_what_cannot_be_or_is_not_wanted(door: Door) -> None:
    door.buffer.ledger.forget_holder("g-0")
    odd = PartialRollout(0, 0, 7, 0, 0, part_of(DRAFT, 0, 50))  # of another prompt
    assert door.report(odd) == (0, 0, 1)
    assert door.buffer.ledger.outstanding("g-0") == 0
    door.buffer.drop(1, DropReason.POISON)
    pieces = [piece_of(DRAFT, 0, 10, member=member) for member in ((1, 0), (1, 1), (2, 0))]
    assert door.intake.receive("g-1", pieces, NEWEST) == Receipt(unwanted=[1])  # 2 is still to be admitted


def test_a_piece_that_was_lost_leaves_no_hole_and_the_whole_is_asked_for(door: Door) -> None:
    door.report(piece_of(DRAFT, 0, 50))
    assert door.report(piece_of(DRAFT, 60, 80)) == (0, 1, 0)
    assert door.report(piece_of(DRAFT, 0, 50)) == (1, 0, 0)
    assert door.report(piece_of(DRAFT, 0, 100)) == (1, 0, 0)
    prefix = door.prefix()
    assert prefix is not None
    assert len(prefix.token_ids) == 100
    assert is_beginning_of(prefix, DRAFT)


def test_nothing_is_put_together_of_two_drafts(door: Door) -> None:
    door.report(piece_of(DRAFT, 0, 50))
    door.buffer.ledger.forget_holder("g-0")
    door.buffer.ledger.grant("g-2", 2)
    other = make_draft(1, 120, part_of(DRAFT, 0, 50))
    assert door.report(piece_of(other, 50, 80), "g-2") == (1, 0, 0)
    assert door.report(piece_of(DRAFT, 50, 80), "g-0") == (0, 0, 0)  # it wakes, and holds nothing
    door.buffer.ledger.forget_holder("g-2")
    door.buffer.ledger.grant("g-0", 2)  # which still has its own draft, and goes on with it
    assert door.report(piece_of(DRAFT, 80, 90), "g-0") == (0, 1, 0)
    assert door.report(piece_of(DRAFT, 0, 95), "g-0") == (1, 0, 0)
    prefix = door.prefix()
    assert prefix is not None
    assert is_beginning_of(prefix, DRAFT)


def test_what_is_no_longer_wanted_is_ignored(door: Door) -> None:
    door.buffer.deliver("g-0", make_scored(0, 0))
    assert door.report(piece_of(DRAFT, 0, 50)) == (0, 0, 0)
    assert door.report(piece_of(DRAFT, 0, 50, member=(9, 0))) == (0, 0, 0)
    assert door.report(piece_of(DRAFT, 0, 50, member=(1, 0)), "g-0") == (0, 0, 0)
    assert door.intake.all() == []


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        (piece_of(DRAFT, 0, 50, member=(0, 2)), "the group has 2"),
        (PartialRollout(0, 0, 3, 0, 0, part_of(DRAFT, 0, 50)), "it continues prompt 3, not 0"),
        (piece_of(make_draft(1, 300), 0, 201), "201 tokens, more than the 200"),
        (PartialRollout(0, 0, 0, 0, 0, Prefix(*(DRAFT.token_ids, DRAFT.behaviour_logprobs, DRAFT.versions - 1))), "3"),
        (PartialRollout(0, 0, 0, 0, 0, Prefix(*(DRAFT.token_ids, DRAFT.behaviour_logprobs, DRAFT.versions + 1))), "7"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(door: Door, piece: PartialRollout, why: str) -> None:
    receipt = door.intake.receive("g-0", [piece, piece_of(DRAFT, 0, 9, member=(0, 1))], NEWEST)
    (text,) = receipt.refused
    assert why in text
    assert [kept.sample_index for kept in receipt.kept] == [1]
    assert door.prefix() is None


def test_reports_renew_leases_though_they_bring_no_tokens(door: Door) -> None:
    door.clock.advance(50.0)
    assert door.report(piece_of(DRAFT, 0, 0)) == (0, 0, 0)
    door.clock.advance(50.0)
    assert len(door.buffer.ledger.expire()) == 2  # the other member of group 0, and group 1
    record = door.buffer.ledger.open_record(0)
    assert record is not None
    assert record.free_indices == [1]


def test_an_attempt_takes_up_what_is_unfinished_as_far_as_it_makes_those_versions_again(door: Door) -> None:
    door.buffer.ledger.forget_holder("g-0")
    door.buffer.deliver("g-1", make_scored(1, 0))
    known = {
        (0, 0): piece_of(DRAFT, 0, 120),
        (0, 1): PartialRollout(0, 1, 8, 0, 0, DRAFT),  # of another prompt
        (1, 0): piece_of(DRAFT, 0, 100, member=(1, 0)),  # delivered
        (7, 0): piece_of(DRAFT, 0, 100, member=(7, 0)),  # gone
    }
    (restored,) = door.intake.restore(known, 5)
    prefix = door.prefix()
    assert prefix is not None
    assert (restored.start, restored.end) == (0, len(prefix.token_ids))
    assert 0 < len(prefix.token_ids) < 120
    assert prefix.versions.max() == 5
    assert DRAFT.versions[len(prefix.token_ids)] == 6
    assert is_beginning_of(prefix, DRAFT)


class Sender:
    """A generator's side, as lease_progress.py has it: what it believes to be known, and drafts that grow."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self.shown, self.length = rng, 0, 0
        self.drafts: list[Prefix] = []

    def begin(self, prefix: Prefix | None, seed: int) -> None:
        self.shown = self.length = len(prefix.token_ids) if prefix is not None else 0
        self.drafts.append(make_draft(seed, MAX_TOKENS, prefix))

    def piece(self) -> PartialRollout:
        self.length = min(MAX_TOKENS, self.length + self._rng.randrange(1, 12))
        found = piece_of(self.drafts[-1], self.shown, self.length)
        self.shown = self.length
        return found


class Storm:
    """Two generators that hold a member in turn, and a wire on which anything may happen to reports."""

    def __init__(self, door: Door, seed: int) -> None:
        self._rng, self._door, self._seed, self._num_drafts = random.Random(seed), door, seed, 0
        self.senders = {name: Sender(self._rng) for name in ("g-0", "g-2")}
        self._wire: list[tuple[str, PartialRollout]] = []
        self.holder = "g-0"
        self.senders[self.holder].begin(None, seed)

    def lease_changes_hands(self) -> None:
        """Who has a draft already may go on with it, though another has held the lease meanwhile."""
        self._door.buffer.ledger.forget_holder(self.holder)
        self.holder = "g-2" if self.holder == "g-0" else "g-0"
        self._door.buffer.ledger.grant(self.holder, 2)
        sender, self._num_drafts = self.senders[self.holder], self._num_drafts + 1
        if not sender.drafts or self._rng.random() < 0.5:
            sender.begin(self._door.prefix(), 1000 * self._seed + self._num_drafts)

    def send(self) -> None:
        for name, sender in self.senders.items():
            if sender.drafts and sender.length < MAX_TOKENS:
                self._wire.append((name, sender.piece()))

    def lose(self) -> None:
        self._wire.pop(self._rng.randrange(len(self._wire)))

    def double(self) -> None:
        self._wire.insert(self._rng.randrange(len(self._wire)), self._rng.choice(self._wire))

    def arrive(self) -> None:
        name, piece = self._wire.pop(0 if self._rng.random() < 0.8 else self._rng.randrange(len(self._wire)))
        if self._door.report(piece, name)[1]:
            self.senders[name].shown = 0

    def step(self) -> None:
        happenings = [self.lease_changes_hands, *3 * [self.send]]
        if self._wire:
            happenings += [self.lose, self.double, *4 * [self.arrive]]
        self._rng.choice(happenings)()


@pytest.mark.parametrize("seed", range(40))
def test_reports_lost_doubled_and_late_never_mix_drafts_and_soon_all_is_known(tmp_path: Path, seed: int) -> None:
    door = Door(tmp_path)
    storm = Storm(door, seed)
    for _ in range(60):
        storm.step()
        prefix, drafts = door.prefix(), [draft for sender in storm.senders.values() for draft in sender.drafts]
        assert prefix is None or any(is_beginning_of(prefix, draft) for draft in drafts)
    sender = storm.senders[storm.holder]
    sender.length = min(sender.length, MAX_TOKENS - 30)
    sender.shown = min(sender.shown, sender.length)
    for _ in range(2):  # from here on nothing is lost: the first report may not follow, the second is whole
        if door.report(sender.piece(), storm.holder)[1]:
            sender.shown = 0
    prefix = door.prefix()
    assert prefix is not None
    assert is_beginning_of(prefix, sender.drafts[-1])
    assert len(prefix.token_ids) == sender.length
