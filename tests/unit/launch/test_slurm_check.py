"""What keeps a plan from running on this cluster or node is found: limits, drivers, architectures, broadcasts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.doctor.site import check_directory, filesystem_type
from launch.doctor.slurm_plan import check_plan
from launch.plan.jobs import Elastic, plan_elastic
from launch.slurm.cluster_facts import (
    LIMITS_OF_ASSOCIATIONS,
    LIMITS_OF_QOS,
    Association,
    ClusterFacts,
    Qos,
    parse_accounts,
    parse_associations,
    parse_config,
    parse_nodes,
    parse_partitions,
    parse_qos,
)
from launch.slurm.states import duration_s
from rlhpc.base.run_directory import RunLayout
from tests.unit.launch.site_kit import config_of, plan_of, site_of

# As scontrol --oneliner prints them, shortened.
PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A MaxNodes=UNLIMITED MaxTime=7-00:00:00 MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=c[0-1] PreemptMode=OFF State=UP TotalNodes=2 RootOnly=NO ReqResv=NO
PartitionName=gpu AllowGroups=ALL DenyAccounts=guests AllowQos=normal,long Default=NO MaxNodes=4 MaxTime=2-00:00:00 MinNodes=0 Nodes=h[0-3] PreemptMode=OFF State=UP RootOnly=NO ReqResv=NO
PartitionName=lab AllowAccounts=lab AllowQos=ALL Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 Nodes=h[0-3] PreemptMode=REQUEUE State=UP RootOnly=NO ReqResv=NO
PartitionName=old AllowAccounts=ALL AllowQos=ALL Default=NO MaxTime=01:00:00 Nodes=v0 PreemptMode=OFF State=INACTIVE RootOnly=NO ReqResv=YES
"""  # noqa: E501
CPU_NODE = "NodeName={} CPUEfctv=30 CPUTot=32 AvailableFeatures=(null) Gres=(null) OS=Linux 6.1 #1 SMP RealMemory=128000 State=IDLE Partitions=cpu  Reason=disk=full [root@2026]"  # noqa: E501
GPU_NODE = "NodeName={} CPUTot=96 AvailableFeatures=ib,h100 Gres=gpu:h100:8(S:0-1) RealMemory=1000000 MemSpecLimit=8000 State=MIXED Partitions=gpu,lab "  # noqa: E501
NODES = "\n".join([*(CPU_NODE.format(f"c{k}") for k in range(2)), *(GPU_NODE.format(f"h{k}") for k in range(4))])
CONFIG = """\
Configuration data as of 2026-01-31T12:00:00
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
JobRequeue              = 1
MaxArraySize            = 1001
MinJobAge               = 300 sec
PreemptType             = preempt/partition_prio
SchedulerType           = sched/backfill
"""
FACTS = ClusterFacts(
    version=(23, 11),
    release="23.11.4",
    config=parse_config(CONFIG),
    clock_text="2026-01-31T12:00:00",
    partitions=parse_partitions(PARTITIONS),
    nodes=parse_nodes(NODES),
    associations=parse_associations("lab||normal,long||\nguests||normal||20\n"),
    default_account="lab",
    qos=parse_qos("normal||\nlong||12:00:00|4|\nunlimited|PartitionTimeLimit|\n"),
)


def said(facts: ClusterFacts = FACTS, *overrides: str, **sections: dict[str, Any]) -> list[str]:
    """What is wrong, a line each, failures and warnings."""
    wrong = [finding for finding in check_plan(plan_of(*overrides, **sections), facts) if finding.verdict != "pass"]
    return [f"{finding.verdict} {finding.line}" for finding in wrong]


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    return lines[0]


def with_config(**values: str) -> ClusterFacts:
    return replace(FACTS, config={**FACTS.config, **values})


def test_a_time_above_the_partitions_limit_is_told_with_the_limit():
    lines = said(common={"time": "3-00:00:00"})
    assert lines == [
        "fail common.time='3-00:00:00': partition 'gpu' allows 2-00:00:00 (here of trainer, generation); "
        "legal: at most '2-00:00:00'"
    ]


def test_a_qos_may_go_beyond_the_partitions_time_and_may_give_less():
    beyond = {"time": "3-00:00:00", "qos": "unlimited", "partition": "lab"}
    limited = tuple(replace(each, max_time_s=3600) for each in FACTS.partitions)
    facts = replace(with_config(AccountingStorageEnforce="associations"), partitions=limited)
    assert not [line for line in said(facts, common=beyond) if ".time" in line]
    lines = said(common={"time": "1-00:00:00", "qos": "long"})
    assert lines == ["fail common.time='1-00:00:00': QOS 'long' allows 12:00:00; legal: at most '12:00:00'"]


