"""Plan the Slurm jobs of a run, with their resources.  Pure.

Input: Config, Site, RunLayout.  Output: JobPlan.  Component 0 is the controller, which runs in the batch step without
srun; then trainer, generators, services by name, reward services.  A task is one process: a trainer rank, a replica of
an engine, a reward service.
Submits nothing and touches no file; script.py writes the scripts, report.py the texts for people and programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from launch.plan.gpu_map import Shape, generation_shape, rewards_shape, service_shape, trainer_shape
from launch.plan.processes import service_shares, trainer_threads
from launch.plan.site_file import (
    ClusterConfig,
    CommonConfig,
    GpuConfig,
    GpuRequest,
    Placement,
    PrologueConfig,
    RewardsSection,
    Site,
    slurm_time,
)
from launch.run_files.plan_file import Share
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config, with_values
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.protocol.errors import ConfigError

CONTROLLER_CPUS = 2  # its loop, and one more for segments and TensorBoard
CPUS_PER_GPU = 4  # a trainer rank has its writer of checkpoints, an engine its scheduler and tokenizer


@dataclass(frozen=True, slots=True)
class Allocation:
    """Partition, account, time limit and the like of a component; None: the cluster's default."""

    time_s: int
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gres: str | None = None  # in addition to the plan's GPUs
    exclusive: bool = False
    extra: tuple[str, ...] = ()
    common: frozenset[str] = frozenset()  # keys that were taken from [common]

    def key(self, section: str, name: str) -> str:
        """Name of a key in the site file for messages: common.KEY if it is from [common], else SECTION.KEY.

        section: as of its component.
        """
        return f"{'common' if name in self.common else section}.{name}"


@dataclass(frozen=True, slots=True)
class JobComponent:
    """A part of a job with its own nodes.  If the job is an array, sizes are those of one array task."""

    name: str  # of the role's section in the site file; service-NAME
    section: str  # of the site file, whose keys it has
    roles: tuple[Share, ...]
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_task: int
    memory_gib_per_task: int | None  # None: the partition's default; 0: all of the node
    allocation: Allocation
    gpu_request: GpuRequest = "gres"
    gres_type: str | None = None
    gpus_there: int | None = None  # per node, by the site file
    runs_in_batch_step: bool = False  # without srun: the supervisor starts its processes itself
    hides_gpus: bool = False  # its processes run on CPU, also if the node has GPUs
    num_threads: int = 1  # per process, for libraries

    @property
    def num_tasks(self) -> int:
        """Number of tasks as Slurm counts them."""
        return self.nodes * self.tasks_per_node

    @property
    def gpus_per_node(self) -> int:
        """GPUs requested on each node."""
        return self.tasks_per_node * self.gpus_per_task


@dataclass(frozen=True, slots=True)
class Job:
    """One submission: a job, heterogeneous if it has several components."""

    name: str  # also of its script
    components: tuple[JobComponent, ...]
    array_size: int | None = None  # None: no array


@dataclass(frozen=True, slots=True)
class JobPlan:
    """All jobs of a run, or jobs that are added to it."""

    run_name: str
    layout: RunLayout
    placement: Placement
    cluster: ClusterConfig
    prologue: PrologueConfig
    jobs: tuple[Job, ...]
    dead_after_s: float  # transport.dead_after_s
    log_bytes: int  # run.log_bytes
    is_elastic: bool = False  # the jobs are added to a run that has its own plan

    @property
    def components(self) -> tuple[JobComponent, ...]:
        """The components of all jobs, in order."""
        return tuple(component for job in self.jobs for component in job.components)

    @property
    def plan_file(self) -> Path:
        """Path of this plan as JSON, for the supervisor."""
        return self.layout.scripts / f"{self.jobs[0].name}.json" if self.is_elastic else self.layout.job_plan

    @property
    def log_directory(self) -> Path:
        """Directory for logs of batch steps; `rlhpc submit` creates it."""
        return self.layout.logs / "slurm"


def plan_jobs(config: Config, site: Site, layout: RunLayout) -> JobPlan:
    """Lay out the jobs of a run.

    Raises ConfigError naming key, value and what is legal: sizes that do not divide, a missing time limit, components
    of one job with different time limits, a run directory outside cluster.shared_directory or with characters that
    Slurm replaces, sockets or weight transports that reach one machine only.
    """
    cluster = _cluster_of(site)
    _refuse_one_machine(config)
    _refuse_directory(layout, cluster)
    if cluster.placement == "hetjob":
        components = _components(config, site)
        _refuse_different_times(components)
        jobs: tuple[Job, ...] = (Job("hetjob", components),)
    else:
        jobs = tuple(_single_job(component, site) for component in _components(config, site))
    of_config = config.transport.dead_after_s, config.run.log_bytes
    return JobPlan(config.run.name, layout, cluster.placement, cluster, site.prologue, jobs, *of_config)


