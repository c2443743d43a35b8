"""Runs whose next job begins before the one that owns the run ends (continuation = "successor")."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.dev_cluster.cluster import DevCluster
from rlhpc.metrics.curves import read_curves
from tests.ring.ring_rewards import open_gate
from tests.ring.rollouts_on_disk import num_sampled_again
from tests.ring.run_kit import Lab
from tests.slurm.cluster_run import ENDLESS, LASTING, SlurmRun, assert_whole, held_by, role_pids, trained_in_vain

pytestmark = [pytest.mark.slurm, pytest.mark.ring, pytest.mark.long, pytest.mark.timeout(1200)]
# Steps of five seconds, most of them waiting: of a real run that samples for minutes it is the smallest.
STEADY = {"data": {"task": "tests.ring.ring_rewards:patient_parity"}}


def site_of(overlap_s: int, minutes: int = 2) -> dict[str, Any]:
    """Of two minutes the next job may begin after one, of five after two."""
    cluster = {"continuation": "successor", "overlap_s": overlap_s}
    return {"cluster": cluster, "common": {"time": f"0:{minutes:02}:00"}}


def seconds_between_steps(run: SlurmRun) -> list[tuple[int, float]]:
    """(step, seconds since the step before), of all steps that count."""
    curve = read_curves(run.layout.tensorboard)["trainer/loss"]
    gaps = np.diff(curve.unix_times_s)
    return list(zip(curve.steps[1:].tolist(), gaps.tolist(), strict=True))


def cost_of_hand_over(run: SlurmRun, resumed: int) -> tuple[float, float]:
    """Seconds before the first step of a resume (steps count from 0), and the median of all others."""
    gaps = seconds_between_steps(run)
    own = next(gap for step, gap in gaps if step == resumed)
    return own, float(np.median([gap for step, gap in gaps if step != resumed]))


def until_taken_over(run: SlurmRun) -> dict[str, Any]:
    """Wait until a job has begun the second attempt and trained two steps; returns that line of attempts.jsonl."""
    run.wait(lambda: len(run.attempts()) > 1 if run.layout.attempts.exists() else False, "another attempt")
    run.wait_more_steps()
    line: dict[str, Any] = run.attempts()[1]
    return line


def test_the_next_job_loads_beside_the_old_one_and_goes_on_at_once(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(
        slurm, lab, "hand-over", run=ENDLESS, checkpoint={"every_steps": 1000}, site=site_of(600, 5), **STEADY
    )
    run.submit()
    first = first_job(run)
    attempt = until_taken_over(run)
    assert attempt["job_id"] > first
    loaded = [event for event in run.events("take_over") if "everything is loaded" in event["text"]]
    assert len(loaded) == 1, run.story()
    took_s, step_s = cost_of_hand_over(run, attempt["resume_step"])
    began, ended = run.events("stand_by")[0]["unix_time_s"], run.events("loaded")[0]["unix_time_s"]
    print(f"{took_s:.2f} s from step to step, other steps {step_s:.2f} s; loaded in {ended - began:.2f} s")
    assert took_s - step_s < ended - began, "to load was not waited for"
    run.stop()
    assert trained_in_vain(run) == 0, "what was trained is in the checkpoint of the hand-over"


def first_job(run: SlurmRun) -> int:
    """The one that was submitted; it submits the next one when it begins."""
    return min(int(path.stem) for path in run.layout.jobs.glob("[0-9]*.json"))


def processes_of(run: SlurmRun, job: int) -> list[int]:
    """Pids of everything of one job, its supervisor and scripts included."""
    found = []
    for process in run.cluster.job_processes():
        with suppress(OSError):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if f"SLURM_JOB_ID={job}".encode() in variables:
                found.append(process.pid)
    return found


def everything(run: SlurmRun, job: int) -> list[int]:
    """Supervisor and scripts too: nobody is left to say how it ended."""
    return processes_of(run, job)


def the_controller(run: SlurmRun, job: int) -> list[int]:
    """Its supervisor has no time left for another attempt of its own."""
    return sorted({*role_pids(run, "controller")} & {*processes_of(run, job)})


@pytest.mark.parametrize("victims", [everything, the_controller])
def test_a_job_killed_while_the_next_one_stands_by_loses_nothing(
    slurm: DevCluster, lab: Lab, tmp_path: Path, victims: Callable[[SlurmRun, int], list[int]]
) -> None:
    run = SlurmRun(
        slurm, lab, f"killed-{victims.__name__}", run=ENDLESS, checkpoint={"every_steps": 1000}, site=site_of(600),
        **LASTING,
    )  # fmt: skip
    run.submit()
    first = first_job(run)
    run.wait(lambda: run.events("stand_by"), "the next job stands by")
    killed_at, trained = time.time(), run.status()["step"]
    pids = victims(run, first)
    assert pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    journals = Path(shutil.copytree(run.layout.rollouts, tmp_path / "rollouts"))
    second = until_taken_over(run)
    run.wait(lambda: run.status().get("step", 0) > trained + 1, "all that was trained is trained again, and more")
    print(f"taken over {second['unix_time_s'] - killed_at:.1f} s after {victims.__name__} was killed")
    assert [attempt["job_id"] for attempt in run.attempts()] == [first, second["job_id"]]
    assert second["job_id"] > first
    assert json.loads(run.layout.owner.read_bytes())["job_id"] == second["job_id"]
    assert second["resume_step"] is None, "nothing was saved"
    run.stop()
    num_again, num_before = num_sampled_again(run.layout.rollouts, journals)
    assert num_before > 0
    assert num_again == 0, "all that was acknowledged is trained again from the journal"


def test_a_run_that_ends_in_the_job_before_frees_the_next_one(slurm: DevCluster, lab: Lab, tmp_path: Path) -> None:
    gate, num_steps = tmp_path / "gate", 16
    held = held_by(gate)
    run = SlurmRun(
        slurm, lab, "hand-over-unneeded", run={"num_steps": num_steps}, data=held["data"],
        rewards={**held["rewards"], "workers_per_replica": 1}, site={**site_of(600), **held["site"]},
    )  # fmt: skip
    run.submit()
    first = first_job(run)
    # A step in six seconds, so that some are left when the next job stands by, and none has taken long.
    for num_judged in range(16, 16 * num_steps, 16):
        open_gate(gate, num_judged)
        until = time.monotonic() + 6.0
        while time.monotonic() < until and not run.events("stand_by"):
            time.sleep(0.2)
    run.wait(lambda: run.events("stand_by"), "the next job stands by")
    open_gate(gate)
    run.wait_complete()
    assert_whole(run, num_steps)
    assert [attempt["job_id"] for attempt in run.attempts()] == [first]
    run.wait(lambda: not slurm.run("squeue", "--noheader"), "nobody is left, the job after the next one included")
    [verdict] = [event for event in run.events("verdict") if event["text"].startswith("not_needed")]
    [end] = [event for event in run.events("verdict") if event["text"].startswith("complete")]
    idle_s = verdict["unix_time_s"] - end["unix_time_s"]
    print(f"the next job left {idle_s:.1f} s after the run was complete")
    assert idle_s < 45, run.story()
