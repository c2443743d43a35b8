"""Check one component of a plan against the partitions, nodes and accounts of a cluster.  Pure.

Input: Component and ClusterFacts.  Output: Findings: key and value of the site file, and what is legal.  If several
partitions are listed, what only some of them refuse is a warning.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from launch.checks.finding import Finding, Verdict
from launch.checks.site.job_limits import check_limits, qos_of
from launch.checks.site.node_features import fulfils, words_of
from launch.plan.jobs import Component
from launch.plan.site_values import slurm_time
from launch.slurm.cluster_facts import ClusterFacts, NodeFacts, PartitionFacts


def check_component(component: Component, facts: ClusterFacts) -> list[Finding]:
    """Everything that is wrong with it; a finding that passes if nothing is."""
    findings = [*_unknown_partitions(component, facts), *_account(component, facts), *_qos(component, facts)]
    findings += _reservation(component, facts)
    known = partitions_of(component, facts)
    if "partition" in facts.hidden:
        findings += check_limits(component, None, facts)
    problems = [list(_in_partition(component, partition, facts)) for partition in known]
    is_refused = [any(problem.verdict == "fail" for problem in some) for some in problems]
    for some in problems:
        # The job may go to another of its partitions.
        findings += some if all(is_refused) else [replace(problem, verdict="warn") for problem in some]
    if findings:
        return findings
    names = ", ".join(partition.name for partition in known) or component.allocation.partition or "(default)"
    return [Finding(f"{component.name}.partition", names, "pass", _what(component))]


def partitions_of(component: Component, facts: ClusterFacts) -> list[PartitionFacts]:
    """Those named, or the default one; those that do not exist are left out."""
    named = component.allocation.partition or facts.default_partition or ""
    return [found for name in named.split(",") if (found := facts.partition(name)) is not None]


def candidate_nodes(component: Component, facts: ClusterFacts) -> list[NodeFacts]:
    """Nodes that could hold the component's part of a node, each once, whatever state they are in."""
    found = {
        node.name: node for partition in partitions_of(component, facts) for node in facts.nodes_of(partition.name)
    }
    return [node for node in found.values() if _could_hold(node, component)]


def _what(component: Component) -> str:
    gpus = (
        f", {component.gpus_per_node} GPU{'s' * (component.gpus_per_node > 1)} each" if component.gpus_per_task else ""
    )
    return f"{component.nodes} node{'s' * (component.nodes > 1)}{gpus}, {slurm_time(component.allocation.time_s)}"


# ------------------------------------------------------------------------------------------------------- what is named


def _unknown_partitions(component: Component, facts: ClusterFacts) -> Iterator[Finding]:
    key, names = f"{component.name}.partition", [partition.name for partition in facts.partitions]
    named = component.allocation.partition
    if "partition" in facts.hidden:
        return
    if named is None and facts.default_partition is None:
        yield Finding(key, "None", "fail", "this cluster has no default partition", f"legal: {', '.join(names)}")
    for name in (named or "").split(","):
        if name and name not in names:
            yield Finding(key, name, "fail", "no such partition", _legal(name, names))


def _account(component: Component, facts: ClusterFacts) -> Iterator[Finding]:
    account = component.allocation.account
    if facts.associations is None or account is None:
        return
    legal = sorted({each.account for each in facts.associations})
    if account.lower() not in legal:
        verdict: Verdict = "fail" if "associations" in facts.enforced else "warn"
        text = f"{facts.user} may not use it, or there is no such account"
        yield Finding(f"{component.name}.account", account, verdict, text, _legal(account, legal))


def _qos(component: Component, facts: ClusterFacts) -> Iterator[Finding]:
    name, key = component.allocation.qos, f"{component.name}.qos"
    if name is None or facts.associations is None:
        return
    known = {qos.name: qos for qos in facts.qos}
    account = component.allocation.account or facts.default_account
    mine = [each for each in facts.associations if each.account == account] or facts.associations
    allowed = sorted({qos for each in mine for qos in each.qos} or set(known))
    # Without `qos` in AccountingStorageEnforce Slurm takes any name, and the job has no QOS.
    verdict: Verdict = "fail" if "qos" in facts.enforced else "warn"
    if known and name not in known:
        yield Finding(key, name, verdict, "no such QOS", _legal(name, allowed), sbatch_decides=True)
    elif name not in allowed:
        text = f"account {account!r} may not use it"
        yield Finding(key, name, verdict, text, _legal(name, allowed), sbatch_decides=True)


def _reservation(component: Component, facts: ClusterFacts) -> Iterator[Finding]:
    name = component.allocation.reservation if "reservation" not in facts.hidden else None
    for each in (name or "").split(","):
        if each and each not in facts.reservations:
            key, legal = f"{component.name}.reservation", _legal(each, facts.reservations)
            yield Finding(key, each, "fail", "no such reservation", legal, sbatch_decides=True)


