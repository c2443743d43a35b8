"""Assign GPUs to the processes of a run on one machine: trainer ranks, then generators, services, [[evaluation]].

Input: a Config and the usable GPUs.  Output: CUDA_VISIBLE_DEVICES of every process, or a ConfigError that says how many
GPUs are needed, how many there are, and which settings would fit.  Pure.  On Slurm jobs request GPUs per task, and this
module is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from launch.plan.site_file import GpuConfig, RewardsSection
from launch.run_files.plan_file import EVALUATOR
from rlhpc.config.rules import Config, obeys_rules, with_values
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.config.toml import as_override
from rlhpc.protocol.errors import ConfigError
from rlhpc.weights.choice import CPU, MIG, choose_transport

# ---------------------------------------------------------------------------------------------------------------- shape
#
# How the processes of a run are distributed over nodes.
#
# Input: Config and a section of the site file.  Output: Shape: the same number of tasks on every node.  A number of
# tasks that cannot be divided evenly is refused; `nodes` in the site file spreads tasks over more nodes than
# necessary.


@dataclass(frozen=True, slots=True)
class Shape:
    """Tasks of a component: nodes × tasks_per_node, gpus_per_task each."""

    nodes: int
    tasks_per_node: int
    gpus_per_task: int

    @property
    def num_tasks(self) -> int:
        """Number of tasks on all nodes."""
        return self.nodes * self.tasks_per_node


def trainer_shape(config: Config, section: GpuConfig) -> Shape:
    """One rank per task, one GPU per rank.  Raises ConfigError: nodes cannot be filled evenly."""
    trainer = config.trainer
    if trainer.device == "cuda" and section.gpus_per_node is None:
        raise ConfigError("trainer.gpus_per_node: missing in the site file; trainer.device='cuda' needs GPUs")
    on_gpu = trainer.device != "cpu" and section.gpus_per_node is not None
    if not on_gpu:
        refuse_offload_on_cpu(config, f"trainer.gpus_per_node={section.gpus_per_node} in the site file")
    most = section.gpus_per_node if on_gpu else None
    nodes = _nodes("trainer.num_ranks", trainer.num_ranks, most, section.nodes, "trainer")
    ranks = trainer.num_ranks // nodes
    tensor = trainer.tensor_parallel
    if ranks % tensor and tensor % ranks:
        raise ConfigError(
            f"trainer.tensor_parallel={tensor} with {ranks} ranks on each of {nodes} nodes: tensor-parallel groups "
            "would span nodes unevenly; legal: a divisor or a multiple of the ranks per node"
        )
    return Shape(nodes, ranks, 1 if on_gpu else 0)


def refuse_offload_on_cpu(config: Config, gpus: str) -> None:
    """Raise ConfigError for offloading that Megatron refuses on a CPU.  gpus: available GPUs, for the message."""
    trainer = config.trainer
    if trainer.optimizer_offload and trainer.backend == "megatron":
        raise ConfigError(
            "trainer.optimizer_offload=true with trainer.backend='megatron' and "
            f"trainer.device={trainer.device!r} needs a GPU to offload from, {gpus}; legal on a CPU: false"
        )


def generation_shape(config: Config, section: GpuConfig) -> Shape:
    """One replica per task, on tensor_parallel GPUs of one node.  Raises ConfigError: replicas do not fill nodes."""
    generation = config.generation
    keys = _EngineKeys("generation.num_replicas", "generation.tensor_parallel", "generation")
    sizes = generation.num_replicas, generation.tensor_parallel
    return _engine_shape(keys, *sizes, section, has_gpus=generation.has_model)


def service_shape(config: Config, service: ServiceConfig, section: GpuConfig, name: str) -> Shape:
    """One replica per task, as generators.  name: of the section.  Raises ConfigError: replicas do not fill nodes."""
    keys = _EngineKeys(f"[[service]] {service.name}: replicas", f"[[service]] {service.name}: tensor_parallel", name)
    has_gpus = config.generation.has_model
    return _engine_shape(keys, service.replicas, service.tensor_parallel, section, has_gpus=has_gpus)


@dataclass(frozen=True, slots=True)
class _EngineKeys:
    """Names of the keys from which the shape of engines follows, for messages."""

    replicas: str
    tensor_parallel: str
    section: str


def _engine_shape(keys: _EngineKeys, replicas: int, each: int, section: GpuConfig, *, has_gpus: bool) -> Shape:
    """Shape of replicas on `each` GPUs.  has_gpus: the engine uses GPUs where there are any."""
    gpus = section.gpus_per_node
    if not has_gpus or gpus is None:
        if each > 1:
            raise ConfigError(
                f"{keys.section}.gpus_per_node: missing in the site file; {keys.tensor_parallel}={each} needs GPUs"
            )
        nodes = _nodes(keys.replicas, replicas, None, section.nodes, keys.section)
        return Shape(nodes, replicas // nodes, 0)
    if each > gpus:
        raise ConfigError(
            f"{keys.tensor_parallel}={each} is more than {keys.section}.gpus_per_node={gpus} of the site file: a "
            f"replica runs on one node; legal: up to {gpus}"
        )
    nodes = _nodes(keys.replicas, replicas, gpus // each, section.nodes, keys.section)
    return Shape(nodes, replicas // nodes, each)


def rewards_shape(config: Config, section: RewardsSection) -> Shape:
    """One service per task.  Raises ConfigError: services do not fill the nodes of the site file."""
    replicas = config.rewards.num_replicas
    nodes = _nodes("rewards.num_replicas", replicas, None, section.nodes, "rewards")
    return Shape(nodes, replicas // nodes, 0)


def _nodes(key: str, tasks: int, most: int | None, given: int | None, section: str) -> int:
    """Number of nodes for this number of tasks, at most `most` on one (None: no bound)."""
    if given is not None:
        if tasks % given:
            legal = ", ".join(
                str(n) for n in range(1, tasks + 1) if tasks % n == 0 and (not most or tasks // n <= most)
            )
            raise ConfigError(f"{section}.nodes={given} of the site file does not divide {key}={tasks}; legal: {legal}")
        if most is not None and tasks // given > most:
            raise ConfigError(
                f"{key}={tasks} on {section}.nodes={given} of the site file are {tasks // given} a node, where "
                f"{section}.gpus_per_node leaves room for {most}; legal: {-(-tasks // most)} nodes or more"
            )
        return given
    if most is None or tasks <= most:
        return 1
    if tasks % most:
        spread = next(n for n in range(-(-tasks // most), tasks + 1) if tasks % n == 0)
        raise ConfigError(
            f"{key}={tasks} does not fill nodes of {most} ({section}.gpus_per_node of the site file); legal: a "
            f"multiple of {most}, up to {most}, or {section}.nodes={spread} in the site file ({tasks // spread} a node)"
        )
    return tasks // most


# -------------------------------------------------------------------------------------------------------------- gpu map

VARIABLE = "CUDA_VISIBLE_DEVICES"
EVALUATING = f"{EVALUATOR}-0"  # the process that evaluates a run


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """The GPUs that a run may use."""

    words: tuple[str, ...] = ()
    shown: str | None = None  # the caller's CUDA_VISIBLE_DEVICES
    memory_gib: Mapping[str, float] = field(default_factory=dict)  # word → GiB, for GPUs whose memory is known

    def describe(self) -> str:
        """Describe for messages the number of GPUs, and its limit if there is one."""
        variable = f"{VARIABLE} is not set" if self.shown is None else f"{VARIABLE}={self.shown!r}"
        return f"{len(self.words)} visible ({variable})"


@dataclass(frozen=True, slots=True)
class GpuMap:
    """GPUs of each process.  Empty: there is no GPU, and CUDA_VISIBLE_DEVICES is not set."""

    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # process → names of its GPUs
    spare: tuple[str, ...] = ()  # unassigned GPUs
    transport: str = ""  # of weights; "": not decided here

    def variable(self, name: str) -> str | None:
        """CUDA_VISIBLE_DEVICES of a process; None: unchanged.

        A reward service gets the spare GPUs, since a reward may be a model; the controller gets none.
        """
        if not self.devices:
            return None
        words = self.spare if name.startswith("reward-") else self.devices.get(name, ())
        return ",".join(words)


def map_gpus(config: Config, gpus: VisibleGpus) -> GpuMap:
    """Assign GPUs to trainer ranks, engines and services.  Raises ConfigError: too few GPUs, or MIG slices."""
    ranks, engines, served = _wanted(config)
    words = gpus.words
    if not words or not ranks:
        refuse_offload_on_cpu(config, gpus.describe())
    if not words:
        _refuse_gpu_settings_without_gpu(config, gpus)
        return GpuMap()
    if _can_share(config, len(words)):
        _refuse_shared_without_bound(config, gpus)
        words = gpus.words * 2
    if ranks + sum(engines) + sum(served) > len(words):
        raise ConfigError(_shortage(config, gpus))
    trainer = {f"trainer-{rank}": (words[rank],) for rank in range(ranks)}
    workers = _in_turn("generator", engines, words[ranks:])
    services = _in_turn("service", served, words[ranks + sum(engines) :])
    source = words[0] if ranks else CPU
    transport = choose_transport(
        config.weights.transport, source, workers or {"generator-0": (CPU,)}, is_deterministic=config.run.deterministic
    )
    left = words[ranks + sum(engines) + sum(served) :]
    evaluation = _of_evaluation(config, left, gpus)
    _refuse_parts(trainer, workers | services | evaluation)
    return GpuMap(trainer | workers | services | evaluation, left[len(evaluation.get(EVALUATING, ())) :], transport)


def _in_turn(role: str, sizes: list[int], words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Assign to each process of a role its number of GPUs, from the first on."""
    return {
        f"{role}-{replica}": words[sum(sizes[:replica]) : sum(sizes[: replica + 1])] for replica in range(len(sizes))
    }