@dataclass(frozen=True, slots=True)
class Elastic:
    """Generators, or replicas of a service, to add: an array of tasks with one replica each."""

    name: str  # of the job
    num_replicas: int
    first_replica: int
    placement: Placement  # of the run
    partition: str | None = None  # instead of the site file's
    time_s: int | None = None  # instead of the site file's
    service: str = ""  # name of the [[service]]; "": generators


def plan_elastic(config: Config, site: Site, layout: RunLayout, wanted: Elastic) -> JobPlan:
    """Lay out generators, or replicas of a service, that join a run, each of the size of the planned ones.

    Raises ConfigError as plan_jobs does.
    """
    cluster = _cluster_of(site)
    _refuse_one_machine(config)
    _refuse_directory(layout, cluster)
    component = _added_service(config, site, wanted) if wanted.service else _added_generator(config, site, wanted)
    allocation = component.allocation
    own = {key for key, given in (("partition", wanted.partition), ("time", wanted.time_s)) if given}
    allocation = replace(
        allocation,
        partition=wanted.partition or allocation.partition,
        time_s=wanted.time_s or allocation.time_s,
        common=allocation.common - own,
    )
    job = Job(wanted.name, (replace(component, allocation=allocation),), array_size=wanted.num_replicas)
    of_config, placement = (config.transport.dead_after_s, config.run.log_bytes), wanted.placement
    return JobPlan(config.run.name, layout, placement, cluster, site.prologue, (job,), *of_config, is_elastic=True)


def _added_generator(config: Config, site: Site, wanted: Elastic) -> JobComponent:
    one = with_values(config, {"generation.num_replicas": 1})
    section = site.generation.model_copy(update={"nodes": None})
    share = Share("generator", 1, wanted.first_replica)
    return _gpu_component("generation", share, generation_shape(one, section), section, site.common)


def _added_service(config: Config, site: Site, wanted: Elastic) -> JobComponent:
    service = next(each for each in config.started_services if each.name == wanted.service)
    one = service.model_copy(update={"replicas": 1})
    name, section = site.of_service(service.name)
    share = Share("service", 1, wanted.first_replica, service.name)
    return _service(config, one, share, site, name, section.model_copy(update={"nodes": None}))


# ---------------------------------------------------------------------------------------------------------- components


def _components(config: Config, site: Site) -> tuple[JobComponent, ...]:
    trained = (_controller(config, site), _trainer(config, trainer_shape(config, site.trainer), site))
    if config.is_supervised:  # nothing is sampled, so no generators
        return trained
    generator = generation_shape(config, site.generation)
    components = (
        *trained,
        _gpu_component("generation", Share("generator", generator.num_tasks), generator, site.generation, site.common),
        *(
            _service(config, service, share, site, *site.of_service(service.name))
            for service, share in zip(config.started_services, service_shares(config), strict=True)
        ),
    )
    return components if site.rewards is None else (*components, _rewards(config, site.rewards, site.common))


def _controller(config: Config, site: Site) -> JobComponent:
    """Plan one task: the batch step, which also runs the reward services if they have no nodes of their own."""
    beside = config.rewards.num_replicas if site.rewards is None and not config.is_supervised else 0
    derived = CONTROLLER_CPUS + beside * _reward_cpus(config)
    return JobComponent(
        name="controller",
        section="controller",
        roles=(Share("controller", 1), *((Share("reward", beside),) if beside else ())),
        nodes=1,
        tasks_per_node=1,
        cpus_per_task=site.controller.cpus_per_task or derived,
        gpus_per_task=0,
        memory_gib_per_task=site.controller.memory_gib_per_task,
        allocation=_allocation("controller", site.controller, site.common),
        runs_in_batch_step=True,
    )


def _trainer(config: Config, shape: Shape, site: Site) -> JobComponent:
    ranks = _gpu_component("trainer", Share("trainer", shape.num_tasks), shape, site.trainer, site.common)
    threads = trainer_threads(config, ranks.cpus_per_task) if ranks.gpus_per_task else 1
    return replace(ranks, hides_gpus=config.trainer.device == "cpu", num_threads=threads)


def _gpu_component(name: str, share: Share, shape: Shape, section: GpuConfig, common: CommonConfig) -> JobComponent:
    each, memory = max(shape.gpus_per_task, 1), section.memory_gib_per_gpu
    allocation = _allocation(name, section, common)
    if shape.gpus_per_task and allocation.gres is not None and re.search(r"(?:^|,)gpu(?:$|[:,=])", allocation.gres):
        raise ConfigError(
            f"{allocation.key(name, 'gres')}={allocation.gres!r}: GPUs of [{name}] are requested by gpus_per_node, "
            "gres_type and gpu_request; legal: other resources here, GPUs only in gres of [controller] and [rewards]"
        )
    return JobComponent(
        name=name,
        section=name,
        roles=(share,),
        nodes=shape.nodes,
        tasks_per_node=shape.tasks_per_node,
        cpus_per_task=each * (section.cpus_per_gpu or CPUS_PER_GPU),
        gpus_per_task=shape.gpus_per_task,
        memory_gib_per_task=None if memory is None else each * memory,
        allocation=allocation,
        gpu_request=section.gpu_request,
        gres_type=section.gres_type,
        gpus_there=section.gpus_per_node,
    )


