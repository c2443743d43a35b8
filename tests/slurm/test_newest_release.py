"""A first look at the newest Slurm that can be had; `make slurm-releases` runs all of tests/slurm on every one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.packages import RELEASE_VARIABLE, RELEASES, Installation, SlurmMissing, obtain
from launch.private_slurm.shape import default_shape
from rlhpc.protocol.errors import RunDirectoryError
from tests.ring.run_kit import Lab
from tests.slurm.cluster_run import SlurmRun, assert_whole
from tests.slurm.stand import Stand, new_cluster

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.ring, pytest.mark.timeout(900)]


def newest() -> Installation:
    """Raises SlurmMissing: none but the machine's own."""
    reasons = []
    for release in reversed(RELEASES):
        try:
            return obtain(release=release)
        except SlurmMissing as error:
            reasons.append(str(error))
    raise SlurmMissing(reasons[0])


@pytest.fixture
def newest_slurm(slurm_installation: Installation) -> Iterator[DevCluster]:
    if chosen := os.environ.get(RELEASE_VARIABLE):
        pytest.skip(f"all tests run on Slurm of {chosen}")
    try:
        installation = newest()
    except SlurmMissing as error:
        pytest.skip(f"no newer Slurm to be had: {error}")
    if installation.version <= slurm_installation.version:
        pytest.skip("all tests run on the newest Slurm that can be had")
    with Stand(lambda: new_cluster(default_shape(1, 2, 1), installation)) as stand:
        try:
            cluster = stand.cluster
        except RunDirectoryError as error:  # what only newer releases ask of a machine
            pytest.skip(f"Slurm {installation.prefix}: {error}")
        yield cluster


def test_a_run_as_one_job_and_one_as_several_are_whole_on_the_newest_slurm(newest_slurm: DevCluster, lab: Lab) -> None:
    runs = [SlurmRun(newest_slurm, lab, f"newest-{each}", each, run={"num_steps": 4}) for each in ("hetjob", "jobs")]
    for run in runs:
        run.submit()
    for run in runs:
        run.wait_complete()
        assert_whole(run, 4)
        assert len(run.attempts()) == 1
    assert not newest_slurm.job_processes()
