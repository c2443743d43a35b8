"""A run directory is prepared once, by one at a time, for the model and the data that it began with."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import launch.run_directory.inputs
from launch.checks.preflight import Findings
from launch.cli import main
from launch.commands.scale import Addition, scale_run
from launch.commands.submit import dependency, refuse_small_memory, resume_run, roles_run_here, write_plan
from launch.demo.task import write_dataset
from launch.plan.script import plan_document, plan_report, shared_layout
from launch.plan.site_file import PrologueConfig
from launch.run_directory.begin_attempt import begin_attempt
from launch.run_directory.begin_attempt import main as begin_attempt_main
from launch.run_directory.inputs import look_at_inputs, read_inputs
from launch.run_directory.prepare import prepare_run_dir, prepare_run_dir_for_jobs
from launch.run_files.records import JobRecord, write_job_record
from rlhpc.base.ownership import ABANDONED_S, DirectoryLock, Holder, LockHeld, RunOwner, SubmissionLock
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config, override, read_resolved
from rlhpc.config.rules import Config
from rlhpc.models.shape import ModelShape
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError, RunDirectoryError
from rlhpc.training.checkpoint_directory import begin, complete
from tests.full_disk import fill, small_disk
from tests.unit.launch.runs_kit import controller_elsewhere, launcher_elsewhere, living_launcher
from tests.unit.launch.site_kit import PAIRS, config_of, plan_of, site_of
from tests.unit.launch.test_checkpoint_choice import content_of

pytestmark = pytest.mark.starts

# ------------------------ A directory is prepared for jobs once, and what lives or is complete is left alone; all of it

RECORD = JobRecord(12, "hetjob", "hetjob", None, "p", "s", False, 0, 2, "gpu", 100.0)


@pytest.fixture
def config(tmp_path) -> Config:
    return config_of(f"run.directory={tmp_path / 'run'}")


@pytest.fixture
def layout(config) -> RunLayout:
    return RunLayout(config.run_directory)


@pytest.fixture
def no_slurm(monkeypatch, tmp_path) -> None:
    """A machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))


def nothing(_: str) -> None:
    """Takes lines."""


# ----------------------------------------------------------------------------------------------------------- preparing


def test_a_start_that_was_killed_in_its_first_write_is_in_nobodys_way(config, layout):
    layout.root.mkdir()
    (layout.root / f".{layout.config.name}.0123456789ab.tmp").write_text('{"config": ')
    with RunOwner.take(layout, nothing, may_take_over=False) as owner:
        assert owner.inherited
        assert prepare_run_dir(config, layout, resume=False, fresh=False).index == 0
    assert layout.is_run


def test_a_deletion_that_was_ended_half_way_is_done_by_another_fresh_start_alone(config, layout, no_slurm):
    """It was no run any more, and only a person could delete the rest."""
    prepare_run_dir(config, layout, resume=False, fresh=False)

    def end(path: Path) -> None:
        raise KeyboardInterrupt(path)

    with pytest.MonkeyPatch.context() as context:
        context.setattr("shutil.rmtree", end)
        with pytest.raises(KeyboardInterrupt):
            prepare_run_dir(config, layout, resume=False, fresh=True)
    for resume in (False, True):
        with pytest.raises(RunDirectoryError, match="--fresh deletes the rest and starts over"):
            prepare_run_dir(config, layout, resume=resume, fresh=False)
    with RunOwner.take(layout, nothing, may_take_over=True) as owner:
        assert owner.inherited
        prepare_run_dir(config, layout, resume=False, fresh=True)
    assert layout.is_run
    assert not layout.being_deleted.exists()


@pytest.mark.parametrize("how", [{"resume": True, "fresh": False}, {"resume": False, "fresh": True}])
def test_a_stop_of_a_start_that_is_under_way_is_kept_and_an_earlier_one_is_not(config, layout, no_slurm, how):
    """It was deleted with those of earlier attempts, and `rlhpc stop` waited for the end of the run."""
    prepare_run_dir(config, layout, resume=False, fresh=False)
    layout.stop_request.touch()
    os.utime(layout.stop_request, (0, 0))
    for is_stopped in (False, True):
        with RunOwner.take(layout, nothing, may_take_over=True):
            if is_stopped:
                layout.abort_request.touch()
            prepare_run_dir(config, layout, **how)
        assert not layout.stop_request.exists()
        assert layout.abort_request.exists() == is_stopped


