"""The heterogeneous executor on a real Slurm: different callables on different nodes, results, failures, requeues."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submitit.core.utils import FailedJobError, UncompletedJobError

from launch.private_slurm.cluster import DevCluster
from launch.slurm.commands import SlurmError
from launch.slurm.queue import FINAL
from launch.submitit_hetjob.executor import Component, HeterogeneousSlurmExecutor
from launch.submitit_hetjob.job import HeterogeneousSlurmJob
from tests.slurm.cluster_kit import PATIENCE_S, directory_of, job_state, submit, wait_until
from tests.slurm.het_callables import Counts, FailsAfter, FailsFirst, WaitsFor, fail, sleep_long, where_am_i

ROOT = Path(__file__).parents[2]
CPU = {"partition": "cpu", "mem_gb": 0.0625}
TRAIN = {"partition": "train", "mem_gb": 0.0625}
GEN = {"partition": "gen", "mem_gb": 0.0625}


@pytest.fixture
def executor(slurm: DevCluster, monkeypatch: pytest.MonkeyPatch) -> HeterogeneousSlurmExecutor:
    for key, value in slurm.environment().items():
        if os.environ.get(key) != value:
            monkeypatch.setenv(key, value)
    monkeypatch.setattr(HeterogeneousSlurmJob, "_results_timeout_s", 1)
    folder = directory_of(slurm)
    folder.mkdir(exist_ok=True)
    made = HeterogeneousSlurmExecutor(folder / f"het-{time.monotonic_ns()}")
    made.update_parameters(time=15)
    return made


def wait_completed(executor: HeterogeneousSlurmExecutor, job: HeterogeneousSlurmJob) -> None:
    """Wait for the end of its component, which must be a good one."""
    wait_until(lambda: job.get_info()["State"] in FINAL, "it has ended")
    assert job.get_info()["State"] == "COMPLETED", batch_log(executor, job.job_id)


def batch_log(executor: HeterogeneousSlurmExecutor, job_id: str) -> str:
    return (executor.folder / f"{job_id}_batch.log").read_text(encoding="utf-8")


def test_three_components_return_different_results_and_see_their_own_nodes(
    executor: HeterogeneousSlurmExecutor,
) -> None:
    jobs = executor.submit_components(
        [
            Component("controller", where_am_i, CPU),
            Component("trainer", where_am_i, {**TRAIN, "ntasks_per_node": 2, "gpus_per_node": 4, "cpus_per_task": 2}),
            Component("gen", where_am_i, {**GEN, "nodes": 2, "gres": "gpu:fake:1"}),
        ]
    )
    (controller,) = jobs["controller"].results()
    trainer, gen = jobs["trainer"].results(), jobs["gen"].results()
    assert len({job.job_id for job in jobs.values()}) == 1
    assert controller["nodes"] == ["c0"]
    assert controller["step"] in (None, "-5")  # the batch step itself, which has a number since 26.05
    assert [(each["rank"], each["num_tasks"], each["num_nodes"]) for each in trainer] == [(0, 2, 1), (1, 2, 1)]
    assert {each["CUDA_VISIBLE_DEVICES"] for each in trainer} == {"0,1,2,3"}
    assert [(each["rank"], each["num_tasks"], each["num_nodes"]) for each in gen] == [(0, 2, 2), (1, 2, 2)]
    assert {each["CUDA_VISIBLE_DEVICES"] for each in gen} == {"0"}
    assert {str(each["SLURMD_NODENAME"])[0] for each in gen} == {"g"}
    assert {each["RLHPC_HET_COMPONENT"] for each in gen} == {"gen"}
    assert "rank 1 of 2 speaks" in jobs["trainer"].task(1).stdout()
    assert "rank 0" not in jobs["trainer"].task(1).stdout()
    wait_completed(executor, jobs["gen"])
    assert jobs["trainer"].exception() is None
    assert jobs["gen"].submission().function is where_am_i
    assert jobs["gen"].paths.submission_file.read_text().startswith("#!/bin/bash")


@pytest.mark.long
def test_a_component_that_raises_ends_the_others_and_shows_its_traceback(executor: HeterogeneousSlurmExecutor) -> None:
    seen = executor.folder.with_suffix(".seen")
    jobs = executor.submit_components(
        [
            Component("controller", sleep_long, CPU),
            Component("trainer", FailsAfter(seen), TRAIN),
            Component("gen", sleep_long, GEN),
        ]
    )
    wait_until(lambda: all("asleep" in (jobs[name].stdout() or "") for name in ("controller", "gen")), "they run")
    seen.touch()
    error = jobs["trainer"].exception()
    assert isinstance(error, FailedJobError)
    assert "ArithmeticError: one third of a GPU" in str(error)
    for name in ("controller", "gen"):
        with pytest.raises(UncompletedJobError, match="FAILED"):
            jobs[name].results()
        assert "leaves in good order" in jobs[name].stdout()
    assert "trainer: failed" in batch_log(executor, jobs["gen"].job_id)


def test_a_component_that_is_not_essential_is_begun_again_in_place(executor: HeterogeneousSlurmExecutor) -> None:
    dies, seen = FailsFirst(executor.folder.with_suffix(".tally"), times=1), executor.folder.with_suffix(".seen")
    jobs = executor.submit_components(
        [
            Component("trainer", WaitsFor(seen), TRAIN),
            Component("gen", dies, GEN, essential=False, restarts=2),
            Component("extra", fail, CPU, essential=False),
        ]
    )
    assert jobs["gen"].result() == 2
    assert "ArithmeticError" in str(jobs["extra"].exception())
    seen.touch()
    assert jobs["trainer"].result() == "waited"  # unharmed by either
    wait_completed(executor, jobs["trainer"])


@pytest.mark.long
def test_a_warned_job_stores_its_checkpoint_and_goes_on_under_the_same_id(
    executor: HeterogeneousSlurmExecutor, slurm: DevCluster
) -> None:
    jobs = executor.submit_components(
        [
            Component("done", where_am_i, CPU),
            Component("trainer", Counts(35, min_lives=2), {**TRAIN, "ntasks_per_node": 2}),
            Component("gen", sleep_long, GEN, essential=False),
        ]
    )
    job_id = jobs["trainer"].job_id
    wait_until(lambda: "counts 5" in (jobs["trainer"].task(0).stdout() or "") and jobs["gen"].stdout(), "it runs")
    jobs["done"].results()
    slurm.run("scancel", "--batch", "--signal=USR2", job_id)
    lives, begun_at, count = jobs["trainer"].task(0).result()
    assert (lives, count) == (2, max(35, begun_at))
    assert begun_at >= 5
    assert jobs["trainer"].task(0).stdout().count("counts 5\n") == 1  # nothing was done twice
    said = batch_log(executor, job_id)
    assert "requeued" in said
    assert "done: finished before the job was requeued" in said
    assert "leaves in good order" in jobs["gen"].stdout()
    jobs["gen"].cancel()


@pytest.mark.long
def test_a_cancelled_job_ends_for_its_callers_without_accounting(executor: HeterogeneousSlurmExecutor) -> None:
    jobs = executor.submit_components([Component("trainer", Counts(900), TRAIN), Component("gen", sleep_long, GEN)])
    wait_until(lambda: jobs["gen"].stdout() is not None, "it runs")
    jobs["gen"].cancel()
    with pytest.raises(UncompletedJobError, match="CANCELLED"):
        jobs["gen"].result()
    assert isinstance(jobs["trainer"].exception(), UncompletedJobError)
    wait_until(lambda: jobs["trainer"].get_info()["State"] == "CANCELLED", "and stays so")


def test_a_preempted_component_takes_the_job_with_it_and_all_go_on_from_their_checkpoints(
    executor: HeterogeneousSlurmExecutor, slurm: DevCluster
) -> None:
    places = {"partition": "scavenge", "mem_gb": 0.0625}
    jobs = executor.submit_components(
        [
            Component("controller", Counts(40, min_lives=2), {**places, "nodelist": "t0"}),
            Component("trainer", Counts(40, min_lives=2), {**places, "nodelist": "g1", "gpus_per_node": 4}),
        ]
    )
    wait_until(lambda: "counts 3" in (jobs["trainer"].stdout() or ""), "it runs")
    other = submit(slurm, "sleep 1", "--partition=gen", "--nodelist=g1", "--gres=gpu:4")
    for job in jobs.values():
        lives, begun_at, count = job.result()
        assert (lives, count) == (2, max(40, begun_at))
        assert begun_at > 0
    assert job_state(slurm, other) == "COMPLETED"


def test_cancelling_one_component_is_its_failure_and_not_a_wish_for_another_life(
    executor: HeterogeneousSlurmExecutor, slurm: DevCluster
) -> None:
    seen = executor.folder.with_suffix(".seen")
    trainer, gen = Component("trainer", WaitsFor(seen), TRAIN), Component("gen", sleep_long, GEN, essential=False)
    jobs = executor.submit_components([trainer, gen])
    wait_until(lambda: "asleep" in (jobs["gen"].stdout() or ""), "it runs")
    slurm.run("scancel", f"{jobs['gen'].job_id}+1")
    wait_until(lambda: "gen: failed" in batch_log(executor, jobs["gen"].job_id), "its end is seen")
    seen.touch()
    assert jobs["trainer"].result() == "waited"
    assert "CANCELLED" in str(jobs["gen"].exception())


def test_the_example_of_the_documentation_runs_as_printed(executor: HeterogeneousSlurmExecutor) -> None:
    page = (ROOT / "launch" / "submitit_hetjob" / "README.md").read_text(encoding="utf-8")
    program, shown = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("python", "text"))
    executor.folder.mkdir()
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=executor.folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == shown, done.stderr


def test_a_job_unknown_to_slurm_has_ended(executor: HeterogeneousSlurmExecutor) -> None:
    stranger = HeterogeneousSlurmJob(executor.folder, "17")
    executor.folder.mkdir(parents=True)
    with pytest.raises(UncompletedJobError, match="GONE"):
        stranger.result()


def test_submit_runs_one_callable_as_any_submitit_executor_does(executor: HeterogeneousSlurmExecutor) -> None:
    executor.update_parameters(partition="cpu", mem="64MB")
    assert executor.submit(divmod, 17, 5).result() == (3, 2)


def test_a_ready_script_is_submitted_and_followed(executor: HeterogeneousSlurmExecutor, tmp_path: Path) -> None:
    script = tmp_path / "ready.sbatch"
    pickle = 'pickle.dump(("success", {"steps": 3}), open(sys.argv[1], "wb"))'
    script.write_text(
        "#!/bin/bash\n#SBATCH --partition=cpu --mem=16M --output=/dev/null\n"
        f"python3 -c 'import pickle, sys; {pickle}' {executor.folder}/${{SLURM_JOB_ID}}_0_result.pkl\n"
    )
    first = executor.submit_script(script, name="first")
    second = executor.submit_script(script, name="second", options=[f"--dependency=afterok:{first.job_id}"])
    assert second.result() == {"steps": 3}
    assert first.done()
    several = executor.submit_script(script, name="several", options=["--array=0-2"])
    wait_until(lambda: several.get_info()["State"] == "COMPLETED", "the whole array")
    with pytest.raises(SlurmError, match=r"wrong: sbatch: .*partition"):
        executor.submit_script(script, name="wrong", options=["--partition=moon"])
