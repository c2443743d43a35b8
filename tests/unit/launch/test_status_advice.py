"""What `rlhpc status` advises can be done as it is printed, and is not refused.

A little script in squeue's place prints what was recorded from Slurm 22.05.
"""

from __future__ import annotations

import json
import time

import pytest

from tests.unit.launch.test_status_of_jobs import STATUS, Run, line, run, separate  # noqa: F401  fixtures

pytestmark = pytest.mark.starts


@pytest.fixture
def living(run: Run) -> Run:  # noqa: F811
    """Placement `jobs`, up: a controller, a trainer, four generators, and one that was added."""
    run.job(12, "controller")
    run.job(13, "trainer")
    run.job(14, "generation", array_size=4, replicas_per_task=1)
    run.job(15, "generation-1", is_elastic=True, array_size=1, first_replica=4)
    return run


UP = line("12", "RUNNING", nodes="c0") + line("13", "RUNNING", nodes="t0")


def why_of(run: Run, label: str) -> str:  # noqa: F811
    (said,) = [job["why"] for job in run.document["jobs"] if job["id"] == label]
    return str(said)


def test_a_resume_is_not_advised_while_the_run_lives_which_would_refuse_it(living: Run) -> None:
    living.queue(UP + line("14_0", "RUNNING", nodes="g0") + line("14_1", "PREEMPTED", nodes="g1")
                 + line("14_2", "CANCELLED", nodes="g2") + line("14_3", "NODE_FAIL", nodes="g3")
                 + line("15_0", "PREEMPTED", nodes="g1"))  # fmt: skip
    assert "rlhpc resume" not in living.text
    assert why_of(living, "14_1").endswith("; will be resubmitted by the controller's job")
    assert why_of(living, "14_2").endswith("; not resubmitted")
    assert f"`rlhpc scale {living.layout.root} --generators +1` adds another" in why_of(living, "15_0")
    living.job(27, "generation", array_size=4, replicas_per_task=1, follows=14, tasks=[1])
    living.queue(UP + line("14_1", "PREEMPTED", nodes="g1") + line("14_3", "NODE_FAIL", nodes="g3")
                 + line("27_1", "RUNNING", nodes="g2"))  # fmt: skip
    assert why_of(living, "14_1").endswith("; replaced by job 27")
    assert why_of(living, "14_3").endswith("; will be resubmitted by the controller's job")
    living.queue(line("12", "NODE_FAIL", nodes="c0") + line("14_1", "PREEMPTED", nodes="g1"))
    assert f"`rlhpc resume {living.layout.root}` continues" in why_of(living, "14_1")


def test_a_job_whose_time_was_cut_short_is_not_said_to_have_come_to_its_limit(living: Run) -> None:
    cut = line("14_0", "TIMEOUT", nodes="g0").replace("|1:13|", "|41:00|")
    whole = line("14_1", "TIMEOUT", nodes="g1").replace("|1:13|", "|1:00:04|")
    living.queue(UP + cut + whole)
    assert why_of(living, "14_0").startswith("was ended 19 min 00 s before its time limit, as after the grace time of")
    assert why_of(living, "14_1").startswith("reached its time limit")


def test_who_takes_over_is_told_while_it_waits_and_not_when_both_run(living: Run) -> None:
    living.job(28, "trainer", follows=13)
    living.queue(UP + line("28", "PENDING", "Dependency"))
    assert living.document["next"][-1] == "job 28 continues the run when job 13 has ended"
    living.queue(UP + line("28", "RUNNING", nodes="t1"))
    assert not [said for said in living.document["next"] if "continues the run when" in said]
    living.queue(line("12", "RUNNING", nodes="c0") + line("13", "NODE_FAIL", nodes="t0") + line("28", "PENDING"))
    assert not [said for said in living.document["next"] if "continues the run when" in said]


def test_a_site_whose_runs_go_on_in_successors_is_not_promised_a_requeue(living: Run) -> None:
    living.queue(UP)
    plan = {"jobs": [{"name": "controller", "components": []}], "continuation": "successor"}
    living.layout.job_plan.write_text(json.dumps(plan))
    assert living.document["next"][0].endswith("job 12 saves, ends, and its successor continues")
    living.layout.job_plan.write_text(json.dumps({**plan, "continuation": "requeue"}))
    assert living.document["next"][0].endswith("job 12 saves, is requeued or submits a successor, and continues")


def test_a_successor_that_waits_for_the_end_of_a_job_is_shown(living: Run) -> None:
    living.job(28, "controller", follows=12)
    living.queue(UP + line("28", "PENDING", "Dependency"))
    assert living.document["next"][-1] == "job 28 continues the run when job 12 has ended"


def test_why_a_heterogeneous_job_is_held_is_said_once_in_the_table_and_once_below(run: Run) -> None:  # noqa: F811
    run.job(12, "hetjob")
    run.queue("".join(line(f"12+{k}", "PENDING", "JobHeldUser") for k in (2, 1, 0)))
    assert run.text.count("held by you") == 2
    assert run.text.count("the same") == 2
    assert [said for said in run.document["next"] if "stays in the queue" in said] == [
        "job 12 stays in the queue: held by you (or a coordinator of the account); `scontrol release 12` releases it"
    ]


def test_for_a_job_that_never_began_no_log_is_advised_and_the_drained_node_is_named(run: Run) -> None:  # noqa: F811
    run.job(12, "controller")
    run.queue(line("12", "PENDING", "launch failed requeued held"))
    sinfo = run.bin / "sinfo"
    rows = "g0|Prolog error|2026-11-22T01:19:34\\ng1|disk is full|2026-11-20T08:00:00\\n"
    sinfo.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    sinfo.chmod(0o755)
    text = run.text
    assert "rlhpc logs" not in text
    assert "drained nodes: g0: Prolog error, since 2026-11-22T01:19:34: tell" in text
    assert "g1" not in text
    sinfo.write_text("#!/bin/sh\necho 'slurm_load_node: Access/permission denied' >&2; exit 1\n")
    assert "could not be started on its nodes" in run.text


def test_the_run_directory_stands_by_its_name_in_every_line(living: Run) -> None:
    states = ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "CANCELLED", "DEADLINE", "BOOT_FAIL")
    for alive in (UP, ""):
        for state in states:
            living.queue(alive + line("14_0", state, nodes="g0"))
            assert "RUN_DIR" not in living.text
            assert "JOB " not in living.text.replace("JOB   ", "")


def test_what_roles_did_before_the_last_job_ended_is_not_shown(separate: Run) -> None:  # noqa: F811
    role = {"name": "generator-0", "state": "sampling", "version": 3, "silent_s": 0.5, "waits_for": "", "metrics": {}}
    document = STATUS | {"unix_time_s": time.time() - 900, "roles": [role]}
    separate.layout.status.write_text(json.dumps(document))
    assert "sampling" in separate.text
    separate.queue("".join(line(job, "FAILED", nodes="c0") for job in ("12", "13", "14_0", "15_0", "16")))
    assert "none of its jobs is alive" in separate.text
    assert "sampling" not in separate.text