def test_a_resume_heeds_nothing_that_was_said_of_earlier_jobs(config, layout):
    """Slurm counts its ids anew after it has lost its state, and so does another cluster."""
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=5000, restart=0)
    layout.jobs.mkdir(exist_ok=True)
    for path in (layout.save_request("12"), layout.jobs / "left_away.json"):
        path.write_text("[]")
    layout.job_events("12").write_text("")
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    assert [path.name for path in layout.jobs.iterdir()] == [layout.job_events("12").name]
    begin_attempt(layout, job_id=12, restart=0)


def test_a_run_that_never_began_may_be_submitted_again_with_other_settings(config, layout):
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    layout.stop_request.touch()
    other = override(config, ["run.seed=7"])
    prepare_run_dir_for_jobs(other, layout, resume=False, fresh=False)
    assert read_resolved(layout)[0].run.seed == 7
    assert not layout.stop_request.exists()


def test_a_run_that_has_begun_wants_a_word(config, layout):
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    with pytest.raises(RunDirectoryError, match="exists already; use --resume"):
        prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    with pytest.raises(
        RunDirectoryError, match=r"cannot change on resume: run\.seed.*legal: the old values, or --fresh, "
    ):
        prepare_run_dir_for_jobs(override(config, ["run.seed=7"]), layout, resume=True, fresh=False)
    changed = prepare_run_dir_for_jobs(override(config, ["run.num_steps=999"]), layout, resume=True, fresh=False)
    assert changed == (f"run.num_steps: {config.run.num_steps} → 999",)
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=True)
    assert not layout.attempts.exists()


def test_an_attempt_whose_line_is_lost_is_known_by_its_events_and_nobody_writes_into_them(config, layout):
    """Without attempts.jsonl another attempt 0 began, and replaced the history of the first."""
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    assert begin_attempt(layout, job_id=1, restart=0)["attempt"] == 0
    (layout.rollouts / "events_000000.log").write_text("")
    layout.attempts.unlink()
    with pytest.raises(RunDirectoryError, match="exists already; use --resume"):
        prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    assert begin_attempt(layout, job_id=2, restart=0)["attempt"] == 1


def test_an_evaluation_that_comes_or_goes_with_a_resume_is_one_line(config, layout, tmp_path):
    one = [f"evaluation.path={tmp_path / 'held-out.jsonl'}"]
    document = override(config, one).model_dump(mode="json")
    document["evaluation"] = [document["evaluation"][0] | {"samples": 4}, document["evaluation"][0] | {"name": "b"}]
    several = Config.model_validate(document)
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    changes = [
        prepare_run_dir_for_jobs(each, layout, resume=True, fresh=False)
        for each in (override(config, one), several, config)
    ]
    assert changes == [
        ("evaluation.name: '' → 'held-out'",),
        ("evaluation.name: 'held-out' → 'held-out, b'", "evaluation.held-out.samples: 1 → 4"),
        ("evaluation.name: 'held-out, b' → ''",),
    ]


def test_a_resume_takes_away_requests_and_the_attempt_that_was_on(config, layout):
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    layout.jobs.mkdir()
    stale = (layout.stop_request, layout.abort_request, layout.save_request("trainer"))
    for path in stale:
        path.touch()
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    assert not any(path.exists() for path in (*stale, layout.attempt))


def test_a_complete_run_is_resumed_for_more_steps_alone(config, layout):
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    layout.summary.write_text("{}")
    with pytest.raises(
        RunDirectoryError, match=f"complete, {config.run.num_steps} steps; to continue, set run.num_steps=M"
    ):
        prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    prepare_run_dir_for_jobs(override(config, ["run.num_steps=999"]), layout, resume=True, fresh=False)
    assert not layout.summary.exists()


def test_a_checkpoint_beyond_the_last_step_is_refused_before_anything_is_written(config, layout):
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    complete(begin(layout.checkpoint(40)), layout.checkpoint(40), {})
    before = layout.config.read_bytes()
    with pytest.raises(RunDirectoryError, match="is already at step 40; legal: 40 or more, --step N"):
        prepare_run_dir_for_jobs(override(config, ["run.num_steps=30"]), layout, resume=True, fresh=False)
    assert layout.config.read_bytes() == before


