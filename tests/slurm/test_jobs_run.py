"""A run as one job per role: jobs that start in any order, end alone, come back alone, and generators that join."""

from __future__ import annotations

import os
import signal
import time

import pytest

from launch.private_slurm.cluster import DevCluster
from tests.ring.run_kit import Lab, last_scalar
from tests.slurm.cluster_kit import submit, wait_state
from tests.slurm.cluster_run import ENDLESS, LASTING, SlurmRun, assert_whole, role_pids, short_limit, trained_in_vain
from tests.slurm.faults import crash_node, start_node

pytestmark = [pytest.mark.slurm, pytest.mark.ring, pytest.mark.timeout(900)]
GAP_S = 60  # between the first job and the last


def jobs_run(slurm: DevCluster, lab: Lab, name: str, **sections: object) -> SlurmRun:
    """Endless, unless the sections say otherwise."""
    return SlurmRun(slurm, lab, name, "jobs", **{"run": ENDLESS, **LASTING, **sections})


@pytest.mark.long
@pytest.mark.soak
def test_roles_start_in_any_order_a_minute_apart(slurm: DevCluster, lab: Lab) -> None:
    late = {"extra": [f"--begin=now+{GAP_S}"]}
    runs = [
        jobs_run(slurm, lab, f"jobs-late-{part}", run={"num_steps": 8}, site={part: late})
        for part in ("generation", "trainer")
    ]
    for run in runs:
        run.submit()
    for run in runs:
        assert run.wait_step(1) > GAP_S
        run.wait_complete()
        assert_whole(run, 8)
        assert len(run.attempts()) == 1, run.story()


@pytest.mark.long
def test_a_dead_node_under_the_trainer_restarts_that_job_alone(slurm: DevCluster, lab: Lab) -> None:
    run = jobs_run(slurm, lab, "jobs-trainer-node", checkpoint={"every_steps": 10})
    run.submit()
    run.wait_step(12)
    generators = role_pids(run, "generator")
    victim = slurm.run("squeue", "--noheader", f"--jobs={run.jobs['trainer']}", "--format=%N").strip()
    began = time.monotonic()
    crash_node(slurm, victim)
    run.wait(lambda: len(run.attempts()) >= 2 and run.status().get("attempt", 0) >= 1, "another attempt")
    run.wait_more_steps()
    print(f"from the trainer's dead node to the next step: {time.monotonic() - began:.1f} s")
    assert role_pids(run, "generator") == generators, run.story()
    start_node(slurm, victim)
    run.stop()


@pytest.mark.long
def test_a_trainers_job_that_is_cancelled_ends_the_run_at_once_and_not_as_one_short_of_time(
    slurm: DevCluster, lab: Lab
) -> None:
    run = jobs_run(slurm, lab, "jobs-trainer-cancelled")
    run.submit()
    run.wait_step(3)
    trainer = run.jobs["trainer"]
    slurm.run("scancel", str(trainer))
    verdict = f"component: job {trainer}, the trainer's, was cancelled"
    run.wait(lambda: [each for each in run.events("verdict") if each["text"] == verdict], "the end of the run")
    assert len(run.attempts()) == 1, run.story()
    assert [each for each in run.events("stop") if f"job {trainer} is being ended by Slurm" in each["text"]]
    assert "time limit" not in run.story()
    run.wait(lambda: not slurm.run("squeue", "--noheader", "--states=PD,R", "--format=%i").strip(), "no job is left")


@pytest.mark.long
def test_trainer_and_generators_short_of_time_save_hand_back_and_return(slurm: DevCluster, lab: Lab) -> None:
    short = {"time": short_limit()}
    run = jobs_run(
        slurm, lab, "jobs-short", site={"trainer": short, "generation": short}, checkpoint={"every_steps": 1000}
    )
    run.submit()
    run.wait(lambda: run.events("yield"), "the trainer has the controller save")
    run.wait(lambda: len(run.events("requeue")) >= 2 and len(run.attempts()) >= 2, "both go on in another life")
    run.wait_more_steps()
    run.stop()
    controller = run.layout.job_events(str(run.jobs["controller"])).read_text()
    assert '"requeue"' not in controller
    assert len(run.events("requeue")) >= 2, "that of the trainer, and that of the generator"
    assert trained_in_vain(run) == 0


def test_a_controller_that_is_requeued_finds_its_trainer_and_generators_again(slurm: DevCluster, lab: Lab) -> None:
    run = jobs_run(slurm, lab, "jobs-controller-requeued", checkpoint={"every_steps": 10})
    run.submit()
    run.wait_step(12)
    generators = role_pids(run, "generator")
    slurm.run("scontrol", "requeue", str(run.jobs["controller"]))
    run.wait(lambda: len(run.attempts()) >= 2 and run.status().get("attempt", 0) >= 1, "a second attempt")
    run.wait_more_steps()
    assert role_pids(run, "generator") == generators != [], run.story()
    run.stop()


@pytest.mark.long
def test_a_preempted_elastic_generator_hands_back_what_it_has_and_rejoins(slurm: DevCluster, lab: Lab) -> None:
    run = jobs_run(slurm, lab, "jobs-elastic")
    run.submit()
    run.wait_step(3)
    run.cli("scale", str(run.layout.root), "--generators", "+1", "--partition", "scavenge")
    run.wait(lambda: len(role_pids(run, "generator")) == 2, "the second generator")
    run.wait(lambda: "generator-1" in {role["name"] for role in run.status()["roles"]}, "its hello")
    elastic = run.jobs["generation-1"]
    node = node_of(slurm, elastic)
    partition = "gen" if node.startswith("g") else "train"
    beside = [job for job in (run.jobs["generation"], run.jobs["trainer"]) if node_of(slurm, job) == node]
    wanted = 16 - 4 * len(beside) - 2  # of 16 cores: more than are free while it runs there with its four
    preemptor = submit(
        slurm, "sleep 600", f"--partition={partition}", f"--nodelist={node}", f"--cpus-per-task={wanted}"
    )
    wait_state(slurm, preemptor, "RUNNING")
    assert len(role_pids(run, "generator")) == 1, "it has left"
    run.wait_more_steps(5)
    slurm.run("scancel", str(preemptor))
    run.wait(lambda: [event for event in run.events("life") if event["restart"] == 1], "it is requeued")
    run.wait(lambda: len(role_pids(run, "generator")) == 2, "it is there again")
    run.wait(lambda: "generator-1" in {role["name"] for role in run.status()["roles"]}, "it rejoins")
    run.wait_more_steps()
    run.stop()
    assert len(run.attempts()) == 1
    # What it had sampled came back as prefixes; one lease may have been on its way to it, without a token.
    assert last_scalar(run.layout, "group/regranted_total") <= 1


def node_of(slurm: DevCluster, job: int) -> str:
    return slurm.run("squeue", "--noheader", "--states=R", f"--jobs={job}", "--format=%N").strip()


@pytest.mark.long
def test_a_generator_that_is_killed_is_started_again_in_its_task(slurm: DevCluster, lab: Lab) -> None:
    run = jobs_run(slurm, lab, "jobs-generator-killed")
    run.submit()
    run.wait_step(5)
    [generator] = role_pids(run, "generator")
    os.kill(generator, signal.SIGKILL)
    run.wait(lambda: [pid for pid in role_pids(run, "generator") if pid != generator], "another")
    run.wait_more_steps()
    run.stop()
    assert len(run.attempts()) == 1
