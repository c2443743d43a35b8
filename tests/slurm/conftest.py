"""A real Slurm for tests: one cluster for the session, or one of a test's own.

Every test that asks for either is skipped, with one line, where Slurm neither is nor can be put into a private prefix.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from launch.dev_cluster.cluster import DevCluster
from launch.dev_cluster.layout import LONGEST_ROOT
from launch.dev_cluster.packages import Installation, SlurmMissing, obtain, private
from launch.dev_cluster.shape import ClusterShape, default_shape
from tests.ring.run_kit import Lab, make_lab
from tests.slurm.cluster_kit import MakeCluster
from tests.slurm.submit_kit import Desk


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"slurm", "slurm_accounts", "make_cluster", "slurm_installation"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def slurm_installation() -> Installation:
    """The machine's Slurm, or one unpacked from packages."""
    try:
        return obtain()
    except SlurmMissing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def private_installation() -> Installation:
    """One unpacked from packages, also where Slurm is installed."""
    try:
        return private()
    except SlurmMissing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def slurm(slurm_installation: Installation) -> Iterator[DevCluster]:
    """The session's cluster: partitions train, gen, cpu and scavenge.  A test leaves it without jobs and whole."""
    with ExitStack() as stack:
        yield _start(stack, default_shape(), slurm_installation)


@pytest.fixture(scope="session")
def slurm_accounts() -> Iterator[DevCluster]:
    """One with accounting, small; jobs are charged to the account `lab`."""
    try:
        installation = obtain(has_accounting=True)
    except SlurmMissing as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        yield _start(stack, replace(default_shape(1, 1, 1, gpus=2), has_accounting=True), installation)


@pytest.fixture
def make_cluster(slurm_installation: Installation) -> Iterator[MakeCluster]:
    """Starts clusters of this test alone, which end with it."""
    with ExitStack() as stack:

        def make(shape: ClusterShape | None = None, installation: Installation | None = None) -> DevCluster:
            return _start(stack, shape or default_shape(1, 2, 0, gpus=2), installation or slurm_installation)

        yield make


def _start(stack: ExitStack, shape: ClusterShape, installation: Installation) -> DevCluster:
    root = Path(tempfile.mkdtemp(prefix="rlhpc-slurm-"))
    if len(str(root)) > LONGEST_ROOT:  # sockets go below it
        root.rmdir()
        root = Path(tempfile.mkdtemp(prefix="rlhpc-slurm-", dir="/tmp"))
    stack.callback(shutil.rmtree, root, ignore_errors=True)
    cluster = DevCluster.create(root, shape, installation, dies_with_parent=True)
    return stack.enter_context(cluster)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A model, a dataset and a place for runs, which all nodes see."""
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def desk(slurm: DevCluster, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Where a person submits from: this process's Slurm commands go to the session's cluster."""
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    desk = Desk(slurm, lab)
    yield desk
    desk.clear()
