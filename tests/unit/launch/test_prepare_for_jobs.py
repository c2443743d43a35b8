"""A directory is prepared for jobs once, and what lives or is complete is left alone; all of it without Slurm."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launch.checks.preflight import Findings
from launch.cli import main
from launch.commands.scale import Addition, scale_run
from launch.commands.submit import dependency, refuse_small_memory, resume_run, roles_run_here, write_plan
from launch.plan.script import plan_document, plan_report, shared_layout
from launch.plan.site_file import PrologueConfig
from launch.run_directory.begin_attempt import begin_attempt
from launch.run_directory.owner import own_run
from launch.run_directory.prepare import prepare_run_dir, prepare_run_dir_for_jobs
from launch.run_files.records import JobRecord, write_job_record
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config, override, read_resolved
from rlhpc.config.rules import Config
from rlhpc.models.shape import ModelShape
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError, RunDirectoryError
from rlhpc.training.checkpoint_directory import begin, complete
from tests.unit.launch.launchers import launcher_elsewhere, living_launcher
from tests.unit.launch.regenerate_scripts import PAIRS
from tests.unit.launch.site_kit import config_of, plan_of, site_of

pytestmark = pytest.mark.starts

RECORD = JobRecord(12, "hetjob", "hetjob", None, "p", "s", False, 0, 2, "gpu", 100.0)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(f"run.directory={tmp_path / 'run'}")


@pytest.fixture
def layout(config: Config) -> RunLayout:
    return RunLayout(config.run_directory)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))


def nothing(_: str) -> None:
    """Takes lines."""


# ----------------------------------------------------------------------------------------------------------- preparing


def test_a_start_that_was_killed_in_its_first_write_is_in_nobodys_way(config: Config, layout: RunLayout) -> None:
    layout.root.mkdir()
    (layout.root / f".{layout.config.name}.0123456789ab.tmp").write_text('{"config": ')
    with own_run(layout, nothing, may_take_over=False) as owner:
        assert owner.inherited
        assert prepare_run_dir(config, layout, resume=False, fresh=False).index == 0
    assert layout.is_run


def test_a_deletion_that_was_ended_half_way_is_done_by_another_fresh_start_alone(
    config: Config, layout: RunLayout, no_slurm: None
) -> None:
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
    with own_run(layout, nothing, may_take_over=True) as owner:
        assert owner.inherited
        prepare_run_dir(config, layout, resume=False, fresh=True)
    assert layout.is_run
    assert not layout.being_deleted.exists()


@pytest.mark.parametrize("how", [{"resume": True, "fresh": False}, {"resume": False, "fresh": True}])
def test_a_stop_of_a_start_that_is_under_way_is_kept_and_an_earlier_one_is_not(
    config: Config, layout: RunLayout, no_slurm: None, how: dict[str, bool]
) -> None:
    """It was deleted with those of earlier attempts, and `rlhpc stop` waited for the end of the run."""
    prepare_run_dir(config, layout, resume=False, fresh=False)
    layout.stop_request.touch()
    os.utime(layout.stop_request, (0, 0))
    for is_stopped in (False, True):
        with own_run(layout, nothing, may_take_over=True):
            if is_stopped:
                layout.abort_request.touch()
            prepare_run_dir(config, layout, **how)
        assert not layout.stop_request.exists()
        assert layout.abort_request.exists() == is_stopped


def test_a_claim_makes_settings_and_directories_and_no_attempt(config: Config, layout: RunLayout) -> None:
    assert prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False) == ()
    assert read_resolved(layout)[0] == config
    assert not layout.attempts.exists()
    assert layout.checkpoints.is_dir()


def test_a_resume_heeds_nothing_that_was_said_of_earlier_jobs(config: Config, layout: RunLayout) -> None:
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


def test_a_run_that_never_began_may_be_submitted_again_with_other_settings(config: Config, layout: RunLayout) -> None:
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    layout.stop_request.touch()
    other = override(config, ["run.seed=7"])
    prepare_run_dir_for_jobs(other, layout, resume=False, fresh=False)
    assert read_resolved(layout)[0].run.seed == 7
    assert not layout.stop_request.exists()


def test_a_run_that_has_begun_wants_a_word(config: Config, layout: RunLayout) -> None:
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    with pytest.raises(RunDirectoryError, match="exists already; use --resume"):
        prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    with pytest.raises(RunDirectoryError, match=r"cannot change on resume: run\.seed"):
        prepare_run_dir_for_jobs(override(config, ["run.seed=7"]), layout, resume=True, fresh=False)
    changed = prepare_run_dir_for_jobs(override(config, ["run.num_steps=999"]), layout, resume=True, fresh=False)
    assert changed == (f"run.num_steps: {config.run.num_steps} → 999",)
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=True)
    assert not layout.attempts.exists()


def test_an_attempt_whose_line_is_lost_is_known_by_its_events_and_nobody_writes_into_them(
    config: Config, layout: RunLayout
) -> None:
    """Without attempts.jsonl another attempt 0 began, and replaced the history of the first."""
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    assert begin_attempt(layout, job_id=1, restart=0)["attempt"] == 0
    (layout.rollouts / "events_000000.jsonl").write_text("")
    layout.attempts.unlink()
    with pytest.raises(RunDirectoryError, match="exists already; use --resume"):
        prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    assert begin_attempt(layout, job_id=2, restart=0)["attempt"] == 1


def test_an_evaluation_that_comes_or_goes_with_a_resume_is_one_line(
    config: Config, layout: RunLayout, tmp_path: Path
) -> None:
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


def test_a_resume_takes_away_requests_and_the_attempt_that_was_on(config: Config, layout: RunLayout) -> None:
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    layout.jobs.mkdir()
    stale = (layout.stop_request, layout.abort_request, layout.save_request("trainer"))
    for path in stale:
        path.touch()
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    assert not any(path.exists() for path in (*stale, layout.attempt))


def test_a_complete_run_is_resumed_for_more_steps_alone(config: Config, layout: RunLayout) -> None:
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    layout.summary.write_text("{}")
    with pytest.raises(
        RunDirectoryError, match=f"complete, {config.run.num_steps} steps; to continue, set run.num_steps=M"
    ):
        prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    prepare_run_dir_for_jobs(override(config, ["run.num_steps=999"]), layout, resume=True, fresh=False)
    assert not layout.summary.exists()


def test_a_checkpoint_beyond_the_last_step_is_refused_before_anything_is_written(
    config: Config, layout: RunLayout
) -> None:
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    complete(begin(layout.checkpoint(40)), layout.checkpoint(40), {})
    before = layout.config.read_bytes()
    with pytest.raises(RunDirectoryError, match="is already at step 40"):
        prepare_run_dir_for_jobs(override(config, ["run.num_steps=30"]), layout, resume=True, fresh=False)
    assert layout.config.read_bytes() == before


def test_what_is_no_run_is_never_taken(config: Config, layout: RunLayout) -> None:
    layout.root.mkdir()
    (layout.root / "thesis.tex").touch()
    (layout.root / ".lock").touch()  # somebody else's
    for fresh in (True, False):
        with pytest.raises(RunDirectoryError, match="is not a run directory"):
            prepare_run_dir_for_jobs(config, layout, resume=False, fresh=fresh)
    with pytest.raises(RunDirectoryError, match="no run to resume"):
        prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    assert {path.name for path in layout.root.iterdir()} == {"thesis.tex", ".lock"}


def test_a_run_that_has_lost_its_config_is_told_to_get_it_back(config: Config, layout: RunLayout) -> None:
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    begin_attempt(layout, job_id=1, restart=0)
    layout.config.unlink()
    for resume in (True, False):  # neither sends people to the other
        with pytest.raises(
            RunDirectoryError, match=r"choose another run\.directory; or, if it was one, restore config"
        ):
            prepare_run_dir_for_jobs(config, layout, resume=resume, fresh=False)


def test_a_local_launcher_keeps_jobs_away(config: Config, layout: RunLayout) -> None:
    prepare_run_dir(config, layout, resume=False, fresh=False)
    with living_launcher(layout), pytest.raises(RunDirectoryError, match="a run is active here"):
        prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)


def test_a_run_of_another_user_is_not_deleted(
    config: Config, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    owner = layout.root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for take in (prepare_run_dir_for_jobs, prepare_run_dir):
        with pytest.raises(RunDirectoryError, match=f"belongs to uid {owner}: --fresh deletes only your own"):
            take(config, layout, resume=False, fresh=True)
    assert layout.config.exists()


def test_a_launcher_of_another_host_that_has_ended_is_forgotten_with_the_next_claim(
    config: Config, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the status that jobs write would make it live again."""
    monkeypatch.setattr("launch.run_directory.owner.SILENCE_S", 1.0)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    launcher_elsewhere(layout)
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    layout.status.write_text("{}")
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)


