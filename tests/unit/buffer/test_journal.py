"""The journal and the events: what was acknowledged is there, whatever happens to process, machine or bytes."""

from __future__ import annotations

import random
import resource
import shutil
import signal
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path

import pytest
from crash_states import RecordedDisk, put
from log_files import flip_at, write_anew
from rollout_samples import assert_same_prompt, assert_same_scored, make_record, make_scored, make_teacher

from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer import history
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.history import (
    Admitted,
    Began,
    Dropped,
    Event,
    GroupEventLog,
    Taken,
    Trained,
    event_paths,
    make_durable,
    read_events,
)
from rlhpc.buffer.journal import (
    JOURNAL,
    JournalFiles,
    JournalRecord,
    journal_paths,
    read_journal,
    read_journals,
)
from rlhpc.buffer.log import read_log
from rlhpc.protocol.errors import JournalError, OwnershipLost
from rlhpc.protocol.types import FinishReason, Verdict

MANY = pytest.mark.long, pytest.mark.timeout(1800)  # a minute of work, on a loaded machine twenty times that
SMALL = 20_000  # bytes of a file: of about 40 rollouts


def make_records(count: int, first: int = 0, group_size: int = 3) -> list[JournalRecord]:
    return [
        make_record(i + 1, make_scored(i // group_size, i % group_size), admitted_version=i // 6)
        for i in range(first, first + count)
    ]


def make_golden_records() -> list[JournalRecord]:
    """With all that a journal can say."""
    scored = make_scored(2, 0, length=12, token_rewards={0: 0.1 + 0.2, 11: -1e-300}, finish_reason=FinishReason.LENGTH)
    error = make_scored(2, 1, verdict=Verdict.VERIFIER_ERROR, detail="timed out – “é\0”", reward_parts={})
    return [*make_records(6), make_record(7, scored, 1), make_record(8, error, 1)]


def make_files(directory: Path, first_sequence: int = 1, file_bytes: int = SMALL, **changes: object) -> JournalFiles:
    return JournalFiles(
        directory,
        run_name="test",
        attempt=0,
        first_sequence=first_sequence,
        file_bytes=file_bytes,
        **changes,  # type: ignore[arg-type]
    )


def append_in_batches(files: JournalFiles, records: Sequence[JournalRecord], size: int) -> None:
    for first in range(0, len(records), size):
        files.append(records[first : first + size])


def everything(directory: Path) -> list[JournalRecord]:
    return [record for content in read_journals(directory) for record in content.records]


def assert_same_records(found: Sequence[JournalRecord], expected: Sequence[JournalRecord]) -> None:
    assert [record.sequence for record in found] == [record.sequence for record in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.admitted_version == theirs.admitted_version
        assert_same_scored(mine.scored, theirs.scored)
        assert_same_prompt(mine.prompt, theirs.prompt)


def test_what_is_appended_is_read_back_over_as_many_files_as_it_needs(tmp_path: Path) -> None:
    records = make_records(100)
    records[7] = make_record(8, make_scored(2, 1, verdict=Verdict.VERIFIER_ERROR, detail="é\0", reward_parts={}), 1)
    records[8] = make_record(9, make_scored(2, 2, length=290, finish_reason=FinishReason.LENGTH), 1)
    token_rewards = {0: 0.1 + 0.2, 2: -1e-300}  # and no parts, which lie before them
    records[40] = make_record(41, make_scored(13, 1, length=3, token_rewards=token_rewards, reward_parts={}), 6)
    records[41] = make_record(42, make_scored(13, 2, length=3, token_rewards=token_rewards), 6)
    records[42] = make_record(43, make_scored(14, 0, length=30, teacher=make_teacher(30, 4)), 7)
    records[43] = make_record(44, make_scored(14, 1, length=3, teacher=make_teacher(3)), 7)
    append_in_batches(make_files(tmp_path), records, 7)
    contents = list(read_journals(tmp_path))
    assert len(contents) > 2
    assert [path.name for path in journal_paths(tmp_path)][:2] == ["journal_000000.log", "journal_000001.log"]
    assert [content.log.damage for content in contents] == [[]] * len(contents)
    assert [content.first_sequence for content in contents] == [c.records[0].sequence for c in contents]
    assert_same_records(everything(tmp_path), records)


def test_a_rollout_that_is_larger_than_a_file_gets_a_larger_file(tmp_path: Path) -> None:
    records = make_records(3)
    token_rewards = {place: 1 / (place + 1) for place in range(5000)}
    records[1] = make_record(2, make_scored(0, 1, length=5000, detail="x" * 9000, token_rewards=token_rewards), 0)
    make_files(tmp_path).append(records)
    assert_same_records(everything(tmp_path), records)


def test_a_reader_that_compares_no_checksums_knows_every_rollout_and_leaves_out_what_is_half_written(
    tmp_path: Path,
) -> None:
    records = make_records(9)
    make_files(tmp_path).append(records)
    (path,) = journal_paths(tmp_path)
    with path.open("ab") as file:
        file.write(path.read_bytes()[-400:-200])
    content = read_journal(path, is_mapped=True, is_verified=False)
    assert_same_records(content.records, records)


def test_the_form_of_a_journal_does_not_change_unnoticed() -> None:
    """The golden file was written once: whoever has to write it again raises SCHEMA."""
    content = read_journal(Path(__file__).parent / "golden_journal/journal_000000.log")
    assert content.log.damage == []
    assert_same_records(content.records, make_golden_records())


# --------------------------------------------------------------------------------------------- damage and power cuts


def crash_run(root: Path, monkeypatch: pytest.MonkeyPatch, *, forgets_syncs: bool = False) -> RecordedDisk:
    """A journal of a few files, each batch of which is acknowledged; its length is the acknowledgement."""
    disk = RecordedDisk(root, monkeypatch, forgets_syncs=forgets_syncs)
    files, records = make_files(root), make_records(100)
    for first in range(0, 100, 4):
        files.append(records[first : first + 4])
        disk.acknowledge(min(100, first + 4))
    return disk


def violations(disk: RecordedDisk, directory: Path, count: int, seed: int) -> int:
    """States in which an acknowledged rollout is missing; none may hold another rollout than was appended."""
    records, bad = {record.sequence: record for record in make_records(100)}, 0
    for files, acknowledged in disk.states(count, random.Random(seed)):
        directory.mkdir()
        put(directory, files)
        found = everything(directory)
        shutil.rmtree(directory)
        assert_same_records(found, [records[record.sequence] for record in found])
        missing = set(range(1, max(acknowledged, default=0) + 1)) - {record.sequence for record in found}
        bad += bool(missing)
    return bad


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=MANY)])
def test_every_state_that_a_power_cut_may_leave_holds_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patches:
        disk = crash_run(tmp_path / "run", patches)
    assert violations(disk, tmp_path / "state", count, seed=count) == 0


