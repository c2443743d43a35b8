"""A role's log has a bound: of a longer one the beginning and the end stay, and what is left out is counted."""

from __future__ import annotations

import re
from pathlib import Path

from launch.supervisor.bounded_log import BoundedLog

MOST = 4000
LINE = "a line of forty bytes, with its number "


def lines(first: int, end: int) -> str:
    return "".join(f"{LINE}{number:06}\n" for number in range(first, end))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_log_below_its_bound_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, lines(0, 50))
    BoundedLog(path, "reward-0", MOST).look()
    assert path.read_text() == lines(0, 50)
    BoundedLog(tmp_path / "gone", "reward-0", MOST).look()
    assert not (tmp_path / "gone").exists()


def test_of_a_longer_log_the_first_and_last_lines_stay_whole_and_the_rest_is_counted(tmp_path: Path) -> None:
    path, log = tmp_path / "log", BoundedLog(tmp_path / "log", "reward-0", MOST)
    for first in range(0, 900, 100):
        append(path, lines(first, first + 100))
        log.look()
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
    BoundedLog(path, "reward-0", MOST).look()
    assert len(path.read_text()) < MOST