def _service(
    config: Config, service: ServiceConfig, share: Share, site: Site, name: str, section: GpuConfig
) -> JobComponent:
    """Plan the replicas of one service.  name: of its section."""
    component = _gpu_component(name, share, service_shape(config, service, section, name), section, site.common)
    return replace(component, name=f"service-{service.name}")


def _rewards(config: Config, section: RewardsSection, common: CommonConfig) -> JobComponent:
    shape = rewards_shape(config, section)
    return JobComponent(
        name="rewards",
        section="rewards",
        roles=(Share("reward", shape.num_tasks),),
        nodes=shape.nodes,
        tasks_per_node=shape.tasks_per_node,
        cpus_per_task=section.cpus_per_task or _reward_cpus(config),
        gpus_per_task=0,
        memory_gib_per_task=section.memory_gib_per_task,
        allocation=_allocation("rewards", section, common),
    )


def _reward_cpus(config: Config) -> int:
    return config.rewards.workers_per_replica + 1  # the service itself does little but wait


def _allocation(name: str, section: CommonConfig, common: CommonConfig) -> Allocation:
    """Merge a section with [common], which gives the keys that the section lacks."""
    keys = CommonConfig.model_fields.keys()
    values = {key: getattr(section if key in section.model_fields_set else common, key) for key in keys}
    time_s = values.pop("time")
    if time_s is None:
        raise ConfigError(f"{name}.time: missing in the site file, as is common.time; a job needs a time limit")
    inherited = keys & common.model_fields_set - section.model_fields_set
    return Allocation(time_s=time_s, **values, common=frozenset(inherited))


# ---------------------------------------------------------------------------------------------------------------- jobs


def _single_job(component: JobComponent, site: Site) -> Job:
    """Make a job of one component.  Generators and replicas of a service are an array: a replica per task, or a node if
    nodes are exclusive.
    """
    (share, *_) = component.roles
    if share.role not in ("generator", "service"):
        return Job(component.name, (component,))
    section = site.of_service(share.service)[1] if share.service else site.generation
    is_whole = component.allocation.exclusive or section.nodes is not None
    tasks = component.tasks_per_node if is_whole else 1
    part = replace(component, roles=(replace(share, num_processes=tasks),), nodes=1, tasks_per_node=tasks)
    return Job(component.name, (part,), array_size=component.num_tasks // tasks)


# ------------------------------------------------------------------------------------------------------------ refusals


def _cluster_of(site: Site) -> ClusterConfig:
    if site.cluster is None:
        raise ConfigError("cluster: missing in the site file; jobs need at least cluster.shared_directory")
    return site.cluster


def _refuse_one_machine(config: Config) -> None:
    """Refuse IPC: components may run on different nodes, and on one node each sees only its own GPUs."""
    if config.transport.kind == "ipc":
        raise ConfigError("transport.kind='ipc' reaches one machine only, and a job has several; legal: 'auto', 'tcp'")
    if config.weights.transport == "ipc":
        raise ConfigError(
            "weights.transport='ipc' needs trainer and generators on the same GPUs, and a job gives each its own; "
            "legal: 'auto', 'gloo', 'nccl'"
        )


def _refuse_directory(layout: RunLayout, cluster: ClusterConfig) -> None:
    root, shared = layout.root, cluster.shared_directory
    if not root.is_relative_to(shared):
        raise ConfigError(
            f"run.directory={str(root)!r} is not in cluster.shared_directory={str(shared)!r}: other nodes would "
            f"not see it; legal: a path such as {str(shared / 'runs' / layout.root.name)!r}"
        )
    strange = re.search(r"[^\w./+@,:=-]", str(root))
    if strange:
        raise ConfigError(
            f"run.directory={str(root)!r}: {strange[0]!r} is not safe in a batch script; legal: letters, digits and "
            "./+@,:=_-"
        )


def _refuse_different_times(components: tuple[JobComponent, ...]) -> None:
    """Refuse different time limits: a component would end alone, and the others would wait for it forever."""
    first, *others = ((part.allocation.key(part.section, "time"), part.allocation.time_s) for part in components)
    for key, time_s in others:
        if time_s != first[1]:
            raise ConfigError(
                f"{key}={slurm_time(time_s)!r} differs from {first[0]}={slurm_time(first[1])!r}: components of a "
                "heterogeneous job end together; legal: one time for all (common.time), or cluster.placement='jobs'"
            )