def test_the_states_find_a_journal_that_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patches:
        disk = crash_run(tmp_path / "run", patches, forgets_syncs=True)
    assert violations(disk, tmp_path / "state", 100, seed=1) > 10


def test_what_a_killed_writer_has_left_in_memory_is_on_disk_before_another_attempt_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with monkeypatch.context() as patches:
        disk = RecordedDisk(run, patches, forgets_syncs=True)  # as if it had died before every sync
        make_files(run).append(make_records(20))
        make_durable(run)
        for _ in range(9):
            disk.acknowledge(20)
    assert violations(disk, tmp_path / "state", 100, seed=2) == 0


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=MANY)])
def test_a_flipped_bit_costs_one_rollout_or_its_group_and_is_never_read_as_another_one(
    tmp_path: Path, count: int
) -> None:
    records = make_records(30)
    append_in_batches(make_files(tmp_path), records, 5)
    (path, *others), rng = journal_paths(tmp_path), random.Random(count)
    assert not others
    whole, by_number = path.read_bytes(), {record.sequence: record for record in records}
    numbers_lost = set[int]()
    for _ in range(count):
        image, place = bytearray(whole), rng.randrange(1024, len(whole))
        image[place] ^= 1 << rng.randrange(8)
        path.write_bytes(image)
        content = read_journal(path)
        assert_same_records(content.records, [by_number[record.sequence] for record in content.records])
        ((first, end),) = content.log.damage
        assert first <= place < end
        num_lost = 30 - len(content.records)
        assert (num_lost == 0) == (place < 1024 + 16)  # the record that ends what a file begins with has no message
        numbers_lost.add(num_lost)
    assert numbers_lost - {0} == {1, 3}  # of a prompt the three of its group


def test_of_a_file_whose_first_bytes_are_damaged_every_rollout_counts(tmp_path: Path) -> None:
    records = make_records(6, first=10)
    make_files(tmp_path, first_sequence=11).append(records)
    (path,) = journal_paths(tmp_path)
    flip_at(path, 40)
    content = read_journal(path)
    assert_same_records(content.records, records)
    assert (content.attempt, content.first_sequence, content.log.damage) == (0, 11, [(0, 1024)])


# ------------------------------------------------------------------------------------------------------- failing writes


