"""A run with a teacher and a judge of its own, as one heterogeneous job and as a job for each of them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from launch.private_slurm.cluster import DevCluster
from rlhpc.transport.service_address import addresses_of
from tests.ring.run_kit import Lab
from tests.slurm.cluster_run import SlurmRun, assert_whole, held_by, role_pids

pytestmark = [pytest.mark.slurm, pytest.mark.ring, pytest.mark.long, pytest.mark.timeout(900)]
SERVED = {"service-0": "teacher", "service-1": "teacher", "service-2": "strict"}
SMALL = {"partition": "gen", "gpu": "h100", "gpus_per_node": 4, "memory_gib_per_gpu": 1}


def served_run(slurm: DevCluster, lab: Lab, placement: str, name: str) -> SlurmRun:
    """A run whose rollouts a teacher scores, held before its first step until its gate is there."""
    model = str(lab.model)
    held = held_by(lab.root / f"{name}.gate")
    services = [
        {"name": "teacher", "kind": "teacher", "path": model, "replicas": 2},
        {"name": "strict", "kind": "judge", "path": model},
    ]
    return SlurmRun(
        slurm, lab, name, placement, run={"num_steps": 6}, data=held["data"], rewards=held["rewards"],
        service=services, algorithm={"distillation_coefficient": 0.1}, admission={"active_sampling": False},
        site={**held["site"], "service.strict": SMALL | {"partition": "train"}},
    )  # fmt: skip


def services_of(run: SlurmRun) -> dict[str, dict[str, Any]]:
    """Rows of the services in the status, by name of the process."""
    return {row["name"]: row for row in run.status().get("roles", []) if row["name"].startswith("service-")}


@pytest.mark.parametrize("placement", ["hetjob", "jobs"])
def test_a_run_with_a_teacher_and_a_judge_ends_although_the_judge_is_lost_on_its_way(
    placement: str, slurm: DevCluster, lab: Lab
) -> None:
    run = served_run(slurm, lab, placement, name := f"served-{placement}")
    run.submit()
    run.wait(lambda: services_of(run).keys() == SERVED.keys(), "all services are there")
    assert {name: row["service"] for name, row in services_of(run).items()} == SERVED
    said = " ".join(run.cli("status", str(run.layout.root)).split())
    assert "teacher: 0 waiting," in said
    assert "strict (judge): 0 waiting," in said
    (judge,) = addresses_of(run.layout.rendezvous, "strict")
    if placement == "hetjob":
        os.kill(judge.pid, signal.SIGKILL)
    else:
        assert "service-2 (strict)" in said, "its job is named"
        before = run.jobs["service-strict"]
        slurm.run("scancel", str(before))
        run.wait(lambda: run.jobs["service-strict"] != before, "its job is submitted again: it was its service's last")
    run.wait(
        lambda: [each.pid for each in addresses_of(run.layout.rendezvous, "strict")] not in ([], [judge.pid]),
        "it is back",
    )
    (run.lab.root / f"{name}.gate").touch()
    run.wait_complete()
    assert_whole(run, 6)
    assert len(run.attempts()) == 1
    run.wait(lambda: not role_pids(run, "service"), "no service is left")


def test_a_replica_joins_a_service_and_is_retired(slurm: DevCluster, lab: Lab) -> None:
    run = served_run(slurm, lab, "jobs", "served-more")
    run.submit()
    run.wait(lambda: services_of(run).keys() == SERVED.keys(), "all services are there")
    run.cli("scale", str(run.layout.root), "--service", "strict", "+1")
    run.wait(lambda: services_of(run).keys() == {*SERVED, "service-3"}, "another judge")
    assert services_of(run)["service-3"]["service"] == "strict"
    assert "service-3 (strict) (elastic)" in run.cli("status", str(run.layout.root))
    assert "answers at" in run.cli("logs", str(run.layout.root), "strict")
    run.cli("scale", str(run.layout.root), "--service", "strict", "-1")
    run.wait(lambda: services_of(run).keys() == SERVED.keys(), "it is retired")
    run.cli("stop", str(run.layout.root), "--now")
    run.wait(lambda: not run.queue(), "no job left")
