"""Refuse before submission plans that the cluster would refuse, or keep pending forever.

Input: JobPlan and ClusterFacts.  Output: Findings.  sbatch --test-only tells whether a component fits the cluster.
`check_plan`, which is pure, finds plans that sbatch accepts although they never start, or not well: limits that the
site does not enforce at submission, components that do not fit together, settings of the cluster.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launch.doctor.site import Finding, check_directory
from launch.plan.jobs import Job, JobComponent, JobPlan
from launch.plan.script import component_directives
from launch.plan.site_file import slurm_time
from launch.slurm.cluster_facts import (
    PATIENCE_S,
    Association,
    ClusterFacts,
    JobLimits,
    NodeFacts,
    PartitionFacts,
    Qos,
    ask_cluster,
)
from launch.slurm.commands import SlurmError, is_away, unchecked
from launch.slurm.sbatch import try_script
from rlhpc.base.near_names import near_hint
from rlhpc.protocol.errors import ConfigError

# ----------------------------------------------------------------------------------------------------------- job limits
#
# Check a plan against the limits of QOS and accounts, which hold whether or not the site file names a QOS.  Pure.
#
# Input: JobComponent or JobPlan, and ClusterFacts.  Output: Findings.  As in Slurm, the first that sets a limit
# decides: the partition's QOS, the job's own (before it with the flag OverPartQOS), then the user's share of the
# account and every account above it.  Slurm takes jobs beyond most limits, and keeps them pending for ever.

NORMAL = "normal"  # if neither the site nor the user has chosen a QOS
_PER = {"job": "per job", "node": "per node and job", "user": "per user", "account": "per account", "group": "in all"}
_RESOURCES = {"cpu": "cores", "mem": "GiB of memory", "node": "nodes"}
_SMALLER = "a smaller size, or another `qos` or `account`"


@dataclass(frozen=True)
class LimitSource:
    """A QOS or an account, with its limits."""

    key: str  # of the site file that chooses it: qos, partition, account
    value: str
    text: str
    limits: JobLimits


@dataclass(frozen=True)
class Limit:
    """The deciding one of all limits that hold for a job."""

    most: int
    source: LimitSource


def qos_of(component: JobComponent, facts: ClusterFacts, partition: str = "") -> Qos | None:
    """Return the QOS of a component's job, explicit or default; None: not known, or the site has none."""
    name = component.allocation.qos
    if name is None:
        mine = association_of(component, facts, partition)
        only = mine.qos[0] if mine is not None and len(mine.qos) == 1 else NORMAL
        name = (mine.default_qos if mine is not None else "") or only
    return next((qos for qos in facts.qos if qos.name == name), None)


def association_of(component: JobComponent, facts: ClusterFacts, partition: str = "") -> Association | None:
    """Return the user's association with the job's account; one of the partition goes first."""
    account = (component.allocation.account or facts.default_account).lower()
    mine = [each for each in facts.associations or () if each.account == account]
    fits = [each for each in mine if each.partition == partition and partition] or [
        each for each in mine if not each.partition
    ]
    return fits[0] if fits else None


def sources_of(
    component: JobComponent, partition: PartitionFacts | None, facts: ClusterFacts
) -> list[list[LimitSource]]:
    """Return the sources of limits of a component, by precedence; those in one list hold together."""
    name = partition.name if partition is not None else ""
    found = []
    own = qos_of(component, facts, name)
    if own is not None:
        text = f"QOS {own.name!r}" + ("" if component.allocation.qos else ", its default,")
        found.append([LimitSource("qos", own.name, text, own.limits)])
    theirs = next((qos for qos in facts.qos if partition is not None and qos.name == partition.qos), None)
    if theirs is not None:
        text = f"QOS {theirs.name!r} of partition {name!r}"
        place = 1 if own is not None and "OverPartQOS" in own.flags else 0
        found.insert(place, [LimitSource("partition", name, text, theirs.limits)])
    mine = association_of(component, facts, name)
    if mine is not None:
        above = _accounts_from(mine.account, facts)
        found.append([LimitSource("account", mine.account, f"account {mine.account!r}", mine.limits), *above])
    return found


