"""Events: every kind comes back as it was, lines that are damaged or torn are told apart, nothing synced is lost."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from crash_states import RecordedDisk, put

from rlhpc.base.ownership import take_over
from rlhpc.base.run_directory import RunLayout
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
    read_events,
)
from rlhpc.protocol.errors import JournalError, OwnershipLost

EVENTS: list[Event] = [
    Began(0, 0, goes_on=True),
    Admitted(0, 17, 3),
    Taken(4, [2, 1]),
    Trained(4, 3, applied=False, metrics={"loss": 0.5, "grad_norm": float("inf")}),
    Dropped(5, DropReason.NO_SPREAD),
]


def write(directory: Path, events: list[Event], attempt: int = 0) -> Path:
    log = GroupEventLog(directory, attempt)
    for event in events:
        log.add(event)
    log.commit(len(events))
    log.close()
    return event_paths(directory)[-1]


def events_of(path: Path) -> list[Event]:
    return list(read_events(path).events.values())


def test_every_kind_of_event_comes_back_as_it_was(tmp_path: Path) -> None:
    file = read_events(write(tmp_path, EVENTS, attempt=3))
    assert (file.attempt, list(file.events.values()), file.damaged_lines) == (3, EVENTS, [])
    assert list(file.events) == [1, 2, 3, 4, 5]
    assert file.path.name == "events_000003.jsonl"


def test_a_commit_writes_no_more_than_it_is_told_and_the_next_one_the_rest(tmp_path: Path) -> None:
    log = GroupEventLog(tmp_path, 0)
    for event in EVENTS:
        log.add(event)
    log.commit(2)
    assert (log.num_added, log.num_pending) == (5, 3)
    assert events_of(event_paths(tmp_path)[0]) == EVENTS[:2]
    log.commit(3)
    assert events_of(event_paths(tmp_path)[0]) == EVENTS


def test_a_torn_last_line_is_told_from_damage(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        file = read_events(path)
        assert list(file.events.values()) == (EVENTS if cut == 1 else EVENTS[:-1])
        assert (file.damaged_lines, file.is_torn) == (([], False) if cut == 1 else ([5], True))
    path.write_bytes(whole + bytes(100))
    assert events_of(path) == EVENTS


def test_no_flipped_bit_is_read_as_another_event(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)
    whole = path.read_bytes()
    for bit in range(len(whole) * 8):
        image = bytearray(whole)
        image[bit // 8] ^= 1 << bit % 8
        path.write_bytes(image)
        file = read_events(path)
        assert file.damaged_lines
        assert [event for event in file.events.values() if event not in EVENTS] == []
        assert len(file.events) >= 3  # a newline that is none any more costs two


def test_a_line_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)

    class Unknown(Began):
        word = "forgotten"

    log = GroupEventLog(tmp_path, 1)
    log.add(Unknown(0, 0, goes_on=True))
    log.commit(1)
    with pytest.raises(JournalError, match=r"events_000001\.jsonl, line 1: .*forgotten.*another version"):
        read_events(event_paths(tmp_path)[1])
    assert events_of(path) == EVENTS


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
    fence = take_over(layout, 0)
    log = GroupEventLog(layout.rollouts, 0, fence)
    log.add(EVENTS[0])
    log.commit(1)
    late = GroupEventLog(layout.rollouts, 1, fence)
    take_over(layout, 1)
    for each in (log, late):
        each.add(EVENTS[1])
        with pytest.raises(OwnershipLost):
            each.commit(1)
        assert each.num_pending == 1
