"""`rlhpc status` tells of the job that evaluates a run when nothing evaluates, and is silent while it does."""

from __future__ import annotations

import json
import time

import pytest

from tests.unit.launch.test_status_of_jobs import STATUS, Run, line, run  # noqa: F401  a fixture

pytestmark = pytest.mark.starts


@pytest.fixture
def evaluated(run: Run) -> Run:  # noqa: F811
    """Its controller is job 12, the evaluation job 20."""
    run.job(12, "controller")
    run.layout.status.write_text(json.dumps(STATUS | {"unix_time_s": time.time()}))
    run.layout.evaluations.mkdir()
    (run.layout.evaluations / "job.json").write_text('{"job_id": 20}')
    return run


def said_of(run: Run, controllers: str, evaluations: str) -> str:  # noqa: F811
    """What status says of the evaluation's job; controllers, evaluations: what squeue prints of either job."""
    run.script(f"case \"$*\" in *=20,20*) printf '{evaluations}\\n';; *) printf '{controllers}\\n';; esac")
    return "\n".join(row for row in run.text.splitlines() if row.startswith("evaluation"))


UP = line("12", "RUNNING", nodes="c0").strip()


def test_one_that_runs_is_not_told(evaluated: Run) -> None:
    assert said_of(evaluated, UP, line("20", "RUNNING", nodes="g0").strip()) == ""


def test_one_that_is_held_is_told_with_what_releases_it(evaluated: Run) -> None:
    said = said_of(evaluated, UP, line("20", "PENDING", "JobHeldUser").strip())
    assert said.startswith("evaluation  job 20 is PENDING: held by you")
    assert "`scontrol release 20`" in said


@pytest.mark.parametrize("last", ["", line("20", "CANCELLED", nodes="g0").strip()])
def test_one_that_has_ended_while_the_run_goes_on_is_told_with_its_log(evaluated: Run, last: str) -> None:
    said = said_of(evaluated, UP, last)
    assert said.startswith("evaluation  job 20 has ended, and nothing evaluates this run any more")
    assert f"{evaluated.layout.evaluations}/job-20.log" in said


def test_of_a_run_that_has_ended_it_is_not_told(evaluated: Run) -> None:
    assert said_of(evaluated, line("12", "COMPLETED", nodes="c0").strip(), "") == ""
