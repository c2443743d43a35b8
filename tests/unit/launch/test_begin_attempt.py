"""An attempt begins in a clean place, with keys of its own, where the last complete checkpoint ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import launch.run_directory.begin_attempt as begin_attempt_module
from launch.commands.submit import write_plan
from launch.plan.jobs import Elastic, plan_elastic
from launch.plan.script import plan_document
from launch.run_directory.begin_attempt import FencedError, begin_attempt, main
from launch.run_directory.prepare import prepare_run_dir, prepare_run_dir_for_jobs
from launch.run_files.run_state import FIRST_SAVE_S, needed_to_stop_s, read_progress
from rlhpc.base import patience
from rlhpc.base.files import write_atomically
from rlhpc.base.ownership import read_owner, take_over
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_FAULT, EXIT_FENCED, RunDirectoryError
from rlhpc.training.checkpoint_directory import begin, complete
from tests.full_disk import small_disk
from tests.ring.run_kit import ROOT, command_environment
from tests.unit.launch.site_kit import config_of, plan_of, site_of

pytestmark = pytest.mark.starts


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(f"run.directory={tmp_path / 'run'}", "trainer.num_ranks=2", "generation.num_replicas=2")


@pytest.fixture
def layout(config: Config) -> RunLayout:
    layout = RunLayout(config.run_directory)
    prepare_run_dir_for_jobs(config, layout, resume=False, fresh=False)
    layout.job_plan.write_text(plan_document(plan_of("generation.num_replicas=2")))
    return layout


def save(layout: RunLayout, step: int) -> None:
    """A complete checkpoint, as far as a directory can tell."""
    temporary = begin(layout.checkpoint(step))
    (temporary / "weights").write_bytes(b"abc")
    complete(temporary, layout.checkpoint(step), {})


def test_a_launcher_that_was_overtaken_begins_nothing(layout: RunLayout) -> None:
    """Without Slurm, whose ids would tell who came later."""
    first = begin_attempt(layout, job_id=0, restart=0)
    take_over(layout, 1)  # another machine takes this one for dead
    before = layout.attempts.read_text(), layout.owner.read_text()
    with pytest.raises(FencedError, match="was taken over by 1-"):
        begin_attempt(layout, job_id=0, restart=0, follows=first["fence"])
    assert (layout.attempts.read_text(), layout.owner.read_text()) == before


def test_attempts_are_counted_and_go_on_where_the_last_checkpoint_ends(layout: RunLayout) -> None:
    first = begin_attempt(layout, job_id=7, restart=0)
    assert (first["attempt"], first["resume_step"], first["job_id"], first["restart"]) == (0, None, 7, 0)
    save(layout, 4)
    save(layout, 8)
    (layout.checkpoint(12)).mkdir()  # never finished
    second = begin_attempt(layout, job_id=7, restart=1)
    assert (second["attempt"], second["resume_step"], second["restart"]) == (1, 8, 1)
    assert json.loads(layout.attempt.read_bytes()) == second
    lines = [json.loads(line) for line in layout.attempts.read_text().splitlines()]
    assert [(line["index"], line["resume_step"], line["job_id"], line["restart"]) for line in lines] == [
        (0, None, 7, 0),
        (1, 8, 7, 1),
    ]


def test_how_long_saving_took_is_known_to_later_attempts_which_have_not_saved_yet(layout: RunLayout) -> None:
    """A job asks its controller early enough to save, before its time limit."""
    said = {"phase": "training", "step": 3, "roles": [], "unix_time_s": 0.0}

    def needed_s(restart: int, **more: float) -> float:
        begin_attempt(layout, job_id=7, restart=restart)
        layout.status.write_text(json.dumps({**said, **more}))
        return needed_to_stop_s(read_progress(layout), 36_000.0)

    assert needed_s(0) == 30 + FIRST_SAVE_S
    assert needed_s(1, save_s=1300.0) == 30 + 2 * 1300
    assert needed_s(2) == 30 + 2 * 1300
    assert needed_s(3) == 30 + 2 * 1300
    assert needed_s(4, save_s=100.0) == 30 + 2 * 100, "as it is now"


def test_a_save_that_took_long_once_leaves_later_lives_time_to_train_and_is_forgotten(layout: RunLayout) -> None:
    """As while a file server was away: jobs of an hour stopped as soon as they had begun, for ever."""
    said = {"phase": "training", "step": 3, "roles": [], "unix_time_s": 0.0}

    def needed_s(restart: int, **more: float) -> float:
        begin_attempt(layout, job_id=7, restart=restart)
        layout.status.write_text(json.dumps({**said, **more}))
        return needed_to_stop_s(read_progress(layout), 3600.0)

    begin_attempt(layout, job_id=7, restart=0)
    layout.status.write_text(json.dumps({**said, "save_s": 2000.0}))
    assert needed_s(1) == 30 + 1800
    assert needed_s(2, save_s=20.0) == 30 + 40
    assert needed_s(3) == 30 + 40


def test_what_an_earlier_attempt_has_left_behind_is_gone(layout: RunLayout) -> None:
    begin_attempt(layout, job_id=7, restart=0)
    for stale in (layout.rendezvous / "lease", layout.weights / "group", layout.status):
        stale.touch()
    begin_attempt(layout, job_id=7, restart=1)
    assert not any(layout.rendezvous.iterdir())
    assert not any(layout.weights.iterdir())
    assert not layout.status.exists()
    assert layout.rendezvous.stat().st_mode & 0o777 == 0o700


def test_files_that_are_written_once_are_as_new_as_the_attempt(layout: RunLayout) -> None:
    """Scratch file systems delete what has not changed for some weeks."""
    layout.scripts.mkdir()
    layout.jobs.mkdir()
    once = [layout.config, layout.inputs, layout.job_plan, layout.scripts / "hetjob.sbatch", layout.job_record(7)]
    for path in once:
        path.touch()
        os.utime(path, (1e9, 1e9))
    os.utime(layout.config, (1e9, 1e9))
    began = time.time() - 1
    begin_attempt(layout, job_id=7, restart=0)
    assert [path.name for path in once if path.stat().st_mtime < began] == []


def test_keys_are_new_and_cover_planned_and_added_processes(config: Config, layout: RunLayout) -> None:
    site = site_of(cluster={"shared_directory": str(layout.root)})
    write_plan(plan_elastic(config, site, layout, Elastic("generation-1", 2, 2, "hetjob")))
    begin_attempt(layout, job_id=7, restart=0)
    names = ["controller-0", *(f"generator-{k}" for k in range(4)), "reward-0", "trainer-0", "trainer-1"]
    assert sorted(path.stem for path in layout.secrets.glob("*.secret")) == names
    before = {path.name: path.read_bytes() for path in layout.secrets.glob("*.secret")}
    begin_attempt(layout, job_id=7, restart=1)
    assert all(path.read_bytes() != before[path.name] for path in layout.secrets.glob("*.secret"))


def test_a_local_run_is_taken_up_by_jobs_with_its_attempts_counted_on(config: Config, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "local")
    prepare_run_dir(config, layout, resume=False, fresh=False)
    assert prepare_run_dir_for_jobs(config, layout, resume=True, fresh=False) == ()
    assert begin_attempt(layout, job_id=1, restart=0)["attempt"] == 1


def test_the_command_prints_the_attempt_as_its_last_line(layout: RunLayout) -> None:
    words = [sys.executable, "-m", "launch.run_directory.begin_attempt", "--run-dir", str(layout.root), "--job-id", "9"]
    done = subprocess.run(
        [*words, "--restart", "3"], capture_output=True, text=True, env=command_environment(), cwd=ROOT, check=True
    )
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads(layout.attempt.read_bytes())
    assert (document["job_id"], document["restart"]) == (9, 3)


def test_what_another_try_would_not_mend_ends_with_status_2(
    layout: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run-dir", str(tmp_path / "nowhere"), "--job-id", "1"]) == EXIT_CONFIG
    said = capsys.readouterr().err
    why = "not a run directory: it has no config.json of a run; `rlhpc list` shows your runs"
    assert said == f"rlhpc: {tmp_path / 'nowhere'}: {why}\n"
    layout.config.write_text(layout.config.read_text().replace('"seed": ', '"seed": 1'))
    assert main(["--run-dir", str(layout.root), "--job-id", "1"]) == EXIT_CONFIG
    assert "altered since the run was started" in capsys.readouterr().err
    assert not layout.attempt.exists()


def test_a_complete_run_begins_nothing(layout: RunLayout) -> None:
    layout.summary.write_text("{}")
    layout.status.write_text("{}")
    with pytest.raises(RunDirectoryError, match="the run is complete"):
        begin_attempt(layout, job_id=1, restart=0)
    assert layout.status.exists()


def test_a_run_that_a_ghost_completes_meanwhile_is_left_as_it_is(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulator: its last segments were set aside, and a killed attempt left it complete without them."""
    save(layout, 1)
    layout.segment(0).write_bytes(b"of after the checkpoint")
    look_at_inputs = begin_attempt_module.refuse_other_inputs

    def completes(*facts: Any, **more: Any) -> None:  # which takes as long as the dataset is large
        look_at_inputs(*facts, **more)
        layout.summary.write_text("{}")

    monkeypatch.setattr(begin_attempt_module, "refuse_other_inputs", completes)
    with pytest.raises(RunDirectoryError, match="the run is complete"):
        begin_attempt(layout, job_id=1, restart=0)
    assert not layout.attempt.exists()
    assert not layout.attempts.exists()
    assert layout.segment(0).exists()


