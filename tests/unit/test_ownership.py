"""Who has lost a run directory changes nothing in it any more, whenever it wakes up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest

from rlhpc.base import ownership
from rlhpc.base.ownership import Fence, read_owner, take_over
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases
from rlhpc.buffer.segments import write_sealed
from rlhpc.protocol.errors import CheckpointError, OwnershipLost, SegmentError
from rlhpc.training.checkpoint_directory import begin, complete, latest_complete
from tests.unit.buffer.rollout_samples import make_prompt

ROOT = Path(__file__).parents[2]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    for directory in (layout.rollouts, layout.checkpoints):
        directory.mkdir(parents=True)
    return layout


def test_the_last_to_take_over_is_the_owner(layout: RunLayout) -> None:
    first, second = take_over(layout, 0), take_over(layout, 1)
    assert read_owner(layout) == second.owner != first.owner
    second.check()
    with pytest.raises(OwnershipLost, match=f"was taken over by {second.owner}; this process belongs to {first.owner}"):
        first.check()


def test_attempts_of_one_number_are_told_apart(layout: RunLayout) -> None:
    """As after --fresh, which counts from 0 again."""
    old, new = take_over(layout, 0), take_over(layout, 0)
    new.check()
    with pytest.raises(OwnershipLost):
        old.check()


def test_a_directory_that_was_deleted_belongs_to_nobody(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = take_over(layout, 0)
    layout.owner.unlink()
    monkeypatch.setattr(ownership, "ABSENT_S", 0.0)
    for _ in range(ownership.ABSENT_LOOKS - 1):
        with pytest.raises(FileNotFoundError, match="not there at the moment"):  # one look says nothing
            fence.check()
    with pytest.raises(OwnershipLost, match="taken over, moved or deleted"):
        fence.check()


def test_an_owner_that_is_there_again_was_never_lost(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    fence, content = take_over(layout, 0), layout.owner.read_bytes()
    monkeypatch.setattr(ownership, "ABSENT_S", 0.0)
    for _ in range(3):  # absences, each of two looks
        layout.owner.unlink()
        for _ in range(ownership.ABSENT_LOOKS - 1):
            with pytest.raises(FileNotFoundError):
                fence.check()
        layout.owner.write_bytes(content)
        fence.check()


def test_a_stale_controller_holds_nothing_against_a_prompt(layout: RunLayout) -> None:
    stale, book = take_over(layout, 0), LostLeases()
    take_over(layout, 1)
    book.record_death([(make_prompt(0), 1)])
    with pytest.raises(OwnershipLost):
        LostLeaseFile(layout.strikes, stale).append(book)
    assert not layout.strikes.exists()


def test_a_damaged_record_is_not_taken_for_a_loss(layout: RunLayout) -> None:
    fence = take_over(layout, 0)
    layout.owner.write_bytes(b"{")
    with pytest.raises(OSError, match="damaged"):
        fence.check()


def test_a_file_is_replaced_whole_by_the_owner_alone(layout: RunLayout) -> None:
    fence = take_over(layout, 0)
    fence.write(layout.status, b"one")
    fence.write(layout.status, b"two", is_synced=False)
    assert layout.status.read_bytes() == b"two"
    take_over(layout, 1).write(layout.status, b"three")
    with pytest.raises(OwnershipLost):
        fence.write(layout.status, b"four")
    assert layout.status.read_bytes() == b"three"


# What a process does that was stopped after it had asked, at the latest moment there is: between write and rename.


def stopped_before_rename(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Let `meanwhile` happen before the next Path.replace."""
    real = Path.replace

    def late(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", real)
        meanwhile()
        return real(self, target)

    monkeypatch.setattr(Path, "replace", late)


def test_a_status_that_comes_late_does_not_appear(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    old = take_over(layout, 0)
    old.write(layout.status, b"before")

    def successor() -> None:
        Fence(layout, take_over(layout, 1).owner).write(layout.status, b"of the successor")

    real, is_first = os.replace, True

    def replace(source: object, target: object, **settings: object) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            successor()
        real(source, target)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OwnershipLost):
        old.write(layout.status, b"late")
    assert layout.status.read_bytes() == b"of the successor"


@pytest.mark.parametrize("has_sealed", [False, True])
def test_a_segment_that_comes_late_neither_appears_nor_takes_the_successors_away(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, has_sealed: bool
) -> None:
    old, path = take_over(layout, 0), layout.segment(0)

    def successor() -> None:
        new = take_over(layout, 1)
        if has_sealed:
            write_sealed(path, b"of the successor", staging=new.staging(layout.rollouts))

    stopped_before_rename(monkeypatch, successor)
    with pytest.raises(SegmentError, match="could not be written"):
        write_sealed(path, b"late", staging=old.staging(layout.rollouts))
    assert (path.read_bytes() if path.exists() else None) == (b"of the successor" if has_sealed else None)


def test_a_checkpoint_that_comes_late_does_not_count(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    old = take_over(layout, 0)
    temporary = begin(layout.checkpoint(4), old.staging(layout.checkpoints))
    (temporary / "controller.json").write_text("{}")
    stopped_before_rename(monkeypatch, lambda: take_over(layout, 1))
    with pytest.raises(CheckpointError, match="cannot be completed"):
        complete(temporary, layout.checkpoint(4), {"step": 4})
    assert latest_complete(layout.checkpoints) is None
    assert not layout.checkpoint(4).exists()


def test_a_checkpoint_counts_in_the_instant_in_which_it_appears(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one that was renamed before a take-over could become complete after it."""
    temporary = begin(layout.checkpoint(4), take_over(layout, 0).staging(layout.checkpoints))
    (temporary / "controller.json").write_text("{}")
    seen = []
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        result = real(self, target)
        seen.append(latest_complete(layout.checkpoints))
        return result

    monkeypatch.setattr(Path, "replace", replace)
    complete(temporary, layout.checkpoint(4), {"step": 4})
    assert seen[-1] == (4, layout.checkpoint(4))


def test_a_writer_that_does_not_stop_cannot_keep_its_place(layout: RunLayout) -> None:
    """Files appear in the old staging directory while it is being deleted."""
    old, over = take_over(layout, 0), threading.Event()

    def write_on() -> None:
        number = 0
        while not over.is_set():
            try:
                (old.staging(layout.rollouts) / f"{number}.partial").touch()
            except FileNotFoundError:
                continue
            number += 1

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for attempt in range(1, 20):
            take_over(layout, attempt)
            assert not old.staging(layout.rollouts).exists()
    finally:
        over.set()
        writer.join()
    assert [path.name.partition("_")[0] for path in layout.rollouts.iterdir()] == [".owner"]


@pytest.mark.starts
def test_of_many_that_take_over_at_once_one_owns_at_the_end(layout: RunLayout) -> None:
    code = (
        "import sys; from pathlib import Path; from rlhpc.base.ownership import take_over; "
        "from rlhpc.base.run_directory import "
        "RunLayout; sys.stdin.read(); fence = take_over(RunLayout(Path(sys.argv[1])), 1);"
        "fence.check(); fence.write(fence.layout.status, fence.owner.encode()); print(fence.owner)"
    )
    words = [sys.executable, "-c", code, str(layout.root)]
    takers = [subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=ROOT) for _ in range(6)]
    for taker in takers:  # they have read their imports, or will in a moment
        assert taker.stdin is not None
        taker.stdin.close()
    said = [taker.stdout.read().decode().strip() for taker in takers if taker.stdout is not None]
    told = [taker.stderr.read().decode() for taker in takers if taker.stderr is not None]
    for taker in takers:
        taker.wait()
    owner = read_owner(layout)
    assert said.count(owner) == 1, told
    assert layout.status.read_text() == owner
    assert all(
        "took it over" in words or "OwnershipLost" in words for words, who in zip(told, said, strict=True) if not who
    )
