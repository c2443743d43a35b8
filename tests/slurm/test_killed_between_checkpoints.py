"""A job whose processes are killed long after its last checkpoint samples nothing again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from launch.private_slurm.cluster import DevCluster
from tests.ring.rollouts_on_disk import num_sampled_again
from tests.ring.run_kit import Lab
from tests.slurm.cluster_run import LASTING, SlurmRun, assert_whole, role_pids

pytestmark = [pytest.mark.slurm, pytest.mark.ring, pytest.mark.timeout(900), pytest.mark.long]
ROLES = ("controller", "trainer", "generator")


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def roles(*names: str) -> Callable[[SlurmRun], list[int]]:
    return lambda run: [pid for name in names for pid in role_pids(run, name)]


def everything(run: SlurmRun) -> list[int]:
    """Supervisors and scripts too: nobody is left to say how it ended."""
    return [process.pid for process in run.cluster.job_processes()]


@pytest.mark.parametrize(
    ("victims", "every_steps"),
    [
        pytest.param(roles(*ROLES), 90, id="roles"),
        pytest.param(everything, 1000, id="everything-without-checkpoints"),
    ],
)
def test_forty_steps_since_the_start_are_trained_again_and_nothing_of_them_is_sampled_again(
    slurm: DevCluster,
    lab: Lab,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    victims: Callable[[SlurmRun], list[int]],
    every_steps: int,
) -> None:
    run = SlurmRun(
        slurm,
        lab,
        f"forty-{request.node.callspec.id}",
        run={"num_steps": 100},
        checkpoint={"every_steps": every_steps},
        generation={"num_replicas": 2},
        **LASTING,
    )
    run.submit()
    run.wait_step(40)
    kill(victims(run))
    journals = Path(shutil.copytree(run.layout.rollouts, tmp_path / "rollouts"))
    if victims is everything:
        run.wait(lambda: not run.queue() or len(run.attempts()) >= 2, "Slurm has noticed")
    if victims is everything and not run.queue():
        run.cli("resume", str(run.layout.root))
    run.wait_complete()
    assert_whole(run, 100)
    assert run.attempts()[1]["resume_step"] is None
    num_again, num_before = num_sampled_again(run.layout.rollouts, journals)
    assert num_before >= 40 * 16
    assert num_again == 0