def check_limits(component: JobComponent, partition: PartitionFacts | None, facts: ClusterFacts) -> Iterator[Finding]:
    """Find requests of one job of this component beyond a limit: it would never start."""
    if "limits" not in facts.enforced:
        return
    limit_of = partial(_limit_of, sources_of(component, partition, facts))
    wall = limit_of("wall", "job")
    if wall is not None and component.allocation.time_s > wall.most:
        value, legal = slurm_time(component.allocation.time_s), f"legal: at most {slurm_time(wall.most)!r}"
        text = f"{wall.source.text} allows {slurm_time(wall.most)}"
        yield Finding(f"{component.section}.time", value, "fail", text, legal)
    minutes = component.allocation.time_s // 60
    for resource, wanted in _wanted(component).items():
        on_node = {"node": wanted // component.nodes} if resource != "node" else {}
        limits = [(scope, asks, limit_of("most", scope, resource)) for scope, asks in
                  {"job": wanted, **on_node, "user": wanted, "account": wanted, "group": wanted}.items()]  # fmt: skip
        over = [(limit.most, scope, asks, limit) for scope, asks, limit in limits if limit and asks > limit.most]
        if over:
            most, scope, asks, limit = min(over, key=lambda each: each[0])
            text = f"{limit.source.text} allows {_amount(resource, most)} {_PER[scope]}"
            legal = f"legal: at most {_amount(resource, most)}; {_SMALLER}"
            yield Finding(_key(component, resource), _amount(resource, asks), "fail", text, legal)
        least = limit_of("least", "job", resource)
        if least is not None and wanted < least.most:
            text = f"{least.source.text} takes only jobs of {_amount(resource, least.most)} or more"
            yield Finding(_key(component, resource), _amount(resource, wanted), "fail", text, "legal: another `qos`")
        for scope in ("job", "group"):
            spent = limit_of("minutes", scope, resource)
            if spent is not None and wanted * minutes > spent.most:
                text = f"{_amount(resource, wanted)} for so long are more than the {spent.most:,} minutes of them that "
                text += f"{spent.source.text} allows {'per job' if scope == 'job' else 'at once'}"
                legal = f"legal: at most {slurm_time(60 * (spent.most // wanted))!r}; {_SMALLER}"
                yield Finding(f"{component.section}.time", slurm_time(60 * minutes), "fail", text, legal)


def check_limits_together(
    plan: JobPlan, partitions: Mapping[str, PartitionFacts | None], facts: ClusterFacts
) -> Iterator[Finding]:
    """Find requests of all jobs of a plan together beyond a limit that each alone keeps.

    partitions: of each component by name.  Every component of a heterogeneous job and every task of an array counts.
    """
    if "limits" not in facts.enforced:
        return
    sums = _sums(plan, partitions, facts)
    for (key, value, scope, resource), together in sums.items():
        limit, names = together.limit, " + ".join(dict.fromkeys(part.name for part in together.parts))
        if limit is None or (together.needed <= limit.most and together.wanted <= limit.most) or together.is_told:
            continue
        allows = f"{limit.source.text} allows {_amount(resource, limit.most)} {_PER[scope]}"
        if together.needed > limit.most:
            text = f"{names} need {_amount(resource, together.needed)} at the same time, and {allows}"
            yield Finding(f"{together.parts[0].section}.{key}", value, "fail", text, f"legal: {_SMALLER}")
        else:
            text = f"{names} request {_amount(resource, together.wanted)}, and {allows}: some generators will wait"
            yield Finding(f"{together.parts[0].section}.{key}", value, "warn", text, "fewer replicas")


def _sums(
    plan: JobPlan, partitions: Mapping[str, PartitionFacts | None], facts: ClusterFacts
) -> dict[tuple[str, str, str, str], _Sum]:
    """Add up requests of components under the same limit: by key and value of its source, scope, resource."""
    sums: dict[tuple[str, str, str, str], _Sum] = defaultdict(_Sum)
    shares_nodes = len(plan.jobs) > 1  # a node counts once, and separate jobs may share it
    for job in plan.jobs:
        for part in job.components:
            sources, asked = sources_of(part, partitions.get(part.name), facts), _wanted(part) | {"": 1}
            counted = [name for name, amount in asked.items() if amount and not (name == "node" and shares_nodes)]
            for resource, scope in itertools.product(counted, ("user", "account", "group")):
                limit = _limit_of(sources, "most" if resource else "running", scope, resource)
                if limit is not None:
                    together = sums[limit.source.key, limit.source.value, scope, resource]
                    together.add(part, limit, asked[resource], job.array_size or 1)
    return sums


class _Sum:
    """Sum of requests of components that share a limit."""

    def __init__(self) -> None:
        self.parts: list[JobComponent] = []
        self.limit: Limit | None = None
        self.needed = self.wanted = 0  # without and with every further task of an array
        self.is_told = False  # a single one is beyond the limit, and reported

    def add(self, part: JobComponent, limit: Limit, amount: int, num_tasks: int) -> None:
        """Count one component."""
        self.parts.append(part)
        self.limit = limit
        self.needed += amount
        self.wanted += amount * num_tasks
        self.is_told = self.is_told or amount > limit.most


def _accounts_from(name: str, facts: ClusterFacts) -> list[LimitSource]:
    """Return an account and those above it, whose limits for all their users also hold."""
    known, found = {each.name: each for each in facts.accounts}, []
    while name in known:
        account = known.pop(name)
        groups = JobLimits(
            {key: most for key, most in account.limits.numbers.items() if key[1] == "group"},
            {key: most for key, most in account.limits.resources.items() if key[1] == "group"},
        )
        found.append(LimitSource("account", name, f"account {name!r}", groups))
        name = account.parent
    return found


def _limit_of(sources: list[list[LimitSource]], what: str, scope: str, resource: str = "") -> Limit | None:
    """Return the limit that decides, the lowest of those that hold together."""
    for together in sources:
        known = [(source, source.limits.resources.get((what, scope), {}).get(resource) if resource
                  else source.limits.numbers.get((what, scope))) for source in together]  # fmt: skip
        said = [Limit(most, source) for source, most in known if most is not None]
        if said:
            return min(said, key=lambda limit: limit.most)
    return None


def _wanted(component: JobComponent) -> dict[str, int]:
    """Return the requests of one job of the component, by resource, without the site's defaults."""
    gpus = component.nodes * component.gpus_per_node
    wanted = {
        "node": component.nodes,
        "cpu": component.num_tasks * component.cpus_per_task,
        "mem": component.num_tasks * (component.memory_gib_per_task or 0) * 1024,
        "gres/gpu": gpus,
    }
    if component.gres_type is not None:
        wanted[f"gres/gpu:{component.gres_type.lower()}"] = gpus
    unknown = ("mem",) if not component.memory_gib_per_task else ()  # the partition's default, or all of the node
    return {name: amount for name, amount in wanted.items() if name not in unknown}


def _amount(resource: str, amount: int) -> str:
    if not resource:
        return f"{amount} running job{'s' * (amount != 1)}"
    if resource == "mem":
        return f"{amount / 1024:.4g} {_RESOURCES[resource]}"
    words = _RESOURCES.get(resource) or f"{resource.removeprefix('gres/gpu').removeprefix(':')} GPUs".strip()
    return f"{amount} {words.removesuffix('s') if amount == 1 else words}"


def _key(component: JobComponent, resource: str) -> str:
    """Return the key of the site file for a size."""
    has_gpus = component.section not in ("controller", "rewards")
    keys = {
        "cpu": "cpus_per_gpu" if has_gpus else "cpus_per_task",
        "mem": "memory_gib_per_gpu" if has_gpus else "memory_gib_per_task",
        "node": "nodes",
    }
    return f"{component.section}.{keys.get(resource, 'gpus_per_node')}"


# ---------------------------------------------------------------------------------------------------------- slurm check

SHORTEST_JOB_AGE_S = 60  # of MinJobAge: below it, a job that ends between two queries is never seen


def refuse_unfit(plan: JobPlan) -> list[str]:
    """Ask the cluster whether it would accept the plan; returns warnings.

    Raises ConfigError with one line for each failure: key, value, what is legal.  Raises SlurmError: slurmctld does not
    answer, or Slurm is not here.
    """
    findings = check_directory(plan.cluster.shared_directory)
    if findings[0].verdict != "fail":
        findings += find_unfit(plan, ask_cluster())
    failures = [finding for finding in findings if finding.verdict == "fail"]
    if failures:
        raise ConfigError("\n".join(finding.line for finding in failures))
    return [f"warning     {finding.line}" for finding in findings if finding.verdict == "warn"]


def as_far_as_slurm_answers(look: Callable[[], object], tell: Callable[[str], object]) -> None:
    """Check a dry run's plan; if Slurm does not answer, report which checks were skipped."""
    try:
        look()
    except SlurmError as error:
        tell(f"not checked what the cluster would refuse: {error}")


def find_unfit(plan: JobPlan, facts: ClusterFacts) -> list[Finding]:
    """All findings, and those of sbatch on components without a failure.  Raises SlurmError: no answer."""
    findings = _checked(plan, facts)
    blamed = {finding.component for finding in findings if finding.verdict == "fail"}
    return _as_written([*findings, *try_components(plan, facts, skip=blamed)], plan)


def check_plan(plan: JobPlan, facts: ClusterFacts) -> list[Finding]:
    """Return findings that sbatch --test-only does not report."""
    return _as_written(_checked(plan, facts), plan)


def _as_written(findings: Iterable[Finding], plan: JobPlan) -> list[Finding]:
    """Name keys as in the site file; findings on a key in [common] are merged, with the names of the components."""
    of_common: dict[Finding, list[str]] = {}
    for finding in findings:
        section, _, key = finding.key.rpartition(".")
        heirs = [part.section for part in plan.components if key in part.allocation.common]
        if section in heirs:
            of_common.setdefault(replace(finding, key=f"common.{key}"), []).append(section)
        else:
            of_common[finding] = []
    written = []
    for finding, sections in of_common.items():
        heirs = [
            part.section for part in plan.components if finding.key.removeprefix("common.") in part.allocation.common
        ]
        whose = f" (here of {', '.join(sections)})" if sections and len(sections) < len(heirs) else ""
        written.append(replace(finding, text=f"{finding.text}{whose}"))
    return written


def _checked(plan: JobPlan, facts: ClusterFacts) -> list[Finding]:
    findings = [finding for part in plan.components for finding in _in_partitions(part, facts)]
    findings += [finding for part in plan.components for finding in _fewer_gpus(part, facts)]
    # Sums of components that do not fit alone are meaningless.
    if not any(finding.verdict == "fail" for finding in findings):
        findings += [*_over_budget(plan, facts), *check_limits_together(plan, _partitions(plan, facts), facts)]
    findings += [*_preemption(plan, facts), *_requeue(plan, facts), *_arrays(plan, facts), *_submissions(plan, facts)]
    return [*findings, *_without_accounting(plan, facts), *_hidden(facts)]


def try_components(plan: JobPlan, facts: ClusterFacts, skip: Collection[str] = ()) -> list[Finding]:
    """Run `sbatch --test-only` for every component by itself; waiting for nodes that are down is a warning.

    Raises SlurmError: slurmctld does not answer.
    """
    findings = []
    with tempfile.TemporaryDirectory(prefix="rlhpc-") as scratch:
        for component in [part for part in plan.components if part.section not in skip]:
            script = Path(scratch, f"{component.name}.sbatch")
            directives = list(component_directives(component))
            lines = [f"#SBATCH {directive}" for directive in directives]
            script.write_text("\n".join(["#!/bin/sh", *lines, "true", ""]), encoding="utf-8")
            findings.append(_try(component, script, facts, f"it was asked for {' '.join(directives)}"))
    return findings


def _try(component: JobComponent, script: Path, facts: ClusterFacts, asked: str) -> Finding:
    key, value = component.section, "sbatch --test-only"
    try:
        try_script(script, PATIENCE_S)
    except SlurmError as error:
        if is_away(error):
            raise unchecked(f"{key} could not be checked", error) from None
        said = str(error).removeprefix("sbatch: ")
        if (blamed := _blamed(component, said, facts)) is not None:
            return blamed
        # Slurm says "configuration is not available" if no node can satisfy a request, and if no node that is up can.
        nodes = [node for partition in partitions_of(component, facts) for node in facts.nodes_of(partition.name)]
        may_be_away = not nodes or not all(node.is_up for node in nodes)
        waits = "not available (" in said or ("node configuration is not available" in said and may_be_away)
        remedy = "nodes may be down or drained" if waits else asked
        return Finding(key, value, "warn" if waits else "fail", f"sbatch refuses it: {said}", remedy)
    return Finding(key, value, "pass", "sbatch takes it")


def partitions_of(component: JobComponent, facts: ClusterFacts) -> list[PartitionFacts]:
    """Return the named partitions, or the default one, without those that do not exist."""
    named = component.allocation.partition or facts.default_partition or ""
    return [found for name in named.split(",") if (found := facts.partition(name)) is not None]


def _nodes_of(component: JobComponent, facts: ClusterFacts) -> list[NodeFacts]:
    """Return the visible nodes of a component's partitions, each once."""
    names = {partition.name for partition in partitions_of(component, facts)}
    return [node for node in facts.nodes if node.partitions & names]


def _without_accounting(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    """Warn of accounts and QOS on a cluster without accounting: Slurm accepts any, and jobs have none."""
    if facts.associations is not None:
        return
    text = "not checked: this cluster keeps no accounts, or did not tell them; Slurm may pass over it"
    for key in ("account", "qos"):
        for part in plan.components:
            if (value := getattr(part.allocation, key)) is not None:
                yield Finding(f"{part.section}.{key}", value, "warn", text)


def _hidden(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.hidden:
        what = " and ".join(f"{kind}s" for kind in sorted(facts.hidden))
        text = f"this site hides its {what}: they were not checked, except by sbatch"
        yield Finding("slurm.PrivateData", facts.config.get("PrivateData", ""), "warn", text)


# ------------------------------------------------------------------------------------ limits that Slurm does not check


def _in_partitions(component: JobComponent, facts: ClusterFacts) -> Iterator[Finding]:
    """Check limits of partitions: most sites accept a job beyond them and never start it.

    If several partitions are named, a request that only some of them refuse is a warning.
    """
    if "partition" in facts.hidden:
        yield from check_limits(component, None, facts)
    problems = [list(_in_partition(component, partition, facts)) for partition in partitions_of(component, facts)]
    is_refused = [any(problem.verdict == "fail" for problem in some) for some in problems]
    for some in problems:
        yield from some if all(is_refused) else (replace(problem, verdict="warn") for problem in some)


def _in_partition(component: JobComponent, partition: PartitionFacts, facts: ClusterFacts) -> Iterator[Finding]:
    yield from _policy(component, partition, facts)
    yield from check_limits(component, partition, facts)
    qos, name, time_s = qos_of(component, facts), partition.name, component.allocation.time_s
    flags = "" if qos is None else qos.flags  # a QOS may go beyond a partition's limits
    most_s, most, least = partition.max_time_s, partition.max_nodes, partition.min_nodes
    if most_s is not None and time_s > most_s and "PartitionTimeLimit" not in flags:
        text, legal = f"partition {name!r} allows {slurm_time(most_s)}", f"legal: at most {slurm_time(most_s)!r}"
        yield Finding(f"{component.section}.time", slurm_time(time_s), "fail", text, legal)
    if most is not None and component.nodes > most and "PartitionMaxNodes" not in flags:
        text = f"partition {name!r} allows {most} per job"
        yield Finding(f"{component.section}.nodes", str(component.nodes), "fail", text, f"legal: at most {most}")
    if component.nodes < least and "PartitionMinNodes" not in flags:
        text = f"partition {name!r} requires at least {least}"
        yield Finding(f"{component.section}.nodes", str(component.nodes), "fail", text, f"legal: {least} or more")


def _policy(component: JobComponent, partition: PartitionFacts, facts: ClusterFacts) -> Iterator[Finding]:
    """Check a partition's allowed accounts and QOS.  Newer Slurm includes an account's children: a warning."""
    account, qos = component.allocation.account or facts.default_account, qos_of(component, facts, partition.name)
    if account and not _is_allowed(account.lower(), partition.allowed_accounts, partition.denied_accounts):
        text = f"partition {partition.name!r} does not accept this account by its name: it may never start"
        yield Finding(f"{component.section}.account", account, "warn", text, "another account or partition")
    if qos is not None and not _is_allowed(qos.name, partition.allowed_qos, partition.denied_qos):
        open_to = partition.allowed_qos or [each.name for each in facts.qos if each.name not in partition.denied_qos]
        text = f"partition {partition.name!r} does not accept this QOS"
        yield Finding(f"{component.section}.qos", qos.name, "fail", text, f"legal: {', '.join(open_to)}")


def _is_allowed(name: str, allowed: tuple[str, ...] | None, denied: tuple[str, ...]) -> bool:
    return name in allowed if allowed is not None else name not in denied


# ---------------------------------------------------------------------------------------------------------------- sums


def _over_budget(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    """Check components together: each one of a heterogeneous job gets nodes of its own, other jobs share nodes."""
    for job in plan.jobs:
        if len(job.components) > 1:
            yield from _distinct_nodes(job, facts)
    if len(plan.jobs) > 1:
        yield from _gpus_at_once(plan, facts)
    if plan.is_elastic:
        yield from _added_at_once(plan.jobs[-1], facts)


def _distinct_nodes(job: Job, facts: ClusterFacts) -> Iterator[Finding]:
    """Check Hall's condition: no group of components requests more nodes than the group's candidates.

    Slurm accepts a job that violates it, and lets it wait forever.  The smallest violating group is reported.
    """
    reach = {part.name: _nodes_with_its_gpus(part, facts) for part in job.components}
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
                yield Finding(f"{group[0].section}.partition", _partition_text(group[0]), "fail", text, legal)
                return
            text = f"{names} need {wanted} different nodes, and {up} of {len(there)} are up now"
            yield Finding(f"{group[0].section}.partition", _partition_text(group[0]), "warn", text, "it will wait")


def _nodes_with_its_gpus(component: JobComponent, facts: ClusterFacts) -> dict[str, NodeFacts]:
    """Names of nodes of a component's partitions, in any state, that have the GPUs needed per node."""
    return {
        node.name: node
        for partition in partitions_of(component, facts)
        for node in facts.nodes_of(partition.name)
        if component.gpus_per_node <= _gpus_of(component, node)
    }


def _gpus_at_once(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    """Check GPUs of all jobs at once: jobs that do not fit together run one after another, and wait for each other."""
    parts = [(part, job.array_size or 1) for job in plan.jobs for part in job.components if part.gpus_per_task]
    for group in (group for size in range(1, len(parts) + 1) for group in itertools.combinations(parts, size)):
        there = {name: node for part, _ in group for name, node in _nodes_with_its_gpus(part, facts).items()}
        has = sum(node.num_gpus for node in there.values())
        wanted = sum(part.gpus_per_node * part.nodes * number for part, number in group)
        if not there or wanted <= has:
            continue
        part, number = group[-1]
        request = f"{' and '.join(part.name for part, _ in group)} request{'s' * (len(group) == 1)}"
        each, waiting = part.gpus_per_node * part.nodes, "some jobs will never start"
        if number > 1 and (late := -(-(wanted - has) // each)) < number:  # a task is a replica, or a node of them
            role = part.roles[0].role
            what = f"{role}s" if part.num_tasks == 1 else f"jobs of {role}s"
            waiting = f"{late} of {number} {what} cannot run together with the rest"
        text = f"{request} {wanted} GPUs, and there are {has}: {waiting}"
        yield Finding(f"{part.section}.partition", _partition_text(part), "warn", text, "fewer replicas or ranks")
        return


def _added_at_once(job: Job, facts: ClusterFacts) -> Iterator[Finding]:
    """Check what is added to a run: more than ever fit would only wait."""
    (part,) = job.components
    has_gpus, wanted = bool(part.gpus_per_node), job.array_size or 1
    each = part.gpus_per_node if has_gpus else part.tasks_per_node * part.cpus_per_task
    nodes = _nodes_with_its_gpus(part, facts).values()
    room = sum((_gpus_of(part, node) if has_gpus else node.cores) // each for node in nodes)
    if nodes and wanted > room:
        share = part.roles[0]
        what = f"processes of service {share.service}" if share.service else "generators"
        text = f"{wanted} {what}, and its nodes have room for {room}, if nothing else runs there"
        yield Finding(
            f"{part.section}.partition", _partition_text(part), "warn", text, "fewer of them, the others only wait"
        )


def _gpus_of(component: JobComponent, node: NodeFacts) -> int:
    kind = component.gres_type
    return node.num_gpus if kind is None else node.gpus.get(kind, 0)


def _fewer_gpus(component: JobComponent, facts: ClusterFacts) -> Iterator[Finding]:
    """Find nodes with fewer GPUs than in the site file: a run that fills them would be refused."""
    said = component.gpus_there
    most = max((_gpus_of(component, node) for node in _nodes_of(component, facts)), default=0)
    if said is not None and said > most > 0:
        text = f"no node of partition {_partition_name(component, facts)} has more than {_amount('gres/gpu', most)}"
        yield Finding(f"{component.section}.gpus_per_node", str(said), "warn", text, f"legal: at most {most}")


def _partitions(plan: JobPlan, facts: ClusterFacts) -> dict[str, PartitionFacts | None]:
    """The only partition of each component; None if there are several, of which one suffices."""
    found = {part.name: partitions_of(part, facts) for part in plan.components}
    return {name: partitions[0] if len(partitions) == 1 else None for name, partitions in found.items()}


def _partition_text(component: JobComponent) -> str:
    return component.allocation.partition or "(default)"


def _partition_name(component: JobComponent, facts: ClusterFacts) -> str:
    return repr(component.allocation.partition or facts.default_partition or "")


# -------------------------------------------------------------------------------------------- refusals by our own keys


def _blamed(component: JobComponent, said: str, facts: ClusterFacts) -> Finding | None:
    """Return sbatch's refusal with the key of the site file that causes it; None if that is not clear."""
    found = _blamed_partition(component, said, facts) or _blamed_name(component, said.lower(), facts)
    if found is None and "configuration is not available" not in said and "can not be satisfied" not in said:
        return None
    return found or _blamed_size(component, facts)


def _blamed_partition(component: JobComponent, said: str, facts: ClusterFacts) -> Finding | None:
    named, known = component.allocation.partition, [partition.name for partition in facts.partitions]
    if "partition" not in said or not known:
        return None
    text = "this cluster has no default partition" if named is None and facts.default_partition is None else ""
    if unknown := [name for name in (named or "").split(",") if name and name not in known]:
        text = "no such partition" if named == unknown[0] else f"no partition {unknown[0]!r}"
        text += near_hint(unknown[0], known)
    key, value, legal = f"{component.section}.partition", _partition_text(component), f"legal: {', '.join(known)}"
    return Finding(key, value, "fail", text, legal) if text else None


def _blamed_name(component: JobComponent, said: str, facts: ClusterFacts) -> Finding | None:
    """Find an account, a QOS, a reservation or a feature that does not exist, or not for this user."""
    allocation = component.allocation

    def wrong(key: str, value: str, text: str, legal: Iterable[str]) -> Finding:
        listed = ", ".join(dict.fromkeys(legal)) or "none that is known here"
        return Finding(f"{component.section}.{key}", value, "fail", text, f"legal: {listed}")

    if "invalid account" in said and facts.associations is not None:
        mine, account = [each.account for each in facts.associations], allocation.account or facts.default_account
        if account.lower() not in mine:
            return wrong("account", account, "no account of yours", mine)
    if "invalid qos" in said and allocation.qos is not None and facts.associations is not None:
        share = association_of(component, facts)
        legal = (share.qos if share is not None else ()) or [qos.name for qos in facts.qos]
        if allocation.qos not in legal:
            return wrong("qos", allocation.qos, "no QOS, or none that your account may use", legal)
    if "reservation" in said and allocation.reservation is not None:
        legal = ("one of `scontrol show reservation` that is for you, and lasts long enough",)
        return wrong("reservation", allocation.reservation, f"sbatch refuses it: {said}", legal)
    if "invalid feature" in said and allocation.constraint is not None:
        features = sorted({name for node in _nodes_of(component, facts) for name in node.features})
        text = f"no such features in partition {_partition_name(component, facts)}"
        return wrong("constraint", allocation.constraint, text, features)
    return None


def _blamed_size(component: JobComponent, facts: ClusterFacts) -> Finding | None:
    """Find a request per node that no node of the partition, up or down, satisfies; None: some node satisfies all."""
    name, tasks, kind, nodes = (
        component.section,
        component.tasks_per_node,
        component.gres_type,
        _nodes_of(component, facts),
    )
    if not nodes:
        return None
    where, each = f"nodes of partition {_partition_name(component, facts)}", max(component.gpus_per_task, 1)
    gpus, of_kind = component.gpus_per_node, max(node.gpus.get(kind or "", 0) for node in nodes)
    most = max(node.num_gpus for node in nodes) if kind is None else of_kind
    if gpus > most and kind is not None and not most:
        kinds = ", ".join(sorted({kind for node in nodes for kind in node.gpus if kind}))
        text = f"{where} have no such GPUs"
        return Finding(f"{name}.gres_type", kind, "fail", text, f"legal: {kinds or 'another partition'}")
    if gpus > most:
        text = f"{where} have {f'{most} at most' if most else 'none'}"
        legal = f"legal: at most {most}, or another partition" if most else "legal: another partition"
        return Finding(f"{name}.gpus_per_node", _amount("gres/gpu", gpus), "fail", text, legal)
    lone = tasks > 1 and component.gpus_there is None and not component.gpus_per_task
    why = f"; without {name}.gpus_per_node all {tasks} tasks are on one node, without GPUs" if lone else ""
    for resource, wanted, there in (
        ("cpu", component.cpus_per_task, max(node.cores for node in nodes)),
        ("mem", component.memory_gib_per_task or 0, max(node.memory_gib for node in nodes)),
    ):
        if there and tasks * wanted > there:
            unit, at_most = _RESOURCES[resource], int(there // (tasks * each))
            text = f"{tasks} {'task needs' if tasks == 1 else 'tasks need'} {tasks * wanted} {unit} of one node, "
            text += f"and {where} have {there:.4g} at most"
            legal = f"legal: at most {at_most}" if at_most else f"legal: fewer tasks on a node ({name}.nodes)"
            return Finding(_key(component, resource), str(wanted // each), "fail", f"{text}{why}", legal)
    if component.nodes > len(nodes):
        text = f"partition {_partition_name(component, facts)} has {len(nodes)}"
        return Finding(f"{name}.nodes", str(component.nodes), "fail", text, f"legal: at most {len(nodes)}")
    return None


# ---------------------------------------------------------------------------------------------- settings of the cluster


def _preemption(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    is_on = facts.config.get("PreemptType", "").rpartition("/")[2] not in ("", "none", "(null)")
    for job in plan.jobs:
        for part in job.components:
            for partition in partitions_of(part, facts):
                mode = partition.preempt_mode.split(",")[0]
                if mode in ("OFF", "WITHIN") or not is_on:
                    continue
                key, value = f"{part.section}.partition", partition.name
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
    """Number of jobs that Slurm counts: every component and every array task."""
    if "limits" not in facts.enforced:
        return
    number = sum((job.array_size or 1) * len(job.components) for job in plan.jobs)
    partitions = _partitions(plan, facts)
    limits = [
        limit.most
        for part in plan.components
        for scope in ("user", "account", "group")
        if (limit := _limit_of(sources_of(part, partitions.get(part.name), facts), "submitted", scope)) is not None
    ]
    if limits and number > min(limits):
        text = f"Slurm counts {number} jobs, and at most {min(limits)} may be submitted at once (MaxSubmitJobs)"
        yield Finding("cluster.placement", plan.placement, "warn", text, "fewer generators, or whole nodes for them")
