"""[[evaluation]] of a run that is submitted: a job of its own, which nobody waits for, and which follows the run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch.cli import main
from launch.evaluate import job
from launch.evaluate.follow import ASK_S
from launch.evaluate.job import following_job
from launch.private_slurm.cluster import DevCluster
from launch.view.run import RunView
from tests.ring.run_kit import Lab, wait_while_it_moves
from tests.slurm.cluster_run import ENDLESS, LASTING, SlurmRun, assert_whole

pytestmark = [pytest.mark.slurm, pytest.mark.ring, pytest.mark.timeout(900)]


def evaluated(slurm: DevCluster, lab: Lab, name: str, **sections: Any) -> SlurmRun:
    table = {"path": str(lab.dataset), "name": "held-out", "prompts": 4, "samples": 2}
    return SlurmRun(slurm, lab, name, "hetjob", **{**LASTING, "evaluation": [table], **sections})


def state_of(run: SlurmRun, number: int) -> str:
    """ "": it has left the queue."""
    return run.cluster.run("squeue", "--noheader", f"--jobs={number}", "--format=%T %r", check=False).strip()


def evaluation_job(run: SlurmRun) -> int:
    number = following_job(run.layout)
    assert number is not None, run.story()
    return number


def said_by(run: SlurmRun) -> str:
    logs = [path.read_text() for path in sorted(run.layout.evaluations.rglob("*.log"))]
    return "\n".join([run.story(), *logs])


def wait_for_its_end(run: SlurmRun, number: int) -> None:
    def trace() -> tuple[object, ...]:
        return state_of(run, number), said_by(run), len(RunView(run.layout).evaluations.get("held-out", {}))

    wait_while_it_moves(lambda: not state_of(run, number), trace, "the end of the evaluation", lambda: said_by(run))


@pytest.mark.long
def test_a_job_follows_the_run_to_its_last_step_and_ends(slurm: DevCluster, lab: Lab) -> None:
    run = evaluated(slurm, lab, "evaluated", run={"num_steps": 8}, checkpoint={"every_steps": 2})
    assert "----- evaluation.sbatch" in run.submit("--dry-run")
    said = run.submit()
    number = evaluation_job(run)
    assert f"evaluation  job {number}" in said
    assert number not in run.jobs.values()
    run.wait_complete()  # of its own jobs
    assert_whole(run, 8)
    wait_for_its_end(run, number)
    past = RunView(run.layout).evaluations["held-out"]
    assert max(past) == 8, said_by(run)
    assert "evaluation  held-out: pass@1" in run.cli("status", str(run.layout.root))


@pytest.mark.long
def test_it_goes_back_into_the_queue_before_its_limit_and_ends_with_the_run(slurm: DevCluster, lab: Lab) -> None:
    run = evaluated(slurm, lab, "evaluated-long", run=ENDLESS, checkpoint={"every_steps": 2})
    run.submit()
    number = evaluation_job(run)
    run.wait(lambda: RunView(run.layout).evaluations, "figures")
    slurm.run("scancel", "--batch", "--signal=USR2", str(number))  # as Slurm does, so long before the limit
    run.wait(lambda: "goes on after its requeue" in said_by(run), "its requeue")
    run.wait(lambda: state_of(run, number).startswith("RUNNING"), "its second life")
    newest = max(RunView(run.layout).evaluations["held-out"])
    run.wait(lambda: max(RunView(run.layout).evaluations["held-out"]) > newest, "more figures")
    assert f"evaluation  job {number} goes on" in run.cli(
        "evaluate", str(run.layout.root), "--follow", "--site", str(run.site_file)
    )
    run.stop()
    run.wait(lambda: not state_of(run, number), "the end of the evaluation")
    best = json.loads(run.cli("status", str(run.layout.root), "--json"))["evaluations"]["held-out"]
    assert len(best) >= 2


@pytest.mark.long
def test_it_frees_its_node_while_the_run_waits_in_the_queue(
    slurm: DevCluster, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = evaluated(slurm, lab, "evaluated-late", site={"common": {"time": "0:30:00", "extra": ["--begin=now+1hour"]}})
    run.submit()
    waiting = evaluation_job(run)
    slurm.run("scancel", str(waiting))
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job, "FOLLOW_PATIENCE_S", job_patience_s := ASK_S + 5)
    run.site_file.write_text(run.site_file.read_text().replace('extra = ["--begin=now+1hour"]', "extra = []"))
    assert main(["evaluate", str(run.layout.root), "--follow", "--site", str(run.site_file)]) == 0
    first = evaluation_job(run)
    assert first != waiting
    run.wait(lambda: evaluation_job(run) != first, f"its successor, after {job_patience_s:g} s")
    successor = evaluation_job(run)
    run.wait(lambda: "looks again in an hour" in said_by(run), "what it says of it")  # after its successor is noted
    run.wait(lambda: not state_of(run, first), "its end")
    assert state_of(run, successor) == "PENDING BeginTime"
    said = run.cli("stop", str(run.layout.root), timeout_s=300.0)
    assert f"evaluation job {successor}" in said
    run.wait(lambda: not state_of(run, successor), "the end of that, too")


def test_a_run_whose_evaluation_cannot_be_had_is_refused_before_anything_is_submitted(
    slurm: DevCluster, lab: Lab
) -> None:
    run = evaluated(slurm, lab, "not-evaluated", site={"evaluation": {"partition": "nowhere"}})
    said = run.cli("submit", str(run.run_file), str(run.site_file), status=2)
    assert "nowhere" in said
    assert not run.layout.root.exists()
    (lab.root / "torn.jsonl").write_text("{\n")
    run = evaluated(slurm, lab, "torn", evaluation=[{"path": str(lab.root / "torn.jsonl")}])
    said = run.cli("submit", str(run.run_file), str(run.site_file), status=2)
    assert "[evaluation] torn: " in said
    assert not run.layout.root.exists()
