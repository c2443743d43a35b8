"""What an attempt comes to: a table of ends and verdicts."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.run_files.plan_file import JobPart, Limits, Part, Share
from launch.run_files.records import ExitRecord, write_exit_record
from launch.run_files.run_state import Attempt, Cause, Outcome
from launch.slurm.queue import ThisJob
from launch.supervisor.controller_job import write_result
from launch.supervisor.outcomes import OutcomeClassifier, asked_to_end
from rlhpc.base.run_directory import RunLayout

ATTEMPT = Attempt(2, 40, 12, 0)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    for directory in (layout.jobs, layout.checkpoints, layout.logs):
        directory.mkdir()
    return layout


def plan_of_jobs(layout: RunLayout) -> JobPart:
    def part(name: str, role: str, count: int) -> Part:
        return Part(name, (Share(role, count, 0),), role == "controller", (), 0, ("python3",), {}, {})

    parts = (part("controller", "controller", 1), part("trainer", "trainer", 2))
    limits = Limits(meet_s=10, stall_s=10, max_retries=1)
    return JobPart(layout, layout.job_plan, "jobs", "controller", False, parts, limits, "requeue", ())


def classifier(layout: RunLayout) -> OutcomeClassifier:
    return OutcomeClassifier(plan_of_jobs(layout), ThisJob.of({"SLURM_JOB_ID": "12"}))


def ended(layout: RunLayout, name: str, status: int, words: str = "") -> None:
    role, _, replica = name.rpartition("-")
    path = layout.exit_record(role, int(replica), ATTEMPT.index)
    path.parent.mkdir(exist_ok=True)
    write_exit_record(path, ExitRecord(name, status, words, 1, "n1", "12"))


@pytest.mark.parametrize(
    ("status", "asked", "end_requested", "cause"),
    [
        (0, Cause.TIME, False, Cause.TIME),
        (137, Cause.TIME, False, Cause.TIME),  # killed at the last moment: the next life goes on
        (0, Cause.YIELD, False, Cause.YIELD),
        (3, Cause.YIELD, False, Cause.FAILED),
        (0, Cause.STOP, False, Cause.STOP),
        (143, Cause.STOP, False, Cause.STOP),  # asked while it was still importing: not to be tried again
        (0, Cause.SIGNAL, True, Cause.SIGNAL),
        (3, Cause.SIGNAL, True, Cause.SIGNAL),
        (137, Cause.ABORT, False, Cause.ABORT),
        (137, Cause.FENCED, False, Cause.FENCED),
        (137, Cause.STALLED, False, Cause.STALLED),
        (2, None, False, Cause.SETTINGS),
        (5, None, False, Cause.ALONE),
        (3, None, False, Cause.FAILED),
        (70, None, False, Cause.FAILED),
        (0, None, False, Cause.FAILED),  # nobody asked it to end, and the run is not complete
    ],
)
def test_how_the_controller_ended_and_why_decide(
    layout: RunLayout, status: int, asked: Cause | None, end_requested: bool, cause: Cause
) -> None:
    assert classifier(layout).classify(status, ATTEMPT, asked, "why", end_requested).cause is cause


def test_a_failure_that_no_process_explains_has_the_reason_it_was_ended_for(layout: RunLayout) -> None:
    outcome = classifier(layout).classify(137, ATTEMPT, Cause.FAILED, "no step for 15 s", end_requested=False)
    assert (outcome.cause, outcome.text) == (Cause.FAILED, "no step for 15 s")


def test_a_complete_run_needs_the_word_of_every_rank(layout: RunLayout) -> None:
    layout.summary.touch()
    ended(layout, "trainer-0", 0)
    outcome = classifier(layout).classify(0, ATTEMPT, None, "", end_requested=False)
    assert (outcome.cause, outcome.text) == (Cause.UNCLEAN, "complete, but trainer ranks 1 did not exit cleanly")
    ended(layout, "trainer-1", 0)
    assert classifier(layout).classify(0, ATTEMPT, None, "", end_requested=False).cause is Cause.COMPLETE


def test_the_trainer_is_named_before_the_controller_that_failed_with_it(layout: RunLayout) -> None:
    ended(layout, "controller-0", 3, "RoleFailed: trainer-0 is silent")
    ended(layout, "trainer-1", 137, "CUDA error")
    outcome = classifier(layout).classify(3, ATTEMPT, None, "", end_requested=False)
    assert outcome.cause is Cause.FAILED
    log = layout.log("trainer", 1, ATTEMPT.index)
    assert outcome.text == f"trainer-1 on n1 ended with signal SIGKILL: CUDA error (log: {log})"


def test_settings_that_a_rank_refuses_are_settings_whatever_the_controller_says(layout: RunLayout) -> None:
    ended(layout, "trainer-1", 2, "trainer.device='cuda': no GPU")
    outcome = classifier(layout).classify(3, ATTEMPT, None, "", end_requested=False)
    assert outcome.cause is Cause.SETTINGS
    assert "no GPU" in outcome.text


def test_every_cause_says_what_follows() -> None:
    for cause in Cause:
        assert cause.follows in ("end", "requeue", "again", "leave")
        assert cause.words
    assert Cause.TIME.follows == "requeue"
    good = {Cause.COMPLETE, Cause.STOP, Cause.TIME, Cause.YIELD}
    assert {cause for cause in Cause if cause.status == 0} == good


def test_a_user_who_asks_to_stop_is_heard_and_one_who_asks_for_now_is_heard_first(layout: RunLayout) -> None:
    assert asked_to_end(layout) is None
    layout.stop_request.touch()
    assert (outcome := asked_to_end(layout)) is not None
    assert outcome.cause is Cause.STOP
    layout.abort_request.touch()
    assert (outcome := asked_to_end(layout)) is not None
    assert outcome.cause is Cause.ABORT


@pytest.mark.parametrize(
    ("cause", "is_complete", "result"),
    [
        (Cause.COMPLETE, True, ("success", {"steps": 7})),
        (Cause.UNCLEAN, True, ("error", "how it ended")),
        (Cause.STOP, False, ("error", "how it ended")),
    ],
)
def test_the_result_of_a_job_is_the_summary_of_a_run_that_is_complete_and_ended_well(
    layout: RunLayout, cause: Cause, is_complete: bool, result: tuple[str, Any]
) -> None:
    if is_complete:
        layout.summary.write_text('{"steps": 7}')
    write_result(plan_of_jobs(layout), ThisJob.of({"SLURM_JOB_ID": "12"}), Outcome(cause, "how it ended"))
    assert pickle.loads((layout.logs / "slurm" / "12_0_result.pkl").read_bytes()) == result


@pytest.mark.parametrize(("kind", "by"), [("jobs", "Slurm"), ("local", "a signal")])
def test_a_run_on_this_machine_was_not_ended_by_slurm(layout: RunLayout, kind: str, by: str) -> None:
    plan = replace(plan_of_jobs(layout), placement=kind)
    outcome = OutcomeClassifier(plan, ThisJob.of({"SLURM_JOB_ID": "12"})).classify(1, ATTEMPT, None, "", True)
    assert outcome.text.startswith(f"ended by {by}: ")
