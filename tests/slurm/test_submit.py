"""Runs reach the queue whole or not at all, and are resumed and scaled by their recorded ids alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from launch.cli import main
from launch.commands.submit import submit_jobs, write_plan
from launch.plan.jobs import plan_jobs
from launch.plan.site_file import load_site
from launch.run_files.records import read_job_records
from launch.slurm.commands import SlurmError
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config, read_resolved
from rlhpc.protocol.errors import EXIT_CONFIG
from rlhpc.transport.security import allowed_keys
from tests.ring.run_kit import Lab, make_lab
from tests.slurm.cluster_kit import submit, wait_until
from tests.slurm.submit_kit import LATER, Desk, ids_of

JOBS = {"placement": "jobs"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


def shown(desk: Desk, job: int, field: str) -> str:
    """A field of `scontrol show job`; of the first component, of the array."""
    words = desk.cluster.run("scontrol", "--oneliner", "show", "job", str(job)).splitlines()[0].split()
    return next(word.partition("=")[2] for word in words if word.startswith(f"{field}="))


# -------------------------------------------------------------------------------------------------------------- submit


def test_a_heterogeneous_run_reaches_the_queue_as_one_job(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    site = desk.site()
    assert desk.submit("het", site) == 0
    layout = desk.lab.layout("het")
    job = ids_of(layout)["hetjob"]
    assert desk.queued() == [f"{job}+0", f"{job}+1", f"{job}+2"]
    out = capsys.readouterr().out
    assert f"submitted   hetjob {job}: het in {layout.root}" in out
    assert f"rlhpc status {layout.root}" in out
    assert layout.site.read_bytes() == site.read_bytes()
    assert json.loads(layout.job_plan.read_bytes())["schema"] == 1
    (record,) = read_job_records(layout)
    assert (record.hosts_controller, record.replicas_per_task, record.script) == (
        True,
        2,
        str(layout.scripts / "hetjob.sbatch"),
    )
    assert (layout.logs / "slurm").is_dir()
    assert not layout.attempts.exists()


def test_a_run_of_several_jobs_has_its_generators_as_an_array(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert desk.submit("several", desk.site(cluster=JOBS, rewards={"partition": "cpu"})) == 0
    ids = ids_of(desk.lab.layout("several"))
    assert list(ids) == ["controller", "trainer", "generation", "rewards"]
    array = ids["generation"]
    alone = [str(ids[name]) for name in ("controller", "trainer", "rewards")]
    assert desk.queued() == sorted([*alone, f"{array}_0", f"{array}_1"])
    assert f"generation {array} (2 tasks)" in capsys.readouterr().out
    assert shown(desk, ids["trainer"], "Partition") == "train"


def test_a_variable_of_sbatch_does_not_win_over_the_script(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "scavenge")
    assert desk.submit("variable", desk.site(cluster=JOBS)) == 0
    assert shown(desk, ids_of(desk.lab.layout("variable"))["trainer"], "Partition") == "train"


def test_a_run_may_begin_after_another_job(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    other = submit(desk.cluster, "sleep 60", LATER)
    site = desk.site(cluster=JOBS)
    assert desk.submit("after", site, "--after", str(other)) == 0
    for job in ids_of(desk.lab.layout("after")).values():
        assert shown(desk, job, "Dependency").startswith(f"afterok:{other}")
    assert "Slurm knows no job" not in capsys.readouterr().out
    assert desk.submit("after-none", site, "--after", "99999999") == 0
    assert "warning     --after 99999999: Slurm knows no job 99999999: another id is meant" in capsys.readouterr().out
    assert desk.submit("after-any", site, "--after", f"afterany:{other}") == 0
    for job in ids_of(desk.lab.layout("after-any")).values():
        assert shown(desk, job, "Dependency").startswith(f"afterany:{other}")


def test_a_dry_run_prints_the_plan_and_without_slurm_what_it_could_not_check(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(desk.run_file("dry")), str(desk.site(cluster=JOBS))]
    assert main(["plan", *words]) == 0
    plan = capsys.readouterr().out
    with monkeypatch.context() as without_slurm:
        without_slurm.setenv("PATH", "/nowhere")
        assert main(["submit", *words, "--dry-run"]) == 0
    unchecked, _, rest = capsys.readouterr().out.partition("\n")
    assert unchecked.startswith("not checked what the cluster would refuse: scontrol: no such command here")
    assert rest == plan
    assert main(["submit", *words, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith(plan)
    assert main(["submit", words[0], str(desk.site(generation={"partition": "gne"})), "--dry-run"]) == EXIT_CONFIG
    assert "generation.partition='gne': no such partition (did you mean gen?); legal: " in capsys.readouterr().err
    assert desk.queued() == []
    assert not desk.lab.layout("dry").root.exists()


def test_what_is_in_the_queue_is_not_submitted_a_second_time(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    site = desk.site(cluster=JOBS)
    assert desk.submit("twice", site) == 0
    layout = desk.lab.layout("twice")
    before = desk.queued()
    for words in ((), ("--resume",), ("--fresh",)):
        assert desk.submit("twice", site, *words) == EXIT_CONFIG
        error = capsys.readouterr().err
        for job in ids_of(layout).values():
            assert str(job) in error
        assert f"`rlhpc stop {layout.root}` stops them" in error
    assert main(["resume", str(layout.root)]) == EXIT_CONFIG
    assert main(["run", str(desk.run_file("twice")), "--resume"]) == EXIT_CONFIG
    assert desk.queued() == before


def test_a_partition_that_is_not_there_is_refused_and_nothing_is_made(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.submit("typo", desk.site(generation={"partition": "gne"})) == EXIT_CONFIG
    assert "gne" in capsys.readouterr().err
    assert not desk.lab.layout("typo").root.exists()
    assert desk.queued() == []


def test_jobs_before_one_that_sbatch_refuses_are_cancelled(desk: Desk) -> None:
    config = load_config(desk.run_file("midway"))
    layout = desk.lab.layout("midway")
    site = load_site(desk.site(cluster=JOBS, generation={"partition": "gne"}))
    plan = plan_jobs(config, site, layout)
    write_plan(plan)
    with pytest.raises(SlurmError, match=r"generation: sbatch: .*partition.*cancelled again: controller \d+, trainer"):
        submit_jobs(plan)
    assert desk.queued() == []
    assert read_job_records(layout) == []


def test_a_refused_submission_leaves_no_directory_and_takes_none_away(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sbatch refuses what --test-only took: a plugin of the site, a full queue."""
    real = shutil.which("sbatch")
    program = tmp_path / "sbatch"
    refusal = "echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy' >&2; exit 1"
    program.write_text(f'#!/bin/sh\ncase "$*" in *--test-only*) exec {real} "$@";; *generation*) {refusal};; esac\n'
                       f'exec {real} "$@"\n')  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    layout, site = desk.lab.layout("refused"), desk.site(cluster=JOBS)
    assert desk.submit("refused", site) == EXIT_CONFIG
    assert "Job violates accounting/QOS policy; cancelled again: controller" in capsys.readouterr().err
    assert not layout.root.exists()
    assert not layout.root.with_name(".refused.submitting").exists()
    assert desk.queued() == []
    layout.root.mkdir(parents=True)
    assert desk.submit("refused", site) == EXIT_CONFIG
    assert layout.root.exists(), "somebody else's"


