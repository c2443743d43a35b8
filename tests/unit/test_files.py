"""What a file server may answer to a request that it has got twice, since its first answer was lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.base.files import append_lines, rename, write_atomically
from rlhpc.base.ownership import Fence, take_over
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.journal import make_file
from rlhpc.buffer.segments import write_sealed
from rlhpc.training.checkpoint_directory import begin, complete, latest_complete
from tests.full_disk import fill, small_disk


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    for directory in (layout.rollouts, layout.checkpoints):
        directory.mkdir(parents=True)
    return layout


@pytest.fixture
def fence(layout: RunLayout) -> Fence:
    return take_over(layout, 0)


def asked_twice(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Each of these calls is made twice, and has the second answer."""
    for name in names:
        monkeypatch.setattr(os, name, _twice(getattr(os, name)))


def _twice(call: Callable[..., None]) -> Callable[..., None]:
    def twice(*arguments: object, **settings: object) -> None:
        call(*arguments, **settings)
        call(*arguments, **settings)

    return twice


def test_a_file_that_the_server_has_renamed_is_written_though_it_finds_no_source_when_asked_again(
    layout: RunLayout, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_twice(monkeypatch, "rename", "replace")
    for text in (b"first", b"second"):
        write_atomically(layout.attempt, text)
        fence.write(layout.status, text)
        assert layout.attempt.read_bytes() == layout.status.read_bytes() == text
    os.close(make_file(layout.rollouts / "journal_000000.h5", 3, [(0, b"abc")], fence))
    assert (layout.rollouts / "journal_000000.h5").read_bytes() == b"abc"


def test_a_segment_and_a_checkpoint_that_the_server_has_renamed_are_no_failures_for_ever(
    layout: RunLayout, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next try finds the name taken, as if by another controller, and every one after it."""
    asked_twice(monkeypatch, "rename", "replace")
    write_sealed(layout.segment(0), b"groups", staging=fence.staging(layout.rollouts))
    assert layout.segment(0).read_bytes() == b"groups"
    temporary = begin(layout.checkpoint(4), fence.staging(layout.checkpoints))
    (temporary / "controller.json").write_text("{}")
    complete(temporary, layout.checkpoint(4), {"step": 4})
    assert latest_complete(layout.checkpoints) == (4, layout.checkpoint(4))


def test_two_writers_of_one_file_are_in_nobodys_way_though_their_processes_have_one_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers, or in two threads."""
    path, real = tmp_path / "file", Path.replace
    monkeypatch.setattr(os, "getpid", lambda: 7)

    def after_another(self: Path, to: Path) -> Path:
        monkeypatch.setattr(Path, "replace", real)
        write_atomically(path, b"of the other")
        assert path.read_bytes() == b"of the other"
        return real(self, to)

    monkeypatch.setattr(Path, "replace", after_another)
    write_atomically(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_source_that_is_gone_is_not_taken_for_what_already_had_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the file system has given the number of its inode to the other file."""
    source, target, real = tmp_path / "source", tmp_path / "target", Path.replace
    source.write_bytes(b"ours")

    def after_another(self: Path, to: Path) -> Path:
        source.unlink()
        to.write_bytes(b"theirs, in the inode that came free")
        return real(self, to)

    monkeypatch.setattr(Path, "replace", after_another)
    with pytest.raises(FileNotFoundError):
        rename(source, target)
    assert target.read_bytes().startswith(b"theirs")


def test_a_run_is_taken_over_though_the_server_says_that_its_new_directories_exist(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_twice(monkeypatch, "mkdir")
    take_over(layout, 0).write(layout.status, b"of the new owner")
    assert layout.status.read_bytes() == b"of the new owner"


@pytest.mark.starts
@pytest.mark.parametrize("write", [write_atomically, append_lines])
def test_where_the_disk_is_full_the_error_names_the_file(write: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    """os.write and os.fsync do not: "No space left on device" alone sends nobody to the right disk."""
    file = tmp_path / "full" / "config.json"
    file.parent.mkdir()
    with small_disk(file.parent, 1 << 20):
        fill(file.parent / "filler", but_bytes=0)
        with pytest.raises(OSError, match="No space left on device") as caught:
            write(file, b"content")
        assert caught.value.filename == str(file)
