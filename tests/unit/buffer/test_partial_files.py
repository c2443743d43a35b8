"""Partial rollouts on disk: what was written is found after any death, and nothing is ever read as something else."""

from __future__ import annotations

import random
import resource
import signal
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crash_states import RecordedDisk, put
from partial_samples import is_beginning_of, make_draft, piece_of

from rlhpc.base.ownership import take_over
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer import prefixes
from rlhpc.buffer.prefixes import PartialLog, PartialRollout, partial_paths, read_partial_file, read_partials
from rlhpc.protocol.errors import JournalError, OwnershipLost
from rlhpc.protocol.types import Prefix

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
    assert [path.name for path in partial_paths(tmp_path)] == ["partials_000001.bin"]
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
    whole = sum(len(data) for data in PartialLog(tmp_path, 0)._records_of(pieces(0, 100)))
    assert num_begun > 5
    assert largest < 5 * whole


# ----------------------------------------------------------------------------------------------------------- format


def test_files_of_this_version_are_read_for_ever() -> None:
    """What write_some() wrote when the format was made."""
    assert lengths(GOLDEN) == [100] * 4
    assert read_partials(GOLDEN)[1] == []


def test_the_page_of_the_format_says_enough_to_read_it_without_us() -> None:
    """rlhpc/buffer/README.md, taken literally."""
    (path,) = partial_paths(GOLDEN)
    data, at, found = path.read_bytes(), 0, dict[int, list[tuple[int, float, int]]]()
    while at < len(data):
        assert data[at : at + 4] == b"RLP1"
        crc, _, num_bytes, num_inflated = struct.unpack_from("<4I", data, at + 4)
        end = at + 20 + num_bytes
        assert crc == zlib.crc32(data[at + 8 : end])
        plain = zlib.decompress(data[at + 20 : end])
        assert len(plain) == num_inflated
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
        at = end
    for group_id, known in found.items():
        draft = DRAFTS[group_id]
        expected = zip(
            draft.token_ids.tolist(), draft.behaviour_logprobs.tolist(), draft.versions.tolist(), strict=True
        )
        assert known == [*expected][:100]


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
    for _ in range(200):
        changed = bytearray(whole)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert max(lengths(tmp_path)) < 100
        _, problems = read_partials(tmp_path)
        assert len(problems) == 1
        assert str(path) in problems[0]


def test_a_file_that_is_cut_off_gives_what_lies_before_the_cut(tmp_path: Path) -> None:
    write_some(tmp_path).close()
    (path,) = partial_paths(tmp_path)
    whole, seen = path.read_bytes(), set()
    for end in range(0, len(whole), 37):
        path.write_bytes(whole[:end] + bytes(end % 3))
        found = lengths(tmp_path)
        assert len({*found}) == 1
        seen.add(found[0])
        file = read_partial_file(path)
        assert file.is_torn == bool(file.damage)
    assert seen == {0, 20, 40, 60, 80}


def test_records_of_another_version_are_refused_by_name(tmp_path: Path) -> None:
    log = write_some(tmp_path)
    odd = Prefix(DRAFTS[0].token_ids - 200_000, DRAFTS[0].behaviour_logprobs, DRAFTS[0].versions)
    log.append([PartialRollout(0, 0, 0, 0, 0, odd)])
    known, (problem,) = read_partials(tmp_path)
    assert known == {}
    assert "partials_000000.bin, byte" in problem
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
    fence = take_over(layout, 0)
    log = PartialLog(layout.rollouts, 0, fence)
    log.begin(pieces(0, 20))
    successor = PartialLog(layout.rollouts, 1, take_over(layout, 1))
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