def row(columns: tuple[str, ...], *cells: str, **limits: str) -> str:
    """A line of sacctmgr, with limits in `columns`."""
    assert set(limits) <= set(columns)
    return "|".join([*cells, *(limits.get(name, "") for name in columns)]) + "\n"


def qos_row(name: str, flags: str = "", **limits: str) -> str:
    return row(LIMITS_OF_QOS, name, flags, **limits)


def with_limits(
    *,
    qos: str = "normal||\nlong||\n",
    mine: str = "lab||normal,long||",
    accounts: str = "lab|root|",
    partition: str = "",
) -> ClusterFacts:
    """FACTS with other limits, in sacctmgr's columns."""
    held = tuple(replace(each, qos=partition if each.name == "gpu" else "") for each in FACTS.partitions)
    found = parse_qos(qos), parse_associations(mine), parse_accounts(accounts)
    return replace(FACTS, qos=found[0], associations=found[1], accounts=found[2], partitions=held)


def test_limits_hold_without_a_qos_in_the_site_file():
    """Slurm takes each of these jobs, and keeps it pending for ever."""
    of_user = with_limits(qos=qos_row("normal", maxtresperuser="gres/gpu=1"))
    assert only(said(of_user, "generation.num_replicas=1")) == (
        "fail trainer.gpus_per_node='2 GPUs': QOS 'normal', its default, allows 1 GPU per user; legal: at most 1 "
        "GPU; a smaller size, or another `qos` or `account`"
    )
    line = "fail common.time='1:00:00': {} allows 0:30:00; legal: at most '0:30:00'"
    assert line.format("QOS 'normal', its default,") in said(with_limits(qos="normal||00:30:00\n"))
    chosen = with_limits(qos="normal||\nlong||00:30:00\n", mine="lab||normal,long|long|")
    assert line.format("QOS 'long', its default,") in said(chosen)
    alone = with_limits(qos="normal||\nlong||00:30:00\n", mine="lab||long||")  # the only one that the user has
    assert line.format("QOS 'long', its default,") in said(alone)
    of_partition = with_limits(qos="normal||\npart||00:30:00\n", partition="part")
    assert said(of_partition) == [
        "fail common.time='1:00:00': QOS 'part' of partition 'gpu' allows 0:30:00 (here of trainer, generation); "
        "legal: at most '0:30:00'"
    ]
    assert line.format("account 'lab'") in said(with_limits(mine="lab||normal|||00:30:00"))
    above = with_limits(accounts="lab|uni|\n" + row(LIMITS_OF_ASSOCIATIONS, "uni", "root", grptres="gres/gpu=1"))
    assert "account 'uni' allows 1 GPU in all" in only(said(above, "generation.num_replicas=1"))


def test_the_first_that_sets_a_limit_decides():
    mine = "lab||normal|||00:30:00"
    assert not said(with_limits(qos="normal||02:00:00\n", mine=mine))
    beyond = with_limits(qos="normal||00:30:00\npart||02:00:00\n", partition="part")
    assert "(here of controller)" in only(said(beyond))
    over = with_limits(qos="normal|OverPartQOS|00:30:00\npart||02:00:00\n", partition="part")
    assert any(line.startswith("fail common.time") and "here of" not in line for line in said(over))
    for where in (with_limits(mine=mine), with_limits(qos="normal||00:30:00\n")):
        assert not said(replace(where, config={**where.config, "AccountingStorageEnforce": "associations,qos"}))
        assert said(replace(where, config={**where.config, "AccountingStorageEnforce": "safe"}))
    of_partition = with_limits(mine="lab||normal|||00:30:00\nlab|gpu|normal|||02:00:00")
    assert "allows 0:30:00 (here of controller); legal" in only(said(of_partition))


@pytest.mark.parametrize(
    ("limits", "line"),
    [({"maxtres": "cpu=4"}, "fail trainer.cpus_per_gpu='8 cores': {} allows 4 cores per job; "),
     ({"maxtres": "mem=1.50G"}, "fail trainer.memory_gib_per_gpu='16 GiB of memory': {} allows 1.5 GiB of memory per "),
     ({"maxtrespernode": "gres/gpu=1"}, "fail trainer.gpus_per_node='2 GPUs': {} allows 1 GPU per node and job; "),
     ({"maxtres": "gres/gpu:h100=1"}, "fail trainer.gpus_per_node='2 h100 GPUs': {} allows 1 h100 GPU per job; "),
     ({"mintres": "gres/gpu=1"}, "fail controller.gpus_per_node='0 GPUs': {} takes only jobs of 1 GPU or more"),
     ({"maxtresperaccount": "node=0"}, "fail controller.nodes='1 node': {} allows 0 nodes per account"),
     ({"maxtresmins": "cpu=240"}, "fail common.time='1:00:00': 8 cores for so long are more than the 240 minutes of "
                                  "them that {} allows per job (here of trainer); legal: at most '0:30:00'"),
     ({"grptresrunmins": "gres/gpu=60"}, "fail common.time='1:00:00': 2 GPUs for so long are more than the 60 minutes "
                                         "of them that {} allows at once (here of trainer); legal: at most '0:30:00'")],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)  # fmt: skip
