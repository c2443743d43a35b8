"""A role's log has a bound: of a longer one the beginning and the end stay, and what is left out is counted."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from launch.supervisor import role_task
from launch.supervisor.role_task import BoundedLog
from rlhpc.base.patience import Deadline
from tests.patience import PATIENCE_S

MOST = 4000
LINE = "a line of forty bytes, with its number "


def lines(first: int, end: int) -> str:
    return "".join(f"{LINE}{number:06}\n" for number in range(first, end))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def look(path: Path, name: str = "reward-0") -> None:
    with path.open("a+b") as file:
        BoundedLog(name, MOST).look(file.fileno())


def test_a_log_below_its_bound_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, lines(0, 50))
    look(path)
    assert path.read_text() == lines(0, 50)


def test_of_a_longer_log_the_first_and_last_lines_stay_whole_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for first in range(0, 900, 100):
        append(path, lines(first, first + 100))
        look(path)  # each time as the next start of a task would
    content = path.read_text()
    assert len(content) < MOST
    head, remark, tail = re.fullmatch(r"((?:a line.*\n)*)(.*left out.*\n)((?:a line.*\n)*)", content).groups()  # type: ignore[union-attr]
    assert lines(0, 900).startswith(head)
    assert lines(0, 900).endswith(tail)
    num_bytes = len(lines(0, 900)) - len(head) - len(tail)
    said = f"{num_bytes:,} bytes are left out here: run.log_bytes=4,000 is the most of one log"
    assert remark.endswith(f" reward-0 rlhpc.task WARNING {said}\n")


def test_a_log_of_one_endless_line_is_shortened_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, "." * 10 * MOST)
    look(path)
    assert len(path.read_text()) < MOST
    append(path, "." * 10 * MOST)
    look(path)
    assert len(path.read_text()) < MOST
    assert path.read_text().count("left out") == 1


def test_however_often_a_log_of_long_lines_is_shortened_one_line_says_so(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "log", 0
    for number in range(40):
        line = f"{number:03}{'.' * 396}\n"
        append(path, line)
        num_bytes += len(line)
        look(path)
    assert path.read_text().count("bytes are left out here") == 1
    said = int(re.search(r"([\d,]+) bytes are left out", path.read_text())[1].replace(",", ""))  # type: ignore[index]
    own = next(line for line in path.read_text().splitlines(keepends=True) if "left out" in line)
    assert said == num_bytes - (path.stat().st_size - len(own))


@pytest.mark.starts
@pytest.mark.waits
@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_log_that_its_user_deletes_or_renames_has_its_bound_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """Its role goes on writing into it, and a deleted one would fill the disk unseen."""
    monkeypatch.setattr(role_task, "LOOK_S", 0.05)
    path = tmp_path / "log"
    with path.open("a+b") as file, BoundedLog("reward-0", MOST).over(file.fileno()):
        path.unlink() if is_deleted else path.rename(tmp_path / "old")
        file.write(b"." * 10 * MOST)
        file.flush()
        assert Deadline(PATIENCE_S).wait_for(lambda: os.fstat(file.fileno()).st_size < MOST, 0.05)
    assert not path.exists()


def test_where_no_thread_can_be_started_a_log_is_shortened_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with (tmp_path / "log").open("a+b") as file, BoundedLog("reward-0", MOST).over(file.fileno()):
        file.write(b"." * 10 * MOST)
        file.flush()
    assert (tmp_path / "log").stat().st_size < MOST
