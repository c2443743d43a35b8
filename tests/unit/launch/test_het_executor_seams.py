"""The private parts of submitit that the executor leans on mean in the installed version what we take them to mean."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import submitit
from submitit.core import plugins
from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, JobPaths, temporary_save_path
from submitit.slurm.slurm import SlurmExecutor

from launch.submitit_hetjob import job as seams
from launch.submitit_hetjob.step import UNFINISHED
from rlhpc.protocol.errors import ConfigError


def plain() -> int:
    return 1


class Continued:
    def __init__(self, life: int = 1) -> None:
        self.life = life

    def __call__(self) -> int:
        return self.life

    def checkpoint(self) -> DelayedSubmission:
        return DelayedSubmission(Continued(self.life + 1))


class Recorder(seams.TaskEnvironment):
    """Keeps what submitit hands over instead of binding signals."""

    def listen(self, checkpoint: seams.Handler, ignore: seams.Handler) -> None:
        self.checkpoint, self.ignore = checkpoint, ignore

    def ask_for_another_life(self, countdown: int) -> None:
        self.countdown = countdown


class Asked(seams.Watcher):
    """Answers from a table and records the questions."""

    def __init__(self) -> None:
        super().__init__(delay_s=60)
        self.questions: list[set[str]] = []
        self.answers: dict[str, str] | None = {}

    def ask(self, bases: set[str]) -> dict[str, dict[str, str]] | None:
        self.questions.append(bases)
        return None if self.answers is None else {key: {"State": state} for key, state in self.answers.items()}


@pytest.mark.parametrize("version", ["1.4.9", "1.6.0", "2.0.0"])
def test_another_version_than_1_5_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(ConfigError, match=r"legal: 1\.5\.x; pip install"):
        seams.check_version(version)


def test_parameters_become_directives_and_nothing_else_does(tmp_path: Path) -> None:
    known = {"partition": "gen", "gpus_per_node": 2, "time": 7, "setup": ["module load x"], "srun_args": ["-v"]}
    found = seams.directives(tmp_path, known)
    assert {"--partition=gen", "--gpus-per-node=2", "--time=7"} <= set(found)
    assert all(each.startswith("--") for each in found)
    assert not any("module" in each for each in found)
    assert {each.split("=")[0] for each in found} >= {"--output", "--error", "--open-mode", "--signal"}  # we drop these


def test_the_executor_overrides_what_submitit_calls() -> None:
    for name in ("_convert_parameters", "_internal_process_submissions", "_internal_update_parameters"):
        assert callable(getattr(SlurmExecutor, name))
    assert {"partition", "time", "mem", "gres", "nodes", "ntasks_per_node"} <= seams.legal_parameters()


def test_a_job_of_several_tasks_has_a_job_for_each(tmp_path: Path) -> None:
    class Quiet(Job[int]):
        watcher = Asked()

    assert len(seams.sub_jobs(Quiet(tmp_path, "7", range(3)))) == 3
    assert not seams.sub_jobs(Quiet(tmp_path, "7"))
    assert hasattr(Job, "_results_timeout_s")  # tests shorten it


def test_the_watcher_asks_for_what_is_not_final_and_keeps_what_it_knew(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Asked()
    watcher.answers = {"1": "RUNNING", "2": "COMPLETED"}
    for job in ("1", "2"):
        watcher.register_job(job)
    assert watcher.get_info("1", mode="standard") == {"State": "RUNNING"}
    monkeypatch.setattr(watcher, "_last_status_check", float("-inf"))
    watcher.answers = None  # Slurm is away
    assert watcher.get_info("1", mode="standard") == {"State": "RUNNING"}
    assert watcher.questions == [{"1", "2"}, {"1"}]
    assert watcher.get_info("1", mode="standard") == {"State": "RUNNING"}
    assert len(watcher.questions) == 2  # not again at once
    watcher.look_soon("1")
    watcher.get_info("1", mode="standard")
    assert len(watcher.questions) == 3


def test_a_job_is_asked_for_until_its_last_component_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, whose state stands for the job's, ends an instant before the others."""
    watcher = Asked()
    watcher.answers = {"1": "COMPLETED", "1+0": "COMPLETED", "1+1": "COMPLETING"}
    watcher.get_info("1", mode="standard")
    monkeypatch.setattr(watcher, "_last_status_check", float("-inf"))
    watcher.answers["1+1"] = "COMPLETED"
    watcher.get_info("1", mode="standard")
    assert watcher.known("1+1") == {"State": "COMPLETED"}
    monkeypatch.setattr(watcher, "_last_status_check", float("-inf"))
    watcher.get_info("1", mode="standard")
    assert watcher.questions == [{"1"}, {"1"}]


def handed_over(folder: Path, monkeypatch: pytest.MonkeyPatch, function: object, rank: int = 0) -> Recorder:
    """An environment to which submitit has handed its handlers for `function`, submitted for an hour."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_PROCID", str(rank))
    monkeypatch.setenv("SUBMITIT_FOLDER", str(folder))
    submission = DelayedSubmission(function)
    submission.set_timeout(60, 3)
    paths = JobPaths(folder, "9", rank)
    submission.dump(paths.submitted_pickle)
    environment = Recorder()
    environment._handle_signals(paths, submission)
    return environment


def test_rank_0_stores_its_checkpoint_then_asks_for_another_life_then_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = handed_over(tmp_path, monkeypatch, Continued())
    with pytest.raises(SystemExit):
        environment.checkpoint(signal.SIGUSR2, None)
    assert environment.countdown == 3  # an hour is not over
    assert DelayedSubmission.load(tmp_path / "9_submitted.pkl").function.life == 2


def test_other_ranks_only_say_that_they_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = handed_over(tmp_path, monkeypatch, Continued(), rank=1)
    environment.checkpoint(signal.SIGUSR2, None)
    environment.ignore(signal.SIGTERM, None)
    assert not hasattr(environment, "countdown")


def test_submitit_writes_beside_the_file_removes_it_and_then_renames(tmp_path: Path) -> None:
    """step.py cleans up what is left by a kill in between."""
    path, half = tmp_path / "9_submitted.pkl", tmp_path / f"9_submitted.pkl{UNFINISHED}"
    path.write_text("old")
    with temporary_save_path(path) as written:
        assert written == half
        assert path.read_text() == "old"
        written.write_text("new")
    assert path.read_text() == "new"
    half.touch()
    with pytest.raises(AssertionError), temporary_save_path(path):
        pass


def test_we_and_submitit_agree_on_who_has_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seams.has_checkpoint(DelayedSubmission(Continued()))
    assert not seams.has_checkpoint(DelayedSubmission(plain))
    environment = handed_over(tmp_path, monkeypatch, plain)
    with pytest.raises(SystemExit):
        environment.checkpoint(signal.SIGUSR2, None)  # preempted: begun again from its first state
    assert DelayedSubmission.load(tmp_path / "9_submitted.pkl").function is plain


def test_the_warning_is_the_signal_that_submitit_binds() -> None:
    assert Recorder().warning_signal == signal.Signals[f"SIG{seams.warning_signal_name()}"]


def test_environments_are_kept_in_a_dict_that_is_looked_into_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = plugins.get_job_environments()
    assert isinstance(environments, dict)
    assert plugins.get_job_environments() is environments
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    ours = Recorder()
    monkeypatch.setitem(environments, "slurm", ours)
    assert submitit.JobEnvironment() is ours