def _of_evaluation(config: Config, left: tuple[str, ...], gpus: VisibleGpus) -> dict[str, tuple[str, ...]]:
    """Assign separate GPUs to the engines of [[evaluation]], so that training is not slowed down."""
    each = config.generation.tensor_parallel if config.generation.has_model else 0
    wanted = max((table.num_replicas for table in config.evaluation), default=0) * each
    if wanted > len(left):
        raise ConfigError(
            f"[evaluation] needs {wanted} GPU(s) beside those of the run, {len(left)} are left of {gpus.describe()}; "
            "legal: fewer generation.num_replicas or trainer.num_ranks; or without [evaluation], and "
            "`rlhpc evaluate RUN_DIR DATA --follow` on another machine"
        )
    return {EVALUATING: left[:wanted]} if wanted else {}


def describe_gpus(gpu_map: GpuMap) -> str:
    """One line: the GPUs of each process."""
    who = [f"{name}: {','.join(words)}" for name, words in gpu_map.devices.items()]
    spare = [f"left over: {','.join(gpu_map.spare)}"] if gpu_map.spare else []
    return "; ".join((*who, *spare))


def _wanted(config: Config) -> tuple[int, list[int], list[int]]:
    """GPUs of the trainer, of each generator that uses one, and of each process of a service."""
    ranks = config.trainer.num_ranks if config.trainer.device != "cpu" else 0
    generation = config.generation
    if not generation.has_model:
        return ranks, [], []
    served = [each.tensor_parallel for each in config.started_services for _ in range(each.replicas)]
    return ranks, [generation.tensor_parallel] * generation.num_replicas, served


