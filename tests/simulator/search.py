"""Run many seeds, over several processes, and tell a failing one as a short story."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from tests.simulator.bugs import BUGS
from tests.simulator.faults import drawn
from tests.simulator.settings import inputs_beside
from tests.simulator.shrink import shortest
from tests.simulator.world import Outcome, simulate

MEMORY = Path("/dev/shm")


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory for runs, deleted afterwards."""
    where = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="rlhpc-simulator-", dir=where) as directory, _little_collecting():
        inputs_beside(Path(directory) / "any")  # before several processes want them
        yield Path(directory)


@contextmanager
def _little_collecting() -> Iterator[None]:
    """A fifth of the time would go into looking for garbage among modules."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def run_seed(seed: int, directory: Path, bug: str = "") -> Outcome:
    """A seed with its own faults."""
    with BUGS[bug]() if bug else nullcontext():
        return simulate(seed, drawn(str(seed)), directory)


def shrunk(outcome: Outcome, directory: Path, bug: str = "") -> Outcome:
    """A run of the same seed that fails, perhaps in another way, with as few faults as possible."""
    with BUGS[bug]() if bug else nullcontext():
        faults = shortest(outcome.faults, lambda faults: bool(simulate(outcome.seed, faults, directory).problem))
        return simulate(outcome.seed, faults, directory)


def run_seeds(seeds: Iterable[int], jobs: int, directory: Path, bug: str = "") -> Iterator[Outcome]:
    """The outcomes, in the order of seeds."""
    if jobs == 1:
        for seed in seeds:
            yield run_seed(seed, directory, bug)
        return
    with multiprocessing.get_context("forkserver").Pool(jobs, _begin) as pool:
        yield from pool.imap(partial(_short, directory=directory, bug=bug), seeds, chunksize=4)


def first_failure(seeds: Iterable[int], directory: Path, bug: str = "") -> Outcome | None:
    """The first seed that fails; None: none does."""
    return next((outcome for outcome in run_seeds(seeds, 1, directory, bug) if outcome.problem), None)


def _begin() -> None:
    _little_collecting().__enter__()  # until the end


def _short(seed: int, directory: Path, bug: str) -> Outcome:
    """Each process has its own directory: a seed's is named by its number."""
    return run_seed(seed, directory, bug)