def test_what_is_no_run_is_never_taken(config, layout):
    layout.root.mkdir()
    (layout.root / "thesis.tex").touch()
    (layout.root / ".lock").touch()  # somebody else's
    for fresh in (True, False):
        with pytest.raises(RunDirectoryError, match="is not a run directory"):
            prepare_run_dir_for_jobs(config, layout, resume=False, fresh=fresh)
    with pytest.raises(RunDirectoryError, match="no run to resume"):
        prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    assert {path.name for path in layout.root.iterdir()} == {"thesis.tex", ".lock"}


def test_a_run_that_has_lost_its_config_is_told_to_get_it_back(config, layout):
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    layout.config.unlink()
    for resume in (True, False):  # neither sends people to the other
        with pytest.raises(
            RunDirectoryError, match=r"choose another run\.directory; or, if it was one, restore config"
        ):
            prepare_run_dir_for_jobs(config, layout, resume=resume, fresh=False)


def test_a_local_launcher_keeps_jobs_away(config, layout):
    prepare_run_dir(config, layout, resume=False, fresh=False)
    with living_launcher(layout), pytest.raises(RunDirectoryError, match="a run is active here"):
        prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)


def test_a_run_of_another_user_is_not_deleted(config, layout, monkeypatch):
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    owner = layout.root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for take in (prepare_run_dir_for_jobs, prepare_run_dir):
        with pytest.raises(RunDirectoryError, match=f"belongs to uid {owner}: --fresh deletes only your own"):
            take(config, layout, resume=False, fresh=True)
    assert layout.config.exists()


def test_a_launcher_of_another_host_that_has_ended_is_forgotten_with_the_next_claim(config, layout, monkeypatch):
    """Or the status that jobs write would make it live again."""
    monkeypatch.setattr("rlhpc.base.ownership.SILENCE_S", 1.0)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    launcher_elsewhere(layout)
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    layout.status.write_text("{}")
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)


@pytest.mark.usefixtures("no_slurm")
def test_without_an_answer_of_slurm_jobs_count_as_living_for_jobs_and_silence_suffices_here(config, layout):
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=12, restart=0)
    write_job_record(layout, RECORD)
    with pytest.raises(RunDirectoryError, match=r"may be queued or running: .*no such command"):
        prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    layout.status.write_text("{}")
    with pytest.raises(RunDirectoryError, match="may be queued or running"):
        prepare_run_dir(config, layout, resume=True, fresh=False)
    layout.status.unlink()
    assert prepare_run_dir(config, layout, resume=True, fresh=False).index == 1


# ------------------------------------------------------------------------------------------------------------ refusals


def test_after_is_a_job_or_a_dependency_and_anything_else_is_refused_also_in_a_dry_run(capsys):
    assert dependency(None) == []
    assert dependency("123") == ["--dependency=afterok:123"]
    for after in ("afterany:123", "afterok:1:2,afterany:3", "after:12+5?afternotok:3_1"):
        assert dependency(after) == [f"--dependency={after}"]
    for after in ("", "job", "12 --wrap=x", "afterok:", "-5", "nonsense:12", "afterany:job"):
        with pytest.raises(ConfigError, match=r"--after .*legal: a job id, or a dependency"):
            dependency(after)
    with pytest.raises(ConfigError, match=r"--after singleton: .*legal: afterany:JOB"):
        dependency("singleton")
    pair = PAIRS[0]
    words = ["submit", str(pair.run_file), str(pair.site_file), *pair.overrides, "--dry-run", "--after=job"]
    assert main(words) == EXIT_CONFIG
    assert "legal: a job id" in capsys.readouterr().err


def test_scripts_are_for_their_owner_alone(tmp_path):
    plan = plan_of(f"run.directory={tmp_path / 'run'}", cluster={"shared_directory": str(tmp_path)})
    plan.layout.root.mkdir()
    write_plan(plan)
    assert {path.stat().st_mode & 0o777 for path in plan.layout.scripts.iterdir()} == {0o700}