def test_a_ghost_of_an_earlier_life_begins_nothing(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    """A node that was lost comes back, and its supervisor with it: Slurm has started the job again elsewhere."""
    begin_attempt(layout, job_id=7, restart=1)
    words = ["--run-dir", str(layout.root), "--job-id", "7"]
    assert main([*words, "--restart", "0"]) == 4
    assert "attempt 0 belongs to job 7, restart 1" in capsys.readouterr().err
    assert json.loads(layout.attempt.read_bytes())["restart"] == 1
    assert main([*words, "--restart", "1"]) == 0  # the same life, another attempt
    assert main([*words, "--restart", "2"]) == 0


def test_of_two_that_begin_at_one_moment_the_earlier_counts_as_overtaken(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as misconfigured: with that verdict it would end the other one's jobs."""
    begin_attempt(layout, job_id=7, restart=0)
    stale = layout.rollouts / ".owner_stale"
    stale.mkdir()
    for number in range(5000):  # which takes a while to delete
        (stale / str(number)).touch()
    before = layout.owner.read_text()

    def overtake() -> None:
        while layout.owner.read_text() == before:
            pass
        write_atomically(layout.owner, json.dumps({"owner": "1-other"}).encode())

    other = threading.Thread(target=overtake)
    other.start()
    status = main(["--run-dir", str(layout.root), "--job-id", "8"])
    other.join()
    assert (status, read_owner(layout)) == (EXIT_FENCED, "1-other"), capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_set_aside_at_the_moment_is_tried_again(
    layout: RunLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended, as misconfigured, when its file server refused one rename."""
    monkeypatch.setattr(patience, "DISK_PATIENCE_S", 0.0)
    save(layout, 4)
    unfinished = layout.checkpoint(8)
    unfinished.mkdir()
    words = ["--run-dir", str(layout.root), "--job-id", "1"]
    with small_disk(unfinished, 1 << 16):  # what is mounted is busy
        assert main(words) == EXIT_FAULT
    assert "step_000008: cannot be set aside: Device or resource busy" in capsys.readouterr().err
    assert main(words) == 0
