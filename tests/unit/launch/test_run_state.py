"""What a supervisor reads several times a second, and what it makes of a file server in trouble."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from launch.run_files.run_state import save_requests, saved_step
from rlhpc.base.run_directory import RunLayout


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    layout.jobs.mkdir()
    (layout.checkpoint(7)).mkdir(parents=True)
    (layout.checkpoint(7) / "COMPLETE").touch()
    (layout.jobs / "12.yield").touch()
    return layout


def test_requests_and_checkpoints_are_found(layout: RunLayout) -> None:
    assert [path.name for path in save_requests(layout)] == ["12.yield"]
    assert saved_step(layout) == 7


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_file_server_that_does_not_answer_for_a_moment_asks_for_nothing(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It ended the run, and all its jobs: "given_up: the run directory cannot be used"."""

    def refuse(path: object = ".") -> object:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    assert (save_requests(layout), saved_step(layout)) == ([], 0)
