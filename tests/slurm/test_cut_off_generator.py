"""A generator whose node the network has lost goes on sampling; its replacement has its name by then."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from launch.private_slurm.processes import require
from launch.private_slurm.shape import Times, default_shape
from rlhpc.protocol.errors import ConfigError
from tests.ring.run_kit import Lab
from tests.slurm.cluster_kit import MakeCluster
from tests.slurm.cluster_run import ENDLESS, LASTING, SlurmRun, role_pids
from tests.slurm.faults import cut, declare_up, heal

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.ring, pytest.mark.timeout(900)]


def test_a_generator_that_was_cut_off_is_replaced_and_fenced_when_it_comes_back(
    make_cluster: MakeCluster, lab: Lab
) -> None:
    try:
        require()
    except ConfigError as error:
        pytest.skip(str(error))
    # While Slurm 24.11 waits for a node that does not answer, its others are silent for longer than 6 s too.
    times = Times(dead_node_s=20)
    cluster = make_cluster(replace(default_shape(1, 2, 1, gpus=1), has_networks=True, times=times))
    site = {"trainer": {"gpus_per_node": 1}, "generation": {"gpus_per_node": 1}}
    transport = {"dead_after_s": 3.0}
    run = SlurmRun(cluster, lab, "cut-off", "jobs", run=ENDLESS, site=site, transport=transport, **LASTING)
    run.submit()
    run.wait_step(8)
    [old] = role_pids(run, "generator")
    node = host_of(run, "generator-0")
    began = time.monotonic()
    cut(cluster, node)
    run.wait(lambda: host_of(run, "generator-0") not in ("", node), "another generator-0")
    run.wait_more_steps()
    print(f"from the cut to the next step: {time.monotonic() - began:.1f} s")
    assert old in role_pids(run, "generator"), "the old one goes on where nobody reaches it"
    heal(cluster, node)
    declare_up(cluster, node)
    run.wait(lambda: old not in role_pids(run, "generator"), "slurmd ends the old one")
    run.wait_more_steps()
    assert host_of(run, "generator-0") != node
    run.stop()
    assert len(run.attempts()) == 1, "neither controller nor trainer was disturbed"


def host_of(run: SlurmRun, name: str) -> str:
    """Where the controller has it; "" if it has not."""
    return next((str(role["host"]) for role in run.status().get("roles", []) if role["name"] == name), "")