def test_a_comment_that_a_site_charges_by_is_the_jobs(desk: Desk) -> None:
    site = desk.site(cluster=JOBS, common={"time": "0:10:00", "extra": [LATER, "--comment=project7"]})
    assert desk.submit("commented", site) == 0
    shown = desk.cluster.run("squeue", "--noheader", "--format=%k").split()
    assert shown == ["project7"] * len(shown)
    assert len(shown) == len(ids_of(desk.lab.layout("commented")))


def test_what_sbatch_remarks_of_a_job_is_told(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = shutil.which("sbatch")
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/sh\necho "sbatch: your job was moved to scav" >&2\nexec {real} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert desk.submit("moved", desk.site()) == 0
    assert "sbatch      hetjob: your job was moved to scav\n" in capsys.readouterr().out


def test_the_first_one_refused_leaves_nothing(desk: Desk) -> None:
    layout = desk.lab.layout("first")
    site = load_site(desk.site(controller={"partition": "cpuu"}))
    plan = plan_jobs(load_config(desk.run_file("first")), site, layout)
    write_plan(plan)
    with pytest.raises(SlurmError, match=r"hetjob: sbatch: .*; nothing was submitted"):
        submit_jobs(plan)
    assert desk.queued() == []


# -------------------------------------------------------------------------------------------------------------- resume


def test_a_run_is_resumed_from_its_directory_also_on_another_site(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.submit("again", desk.site()) == 0
    layout = desk.lab.layout("again")
    assert main(["stop", str(layout.root)]) == 0
    assert layout.stop_request.exists()
    assert main(["resume", str(layout.root), "run.num_steps=9"]) == 0
    assert "changed     run.num_steps: 6 → 9" in capsys.readouterr().out
    assert read_resolved(layout)[0].run.num_steps == 9
    assert not layout.stop_request.exists()
    assert main(["stop", str(layout.root)]) == 0
    other = desk.site(cluster=JOBS)
    assert main(["resume", str(layout.root), str(other)]) == 0
    assert layout.site.read_bytes() == other.read_bytes()
    assert [record.name for record in read_job_records(layout)] == [
        "hetjob", "hetjob", "controller", "trainer", "generation",
    ]  # fmt: skip
    assert json.loads(layout.job_plan.read_bytes())["placement"] == "jobs"


def test_a_resume_of_a_complete_run_is_refused(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert desk.submit("complete", desk.site()) == 0
    layout = desk.lab.layout("complete")
    assert main(["stop", str(layout.root)]) == 0
    layout.summary.write_text("{}")
    assert main(["resume", str(layout.root)]) == EXIT_CONFIG
    assert "complete, 6 steps" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- scale


@pytest.mark.parametrize("placement", ["hetjob", "jobs"])
def test_generators_are_added_and_the_youngest_retired(
    desk: Desk, placement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.submit(f"scale-{placement}", desk.site(cluster={"placement": placement})) == 0
    layout = desk.lab.layout(f"scale-{placement}")
    root = str(layout.root)
    planned = desk.queued()
    assert main(["scale", root, "--generators", "+2", "--partition", "scavenge"]) == 0
    assert main(["scale", root, "--generators", "+1"]) == 0
    records = [record for record in read_job_records(layout) if record.is_elastic]
    assert [(r.name, r.array_size, r.first_replica, r.partition) for r in records] == [
        ("generation-1", 2, 2, "scavenge"),
        ("generation-2", 1, 4, "gen"),
    ]
    first, second = (record.job_id for record in records)
    assert desk.queued() == sorted([*planned, f"{first}_0", f"{first}_1", f"{second}_0"])
    assert f"--plan {layout.scripts}/generation-1.json --job generation-1" in shown_script(layout, "generation-1")
    assert {f"generator-{k}" for k in (2, 3, 4)} <= set(allowed_keys(layout.secrets).values())
    capsys.readouterr()

    assert main(["scale", root, "--generators", "-2", "--dry-run"]) == 0
    assert f"would retire   generator-4 (job {second}_0, pending)" in capsys.readouterr().out
    assert main(["scale", root, "--generators", "-2"]) == 0
    assert desk.queued() == sorted([*planned, f"{first}_0"])
    assert main(["scale", root, "--generators", "-2"]) == EXIT_CONFIG
    assert "-2: only added generators can be retired, and there are 1" in capsys.readouterr().err
    assert main(["scale", root, "--generators", "-1"]) == 0
    assert main(["scale", root, "--generators", "-1"]) == EXIT_CONFIG
    assert "only added generators can be retired, and there are none" in capsys.readouterr().err
    assert main(["scale", root, "--generators", "+1"]) == 0
    assert read_job_records(layout)[-1].first_replica == 5  # no number is given twice

    assert main(["stop", root]) == 0
    assert desk.queued() == []
    assert main(["scale", root, "--generators", "+1"]) == EXIT_CONFIG
    assert "the controller's job is not in the queue" in capsys.readouterr().err


def shown_script(layout: RunLayout, name: str) -> str:
    return (layout.scripts / f"{name}.sbatch").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("added", "cancelled"), [(1, ""), (20, "1,3,5,7,9,11,13,15,17,19"), (40, "1,4,6,9,11,14,16,19,21,24,26,29,31,34")]
)
def test_those_that_wait_are_retired_before_those_that_work(desk: Desk, added: int, cancelled: str) -> None:
    """Of the tasks that are left squeue writes [0-18:2], or a list that it cuts off."""
    name = f"order-{added}"
    assert desk.submit(name, desk.site()) == 0
    layout = desk.lab.layout(name)
    assert main(["scale", str(layout.root), "--generators", f"+{added}"]) == 0  # they wait
    if cancelled:
        desk.cluster.run("scancel", f"{read_job_records(layout)[-1].job_id}_[{cancelled}]")
    assert main(["scale", str(layout.root), "--generators", "+1", str(desk.site(common={"extra": []}))]) == 0
    works, waits = read_job_records(layout)[-1].job_id, read_job_records(layout)[-2].job_id
    wait_until(lambda: shown(desk, works, "JobState") == "RUNNING", "it waits for the run's first attempt")
    newest = max(task for task in range(added) if f"{waits}_{task}" in desk.queued())
    assert main(["scale", str(layout.root), "--generators", "-1"]) == 0
    assert f"{waits}_{newest}" not in desk.queued()
    assert f"{works}_0" in desk.queued()


def test_an_addition_that_sbatch_refuses_leaves_no_plan(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert desk.submit("no-plan", desk.site()) == 0
    layout = desk.lab.layout("no-plan")
    assert main(["scale", str(layout.root), "--generators", "+1", "--partition", "gne"]) == EXIT_CONFIG
    assert "gne" in capsys.readouterr().err
    assert not list(layout.scripts.glob("generation-*"))
    gone = desk.site(prologue={"venv": str(desk.lab.root / "gone")})
    assert main(["scale", str(layout.root), "--generators", "+1", str(gone)]) == EXIT_CONFIG
    assert "gone/bin/activate': the environment is not here" in capsys.readouterr().err
    assert not list(layout.scripts.glob("generation-*"))
