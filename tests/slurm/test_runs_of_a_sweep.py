"""Runs of a sweep reach a real queue, and `rlhpc list` finds them there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launch.cli import main
from launch.run_files.records import read_job_records
from rlhpc.config.file import read_resolved
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.slurm.submit_kit import Desk, ids_of


def states(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[str, list[int]]]:
    """State and ids of jobs by name, as `rlhpc list` says them."""
    capsys.readouterr()
    assert main(["list", *words, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    return {run["name"]: (run["state"], sorted({job["job_id"] for job in run["jobs"]})) for run in runs}


def test_seeds_are_submitted_side_by_side_and_listed_from_anywhere(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = desk.site(cluster={"placement": "jobs"})
    assert desk.submit("sweep", site, "--seeds", "7,8") == 0
    assert "submitted   controller" in capsys.readouterr().out
    expected = {}
    for seed in (7, 8):
        layout = desk.lab.layout(f"sweep-seed-{seed}")
        assert read_resolved(layout)[0].run.seed == seed
        expected[f"sweep-seed-{seed}"] = ("queued", sorted(ids_of(layout).values()))
    runs = str(desk.lab.root / "runs")
    assert {name: run for name, run in states(capsys, runs).items() if name in expected} == expected
    assert states(capsys, str(tmp_path)) == expected  # not below that directory, and in the queue


def test_what_is_refused_of_one_run_is_listed_and_resume_submits_the_rest(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    full = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    script = f'#!/bin/bash\ncase "$*" in *half-seed-2*) echo \'{full}\' >&2; exit 1;; esac\nexec {real} "$@"\n'
    (tmp_path / "sbatch").write_text(script)
    (tmp_path / "sbatch").chmod(0o755)
    site = desk.site()
    with monkeypatch.context() as limited:
        limited.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert desk.submit("half", site, "--seeds", "1,2,3") == EXIT_CONFIG
    error = capsys.readouterr().err
    assert "1 run of 3 not submitted:" in error
    assert "half-seed-2: hetjob: sbatch: error: QOSMaxSubmitJobPerUserLimit" in error.replace(
        "sbatch: sbatch:", "sbatch:"
    )
    layouts = {seed: desk.lab.layout(f"half-seed-{seed}") for seed in (1, 2, 3)}
    before = {seed: ids_of(layouts[seed]) for seed in (1, 3)}
    assert not layouts[2].root.exists()
    assert desk.submit("half", site, "--seeds", "1,2,3", "--resume") == EXIT_CONFIG  # two are queued already
    assert "2 runs of 3 not submitted:" in capsys.readouterr().err
    assert {seed: ids_of(layouts[seed]) for seed in (1, 3)} == before
    assert len(read_job_records(layouts[2])) == 1


def test_what_slurm_refuses_of_one_is_refused_for_all(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    site = desk.site(generation={"partition": "gne"})
    assert desk.submit("typo", site, "--sweep", "trainer.learning_rate=1e-6,2e-6") == EXIT_CONFIG
    assert "gne" in capsys.readouterr().err
    assert desk.queued() == []
    assert not list((desk.lab.root / "runs").glob("typo*"))
