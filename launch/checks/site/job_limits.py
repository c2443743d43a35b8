"""Hold a plan against the limits of QOS and accounts, which count whether or not the site file names a QOS.  Pure.

Input: Component or JobPlan, and ClusterFacts.  Output: Findings.  As in Slurm, the first that sets a limit decides: the
partition's QOS, the job's own (before it with the flag OverPartQOS), then the user's share of the account and every
account above it.  Slurm takes jobs beyond most limits, and keeps them pending for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from launch.checks.finding import Finding
from launch.plan.jobs import Component, JobPlan
from launch.plan.site_values import slurm_time
from launch.slurm.cluster_facts import Association, ClusterFacts, JobLimits, PartitionFacts, Qos

NORMAL = "normal"  # where neither the site nor the user has chosen a QOS
_PER = {"job": "per job", "node": "per node and job", "user": "per user", "account": "per account", "group": "in all"}
_RESOURCES = {"cpu": "cores", "mem": "GiB of memory", "node": "nodes"}
_SMALLER = "a smaller size, or another `qos` or `account`"


@dataclass(frozen=True)
class Source:
    """A QOS or an account, and what it allows."""

    key: str  # of the site file that chooses it: qos, partition, account
    value: str
    text: str
    limits: JobLimits


@dataclass(frozen=True)
class Limit:
    """The one that decides, of all that hold for a job."""

    most: int
    source: Source


def qos_of(component: Component, facts: ClusterFacts, partition: str = "") -> Qos | None:
    """Return the QOS that its job has, named or not; None: not known, or the site has none."""
    name = component.allocation.qos
    if name is None:
        mine = association_of(component, facts, partition)
        only = mine.qos[0] if mine is not None and len(mine.qos) == 1 else NORMAL
        name = (mine.default_qos if mine is not None else "") or only
    return next((qos for qos in facts.qos if qos.name == name), None)


def association_of(component: Component, facts: ClusterFacts, partition: str = "") -> Association | None:
    """Return the user's share of the account that its job is charged to; one of the partition goes first."""
    account = (component.allocation.account or facts.default_account).lower()
    mine = [each for each in facts.associations or () if each.account == account]
    fits = [each for each in mine if each.partition == partition and partition] or [
        each for each in mine if not each.partition
    ]
    return fits[0] if fits else None


def sources_of(component: Component, partition: PartitionFacts | None, facts: ClusterFacts) -> list[list[Source]]:
    """Return those whose limits hold for a component, by precedence; those in one list hold together."""
    name = partition.name if partition is not None else ""
    found = []
    own = qos_of(component, facts, name)
    if own is not None:
        text = f"QOS {own.name!r}" + ("" if component.allocation.qos else ", its default,")
        found.append([Source("qos", own.name, text, own.limits)])
    theirs = next((qos for qos in facts.qos if partition is not None and qos.name == partition.qos), None)
    if theirs is not None:
        text = f"QOS {theirs.name!r} of partition {name!r}"
        place = 1 if own is not None and "OverPartQOS" in own.flags else 0
        found.insert(place, [Source("partition", name, text, theirs.limits)])
    mine = association_of(component, facts, name)
    if mine is not None:
        above = _accounts_from(mine.account, facts)
        found.append([Source("account", mine.account, f"account {mine.account!r}", mine.limits), *above])
    return found


def check_limits(component: Component, partition: PartitionFacts | None, facts: ClusterFacts) -> Iterator[Finding]:
    """Find what one job of this component asks for beyond a limit: it would never start."""
    if "limits" not in facts.enforced:
        return
    limit_of = partial(_limit_of, sources_of(component, partition, facts))
    wall = limit_of("wall", "job")
    if wall is not None and component.allocation.time_s > wall.most:
        value, legal = slurm_time(component.allocation.time_s), f"legal: at most {slurm_time(wall.most)!r}"
        text = f"{wall.source.text} allows {slurm_time(wall.most)}"
        yield Finding(f"{component.name}.time", value, "fail", text, legal)
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
                yield Finding(f"{component.name}.time", slurm_time(60 * minutes), "fail", text, legal)


