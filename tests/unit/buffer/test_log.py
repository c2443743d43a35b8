"""Logs: what was appended is there, whatever happens to process, machine or bytes; nothing is read as another thing."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from crash_states import RecordedDisk, put
from log_files import flip_at, flip_in_record, place_of, write_anew

from rlhpc.base.native import crc32
from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.log import HEAD_BYTES, MAGIC, MARK, SCHEMA, LogEncoder, LogKind, LogWriter, read_head, read_log
from rlhpc.protocol.errors import JournalError, OwnershipLost, ProtocolError
from rlhpc.protocol.types import Bool, Float32, Int32

MANY = pytest.mark.long, pytest.mark.timeout(1800)


@dataclass(frozen=True)
class Sample:
    """A message with arrays of all lengths, odd ones too."""

    number: int
    text: str
    token_ids: Int32
    logprobs: Float32
    mask: Bool


KIND = LogKind("samples", "samples", (Sample,))


def sample(number: int, length: int | None = None) -> Sample:
    rng = np.random.default_rng(number)
    length = int(rng.integers(0, 40)) if length is None else length
    ids, logprobs = rng.integers(0, 150_000, length, dtype=np.int32), -rng.random(length, dtype=np.float32)
    return Sample(number, "é" * (number % 5), ids, logprobs, rng.random(length) < 0.5)


def same(one: Sample, other: Sample) -> bool:
    arrays = ("token_ids", "logprobs", "mask")
    return (one.number, one.text) == (other.number, other.text) and all(
        getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in arrays
    )


def make_writer(directory: Path, **changes: object) -> LogWriter:
    return LogWriter(KIND, directory, **{"run_name": "test", "attempt": 3} | changes)  # type: ignore[arg-type]


def append(writer: LogWriter, numbers: Sequence[int]) -> None:
    encoder = LogEncoder(KIND, 3)
    writer.append([encoder.encode(sample(number), number) for number in numbers])


def write_some(directory: Path, count: int = 20, *, closes: bool = True) -> Path:
    """In writes of five records."""
    writer = make_writer(directory)
    writer.begin(first=1)
    for first in range(0, count, 5):
        append(writer, range(first, first + 5))
    if closes:
        writer.close()
    return KIND.paths(directory)[-1]


def numbers_of(path: Path) -> list[int]:
    """Of the records that are whole; all of them are as they were written."""
    found = [*read_log(path, KIND).messages()]
    assert all(number == message.number and same(message, sample(number)) for number, message in found)
    return [number for number, _ in found]


@pytest.mark.parametrize("is_mapped", [False, True])
def test_what_was_appended_comes_back_as_it_was_with_its_number(tmp_path: Path, is_mapped: bool) -> None:
    path = write_some(tmp_path)
    file = read_log(path, KIND, is_mapped=is_mapped)
    assert (file.path.name, file.damage, file.is_torn) == ("samples_000000.log", [], False)
    assert (file.head.attempt, file.head.first, file.head.run_name) == (3, 1, "test")
    found = [*file.messages()]
    assert [number for number, _ in found] == [*range(20)]
    assert all(same(message, sample(number)) for number, message in found)
    assert not any(message.token_ids.flags.owndata for _, message in found if len(message.token_ids))
    path.unlink()
    assert all(same(message, sample(number)) for number, message in found)  # a mapping outlives the name


def test_reading_goes_on_where_the_last_record_ended(tmp_path: Path) -> None:
    path = write_some(tmp_path)
    end = read_log(path, KIND).places[11][1]
    assert [number for number, _ in read_log(path, KIND, start=end).messages()] == [*range(12, 20)]


def test_files_are_numbered_and_each_says_what_it_is(tmp_path: Path) -> None:
    write_some(tmp_path)
    assert write_some(tmp_path).name == "samples_000001.log"
    make_writer(tmp_path).begin(7)
    assert [number for number, _ in KIND.numbered(tmp_path)] == [0, 1, 7]
    facts = json.loads(KIND.paths(tmp_path)[0].read_bytes().split(b"\n")[1])
    assert (facts["kind"], facts["schema"], facts["run_name"]) == ("samples", SCHEMA, "test")
    with pytest.raises(JournalError, match=r"samples_000000\.log is a log of samples, expected others"):
        read_log(KIND.paths(tmp_path)[0], LogKind("others", "others", (Sample,)))


# --------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=MANY)])
def test_a_flipped_bit_costs_one_record_and_is_never_read_as_another_one(
    tmp_path: Path, count: int, is_closed: bool
) -> None:
    """Only in the last write of a file that was not closed may it be taken for what a crash left."""
    path, rng = write_some(tmp_path, closes=is_closed), random.Random(count)
    whole, places = path.read_bytes(), read_log(path, KIND).places
    for _ in range(count):
        image = bytearray(whole)
        place = rng.randrange(HEAD_BYTES, len(whole))
        image[place] ^= 1 << rng.randrange(8)
        path.write_bytes(image)
        missing = {*range(20)} - {*numbers_of(path)}
        file = read_log(path, KIND)
        ((first, end),) = file.damage
        assert first <= place < end
        assert len(missing) == any(first <= place < end for first, end in places)  # not so records without a message
        assert file.is_torn == (place >= (len(whole) - 16 if is_closed else places[15][0]))


@pytest.mark.parametrize("place", range(0, 200, 19))
def test_a_file_whose_first_bytes_are_damaged_is_read_all_the_same_and_named(tmp_path: Path, place: int) -> None:
    path = write_some(tmp_path)
    is_within = place < len(path.read_bytes()[:HEAD_BYTES].rstrip(b"\0"))
    flip_at(path, place)
    file = read_log(path, KIND)
    assert numbers_of(path) == [*range(20)]
    assert (file.head.attempt, file.damage) == (3, [(0, HEAD_BYTES)] if is_within else [])
    if is_within:
        with pytest.raises(JournalError, match="its first bytes are damaged"):
            read_head(path, KIND)


@pytest.mark.parametrize("is_closed", [True, False])
def test_gaps_in_the_last_write_are_what_a_power_cut_leaves_until_the_file_is_closed(
    tmp_path: Path, is_closed: bool
) -> None:
    path = write_some(tmp_path, closes=is_closed)
    whole, places = path.read_bytes(), read_log(path, KIND).places
    for missing in itertools.chain.from_iterable(itertools.combinations(range(12, 20), count) for count in (1, 2, 3)):
        image = bytearray(whole)
        for index in missing:
            first, end = places[index]
            image[first:end] = bytes(end - first)  # a page that did not reach the disk
        path.write_bytes(image)
        assert numbers_of(path) == [number for number in range(20) if number not in missing]
        file = read_log(path, KIND)
        last_write = 15 if 15 not in missing else 10  # the last one that is known of
        assert file.is_torn == (bool(file.damage) and missing[0] >= last_write and not is_closed)


def test_what_a_file_begins_with_was_on_disk_before_it_had_its_name(tmp_path: Path) -> None:
    encoder = LogEncoder(KIND, 3)
    make_writer(tmp_path).begin(records=[encoder.encode(sample(number), number) for number in range(5)])
    (path,) = KIND.paths(tmp_path)
    for index in range(5):
        flip_in_record(path, KIND, index)
        file = read_log(path, KIND)
        assert (len(file.places), len(file.damage), file.is_torn) == (4, 1, False)
        flip_at(path, sum(file.damage[0]) // 2)
        assert numbers_of(path) == [*range(5)]


def test_damage_at_several_places_is_told_and_what_is_between_is_read(tmp_path: Path) -> None:
    path = write_some(tmp_path)
    places = [place_of(path, KIND, index) for index in (3, 8, 9)]
    for index in (9, 8, 3):
        flip_in_record(path, KIND, index)
    file = read_log(path, KIND)
    assert file.damage == [places[0], (places[1][0], places[2][1])]
    assert [number for number, _ in file.messages()] == [number for number in range(20) if number not in (3, 8, 9)]


def test_a_file_that_is_cut_off_gives_what_lies_before_the_cut(tmp_path: Path) -> None:
    path = write_some(tmp_path)
    whole, ends = path.read_bytes(), [end for _, end in read_log(path, KIND).places]
    for size in range(HEAD_BYTES, len(whole), 13):
        path.write_bytes(whole[:size])
        file = read_log(path, KIND)
        assert numbers_of(path) == [*range(sum(end <= size for end in ends))]
        assert file.is_torn == bool(file.damage)
    path.write_bytes(whole + bytes(100))  # a length that was on disk before the bytes
    assert (numbers_of(path), read_log(path, KIND).damage) == ([*range(20)], [])
    for size in (0, 5, 90):
        path.write_bytes(whole[:size])
        with pytest.raises(JournalError, match="is not a log, or its first bytes are damaged"):
            read_log(path, KIND)


def test_a_record_that_looks_like_records_is_not_taken_apart(tmp_path: Path) -> None:
    path = write_some(tmp_path, 5)
    inner = np.frombuffer(path.read_bytes()[HEAD_BYTES:], np.int32)
    outer = Sample(0, "", inner, np.zeros(0, np.float32), np.zeros(0, np.bool_))
    write_anew(path, KIND, [outer, sample(2)])
    assert [number for number, _ in read_log(path, KIND).messages()] == [1, 2]


def test_another_schema_and_other_messages_are_refused_with_words(tmp_path: Path) -> None:
    path = write_some(tmp_path)
    whole = path.read_bytes()
    document = whole[len(MAGIC) :].split(b"\n")[0].replace(b'"schema": %d' % SCHEMA, b'"schema": 99')
    head = MAGIC + document + f"\n{crc32(document):08x}\n".encode()
    path.write_bytes(head.ljust(HEAD_BYTES, b"\0") + whole[HEAD_BYTES:])
    with pytest.raises(JournalError, match=rf"has schema 99; this version of rlhpc reads schema {SCHEMA}"):
        read_log(path, KIND)
    path.write_bytes(whole)
    file = read_log(path, LogKind("samples", "samples", ()))
    with pytest.raises(JournalError, match=r"byte 1040: type 0x.*not one of none; is it of another version"):
        list(file.messages())


def test_what_cannot_be_a_message_of_a_log_is_refused_when_it_is_encoded(tmp_path: Path) -> None:
    encoder, good = LogEncoder(KIND, 0), sample(1, 4)
    for odd in (good.token_ids.astype(np.uint16), good.token_ids[::2], good.token_ids.reshape(2, 2), object()):
        with pytest.raises(ProtocolError, match="cannot be written"):
            encoder.encode(Sample(0, "", odd, good.logprobs, good.mask), 0)  # type: ignore[arg-type]
    encoder.encode(good, 1)  # it is none the worse for it


# ----------------------------------------------------------------------------------------------------------- power cuts


@pytest.mark.parametrize("is_control", [False, True])
@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=MANY)])
def test_every_state_that_a_power_cut_may_leave_holds_what_was_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, is_control: bool
) -> None:
    """Control: a disk that forgets what was synced is found out."""
    root, num_lost = tmp_path / "run", 0
    root.mkdir()
    with monkeypatch.context() as patches:
        disk = RecordedDisk(root, patches, forgets_syncs=is_control)
        for number in range(3):
            writer = make_writer(root)
            writer.begin()
            for first in range(0, 200, 20):
                append(writer, range(200 * number + first, 200 * number + first + 20))
                disk.acknowledge(200 * number + first + 20)
    for place, (files, acknowledged) in enumerate(disk.states(count, random.Random(count))):
        directory = tmp_path / f"state-{place}"
        directory.mkdir()
        put(directory, files)
        found = {*itertools.chain(*map(numbers_of, KIND.paths(directory)))} if not is_control else _known(directory)
        num_lost += not found >= {*range(max(acknowledged, default=0))}
    assert (num_lost > 0) == is_control


def _known(directory: Path) -> set[int]:
    """Without files whose first bytes are missing."""
    found = set[int]()
    for path in KIND.paths(directory):
        if path.read_bytes().find(MARK) >= 0:
            found |= {*numbers_of(path)}
    return found


# ------------------------------------------------------------------------------------------------------- failing writes


def test_a_failed_write_is_repeated_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, real = make_writer(tmp_path), os.pwritev
    writer.begin()
    append(writer, range(5))
    with monkeypatch.context() as full:
        full.setattr(os, "pwritev", lambda descriptor, pieces, offset: _half(real, descriptor, pieces, offset))
        with pytest.raises(JournalError, match="samples cannot be written: No space left on device"):
            append(writer, range(5, 12))
    path = KIND.paths(tmp_path)[0]
    assert numbers_of(path)[:5] == [*range(5)]
    append(writer, range(5, 20))
    assert numbers_of(path) == [*range(20)]
    assert read_log(path, KIND).damage == []


def _half(real: Callable[..., int], descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
    data = b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)
    real(descriptor, [data[: len(data) // 2]], offset)
    raise OSError(28, "No space left on device")


def test_many_pieces_and_short_writes_arrive_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        data = b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)
        return real(descriptor, [data[: max(1, len(data) // 3)]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    writer = make_writer(tmp_path)
    writer.begin()
    append(writer, range(600))
    assert numbers_of(KIND.paths(tmp_path)[0]) == [*range(600)]


def test_whoever_lost_the_run_directory_appends_and_begins_nothing(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    writer = make_writer(layout.rollouts, fence=Fence.take(layout, 0))
    writer.begin()
    append(writer, range(3))
    on_disk = writer.num_bytes
    Fence.take(layout, 1)
    with pytest.raises(OwnershipLost):
        append(writer, range(3, 5))
    assert writer.num_bytes == on_disk
    (path,) = KIND.paths(layout.rollouts)
    assert numbers_of(path) == [*range(5)]  # the next owner may have read them before it said that it is the owner
    with pytest.raises(OwnershipLost):
        writer.begin()
    assert KIND.paths(layout.rollouts) == [path]
    assert numbers_of(path) == [*range(5)]


def test_a_disk_that_does_not_even_say_who_owns_the_run_is_a_failed_write(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    writer = make_writer(layout.rollouts, fence=Fence.take(layout, 0))
    writer.begin()
    owner = layout.owner.read_bytes()
    layout.owner.write_bytes(b"{")
    with pytest.raises(JournalError, match="samples cannot be written"):
        append(writer, range(3))
    layout.owner.write_bytes(owner)
    append(writer, range(3))
    assert numbers_of(KIND.paths(layout.rollouts)[0]) == [0, 1, 2]