def test_a_directory_that_only_seems_to_be_shared_is_refused(tmp_path):
    """Also by way of a link, whose ".." is not where it stands."""
    shared = tmp_path / "shared"
    (shared / "runs").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (shared / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    site = site_of(cluster={"shared_directory": str(shared)})
    for name in ("shared/../run", "shared/link/../run", "shared/runs/../../run"):
        with pytest.raises(ConfigError, match=r"is not in cluster\.shared_directory"):
            plan_report(config_of(f"run.directory={tmp_path / name}"), site)
    inside = config_of(f"run.directory={shared}/runs/../other")
    assert shared_layout(inside, site).root == shared / "other"


def test_packages_are_looked_for_only_where_the_roles_run(tmp_path):
    here = Path(sys.prefix)
    assert roles_run_here(PrologueConfig())
    assert roles_run_here(PrologueConfig(venv=here))
    assert not roles_run_here(PrologueConfig(venv=tmp_path))
    assert not roles_run_here(PrologueConfig(image=tmp_path / "a.sif", code=tmp_path))
    assert not roles_run_here(PrologueConfig(conda=tmp_path, conda_environment="rl"))
    assert roles_run_here(PrologueConfig(conda=tmp_path, conda_environment=str(here)))


def test_gpus_that_are_too_small_are_refused_where_they_are_known(tmp_path):
    big = {"model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
           "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064}  # fmt: skip
    findings = Findings(big, None, ModelShape.of(big), 4096, None)  # no prompt is looked at
    config = config_of("trainer.device=cuda", "generation.engine=scripted")

    def said(**trainer: Any) -> list[str]:
        lines: list[str] = []
        site = site_of(trainer=trainer, generation={"gpu": None} if trainer else {})
        refuse_small_memory(config, findings, site, tmp_path / "site.toml", lines.append)
        return lines

    with pytest.raises(ConfigError, match=r"GiB more than the 79\.1 GiB of trainer\.gpu='h100'"):
        said()
    (line,) = said(gpu=None)
    assert line.startswith("warning     trainer.memory_gib_per_gpu is not in ")
    with pytest.raises(ConfigError, match=r"trainer\.memory_gib_per_gpu=64 in .*: a rank of stage 0 needs ") as refused:
        said(gpu=None, memory_gib_per_gpu=64)
    # What is counted is not refused, and leaves nothing for the process itself.
    counted = math.ceil(float(re.findall(r"needs ([\d.]+) GiB", str(refused.value))[0]) - 8)
    assert said(gpu=None, memory_gib_per_gpu=counted)[0].startswith(f"warning     trainer.memory_gib_per_gpu={counted}")


# ---------------------------------------------------------------------------------------------- from a directory alone


def test_a_run_directory_in_the_place_of_a_run_file_is_answered_with_how_to_resume(config, layout):
    prepare_run_dir(config, layout, resume=False, fresh=False)
    with pytest.raises(ConfigError, match=r"a run directory, not a run file; .*`rlhpc run RUN\.toml --resume`"):
        load_config(layout.root)


def test_a_resume_needs_a_run_and_its_site(config, layout, tmp_path):
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        resume_run(layout, [], after=None, tell=nothing)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    with pytest.raises(ConfigError, match=r"never submitted; .*`rlhpc run RUN\.toml --resume`"):
        resume_run(layout, [], after=None, tell=nothing)
    with pytest.raises(ConfigError, match=r"'b\.toml': legal: at most one site file"):
        resume_run(layout, ["a.toml", "b.toml"], after=None, tell=nothing)
    with pytest.raises(ConfigError, match="a resume cannot leave"):
        resume_run(layout, ["a.toml", f"run.directory={tmp_path / 'other'}"], after=None, tell=nothing)
    with pytest.raises(ConfigError, match=r"run\.title='x': unknown key"):
        resume_run(layout, ["a.toml", "run.title=x"], after=None, tell=nothing)


def test_generators_are_added_to_submitted_runs_that_are_not_complete(config, layout):
    for generators in ("2", "+0", "-0", "two", "+1.5", "+", "--2", "+99999"):
        with pytest.raises(ConfigError, match=r"legal: \+N to add, -N to retire"):
            scale_run(layout, generators, Addition(), dry_run=False, tell=nothing)
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        scale_run(layout, "+1", Addition(), dry_run=True, tell=nothing)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    with pytest.raises(RunDirectoryError, match="not submitted to Slurm"):
        scale_run(layout, "+1", Addition(), dry_run=True, tell=nothing)
    layout.summary.write_text("{}")
    with pytest.raises(RunDirectoryError, match="the run is complete"):
        scale_run(layout, "+1", Addition(), dry_run=True, tell=nothing)


def test_a_dry_run_of_an_addition_prints_its_script_and_makes_nothing(config, layout, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    shared = {"shared_directory": str(tmp_path)}
    document = json.loads(plan_document(plan_of(f"run.directory={layout.root}", cluster=shared)))
    layout.job_plan.write_text(json.dumps(document))
    layout.site.write_text(
        f'[cluster]\nshared_directory = "{tmp_path}"\n[common]\ntime = 60\n[trainer]\n[generation]\npartition = "gen"\n'
    )
    scale = ["scale", str(layout.root), "--generators", "+2", "--dry-run"]
    assert main(scale) == EXIT_CONFIG, "what `scale` refuses, its dry run does"
    assert "the controller's job is not in the queue" in capsys.readouterr().err
    write_job_record(layout, JobRecord(12, "hetjob", "hetjob", None, "plan", "script", False, 0, 1, None, 0.0))
    before = sorted(layout.root.rglob("*"))
    words = ["scale", str(layout.root), "--generators", "+2", "--partition", "scavenge", "--time", "30", "--dry-run"]
    assert main(words) == 0
    out = capsys.readouterr().out
    for command in ("Slurm did not answer: squeue", "scontrol"):
        assert f"not checked what the cluster would refuse: {command}: no such command here" in out
    assert "----- generation-1.sbatch" in out
    for line in ("--partition=scavenge", "--time=0:30:00", "--array=0-1"):
        assert f"#SBATCH {line}\n" in out
    assert "warning" not in out
    assert sorted(layout.root.rglob("*")) == before
    assert main([*scale, "--generators", "+1000"]) == 0
    assert "+1000: 1001 generators share " in capsys.readouterr().out
    assert main([*words, "--time", "4:00"]) == EXIT_CONFIG
    assert "--time '4:00': Slurm reads this as minutes and seconds" in capsys.readouterr().err


@pytest.mark.parametrize("how", [{"fresh": False}, {"fresh": True}])
def test_a_model_which_has_a_config_json_too_is_neither_overwritten_nor_deleted(tmp_path, config, how):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    (model / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(RunDirectoryError, match="exists and is not a run directory"):
        prepare_run_dir_for_jobs(config, RunLayout(model), resume=False, **how)
    assert (model / "config.json").read_text() == '{"model_type": "qwen2"}'
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]


# ------------------ Model and dataset of a run are those that it began with, wherever they lie; what differs is refused

TENSORS = {"a": 3000, "b": 5000, "c": 2}


def write_model(directory: Path, change: str = "") -> None:
    """Two shards, of which one tensor's last number differs if asked for."""
    directory.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text(f'{{"name": "{name}"}}')
    for shard in (1, 2):
        tensors = {f"{name}{shard}": np.arange(size, dtype=np.float32) for name, size in TENSORS.items()}
        if change in tensors:
            tensors[change][-1] += 1
        save_file(tensors, directory / f"model-0000{shard}-of-00002.safetensors")


@pytest.fixture
def config_inputs(tmp_path) -> Config:
    write_model(tmp_path / "model")
    write_dataset(tmp_path / "train.jsonl", 50, seed=0)
    return config_of(
        f"run.directory={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'train.jsonl'}"
    )


@pytest.fixture
def layout_inputs(config_inputs) -> RunLayout:
    layout = RunLayout(config_inputs.run_directory)
    prepare_run_dir(config_inputs, layout, resume=False, fresh=False)
    (layout.rollouts / "segment_000000.h5").touch()
    return layout


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda root: append(root / "model" / "tokenizer.json", " "), "model.path: .*/tokenizer.json has changed"),
        (lambda root: append(root / "model" / "config.json", " "), "model.path: .*/config.json has changed"),
        (lambda root: (root / "model" / "chat_template.jinja").write_text("x"), "chat_template.jinja is new"),
        (lambda root: (root / "model" / "tokenizer_config.json").unlink(), "tokenizer_config.json is missing"),
        (lambda root: write_model(root / "model", "b2"), "model-00002-of-00002.safetensors has changed"),
        (lambda root: append(root / "train.jsonl", "\n"), "data.path: .*/train.jsonl has changed"),
    ],
)
def test_another_model_or_dataset_is_refused_before_anything_moves(
    config_inputs, layout_inputs, tmp_path, change, named
):
    change(tmp_path)
    before = content_of(layout_inputs)
    longer = override(config_inputs, ["run.num_steps=999"])
    for take_up in (prepare_run_dir, prepare_run_dir_for_jobs):
        with pytest.raises(
            RunDirectoryError, match=rf"(?s)differ from those this run started with.*{named}.*restore them"
        ):
            take_up(longer, layout_inputs, resume=True, fresh=False)
    assert begin_attempt_main(["--run-dir", str(layout_inputs.root), "--job-id", "1"]) == EXIT_CONFIG
    assert content_of(layout_inputs) == before


