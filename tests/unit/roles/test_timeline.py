"""timeline.jsonl: what each process did, interval by interval, and who came and went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.buffer.lost_leases import LineFile
from rlhpc.roles.controller.run_status import SHORTEST_S, SILENT, WORKS, Timeline, TimelineEntry
from tests.full_disk import fill, small_disk

START_S = 1_000_000.0


def _row(name: str, waits_for: str = "", *, pid: int = 1, silent_s: float = 0.1, **metrics: float) -> dict[str, Any]:
    state = "running" if name.startswith("generator") else "training"
    known = {"state": state, "version": 0, "host": "node"}
    return {"name": name, "waits_for": waits_for, "pid": pid, "silent_s": silent_s, "metrics": metrics, **known}


def _entries(path: Path) -> list[TimelineEntry]:
    return LineFile(path, TimelineEntry).read()


class _Watch:
    """A timeline that is looked at twice a second."""

    def __init__(self, path: Path) -> None:
        self.timeline, self.path, self.now_s = Timeline(path), path, START_S

    def look(self, *rows: dict[str, Any], seconds: float = 0.5) -> None:
        self.timeline.look(self.now_s, rows, attempt=0, step=3, phase="training")
        self.timeline.write(self.now_s)
        self.now_s += seconds


@pytest.fixture
def watch(tmp_path: Path) -> _Watch:
    return _Watch(tmp_path / "timeline.jsonl")


def test_an_interval_says_what_share_of_it_each_process_worked_or_waited_for_what(watch: _Watch) -> None:
    for place in range(12):
        watch.look(_row("trainer-0", "batch" if place % 4 == 0 else ""))
    (interval,) = [entry for entry in _entries(watch.path) if entry.seconds > 0]
    assert interval.seconds == pytest.approx(SHORTEST_S)
    assert interval.work["trainer-0"]["batch"] == pytest.approx(3 / 11, abs=0.001)
    assert sum(interval.work["trainer-0"].values()) == pytest.approx(1, abs=0.002)


def test_an_engines_own_counter_is_believed_before_looks_at_its_state(watch: _Watch) -> None:
    for place in range(12):  # busy for a fifth of the time, and at no moment in which somebody looks
        watch.look(_row("generator-0", "leases", busy_s=10 + 0.1 * place))
    (interval,) = [entry for entry in _entries(watch.path) if entry.seconds > 0]
    assert interval.work["generator-0"] == pytest.approx({WORKS: 0.2, "leases": 0.8}, abs=0.002)


def test_a_process_that_dies_is_silent_then_lost_and_joins_again(watch: _Watch) -> None:
    watch.look(_row("generator-0", pid=7, running=8.0, busy_s=1.0))
    for place in range(12):
        watch.look(_row("generator-0", pid=7, silent_s=0.5 * place, running=8.0, busy_s=1.0))
    watch.look()
    watch.look(_row("generator-0", pid=9))
    told = [(entry.event, entry.text) for entry in _entries(watch.path) if entry.event]
    assert [event for event, _ in told] == ["joined", "lost", "joined"]
    assert told[1][1] == "no sign of life for 5.5 s; it was running with 8 rollouts"
    assert told[2][1] == "pid 9 on node"
    (interval,) = [entry for entry in _entries(watch.path) if entry.seconds > 0]
    assert interval.work["generator-0"].get(SILENT, 0) > 0.3


def test_another_process_of_the_same_name_is_a_loss_and_an_arrival(watch: _Watch) -> None:
    watch.look(_row("generator-0", pid=7))
    watch.look(_row("generator-0", pid=8))
    assert [entry.event for entry in _entries(watch.path)] == ["joined", "lost", "joined"]


def test_one_that_said_so_has_left_and_is_not_lost(watch: _Watch) -> None:
    watch.look(_row("generator-0") | {"state": "draining"})
    watch.look()
    assert [entry.event for entry in _entries(watch.path)] == ["joined", "left"]


@pytest.mark.parametrize(("num_processes", "most_lines"), [(8, 9_000), (1024, 6_000)])
def test_a_month_is_thousands_of_lines(tmp_path: Path, num_processes: int, most_lines: int) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    num_lines, now_s = 0, START_S
    while now_s < START_S + 30 * 86_400:
        interval_s = timeline._interval_s(now_s, num_processes) if num_lines else SHORTEST_S
        timeline._first_s, now_s, num_lines = START_S, now_s + interval_s, num_lines + 1
    assert 1_000 < num_lines < most_lines


def test_an_attempt_of_an_old_run_begins_with_long_intervals(watch: _Watch) -> None:
    watch.look(_row("trainer-0"))
    again = _Watch(watch.path.parent / "timeline.jsonl")
    again.now_s = START_S + 20 * 86_400
    for _ in range(3500):
        again.look(_row("trainer-0"))
    lengths = [entry.seconds for entry in _entries(watch.path) if entry.seconds]
    assert lengths == [pytest.approx(20 * 86.4, rel=0.01)]


@pytest.mark.starts
def test_a_full_disk_delays_lines_and_the_file_says_for_how_long(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    directory.mkdir()
    with small_disk(directory, 8 << 20):
        watch = _Watch(directory / "timeline.jsonl")
        watch.look(_row("trainer-0"))
        filler = directory / "filler"
        fill(filler, 0)
        for place in range(400):  # more than the file's last block has room for
            watch.look(_row("generator-0", pid=place + 1), seconds=1.0)
        held = len(_entries(watch.path))
        filler.unlink()
        for _ in range(7):
            watch.look(_row("generator-0", pid=400), seconds=1.0)
        entries = _entries(watch.path)
    assert held < 400
    (disk,) = [entry for entry in entries if entry.event == "disk"]
    assert "could not be written for" in disk.text
    joined = [entry.text for entry in entries if entry.event == "joined" and entry.name == "generator-0"]
    assert joined == [f"pid {number} on node" for number in range(1, 401)]  # none is lost, none stands there twice