@pytest.mark.usefixtures("no_slurm")
def test_without_an_answer_of_slurm_jobs_count_as_living_for_jobs_and_silence_suffices_here(
    config: Config, layout: RunLayout
) -> None:
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


@pytest.mark.parametrize(
    ("after", "options"),
    [
        (None, []),
        ("123", ["--dependency=afterok:123"]),
        ("afterany:123", ["--dependency=afterany:123"]),
        ("afterok:1:2,afterany:3", ["--dependency=afterok:1:2,afterany:3"]),
        ("after:12+5?afternotok:3_1", ["--dependency=after:12+5?afternotok:3_1"]),
    ],
)
def test_after_is_a_job_or_a_dependency(after: str | None, options: list[str]) -> None:
    assert dependency(after) == options


@pytest.mark.parametrize("after", ["", "job", "12 --wrap=x", "afterok:", "-5", "nonsense:12", "afterany:job"])
def test_anything_else_after_is_refused_also_in_a_dry_run(after: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"--after .*legal: a job id, or a dependency"):
        dependency(after)
    pair = PAIRS[0]
    words = ["submit", str(pair.run_file), str(pair.site_file), *pair.overrides, "--dry-run", f"--after={after}"]
    assert main(words) == EXIT_CONFIG
    assert "legal: a job id" in capsys.readouterr().err


