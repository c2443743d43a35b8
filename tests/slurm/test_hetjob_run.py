"""A run as ONE heterogeneous job: undisturbed, short of time, and with something of it gone."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from launch.private_slurm.cluster import DevCluster
from rlhpc.training.checkpoint_directory import latest_complete
from tests.ring.run_kit import Lab
from tests.slurm.cluster_run import (
    ENDLESS,
    LASTING,
    SlurmRun,
    assert_whole,
    held_by,
    role_pids,
    short_limit,
    trained_in_vain,
)
from tests.slurm.faults import crash_node, start_controller, start_node, stop_controller

pytestmark = [pytest.mark.slurm, pytest.mark.ring, pytest.mark.timeout(900)]


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_a_run_on_three_partitions_is_one_job_and_leaves_nothing(slurm: DevCluster, lab: Lab) -> None:
    device = "cpu" if torch.version.cuda else "auto"  # torch for CUDA refuses GPUs that are none, as it should
    gate = lab.root / "het-whole.gate"
    held = held_by(gate)
    run = SlurmRun(
        slurm,
        lab,
        "het-whole",
        run={"num_steps": 12},
        generation={"num_replicas": 2},
        rewards={**held["rewards"], "num_replicas": 2},
        trainer={"num_ranks": 2, "device": device},
        data=held["data"],
        site={**held["site"], "rewards": {"partition": "gen", "nodes": 2, "memory_gib_per_task": 1}},
    )
    said = run.submit()
    assert f"rlhpc status {run.layout.root}" in said
    run.wait(lambda: len(run.status().get("roles", [])) == 6 and len(role_pids(run, "trainer")) == 2, "all are there")
    hosts = {role["name"]: role["host"] for role in run.status()["roles"]}
    gpus = [environment_of(pid)["CUDA_VISIBLE_DEVICES"] for pid in role_pids(run, "trainer")]
    assert sorted(gpus) == ["0", "1"], "a rank has its own of the two that the job has on the node"
    assert len({environment_of(pid)["TMPDIR"] for pid in role_pids(run, "generator")}) == 2
    assert len({environment_of(pid)["SLURMD_NODENAME"] for pid in role_pids(run, "reward")}) == 2
    gate.touch()
    run.wait_complete()
    assert_whole(run, 12)
    assert set(hosts) >= {"trainer-0", "generator-0", "generator-1", "reward-0", "reward-1"}
    assert [event["event"] for event in run.events()][-1] == "verdict"
    assert run.events("verdict")[0]["text"].startswith("complete")
    assert len(run.attempts()) == 1
    run.wait(lambda: not slurm.job_processes(), "no process left")
    kind, summary = pickle.loads((run.layout.logs / "slurm" / f"{run.jobs['hetjob']}_0_result.pkl").read_bytes())
    assert (kind, summary["steps"]) == ("success", 12)


def test_a_limit_too_short_for_the_run_is_outlived_by_requeues(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(
        slurm,
        lab,
        "het-walltime",
        run=ENDLESS,
        checkpoint={"every_steps": 1000},
        site={"common": {"time": short_limit()}},
        data={"task": "tests.ring.ring_rewards:very_slow_parity"},  # a minute of steps as fast as can be is one of CPU
    )
    run.submit()
    run.wait(lambda: run.layout.attempts.exists() and len(run.attempts()) >= 2, "a second attempt")
    run.wait_more_steps()
    assert run.events("requeue")  # on a machine that is busy a life may be too short for a step
    for event in run.events("attempt_end"):
        trained, saved = re.findall(r"step (\d+)", event["text"])
        assert int(trained) - int(saved) <= 1, event["text"]
    run.stop()
    assert trained_in_vain(run) == 0, run.story()


@pytest.mark.long
def test_a_trainer_that_is_killed_is_started_again_in_the_same_job(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(slurm, lab, "het-trainer-killed", run=ENDLESS, generation={"num_replicas": 2}, **LASTING)
    run.submit()
    run.wait_step(10)
    generators = role_pids(run, "generator")
    [trainer] = role_pids(run, "trainer")
    os.kill(trainer, signal.SIGKILL)
    run.wait(lambda: len(run.attempts()) >= 2, "a second attempt")
    run.wait_attempt(1)
    run.wait_more_steps()
    assert role_pids(run, "generator") == generators, "engines outlast a trainer"
    run.stop()
    assert not run.events("requeue")
    assert "trainer-0" in run.events("retry")[0]["text"]


@pytest.mark.long
def test_a_dead_node_under_a_generator_requeues_the_whole_job(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(
        slurm,
        lab,
        "het-node-down",
        run=ENDLESS,
        generation={"num_replicas": 2},
        site={"generation": {"nodes": 2}},
        **LASTING,
    )
    run.submit()
    run.wait_step(8)
    node = slurm.run(
        "squeue", "--noheader", "--states=R", f"--jobs={run.jobs['hetjob']}", "--format=%P %N"
    ).splitlines()
    [gen] = [line.split()[1] for line in node if line.startswith("gen")]
    victim = slurm.run("scontrol", "show", "hostnames", gen).split()[0]
    began = time.monotonic()
    crash_node(slurm, victim)
    run.wait(lambda: len(run.attempts()) >= 2, "a second attempt")
    print(f"from a dead node to the next attempt: {time.monotonic() - began:.1f} s")
    start_node(slurm, victim)
    run.wait_attempt(1)
    run.wait_more_steps()
    run.stop()


@pytest.mark.long
def test_a_controller_of_slurm_that_is_away_disturbs_nobody(slurm: DevCluster, lab: Lab) -> None:
    # Its trainer has a rank on each of two nodes, which meet without anybody's help.
    two_nodes = {"trainer": {"nodes": 2}}
    run = SlurmRun(slurm, lab, "het-no-slurmctld", run=ENDLESS, trainer={"num_ranks": 2}, site=two_nodes, **LASTING)
    run.submit()
    run.wait_step(5)
    stop_controller(slurm)
    run.wait_more_steps(10)
    start_controller(slurm)
    run.wait_more_steps()
    run.stop()
    assert len(run.attempts()) == 1


@pytest.mark.long
def test_a_cancelled_generation_component_stops_the_run_where_it_can_be_resumed(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(slurm, lab, "het-scancel-part", run=ENDLESS, **LASTING)
    run.submit()
    run.wait_step(8)
    slurm.run("scancel", f"{run.jobs['hetjob']}+2")
    run.wait(lambda: not run.queue(), "no job left")
    assert run.events("verdict")[-1]["text"].startswith("component"), run.story()
    num_attempts = len(run.attempts())
    run.cli("resume", str(run.layout.root))
    run.wait_attempt(num_attempts)
    run.wait_more_steps()
    run.stop()


@pytest.mark.long
def test_stop_saves_and_resume_goes_on(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(slurm, lab, "het-stop", run=ENDLESS, **LASTING)
    run.submit()
    run.wait_step(8)
    said = run.cli("stop", str(run.layout.root), timeout_s=300.0)
    assert "resume" in said
    assert not run.queue()
    step = run.status()["step"]
    assert step >= 8
    run.cli("resume", str(run.layout.root), f"run.num_steps={step + 10}")
    run.wait_complete()
    assert_whole(run, step + 10)
    assert run.attempts()[1]["resume_step"] == step


@pytest.mark.long
def test_stop_now_ends_every_job_and_tells_what_is_lost(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(slurm, lab, "het-stop-now", run=ENDLESS, checkpoint={"every_steps": 1000}, **LASTING)
    run.submit()
    run.wait_step(3)
    said = run.cli("stop", str(run.layout.root), "--now")
    run.wait(lambda: not run.queue(), "no job left")
    run.wait(lambda: not slurm.job_processes(), "no process left")
    saved = latest_complete(run.layout.checkpoints)  # if the step ended within the seconds that it is given
    assert ("there is no checkpoint" if saved is None else f"saved at step {saved[0]}") in said


@pytest.mark.long
def test_settings_that_a_role_refuses_are_not_tried_again(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(slurm, lab, "het-settings", trainer={"num_ranks": 1, "device": "cuda"})
    run.submit()
    run.wait(lambda: not run.queue(), "no job left")
    assert len(run.attempts()) == 1
    text = run.events("verdict")[-1]["text"]
    assert text.startswith("settings: trainer-0"), run.story()
    assert "trainer.device='cuda'" in text


@pytest.mark.long
@pytest.mark.soak
def test_two_runs_at_once_on_the_same_nodes_do_not_touch_each_other(slurm: DevCluster, lab: Lab) -> None:
    runs = [SlurmRun(slurm, lab, f"het-two-{k}", run={"num_steps": 20, "seed": k}, **LASTING) for k in (1, 2)]
    for run in runs:
        run.submit()
    for run in runs:
        run.wait_complete()
        assert_whole(run, 20)
        assert len(run.attempts()) == 1