def _refuse_gpu_settings_without_gpu(config: Config, gpus: VisibleGpus) -> None:
    if config.trainer.device == "cuda":
        raise ConfigError(
            f"trainer.device='cuda' needs {config.trainer.num_ranks} GPU(s), {gpus.describe()}; legal: 'auto', 'cpu', "
            "or a torch for CUDA on a machine with GPUs"
        )
    choose_transport(config.weights.transport, CPU, {"generator-0": (CPU,)})


def _refuse_parts(trainer: Mapping[str, tuple[str, ...]], engines: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ConfigError for MIG slices that cannot be used as assigned."""
    parts = [word for words in trainer.values() for word in words if word.startswith(MIG)]
    if parts and len(trainer) > 1:
        raise ConfigError(
            f"trainer.num_ranks={len(trainer)} on MIG slices ({parts[0]}, …): NCCL does not connect slices of a GPU; "
            "legal: 1, or whole GPUs"
        )
    for name, words in engines.items():
        # vLLM asks NVML for the index of the device in CUDA_VISIBLE_DEVICES, which for a MIG slice counts slices, then
        # for the GPU of this index, which may not exist (vllm/platforms/cuda.py of 0.32; older versions want a number).
        if parts := [word for word in words if word.startswith(MIG)]:
            raise ConfigError(
                f"{name} on a MIG slice, {parts[0]}: vLLM looks for a whole GPU with the slice's number; legal: "
                f"whole GPUs for engines, after those of the trainer in {VARIABLE}"
            )


def _can_share(config: Config, num_gpus: int) -> bool:
    """Whether one trainer rank and one engine can share a GPU: the only case that works with too few GPUs."""
    ranks, engines, served = _wanted(config)
    return num_gpus == ranks == sum(engines) == 1 and not served


def _refuse_shared_without_bound(config: Config, gpus: VisibleGpus) -> None:
    if config.generation.kv_cache_bytes is None:
        raise ConfigError(
            f"generation.kv_cache_bytes is not given, and trainer and engine share the one GPU, {gpus.describe()}: "
            "neither can measure what the other will use; set it, for example generation.kv_cache_bytes=4294967296: "
            "`rlhpc check` then adds up both, and says what would fit if that is too much"
        )


def _shortage(config: Config, gpus: VisibleGpus) -> str:
    ranks, engines, served = _wanted(config)
    generation = config.generation
    wants = [f"trainer.num_ranks={ranks}"] if ranks else []
    if engines:
        wants += [f"generation.num_replicas={len(engines)} × generation.tensor_parallel={generation.tensor_parallel}"]
    if served:
        for each in config.started_services:
            wants.append(f"[[service]] {each.name}: replicas={each.replicas} × tensor_parallel={each.tensor_parallel}")
    return (
        f"{' + '.join(wants)} need {ranks + sum(engines) + sum(served)} GPUs, {gpus.describe()}; "
        f"{_what_fits(config, len(gpus.words))}; for a run on Slurm: rlhpc check --site SITE.toml, rlhpc submit"
    )


def _what_fits(config: Config, num_gpus: int) -> str:
    """Describe the smallest change of settings that fits the GPUs."""
    for change in _changes(config, num_gpus):
        changed = with_values(config, change)
        ranks, engines, served = _wanted(changed)
        shares = _can_share(changed, num_gpus) and changed.generation.kv_cache_bytes is not None
        if (ranks + sum(engines) + sum(served) <= num_gpus or shares) and obeys_rules(changed):
            return "would fit: " + " ".join(f"{key}={as_override(value)}" for key, value in change.items())
    if num_gpus == 1 and not _wanted(config)[2]:
        return (
            "would fit: trainer.num_ranks=1 generation.num_replicas=1 generation.tensor_parallel=1, which share it, "
            "with generation.kv_cache_bytes"
        )
    elsewhere = " while services need GPUs of their own: one that runs elsewhere has a url in place of its path"
    return "no smaller layout fits" + elsewhere * bool(_wanted(config)[2])


def _changes(config: Config, num_gpus: int) -> Iterator[dict[str, object]]:
    """Yield changes: fewer engines, fewer ranks, both; the trainer on CPU if only the engine fits."""
    replicas, ranks = config.generation.num_replicas, config.trainer.num_ranks
    for fewer in range(replicas - 1, 0, -1):
        yield {"generation.num_replicas": fewer}
    for fewer_ranks in range(ranks - 1, 0, -1):
        for fewer in range(replicas, 0, -1):
            change: dict[str, object] = {"trainer.num_ranks": fewer_ranks}
            yield change | ({"generation.num_replicas": fewer} if fewer < replicas else {})
    yield {"trainer.device": "cpu"}
