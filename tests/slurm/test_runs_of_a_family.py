"""Runs of a family reach a real queue together or in a row, and `rlhpc list` finds them there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launch.cli import main
from launch.run_files.job_records import read_records
from launch.slurm.queue import look_at_jobs
from rlhpc.config_file import read_resolved
from rlhpc.exit_status import EXIT_CONFIG
from tests.slurm.cluster_kit import submit, wait_state, wait_until
from tests.slurm.submit_kit import Desk, ids_of

JOBS = {"placement": "jobs"}


def dependency_of(desk: Desk, job: int) -> str:
    words = desk.cluster.run("scontrol", "--oneliner", "show", "job", str(job)).splitlines()[0].split()
    return next(word.partition("=")[2] for word in words if word.startswith("Dependency="))


def states(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[str, list[int]]]:
    """State and ids of jobs by name, as `rlhpc list` says them."""
    capsys.readouterr()
    assert main(["list", *words, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    return {run["name"]: (run["state"], sorted({job["job_id"] for job in run["jobs"]})) for run in runs}


def test_seeds_are_submitted_side_by_side_and_listed_from_anywhere(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = desk.site(cluster=JOBS)
    assert desk.submit("family", site, "--seeds", "7,8") == 0
    assert "submitted   controller" in capsys.readouterr().out
    expected = {}
    for seed in (7, 8):
        layout = desk.lab.layout(f"family-seed{seed}")
        assert read_resolved(layout)[0].run.seed == seed
        ids = ids_of(layout)
        assert dependency_of(desk, ids["controller"]) == "(null)"
        expected[f"family-seed{seed}"] = ("queued", sorted(ids.values()))
    runs = str(desk.lab.root / "runs")
    assert {name: run for name, run in states(capsys, runs).items() if name in expected} == expected
    assert states(capsys, str(tmp_path)) == expected  # not below that directory, and in the queue
    assert desk.submit("family", site, "--seeds", "6,7,8") == EXIT_CONFIG  # one of them would be new
    assert str(desk.lab.layout("family-seed7").root) in capsys.readouterr().err
    assert not desk.lab.layout("family-seed6").root.exists()


def test_a_chain_begins_each_run_after_the_controller_of_the_one_before(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    site = desk.site(cluster=JOBS)
    assert desk.submit("chain", site, "--seeds", "1,2", "--chain") == 0
    first, second = (ids_of(desk.lab.layout(f"chain-seed{seed}")) for seed in (1, 2))
    for job in second.values():
        assert dependency_of(desk, job).startswith(f"afterany:{first['controller']}")
    capsys.readouterr()
    assert desk.submit("chain", site, "--seeds", "1,2,3", "--chain", "--resume") == 0
    said = capsys.readouterr().out
    assert "left alone  chain-seed1: queued already" in said
    assert ids_of(desk.lab.layout("chain-seed1")) == first
    third = ids_of(desk.lab.layout("chain-seed3"))
    assert dependency_of(desk, third["trainer"]).startswith(f"afterany:{second['controller']}")


@pytest.mark.long
def test_the_next_of_a_chain_does_not_begin_when_the_run_before_it_is_requeued(desk: Desk) -> None:
    """What --chain counts on: a job that goes back into the queue has not ended."""
    first = submit(desk.cluster, "sleep 300", "--partition=cpu", "--requeue")
    wait_state(desk.cluster, first, "RUNNING")
    second = submit(desk.cluster, "sleep 300", "--partition=cpu", f"--dependency=afterany:{first}")
    desk.cluster.run("scontrol", "requeue", str(first))

    def is_back() -> bool:
        rows = look_at_jobs([first, second]).rows
        if not rows:
            return False  # slurmctld did not answer in time
        before, after = rows
        assert (after.state.name, after.reason) in (("PENDING", "Dependency"), ("PENDING", "None"))
        return before.state.name == "RUNNING" and before.restarts == 1

    wait_until(is_back, "the first runs again", 60)
    desk.cluster.run("scancel", str(first))
    wait_until(lambda: [row.state.name for row in look_at_jobs([second]).rows] == ["RUNNING"], "the second runs", 60)


def test_a_submission_that_fails_in_the_middle_says_what_stands_and_resume_does_the_rest(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    full = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    script = f'#!/bin/bash\ncase "$*" in *half-seed3*) echo \'{full}\' >&2; exit 1;; esac\nexec {real} "$@"\n'
    (tmp_path / "sbatch").write_text(script)
    (tmp_path / "sbatch").chmod(0o755)
    site = desk.site()
    with monkeypatch.context() as limited:
        limited.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert desk.submit("half", site, "--seeds", "1,2,3,4") == EXIT_CONFIG
    error = capsys.readouterr().err
    stand = {seed: desk.lab.layout(f"half-seed{seed}") for seed in (1, 2, 3, 4)}
    assert "half-seed3: hetjob: sbatch: error: QOSMaxSubmitJobPerUserLimit" in error.replace(
        "sbatch: sbatch:", "sbatch:"
    )
    assert "2 of 4 runs are submitted and stay queued or running" in error
    for seed in (1, 2):
        assert f"hetjob {ids_of(stand[seed])['hetjob']}: `rlhpc stop {stand[seed].root}`" in error
    assert " --seeds 1,2,3,4 --resume` submits the rest" in error
    assert not stand[4].root.exists()
    before = {seed: ids_of(stand[seed]) for seed in (1, 2)}
    assert desk.submit("half", site, "--seeds", "1,2,3,4", "--resume") == 0
    assert {seed: ids_of(stand[seed]) for seed in (1, 2)} == before
    assert [len(read_records(stand[seed])) for seed in (3, 4)] == [1, 1]


def test_what_slurm_refuses_of_one_is_refused_for_all(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    site = desk.site(generation={"partition": "gne"})
    assert desk.submit("typo", site, "--sweep", "trainer.learning_rate=1e-6,2e-6") == EXIT_CONFIG
    assert "gne" in capsys.readouterr().err
    assert desk.queued() == []
    assert not list((desk.lab.root / "runs").glob("typo*"))
