"""What Slurm answers, late or never, is read as it is, and no more is made of it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest

from launch.commands import stop
from launch.doctor import slurm_plan
from launch.doctor.probe_jobs import last_error
from launch.doctor.slurm_plan import check_plan, find_unfit, refuse_unfit, try_components
from launch.run_files.run_state import Cause, Outcome
from launch.slurm import cluster_facts, queue
from launch.slurm.cluster_facts import ask_cluster
from launch.slurm.commands import SlurmError, is_away
from launch.slurm.queue import TimeLimit, cancel, component_states, look_at_jobs, moment_unix_s
from launch.slurm.states import (
    REASONS,
    STATES,
    EndedBy,
    JobStage,
    JobState,
    is_stuck,
    reason_in_words,
    state_of,
)
from launch.supervisor import other_jobs
from launch.supervisor.processes import AttemptStarter, BeginError, Signals
from rlhpc.base.run_directory import RunLayout
from tests.patience import PATIENCE_S
from tests.unit.launch.site_kit import AWAY, job_of_id, job_part, part_of, plan_of
from tests.unit.launch.test_slurm_check import CONFIG, FACTS, NODES, PARTITIONS

pytestmark = pytest.mark.starts

# ------------------- Every state and every reason of Slurm's has its place and its sentence, and an unknown one does no

BASE = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED",
    "RUNNING", "SUSPENDED", "TIMEOUT",
}  # fmt: skip
FLAGS = {
    "COMPLETING", "CONFIGURING", "EXPEDITING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED",
    "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT",
    "STOPPED", "UPDATE_DB",
}  # fmt: skip


def named(condition: str, states: tuple[JobState, ...] = STATES) -> set[str]:
    return {state.name for state in states if condition in (state.life.value, state.ended_by.value)}


def test_the_table_holds_every_state_and_flag_that_slurm_documents_once():
    assert {state.name for state in STATES} == BASE | FLAGS
    assert len(STATES) == len(BASE) + len(FLAGS)
    codes = [state.code for state in STATES if state.code]
    assert len(codes) == len(set(codes))
    assert all(state.sentence for state in STATES)
    assert len({state.sentence for state in STATES}) == len(STATES)


def test_who_ended_a_job_what_waits_and_what_is_held_are_told_apart():
    assert named("success") == {"COMPLETED"}
    assert named("Slurm's world") == {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED"}
    assert named("the user or an administrator") == {"CANCELLED"}
    assert named("the run itself") == {"FAILED", "OUT_OF_MEMORY"}
    assert named("a limit of the site") == {"TIMEOUT", "DEADLINE"}
    assert {s.name for s in STATES if s.is_worth_resuming} == {"TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
    for state in STATES:  # somebody has ended a job exactly if it is over
        assert state.is_alive == (state.ended_by is EndedBy.NOBODY), state.name
        assert not (state.is_alive and state.is_worth_resuming), state.name
        assert not (state.is_restarted_by_slurm and not state.is_alive), state.name
    held = [state for state in STATES if state.life is JobStage.HELD]
    assert {state.name for state in held} == {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "LAUNCH_FAILED"}
    assert all("scontrol release" in state.sentence or "rlhpc stop" in state.sentence for state in held)
    assert named("waiting") == {"PENDING", "REQUEUED", "REQUEUE_FED", "EXPEDITING", "RECONFIG_FAIL"}
    assert named("on nodes") == {
        "RUNNING", "SUSPENDED", "CONFIGURING", "POWER_UP_NODE", "RESIZING", "SIGNALING", "STOPPED"
    }  # fmt: skip
    assert named("ending") == {"COMPLETING", "STAGE_OUT", "UPDATE_DB"}
    assert all(state.is_restarted_by_slurm for state in STATES if state.life is JobStage.WAITING)
    assert state_of("SUSPENDED").is_restarted_by_slurm
    assert not state_of("STOPPED").is_restarted_by_slurm


def test_a_state_is_read_as_slurm_dresses_it_and_names_its_remedy():
    for word, name in (
        ("CANCELLED by 1000", "CANCELLED"), ("PREEMPTED+", "PREEMPTED"), ("oom", "OUT_OF_MEMORY"), (" R \n", "RUNNING")
    ):  # fmt: skip
        assert state_of(word).name == name
    for word, remedy in (
        ("OUT_OF_MEMORY", "memory_gib_per_gpu"), ("TIMEOUT", "cluster.warn_s"), ("DEADLINE", "--deadline"),
        ("FAILED", "rlhpc logs"), ("CANCELLED", "rlhpc resume"), ("PREEMPTED", "rlhpc resume"),
    ):  # fmt: skip
        assert remedy in state_of(word).sentence


@pytest.mark.parametrize("word", ["HIBERNATING", "", "N/A"])
def test_an_unknown_state_is_alive_and_says_that_it_is_unknown(word):
    state = state_of(word)
    assert (state.is_alive, state.is_known, state.is_worth_resuming) == (True, False, False)
    assert "unknown to rlhpc" in state.sentence


# ------------------------------------------------------------------------------------------------------------- reasons


def test_a_reason_is_explained_in_words_of_its_own():
    assert all(reason_in_words(reason) == words and " " in words for reason, words in REASONS.items())
    said = reason_in_words("(ReqNodeNotAvail, UnavailableNodes:g[0-1])")
    assert said.startswith(REASONS["ReqNodeNotAvail"])
    assert said.endswith("(UnavailableNodes:g[0-1])"), "what Slurm adds is kept"
    assert (reason_in_words("MoonPhase"), reason_in_words("")) == ("MoonPhase", "")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxJobsPerUserLimit", "this QOS has as many running jobs in use as it allows per user"),
        ("QOSMaxCpuPerUserLimit", "this QOS has as many cores in use as it allows per user"),
        ("AssocGrpCpuLimit", "this account has as many cores in use as it allows"),
        ("AssocGrpGRES", "this account has as many GPUs in use"),
        ("AssocGrpCPUMinutesLimit", "this account has used up its minutes of cores"),
        ("AssocGrpCPURunMinutesLimit", "this account has as many minutes of cores in use"),
        ("AssocMaxWallDurationPerJobLimit", "requests more time than this account allows per job"),
        ("QOSMaxWallDurationPerJobLimit", "allows per job; lower `time` in the site file, or another `qos`"),
        ("QOSMaxGRESPerUser", "if none of them runs, this one alone is beyond the limit: a smaller size"),
        ("QOSMaxGRESPerNode", "requests more GPUs than this QOS allows per node"),
        ("QOSMinGRES", "requests fewer GPUs than the minimum of this QOS"),
        ("MaxJobsPerAccount", "as many running jobs in use as it allows per account"),
        ("AssocMaxSubmitJobLimit", "as many submitted jobs"),
        # texts in the reason's place
        ("launch failed requeued held", "scontrol release"),
        ("job requeued in held state", "scontrol release"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "drained"),
    ],
)
def test_a_limit_is_taken_apart_into_whose_it_is_and_of_what(reason, words):
    assert words in reason_in_words(reason)


def test_only_what_never_starts_by_itself_is_stuck():
    stuck = ("JobHeldUser", "DependencyNeverSatisfied", "job requeued in held state", "launch failed requeued held")
    beyond = ("QOSMaxGRESPerJob", "QOSMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "QOSMaxCpuPerNode")
    assert all(is_stuck(reason) for reason in (*stuck, *beyond, "QOSMinGRES"))
    waits = ("QOSMaxGRESPerUser", "QOSMaxJobsPerUserLimit", "AssocGrpGRESMinutes", "AssocMaxJobsLimit")
    waits += ("Resources", "Dependency", "BeginTime", "QOSGrpGRES", "None", "")
    assert not any(is_stuck(reason) for reason in waits)


# ----------------------------------------- what squeue and sacct print becomes rows; what they do not print, a sentence

QUEUE = """\
12+0      |RUNNING  |1  |None  |cpu  |1:13  |58:47  |1:00:00  |2026-03-01T14:05:00  |c0  |hetjob  |
12+1      |RUNNING  |1  |None  |train  |1:13  |58:47  |1:00:00  |2026-03-01T14:05:00  |t[0-1]  |a|b  |
13_2|PENDING  |0  |JobArrayTaskLimit  |gen  |0:00  |2-00:00:00  |2-00:00:00  |N/A  |  |gen  |
13_4|PENDING  |0  |JobArrayTaskLimit  |gen  |0:00  |2-00:00:00  |2-00:00:00  |N/A  |  |gen  |
13_5|PENDING  |0  |JobArrayTaskLimit  |gen  |0:00  |2-00:00:00  |2-00:00:00  |N/A  |  |gen  |
13_6|PENDING  |1  |BeginTime  |gen  |0:00  |2-00:00:00  |2-00:00:00  |N/A  |  |gen  |
13_0      |RUNNING  |0  |None  |gen  |1-02:03:04  |UNLIMITED  |UNLIMITED  |2026-03-01T14:05:00  |g0  |gen  |
14        |PENDING  |0  |ReqNodeNotAvail, UnavailableNodes:g0  |gen|0:00|1:00:00|1:00:00|2026-03-02T00:00:00||x  |
"""
ACCOUNTS = (
    "15_3|CANCELLED by 1000|gen|00:10:00|01:00:00|2026-03-01T14:05:00|g3|gen\n15+1|NODE_FAIL|gen|1-00:00:00|x|x|g1|h\n"
)


@pytest.mark.parametrize("banner", ["", "some banner of the site\nx|y\n"])
def test_components_and_arrays_are_told_apart_and_tasks_that_wait_for_the_same_are_one_row(commands, banner):
    commands.prints("squeue", banner + QUEUE)
    rows = look_at_jobs([12, 13, 14]).rows
    assert len(commands.calls("squeue")) == 1, "one call is enough for all"
    assert [row.label for row in rows] == ["12+0", "12+1", "13_0", "13_6", "13_[2,4-5]", "14"]
    leader, second, task, _, waiting, last = rows
    assert (leader.component, second.component, second.nodes, second.restarts) == (0, 1, "t[0-1]", 1)
    assert second.name == "a|b"
    assert (task.array_task, task.used_s, task.left_s, task.limit_s) == (0, 93784, None, None)
    assert (waiting.array_task, waiting.waiting_tasks, waiting.reason) == (None, "2,4-5", "JobArrayTaskLimit")
    assert (waiting.tasks, waiting.start_unix_s) == ([2, 4, 5], None)
    assert last.reason == "ReqNodeNotAvail, UnavailableNodes:g0"
    assert last.start_unix_s is not None
    assert time.localtime(last.start_unix_s)[:5] == (2026, 3, 2, 0, 0)
    assert [row.label for row in look_at_jobs([14, 12]).rows] == ["14", "12+0", "12+1"], "in the order asked for"
    commands.prints("squeue", QUEUE.replace("RUNNING", "DREAMING"))
    assert look_at_jobs([12]).rows[0].state.life is JobStage.UNKNOWN


def test_what_squeue_has_forgotten_is_asked_of_the_accounts(commands):
    commands.prints("squeue", QUEUE)
    commands.prints("sacct", ACCOUNTS)
    look = look_at_jobs([14, 15, 16])
    assert [(row.label, row.state.name, row.restarts) for row in look.rows] == [
        ("14", "PENDING", 0), ("15_3", "CANCELLED", None), ("15+1", "NODE_FAIL", None),
    ]  # fmt: skip
    assert look.unknown == (16,)
    assert "--jobs=15,16" in commands.calls("sacct")[0]


@pytest.mark.parametrize(
    "sacct",
    [
        "echo 'Slurm accounting storage is disabled' >&2; exit 1",
        # Slurm calls these runaway jobs: `rlhpc stop` and `--wait` waited for them for ever.
        "echo '15|RUNNING|gpu|10-00:00:00|01:00:00|2026-03-01T14:05:00|g0|demo.trainer'",
    ],
)
def test_a_job_that_squeue_has_forgotten_and_whose_end_the_accounts_lack_is_unknown(commands, sacct):
    commands.prints("squeue", "")
    commands.put("sacct", sacct)
    look = look_at_jobs([15])
    assert (look.rows, look.unknown, look.trouble) == ((), (15,), "")


def test_without_slurm_or_its_answer_there_is_a_sentence_and_no_error(commands, monkeypatch):
    commands.put("squeue", "exec sleep 600")
    began = time.monotonic()
    assert "no answer in 0.3 s" in look_at_jobs([7], timeout_s=0.3).trouble
    assert time.monotonic() - began < PATIENCE_S
    commands.put("squeue", AWAY)
    assert "Unable to contact slurm controller" in look_at_jobs([7]).trouble
    calls = len(commands.calls("squeue"))
    assert look_at_jobs([]).trouble == ""
    assert len(commands.calls("squeue")) == calls, "no jobs, no call"
    monkeypatch.setenv("PATH", str(commands.directory.parent))
    look = look_at_jobs([7])
    assert (look.rows, look.unknown) == ((), ())
    assert "squeue: no such command here" in look.trouble


def test_what_people_set_for_squeue_does_not_reach_it(commands, monkeypatch):
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    commands.put("squeue", f"env > {commands.directory}/seen")
    look_at_jobs([7])
    seen = (commands.directory / "seen").read_text().splitlines()
    assert "SLURM_TIME_FORMAT=standard" in seen
    assert not [line for line in seen if line.startswith("SQUEUE_")]
    assert os.environ["SQUEUE_STATES"] == "RUNNING"


def test_moments_are_local_time():
    now = 1_768_478_400.0  # 15 January 2026, 12:00 UTC: an hour that is in no zone there twice
    assert moment_unix_s(time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))) == now
    assert moment_unix_s("N/A") is None
    assert moment_unix_s("Unknown") is None


def test_a_job_of_a_long_name_is_known_as_its_runs(commands):
    """squeue cuts what is wider than it was asked for."""
    name = "-".join(["sweep", *(f"trainer.learning_rate_{k}e-6" for k in range(8))]).replace(".", "_")
    row = f"12|RUNNING|0|None|cpu|1:13|58:47|1:00:00|N/A|c0|{name}"
    width = "width=$(echo \"$*\" | sed 's/.*,Name:\\([0-9]*\\).*/\\1/')"
    commands.put("squeue", f"{width}; echo '{row}' | cut -c1-$((38 + width))")
    look = look_at_jobs([12], run_name=name)
    assert (len(look.rows), len(look.others), len(name) > 100) == (1, 0, True)


def test_an_empty_list_with_an_error_says_of_no_job_that_it_has_ended(commands):
    """Whatever the status of squeue is: `rlhpc stop` would leave what runs."""
    commands.put("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2")
    look = look_at_jobs([12], timeout_s=1.0, patience_s=0.1)
    assert "Unable to contact slurm controller" in look.trouble
    commands.put("sacct", "exit 1")
    for said in ("slurm_load_jobs error: Invalid job id specified", "squeue: error: an old option in slurm.conf"):
        commands.put("squeue", f"echo '{said}' >&2")
        assert look_at_jobs([12]).unknown == (12,), "the second is said at every call"


# -------------------------------- what Slurm answers late, hides, refuses or remarks is passed on, and no more is made

TIMED_OUT = 'echo "allocation failure: Socket timed out on send/recv operation" >&2; exit 1'
NO_SUCH_NODE = "Requested node configuration is not available"
DENIED = 'echo "slurm_load_{}s error: Access/permission denied" >&2; exit 1'


# ------------------------------------------------------------------------------------------------------ time limits


def test_an_unknown_end_is_asked_for_once_a_minute_and_no_limit_is_an_answer(commands):
    commands.put("squeue", AWAY)
    limit = TimeLimit(job_of_id(12), {})
    assert [limit.left_s() for _ in range(20)] == [float("inf")] * 20
    assert len(commands.calls("squeue")) == 1
    commands.put("squeue", "echo UNLIMITED")
    limit = TimeLimit(job_of_id(12), {})
    assert (limit.is_known, limit.end, limit.in_words()) == (True, None, "without a time limit")


def test_an_end_that_slurm_did_not_say_at_first_is_asked_for_until_it_is_known(commands, monkeypatch):
    monkeypatch.setattr(queue, "ASK_AGAIN_S", 0.0)
    commands.put("squeue", f"[ $n -le 2 ] && {{ {AWAY}; }}; echo 2:00")
    limit = TimeLimit(job_of_id(12), {})
    assert (limit.is_known, limit.in_words()) == (False, "until a time limit that is not known yet")
    assert limit.left_s() == float("inf")
    assert 110 < limit.left_s() <= 120
    asked = len(commands.calls("squeue"))
    assert limit.life_s <= 121
    assert len(commands.calls("squeue")) == asked, "what is known is not asked for again"
    # What the environment says is of slurmctld's clock, and that of a node may be behind.
    compared = TimeLimit(job_of_id(12), {"SLURM_JOB_END_TIME": str(int(time.time()) + 600)})
    assert 110 < compared.left_s() <= 120
    commands.put("squeue", AWAY)
    limit.ask()
    assert 110 < limit.left_s() <= 120, "what was known holds where Slurm is silent"
    monkeypatch.setattr(queue.time, "time", lambda: 0.0)
    assert 110 < limit.left_s() <= 120, "a clock that is set while a job runs changes nothing"


NOT_CONFIGURED = """\
squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
squeue: error: fetch_config: DNS SRV lookup failed
squeue: error: _establish_config_source: failed to fetch config
squeue: fatal: Could not establish a configuration source"""


def test_commands_of_a_slurm_without_a_cluster_say_so_in_a_few_words(commands):
    commands.put("squeue", f"cat >&2 <<'END'\n{NOT_CONFIGURED}\nEND\nexit 1")
    trouble = look_at_jobs([7]).trouble
    assert "squeue: no cluster here: Slurm is installed, and not configured" in trouble
    assert "run this on a login node with the site's module for Slurm, or set SLURM_CONF to its slurm.conf" in trouble
    assert "resolve_ctls" not in trouble
    assert is_away(SlurmError(trouble)), "the name server of a cluster may be away for a moment"


# ------------------------------------------------------------------------------------------------- doctor and submit


def scontrol(hidden: tuple[str, ...]) -> str:
    """Shows all but these kinds, which PrivateData keeps for operators."""
    cases = [f"  {kind}) {DENIED.format(kind)};;" for kind in hidden]
    shown = {"partition": PARTITIONS, "node": NODES, "config": CONFIG}
    cases += [f"  {kind}) cat <<'END'\n{text}\nEND\n  ;;" for kind, text in shown.items() if kind not in hidden]
    return "\n".join(['[ "$1" = --version ] && { echo slurm-wlm 22.05.8; exit; }', 'case "$2" in', *cases, "esac"])


@pytest.mark.parametrize(
    ("hidden", "said"), [(("partition", "node"), "hides its nodes and partitions"), (("node",), "hides its nodes")]
)
def test_what_a_site_hides_is_passed_over(commands, hidden, said):
    commands.put("scontrol", scontrol(hidden))
    commands.put("sacctmgr", "exit 1")
    facts = ask_cluster()
    assert (facts.hidden, facts.nodes, len(facts.partitions)) == ({*hidden}, (), 4 * ("partition" not in hidden))
    (wrong,) = [finding for finding in check_plan(plan_of(), facts) if finding.verdict != "pass"]
    assert (wrong.key, wrong.verdict) == ("slurm.PrivateData", "warn")
    assert said in wrong.line


def test_what_is_neither_hidden_nor_there_is_still_an_error(commands, monkeypatch):
    commands.put("sacctmgr", "exit 1")
    commands.put("scontrol", f"[ $n = 1 ] && {{ {AWAY}; }}\n{scontrol(())}")
    assert ask_cluster().hidden == frozenset(), "asked once more"
    monkeypatch.setattr(cluster_facts, "PATIENCE_S", 0.0)
    denied = 'echo "error: Access/permission denied" >&2; exit 1'
    no_nodes = f"[ $2 = node ] && {{ echo 'Invalid node name' >&2; exit 1; }}\n{scontrol(())}"
    for answer, said in (
        (AWAY, "slurmctld does not answer, so nothing could be checked"),
        (denied, r"Slurm cannot be queried, .*Access/permission denied"),
        (no_nodes, "Invalid node name"),
    ):
        commands.put("scontrol", answer)
        with pytest.raises(SlurmError, match=said):
            ask_cluster()


def test_where_slurmctld_gives_no_answer_it_is_said_what_to_look_at(commands, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster_facts, "PATIENCE_S", 0.0)
    commands.put("scontrol", AWAY)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    with pytest.raises(SlurmError, match=r"`scontrol ping` says whether slurmctld is up \(SLURM_CONF is not set"):
        ask_cluster()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(SlurmError, match=r"\(SLURM_CONF='.*slurm.conf' says which one\): if so, try again"):
        ask_cluster()
    commands.put("scontrol", "exec sleep 600")  # as Slurm's commands, which look for a lost slurm.conf for a minute
    with pytest.raises(SlurmError, match=r"no answer in 0.3 s; SLURM_CONF='.*slurm.conf' is not there\)$"):
        ask_cluster(timeout_s=0.3)


def test_a_time_out_of_a_trial_submission_is_no_refusal(commands, monkeypatch):
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
def test_what_sbatch_refuses_is_a_refusal_unless_nodes_that_are_away_may_be_why(commands, said, away, verdict):
    nodes = tuple(replace(each, state="DOWN*") if each.name == away else each for each in FACTS.nodes)
    commands.put("sbatch", f"grep -q gres=gpu:2 $2 && {{ echo 'allocation failure: {said}' >&2; exit 1; }}; exit 0")
    findings = find_unfit(plan_of("generation.num_replicas=1"), replace(FACTS, nodes=nodes))
    (wrong,) = [finding for finding in findings if finding.verdict != "pass"]
    assert (wrong.key, wrong.verdict) == ("trainer", verdict)
    assert wrong.text == f"sbatch refuses it: allocation failure: {said}"
    if verdict == "fail":
        assert "it was asked for --partition=gpu --time=1:00:00 --nodes=1" in wrong.remedy


@pytest.mark.parametrize(
    ("said", "overrides", "section", "line"),
    [("invalid partition specified: gpuu", (), {"partition": "gpuu"},
      "trainer.partition='gpuu': no such partition (did you mean gpu?); legal: cpu, gpu, lab, old"),
     ("invalid partition specified: gpu,nope", (), {"partition": "gpu,nope"},
      "trainer.partition='gpu,nope': no partition 'nope'; legal: cpu, gpu, lab, old"),
     ("Batch job submission failed: Invalid account or account/partition combination specified", (),
      {"account": "nobody"}, "trainer.account='nobody': no account of yours; legal: lab, guests"),
     ("Invalid qos specification", (), {"qos": "short"},
      "trainer.qos='short': no QOS, or none that your account may use; legal: normal, long"),
     ("Requested reservation is invalid", (), {"reservation": "course"},
      "trainer.reservation='course': sbatch refuses it: requested reservation is invalid; legal: one of `scontrol "
      "show reservation` that is for you, and lasts long enough"),
     ("Invalid feature specification", (), {"constraint": "a100"},
      "trainer.constraint='a100': no such features in partition 'gpu'; legal: h100, ib"),
     (NO_SUCH_NODE, (), {"gres_type": "a100"},
      "trainer.gres_type='a100': nodes of partition 'gpu' have no such GPUs; legal: h100"),
     (NO_SUCH_NODE, (), {"partition": "cpu"},
      "trainer.gpus_per_node='2 GPUs': nodes of partition 'cpu' have none; legal: another partition"),
     (NO_SUCH_NODE, ("trainer.num_ranks=16",), {"gpus_per_node": 16},
      "trainer.gpus_per_node='16 GPUs': nodes of partition 'gpu' have 8 at most; legal: at most 8, or another "
      "partition"),
     (NO_SUCH_NODE, (), {"cpus_per_gpu": 64},
      "trainer.cpus_per_gpu='64': 2 tasks need 128 cores of one node, and nodes of partition 'gpu' have 96 at most; "
      "legal: at most 48"),
     ("CPU count per node can not be satisfied", ("trainer.num_ranks=32",), {"gpus_per_node": None},
      "trainer.cpus_per_gpu='4': 32 tasks need 128 cores of one node, and nodes of partition 'gpu' have 96 at most; "
      "without trainer.gpus_per_node all 32 tasks are on one node, without GPUs; legal: at most 3"),
     ("Memory specification can not be satisfied", (), {"memory_gib_per_gpu": 500},
      "trainer.memory_gib_per_gpu='500': 2 tasks need 1000 GiB of memory of one node, and nodes of partition 'gpu' "
      "have 976.6 at most; legal: at most 488")],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)  # fmt: skip
def test_a_refusal_of_sbatch_is_told_by_key_value_and_what_is_legal(commands, said, overrides, section, line):
    commands.put("sbatch", f"case $2 in *trainer*) echo 'allocation failure: {said}' >&2; exit 1;; esac; exit 0")
    findings = find_unfit(plan_of("generation.num_replicas=1", *overrides, trainer=section), FACTS)
    assert [finding.line for finding in findings if finding.verdict == "fail"] == [
        line.replace("sbatch refuses it: ", "sbatch refuses it: allocation failure: ")
    ]


def test_a_partition_that_is_missing_is_told_where_the_cluster_has_no_default(commands):
    commands.put("sbatch", "echo 'No partition specified or system default partition' >&2; exit 1")
    facts = replace(FACTS, partitions=tuple(replace(each, is_default=False) for each in FACTS.partitions))
    lines = [finding.line for finding in find_unfit(plan_of(), facts) if finding.component == "controller"]
    assert lines == [
        "controller.partition='(default)': this cluster has no default partition; legal: cpu, gpu, lab, old"
    ]


def test_a_submission_tells_the_warnings_of_the_cluster(commands, tmp_path):
    commands.put("scontrol", scontrol(()))
    commands.put("sacctmgr", "exit 1")
    commands.put("sbatch", "exit 0")
    site = {"cluster": {"shared_directory": str(tmp_path)}, "common": {"qos": "long"}}
    lines = refuse_unfit(plan_of(f"run.directory={tmp_path / 'run'}", **site))
    told = "common.qos='long': not checked: this cluster keeps no accounts, or did not tell them; Slurm may pass over"
    assert f"warning     {told} it" in lines


def test_a_probe_that_failed_is_told_in_its_own_words_and_not_in_sruns():
    log = [
        "Traceback (most recent call last):", "ModuleNotFoundError: No module named 'torch'",
        "slurmstepd: error: step 12.0", "srun: error: g0: task 0: Exited with exit code 1",
    ]  # fmt: skip
    assert last_error(log) == "ModuleNotFoundError: No module named 'torch'"
    assert last_error(log[3:]) == log[3], "better than nothing"
    assert last_error([]) == ""


# -------------------------------------------------------------------------------------------------- what is said of it


def test_a_stop_whose_scancel_fails_says_that_the_request_stands(commands, tmp_path, monkeypatch):
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


def test_a_verdict_has_a_reason_also_where_nobody_gave_one():
    assert Outcome(Cause.FAILED, " ").text == Cause.FAILED.words
    assert Outcome(Cause.FAILED, "said").text == "said"


@pytest.mark.parametrize(
    ("body", "is_unwanted", "said"),
    [
        ("kill -9 $$", False, f"ended by signal {signal.SIGKILL:d}, without output"),
        ("exec sleep 600", True, f"ended by signal {signal.SIGKILL:d}"),  # it is not waited for
        # As an interpreter that a site has wrapped; any other error would end the supervisor, and its job.
        *((f"echo '{words}'", False, "exit status 0, and says no attempt") for words in ("", "bye", "[1, 2", "{")),
    ],
)
def test_an_attempt_that_could_not_be_begun_says_how_its_program_ended(tmp_path, commands, body, is_unwanted, said):
    commands.put("interpreter", body)
    part = part_of("controller", here=True, program=str(commands.directory / "interpreter"))
    plan = job_part(RunLayout(tmp_path), "controller", part)
    looks = iter((False, False, is_unwanted))
    with pytest.raises(BeginError, match=said) as failed:
        AttemptStarter(plan, job_of_id(12), lambda *_: None, Signals(), None).begin(lambda: next(looks, is_unwanted))
    assert failed.value.status == 1 or "says no attempt" not in said


def test_a_word_of_the_site_among_the_components_of_a_job_is_no_component(commands):
    commands.put(
        "squeue", "echo 'Down on 3 May, see the wiki'; echo 'Sorry!'; echo '12+0 RUNNING'; echo '12+1 PENDING'"
    )
    assert component_states(12, 0.0) == {0: "RUNNING", 1: "PENDING"}
    commands.put("squeue", "echo '  12 COMPLETING'")
    assert component_states(12, 0.0) == {0: "COMPLETING"}


OVER = "Invalid job id specified"


@pytest.mark.parametrize(("said", "is_error"), [((OVER, OVER), False), ((OVER, "Access/permission denied"), True)])
def test_a_job_that_could_not_be_cancelled_is_not_taken_for_over_because_another_one_is(commands, said, is_error):
    lines = [f"echo 'scancel: error: Kill job error on job id {12 + k}: {why}' >&2" for k, why in enumerate(said)]
    commands.put("scancel", "\n".join([*lines, "exit 1"]))
    with pytest.raises(SlurmError, match="job id 13: Access/permission denied") if is_error else nullcontext():
        cancel([12, 13])


def test_a_supervisor_is_not_held_up_by_a_slurm_that_does_not_answer(commands, tmp_path, monkeypatch):
    """Its job may be a minute from its time limit."""
    commands.put("squeue", "exec sleep 600")
    layout, job = RunLayout(tmp_path / "run"), job_of_id(12)
    layout.jobs.mkdir(parents=True)
    for module in (queue, other_jobs):
        monkeypatch.setattr(module, "SOON_S", 0.2)
    plan = job_part(layout, "c", continuation="successor")
    began = time.monotonic()
    assert other_jobs.may_have_controller(layout, job, 0.2), "nobody has said otherwise"
    assert TimeLimit(job, {}).end is None
    with pytest.raises(SlurmError, match="no answer"):
        other_jobs.gone_jobs(plan, job)
    assert time.monotonic() - began < 30.0, "each waited for half a minute, or a whole one"
    assert len(commands.calls("squeue")) == 3
