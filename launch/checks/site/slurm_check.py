"""Refuse before submission what the cluster would refuse, or keep pending forever.

Input: JobPlan and ClusterFacts.  Output: Findings.  `check_plan` is pure; `ask_sbatch` runs sbatch --test-only for each
component; `refuse_unfit` does both and raises.  Checks of a single component are in component_check.py.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launch.checks.finding import Finding
from launch.checks.site.component_check import candidate_nodes, check_component, partitions_of
from launch.checks.site.job_limits import check_limits_together, most_submitted
from launch.checks.site.shared_directory import check_directory
from launch.plan.jobs import Component, Job, JobPlan
from launch.plan.script import component_directives
from launch.slurm.cluster_facts import PATIENCE_S, ClusterFacts, PartitionFacts, ask_cluster
from launch.slurm.commands import SlurmError, is_away
from launch.slurm.sbatch import try_script
from rlhpc.errors import ConfigError

SHORTEST_JOB_AGE_S = 60  # below it a job that ended between two looks has never been seen


def refuse_unfit(plan: JobPlan) -> None:
    """Ask the cluster whether it would take the plan.

    Raises ConfigError with one line for each failure: key, value, what is legal.  Raises SlurmError: slurmctld does not
    answer, or Slurm is not here.
    """
    failures = [finding for finding in find_unfit(plan) if finding.verdict == "fail"]
    if failures:
        raise ConfigError("\n".join(finding.line for finding in failures))


def find_unfit(plan: JobPlan) -> list[Finding]:
    """All findings, those that pass too.  Raises SlurmError: slurmctld does not answer, or Slurm is not here."""
    return [*check_directory(plan.cluster.shared_directory), *ask_sbatch(plan, check_plan(plan, ask_cluster()))]


def check_plan(plan: JobPlan, facts: ClusterFacts) -> list[Finding]:
    """Hold a plan against a cluster."""
    findings = [finding for part in plan.components for finding in check_component(part, facts)]
    # Sums of what does not exist mean nothing.
    if not any(finding.verdict == "fail" and not finding.sbatch_decides for finding in findings):
        findings += [*_sums(plan, facts), *check_limits_together(plan, _partitions(plan, facts), facts)]
    findings += [*_preemption(plan, facts), *_requeue(plan, facts), *_arrays(plan, facts), *_submissions(plan, facts)]
    return [*findings, *_hidden(facts)]


def ask_sbatch(plan: JobPlan, findings: Sequence[Finding]) -> list[Finding]:
    """The findings of check_plan, and sbatch's word on the components, as `settle` weighs them.

    Not asked about a component whose failures are all such as sbatch takes without a word: times, sums, numbers of
    nodes, GPUs; nor about one whose partition or account does not exist.
    """
    failures = [finding for finding in findings if finding.verdict == "fail"]
    blamed = {finding.component for finding in failures}
    open_still = {finding.component for finding in failures if finding.sbatch_decides}
    return settle(findings, try_components(plan, skip=blamed - open_still))


def settle(findings: Sequence[Finding], tried: Sequence[Finding]) -> list[Finding]:
    """What sbatch decides is a warning where sbatch takes the component; of one that fails our own words are enough.

    tried: from try_components.
    """
    taken = {finding.key for finding in tried if finding.verdict == "pass"}
    settled = [
        replace(finding, verdict="warn", text=f"{finding.text}, but sbatch accepts it")
        if finding.verdict == "fail" and finding.sbatch_decides and finding.component in taken
        else finding
        for finding in findings
    ]
    # sbatch says less than our lines, and would say it a second time.
    blamed = {finding.component for finding in settled if finding.verdict == "fail"}
    return [*settled, *(finding for finding in tried if finding.key not in blamed)]


def try_components(plan: JobPlan, skip: set[str] | None = None) -> list[Finding]:
    """`sbatch --test-only` of every component by itself; what waits for nodes that are away is a warning.

    Raises SlurmError: slurmctld does not answer.
    """
    findings = []
    with tempfile.TemporaryDirectory(prefix="rlhpc-") as scratch:
        for component in [part for part in plan.components if part.name not in (skip or ())]:
            script = Path(scratch, f"{component.name}.sbatch")
            lines = [f"#SBATCH {directive}" for directive in component_directives(component)]
            script.write_text("\n".join(["#!/bin/sh", *lines, "true", ""]), encoding="utf-8")
            findings.append(_try(component, script))
    return findings


def _try(component: Component, script: Path) -> Finding:
    key, value = f"{component.name}", "sbatch --test-only"
    try:
        try_script(script, PATIENCE_S)
    except SlurmError as error:
        if is_away(error):
            raise SlurmError(
                f"slurmctld does not answer, so {key} could not be checked ({error}); try again later"
            ) from None
        said = str(error).removeprefix("sbatch: ")
        # Slurm says the same of what does not exist and of what is drained; check_plan has told the first.
        waits = "node configuration is not available" in said or "not available (" in said
        text = f"sbatch refuses it: {said}"
        remedy = "nodes may be down or drained" if waits else f"legal: see `sbatch --test-only` of [{key}]"
        return Finding(key, value, "warn" if waits else "fail", text, remedy)
    return Finding(key, value, "pass", "sbatch takes it")


def _hidden(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.hidden:
        what = " and ".join(f"{kind}s" for kind in sorted(facts.hidden))
        text = f"this site hides its {what}: they were not checked, except by sbatch"
        yield Finding("slurm.PrivateData", facts.config.get("PrivateData", ""), "warn", text)


# ---------------------------------------------------------------------------------------------------------------- sums


def _sums(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    """Components together: each component of a heterogeneous job gets nodes of its own, other jobs share nodes."""
    for job in plan.jobs:
        if len(job.components) > 1:
            yield from _distinct_nodes(job, facts)
    if len(plan.jobs) > 1:
        yield from _gpus_at_once(plan, facts)


def _distinct_nodes(job: Job, facts: ClusterFacts) -> Iterator[Finding]:
    """Hall's condition: no group of components asks for more nodes than all of the group's candidates are.

    Slurm takes a job that breaks it, and lets it wait forever.  The smallest group to blame is told.
    """
    reach = {part.name: {node.name: node for node in candidate_nodes(part, facts)} for part in job.components}
    for size in range(2, len(job.components) + 1):
        for group in itertools.combinations(job.components, size):
            there = {name: node for part in group for name, node in reach[part.name].items()}
            wanted, up = sum(part.nodes for part in group), sum(node.is_up for node in there.values())
            names = " + ".join(f"{part.name} ({part.nodes})" for part in group)
            if not all(reach[part.name] for part in group) or wanted <= up:
                continue
            legal = f"legal: up to {len(there)} nodes together, other partitions, or cluster.placement='jobs'"
            if wanted > len(there):
                text = f"components of one job need different nodes: {names} need {wanted}, there are {len(there)}"
                yield Finding(f"{group[0].name}.partition", _partition_text(group[0]), "fail", text, legal)
                return
            text = f"{names} need {wanted} different nodes, and {up} of {len(there)} are up now"
            yield Finding(f"{group[0].name}.partition", _partition_text(group[0]), "warn", text, "it will wait")


def _gpus_at_once(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    """Jobs that do not all fit at the same time run one after another, and wait for each other while they do."""
    parts = [(part, job.array_size or 1) for job in plan.jobs for part in job.components if part.gpus_per_task]
    there = {node.name: node for part, _ in parts for node in candidate_nodes(part, facts)}
    has, wanted = sum(node.num_gpus for node in there.values()), sum(p.gpus_per_node * p.nodes * n for p, n in parts)
    if there and wanted > has:
        text = f"trainer and generation request {wanted} GPUs, and there are {has}: some jobs will never start"
        yield Finding("generation.partition", _partition_text(parts[-1][0]), "warn", text, "fewer replicas or ranks")


def _partitions(plan: JobPlan, facts: ClusterFacts) -> dict[str, PartitionFacts | None]:
    """The only partition of each component; None where there are several, of which one has to do."""
    found = {part.name: partitions_of(part, facts) for part in plan.components}
    return {name: partitions[0] if len(partitions) == 1 else None for name, partitions in found.items()}


def _partition_text(component: Component) -> str:
    return component.allocation.partition or "(default)"


# ------------------------------------------------------------------------------------------------- how the cluster acts


def _preemption(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    is_on = facts.config.get("PreemptType", "").rpartition("/")[2] not in ("", "none", "(null)")
    for job in plan.jobs:
        for part in job.components:
            for partition in partitions_of(part, facts):
                mode = partition.preempt_mode.split(",")[0]
                if mode in ("OFF", "WITHIN") or not is_on:
                    continue
                key, value = f"{part.name}.partition", partition.name
                if mode in ("SUSPEND", "GANG"):
                    text = (
                        f"its jobs are stopped for others ({mode}), keep their GPU memory, and the rest waits for them"
                    )
                    yield Finding(key, value, "warn", text, f"at most cluster.meet_s={plan.cluster.meet_s}")
                    continue
                if len(job.components) > 1:
                    text = f"its jobs can be preempted ({partition.preempt_mode}), together with all components"
                    yield Finding(key, value, "warn", text, "cluster.placement='jobs'")
                elif "CANCEL" in partition.preempt_mode:
                    text = "preempted jobs are cancelled, not requeued"
                    yield Finding(key, value, "warn", text, "submit the job again after a preemption")


def _requeue(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    if facts.config.get("JobRequeue") == "0" and plan.cluster.continuation == "requeue":
        text = "this cluster requeues only jobs that ask for it (JobRequeue=0); ours do, the site may object"
        yield Finding("cluster.continuation", "requeue", "warn", text, 'continuation = "successor"')
    age = facts.config.get("MinJobAge", "").split()
    if age and age[0].isdigit() and 0 < int(age[0]) < SHORTEST_JOB_AGE_S:
        text = f"Slurm forgets a job {age[0]} s after its end (MinJobAge)"
        has_accounting = facts.associations is not None
        remedy = "" if has_accounting else "how jobs ended is known only from the run directory"
        yield Finding("slurm.MinJobAge", age[0], "pass" if has_accounting else "warn", text, remedy)
    scheduler = facts.config.get("SchedulerType", "sched/backfill")
    if plan.placement == "hetjob" and scheduler != "sched/backfill":
        text = f"only the backfill scheduler starts heterogeneous jobs, and this cluster has {scheduler}"
        yield Finding("cluster.placement", "hetjob", "fail", text, "legal: 'jobs'")


def _arrays(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    limit = facts.config.get("MaxArraySize", "")
    for job in plan.jobs:
        if job.array_size is None or not limit.isdigit() or job.array_size <= int(limit):
            continue
        if int(limit) == 0:
            text = "this cluster allows no job arrays (MaxArraySize=0), which placement='jobs' needs for generators"
            legal = "legal: 'hetjob'; `rlhpc scale` cannot be used here"
            if plan.is_elastic:  # its placement is the run's, and not to blame
                legal = "legal: the generators that the run was submitted with; `rlhpc scale` cannot be used here"
            yield Finding("cluster.placement", plan.placement, "fail", text, legal)
        else:
            key, text = f"{job.name}.nodes", f"an array of {job.array_size} tasks, and MaxArraySize={limit} here"
            yield Finding(key, str(job.array_size), "fail", text, f"legal: up to {limit} generators, or whole nodes")


def _submissions(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    """Slurm counts components and array tasks one by one."""
    if "limits" not in facts.enforced:
        return
    number = sum((job.array_size or 1) * len(job.components) for job in plan.jobs)
    limits = most_submitted(plan, _partitions(plan, facts), facts)
    if limits and number > min(limits):
        text = f"Slurm counts {number} jobs, and at most {min(limits)} may be submitted at once (MaxSubmitJobs)"
        yield Finding("cluster.placement", plan.placement, "warn", text, "fewer generators, or whole nodes for them")