def test_singleton_is_refused_with_what_serves_the_purpose() -> None:
    with pytest.raises(ConfigError, match=r"--after singleton: .*legal: afterany:JOB"):
        dependency("singleton")


def test_scripts_are_for_their_owner_alone(tmp_path: Path) -> None:
    plan = plan_of(f"run.directory={tmp_path / 'run'}", cluster={"shared_directory": str(tmp_path)})
    plan.layout.root.mkdir()
    write_plan(plan)
    assert {path.stat().st_mode & 0o777 for path in plan.layout.scripts.iterdir()} == {0o700}


def test_a_directory_that_only_seems_to_be_shared_is_refused(tmp_path: Path) -> None:
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


def test_packages_are_looked_for_only_where_the_roles_run(tmp_path: Path) -> None:
    here = Path(sys.prefix)
    assert roles_run_here(PrologueConfig())
    assert roles_run_here(PrologueConfig(venv=here))
    assert not roles_run_here(PrologueConfig(venv=tmp_path))
    assert not roles_run_here(PrologueConfig(image=tmp_path / "a.sif", code=tmp_path))
    assert not roles_run_here(PrologueConfig(conda=tmp_path, conda_environment="rl"))
    assert roles_run_here(PrologueConfig(conda=tmp_path, conda_environment=str(here)))


def is_refused(config: Config, findings: Findings, place: Path, given: int) -> bool:
    site = site_of(trainer={"gpu": None, "memory_gib_per_gpu": given}, generation={"gpu": None})
    try:
        refuse_small_memory(config, findings, site, place / "site.toml", lambda line: None)
    except ConfigError:
        return True
    return False


