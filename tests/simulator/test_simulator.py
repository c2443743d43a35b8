"""The controller among generators and a trainer, in simulated time: whatever dies, is lost, doubled or late, it holds.

`python -m tests.simulator` runs as many seeds as one likes; `make soak` runs ten thousand.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulator.bugs import BUGS
from tests.simulator.faults import Fault, drawn
from tests.simulator.loop import Process, SimulatedLoop, start
from tests.simulator.search import first_failure, run_seed, shrunk, workplace
from tests.simulator.shrink import shortest
from tests.simulator.world import simulate

NUM_SEEDS, NUM_LONG_SEEDS = 60, 40
MOST_SEEDS_FOR_A_BUG = 500


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


@pytest.mark.parametrize(
    "first",
    [
        *range(0, NUM_SEEDS, 20),
        *(pytest.param(n, marks=pytest.mark.long) for n in range(NUM_SEEDS, NUM_SEEDS + NUM_LONG_SEEDS, 20)),
    ],
)
def test_every_invariant_holds_after_every_event_of_these_seeds(place: Path, first: int) -> None:
    failure = first_failure(range(first, first + 20), place)
    assert failure is None, shrunk(failure, place).story()


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ("release too early", "is released when version"),
        ("lost acknowledgement", "is not told that it is on disk"),
        ("acknowledged before the disk has it", "is acknowledged, and not on disk"),
        ("duplicate counted", "made for"),
    ],
)
def test_a_planted_bug_is_found(place: Path, bug: str, says: str) -> None:
    failure = first_failure(range(MOST_SEEDS_FOR_A_BUG), place, bug)
    assert failure is not None
    assert says in failure.problem


def test_a_failing_seed_is_told_with_the_faults_that_it_needs_and_no_others(place: Path) -> None:
    bystanders = [Fault(float(at_s), "messages are late", f"generator-{at_s % 2}", 0, 0.2) for at_s in range(5)]
    culprits = [Fault(0.5, "delivers twice", name, 0, 60.0) for name in ("generator-0", "generator-1")]
    with BUGS["duplicate counted"]():
        failure = simulate(0, sorted([*bystanders, *culprits]), place)
    assert failure.problem
    told = shrunk(failure, place, "duplicate counted")
    assert told.problem
    assert [fault.kind for fault in told.faults] == ["delivers twice"]
    assert str(told.faults[0]) in told.story()


def test_the_shortest_list_that_fails_is_found_among_many() -> None:
    asked: list[list[int]] = []

    def fails(items: object) -> bool:
        asked.append(list(items))  # type: ignore[call-overload]
        return {3, 17} <= set(asked[-1])

    assert shortest(range(20), fails) == [3, 17]
    assert shortest(range(20), lambda items: True) == []
    assert len(asked) < 100


def test_a_seed_tells_the_same_story_every_time(place: Path) -> None:
    for seed in range(4):
        first, again = (run_seed(seed, place) for _ in range(2))
        assert first == again


@pytest.mark.starts
def test_a_seed_tells_the_same_story_in_every_process(place: Path) -> None:
    seed = next(seed for seed in range(100) if len(drawn(str(seed))) > 4)
    command = [sys.executable, "-m", "tests.simulator", "--first", str(seed), "--seeds", "1", "--jobs", "1", "--trace"]
    stories = [
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": order}, stdout=subprocess.PIPE, check=True).stdout
        for order in ("1", "2")
    ]
    assert b"attempt 0" in stories[0]
    assert stories[0].split(b" seeds in ")[0] == stories[1].split(b" seeds in ")[0]


def test_a_run_that_stands_still_for_good_is_noticed(place: Path) -> None:
    forever = [Fault(0.5, "stands still", "controller", 0, 1e9)]
    assert "liveness" in simulate(0, forever, place).problem


def test_virtual_time_goes_from_timer_to_timer_and_a_process_may_die_at_any_await() -> None:
    loop, victim, seen = SimulatedLoop("x"), Process("victim"), list[str]()

    async def work() -> None:
        for number in range(10):
            await asyncio.sleep(100.0)
            seen.append(f"slept {number}")

    async def main() -> None:
        start(loop, victim, work())
        await asyncio.sleep(450.0)
        victim.kill()
        await asyncio.sleep(1000.0)

    loop.run(main(), limit_s=1e6)
    loop.close()
    assert seen == ["slept 0", "slept 1", "slept 2", "slept 3"]