def check_limits_together(
    plan: JobPlan, partitions: Mapping[str, PartitionFacts | None], facts: ClusterFacts
) -> Iterator[Finding]:
    """Find what all jobs of a plan need beyond a limit while each alone keeps to it.

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
            yield Finding(f"{together.parts[0].name}.{key}", value, "fail", text, f"legal: {_SMALLER}")
        else:
            text = f"{names} request {_amount(resource, together.wanted)}, and {allows}: some generators will wait"
            yield Finding(f"{together.parts[0].name}.{key}", value, "warn", text, "fewer replicas")


def _sums(
    plan: JobPlan, partitions: Mapping[str, PartitionFacts | None], facts: ClusterFacts
) -> dict[tuple[str, str, str, str], _Sum]:
    """Add up what components ask for under the same limit: by key and value of its source, of whom, of what."""
    sums: dict[tuple[str, str, str, str], _Sum] = defaultdict(_Sum)
    shares_nodes = len(plan.jobs) > 1  # a node counts once, and jobs of their own may share it
    for job in plan.jobs:
        for part in job.components:
            sources, asked = sources_of(part, partitions.get(part.name), facts), _wanted(part) | {"": 1}
            for resource, amount in asked.items():
                what = "most" if resource else "running"
                for scope in (
                    ("user", "account", "group") if amount and not (resource == "node" and shares_nodes) else ()
                ):
                    limit = _limit_of(sources, what, scope, resource)
                    if limit is not None:
                        together = sums[limit.source.key, limit.source.value, scope, resource]
                        together.add(part, limit, amount, job.array_size or 1)
    return sums


def most_submitted(plan: JobPlan, partitions: Mapping[str, PartitionFacts | None], facts: ClusterFacts) -> list[int]:
    """Return the limits on the number of jobs in the queue that hold for any part of a plan."""
    return [
        limit.most
        for part in plan.components
        for scope in ("user", "account", "group")
        if (limit := _limit_of(sources_of(part, partitions.get(part.name), facts), "submitted", scope)) is not None
    ]


class _Sum:
    """Return what components that share a limit ask for."""

    def __init__(self) -> None:
        self.parts: list[Component] = []
        self.limit: Limit | None = None
        self.needed = self.wanted = 0  # without and with every further task of an array
        self.is_told = False  # one alone is beyond it

    def add(self, part: Component, limit: Limit, amount: int, num_tasks: int) -> None:
        """Count one component."""
        self.parts.append(part)
        self.limit = limit
        self.needed += amount
        self.wanted += amount * num_tasks
        self.is_told = self.is_told or amount > limit.most


def _accounts_from(name: str, facts: ClusterFacts) -> list[Source]:
    """Return an account and those above it: what they allow all their users holds for each."""
    known, found = {each.name: each for each in facts.accounts}, []
    while name in known:
        account = known.pop(name)
        groups = JobLimits(
            {key: most for key, most in account.limits.numbers.items() if key[1] == "group"},
            {key: most for key, most in account.limits.resources.items() if key[1] == "group"},
        )
        found.append(Source("account", name, f"account {name!r}", groups))
        name = account.parent
    return found


def _limit_of(sources: list[list[Source]], what: str, scope: str, resource: str = "") -> Limit | None:
    """Return the limit that decides, the lowest of those that hold together."""
    for together in sources:
        said = [
            Limit(most, source)
            for source in together
            if (most := _said(source.limits, (what, scope), resource)) is not None
        ]
        if said:
            return min(said, key=lambda limit: limit.most)
    return None


def _said(limits: JobLimits, key: tuple[str, str], resource: str) -> int | None:
    return limits.resources.get(key, {}).get(resource) if resource else limits.numbers.get(key)


def _wanted(component: Component) -> dict[str, int]:
    """Return what one job of the component requests, by resource, without what the site adds."""
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


def _key(component: Component, resource: str) -> str:
    """Return the key of the site file that a size comes from."""
    has_gpus = component.name in ("trainer", "generation")
    keys = {
        "cpu": "cpus_per_gpu" if has_gpus else "cpus_per_task",
        "mem": "memory_gib_per_gpu" if has_gpus else "memory_gib_per_task",
        "node": "nodes",
    }
    return f"{component.name}.{keys.get(resource, 'gpus_per_node')}"