def test_each_kind_of_limit_is_told_with_its_amount(limits, line):
    lines = said(with_limits(qos=qos_row("normal", **limits)), trainer={"gres_type": "h100", "memory_gib_per_gpu": 8})
    assert any(each.startswith(line.format("QOS 'normal', its default,")) for each in lines), lines


def test_what_a_run_needs_at_the_same_time_is_held_against_limits_too():
    """A component of a heterogeneous job, or a job of its own, keeps to the limit, and all together do not."""
    three = with_limits(qos=qos_row("normal", maxtresperuser="gres/gpu=3"))
    assert only(said(three, "generation.num_replicas=2")) == (
        "fail trainer.qos='normal': trainer + generation need 4 GPUs at the same time, and QOS "
        "'normal', its default, allows 3 GPUs per user; legal: a smaller size, or another `qos` or `account`"
    )
    jobs = {"cluster": {"placement": "jobs"}}
    assert only(said(three, "generation.num_replicas=2", **jobs)) == (
        "warn trainer.qos='normal': trainer + generation request 4 GPUs, and QOS 'normal', its "
        "default, allows 3 GPUs per user: some generators will wait; fewer replicas"
    )
    two_jobs = with_limits(qos=qos_row("normal", maxjobsperuser="2"))
    assert (
        "need 3 running jobs at the same time, and QOS 'normal', its default, allows 2 running jobs per user"
        in only(said(two_jobs))
    )


def test_a_default_qos_lifts_a_partitions_limit_and_may_be_one_that_the_partition_refuses():
    lifted = with_limits(qos="normal||\nlong|PartitionTimeLimit|\n", mine="lab||normal,long|long|")
    assert not said(lifted, common={"time": "3-00:00:00"})
    refused = with_limits(qos="normal||\nother||\n", mine="lab||other||")
    assert "fail trainer.qos='other': partition 'gpu' does not accept this QOS; legal: normal, long" in said(refused)


def test_an_account_that_the_partition_does_not_take_is_told():
    """A warning: newer releases take the accounts below one that a partition names."""
    line = (
        "warn trainer.account='guests': partition {!r} does not accept this account by its name: it may never start; "
        "another account or partition"
    )
    assert only(said(trainer={"account": "guests"})) == line.format("gpu")
    guest = replace(FACTS, default_account="guests", associations=(Association("guests", "", ()),))
    assert said(guest, trainer={"partition": "lab"}, generation={"partition": "lab"})[0] == line.format("lab")


def test_a_cluster_without_job_arrays_is_told_with_the_other_placement():
    line = only(said(with_config(MaxArraySize="0"), cluster={"placement": "jobs"}))
    assert line == (
        "fail cluster.placement='jobs': this cluster allows no job arrays (MaxArraySize=0), which placement='jobs' "
        "needs for generators; legal: 'hetjob'; `rlhpc scale` cannot be used here"
    )
    assert not said(with_config(MaxArraySize="0"))
    elastic = replace(plan_of(cluster={"placement": "jobs"}), is_elastic=True)
    told = [each for each in check_plan(elastic, with_config(MaxArraySize="0")) if each.verdict == "fail"]
    assert ["'hetjob'" in each.line for each in told] == [False]
    assert "`rlhpc scale` cannot be used here" in told[0].line


@pytest.mark.parametrize(
    ("gpus", "room"), [({"gpus_per_node": 8}, 32), ({"gpus_per_node": None, "gpu": None, "cpus_per_gpu": 32}, 12)]
)
def test_more_added_generators_than_the_nodes_have_room_for_are_warned_of(gpus, room):
    site, config = site_of(generation=gpus), config_of()
    for count in (room, room + 100):
        added = plan_elastic(config, site, RunLayout(Path("/shared/run")), Elastic("generation-1", count, 1, "hetjob"))
        wrong = [finding.line for finding in check_plan(added, FACTS) if finding.verdict != "pass"]
        assert wrong == [
            f"generation.partition='gpu': {count} generators, and its nodes have room for {room}, if nothing else runs "
            "there; fewer of them, the others only wait"
        ] * (count > room)