@pytest.mark.parametrize("change", ["a1", "b1", "c1", "a2", "b2", "c2"])
def test_of_large_weights_samples_of_every_tensor_are_compared(
    config_inputs, layout_inputs, tmp_path, change, monkeypatch
):
    monkeypatch.setattr(launch.run_directory.inputs, "FULL_BYTES", 1000)
    monkeypatch.setattr(launch.run_directory.inputs, "SAMPLE_BYTES", 16)
    sampled = look_at_inputs(config_inputs)
    write_model(tmp_path / "model", change)
    now = look_at_inputs(config_inputs)
    other = {name for name, entry in now.model.items() if entry.digest != sampled.model[name].digest}
    assert other == {f"model-0000{change[1]}-of-00002.safetensors"}


def test_a_model_and_a_dataset_that_were_moved_are_the_same(config_inputs, layout_inputs, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "model", tmp_path / "elsewhere" / "model")
    (tmp_path / "train.jsonl").rename(tmp_path / "elsewhere" / "sums.jsonl")
    shutil.rmtree(tmp_path / "model")
    moved = override(
        config_inputs,
        [f"model.path={tmp_path / 'elsewhere' / 'model'}", f"data.path={tmp_path / 'elsewhere' / 'sums.jsonl'}"],
    )
    attempt = prepare_run_dir(moved, layout_inputs, resume=True, fresh=False)
    assert len(attempt.changed) == 2
    assert read_resolved(layout_inputs)[0].model.path == tmp_path / "elsewhere" / "model"


