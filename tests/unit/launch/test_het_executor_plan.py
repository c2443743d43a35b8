"""What the heterogeneous executor would submit, and what it refuses; no Slurm is needed for either."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch.slurm.commands import SlurmError
from launch.slurm.queue import GONE, ask_states
from launch.submitit_hetjob.executor import (
    Component,
    HeterogeneousSlurmExecutor,
    NativeComponent,
    check_parts,
    plan_text,
    script_text,
)
from launch.submitit_hetjob.job import HeterogeneousSlurmJob
from rlhpc.protocol.errors import ConfigError


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
def test_the_script_has_the_directives_of_each_component_and_one_start() -> None:
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


def test_what_concerns_the_job_stands_once_and_the_warning_goes_to_the_batch_step() -> None:
    text = script()
    for directive in ("--output=/shared/jobs/%j_batch.log", "--open-mode=append", "--signal=B:USR2@120"):
        assert text.count(f"#SBATCH {directive}\n") == 1
    assert text.count("--dependency") == 1
    for key in ("--output=", "--signal=", "--open-mode="):
        assert text.count(key) == 1
    assert "--error" not in text


def test_a_short_job_is_warned_after_half_of_its_time() -> None:
    assert "--signal=B:USR2@30\n" in script((part("a", time=1),))
    assert plan(part("a", time=1))["warn_s"] == 30


def plan(*parts: NativeComponent, has: tuple[bool, ...] | None = None) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(plan_text(parts, python="python", has_checkpoint=has or (False,) * len(parts)))
    return result


def test_the_plan_says_all_sizes_of_every_step() -> None:
    controller, trainer, gen = plan(*THREE)["components"]
    assert controller["in_batch_step"]
    assert trainer["srun"] == (
        ["-N", "1", "-n", "4", "--ntasks-per-node=4", "--cpus-per-task=8", "--gpus-per-node=4", "--label"]
    )
    assert gen["srun"] == ["-N", "2", "-n", "2", "--ntasks-per-node=1", "--gres=gpu:a100:2"]
    assert [each["group"] for each in (controller, trainer, gen)] == [0, 1, 2]
    assert plan(part("alone"))["components"][0]["group"] is None  # srun knows no groups in a plain job


def test_only_a_first_component_of_one_task_and_no_gpu_goes_to_the_batch_step_by_itself() -> None:
    def goes(*parts: NativeComponent) -> list[bool]:
        return [each["in_batch_step"] for each in plan(*parts)["components"]]

    assert goes(part("a"), part("b")) == [True, False]
    assert goes(part("a", gpus_per_node=1)) == [False]
    assert goes(part("a", gpus_per_node=1, in_batch_step=True)) == [True]
    assert goes(part("a", nodes=2)) == [False]
    assert goes(part("a", in_batch_step=False)) == [False]
    assert goes(part("a", additional_parameters={"gpus": 2})) == [False]


def test_components_without_a_checkpoint_hear_the_warning_only_where_nobody_has_one() -> None:
    def hear(*has: bool) -> list[bool]:
        return [each["stores_checkpoint"] for each in plan(*THREE[: len(has)], has=has)["components"]]

    assert hear(False, True, False) == [False, True, False]
    assert hear(False, False, False) == [True, True, True]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((), "at least one"),
        ((part("a"), part("a")), "each name once"),
        ((part("a"), part("b", time=60)), "the components of a job end together"),
        ((part("a"), part("b", in_batch_step=True)), "only for a first component"),
        ((part("a", nodes=2, in_batch_step=True),), "of one task"),
        ((part("a", use_srun=False),), "in_batch_step"),
        ((part("a", additional_parameters={"open_mode": "truncate"}),), "open-mode: set by rlhpc"),
        ((part("a", essential=False),), "nothing would tell success"),
    ],
)
def test_what_contradicts_itself_is_refused_before_slurm_sees_it(parts: tuple[NativeComponent, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_parts(parts)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"name": "../up"}, "legal: letters"),
        ({"function": 3}, "cannot be called"),
        ({"restarts": 2}, "essential=False"),
        ({"parameters": {"setup": ["x"]}}, "only for the whole job"),
    ],
)
def test_a_component_that_cannot_be_is_refused(words: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Component(**{"name": "a", "function": nothing, **words})


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeterogeneousSlurmExecutor:
    """One on a machine whose Slurm refuses everything."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "sbatch"):
        (programs / name).write_text("#!/bin/sh\necho 'sbatch: error: no partition free' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{Path(shutil.which('sh') or '/bin/sh').parent}")
    return HeterogeneousSlurmExecutor(tmp_path / "jobs")