def test_more_nodes_than_the_partition_gives_are_told():
    line = "fail trainer.nodes='5': partition 'gpu' allows 4 per job; legal: at most 4"
    assert only(said(FACTS, "trainer.num_ranks=40")) == line
    wide = replace(FACTS, qos=(Qos("normal", "DenyOnLimit,PartitionMaxNodes"),))
    assert not [line for line in said(wide, "trainer.num_ranks=40", common={"qos": "normal"}) if "per job" in line]


def test_components_of_one_job_that_need_more_nodes_than_there_are_are_told():
    line = only(said(FACTS, "trainer.num_ranks=24", "generation.num_replicas=16"))
    assert line == (
        "fail trainer.partition='gpu': components of one job need different nodes: trainer (3) + generation (2) need "
        "5, there are 4; legal: up to 4 nodes together, other partitions, or cluster.placement='jobs'"
    )
    down = replace(FACTS, nodes=tuple(replace(n, state="DOWN*" if n.name == "h0" else n.state) for n in FACTS.nodes))
    assert only(said(down, "trainer.num_ranks=24")).startswith("warn trainer.partition='gpu'")


def test_overlapping_partitions_count_their_nodes_once():
    sizes = ("trainer.num_ranks=24", "generation.num_replicas=16")
    lines = said(FACTS, *sizes, generation={"partition": "lab"})
    assert lines[0].startswith("fail trainer.partition='gpu': components of one job need different nodes")


def test_jobs_of_their_own_share_nodes_but_not_gpus():
    jobs = {"cluster": {"placement": "jobs"}}
    assert not said(FACTS, "trainer.num_ranks=24", "generation.num_replicas=8", **jobs)
    assert only(said(FACTS, "trainer.num_ranks=24", "generation.num_replicas=16", **jobs)) == (
        "warn generation.partition='gpu': trainer and generation request 40 GPUs, and there are 32: 8 of 16 generators "
        "cannot run together with the rest; fewer replicas or ranks"
    )
    apart = {"generation": {"partition": "few"}, **jobs}
    few = replace(FACTS.nodes[-1], name="f0", partitions=frozenset({"few"}))
    facts = replace(FACTS, partitions=(*FACTS.partitions, replace(FACTS.partitions[1], name="few", qos="")),
                    nodes=(*FACTS.nodes, few))  # fmt: skip
    assert only(said(facts, "generation.num_replicas=24", **apart)) == (
        "warn generation.partition='few': generation requests 24 GPUs, and there are 8: 16 of 24 generators cannot "
        "run together with the rest; fewer replicas or ranks"
    )
    whole = {"generation": {"exclusive": True}, "cluster": {"placement": "jobs"}}
    assert "1 of 4 jobs of generators cannot run together" in only(said(FACTS, "generation.num_replicas=32", **whole))
    wide = {"trainer": {"partition": "lab"}, **jobs}
    assert (
        "trainer requests 40 GPUs, and there are 32: some jobs will never start"
        in said(FACTS, "trainer.num_ranks=40", "generation.num_replicas=1", **wide)[-1]
    )


def test_more_gpus_than_a_node_of_the_partition_has_are_warned_of_before_a_run_fills_them():
    line = "warn generation.gpus_per_node='16': no node of partition 'gpu' has more than 8 GPUs; legal: at most 8"
    assert said(FACTS, generation={"gpus_per_node": 16}) == [line]
    assert said(FACTS, generation={"gpus_per_node": 16, "gres_type": "h100"}) == [line]
    assert not said(replace(FACTS, nodes=()), generation={"gpus_per_node": 16})


def test_an_account_or_a_qos_is_said_to_be_unchecked_where_there_is_no_accounting():
    bare = replace(FACTS, associations=None, qos=(), default_account="")
    line = "warn {}: not checked: this cluster keeps no accounts, or did not tell them; Slurm may pass over it"
    assert not said(bare)
    assert said(bare, common={"qos": "long"}) == [line.format("common.qos='long'")]
    assert said(bare, trainer={"account": "lab"}, generation={"account": "other"}) == [
        line.format("trainer.account='lab'"), line.format("generation.account='other'")
    ]  # fmt: skip


def test_a_heterogeneous_job_on_a_partition_that_is_preempted_is_warned_of():
    line = only(said(generation={"partition": "lab"}))
    assert line == (
        "warn generation.partition='lab': its jobs can be preempted (REQUEUE), together with all components; "
        "cluster.placement='jobs'"
    )
    assert not said(generation={"partition": "lab"}, cluster={"placement": "jobs"})
    assert not said(with_config(PreemptType="preempt/none"), generation={"partition": "lab"})