def test_a_run_that_has_noted_nothing_notes_what_is_there_and_may_not_move(config_inputs, layout_inputs, tmp_path):
    layout_inputs.inputs.unlink()
    write_model(tmp_path / "other")
    with pytest.raises(RunDirectoryError, match=r"cannot change on resume: model\.path"):
        prepare_run_dir(
            override(config_inputs, [f"model.path={tmp_path / 'other'}"]), layout_inputs, resume=True, fresh=False
        )
    prepare_run_dir(config_inputs, layout_inputs, resume=True, fresh=False)
    assert read_inputs(layout_inputs) == look_at_inputs(config_inputs)


def test_files_that_nobody_touched_are_not_read_again(config_inputs, layout_inputs, tmp_path, monkeypatch):
    noted = read_inputs(layout_inputs)
    read: list[Path] = []
    blocks_of = launch.run_directory.inputs._blocks_of
    monkeypatch.setattr(launch.run_directory.inputs, "_blocks_of", lambda path: read.append(path) or blocks_of(path))
    assert look_at_inputs(config_inputs, noted) == noted
    assert not read
    shard = tmp_path / "model" / "model-00001-of-00002.safetensors"
    times = shard.stat()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # same inode, same size, same time
    assert look_at_inputs(config_inputs, noted).model[shard.name] != noted.model[shard.name]
    assert read == [shard]


def test_a_node_without_weights_compares_the_rest(config_inputs, layout_inputs, tmp_path):
    for shard in (tmp_path / "model").glob("*.safetensors"):
        shard.unlink()
    assert begin_attempt_main(["--run-dir", str(layout_inputs.root), "--job-id", "1"]) == 0
    append(tmp_path / "model" / "tokenizer.json", " ")
    assert begin_attempt_main(["--run-dir", str(layout_inputs.root), "--job-id", "1"]) == EXIT_CONFIG


def test_what_is_no_safetensors_file_is_read_in_full(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.run_directory.inputs, "FULL_BYTES", 1)
    write_dataset(tmp_path / "train.jsonl", 5, seed=0)
    config = config_of(f"model.path={tmp_path}", f"data.path={tmp_path / 'train.jsonl'}")
    digests = set()
    for content in (b"", b"short", b"\xff" * 4000, b"\x02" + bytes(7) + b"{}", b"\x02" + bytes(7) + b"[]" + b"x" * 99):
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.add(look_at_inputs(config).model["model.safetensors"].digest)
    assert len(digests) == 5


def test_a_damaged_note_says_what_to_do(config_inputs, layout_inputs):
    layout_inputs.inputs.write_text("{")
    with pytest.raises(RunDirectoryError, match=r"inputs\.json: damaged .*delete it"):
        prepare_run_dir(config_inputs, layout_inputs, resume=True, fresh=False)