def test_gpus_that_are_too_small_are_refused_where_they_are_known(tmp_path: Path) -> None:
    big = {"model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
           "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064}  # fmt: skip
    findings = Findings(big, None, ModelShape.of(big), 4096, None)  # type: ignore[arg-type]  # no prompt is looked at
    config, said = config_of("trainer.device=cuda", "generation.engine=scripted"), list[str]()
    with pytest.raises(ConfigError, match=r"GiB more than the 79\.1 GiB of trainer\.gpu='h100'"):
        refuse_small_memory(config, findings, site_of(), tmp_path / "site.toml", print)
    unknown = site_of(trainer={"gpu": None}, generation={"gpu": None})
    refuse_small_memory(config, findings, unknown, tmp_path / "site.toml", said.append)
    (line,) = said
    assert line.startswith("warning     trainer.memory_gib_per_gpu is not in ")
    said.clear()
    needed = min(  # the first that is not refused leaves nothing for the process itself
        given for given in range(64, 4096) if not is_refused(config, findings, tmp_path, given)
    )
    scarce = site_of(trainer={"gpu": None, "memory_gib_per_gpu": needed}, generation={"gpu": None})
    refuse_small_memory(config, findings, scarce, tmp_path / "site.toml", said.append)
    assert said[0].startswith(f"warning     trainer.memory_gib_per_gpu={needed} in ")
    small = site_of(trainer={"gpu": None, "memory_gib_per_gpu": 64}, generation={"gpu": None})
    with pytest.raises(ConfigError, match=r"trainer\.memory_gib_per_gpu=64 in .*site\.toml: a rank of stage 0 needs "):
        refuse_small_memory(config, findings, small, tmp_path / "site.toml", said.append)


# ---------------------------------------------------------------------------------------------- from a directory alone


def test_a_run_directory_in_the_place_of_a_run_file_is_answered_with_how_to_resume(
    config: Config, layout: RunLayout
) -> None:
    prepare_run_dir(config, layout, resume=False, fresh=False)
    with pytest.raises(ConfigError, match=r"a run directory, not a run file; .*`rlhpc run RUN\.toml --resume`"):
        load_config(layout.root)


def test_a_resume_needs_a_run_and_its_site(config: Config, layout: RunLayout, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("generators", ["2", "+0", "-0", "two", "+1.5", "+", "--2", "+99999"])
def test_a_change_of_generators_has_a_sign_and_a_number(layout: RunLayout, generators: str) -> None:
    with pytest.raises(ConfigError, match=r"legal: \+N to add, -N to retire"):
        scale_run(layout, generators, Addition(), dry_run=False, tell=nothing)


def test_generators_are_added_to_submitted_runs_that_are_not_complete(config: Config, layout: RunLayout) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        scale_run(layout, "+1", Addition(), dry_run=True, tell=nothing)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    with pytest.raises(RunDirectoryError, match="not submitted to Slurm"):
        scale_run(layout, "+1", Addition(), dry_run=True, tell=nothing)
    layout.summary.write_text("{}")
    with pytest.raises(RunDirectoryError, match="the run is complete"):
        scale_run(layout, "+1", Addition(), dry_run=True, tell=nothing)


def test_a_dry_run_of_an_addition_prints_its_script_and_makes_nothing(
    config: Config, layout: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    shared = {"shared_directory": str(tmp_path)}
    document = json.loads(plan_document(plan_of(f"run.directory={layout.root}", cluster=shared)))
    layout.job_plan.write_text(json.dumps(document))
    layout.site.write_text(
        f'[cluster]\nshared_directory = "{tmp_path}"\n[common]\ntime = 60\n[trainer]\n[generation]\npartition = "gen"\n'
    )
    before = sorted(layout.root.rglob("*"))
    words = ["scale", str(layout.root), "--generators", "+2", "--partition", "scavenge", "--time", "30", "--dry-run"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "----- generation-1.sbatch" in out
    for line in ("--partition=scavenge", "--time=0:30:00", "--array=0-1"):
        assert f"#SBATCH {line}\n" in out
    assert sorted(layout.root.rglob("*")) == before
    assert main([*words, "--time", "4:00"]) == EXIT_CONFIG
    assert "--time '4:00': Slurm reads this as minutes and seconds" in capsys.readouterr().err


@pytest.mark.parametrize("how", [{"fresh": False}, {"fresh": True}])
def test_a_model_which_has_a_config_json_too_is_neither_overwritten_nor_deleted(
    tmp_path: Path, config: Config, how: dict[str, bool]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    (model / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(RunDirectoryError, match="exists and is not a run directory"):
        prepare_run_dir_for_jobs(config, RunLayout(model), resume=False, **how)
    assert (model / "config.json").read_text() == '{"model_type": "qwen2"}'
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]
