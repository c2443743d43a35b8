"""Supervised fine-tuning as Slurm jobs: no node for generators, stopped and resumed, a model at its end."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from launch.private_slurm.cluster import DevCluster
from launch.run_directory.inputs import read_inputs
from rlhpc.config.file import read_resolved
from tests.ring.run_kit import Lab, make_lab, summary_of
from tests.ring.test_supervised_run import stage_file
from tests.slurm.cluster_run import SlurmRun


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("placement", ["hetjob", pytest.param("jobs", marks=pytest.mark.long)])
def test_a_stage_is_submitted_stopped_and_resumed_without_generators(
    slurm: DevCluster, lab: Lab, placement: str
) -> None:
    run = SlurmRun(slurm, lab, f"stage-{placement}", placement)
    run.run_file = stage_file(lab, f"stage-{placement}", sft={"num_steps": 1000}, run={"deterministic": False})
    root, model = str(run.layout.root), run.layout.model
    told = run.cli("sft", str(run.run_file), "--site", str(run.site_file))
    assert "submitted" in told
    assert sorted(run.jobs) == (["hetjob"] if placement == "hetjob" else ["controller", "trainer"])
    run.wait_step(3)
    assert "supervised fine-tuning   loss" in run.cli("status", root)
    run.cli("stop", root)
    saved = run.status()["step"]
    assert not Path(model).exists()
    assert 3 <= saved < 1000
    run.cli("resume", root, f"sft.num_steps={saved + 2}", "sft.learning_rate=1e-3", "--wait")
    assert summary_of(run.layout)["steps"] == saved + 2
    assert (model / "config.json").exists()
    assert sorted(path.name for path in run.layout.logs.iterdir()) == ["controller-0", "slurm", "trainer-0"]


@pytest.mark.long
def test_an_rl_run_waits_in_the_queue_for_the_model_that_it_goes_on_from(slurm: DevCluster, lab: Lab) -> None:
    text = stage_file(lab, "unused", sft={"num_steps": 4, "evaluate_every": 2}).read_text()
    stage = {name: values for name, values in tomllib.loads(text).items() if name in ("demonstrations", "sft")}
    run = SlurmRun(slurm, lab, "two-stages", run={"num_steps": 2}, **stage)
    told = run.cli("submit", str(run.run_file), str(run.site_file), "--wait", timeout_s=400)
    assert told.count("submitted") == 2
    first = lab.layout("two-stages-sft")
    assert (summary_of(first)["steps"], summary_of(run.layout)["steps"]) == (4, 2)
    assert read_resolved(run.layout)[0].model.path == first.model
    assert read_inputs(run.layout).model["model.safetensors"].path == str(first.model / "model.safetensors")
    again = run.cli(
        "submit", str(run.run_file), str(run.site_file), "--resume", "run.num_steps=3", "--wait", timeout_s=400
    )
    assert again.count("submitted") == 1
    assert summary_of(run.layout)["steps"] == 3
