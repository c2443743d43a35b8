"""Runs that must not go on, and say why; runs that go on in another job than they began in."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from launch.private_slurm.cluster import DevCluster
from tests.faults.refusing_disk import COMPILER, ERRORS, KINDS, RefusingDisk
from tests.ring.run_kit import Lab
from tests.slurm.cluster_run import ENDLESS, LASTING, SlurmRun, role_pids, short_limit

pytestmark = [pytest.mark.slurm, pytest.mark.ring, pytest.mark.timeout(900)]
NUM_INSTANTS = int(os.environ.get("RLHPC_TEST_INSTANTS", "3"))  # of a disk that refuses


def wait_for_the_end(run: SlurmRun) -> str:
    """Wait until no job is left; returns the last verdict of the supervisor that owns the run."""
    run.wait(lambda: not run.queue(), "no job left")
    lead = run.jobs.get("hetjob") or run.jobs["controller"]
    own = run.layout.job_events(str(lead)).read_text().splitlines()
    return next(line for line in reversed(own) if '"verdict"' in line)


@pytest.mark.long
def test_a_file_abort_ends_everything_at_once(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(slurm, lab, "end-abort", run=ENDLESS, **LASTING)
    run.submit()
    run.wait_step(3)
    run.layout.abort_request.touch()
    assert "abort" in wait_for_the_end(run)
    run.wait(lambda: not slurm.job_processes(), "no process left")


@pytest.mark.long
def test_a_run_that_fails_again_and_again_without_progress_ends_and_says_so(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(
        slurm, lab, "end-failing", run=ENDLESS, checkpoint={"every_steps": 1000},
        site={"cluster": {"max_retries": 1}}, **LASTING,
    )  # fmt: skip
    run.submit()
    for attempt in range(2):
        run.wait(lambda n=attempt: run.status().get("attempt") == n and run.status()["step"] >= 1, "a step")
        [trainer] = role_pids(run, "trainer")
        os.kill(trainer, signal.SIGKILL)
    text = wait_for_the_end(run)
    assert "given_up" in text
    assert "SIGKILL" in text
    assert len(run.attempts()) == 2


def test_a_run_goes_on_after_the_directory_that_it_was_submitted_from_is_gone(
    slurm: DevCluster, lab: Lab, tmp_path: Path
) -> None:
    """srun, sbatch and Python do not start in a working directory that does not exist."""
    place = tmp_path / "submitted-from"
    place.mkdir()
    run = SlurmRun(slurm, lab, "end-of-a-directory", run=ENDLESS, **LASTING)
    run.cli("submit", str(run.run_file), str(run.site_file), cwd=place)
    run.wait_step(1)
    place.rmdir()
    [trainer] = role_pids(run, "trainer")
    os.kill(trainer, signal.SIGKILL)
    run.wait_attempt(1, step=1)
    run.stop()


@pytest.mark.parametrize("placement", ["hetjob", "jobs"])
def test_a_signal_to_the_controllers_batch_step_stops_the_run(slurm: DevCluster, lab: Lab, placement: str) -> None:
    """Its job counted as failed, and the others waited for another controller."""
    run = SlurmRun(slurm, lab, f"end-by-signal-{placement}", placement, run=ENDLESS, **LASTING)
    run.submit()
    run.wait_step(3)
    lead = str(run.jobs.get("hetjob") or run.jobs["controller"])
    slurm.run("scancel", "--batch", "--signal=TERM", lead)
    assert "stop: " in wait_for_the_end(run)
    assert run.status()["phase"] == "stopped"
    assert slurm.run("squeue", "--noheader", "--states=all", f"--jobs={lead}", "--format=%T").split()[0] == "COMPLETED"
    assert "stopped" in run.cli("status", str(run.layout.root))
    run.cli("resume", str(run.layout.root))
    run.wait_attempt(1, step=1)
    run.stop()


@contextmanager
def standing_still(run: SlurmRun, role: str) -> Iterator[None]:
    """Stop every process of a role again and again: one that stands still is killed and started again by its task."""
    is_over = threading.Event()

    def stop() -> None:
        while not is_over.wait(0.2):
            for pid in role_pids(run, role):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.long
def test_a_run_without_progress_says_who_waits_and_frees_its_nodes(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(
        slurm, lab, "end-stalled", run=ENDLESS, transport={"dead_after_s": 60.0},
        site={"cluster": {"stall_s": 20, "meet_s": 12}}, **LASTING,
    )  # fmt: skip
    run.submit()
    run.wait_step(3)
    with standing_still(run, "generator"):
        text = wait_for_the_end(run)
    assert "stalled: no step for 44 s" in text
    assert "waits for" in text
    assert len(run.attempts()) == 2, "an attempt that had made progress is worth another"
    assert "no step for 20 s" in str(run.events("kill"))


@pytest.mark.long
def test_where_no_generator_is_left_before_the_first_step_nobody_holds_nodes(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(
        slurm, lab, "end-without-generators", run={"num_steps": 400}, weights={"timeout_s": 120.0}, **LASTING
    )
    run.submit()
    run.wait(lambda: role_pids(run, "generator") and role_pids(run, "controller"), "both have been started")
    assert run.status().get("step", 0) == 0
    slurm.run("scancel", f"{run.jobs['hetjob']}+2")
    assert "component: Slurm has ended the generators' component" in wait_for_the_end(run)
    [alone] = [event for event in run.events("stop") if "no generator is left" in event["text"]]
    [end] = run.events("attempt_end")
    held_s = end["unix_time_s"] - alone["unix_time_s"]
    print(f"controller and trainer held their nodes for {held_s:.1f} s")
    assert held_s < 40, run.story()


@pytest.mark.long
def test_a_trainer_that_never_comes_is_named_and_nobody_waits_for_ever(slurm: DevCluster, lab: Lab) -> None:
    late = {"extra": ["--begin=now+3600"]}
    run = SlurmRun(slurm, lab, "end-alone", "jobs", site={"cluster": {"meet_s": 8}, "trainer": late})
    run.submit()
    text = wait_for_the_end(run)
    assert "alone" in text
    assert "trainer-0" in text


@pytest.mark.long
def test_a_site_without_requeue_is_served_by_successors(slurm: DevCluster, lab: Lab) -> None:
    run = SlurmRun(
        slurm, lab, "end-successor", run=ENDLESS, checkpoint={"every_steps": 1000},
        site={"cluster": {"continuation": "successor"}, "common": {"time": short_limit()}}, **LASTING,
    )  # fmt: skip
    run.submit()
    first = run.jobs["hetjob"]
    run.wait(lambda: run.jobs["hetjob"] > first and run.status().get("attempt", 0) >= 1, "another job goes on")
    run.wait_more_steps()
    assert not run.events("requeue")
    run.stop()


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("placement", "seconds"),
    [
        ("hetjob", 1.0),
        ("jobs", 10.0),
        pytest.param("hetjob", 10.0, marks=pytest.mark.soak),
        pytest.param("jobs", 1.0, marks=pytest.mark.soak),
    ],
)
def test_jobs_whose_disk_refuses_again_and_again_go_on(
    slurm: DevCluster, lab: Lab, placement: str, seconds: float
) -> None:
    """Every process of every job, supervisors and sruns included."""
    name, chance = f"{placement}-{seconds:g}", random.Random(time.time_ns())
    disk = RefusingDisk(lab.root, lab.layout(name).root)
    exports = [f"export {key}={value}" for key, value in disk.environment.items()]
    run = SlurmRun(slurm, lab, name, placement, run=ENDLESS, site={"prologue": {"commands": exports}}, **LASTING)
    run.submit()
    run.wait_step(2)
    for number in range(NUM_INSTANTS):
        time.sleep(chance.uniform(0.0, 3.0))
        error, kinds = chance.choice(ERRORS), KINDS if number % 2 else (chance.choice(KINDS),)
        with disk.refuses(error, kinds):
            time.sleep(seconds)
        run.wait_more_steps()
        assert len(run.attempts()) == 1, f"{errno.errorcode[error]} of {kinds}\n{run.story()}"
        print(f"{placement}: {errno.errorcode[error]} of {kinds} for {seconds:g} s: {disk.num_refused} refused so far")
    run.stop()