def test_fresh_deletes_nothing_through_a_link(config_inputs, layout_inputs, tmp_path):
    layout_inputs.root.rename(tmp_path / "scratch")
    layout_inputs.root.symlink_to(tmp_path / "scratch")
    with pytest.raises(RunDirectoryError, match=rf"is a link to {tmp_path / 'scratch'}: --fresh deletes nothing"):
        prepare_run_dir(config_inputs, layout_inputs, resume=False, fresh=True)
    assert layout_inputs.config.exists()
    prepare_run_dir(config_inputs, layout_inputs, resume=True, fresh=False)
    (tmp_path / "scratch").rename(tmp_path / "gone")
    with pytest.raises(RunDirectoryError, match=rf"is a link to {tmp_path / 'scratch'}, which does not exist"):
        prepare_run_dir(config_inputs, layout_inputs, resume=False, fresh=False)


def test_files_of_several_datasets_may_have_one_name_and_each_is_compared(config_inputs, layout_inputs, tmp_path):
    (tmp_path / "more").mkdir()
    write_dataset(tmp_path / "more" / "train.jsonl", 20, seed=1)
    paths = (tmp_path / "train.jsonl", tmp_path / "more" / "train.jsonl")
    tables = (f'{{path="{path}", task="integer_arithmetic", name="d{n}"}}' for n, path in enumerate(paths))
    mixed = override(config_inputs, [f"data=[{', '.join(tables)}]", f"run.directory={tmp_path / 'mixed'}"])
    place = RunLayout(mixed.run_directory)
    prepare_run_dir(mixed, place, resume=False, fresh=False)
    (place.rollouts / "segment_000000.h5").touch()
    assert list(look_at_inputs(mixed).data) == ["0/train.jsonl", "1/train.jsonl"]
    prepare_run_dir(mixed, place, resume=True, fresh=False)
    append(paths[1], "\n")
    with pytest.raises(RunDirectoryError, match=r"data.path: .*more/train.jsonl has changed"):
        prepare_run_dir(mixed, place, resume=True, fresh=False)


# ------------------- The lock of a run directory: one holder, and it holds as long as any process that has inherited it

ROOT = Path(__file__).parents[3]


@pytest.fixture
def layout_lock(tmp_path) -> RunLayout:
    return RunLayout(tmp_path)


def test_of_two_one_gets_the_lock_and_the_other_after_it(layout_lock):
    first = DirectoryLock.take(layout_lock)
    with pytest.raises(LockHeld):
        DirectoryLock.take(layout_lock)
    first.release()
    DirectoryLock.take(layout_lock).release()


def test_a_child_keeps_the_lock_that_its_parent_has_closed_and_is_named(layout_lock):
    lock = DirectoryLock.take(layout_lock)
    words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=(lock.descriptor,)) as child:
        lock.release()
        with pytest.raises(LockHeld):
            DirectoryLock.take(layout_lock)
        assert [identity.pid for identity in DirectoryLock.holders(layout_lock)] == [child.pid]
    DirectoryLock.take(layout_lock).release()


def test_a_lock_of_a_directory_that_was_made_again_excludes_nobody(layout_lock):
    first = DirectoryLock.take(layout_lock)
    layout_lock.lock.unlink()
    assert not first.is_of_the_directory
    second = DirectoryLock.take(layout_lock)
    assert second.is_of_the_directory
    first.release()
    second.release()


def test_who_is_refused_leaves_the_launcher_of_a_living_run_recorded(layout_lock):
    layout_lock.config.write_text('{"config": {}, "hash": ""}')
    with controller_elsewhere(layout_lock):
        recorded = layout_lock.launcher.read_bytes()
        for _ in range(2):  # or the second start would take its own record for nobody's
            with (
                pytest.raises(RunDirectoryError, match="a run is active here on another-host"),
                RunOwner.take(layout_lock, lambda _: None, may_take_over=True),
            ):
                raise AssertionError("two launchers own a run")
        assert layout_lock.launcher.read_bytes() == recorded


def test_where_processes_of_others_are_hidden_none_of_them_is_the_recorded_one():
    """hidepid=1: its directory in /proc is there, and what it holds is for its owner."""
    looks = "import os; from rlhpc.base.processes import ProcessIdentity as P; before = P.of(1); "
    leaves = "os.setgroups([]); os.setgid(65534); os.setuid(65534); "
    as_nobody = shlex.join([sys.executable, "-c", f"{looks}{leaves}print(before.pid, before.is_alive, P.of(1))"])
    script = f"mount -t proc -o hidepid=1 proc /proc && {as_nobody}; exit $?"
    words = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"only root may do that: {done.stderr.strip()}")
    assert (done.returncode, done.stdout.strip()) == (0, "1 False None"), done.stderr


