"""How tests are shared out among processes (pytest -n, see Makefile); without -n they run one after the other.

Those on Slurm wait much of their time and take the longest: a few shares; each process has a cluster of its own.
Files whose tests share something costly (a cluster of trainer ranks, an engine) are a share too; any other file is one.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from launch.private_slurm.packages import RELEASE_VARIABLE
from tests.starting import StartingIsMarked

settings.register_profile("new examples", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in every run, or a change could fail for what it has not touched: pytest takes others with
# --hypothesis-profile="new examples".
settings.register_profile("any machine", settings.get_profile("new examples"), derandomize=True)
settings.load_profile("any machine")
# What is one share each, in the order in which they are dealt; after them comes what starts whole runs, then what
# starts processes or waits, however few tests it has, then all else.
TOGETHER = (
    "tests/slurm/test_h",
    "tests/slurm/test_j",
    "tests/ring/",
    "tests/contracts/test_trainer_",
    "tests/slurm/",
    "tests/slurm/test_ha",
    "tests/faults/test_exact_restart",
    "tests/unit/sandbox/test_thousands_of_runs",
    "tests/slurm/test_k",
    "tests/unit/launch/test_audit",
    "tests/contracts/test_generation_engine",
)
ROOT = Path(__file__).parents[1]
UNITS = ROOT / "tests" / "unit"
SLOW_MARKS = "mark.starts", "mark.waits", "mark.vllm"
WHOLE_RUNS = ("tests/faults/", "tests/ring/", "tests/slurm/")


class Shares(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no type marker
    """Deals shares to whoever has none left; those that take long first, so that all processes end together.

    pytest-xdist itself deals the shares with most tests first: whole runs, a few to a file, would come last.
    """

    def _split_scope(self, nodeid: str) -> str:
        return max(filter(nodeid.startswith, TOGETHER), key=len, default=nodeid.partition("::")[0])

    def _assign_work_unit(self, node: Any) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=_turn_of), last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: Any) -> str | None:
        """Returns the test that has crashed a process.  Others take over the rest; xdist would deal that test again,
        and shares in which none is left, after which nothing is dealt any more.
        """
        work = self.assigned_work[node]
        pending = [(tests, test) for tests in work.values() for test, is_done in tests.items() if not is_done]
        crashed = pending[0][1] if pending else None
        for tests, test in pending[:1]:
            tests[test] = True
        for share in [share for share, tests in work.items() if all(tests.values())]:
            del work[share]
        super().remove_node(node)
        return crashed

    def schedule(self) -> None:
        """A process that replaces a crashed one begins a test when it knows of another, or that none follows."""
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)


@cache
def _turn_of(share: str) -> int:
    if share in TOGETHER:
        return TOGETHER.index(share)
    if share.startswith(WHOLE_RUNS):
        return len(TOGETHER)
    text = (ROOT / share).read_text(encoding="utf-8")
    is_slow = share.startswith("tests/contracts/") or any(mark in text for mark in SLOW_MARKS)
    return len(TOGETHER) + (1 if is_slow else 2)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slurm-release", metavar="SUITE", help="tests/slurm on Slurm of Debian bookworm, trixie or sid")


def pytest_configure(config: pytest.Config) -> None:
    """Where a shell has put the tests into the background, SIGINT is ignored, by every process that they start too."""
    if "not starts" in config.option.markexpr:
        config.pluginmanager.register(StartingIsMarked())
    if release := config.getoption("--slurm-release"):
        os.environ[RELEASE_VARIABLE] = release  # seen by every command that a test starts
    if not hasattr(config, "workerinput"):  # a worker of xdist has this one's
        cache = os.environ["RLHPC_CACHE"] = tempfile.mkdtemp(prefix="rlhpc-cache-")  # tests leave a user's alone
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-all` imports no file of units without a test of its own: there are hundreds, in each process."""
    if (
        not config.option.markexpr.startswith("long")
        or collection_path.suffix != ".py"
        or UNITS not in collection_path.parents
    ):
        return None
    return "long" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole runs end by themselves when nothing moves any more, however slow the machine."""
    for item in items:
        if item.nodeid.startswith(WHOLE_RUNS) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


def pytest_collection_finish() -> None:
    """What thousands of tests and their modules are made of stays: no collection of garbage looks at it again."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares:
    return Shares(config, log)