def _legal(value: str, names: Iterable[str]) -> str:
    names = list(names)
    close = difflib.get_close_matches(value, names, n=1)
    return f"legal: {', '.join(names) or 'none'}" + (f" (did you mean {close[0]}?)" if close and len(names) > 1 else "")


# ------------------------------------------------------------------------------------------------------ one partition


def _in_partition(component: Component, partition: PartitionFacts, facts: ClusterFacts) -> Iterator[Finding]:
    yield from _door(component, partition, facts)
    yield from _who(component, partition, facts)
    yield from check_limits(component, partition, facts)
    limit = partition.max_time_s
    if (
        limit is not None
        and component.allocation.time_s > limit
        and "PartitionTimeLimit" not in _flags(component, facts)
    ):
        text, legal = (
            f"partition {partition.name!r} allows {slurm_time(limit)}",
            f"legal: at most {slurm_time(limit)!r}",
        )
        yield Finding(f"{component.name}.time", slurm_time(component.allocation.time_s), "fail", text, legal)
    nodes = facts.nodes_of(partition.name)
    if nodes:  # else the site hides them
        yield from _size(component, partition, nodes, _flags(component, facts))


def _flags(component: Component, facts: ClusterFacts) -> str:
    """Of its QOS, which may go beyond a partition's limits."""
    qos = qos_of(component, facts)
    return "" if qos is None else qos.flags


def _door(component: Component, partition: PartitionFacts, facts: ClusterFacts) -> Iterator[Finding]:
    key, name = f"{component.name}.partition", partition.name
    others = "legal: " + ", ".join(each.name for each in facts.partitions if each.state == "UP")
    if partition.state in ("INACTIVE", "DRAIN"):
        yield Finding(key, name, "fail", f"accepts no jobs now ({partition.state})", others)
    elif partition.state != "UP":
        yield Finding(key, name, "warn", f"starts no jobs now ({partition.state}); they stay pending", others)
    if partition.is_root_only:
        yield Finding(key, name, "fail", "takes jobs of root alone", others)
    if partition.needs_reservation and component.allocation.reservation is None:
        legal = f"legal: {component.name}.reservation, one of {', '.join(facts.reservations) or 'none'}"
        yield Finding(key, name, "fail", "accepts only jobs with a reservation", legal)


def _who(component: Component, partition: PartitionFacts, facts: ClusterFacts) -> Iterator[Finding]:
    account = component.allocation.account or facts.default_account
    mine = sorted({each.account for each in facts.associations or ()})
    fits = [a for a in mine if _is_allowed(a, partition.allowed_accounts, partition.denied_accounts)]
    if account and not _is_allowed(account.lower(), partition.allowed_accounts, partition.denied_accounts):
        text = f"partition {partition.name!r} does not accept this account by its name"
        legal = f"legal: {', '.join(fits or partition.allowed_accounts or ()) or 'none of yours'}"
        # Newer Slurm includes an account's children; older Slurm accepts the job, and keeps it pending forever.
        yield Finding(f"{component.name}.account", account, "fail", text, legal, sbatch_decides=True)
    used = qos_of(component, facts, partition.name)
    # One that does not exist has been told.
    qos = used.name if used is not None else component.allocation.qos if not facts.qos else None
    if qos and not _is_allowed(qos, partition.allowed_qos, partition.denied_qos):
        text = f"partition {partition.name!r} does not accept this QOS"
        open_to = partition.allowed_qos or [each.name for each in facts.qos if each.name not in partition.denied_qos]
        yield Finding(f"{component.name}.qos", qos, "fail", text, f"legal: {', '.join(open_to)}")


def _is_allowed(name: str, allowed: tuple[str, ...] | None, denied: tuple[str, ...]) -> bool:
    return name in allowed if allowed is not None else name not in denied


# --------------------------------------------------------------------------------------------------------------- nodes


def _size(
    component: Component, partition: PartitionFacts, nodes: tuple[NodeFacts, ...], flags: str
) -> Iterator[Finding]:
    key, name, most = f"{component.name}.nodes", partition.name, partition.max_nodes
    if most is not None and component.nodes > most and "PartitionMaxNodes" not in flags:
        text = f"partition {name!r} allows {most} per job"
        yield Finding(key, str(component.nodes), "fail", text, f"legal: at most {most}")
    if component.nodes < partition.min_nodes and "PartitionMinNodes" not in flags:
        text = f"partition {name!r} requires at least {partition.min_nodes}"
        yield Finding(key, str(component.nodes), "fail", text, f"legal: {partition.min_nodes} or more")
    misfits = list(_misfits(component, partition, nodes))
    yield from misfits
    if misfits:
        return
    fit = [node for node in nodes if _could_hold(node, component)]
    if not fit:
        text = f"no node of partition {name!r} has the GPUs, CPUs, memory and features together"
        key, legal = f"{component.name}.partition", "legal: less of one of them"
        yield Finding(key, name, "fail", text, legal, sbatch_decides=True)
    elif component.nodes > len(fit):
        text = f"partition {name!r} has {len(fit)} such nodes"
        yield Finding(key, str(component.nodes), "fail", text, f"legal: at most {len(fit)}", sbatch_decides=True)
    elif component.nodes > sum(node.is_up for node in fit):
        text = f"{sum(node.is_up for node in fit)} of {len(fit)} such nodes of partition {name!r} are up now"
        yield Finding(key, str(component.nodes), "warn", text, "it waits until more are")


