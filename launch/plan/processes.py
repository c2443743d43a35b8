"""Which processes a run consists of.  Pure; executors start them.

Input: Config.  Output: RunPlan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from launch.plan.gpu_map import VARIABLE, GpuMap, describe_gpus
from rlhpc.config import Config
from rlhpc.config_sections import TrainerConfig
from rlhpc.parallel_layout import ParallelLayout
from rlhpc.run_layout import RunLayout


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process of a run."""

    role: str
    replica: int
    arguments: tuple[str, ...]  # after `python -m rlhpc.roles`
    environment: dict[str, str] = field(default_factory=dict)  # set on top of the caller's
    defaults: dict[str, str] = field(default_factory=dict)  # set where the caller has nothing
    is_expendable: bool = False  # the run goes on without it

    @property
    def name(self) -> str:
        """Name on channels and in logs."""
        return f"{self.role}-{self.replica}"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All processes of one attempt, in the order in which they are started."""

    layout: RunLayout
    attempt: int
    processes: tuple[ProcessPlan, ...]
    gpus: GpuMap = field(default_factory=GpuMap)


# Nothing on a compute node may look for the internet.
ROLE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "HDF5_USE_FILE_LOCKING": "FALSE",  # one writer per file is our own rule; Lustre and NFS often lack locks
    "PYTHONUNBUFFERED": "1",
}
ROLE_DEFAULTS = {"OMP_NUM_THREADS": "1"}  # a library that starts a thread per core of a shared node hurts everybody


# A library that sees a GPU takes it, whatever it is told.
NO_GPU = {VARIABLE: ""}
NO_GPUS = GpuMap()


def plan_run(
    config: Config,
    layout: RunLayout,
    *,
    attempt: int = 0,
    resume_step: int | None = None,
    owner: str = "",
    gpus: GpuMap = NO_GPUS,
) -> RunPlan:
    """Lay out one attempt: controller, reward service, trainer ranks, generators.

    owner: of the run directory, in whose name the processes write to it.  gpus: which are whose.
    """

    def process(role: str, replica: int, *, num_ranks: int = 1, is_expendable: bool = False) -> ProcessPlan:
        arguments = [role, "--run-dir", str(layout.root), "--replica", str(replica), "--attempt", str(attempt)]
        arguments += ["--num-ranks", str(num_ranks)] if num_ranks > 1 else []
        arguments += ["--owner", owner] if owner else []
        arguments += ["--resume-step", str(resume_step)] if resume_step is not None else []
        hidden = NO_GPU if role == "trainer" and config.trainer.device == "cpu" else {}
        visible = gpus.variable(f"{role}-{replica}")
        shown = hidden if visible is None else {VARIABLE: visible}
        return ProcessPlan(role, replica, tuple(arguments), ROLE_ENVIRONMENT | shown, ROLE_DEFAULTS, is_expendable)

    ranks, rewards, generators = config.trainer.num_ranks, config.rewards.num_replicas, config.generation.num_replicas
    return RunPlan(
        layout,
        attempt,
        (
            process("controller", 0),
            *(process("reward", r, is_expendable=rewards > 1) for r in range(rewards)),
            *(process("trainer", r, num_ranks=ranks) for r in range(ranks)),
            *(process("generator", r, is_expendable=True) for r in range(generators)),
        ),
        gpus,
    )


def describe_plan(plan: RunPlan, config: Config) -> str:
    """Say in a few lines what will run and what bounds it."""
    admission, generation, trainer = config.admission, config.generation, config.trainer
    samples = admission.groups_per_step * admission.group_size
    counts = {p.role: sum(q.role == p.role for q in plan.processes) for p in plan.processes}
    lines = [
        f"run         {config.run.name}: {config.run.num_steps} steps in {plan.layout.root}",
        f"processes   {', '.join(f'{n} {role}' for role, n in counts.items())}",
        f"batch       {admission.groups_per_step} groups of {admission.group_size} = {samples} rollouts a step, "
        f"up to {generation.max_prompt_tokens} + {generation.max_completion_tokens} tokens each",
        f"admission   {admission.num_slots} slots, window {admission.window}; staleness never above "
        f"{admission.max_staleness}" + ("" if admission.max_staleness else " (synchronous)"),
        f"trainer     {_describe_layout(trainer)}; {trainer.token_budget} tokens a micro-batch, "
        f"learning rate {trainer.learning_rate:g}",
        f"generation  {generation.engine}, {generation.num_replicas} replica(s), up to {generation.max_num_seqs} "
        f"sequences each, weights by {plan.gpus.transport or config.weights.transport}",
        *([f"gpus        {describe_gpus(plan.gpus)}"] if plan.gpus.devices else []),
        f"sockets     {config.transport.kind}, "
        + ("encrypted, this run's keys only" if config.transport.curve else "OPEN: transport.curve=false"),
    ]
    return "\n".join(lines)


def _describe_layout(trainer: TrainerConfig) -> str:
    """ "megatron, 8 ranks: tensor 2 × data 4, sequence-parallel"; axes of one rank are left out."""
    layout = ParallelLayout.of(trainer)
    axes = [
        f"{axis} {size}" for axis in ("tensor", "context", "data", "pipeline") if (size := getattr(layout, axis)) > 1
    ]
    words = [" × ".join(axes)] if axes else []
    words += ["sequence-parallel"] if layout.is_sequence_parallel else []
    words += [f"{layout.chunks} blocks of layers a stage"] if layout.chunks > 1 else []
    words += [f"experts over {layout.expert}"] if layout.expert > 1 else []
    words += [f"ZeRO-{trainer.zero_stage}"] if trainer.backend == "deepspeed" else []
    ranks = f"{trainer.backend}, {trainer.num_ranks} rank{'s' if trainer.num_ranks > 1 else ''}"
    return f"{ranks}: {', '.join(words)}" if words else ranks
