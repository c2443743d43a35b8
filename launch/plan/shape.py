"""How the processes of a run are distributed over nodes.

Input: Config and a section of the site file.  Output: Shape: the same number of tasks on every node.  A number of tasks
that cannot be divided evenly is refused; `nodes` in the site file spreads tasks over more nodes than necessary.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.plan.site_file import GpuConfig, RewardsConfig
from rlhpc.config import Config
from rlhpc.errors import ConfigError


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
    """Refuse what Megatron refuses on a CPU.  gpus: which ones there are, for people."""
    trainer = config.trainer
    if trainer.optimizer_offload and trainer.backend == "megatron":
        raise ConfigError(
            "trainer.optimizer_offload=true with trainer.backend='megatron' and "
            f"trainer.device={trainer.device!r} needs a GPU to offload from, {gpus}; legal on a CPU: false"
        )


def generation_shape(config: Config, section: GpuConfig) -> Shape:
    """One replica per task, on tensor_parallel GPUs of one node.  Raises ConfigError: replicas do not fill nodes."""
    generation, gpus = config.generation, section.gpus_per_node
    each = generation.tensor_parallel
    if generation.engine != "vllm" or gpus is None:
        if each > 1:
            raise ConfigError(
                f"generation.gpus_per_node: missing in the site file; generation.tensor_parallel={each} needs GPUs"
            )
        nodes = _nodes("generation.num_replicas", generation.num_replicas, None, section.nodes, "generation")
        return Shape(nodes, generation.num_replicas // nodes, 0)
    if each > gpus:
        raise ConfigError(
            f"generation.tensor_parallel={each} is more than generation.gpus_per_node={gpus} of the site file: a "
            f"replica runs on one node; legal: up to {gpus}"
        )
    nodes = _nodes("generation.num_replicas", generation.num_replicas, gpus // each, section.nodes, "generation")
    return Shape(nodes, generation.num_replicas // nodes, each)


def rewards_shape(config: Config, section: RewardsConfig) -> Shape:
    """One service per task.  Raises ConfigError: services do not fill the nodes of the site file."""
    replicas = config.rewards.num_replicas
    nodes = _nodes("rewards.num_replicas", replicas, None, section.nodes, "rewards")
    return Shape(nodes, replicas // nodes, 0)


def _nodes(key: str, tasks: int, most: int | None, given: int | None, section: str) -> int:
    """Nodes for this number of tasks, at most `most` on one (None: no bound)."""
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