def _misfits(component: Component, partition: PartitionFacts, nodes: tuple[NodeFacts, ...]) -> Iterator[Finding]:
    """Requests that no single node can satisfy."""
    name, section = repr(partition.name), component.name
    if not any(_has_gpus(component, node) for node in nodes):
        yield _no_gpus(component, name, nodes, component.gpus_per_node)
    elif component.gpus_of_a_node > max(_gpus_there(component, node) for node in nodes):
        yield _no_gpus(component, name, nodes, component.gpus_of_a_node)
    cpus, most = _cpus(component), max(node.cpus for node in nodes)
    most = min(most, partition.max_cpus_per_node or most)
    if cpus > most:
        key = f"{section}.cpus_per_gpu" if section in ("trainer", "generation") else f"{section}.cpus_per_task"
        text = (
            f"{component.tasks_per_node} tasks of {component.cpus_per_task} cores on a node, which has at most {most}"
        )
        text, legal = f"partition {name}: {text}", f"legal: {most} a node"
        yield Finding(key, str(component.cpus_per_task), "fail", text, legal, sbatch_decides=True)
    memory, there = _memory_mib(component), max(node.memory_mib for node in nodes)
    if memory > there:
        per = "memory_gib_per_gpu" if section in ("trainer", "generation") else "memory_gib_per_task"
        text = f"{memory // 1024} GiB on a node, and nodes of partition {name} have at most {there // 1024}"
        legal = f"legal: {there // 1024} a node, {there // 1024 // component.tasks_per_node} a task"
        yield Finding(f"{section}.{per}", str(component.memory_gib_per_task), "fail", text, legal, sbatch_decides=True)
    constraint = component.allocation.constraint
    if constraint is not None and not any(fulfils(constraint, node.features) for node in nodes):
        features = sorted({word for node in nodes for word in node.features})
        unknown = [word for word in words_of(constraint) if word not in features]
        text = f"no node of partition {name} has these features"
        legal = _legal(unknown[0], features) if unknown else f"legal: features of one node, of {', '.join(features)}"
        yield Finding(f"{section}.constraint", constraint, "fail", text, legal, sbatch_decides=True)


def _no_gpus(component: Component, name: str, nodes: tuple[NodeFacts, ...], asked: int) -> Finding:
    types: dict[str, int] = {}
    for node in nodes:
        for kind, count in node.gpus.items():
            types[kind] = max(types.get(kind, 0), count)
    has = ", ".join(f"{kind or 'gpu'}:{count}" for kind, count in sorted(types.items())) or "none"
    wanted = component.gres_type
    if wanted is not None and wanted not in types:
        text = f"no node of partition {name} has GPUs of this type"
        return Finding(f"{component.name}.gres_type", wanted, "fail", text, _legal(wanted, sorted(filter(None, types))))
    legal = f"legal: up to {types.get(wanted or '', 0) or max(types.values(), default=0)} a node ({has})"
    text = f"no node of partition {name} has that many GPUs"
    return Finding(f"{component.name}.gpus_per_node", str(asked), "fail", text, legal)


def _could_hold(node: NodeFacts, component: Component) -> bool:
    constraint = component.allocation.constraint
    has_room = _cpus(component) <= node.cpus and _memory_mib(component) <= node.memory_mib
    return _has_gpus(component, node) and has_room and (constraint is None or fulfils(constraint, node.features))


def _has_gpus(component: Component, node: NodeFacts) -> bool:
    return component.gpus_per_node <= _gpus_there(component, node)


def _gpus_there(component: Component, node: NodeFacts) -> int:
    """Return those of the type that is asked for."""
    return node.num_gpus if component.gres_type is None else node.gpus.get(component.gres_type, 0)


def _cpus(component: Component) -> int:
    return component.tasks_per_node * component.cpus_per_task


def _memory_mib(component: Component) -> int:
    """0 if nothing, or all of the node, is requested."""
    return component.tasks_per_node * (component.memory_gib_per_task or 0) * 1024
