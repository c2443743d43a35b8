"""What Slurm answers late, hides, refuses or remarks is passed on as it is, and no more is made of it.

Programs on PATH print what was recorded from Slurm 22.05.8.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from launch.commands import stop
from launch.doctor import slurm_plan
from launch.doctor.probe_jobs import last_error
from launch.doctor.slurm_plan import check_plan, find_unfit, try_components
from launch.run_files.plan_file import JobPart, Limits, Part, Share
from launch.run_files.run_state import Cause, Outcome
from launch.slurm import cluster_facts, queue
from launch.slurm import commands as slurm_commands
from launch.slurm.cluster_facts import ask_cluster
from launch.slurm.commands import SlurmError
from launch.slurm.queue import ThisJob, TimeLimit, cancel, component_states
from launch.supervisor import other_jobs
from launch.supervisor.processes import AttemptStarter, BeginError, Signals
from rlhpc.base.run_directory import RunLayout
from tests.unit.launch.site_kit import plan_of
from tests.unit.launch.test_slurm_check import CONFIG, FACTS, NODES, PARTITIONS

pytestmark = pytest.mark.starts

AWAY = 'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1'
TIMED_OUT = 'echo "allocation failure: Socket timed out on send/recv operation" >&2; exit 1'
DENIED = 'echo "slurm_load_{}s error: Access/permission denied" >&2; exit 1'


class Commands:
    """Slurm's commands, by the test's own programs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def put(self, name: str, body: str) -> None:
        """body: lines of sh; $n is the number of the call, from 1."""
        calls = self.directory / f"{name}.calls"
        path = self.directory / name
        path.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nn=$(wc -l < {calls})\n{body}\n')
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        path = self.directory / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_commands, "PAUSE_S", 0.05)
    return Commands(tmp_path / "bin")


# ------------------------------------------------------------------------------------------------------ time limits


