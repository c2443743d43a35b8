"""An attempt begins in a clean place, from the newest checkpoint that verifies, and never mixes timelines."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import launch.run_directory.begin_attempt as begin_attempt_module
from launch import cli
from launch.commands.submit import write_plan
from launch.plan.jobs import Elastic, plan_elastic
from launch.plan.script import plan_document
from launch.run_directory.begin_attempt import FencedError, begin_attempt, main
from launch.run_directory.prepare import (
    NEWEST,
    SHAPES_NOTHING,
    ResumePoint,
    UnreadableCheckpoint,
    choose,
    prepare_run_dir,
    prepare_run_dir_for_jobs,
    put_aside,
    set_journal_aside,
)
from launch.run_files.plan_file import JobPart, Limits, Part, Share
from launch.run_files.run_state import FIRST_SAVE_S, needed_to_stop_s, read_progress
from launch.slurm.queue import ThisJob
from launch.supervisor.processes import AttemptStarter, BeginError, Signals
from rlhpc.base import patience
from rlhpc.base.files import write_atomically
from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.lost_leases import LostLeaseFile, LostLeases, Suspicion
from rlhpc.config.file import override
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_FAULT, EXIT_FENCED, RunDirectoryError
from rlhpc.training import checkpoint_directory
from rlhpc.training.checkpoint_directory import begin, complete, describe, prune
from tests.full_disk import small_disk
from tests.unit.launch.site_kit import config_of, plan_of, site_of

pytestmark = pytest.mark.starts

# ----------------------------- A resume goes on from what verifies, says what it passes over, and never mixes timelines

STEPS = (8, 10, 12)


def save(layout: RunLayout, step: int, attempt: int = 0, controller: str = "{}") -> Path:
    """A complete checkpoint, as far as a directory can tell."""
    temporary = checkpoint_directory.begin(layout.checkpoint(step))
    (temporary / "trainer").mkdir()
    (temporary / "trainer" / "weights").write_bytes(b"abc" * step)
    (temporary / "controller.json").write_text(controller)
    complete(temporary, layout.checkpoint(step), {"step": step, "attempt": attempt})
    return layout.checkpoint(step)


def flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def nothing(_: str) -> None:
    """Takes lines."""


@pytest.fixture
def config(tmp_path) -> Config:
    return config_of(f"run.directory={tmp_path / 'run'}")


@pytest.fixture
def layout(config) -> RunLayout:
    """A run whose first attempt has left three checkpoints."""
    layout = RunLayout(config.run_directory)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    for step in STEPS:
        save(layout, step)
    return layout


def test_a_run_that_had_no_critic_gets_none_by_a_resume_but_from_the_start(config, layout):
    """The trainer called the checkpoint damaged, after the journal had been set aside."""
    with_critic, before = (
        override(config, ["algorithm.advantage=gae", "admission.active_sampling=false"]),
        layout.config.read_bytes(),
    )
    with pytest.raises(RunDirectoryError, match=r"the checkpoint of step 12 has no critic; legal: .*--from-start"):
        prepare_run_dir(with_critic, layout, resume=True, fresh=False)
    with pytest.raises(RunDirectoryError, match="has no critic"):
        prepare_run_dir_for_jobs(with_critic, layout, resume=True, fresh=False)
    assert layout.config.read_bytes() == before
    from_start = ResumePoint(from_start=True)
    assert prepare_run_dir(with_critic, layout, resume=True, fresh=False, resume_from=from_start).resume_step is None


def names(layout: RunLayout) -> set[str]:
    return {path.name for path in layout.checkpoints.iterdir() if not path.name.startswith(".")}


def content_of(layout: RunLayout) -> dict[Path, bytes]:
    """Every file but those that say who owns the directory."""
    owned = {layout.owner, layout.lock, layout.launcher}
    return {path: path.read_bytes() for path in layout.root.rglob("*") if path.is_file() and path not in owned}


def resume(config: Config, layout: RunLayout, where: ResumePoint = NEWEST) -> tuple[int | None, list[str]]:
    """Step of the attempt that begins, and what was told."""
    told: list[str] = []
    attempt = prepare_run_dir(config, layout, resume=True, fresh=False, resume_from=where, tell=told.append)
    return attempt.resume_step, told


def shorten(checkpoint: Path) -> None:
    (checkpoint / "trainer" / "weights").write_bytes(b"abc")


def lose_complete(checkpoint: Path) -> None:
    (checkpoint / "COMPLETE").unlink()


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "controller.json").unlink()


def garble_complete(checkpoint: Path) -> None:
    (checkpoint / "COMPLETE").write_text('{"attempt": "x", "files": {"controller.json": "two"}}')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip_one_bit(path / "trainer" / "weights"), "trainer/weights: its content is not what was"),
        (shorten, "trainer/weights: 3 bytes where 36 were written"),
        (lose_a_file, "controller.json: is missing"),
        (lose_complete, "has no COMPLETE"),
        (garble_complete, "COMPLETE: is not a checkpoint manifest"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_one_before_is_taken(config, layout, damage, said):
    damage(layout.checkpoint(12))
    step, told = resume(config, layout)
    assert step == 10
    assert names(layout) == {"step_000008", "step_000010", "step_000012.damaged"}
    assert len(told) == 1
    assert told[0].startswith("step_000012 is set aside as step_000012.damaged: ")
    assert said in told[0]
    assert json.loads(layout.attempts.read_text().splitlines()[-1])["set_aside"] == told


def test_a_file_more_than_was_written_is_no_damage(config, layout):
    (layout.checkpoint(12) / "trainer" / ".nfs0001").touch()
    assert resume(config, layout) == (12, [])


def test_one_that_cannot_be_read_is_not_taken_for_damaged(config, layout, monkeypatch):
    monkeypatch.setattr("rlhpc.base.patience.DISK_PATIENCE_S", 1.0)
    weights = layout.checkpoint(12) / "trainer" / "weights"
    weights.rename(weights.with_name("kept"))
    weights.symlink_to(weights)  # root, too, is refused to read this, as others are by permissions
    before = names(layout)
    with pytest.raises(UnreadableCheckpoint, match=r"step_000012/.*Too many levels.*may be sound.*--step N"):
        resume(config, layout)
    assert main(["--run-dir", str(layout.root), "--job-id", "1"]) == EXIT_FAULT  # another try may help
    assert names(layout) == before
    assert len(layout.attempts.read_text().splitlines()) == 1
    weights.unlink()
    weights.with_name("kept").rename(weights)
    assert resume(config, layout)[0] == 12


def test_when_none_is_sound_nothing_begins_and_nothing_moves(config, layout, capsys):
    for step in STEPS:
        flip_one_bit(layout.checkpoint(step) / "trainer" / "weights")
    before = content_of(layout)
    longer = override(config, ["run.num_steps=99"])
    for take_up in (prepare_run_dir, prepare_run_dir_for_jobs):
        with pytest.raises(RunDirectoryError) as refusal:
            take_up(longer, layout, resume=True, fresh=False)
        for word in ("step_000008/", "step_000010/", "step_000012/", "--from-start", str(layout.root)):
            assert word in str(refusal.value)
    assert main(["--run-dir", str(layout.root), "--job-id", "1"]) == EXIT_CONFIG  # Slurm's next attempt would not help
    assert f"rlhpc resume {layout.root} --from-start" in capsys.readouterr().err
    assert content_of(layout) == before


def test_of_a_checkpoint_too_large_for_a_login_node_sizes_are_compared(layout):
    told: list[str] = []
    flip_one_bit(layout.checkpoint(12) / "controller.json")
    assert choose(layout, NEWEST, told.append, read_up_to_bytes=10).step == 12
    assert told == ["step_000012 has 0 GB: file sizes are checked now, contents when the job starts"]
    shorten(layout.checkpoint(12))
    assert choose(layout, NEWEST, told.append, read_up_to_bytes=10).step == 10
    flip_one_bit(layout.checkpoint(10) / "controller.json")
    assert begin_attempt(layout, job_id=1, restart=0)["resume_step"] == 8


def test_from_start_sets_everything_aside(config, layout):
    flip_one_bit(layout.checkpoint(10) / "controller.json")
    step, told = resume(config, layout, ResumePoint(from_start=True))
    assert step is None
    assert names(layout) == {f"step_{number:06d}.undone" for number in STEPS}
    assert len(told) == 3
    assert resume(config, layout) == (None, [])  # they stay aside


def test_a_resume_says_what_stays_quarantined_and_lifts_it_if_asked_to(config, layout):
    lines = [
        Suspicion("7", 0, 0, workers=5, source="train.jsonl:8", why="parity: worker died: signal SIGSEGV"),
        Suspicion("9", 5, 4, why="generator-0 died or fell silent"),
        Suspicion("8", 1, 4),
    ]
    book = LostLeases()
    book.unwritten = [*lines]
    LostLeaseFile(layout.lost_leases).append(book)
    last = "record 9: 5 generators died sampling it, the last: generator-0 died or fell silent"
    stays = f"2 prompts of earlier attempts stay quarantined ({last}); --lift-quarantine samples them again"
    assert resume(config, layout)[1] == [stays]
    told: list[str] = []
    lifting = ResumePoint(lift_quarantine=True)
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False, resume_from=lifting, tell=told.append)
    assert told == [f"the quarantine of 2 prompts is lifted ({last})"]
    assert LostLeaseFile(layout.lost_leases).suspicions() == []
    assert resume(config, layout, lifting)[1] == ["no prompt is quarantined"]
    assert resume(config, layout)[1] == []


@pytest.fixture
def journal(layout) -> list[str]:
    """Files of a journal, as far as a directory can tell, beside a segment."""
    files = ["events_000000.log", "journal_000000.log", "journal_000001.log", "partials_000000.log"]
    for name in [*files, "segment_000000.h5"]:
        (layout.rollouts / name).write_bytes(name.encode())
    return files


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.*") if path.is_file())


def test_a_resume_leaves_the_journal_where_it_is(config, layout, journal):
    flip_one_bit(layout.checkpoint(12) / "controller.json")
    assert resume(override(config, ["run.num_steps=900"]), layout)[0] == 10
    assert files_of(layout.rollouts) == [*journal, "segment_000000.h5"]


def test_a_journal_that_cannot_be_set_aside_is_said_and_stays(layout, journal):
    (layout.rollouts / "lost_attempt_1").touch()
    told: list[str] = []
    with pytest.raises(RunDirectoryError, match="its journal cannot be set aside"):
        set_journal_aside(layout, ResumePoint(no_replay=True), (), 1, told.append)
    assert (files_of(layout.rollouts), told) == ([*journal, "segment_000000.h5"], [])


@pytest.mark.parametrize(
    ("where", "changes", "why"),
    [
        (ResumePoint(from_start=True), [], "--from-start: "),
        (ResumePoint(step=10), [], "--step 10: "),
        (ResumePoint(no_replay=True), [], "--no-replay: "),
        (NEWEST, ["trainer.learning_rate=0.5", "run.num_steps=900"], "trainer.learning_rate changed: "),
        (NEWEST, ["curriculum.solved_rest_epochs=2"], "curriculum.solved_rest_epochs changed: "),
        (
            NEWEST,
            ["algorithm.advantage=rloo", "trainer.adam_eps=1e-6"],
            "algorithm.advantage, trainer.adam_eps changed: ",
        ),
    ],
)
@pytest.mark.parametrize("is_for_jobs", [False, True])
def test_who_wants_other_steps_than_those_of_the_journal_finds_it_set_aside(
    config, layout, journal, where, changes, why, is_for_jobs
):
    told: list[str] = []
    prepare = prepare_run_dir_for_jobs if is_for_jobs else prepare_run_dir
    prepare(override(config, changes), layout, resume=True, fresh=False, resume_from=where, tell=told.append)
    assert files_of(layout.rollouts) == ["segment_000000.h5"]
    assert files_of(layout.rollouts / "lost_attempt_1") == journal
    assert told[-1].startswith(f"{why}steps after the checkpoint are not repeated")
    assert told[-1].endswith("set aside in lost_attempt_1")


@pytest.mark.parametrize(
    "changes",
    [
        ["generation.num_replicas=4", "generation.kv_cache_bytes=1000000", "rewards.num_replicas=3"],
        ["trainer.num_ranks=4", "trainer.recompute_activations=full"],
        ["trainer.num_ranks=2", "trainer.tensor_parallel=2", "admission.lease_deadline_s=60"],
    ],
)
def test_who_wants_the_same_steps_by_other_processes_keeps_the_journal(config, layout, journal, changes):
    prepare_run_dir(override(config, changes), layout, resume=True, fresh=False)
    assert files_of(layout.rollouts) == sorted([*journal, "segment_000000.h5"])
    assert not (layout.rollouts / "lost_attempt_1").exists()


def test_every_key_that_is_said_to_shape_no_step_is_a_key():
    for section, names in SHAPES_NOTHING.items():
        assert set(names) <= set(Config.model_fields[section].annotation.model_fields), section


def test_a_run_that_is_complete_begins_once_more_where_it_is_told_to(config, layout):
    layout.summary.write_text("{}")
    with pytest.raises(RunDirectoryError, match="complete"):
        prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False)
    prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False, resume_from=ResumePoint(step=10))
    assert not layout.summary.exists()
    assert begin_attempt(layout, job_id=1, restart=0)["resume_step"] == 10


def test_a_checkpoint_of_an_undone_timeline_is_in_nobodys_way(config, layout):
    resume(config, layout, ResumePoint(step=8))
    (layout.checkpoints / "step_000010.undone").rename(layout.checkpoint(10))
    save(layout, 10, attempt=1)
    assert resume(config, layout)[0] == 10
    assert "step_000010.undone" in names(layout)


def test_an_export_says_which_checkpoints_it_passes_over(config, layout, tmp_path, capsys):
    lose_a_file(layout.checkpoint(STEPS[0]))
    assert cli.main(["export", str(layout.root), str(tmp_path / "out")]) == EXIT_CONFIG
    told = capsys.readouterr().err
    assert "no usable checkpoint" in told
    reasons = [told.partition(f"step_{step:06d} is skipped: ")[2].partition("\n")[0] for step in STEPS]
    assert [reason.rpartition("/")[2] for reason in reasons] == ["controller.json: is missing"] + [
        "trainer.json: is missing"
    ] * (len(STEPS) - 1)


def test_an_older_checkpoint_is_taken_by_name_and_newer_ones_are_undone(config, layout):
    with pytest.raises(RunDirectoryError, match=r"--step 9: .* available: 8, 10, 12"):
        resume(config, layout, ResumePoint(step=9))
    flip_one_bit(layout.checkpoint(10) / "controller.json")
    with pytest.raises(RunDirectoryError, match=r"--step 10: .*controller\.json"):
        resume(config, layout, ResumePoint(step=10))
    assert names(layout) == {f"step_{number:06d}" for number in STEPS}
    step, told = resume(config, layout, ResumePoint(step=8))
    assert step == 8
    assert names(layout) == {"step_000008", "step_000010.undone", "step_000012.undone"}
    assert len(told) == 2


def test_a_checkpoint_that_comes_back_after_its_steps_were_undone_is_never_taken(config, layout):
    flip_one_bit(layout.checkpoint(12) / "controller.json")
    assert resume(config, layout)[0] == 10
    back = layout.checkpoints / "step_000012.damaged"
    flip_one_bit(back / "controller.json")
    back.rename(layout.checkpoint(12))
    assert describe(layout.checkpoints)[-1].problem.endswith("attempt 1 resumed before it and undid its steps")
    step, told = resume(config, layout)
    assert step == 10
    assert "step_000012 is set aside as step_000012.undone" in told[0]
    (layout.checkpoints / "step_000012.undone").rename(layout.checkpoint(12))
    with pytest.raises(RunDirectoryError, match=r"--step 12: .*undid its steps"):
        resume(config, layout, ResumePoint(step=12))


def test_a_checkpoint_that_a_stale_controller_completes_too_late_is_never_taken(config, layout):
    assert resume(config, layout, ResumePoint(step=8))[0] == 8
    save(layout, 14, attempt=0)  # of the controller that was thought dead
    assert resume(config, layout)[0] == 8
    assert "step_000014.undone" in names(layout)


def test_pruning_never_counts_what_is_damaged_or_of_another_timeline(config, layout):
    flip_one_bit(layout.checkpoint(10) / "controller.json")
    assert prune(layout.checkpoints, 2) == []
    assert names(layout) == {"step_000008", "step_000010.damaged", "step_000012"}
    resume(config, layout, ResumePoint(step=8))
    (layout.checkpoints / "step_000012.undone").rename(layout.checkpoint(12))
    save(layout, 14, attempt=1)
    assert prune(layout.checkpoints, 2) == []
    assert [state.step for state in describe(layout.checkpoints)] == [8, 14]


def test_names_of_what_is_set_aside_are_never_used_twice(config, layout):
    for number in range(3):
        flip_one_bit(layout.checkpoint(12) / "controller.json")
        assert put_aside(choose(layout, NEWEST, nothing), nothing)
        save(layout, 12)
        assert f"step_000012.damaged{f'-{number + 1}' if number else ''}" in names(layout)


def test_a_supervisor_says_what_an_attempt_passed_over_and_ends_where_none_is_sound(layout):
    controller = Part("controller", (Share("controller", 1, 0),), True, (), 0, (sys.executable,), {}, {})
    limits = Limits(meet_s=10, stall_s=10, max_retries=1)
    plan = JobPart(layout, layout.job_plan, "jobs", "controller", False, (controller,), limits, "requeue", ())
    job, said = ThisJob.of({"SLURM_JOB_ID": "12"}), []
    flip_one_bit(layout.checkpoint(12) / "controller.json")
    starter = AttemptStarter(plan, job, lambda event, text: said.append((event, text)), Signals(), None)
    attempt = starter.begin(lambda: False)
    assert attempt.resume_step == 10
    assert [event for event, _ in said] == ["checkpoint"]
    assert said[0][1].startswith("step_000012 is set aside as step_000012.damaged: ")
    for step in (8, 10):
        flip_one_bit(layout.checkpoint(step) / "controller.json")
    with pytest.raises(BeginError, match=r"(?s)no checkpoint can be resumed from.*--from-start") as error:
        starter.begin(lambda: False)
    assert error.value.status == EXIT_CONFIG


# -------------------- An attempt begins in a clean place, with keys of its own, where the last complete checkpoint ends


@pytest.fixture
def config_begin(tmp_path) -> Config:
    return config_of(f"run.directory={tmp_path / 'run'}", "trainer.num_ranks=2", "generation.num_replicas=2")


@pytest.fixture
def layout_begin(config_begin) -> RunLayout:
    layout = RunLayout(config_begin.run_directory)
    prepare_run_dir_for_jobs(config_begin, layout, resume=False, fresh=False)
    layout.job_plan.write_text(plan_document(plan_of("generation.num_replicas=2")))
    return layout


def save_begin(layout: RunLayout, step: int) -> None:
    """A complete checkpoint, as far as a directory can tell."""
    temporary = begin(layout.checkpoint(step))
    (temporary / "weights").write_bytes(b"abc")
    complete(temporary, layout.checkpoint(step), {})


def test_a_launcher_that_was_overtaken_begins_nothing(layout_begin):
    """Without Slurm, whose ids would tell who came later."""
    first = begin_attempt(layout_begin, job_id=0, restart=0)
    Fence.take(layout_begin, 1)  # another machine takes this one for dead
    before = layout_begin.attempts.read_text(), layout_begin.owner.read_text()
    with pytest.raises(FencedError, match="was taken over by 1-"):
        begin_attempt(layout_begin, job_id=0, restart=0, follows=first["fence"])
    assert (layout_begin.attempts.read_text(), layout_begin.owner.read_text()) == before


def test_attempts_are_counted_and_go_on_where_the_last_checkpoint_ends(layout_begin):
    first = begin_attempt(layout_begin, job_id=7, restart=0)
    assert (first["attempt"], first["resume_step"], first["job_id"], first["restart"]) == (0, None, 7, 0)
    save_begin(layout_begin, 4)
    save_begin(layout_begin, 8)
    (layout_begin.checkpoint(12)).mkdir()  # never finished
    second = begin_attempt(layout_begin, job_id=7, restart=1)
    assert (second["attempt"], second["resume_step"], second["restart"]) == (1, 8, 1)
    assert json.loads(layout_begin.attempt.read_bytes()) == second
    lines = [json.loads(line) for line in layout_begin.attempts.read_text().splitlines()]
    assert [(line["index"], line["resume_step"], line["job_id"], line["restart"]) for line in lines] == [
        (0, None, 7, 0),
        (1, 8, 7, 1),
    ]


def test_how_long_saving_took_is_known_to_later_attempts_which_have_not_saved_yet(layout_begin):
    """A job asks its controller early enough to save, before its time limit."""
    said = {"phase": "training", "step": 3, "roles": [], "unix_time_s": 0.0}

    def needed_s(restart: int, **more: float) -> float:
        begin_attempt(layout_begin, job_id=7, restart=restart)
        layout_begin.status.write_text(json.dumps({**said, **more}))
        return needed_to_stop_s(read_progress(layout_begin), 36_000.0)

    assert needed_s(0) == 30 + FIRST_SAVE_S
    assert needed_s(1, save_s=1300.0) == 30 + 2 * 1300
    assert needed_s(2) == 30 + 2 * 1300
    assert needed_s(3) == 30 + 2 * 1300
    assert needed_s(4, save_s=100.0) == 30 + 2 * 100, "as it is now"


def test_a_save_that_took_long_once_leaves_later_lives_time_to_train_and_is_forgotten(layout_begin):
    """As while a file server was away: jobs of an hour stopped as soon as they had begun, for ever."""
    said = {"phase": "training", "step": 3, "roles": [], "unix_time_s": 0.0}

    def needed_s(restart: int, **more: float) -> float:
        begin_attempt(layout_begin, job_id=7, restart=restart)
        layout_begin.status.write_text(json.dumps({**said, **more}))
        return needed_to_stop_s(read_progress(layout_begin), 3600.0)

    begin_attempt(layout_begin, job_id=7, restart=0)
    layout_begin.status.write_text(json.dumps({**said, "save_s": 2000.0}))
    assert needed_s(1) == 30 + 1800
    assert needed_s(2, save_s=20.0) == 30 + 40
    assert needed_s(3) == 30 + 40


def test_what_an_earlier_attempt_has_left_behind_is_gone(layout_begin):
    begin_attempt(layout_begin, job_id=7, restart=0)
    for stale in (layout_begin.rendezvous / "lease", layout_begin.weights / "group", layout_begin.status):
        stale.touch()
    begin_attempt(layout_begin, job_id=7, restart=1)
    assert not any(layout_begin.rendezvous.iterdir())
    assert not any(layout_begin.weights.iterdir())
    assert not layout_begin.status.exists()
    assert layout_begin.rendezvous.stat().st_mode & 0o777 == 0o700


def test_files_that_are_written_once_are_as_new_as_the_attempt(layout_begin):
    """Scratch file systems delete what has not changed for some weeks."""
    layout_begin.scripts.mkdir()
    layout_begin.jobs.mkdir()
    once = [
        layout_begin.config,
        layout_begin.inputs,
        layout_begin.job_plan,
        layout_begin.scripts / "hetjob.sbatch",
        layout_begin.job_record(7),
    ]
    for path in once:
        path.touch()
        os.utime(path, (1e9, 1e9))
    os.utime(layout_begin.config, (1e9, 1e9))
    began = time.time() - 1
    begin_attempt(layout_begin, job_id=7, restart=0)
    assert [path.name for path in once if path.stat().st_mtime < began] == []


def test_keys_are_new_and_cover_planned_and_added_processes(config_begin, layout_begin):
    site = site_of(cluster={"shared_directory": str(layout_begin.root)})
    write_plan(plan_elastic(config_begin, site, layout_begin, Elastic("generation-1", 2, 2, "hetjob")))
    begin_attempt(layout_begin, job_id=7, restart=0)
    names = ["controller-0", *(f"generator-{k}" for k in range(4)), "reward-0", "trainer-0", "trainer-1"]
    assert sorted(path.stem for path in layout_begin.secrets.glob("*.secret")) == names
    before = {path.name: path.read_bytes() for path in layout_begin.secrets.glob("*.secret")}
    begin_attempt(layout_begin, job_id=7, restart=1)
    assert all(path.read_bytes() != before[path.name] for path in layout_begin.secrets.glob("*.secret"))


def test_a_local_run_is_taken_up_by_jobs_with_its_attempts_counted_on(config_begin, tmp_path):
    layout = RunLayout(tmp_path / "local")
    prepare_run_dir(config_begin, layout, resume=False, fresh=False)
    assert prepare_run_dir_for_jobs(config_begin, layout, resume=True, fresh=False) == ()
    assert begin_attempt(layout, job_id=1, restart=0)["attempt"] == 1


def test_what_another_try_would_not_mend_ends_with_status_2(layout_begin, tmp_path, capsys):
    assert main(["--run-dir", str(tmp_path / "nowhere"), "--job-id", "1"]) == EXIT_CONFIG
    said = capsys.readouterr().err
    why = "not a run directory: it has no config.json of a run; `rlhpc list` shows your runs"
    assert said == f"rlhpc: {tmp_path / 'nowhere'}: {why}\n"
    layout_begin.config.write_text(layout_begin.config.read_text().replace('"seed": ', '"seed": 1'))
    assert main(["--run-dir", str(layout_begin.root), "--job-id", "1"]) == EXIT_CONFIG
    assert "altered since the run was started" in capsys.readouterr().err
    assert not layout_begin.attempt.exists()


def test_a_run_that_a_ghost_completes_meanwhile_is_left_as_it_is(layout_begin, monkeypatch):
    """Found by the simulator: its last segments were set aside, and a killed attempt left it complete without them."""
    save_begin(layout_begin, 1)
    layout_begin.segment(0).write_bytes(b"of after the checkpoint")
    look_at_inputs = begin_attempt_module.refuse_other_inputs

    def completes(*facts: Any, **more: Any) -> Any:  # which takes as long as the dataset is large
        inputs = look_at_inputs(*facts, **more)
        layout_begin.summary.write_text("{}")
        return inputs

    monkeypatch.setattr(begin_attempt_module, "refuse_other_inputs", completes)
    with pytest.raises(RunDirectoryError, match="the run is complete"):
        begin_attempt(layout_begin, job_id=1, restart=0)
    assert not layout_begin.attempt.exists()
    assert not layout_begin.attempts.exists()
    assert layout_begin.segment(0).exists()


def test_a_ghost_of_an_earlier_life_begins_nothing(layout_begin, capsys):
    """A node that was lost comes back, and its supervisor with it: Slurm has started the job again elsewhere."""
    begin_attempt(layout_begin, job_id=7, restart=1)
    words = ["--run-dir", str(layout_begin.root), "--job-id", "7"]
    assert main([*words, "--restart", "0"]) == 4
    assert "attempt 0 belongs to job 7, restart 1" in capsys.readouterr().err
    assert json.loads(layout_begin.attempt.read_bytes())["restart"] == 1
    assert main([*words, "--restart", "1"]) == 0  # the same life, another attempt
    assert main([*words, "--restart", "2"]) == 0


def test_of_two_that_begin_at_one_moment_the_earlier_counts_as_overtaken(layout_begin, capsys):
    """Not as misconfigured: with that verdict it would end the other one's jobs."""
    begin_attempt(layout_begin, job_id=7, restart=0)
    stale = layout_begin.rollouts / ".owner_stale"
    stale.mkdir()
    for number in range(5000):  # which takes a while to delete
        (stale / str(number)).touch()
    before = layout_begin.owner.read_text()

    def overtake() -> None:
        while layout_begin.owner.read_text() == before:
            pass
        write_atomically(layout_begin.owner, json.dumps({"owner": "1-other"}).encode())

    other = threading.Thread(target=overtake)
    other.start()
    status = main(["--run-dir", str(layout_begin.root), "--job-id", "8"])
    other.join()
    assert (status, Fence.holder(layout_begin)) == (EXIT_FENCED, "1-other"), capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_set_aside_at_the_moment_is_tried_again(layout_begin, capsys, monkeypatch):
    """The run ended, as misconfigured, when its file server refused one rename."""
    monkeypatch.setattr(patience, "DISK_PATIENCE_S", 0.0)
    save_begin(layout_begin, 4)
    unfinished = layout_begin.checkpoint(8)
    unfinished.mkdir()
    words = ["--run-dir", str(layout_begin.root), "--job-id", "1"]
    with small_disk(unfinished, 1 << 16):  # what is mounted is busy
        assert main(words) == EXIT_FAULT
    assert "step_000008: cannot be set aside: Device or resource busy" in capsys.readouterr().err
    assert main(words) == 0
