"""The heterogeneous executor without Slurm: what it would submit, what it leans on, and its tasks as processes."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core import plugins
from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, JobPaths, pickle_load, temporary_save_path
from submitit.slurm.slurm import SlurmExecutor

from launch.slurm.commands import SlurmError
from launch.slurm.queue import GONE, ask_states
from launch.submitit_hetjob import job as seams
from launch.submitit_hetjob.executor import (
    Component,
    HeterogeneousSlurmExecutor,
    NativeComponent,
    check_parts,
    plan_text,
    script_text,
)
from launch.submitit_hetjob.job import HeterogeneousSlurmJob
from launch.submitit_hetjob.step import LEAVES_VARIABLE, UNFINISHED
from launch.submitit_hetjob.supervisor import read_plan
from rlhpc.base.patience import Deadline
from rlhpc.protocol.errors import ConfigError
from tests.patience import PATIENCE_S
from tests.slurm.het_callables import Counts, FailsFirst, fail, sleep_long

# --------------------- What the heterogeneous executor would submit, and what it refuses; no Slurm is needed for either


def nothing() -> None: ...


def part(name: str, /, essential: bool = True, in_batch_step: bool | None = None, **parameters: Any) -> NativeComponent:
    component = Component(name, nothing, {}, essential=essential, in_batch_step=in_batch_step)
    return NativeComponent(component, {"time": 30, **parameters})


THREE = (
    part("controller", partition="cpu", setup=["module load slurm"], dependency="afterok:7", signal_delay_s=120),
    part("trainer", partition="train", ntasks_per_node=4, gpus_per_node=4, cpus_per_task=8, srun_args=["--label"]),
    part("gen", partition="gen", nodes=2, gres="gpu:a100:2", dependency="afterok:7", essential=False),
)


def script(parts: tuple[NativeComponent, ...] = THREE) -> str:
    return script_text(parts, Path("/shared/jobs"), batch_python="/usr/bin/python3", code=Path("/shared/code"))


@pytest.mark.starts
def test_the_script_has_the_directives_of_each_component_and_one_start():
    blocks = script().split("#SBATCH hetjob\n")
    assert len(blocks) == 3
    assert "#SBATCH --partition=cpu\n" in blocks[0]
    assert "#SBATCH --gpus-per-node=4\n" in blocks[1]
    assert "#SBATCH --gres=gpu:a100:2\n" in blocks[2]
    assert all("#SBATCH --time=30\n" in block and "#SBATCH --requeue\n" in block for block in blocks)
    tail = blocks[2].split("\n\n", 1)[1].splitlines()
    assert tail == [
        "module load slurm",
        "export PYTHONPATH=/shared/code${PYTHONPATH:+:$PYTHONPATH}",
        "exec /usr/bin/python3 -u -m launch.submitit_hetjob.supervisor --folder /shared/jobs",
    ]
    assert subprocess.run(["bash", "-n"], input=script(), text=True, check=False).returncode == 0


def test_what_concerns_the_job_stands_once_and_the_warning_goes_to_the_batch_step():
    text = script()
    for directive in ("--output=/shared/jobs/%j_batch.log", "--open-mode=append", "--signal=B:USR2@120"):
        assert text.count(f"#SBATCH {directive}\n") == 1
        assert text.count(directive.partition("=")[0] + "=") == 1
    assert text.count("--dependency") == 1
    assert "--error" not in text
    assert "--signal=B:USR2@30\n" in script((part("a", time=1),)), "a short job: after half of its time"
    assert plan(part("a", time=1))["warn_s"] == 30


def plan(*parts: NativeComponent, has: tuple[bool, ...] | None = None) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(plan_text(parts, python="python", has_checkpoint=has or (False,) * len(parts)))
    return result


def test_the_plan_says_all_sizes_of_every_step():
    controller, trainer, gen = plan(*THREE)["components"]
    assert controller["in_batch_step"]
    assert trainer["srun"] == (
        ["-N", "1", "-n", "4", "--ntasks-per-node=4", "--cpus-per-task=8", "--gpus-per-node=4", "--label"]
    )
    assert gen["srun"] == ["-N", "2", "-n", "2", "--ntasks-per-node=1", "--gres=gpu:a100:2"]
    assert [each["group"] for each in (controller, trainer, gen)] == [0, 1, 2]
    assert plan(part("alone"))["components"][0]["group"] is None  # srun knows no groups in a plain job


def test_only_a_first_component_of_one_task_and_no_gpu_goes_to_the_batch_step_by_itself():
    for parts, goes in (
        ((part("a"), part("b")), [True, False]),
        ((part("a", gpus_per_node=1),), [False]),
        ((part("a", gpus_per_node=1, in_batch_step=True),), [True]),
        ((part("a", nodes=2),), [False]),
        ((part("a", in_batch_step=False),), [False]),
        ((part("a", additional_parameters={"gpus": 2}),), [False]),
    ):
        assert [each["in_batch_step"] for each in plan(*parts)["components"]] == goes


def test_components_without_a_checkpoint_hear_the_warning_only_where_nobody_has_one():
    for has, hears in (((False, True, False), [False, True, False]), ((False, False, False), [True, True, True])):
        assert [each["stores_checkpoint"] for each in plan(*THREE, has=has)["components"]] == hears


def test_what_contradicts_itself_is_refused_before_slurm_sees_it():
    for parts, why in (
        ((), "at least one"),
        ((part("a"), part("a")), "each name once"),
        ((part("a"), part("b", time=60)), "the components of a job end together"),
        ((part("a"), part("b", in_batch_step=True)), "only for a first component"),
        ((part("a", nodes=2, in_batch_step=True),), "of one task"),
        ((part("a", use_srun=False),), "in_batch_step"),
        ((part("a", additional_parameters={"open_mode": "truncate"}),), "open-mode: set by rlhpc"),
        ((part("a", essential=False),), "nothing would tell success"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_parts(parts)
    for words, why in (
        ({"name": "../up"}, "legal: letters"),
        ({"function": 3}, "cannot be called"),
        ({"restarts": 2}, "essential=False"),
        ({"parameters": {"setup": ["x"]}}, "only for the whole job"),
    ):
        with pytest.raises(ConfigError, match=why):
            Component(**{"name": "a", "function": nothing, **words})


@pytest.fixture
def executor(tmp_path, monkeypatch, commands) -> HeterogeneousSlurmExecutor:
    """One on a machine whose Slurm refuses everything."""
    for name in ("srun", "sbatch"):
        commands.put(name, "echo 'sbatch: error: no partition free' >&2; exit 1")
    return HeterogeneousSlurmExecutor(tmp_path / "jobs")


@pytest.mark.starts
def test_a_submission_that_is_refused_names_its_component_and_leaves_nothing_behind(executor, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"component gen: gpus: legal: account, "):
        executor.submit_components([Component("a", nothing), Component("gen", nothing, {"gpus": 2})])
    with pytest.raises(SlurmError, match=r"gen: sbatch: .*no partition free"):
        executor.submit_components([Component("gen", nothing)])
    assert not list(executor.folder.iterdir())
    executor.max_pickle_size_gb = 1e-9
    with pytest.raises(ConfigError, match="max_pickle_size_gb=1e-09"):
        executor.submit_components([Component("gen", nothing)])
    with pytest.raises(ConfigError, match="pattern"):
        HeterogeneousSlurmExecutor(executor.folder / "%j")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="run this on a login node"):
        HeterogeneousSlurmExecutor(tmp_path)


def test_memory_is_taken_in_both_of_submitits_ways(executor):
    executor.update_parameters(mem_gb=64)
    assert executor.parameters["mem"] == "64GB"
    executor.update_parameters(mem="3GB", timeout_min=9)
    assert (executor.parameters["mem"], executor.parameters["time"]) == ("3GB", 9)


def test_a_job_object_survives_being_stored(tmp_path):
    job: HeterogeneousSlurmJob[int] = HeterogeneousSlurmJob(tmp_path / "%j" / "gen", "12", range(2), component=1)
    again = pickle.loads(pickle.dumps(job))
    assert (again.slurm_id, again.task(1).slurm_id) == ("12+1", "12+1")
    assert again.task(1).paths.result_pickle == tmp_path / "12" / "gen" / "12_1_result.pkl"


@pytest.mark.starts
def test_states_are_read_of_components_arrays_and_plain_jobs(commands):
    def ask(bases: set[str], *rows: str) -> dict[str, dict[str, str]]:
        """rows: id, state and nodes, in the columns of launch/slurm/queue.py."""
        lines = (row.split("|") for row in rows)
        shape = "{}|{}|0|None|cpu|0:01|1:00|2:00|N/A|{}|a\n"
        commands.prints("squeue", "".join(shape.format(*line, *[""] * (3 - len(line))) for line in lines))
        found = ask_states(bases)
        assert found is not None
        return found

    commands.put("sacct", "exit 1")  # no accounting here
    rows = (
        "12+0|RUNNING|c0",
        "12+1|CANCELLED by 5|t0",
        "7|PENDING",
        "20_3|PENDING",
        "20_4|PENDING",
        "20_1|COMPLETED|g0",
    )
    found = ask({"12", "7", "20"}, *rows)
    assert {key: info["State"] for key, info in found.items()} == {
        "12": "RUNNING", "12+0": "RUNNING", "12+1": "CANCELLED", "7": "PENDING", "20": "PENDING", "20_3": "PENDING",
        "20_4": "PENDING", "20_1": "COMPLETED",
    }  # fmt: skip
    assert found["12"]["NodeList"] == "c0"
    # An array is over when all of it is, and good when all of it is.
    for states, whole in (
        (("COMPLETED", "PENDING", "RUNNING"), "RUNNING"),
        (("COMPLETED", "FAILED", "COMPLETED"), "FAILED"),
        (("COMPLETED", "COMPLETED"), "COMPLETED"),
    ):
        assert ask({"5"}, *(f"5_{k}|{state}" for k, state in enumerate(states)))["5"]["State"] == whole
    found = ask({"7", "8"}, "7|RUNNING|c0")
    assert (found["7"]["State"], found["7"]["NodeList"]) == ("RUNNING", "c0")
    assert found["8"] == {"State": GONE}, "Slurm has forgotten it"
    commands.put("squeue", "exit 1")
    assert ask_states({"7"}) is None, "without an answer nothing is known"


# ------------------ The private parts of submitit that the executor leans on mean in the installed version what we take


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


def test_another_version_than_1_5_is_refused_with_what_to_do():
    for version in ("1.4.9", "1.6.0", "2.0.0"):
        with pytest.raises(ConfigError, match=r"legal: 1\.5\.x; pip install"):
            seams.check_version(version)


def test_parameters_become_directives_and_nothing_else_does(tmp_path):
    known = {"partition": "gen", "gpus_per_node": 2, "time": 7, "setup": ["module load x"], "srun_args": ["-v"]}
    found = seams.directives(tmp_path, known)
    assert {"--partition=gen", "--gpus-per-node=2", "--time=7"} <= set(found)
    assert all(each.startswith("--") and "module" not in each for each in found)
    assert {each.split("=")[0] for each in found} >= {"--output", "--error", "--open-mode", "--signal"}  # we drop these
    assert {"partition", "time", "mem", "gres", "nodes", "ntasks_per_node"} <= seams.legal_parameters()


def test_what_the_executor_and_its_jobs_override_and_bind_is_there(tmp_path):
    for name in ("_convert_parameters", "_internal_process_submissions", "_internal_update_parameters"):
        assert callable(getattr(SlurmExecutor, name))
    assert Recorder().warning_signal == signal.Signals[f"SIG{seams.warning_signal_name()}"]

    class Quiet(Job[int]):
        watcher = Asked()

    assert len(seams.sub_jobs(Quiet(tmp_path, "7", range(3)))) == 3
    assert not seams.sub_jobs(Quiet(tmp_path, "7"))
    assert hasattr(Job, "_results_timeout_s")  # tests shorten it


def test_the_watcher_asks_for_what_is_not_final_and_keeps_what_it_knew(monkeypatch):
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


def test_a_job_is_asked_for_until_its_last_component_has_ended(monkeypatch):
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


def test_rank_0_stores_its_checkpoint_then_asks_for_another_life_then_exits(tmp_path, monkeypatch):
    other = handed_over(tmp_path, monkeypatch, Continued(), rank=1)
    other.checkpoint(signal.SIGUSR2, None)
    other.ignore(signal.SIGTERM, None)
    assert not hasattr(other, "countdown"), "other ranks only say that they do nothing"
    environment = handed_over(tmp_path, monkeypatch, Continued())
    with pytest.raises(SystemExit):
        environment.checkpoint(signal.SIGUSR2, None)
    assert environment.countdown == 3  # an hour is not over
    assert DelayedSubmission.load(tmp_path / "9_submitted.pkl").function.life == 2


def test_submitit_writes_beside_the_file_removes_it_and_then_renames(tmp_path):
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


def test_we_and_submitit_agree_on_who_has_a_checkpoint(tmp_path, monkeypatch):
    assert seams.has_checkpoint(DelayedSubmission(Continued()))
    assert not seams.has_checkpoint(DelayedSubmission(plain))
    environment = handed_over(tmp_path, monkeypatch, plain)
    with pytest.raises(SystemExit):
        environment.checkpoint(signal.SIGUSR2, None)  # preempted: begun again from its first state
    assert DelayedSubmission.load(tmp_path / "9_submitted.pkl").function is plain


def test_environments_are_kept_in_a_dict_that_is_looked_into_every_time(monkeypatch):
    environments = plugins.get_job_environments()
    assert isinstance(environments, dict)
    assert plugins.get_job_environments() is environments
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    ours = Recorder()
    monkeypatch.setitem(environments, "slurm", ours)
    assert submitit.JobEnvironment() is ours


# ------------------------------ Tasks and their supervisor as real processes, without Slurm: results, signals, restarts

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "5"}


def begin(folder: Path, function: Callable[[], Any], **variables: str) -> subprocess.Popen[bytes]:
    """One task of job 5, once it has spoken."""
    submission = DelayedSubmission(function)
    submission.set_timeout(60, 3)
    submission.dump(folder / "5_submitted.pkl")
    words = [sys.executable, "-u", "-m", "launch.submitit_hetjob.task", str(folder)]
    out = (folder / "out").open("wb")
    process = subprocess.Popen(words, env={**ENVIRONMENT, **variables}, stdout=out, stderr=subprocess.DEVNULL)
    deadline = Deadline(PATIENCE_S)
    while not {"counts 3", "asleep"} & set((folder / "out").read_text().replace("life 1 ", "").splitlines()):
        assert process.poll() is None
        assert not deadline.is_over
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGTERM])
@pytest.mark.starts
def test_rank_0_stores_its_checkpoint_and_leaves_a_note(tmp_path, signum):
    process = begin(tmp_path, Counts(900))
    process.send_signal(signum)
    process.send_signal(signal.SIGUSR2)  # Slurm and the supervisor may both send one; the second does no harm
    assert process.wait(PATIENCE_S) == 255
    assert json.loads((tmp_path / "5_requeue.json").read_text()) == {"remaining_timeouts": 3}
    assert pickle_load(tmp_path / "5_submitted.pkl").function.lives == 2
    assert not (tmp_path / "5_0_result.pkl").exists()


@pytest.mark.starts
def test_another_rank_stays_until_rank_0_has_stored(tmp_path):
    process = begin(tmp_path, Counts(900), SLURM_PROCID="1")
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    (tmp_path / "5_requeue.json").write_text("{}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


@pytest.mark.starts
def test_every_task_leaves_in_good_order_and_one_without_a_checkpoint_notes_that_it_was_taken_away(tmp_path):
    process = begin(tmp_path, sleep_long)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGUSR1
    assert "leaves in good order" in (tmp_path / "out").read_text()
    process = begin(tmp_path, sleep_long, **{LEAVES_VARIABLE: "1"})
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert (tmp_path / "5_requeue.json").exists()


def supervise(
    folder: Path,
    function: Callable[[], Any],
    essential: bool,
    restarts: int = 0,
    before: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """Run a job of one component in the batch step; returns exit status and log."""
    component = Component("work", function, essential=essential, restarts=restarts)
    directory = folder / "5" / "work"
    directory.mkdir(parents=True)
    DelayedSubmission(function).dump(directory / "5_submitted.pkl")
    text = plan_text([NativeComponent(component, {})], python=sys.executable, has_checkpoint=[False])
    (folder / "5" / "plan.json").write_text(text)
    before()
    words = [sys.executable, "-m", "launch.submitit_hetjob.supervisor", "--folder", str(folder)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("is_cut_short", [False, True])
@pytest.mark.starts
def test_a_component_in_the_batch_step_leaves_its_result_where_submitit_looks(tmp_path, is_cut_short):
    """A kill in the middle of a checkpoint costs nothing."""
    directory = tmp_path / "5" / "work"

    def cut_short() -> None:
        if is_cut_short:
            (directory / "5_submitted.pkl").rename(directory / "5_submitted.pkl.save_tmp")
            (directory / "5_0_result.pkl.save_tmp").write_text("half")

    status, log = supervise(tmp_path, Counts(1), essential=True, before=cut_short)
    assert status == 0, log
    assert pickle_load(directory / "5_0_result.pkl") == ("success", (1, 0, 1))
    assert "counts 1" in (directory / "5_0_log.out").read_text()
    assert not list(directory.glob("*.save_tmp"))


@pytest.mark.starts
def test_an_essential_component_that_fails_fails_the_job_and_only_success_lasts_into_the_next_life(tmp_path):
    for name, function, essential, status, recorded in (
        ("essential", fail, True, 1, False), ("good", Counts(1), False, 0, True), ("bad", fail, False, 0, False)
    ):  # fmt: skip
        found, log = supervise(tmp_path / name, function, essential=essential)
        assert found == status, log
        assert ("work: failed (exit status 1); it is essential" in log) == essential
        assert (tmp_path / name / "5" / "finished.json").exists() == recorded


@pytest.mark.starts
def test_another_is_begun_again_as_often_as_allowed(tmp_path):
    status, log = supervise(tmp_path, FailsFirst(tmp_path / "tally", times=2), essential=False, restarts=2)
    assert (status, log.count("restarted")) == (0, 2), log
    assert pickle_load(tmp_path / "5" / "work" / "5_0_result.pkl") == ("success", 3)


@pytest.mark.starts
def test_a_plan_that_does_not_turn_up_or_is_of_another_schema_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="does this node see"):
        read_plan(tmp_path, patience_s=0.0)
    (tmp_path / "plan.json").write_text('{"schema": 2}')
    with pytest.raises(SystemExit, match="schema=2: legal: 1"):
        read_plan(tmp_path)


@pytest.mark.starts
def test_a_log_that_takes_no_more_ends_no_job(tmp_path):
    job = tmp_path / "7"
    (job / "task").mkdir(parents=True)
    command = ["sh", "-c", 'touch "$1/7_0_result.pkl"', "task"]
    part = {"name": "task", "is_essential": True, "stores_checkpoint": False, "restarts": 0, "group": None}
    part |= {"in_batch_step": True, "num_tasks": 1, "command": command, "stderr_to_stdout": True}
    plan = {"schema": 1, "warning": "USR2", "warn_s": 60, "components": [part]}
    (job / "plan.json").write_text(json.dumps(plan))
    words = [sys.executable, "-u", "-m", "launch.submitit_hetjob.supervisor", "--folder", str(tmp_path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, env={**os.environ, "SLURM_JOB_ID": "7"}, stdout=full, check=False)
    assert done.returncode == 0