def test_an_end_that_slurm_did_not_say_at_first_is_asked_for_until_it_is_known(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ASK_AGAIN_S", 0.0)
    commands.put("squeue", f"[ $n -le 2 ] && {{ {AWAY}; }}; echo 2:00")
    limit = TimeLimit(ThisJob.of({"SLURM_JOB_ID": "12"}), {})
    assert (limit.is_known, limit.in_words()) == (False, "until a time limit that is not known yet")
    assert limit.left_s() == float("inf")
    assert 110 < limit.left_s() <= 120
    asked = len(commands.calls("squeue"))
    assert limit.life_s <= 121
    assert len(commands.calls("squeue")) == asked, "what is known is not asked for again"


def test_an_unknown_end_is_asked_for_once_a_minute_and_no_limit_is_an_answer(commands: Commands) -> None:
    commands.put("squeue", AWAY)
    limit = TimeLimit(ThisJob.of({"SLURM_JOB_ID": "12"}), {})
    assert [limit.left_s() for _ in range(20)] == [float("inf")] * 20
    assert len(commands.calls("squeue")) == 1
    commands.put("squeue", "echo UNLIMITED")
    limit = TimeLimit(ThisJob.of({"SLURM_JOB_ID": "12"}), {})
    assert (limit.is_known, limit.end, limit.in_words()) == (True, None, "without a time limit")


def test_what_was_known_of_an_end_holds_where_slurm_is_silent(commands: Commands) -> None:
    commands.put("squeue", "echo 2:00")
    limit = TimeLimit(ThisJob.of({"SLURM_JOB_ID": "12"}), {})
    commands.put("squeue", AWAY)
    limit.ask()
    assert 110 < limit.left_s() <= 120


def test_the_end_in_the_environment_is_compared_with_slurms_own_answer(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of slurmctld's clock, and that of a node may be behind."""
    monkeypatch.setattr(queue, "ASK_AGAIN_S", 0.0)
    commands.put("squeue", "echo 2:00")
    limit = TimeLimit(ThisJob.of({"SLURM_JOB_ID": "12"}), {"SLURM_JOB_END_TIME": str(int(time.time()) + 600)})
    assert 110 < limit.left_s() <= 120


def test_a_clock_that_is_set_while_a_job_runs_changes_nothing(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.put("squeue", "echo 2:00")
    limit = TimeLimit(ThisJob.of({"SLURM_JOB_ID": "12"}), {})
    monkeypatch.setattr(queue.time, "time", lambda: 0.0)
    assert 110 < limit.left_s() <= 120


# ------------------------------------------------------------------------------------------------- doctor and submit


def scontrol(hidden: tuple[str, ...]) -> str:
    """Shows all but these kinds, which PrivateData keeps for operators."""
    cases = [f"  {kind}) {DENIED.format(kind)};;" for kind in hidden]
    shown = {"partition": PARTITIONS, "node": NODES, "config": CONFIG}
    cases += [f"  {kind}) cat <<'END'\n{text}\nEND\n  ;;" for kind, text in shown.items() if kind not in hidden]
    return "\n".join(['[ "$1" = --version ] && { echo slurm-wlm 22.05.8; exit; }', 'case "$2" in', *cases, "esac"])


def test_what_a_site_hides_is_passed_over(commands: Commands) -> None:
    commands.put("scontrol", scontrol(("partition", "node")))
    commands.put("sacctmgr", "exit 1")
    facts = ask_cluster()
    assert facts.hidden == {"partition", "node"}
    wrong = [finding for finding in check_plan(plan_of(), facts) if finding.verdict != "pass"]
    assert [finding.key for finding in wrong] == ["slurm.PrivateData"]
    assert wrong[0].verdict == "warn"
    assert "hides its nodes and partitions" in wrong[0].text


def test_nodes_alone_may_be_hidden(commands: Commands) -> None:
    commands.put("scontrol", scontrol(("node",)))
    commands.put("sacctmgr", "exit 1")
    facts = ask_cluster()
    assert (facts.nodes, len(facts.partitions)) == ((), 4)
    (line,) = [each.line for each in check_plan(plan_of(), facts) if each.verdict != "pass"]
    assert "hides its nodes" in line


def test_what_is_neither_hidden_nor_there_is_still_an_error(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.put("sacctmgr", "exit 1")
    commands.put("scontrol", f"[ $n = 1 ] && {{ {AWAY}; }}\n{scontrol(())}")
    assert ask_cluster().hidden == frozenset(), "asked once more"
    monkeypatch.setattr(cluster_facts, "PATIENCE_S", 0.0)
    commands.put("scontrol", AWAY)
    with pytest.raises(SlurmError, match="slurmctld does not answer, so nothing could be checked"):
        ask_cluster()
    commands.put("scontrol", 'echo "error: Access/permission denied" >&2; exit 1')
    with pytest.raises(SlurmError, match=r"Slurm cannot be queried, .*Access/permission denied"):
        ask_cluster()


def test_a_list_that_fails_for_another_reason_is_not_taken_for_a_hidden_one(commands: Commands) -> None:
    commands.put("scontrol", f"[ $2 = node ] && {{ echo 'Invalid node name' >&2; exit 1; }}\n{scontrol(())}")
    commands.put("sacctmgr", "exit 1")
    with pytest.raises(SlurmError, match="Invalid node name"):
        ask_cluster()


def test_a_time_out_of_a_trial_submission_is_no_refusal(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.put("sbatch", f"[ $n = 1 ] && {{ {TIMED_OUT}; }}; echo 'sbatch: Job 9 to start' >&2")
    assert [finding.verdict for finding in try_components(plan_of(), FACTS)] == ["pass"] * 3
    assert len(commands.calls("sbatch")) == 4
    monkeypatch.setattr(slurm_plan, "PATIENCE_S", 0.0)
    commands.put("sbatch", TIMED_OUT)
    with pytest.raises(SlurmError, match="slurmctld does not answer, so controller could not be checked"):
        try_components(plan_of(), FACTS)


@pytest.mark.parametrize(
    ("said", "away", "verdict"),
    [("invalid partition specified: gpuu", "", "fail"), ("Requested node configuration is not available", "", "fail"),
     ("Requested node configuration is not available", "h0", "warn"),
     ("Required node not available (down, drained or reserved)", "", "warn")],
)  # fmt: skip
def test_what_sbatch_refuses_is_a_refusal_unless_nodes_that_are_away_may_be_why(
    commands: Commands, said: str, away: str, verdict: str
) -> None:
    nodes = tuple(replace(each, state="DOWN*") if each.name == away else each for each in FACTS.nodes)
    commands.put("sbatch", f"grep -q gres=gpu:2 $2 && {{ echo 'allocation failure: {said}' >&2; exit 1; }}; exit 0")
    findings = find_unfit(plan_of("generation.num_replicas=1"), replace(FACTS, nodes=nodes))
    (wrong,) = [finding for finding in findings if finding.verdict != "pass"]
    assert (wrong.key, wrong.verdict) == ("trainer", verdict)
    assert wrong.text == f"sbatch refuses it: allocation failure: {said}"
    if verdict == "fail":
        assert "it was asked for --partition=gpu --time=1:00:00 --nodes=1" in wrong.remedy


def test_a_probe_that_failed_is_told_in_its_own_words_and_not_in_sruns() -> None:
    log = [
        "Traceback (most recent call last):", "ModuleNotFoundError: No module named 'torch'",
        "slurmstepd: error: step 12.0", "srun: error: g0: task 0: Exited with exit code 1",
    ]  # fmt: skip
    assert last_error(log) == "ModuleNotFoundError: No module named 'torch'"
    assert last_error(log[3:]) == log[3], "better than nothing"
    assert last_error([]) == ""


# -------------------------------------------------------------------------------------------------- what is said of it


def test_a_stop_whose_scancel_fails_says_that_the_request_stands(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.run_files.records import JobRecord, write_job_record

    layout = RunLayout(tmp_path / "run")
    layout.jobs.mkdir(parents=True)
    layout.config.write_text('{"config": {}, "hash": ""}')
    write_job_record(layout, JobRecord(12, "hetjob", "hetjob", None, "p", "s", False, 0, 0, None, 1.0))
    row = "12+0|RUNNING|0|None|cpu|1:13|58:47|1:00:00|2026-03-01T14:05:00|c0|hetjob|"
    commands.put("squeue", f"echo '{row}'")
    commands.put("scancel", 'echo "scancel: error: Kill job error on job id 12: Access/permission denied" >&2; exit 1')
    with pytest.raises(SlurmError) as failed:
        stop.stop_run(layout, now=True, tell=print)
    assert "Kill job error on job id 12" in str(failed.value)
    assert f"the request ABORT is in {layout.root}" in str(failed.value)
    assert "`scancel 12`" in str(failed.value)
    assert layout.abort_request.exists()


def test_a_verdict_has_a_reason_also_where_nobody_gave_one() -> None:
    assert Outcome(Cause.FAILED, " ").text == Cause.FAILED.words
    assert Outcome(Cause.FAILED, "said").text == "said"


def test_an_attempt_that_could_not_be_begun_says_how_its_program_ended(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    part = Part("controller", (Share("controller", 1, 0),), True, (), 0, (str(program),), {}, {})
    layout = RunLayout(tmp_path)
    plan = JobPart(layout, layout.job_plan, "jobs", "controller", False, (part,), Limits(1, 1, 1), "requeue", ())
    with pytest.raises(BeginError, match=f"ended by signal {signal.SIGKILL:d}, without output"):
        AttemptStarter(plan, ThisJob.of({"SLURM_JOB_ID": "12"}), lambda *_: None, Signals(), None).begin(lambda: False)


def test_an_attempt_that_is_no_longer_wanted_is_not_waited_for(tmp_path: Path) -> None:
    endless = (sys.executable, "-c", "import time; time.sleep(600)")
    part = Part("controller", (Share("controller", 1, 0),), True, (), 0, endless, {}, {})
    layout = RunLayout(tmp_path)
    plan = JobPart(layout, layout.job_plan, "jobs", "controller", False, (part,), Limits(1, 1, 1), "requeue", ())
    starter = AttemptStarter(plan, ThisJob.of({"SLURM_JOB_ID": "12"}), lambda *_: None, Signals(), None)
    looks = iter((False, False, True))
    with pytest.raises(BeginError, match=f"ended by signal {signal.SIGKILL:d}"):
        starter.begin(lambda: next(looks, True))


@pytest.mark.parametrize("said", ["", "bye", "[1, 2", "{"])
def test_a_program_that_succeeds_and_says_no_attempt_is_tried_again(tmp_path: Path, said: str) -> None:
    """As an interpreter that a site has wrapped; any other error would end the supervisor, and its job."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    part = Part("controller", (Share("controller", 1, 0),), True, (), 0, (str(program),), {}, {})
    layout = RunLayout(tmp_path)
    plan = JobPart(layout, layout.job_plan, "jobs", "controller", False, (part,), Limits(1, 1, 1), "requeue", ())
    with pytest.raises(BeginError, match="exit status 0, and says no attempt") as failed:
        AttemptStarter(plan, ThisJob.of({"SLURM_JOB_ID": "12"}), lambda *_: None, Signals(), None).begin(lambda: False)
    assert failed.value.status == 1


def test_a_word_of_the_site_among_the_components_of_a_job_is_no_component(commands: Commands) -> None:
    commands.put(
        "squeue", "echo 'Down on 3 May, see the wiki'; echo 'Sorry!'; echo '12+0 RUNNING'; echo '12+1 PENDING'"
    )
    assert component_states(12, 0.0) == {0: "RUNNING", 1: "PENDING"}
    commands.put("squeue", "echo '  12 COMPLETING'")
    assert component_states(12, 0.0) == {0: "COMPLETING"}


OVER = "Invalid job id specified"


@pytest.mark.parametrize(("said", "is_error"), [((OVER, OVER), False), ((OVER, "Access/permission denied"), True)])
def test_a_job_that_could_not_be_cancelled_is_not_taken_for_over_because_another_one_is(
    commands: Commands, said: tuple[str, str], is_error: bool
) -> None:
    lines = [f"echo 'scancel: error: Kill job error on job id {12 + k}: {why}' >&2" for k, why in enumerate(said)]
    commands.put("scancel", "\n".join([*lines, "exit 1"]))
    with pytest.raises(SlurmError, match="job id 13: Access/permission denied") if is_error else nullcontext():
        cancel([12, 13])


def test_a_supervisor_is_not_held_up_by_a_slurm_that_does_not_answer(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may be a minute from its time limit."""
    commands.put("squeue", "exec sleep 600")
    layout, job = RunLayout(tmp_path / "run"), ThisJob.of({"SLURM_JOB_ID": "12"})
    layout.jobs.mkdir(parents=True)
    for module in (queue, other_jobs):
        monkeypatch.setattr(module, "SOON_S", 0.2)
    plan = JobPart(layout, layout.job_plan, "jobs", "c", True, (), Limits(1, 1, 1), "successor", ())
    began = time.monotonic()
    assert other_jobs.may_have_controller(layout, job, 0.2), "nobody has said otherwise"
    assert TimeLimit(job, {}).end is None
    with pytest.raises(SlurmError, match="no answer"):
        other_jobs.gone_jobs(plan, job)
    assert time.monotonic() - began < 30.0, "each waited for half a minute, or a whole one"
    assert len(commands.calls("squeue")) == 3
