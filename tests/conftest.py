"""Three streams of tests: those on Slurm and those of whole runs wait much of their time; the others need the cores.

`make test` runs them at once (pytest -n 3); without -n they run one after the other, as ever.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from launch.dev_cluster.packages import RELEASE_VARIABLE

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
WHOLE_RUNS = ("tests/faults/", "tests/ring/", "tests/slurm/")


class Streams(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no type marker
    """Whole streams are dealt out: fixtures of a session are made once."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/slurm/"):
            return "slurm"
        return "runs" if nodeid.startswith(("tests/contracts/", "tests/faults/", "tests/ring/")) else "rest"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slurm-release", metavar="SUITE", help="tests/slurm on Slurm of Debian bookworm, trixie or sid")


def pytest_configure(config: pytest.Config) -> None:
    """Where a shell has put the tests into the background, SIGINT is ignored, by every process that they start too."""
    if release := config.getoption("--slurm-release"):
        os.environ[RELEASE_VARIABLE] = release  # seen by every command that a test starts
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole runs end by themselves when nothing moves any more, however slow the machine."""
    for item in items:
        if item.nodeid.startswith(WHOLE_RUNS) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Streams:
    return Streams(config, log)
