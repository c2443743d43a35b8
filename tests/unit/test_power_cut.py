"""What a power cut leaves: nothing has its name before its bytes are on disk, and what was reported written stays.

No power is cut: real files are written, and what was handed to fsync is compared with what there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.run_directory.prepare import AttemptStart, note_attempt, num_attempts
from rlhpc.base.files import write_atomically
from rlhpc.base.ownership import Fence, read_owner, take_over
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases
from rlhpc.buffer.segments import set_aside_lost_segments, write_sealed
from rlhpc.training.checkpoint_directory import AttemptTimeline, Fate, begin, complete, set_aside
from tests.unit.buffer.rollout_samples import make_prompt


class Disk:
    """Knows which files and directories are on disk as they are, and what was renamed that was not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renamed_too_early: list[str] = []
        self._synced: dict[tuple[int, int], tuple[int, int]] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._looked_at(getattr(os, name)))

    def lost(self, path: Path) -> list[str]:
        """What a power cut would take away of this path: its name, or content of it."""
        return [str(each) for each in (path.parent, *_all_below(path)) if not self._is_synced(each)]

    def _note(self, descriptor: int) -> None:
        self._fsync(descriptor)
        _, key, stamp = _facts(os.fstat(descriptor))
        self._synced[key] = stamp

    def _is_synced(self, path: Path) -> bool:
        _, key, stamp = _facts(path.stat())
        return self._synced.get(key) == stamp

    def _looked_at(self, rename: Callable[..., None]) -> Callable[..., None]:
        def call(source: str | Path, target: str | Path) -> None:
            # Renaming a directory changes its own times on some file systems: look before.
            lost = [path for path in _all_below(Path(source)) if not self._is_synced(path)]
            self.renamed_too_early += [f"{path}, when it became {target}" for path in lost]
            rename(source, target)

        return call


def _all_below(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():
        yield from path.rglob("*")


def _facts(state: os.stat_result) -> tuple[int, tuple[int, int], tuple[int, int]]:
    return state.st_mode, (state.st_dev, state.st_ino), (state.st_size, state.st_mtime_ns)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def fence(tmp_path: Path) -> Fence:
    return take_over(RunLayout(tmp_path / "run"), 0)


def replace_file(fence: Fence) -> Path:
    write_atomically(fence.layout.root / "inputs.json", b"old")
    write_atomically(fence.layout.root / "inputs.json", b"new")
    return fence.layout.root / "inputs.json"


def replace_file_as_owner(fence: Fence) -> Path:
    fence.write(fence.layout.status, b"{}")
    return fence.layout.status


def seal_segment(fence: Fence) -> Path:
    path = fence.layout.segment(0)
    write_sealed(path, b"rollouts" * 1000, staging=fence.staging(path.parent))
    return path


def set_segment_aside(fence: Fence) -> Path:
    path = seal_segment(fence)
    return set_aside_lost_segments(path.parent, 0, 1)[0]


def complete_checkpoint(fence: Fence) -> Path:
    final = fence.layout.checkpoint(7)
    temporary = begin(final, fence.staging(final.parent))
    (temporary / "trainer").mkdir()
    (temporary / "trainer" / "weights-00001.safetensors").write_bytes(b"weights" * 1000)
    (temporary / "controller.json").write_bytes(b"{}")
    complete(temporary, final, {"step": 7})
    return final


def set_checkpoint_aside(fence: Fence) -> Path:
    return set_aside(complete_checkpoint(fence), Fate.UNDONE)


def record_lost_lease(fence: Fence) -> Path:
    book = LostLeases()
    book.record_death([(make_prompt(1), 1)])
    LostLeaseFile(fence.layout.strikes, fence).append(book)
    return fence.layout.strikes


def note_an_attempt(fence: Fence) -> Path:
    note_attempt(fence.layout, AttemptStart(0, None, fence.owner))
    note_attempt(fence.layout, AttemptStart(1, 4, fence.owner))
    return fence.layout.attempts


@pytest.mark.parametrize(
    "write",
    [
        replace_file,
        replace_file_as_owner,
        seal_segment,
        set_segment_aside,
        complete_checkpoint,
        set_checkpoint_aside,
        record_lost_lease,
        note_an_attempt,
    ],
)
def test_what_counts_on_disk_is_there_before_it_has_its_name_and_its_name_before_it_is_reported(
    write: Callable[[Fence], Path], fence: Fence, disk: Disk
) -> None:
    path = write(fence)
    assert disk.renamed_too_early == []
    assert disk.lost(path) == []


def test_a_run_directory_that_was_taken_over_has_its_owner_on_disk(tmp_path: Path, disk: Disk) -> None:
    layout = RunLayout(tmp_path / "run")
    fence = take_over(layout, 0)
    assert read_owner(layout) == fence.owner
    assert disk.renamed_too_early == []
    assert disk.lost(layout.owner) == []


def test_an_attempt_that_begins_does_not_continue_the_line_of_one_that_a_crash_has_cut_off(fence: Fence) -> None:
    """Else neither had begun: the next had the number of this one, and checkpoints that it undid would count again."""
    note_attempt(fence.layout, AttemptStart(0, None, fence.owner))
    with fence.layout.attempts.open("a") as file:
        file.write('{"index": 1, "resu')
    note_attempt(fence.layout, AttemptStart(2, 4, fence.owner))
    assert num_attempts(fence.layout) == 3
    assert AttemptTimeline.read(fence.layout.attempts).undone_by(6, 0) == 2