@pytest.mark.parametrize("mode", ["SUSPEND", "GANG,SUSPEND"])
def test_a_partition_whose_jobs_are_stopped_for_others_is_warned_of(mode):
    facts = replace(
        FACTS, partitions=parse_partitions(PARTITIONS.replace("PreemptMode=REQUEUE", f"PreemptMode={mode}"))
    )
    line = only(said(facts, generation={"partition": "lab"}))
    assert line == (
        f"warn generation.partition='lab': its jobs are stopped for others ({mode.split(',')[0]}), keep their GPU "
        "memory, and the rest waits for them; at most cluster.meet_s=1800"
    )


def test_settings_of_the_cluster_that_break_runs_are_told():
    assert "(JobRequeue=0)" in only(said(with_config(JobRequeue="0")))
    assert not said(with_config(MinJobAge="10 sec"))
    forgetful = replace(with_config(MinJobAge="10 sec"), associations=None)
    assert "forgets a job 10 s after its end" in only(said(forgetful))
    assert only(said(with_config(SchedulerType="sched/builtin"))).endswith("legal: 'jobs'")
    jobs = {"cluster": {"placement": "jobs"}}
    arrays = said(with_config(MaxArraySize="3"), "generation.num_replicas=4", **jobs)
    assert only(arrays).startswith("fail generation.nodes='4': an array of 4 tasks, and MaxArraySize=3 here")


def test_more_jobs_than_may_be_submitted_at_once_are_warned_of():
    jobs = {"cluster": {"placement": "jobs"}, "common": {"qos": "long"}}
    assert "Slurm counts 6 jobs, and at most 4 may be submitted at once" in only(
        said(FACTS, "generation.num_replicas=4", **jobs)
    )


def test_what_only_one_of_several_partitions_refuses_is_a_warning():
    line = only(said(common={"time": "3-00:00:00"}, trainer={"partition": "lab"}, generation={"partition": "lab,gpu"},
                     cluster={"placement": "jobs"}))  # fmt: skip
    assert line.startswith("warn common.time='3-00:00:00': partition 'gpu' allows 2-00:00:00 (here of generation)")


def test_a_site_that_hides_its_nodes_is_taken_at_its_word():
    assert not said(replace(FACTS, nodes=()), "trainer.num_ranks=24", "generation.num_replicas=16")


def test_what_slurm_prints_is_read():
    node = FACTS.nodes[-1]
    assert (dict(node.gpus), node.partitions) == ({"h100": 8}, {"gpu", "lab"})
    assert node.is_up
    for state in ("IDLE+POWERED_DOWN", "IDLE+CLOUD+POWERED_DOWN", "IDLE+POWERING_DOWN", "MIXED+POWERING_UP", "IDLE~",
                  "ALLOCATED+COMPLETING", "IDLE+PLANNED", "IDLE+MAINTENANCE", "MIXED+REBOOT_REQUESTED"):  # fmt: skip
        assert replace(node, state=state).is_up, state
    for state in ("IDLE+DRAIN", "DOWN*", "DOWN+CLOUD+POWERED_DOWN", "MIXED+DRAIN+POWERING_DOWN", "IDLE+NOT_RESPONDING",
                  "IDLE*", "FUTURE", "UNKNOWN+INVALID_REG", "IDLE+FAIL", "DRAINED"):  # fmt: skip
        assert not replace(node, state=state).is_up, state
    assert [duration_s(text) for text in ("30:00", "01:00:00", "2-12:00:00", "UNLIMITED")] == [1800, 3600, 216000, None]
    assert FACTS.qos[1].limits.numbers == {("wall", "job"): 43200, ("submitted", "user"): 4}


def test_the_filesystem_of_a_path_is_that_of_its_deepest_mount(tmp_path):
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\nmds:/y {tmp_path}/my\\040data lustre rw 0 0\n"
    assert filesystem_type(tmp_path / "a", mounts) == "nfs4"
    assert filesystem_type(tmp_path / "my data" / "b", mounts) == "lustre"
    assert filesystem_type(Path("/"), mounts) == "ext4"
    assert filesystem_type(tmp_path, "") == "?"


def test_a_shared_directory_that_is_not_there_is_refused(tmp_path):
    assert check_directory(tmp_path / "none")[0].line.startswith(
        f"cluster.shared_directory={str(tmp_path / 'none')!r}: no such directory here; legal: "
    )
    assert check_directory(tmp_path)[0].verdict in ("pass", "warn")
