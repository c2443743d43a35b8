"""A real full disk under every file that a controller writes: an error of ours or a warning, and later all is there."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from small_ring import make_ledger, prompt, scored, small_config

from rlhpc.base.ownership import Fence
from rlhpc.base.patience import DISK_PATIENCE_S, LONGEST_PAUSE_S, Patience, patiently_aside
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.history import Admitted, GroupEventLog, event_paths, read_events
from rlhpc.buffer.journal import JournalFiles, JournalRecord, read_journals
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases
from rlhpc.buffer.prefixes import PartialLog, PartialRollout, read_partials
from rlhpc.buffer.segments import SegmentWriter, read_rollouts_directory
from rlhpc.metrics.tensorboard import Recorder
from rlhpc.protocol.errors import JournalError, SegmentError
from rlhpc.protocol.types import Prefix, RolloutGroup
from rlhpc.roles.controller.guarding import GuardEntry, GuardFile, read_guard_file
from rlhpc.roles.controller.leases import ProcessRegistry
from rlhpc.roles.controller.run_status import StatusBoard, summarise
from rlhpc.roles.controller.state import Totals
from tests.full_disk import fill, small_disk

pytestmark = pytest.mark.starts  # mount
DISK_BYTES = 4 << 20
MANY = 40  # so that what is written needs a page that is not there


@dataclass
class Place:
    """A run directory on a small disk."""

    layout: RunLayout
    fence: Fence

    @property
    def filler(self) -> Path:
        return self.layout.root / "filler"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with small_disk(tmp_path, DISK_BYTES):
        layout = RunLayout(tmp_path / "run")
        for directory in (layout.root, layout.rollouts, layout.checkpoints):
            directory.mkdir()
        yield Place(layout, Fence.take(layout, 0))


@dataclass
class Writer:
    """One kind of file: `write` tries once, `num_there` counts what a reader finds."""

    write: Callable[[], object]
    num_there: Callable[[], int]
    refusal: type[Exception] | None = None  # None: a warning, and the run goes on


def group(group_id: int) -> RolloutGroup:
    members = tuple(scored(group_id, index) for index in range(2))
    return RolloutGroup(group_id, prompt(group_id), 0, members)


def journal(place: Place) -> Writer:
    files = JournalFiles(place.layout.rollouts, run_name="full", attempt=0, fence=place.fence)

    def write() -> None:
        first = files.next_sequence
        files.append([JournalRecord(first + i, scored(first + i, 0), prompt(first + i), 0) for i in range(1500)])

    return Writer(
        write, lambda: sum(len(content.records) for content in read_journals(place.layout.rollouts)), JournalError
    )


def events(place: Place) -> Writer:
    file = GroupEventLog(place.layout.rollouts, 0, place.fence)

    def write() -> None:
        if not file.num_pending:
            for number in range(MANY * 10):
                file.add(Admitted(number, number, 0))
        file.commit(file.num_pending)

    return Writer(
        write, lambda: sum(len(read_events(path).events) for path in event_paths(place.layout.rollouts)), JournalError
    )


def segments(place: Place) -> Writer:
    writer = SegmentWriter(
        place.layout.rollouts, 0, run_name="full", run_attempt=0, max_groups=8, max_s=60.0, clock=lambda: 0.0,
        fence=place.fence,
    )  # fmt: skip

    def write() -> None:
        if not writer.num_pending:
            writer.add(ResolvedGroup(group(writer.next_index), 0, None, 1, 0, True))
        writer.seal()

    return Writer(write, lambda: len(list(read_rollouts_directory(place.layout.rollouts))), SegmentError)


def partials(place: Place) -> Writer:
    log = PartialLog(place.layout.rollouts, 0, place.fence)
    rng = np.random.default_rng(0)
    tokens = Prefix(rng.integers(0, 9999, 4096, np.int32), -rng.random(4096, np.float32), np.zeros(4096, np.int32))
    pieces = [PartialRollout(0, 0, 0, 0, 0, tokens)]

    def write() -> None:
        pieces.append(PartialRollout(len(pieces), 0, 0, 0, 0, tokens))
        log.begin(pieces)

    return Writer(write, lambda: len(read_partials(place.layout.rollouts)[0]), JournalError)


def status(place: Place) -> Writer:
    config = small_config()
    registry = ProcessRegistry("hash", 10.0, lambda: 0.0)
    board = StatusBoard(place.layout, config, registry, make_ledger(config), place.fence)
    written = [0]

    def write() -> None:
        written[0] += 1
        board.write(json.dumps({"number": written[0], "room": "x" * 20_000}).encode())

    return Writer(write, lambda: json.loads(place.layout.status.read_bytes())["number"])


def guard(place: Place) -> Writer:
    file = GuardFile(place.layout.guard, place.fence)
    entry = GuardEntry(0, 1, 1, "skip", {}, (), "a long story " * 5000)
    return Writer(lambda: file.append(entry), lambda: len(read_guard_file(place.layout.guard)))


def lost_leases(place: Place) -> Writer:
    book, file = LostLeases(), LostLeaseFile(place.layout.lost_leases, place.fence)

    def write() -> None:
        book.record_death([(prompt(number), 1) for number in range(MANY * 20)])
        file.append(book)

    return Writer(write, lambda: len(file.read()))


WRITERS = {
    each.__name__: each for each in (journal, events, segments, partials, status, guard, lost_leases)
}  # checkpoints: tests/faults/test_disk_full.py


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_costs_nothing_that_was_written_and_later_all_is_there(
    place: Place, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = WRITERS[name](place)
    writer.write()
    before = writer.num_there()
    assert before > 0
    fill(place.filler, 0)
    for _ in range(2):
        if writer.refusal is None:
            writer.write()
            assert "No space left on device" in caplog.text
        else:
            with pytest.raises(writer.refusal, match="No space left on device"):
                writer.write()
        assert writer.num_there() >= before
    place.filler.unlink()
    writer.write()
    assert writer.num_there() > before


def test_lines_that_a_full_disk_has_half_taken_do_not_stand_there_twice(place: Place) -> None:
    writer = guard(place)
    fill(place.filler, 0)
    for _ in range(2):
        writer.write()
    fill(place.filler, 100_000)  # room for one of three lines of 65,000 bytes, and a piece of the next
    writer.write()
    place.filler.unlink()
    writer.write()
    assert writer.num_there() == 4


def test_the_end_of_a_run_waits_for_room(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    totals = Totals()

    async def write_the_end() -> None:
        fill(place.filler, 0)
        end = asyncio.create_task(
            patiently_aside(lambda: summarise(place.layout, totals, 1, 2, place.fence), place.layout.summary),
            name="end",
        )
        while not end.done() and "trying again" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not place.layout.summary.exists()
        place.filler.unlink()
        await end

    asyncio.run(write_the_end())
    assert "No space left on device" in caplog.text
    assert json.loads(place.layout.summary.read_bytes())["steps"] == 0


def test_the_next_try_is_never_more_than_five_seconds_away() -> None:
    patience = Patience(lambda: 0.0)
    pauses = []
    for _ in range(10):
        patience.failed(OSError("full"))
        pauses.append(patience.pause_s)
    assert max(pauses) == LONGEST_PAUSE_S < 5
    assert DISK_PATIENCE_S == 300  # then the run ends


def test_a_log_on_a_full_disk_loses_lines_and_nobody_is_told_by_an_exception(place: Place) -> None:
    path = place.layout.root / "controller.log"
    log = logging.getLogger("tests.full_disk")
    with path.open("w", buffering=1) as stream:
        handler = logging.StreamHandler(stream)
        log.addHandler(handler)
        try:
            log.warning("before")
            fill(place.filler, 0)
            for _ in range(MANY):
                log.warning("x" * 1000)
            place.filler.unlink()
            log.warning("after")
        finally:
            log.removeHandler(handler)
    text = path.read_text()
    assert "before" in text
    assert "after" in text


def test_metrics_on_a_full_disk_are_lost_with_a_warning(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(place.layout.tensorboard)
    recorder.flush()  # its threads would take what `fill` has counted as free
    fill(place.filler, 0)
    for _ in range(3):
        recorder.config("x" * 20_000)
        recorder.flush()
    place.filler.unlink()
    recorder.config("whole again")
    recorder.close()
    files = list(place.layout.tensorboard.rglob("events*"))
    assert "No space left on device" in caplog.text
    assert any(b"whole again" in file.read_bytes() for file in files)
