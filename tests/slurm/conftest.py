"""A real Slurm for tests: one cluster for the session, or one of a test's own.

Every test that asks for either is skipped, with one line, where Slurm neither is nor can be put into a private prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.packages import Installation, SlurmMissing, obtain, private
from launch.private_slurm.shape import ClusterShape, default_shape
from tests.ring.run_kit import Lab, make_lab
from tests.slurm.cluster_kit import MakeCluster
from tests.slurm.stand import Stand, discard, new_cluster
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
def slurm_stand(slurm_installation: Installation) -> Iterator[Stand]:
    with Stand(lambda: new_cluster(default_shape(), slurm_installation)) as stand:
        yield stand


@pytest.fixture
def slurm(slurm_stand: Stand) -> Iterator[DevCluster]:
    """The session's cluster: partitions train, gen, cpu and scavenge.  Whatever a test leaves behind is healed."""
    yield slurm_stand.cluster
    slurm_stand.heal()


@pytest.fixture(scope="session")
def accounts_stand() -> Iterator[Stand]:
    try:
        installation = obtain(has_accounting=True)
    except SlurmMissing as error:
        pytest.skip(str(error))
    shape = replace(default_shape(1, 1, 1, gpus=2), has_accounting=True)
    with Stand(lambda: new_cluster(shape, installation)) as stand:
        yield stand


@pytest.fixture
def slurm_accounts(accounts_stand: Stand) -> Iterator[DevCluster]:
    """One with accounting, small; jobs are charged to the account `lab`.  Healed as the other."""
    yield accounts_stand.cluster
    accounts_stand.heal()


@pytest.fixture
def make_cluster(slurm_installation: Installation) -> Iterator[MakeCluster]:
    """Starts clusters of this test alone, which end with it."""
    with ExitStack() as stack:

        def make(shape: ClusterShape | None = None, installation: Installation | None = None) -> DevCluster:
            cluster = new_cluster(shape or default_shape(1, 2, 0, gpus=2), installation or slurm_installation)
            stack.callback(discard, cluster)
            cluster.start()
            return cluster

        yield make


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A model, a dataset and a place for runs, which all nodes see."""
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def desk(slurm: DevCluster, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Where a person submits from: this process's Slurm commands go to the session's cluster."""
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    return Desk(slurm, lab)