def test_unknown_parameters_are_named_with_their_component(executor: HeterogeneousSlurmExecutor) -> None:
    with pytest.raises(ConfigError, match=r"component gen: gpus: legal: account, "):
        executor.submit_components([Component("a", nothing), Component("gen", nothing, {"gpus": 2})])


@pytest.mark.starts
def test_a_refused_submission_leaves_nothing_behind(executor: HeterogeneousSlurmExecutor) -> None:
    with pytest.raises(SlurmError, match=r"gen: sbatch: .*no partition free"):
        executor.submit_components([Component("gen", nothing)])
    assert not list(executor.folder.iterdir())


def test_callables_that_are_too_large_are_refused(executor: HeterogeneousSlurmExecutor) -> None:
    executor.max_pickle_size_gb = 1e-9
    with pytest.raises(ConfigError, match="max_pickle_size_gb=1e-09"):
        executor.submit_components([Component("gen", nothing)])


def test_memory_is_taken_in_both_of_submitits_ways(executor: HeterogeneousSlurmExecutor) -> None:
    executor.update_parameters(mem_gb=64)
    assert executor.parameters["mem"] == "64GB"
    executor.update_parameters(mem="3GB", timeout_min=9)
    assert (executor.parameters["mem"], executor.parameters["time"]) == ("3GB", 9)


def test_a_folder_with_a_percent_sign_is_refused(executor: HeterogeneousSlurmExecutor) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        HeterogeneousSlurmExecutor(executor.folder / "%j")


def test_a_machine_without_slurm_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="run this on a login node"):
        HeterogeneousSlurmExecutor(tmp_path)


def test_a_job_object_survives_being_stored(tmp_path: Path) -> None:
    job: HeterogeneousSlurmJob[int] = HeterogeneousSlurmJob(tmp_path / "%j" / "gen", "12", range(2), component=1)
    again = pickle.loads(pickle.dumps(job))
    assert (again.slurm_id, again.task(1).slurm_id) == ("12+1", "12+1")
    assert again.task(1).paths.result_pickle == tmp_path / "12" / "gen" / "12_1_result.pkl"


def print_rows(program: Path, rows: str) -> None:
    """A squeue that prints id, state and nodes in the columns of launch/slurm/queue.py."""
    lines = [line.split("|") for line in rows.splitlines()]
    said = "".join(f"{shown}|{state}|0|None|cpu|0:01|1:00|2:00|N/A|{nodes}|a\n" for shown, state, nodes in lines)
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}END\n")
    program.chmod(0o700)


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "sacct").write_text("#!/bin/sh\nexit 1\n")  # no accounting here
    (tmp_path / "sacct").chmod(0o700)
    return tmp_path / "squeue"


@pytest.mark.starts
def test_states_are_read_of_components_arrays_and_plain_jobs(squeue: Path) -> None:
    print_rows(
        squeue, "12+0|RUNNING|c0\n12+1|CANCELLED by 5|t0\n7|PENDING|\n20_3|PENDING|\n20_4|PENDING|\n20_1|COMPLETED|g0\n"
    )
    found = ask_states({"12", "7", "20"})
    assert found is not None
    assert {key: info["State"] for key, info in found.items()} == {
        "12": "RUNNING",
        "12+0": "RUNNING",
        "12+1": "CANCELLED",
        "7": "PENDING",
        "20": "PENDING",
        "20_3": "PENDING",
        "20_4": "PENDING",
        "20_1": "COMPLETED",
    }
    assert found["12"]["NodeList"] == "c0"


@pytest.mark.starts
def test_a_job_that_slurm_has_forgotten_is_gone_and_without_an_answer_nothing_is_known(squeue: Path) -> None:
    print_rows(squeue, "7|RUNNING|c0\n")
    found = ask_states({"7", "8"})
    assert found is not None
    assert (found["7"]["State"], found["7"]["NodeList"]) == ("RUNNING", "c0")
    assert found["8"] == {"State": GONE}
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert ask_states({"7"}) is None


@pytest.mark.starts
def test_an_array_is_over_when_all_of_it_is_and_good_when_all_of_it_is(squeue: Path) -> None:
    def whole(*states: str) -> str:
        print_rows(squeue, "\n".join(f"5_{k}|{state}|" for k, state in enumerate(states)))
        found = ask_states({"5"})
        assert found is not None
        return found["5"]["State"]

    assert whole("COMPLETED", "PENDING", "RUNNING") == "RUNNING"
    assert whole("COMPLETED", "FAILED", "COMPLETED") == "FAILED"
    assert whole("COMPLETED", "COMPLETED") == "COMPLETED"