@pytest.fixture
def file_size_limit(monkeypatch: pytest.MonkeyPatch):
    """A disk that is full beyond so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_refuses_loses_nothing_and_the_same_call_goes_on_later(tmp_path: Path, file_size_limit) -> None:
    files, records = make_files(tmp_path), make_records(60)
    files.append(records[:10])
    for size in (read_log(tmp_path / "journal_000000.log", JOURNAL).places[-1][1] + 3000, 0):
        file_size_limit(size)
        with pytest.raises(JournalError, match="rollouts cannot be written: File too large"):
            files.append(records[10:])
        file_size_limit(None)
        assert files.next_sequence == 11
        assert_same_records(everything(tmp_path)[:10], records[:10])
    files.append(records[10:])
    assert files.next_sequence == 61
    assert_same_records(everything(tmp_path), records)
    assert not list(tmp_path.glob("*.partial"))


def test_whoever_lost_the_run_directory_acknowledges_nothing(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    fence = Fence.take(layout, 0)
    files, records = make_files(layout.rollouts, fence=fence), make_records(10)
    files.append(records[:3])
    successor = Fence.take(layout, 1)
    with pytest.raises(OwnershipLost):
        files.append(records[3:5])
    assert files.next_sequence == 4
    with pytest.raises(OwnershipLost):
        make_files(layout.rollouts, fence=fence).append(records[3:5])
    mine = make_files(layout.rollouts, first_sequence=4, fence=successor)
    mine.append(records[3:])
    assert [path.name for path in journal_paths(layout.rollouts)] == ["journal_000000.log", "journal_000001.log"]


def test_a_disk_that_does_not_even_say_who_owns_the_run_is_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path)
    files, records = make_files(layout.rollouts, fence=Fence.take(layout, 0)), make_records(4)
    files.append(records[:2])
    owner = layout.owner.read_bytes()
    layout.owner.write_bytes(b"{")
    with pytest.raises(JournalError, match="rollouts cannot be written"):
        files.append(records[2:])
    assert files.next_sequence == 3
    layout.owner.write_bytes(owner)
    files.append(records[2:])
    assert_same_records(everything(layout.rollouts), records)


# --------------------------------------------------------------------------------------------------------------- Events

EVENTS: list[Event] = [
    Began(0, 0, goes_on=True),
    Admitted(0, 17, 3),
    Taken(4, (2, 1)),
    Trained(4, 3, applied=False, metrics={"loss": 0.5, "grad_norm": float("inf")}),
    Dropped(5, DropReason.ZERO_VARIANCE),
]


def write(directory: Path, events: list[Event], attempt: int = 0) -> Path:
    log = GroupEventLog(directory, attempt, run_name="test")
    for event in events:
        log.add(event)
    log.commit(len(events))
    log.close()
    return event_paths(directory)[-1]


def events_of(path: Path) -> list[Event]:
    return list(read_events(path).events.values())


def test_every_kind_of_event_comes_back_as_it_was(tmp_path: Path) -> None:
    file = read_events(write(tmp_path, EVENTS, attempt=3))
    assert (file.attempt, list(file.events.values()), file.log.damage) == (3, EVENTS, [])
    assert list(file.events) == [1, 2, 3, 4, 5]
    assert file.log.path.name == "events_000003.log"
    assert file.log.head.run_name == "test"


def test_a_commit_writes_no_more_than_it_is_told_and_the_next_one_the_rest(tmp_path: Path) -> None:
    log = GroupEventLog(tmp_path, 0)
    for event in EVENTS:
        log.add(event)
    log.commit(2)
    assert (log.num_added, log.num_pending) == (5, 3)
    assert events_of(event_paths(tmp_path)[0]) == EVENTS[:2]
    log.commit(3)
    assert events_of(event_paths(tmp_path)[0]) == EVENTS


def test_events_of_a_later_version_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)
    write_anew(path, history.EVENTS, [*EVENTS, make_dataclass("Forgotten", [("step", int)], frozen=True)(3)])
    with pytest.raises(JournalError, match=r"events_000000\.log, byte \d+: type 0x.*another version"):
        read_events(path)


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.long)])
def test_every_state_that_a_power_cut_may_leave_holds_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    root, state, rng = tmp_path / "run", tmp_path / "state", random.Random(count)
    root.mkdir()
    events: list[Event] = [Admitted(group, group * 7, group // 3) for group in range(300)]
    with monkeypatch.context() as patches:
        disk, log = RecordedDisk(root, patches), GroupEventLog(root, 0)
        for first in range(0, 300, 25):
            for event in events[first : first + 25]:
                log.add(event)
            log.commit(25)
            disk.acknowledge(first + 25)
    for files, acknowledged in disk.states(count, rng):
        state.mkdir()
        put(state, files)
        found = [event for path in event_paths(state) for event in events_of(path)]
        shutil.rmtree(state)
        assert set(events[: max(acknowledged, default=0)]) <= set(found) <= set(events)


def test_whoever_lost_the_run_directory_commits_nothing(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    fence = Fence.take(layout, 0)
    log = GroupEventLog(layout.rollouts, 0, fence)
    log.add(EVENTS[0])
    log.commit(1)
    late = GroupEventLog(layout.rollouts, 1, fence)
    Fence.take(layout, 1)
    for each in (log, late):
        each.add(EVENTS[1])
        with pytest.raises(OwnershipLost):
            each.commit(1)
        assert each.num_pending == 1