# --------------------------- Of two submissions at once one is refused; what the dead have left behind keeps nobody out


@pytest.fixture
def lock(tmp_path) -> Path:
    return tmp_path / ".run.submitting"


def left_behind(lock: Path, holder: Holder) -> None:
    lock.write_text(holder.to_json())


def holder(unix_time_s: float | None = None, **changes: Any) -> Holder:
    """This process, but for `changes` of its identity."""
    mine = Holder.of_this_process()
    return Holder(replace(mine.process, **changes), unix_time_s or mine.unix_time_s)


def test_the_second_is_refused_and_told_who_and_how_to_remove_it(lock):
    with SubmissionLock(lock, print):
        with (
            pytest.raises(RunDirectoryError, match=f"by pid {os.getpid()} on .*{socket.gethostname()}.*`rm {lock}`"),
            SubmissionLock(lock, print),
        ):
            raise AssertionError
        assert lock.exists()
    assert not list(lock.parent.iterdir())


def test_it_is_given_up_when_a_submission_fails(lock):
    with pytest.raises(KeyboardInterrupt), SubmissionLock(lock, print):
        raise KeyboardInterrupt
    assert not lock.exists()


def test_that_of_a_process_which_has_ended_is_taken_over_with_a_word(lock):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    said: list[str] = []
    left_behind(lock, holder(pid=ended.pid))
    with SubmissionLock(lock, said.append):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    (line,) = said
    begins = f"taken over  {lock}: left behind by pid {ended.pid} on {socket.gethostname()}, "
    assert re.fullmatch(re.escape(begins) + r"\d+ s ago", line)
    assert not list(lock.parent.iterdir())


def test_a_pid_that_was_given_to_another_process_keeps_nobody_out(lock):
    left_behind(lock, holder(start_ticks=0))
    with SubmissionLock(lock, print):
        pass


def test_that_of_an_earlier_boot_of_this_machine_keeps_nobody_out(lock):
    left_behind(lock, holder(boot_id="another"))
    with SubmissionLock(lock, print):
        pass


def test_that_of_another_host_holds_for_ten_minutes(lock):
    there = {"host": "another-host", "boot_id": "another", "pid": 1}
    for behind_s in (0, ABANDONED_S + 1, -ABANDONED_S):  # the clock of that host
        left_behind(lock, holder(time.time() - behind_s, **there))
        with pytest.raises(RunDirectoryError, match="pid 1 on another-host"), SubmissionLock(lock, print):
            raise AssertionError
        then = time.time() - ABANDONED_S - 1
        os.utime(lock, (then, then))
        with SubmissionLock(lock, print):
            pass
    assert not list(lock.parent.iterdir())


def test_one_that_is_half_written_counts_as_held_until_it_is_old(lock):
    lock.touch()
    with pytest.raises(RunDirectoryError, match="by an unknown process"), SubmissionLock(lock, print):
        raise AssertionError
    os.utime(lock, (0, 0))
    with SubmissionLock(lock, print):
        pass


def test_of_many_at_once_one_holds_it(lock):
    """Also where a stale one is to be taken over by all of them."""
    left_behind(lock, holder(start_ticks=0))
    code = (
        "import sys, time; from pathlib import Path; from rlhpc.base.ownership import SubmissionLock\n"
        "from rlhpc.protocol.errors import RunDirectoryError\n"
        "sys.stdin.readline()\n"
        "try:\n    with SubmissionLock(Path(sys.argv[1]), lambda _: None):\n"
        "        print('alone'); sys.stdout.flush(); sys.stdin.readline()\n"
        "except RunDirectoryError:\n    print('refused'); sys.stdout.flush()\n"
    )
    words = [sys.executable, "-c", code, str(lock)]
    racers = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]
    for racer in racers:
        racer.communicate("done\n")
    assert sorted(said) == ["alone"] + ["refused"] * 5


def test_a_full_disk_leaves_no_lock_behind_and_the_error_names_it(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    lock = disk / ".run.submitting"
    with small_disk(disk, 1 << 20):
        fill(disk / "filler", but_bytes=0)
        with pytest.raises(OSError, match="No space left on device") as caught, SubmissionLock(lock, print):
            raise AssertionError
        assert caught.value.filename == str(lock)
        (disk / "filler").unlink()
        with SubmissionLock(lock, print):
            pass
