"""The processes of a run, and the environment of each.  Pure.

Input: Config.  Output: shares of roles; lines for people.  `local` below and jobs.py decide where they are started.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.common.text import counted
from launch.plan.gpu_map import VARIABLE, GpuMap, describe_gpus
from launch.plan.site_file import ClusterConfig
from launch.run_files.plan_file import EVALUATOR, LOCAL, Limits, Share, plan_text
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config
from rlhpc.config.tables import NO_WINDOW, TrainerConfig
from rlhpc.models.shape import ParallelLayout

# ------------------------------------------------------------------------------------------------------------ processes


# No process on a compute node may try to reach the internet.
ROLE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "HDF5_USE_FILE_LOCKING": "FALSE",  # one writer per file is our own rule; Lustre and NFS often lack locks
    "PYTHONUNBUFFERED": "1",
    "PYTHONOPTIMIZE": "",  # 2 removes docstrings, without which transformers cannot be imported; 1 removes assertions
}

# Hides GPUs: a library that sees a GPU uses it, whatever its settings.
NO_GPU = {VARIABLE: ""}


def thread_defaults(num_threads: int = 1) -> dict[str, str]:
    """Thread limits of a process: one thread per core in each process would slow down everything on a shared node."""
    return {"OMP_NUM_THREADS": str(num_threads)}


def trainer_threads(config: Config, num_cores: int) -> int:
    """Threads of a rank with a GPU and num_cores cores: one, unless optimiser or average are in host memory.

    Deterministic runs ignore the number of cores: sums depend on the number of threads that add them up.
    """
    trainer = config.trainer
    has_average = trainer.ema_decay != "off" and trainer.ema_memory == "host"
    works_on_host = trainer.optimizer_offload or has_average
    return max(1, num_cores) if works_on_host and not config.run.deterministic else 1


def shares_of(config: Config) -> tuple[Share, ...]:
    """Shares of controller, reward services, trainer ranks, generators and services, in the order of their starts."""
    samples = not config.is_supervised
    shares = (
        Share("controller", 1),
        Share("reward", samples * config.rewards.num_replicas),
        Share("trainer", config.trainer.num_ranks),
        Share("generator", samples * config.generation.num_replicas),
        *service_shares(config),
    )
    return tuple(share for share in shares if share.num_processes)


def service_shares(config: Config) -> tuple[Share, ...]:
    """Shares of the services that the run starts; their processes are numbered through, in the run file's order."""
    counts = [each.replicas for each in config.started_services]
    return tuple(
        Share("service", each.replicas, sum(counts[:place]), each.name)
        for place, each in enumerate(config.started_services)
    )


def process_names(config: Config) -> list[str]:
    """Names of all processes, on channels and in logs."""
    return [name for share in shares_of(config) for name in share.names]


def expected_processes(config: Config) -> list[str]:
    """Names of all processes, those of services with the service: "service-0 (teacher)"."""
    return [
        f"{name} ({share.service})" if share.service else name for share in shares_of(config) for name in share.names
    ]


def describe_plan(config: Config, layout: RunLayout, gpus: GpuMap) -> str:
    """Describe in a few lines the processes and limits of a run."""
    counts = [share.describe() for share in shares_of(config)]
    stage = "supervised fine-tuning, " * config.is_supervised
    lines = [
        f"run         {config.run.name}: {stage}{counted(config.run.num_steps, 'step')} in {layout.root}",
        f"processes   {', '.join(counts)}",
        *(_describe_stage(config) if config.is_supervised else _describe_admission(config)),
        *_describe_trainer(config.trainer, config),
        *([] if config.is_supervised else _describe_sampling(config, gpus)),
        *([f"gpus        {describe_gpus(gpus)}"] if gpus.devices else []),
        f"checkpoint  every {_steps(config.checkpoint.every_steps)}; a crash between two costs at most the training of "
        "these steps" + ("" if config.is_supervised else ", on the rollouts of the journal: nothing is sampled again"),
        *_describe_evaluations(config),
        *([] if config.is_supervised else [f"deaths      {_describe_deaths(config)}"]),
        f"sockets     {config.transport.kind}, "
        + ("encrypted, this run's keys only" if config.transport.curve else "OPEN: transport.curve=false"),
    ]
    return "\n".join(lines)


def _describe_admission(config: Config) -> Iterator[str]:
    admission, generation = config.admission, config.generation
    yield (
        f"batch       {counted(admission.groups_per_step, 'group')} of {_describe_sizes(config)} rollouts a step, "
        f"up to {generation.max_prompt_tokens} + {generation.max_completion_tokens} tokens each"
    )
    yield (
        f"admission   {counted(admission.num_slots, 'slot')}, {_describe_window(config.window_groups)}; "
        f"staleness never above {admission.max_staleness}" + ("" if admission.max_staleness else " (synchronous)")
    )


def _describe_sampling(config: Config, gpus: GpuMap) -> Iterator[str]:
    generation = config.generation
    yield _describe_algorithm(config)
    yield from _describe_critic(config)
    yield (
        f"generation  {generation.engine}, {counted(generation.num_replicas, 'replica')}, "
        f"up to {generation.max_num_seqs} sequences each, weights by {gpus.transport or config.weights.transport}"
    )
    yield from _describe_services(config)


def _describe_services(config: Config) -> Iterator[str]:
    """A line for each service: its kind, and its model or the address where it runs already."""
    for place, each in enumerate(config.service):
        model = f"{each.path}, {counted(each.replicas, 'replica')}" if each.path is not None else each.url
        yield f"{'services' if place == 0 else '':<12}{each.name}: {each.kind}, {model}"


def _describe_stage(config: Config) -> Iterator[str]:
    """Lines about batches and the held-out loss of supervised fine-tuning."""
    sft = config.sft
    if sft.loss == "dpo":
        yield f"loss        direct preference optimisation, beta {sft.beta:g}, against the model as it begins"
    kind = "pair" if sft.loss == "dpo" else "conversation"
    yield f"batch       {counted(sft.batch_size, kind)} of up to {config.longest_conversation} tokens a step"
    if sft.held_out or any(each.held_out for each in config.demonstrations):
        stop = "" if sft.early_stop == "off" else f"; stops after {sft.early_stop} without a lower one"
        yield f"held out    loss every {_steps(sft.evaluate_every)} and at the end{stop}"


def _describe_trainer(trainer: TrainerConfig, config: Config) -> Iterator[str]:
    yield (
        f"trainer     {_describe_layout(trainer)}; {trainer.token_budget} tokens a micro-batch, "
        f"learning rate {config.stepped.learning_rate:g}{_describe_fall(trainer)}"
    )
    yield from _describe_adapters(config)


def _describe_adapters(config: Config) -> list[str]:
    lora = config.lora
    if not lora.rank:
        return []
    begun = f"begun with {lora.initial}, " if lora.initial else ""
    sent = "sent alone" if config.weights.form == "adapter" else "sent within all weights"
    return [f"adapters    of rank {lora.rank} on {', '.join(lora.targets)}, scale {lora.scale:g}, {begun}{sent}"]


def _describe_algorithm(config: Config) -> str:
    """Names of advantage, loss, divergence from a reference, and of environments."""
    algorithm = config.algorithm
    divergence = "no KL term"
    if algorithm.kl_coefficient:
        divergence = f"KL {algorithm.kl_estimator} times {algorithm.kl_coefficient:g} in the {algorithm.kl_in}"
    environments = sorted({dataset.environment for dataset in config.data} - {""})
    turns = f"; environment {', '.join(environments)}" if environments else ""
    return f"algorithm   advantage {algorithm.advantage}, loss {algorithm.loss}, {divergence}{turns}"


def _steps(number: int) -> str:
    """Words after "every": "step", "10 steps"."""
    return "step" if number == 1 else f"{number} steps"


def _describe_fall(trainer: TrainerConfig) -> str:
    for key in ("decay_steps", "decay_tokens", "decay_hours"):
        if (length := getattr(trainer, key)) is not None:
            return f", {trainer.lr_schedule} to {trainer.min_learning_rate:g} over {length:g} {key[len('decay_') :]}"
    return ""


def _describe_critic(config: Config) -> list[str]:
    if not config.has_critic:
        return []
    path, critic = config.critic.path or config.model.path, config.critic
    alone = f", alone for {counted(critic.head_start_steps, 'step')}" if critic.head_start_steps else ""
    return [f"critic      beside it, from {path}; learning rate {critic.learning_rate:g}{alone}"]


def _describe_evaluations(config: Config) -> Iterator[str]:
    for place, table in enumerate(config.evaluation):
        prompts = "all prompts" if table.prompts is None else counted(table.prompts, "prompt")
        every = table.every_steps or config.checkpoint.every_steps
        after = "" if table.stop_after is None else f", stops the run after {table.stop_after} without a better one"
        best = f"; keeps the best {table.keep_best}{after}" if table.keep_best else ""
        yield (
            f"{'evaluation' if place == 0 else '':<12}{table.title}: every {_steps(every)} and at the end, {prompts} × "
            f"{table.samples}, temperature {table.temperature:g}{best}"
        )


def _describe_deaths(config: Config) -> str:
    if config.run.deterministic:
        return "running rollouts are sampled again from their beginning (run.deterministic)"
    interval_s = min(config.buffer.partial_interval_s, config.admission.longest_report_interval_s)
    return f"cost at most {config.buffer.partial_interval_tokens} tokens, or {interval_s:g} s, of each running rollout"


def _describe_sizes(config: Config) -> str:
    admission, most = config.admission, config.largest_group
    least = admission.groups_per_step * admission.group_size
    if most == admission.group_size:
        return f"{most} = {least}"
    return f"{admission.group_size} to {most} = {least} to {admission.groups_per_step * most}"


def _describe_window(window_groups: int) -> str:
    if window_groups == 1:
        return "batches in order of admission"
    return "batches of what is finished first" + (f", inside a window of {window_groups}" * (window_groups < NO_WINDOW))


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


# ---------------------------------------------------------------------------------------------------------------- local
#
# The processes that `rlhpc run` starts on this machine, as JSON for its supervisor (launch/run_files/plan_file.py).
#
# Input: Config, the map of GPUs.  Output: text.  The components are those of a Slurm job; all processes run on the
# supervisor's machine.

STALL_S = 6 * 3600.0  # without a step: a large model on one GPU may need hours for one, and a user is watching


def local_plan_document(
    config: Config, layout: RunLayout, gpus: GpuMap, max_retries: int, num_cores: int, *, again: Sequence[str] = ()
) -> str:
    """The plan as JSON text.  max_retries: attempts without a new checkpoint in between; num_cores: the machine's.

    again: words of the command that continues the run; stored with the directory in which they were typed.
    The machine's resources, and those that the run leaves free, are stored for later readers of the run's figures.
    Ranks get their share of the cores if they can use it.
    """
    meet_s = ClusterConfig.model_fields["meet_s"].default
    limits = Limits(meet_s, STALL_S, max_retries, config.transport.dead_after_s, config.run.log_bytes, is_attended=True)
    shares = {share.role: share for share in shares_of(config) if not share.service}
    each = num_cores // len(process_names(config))
    threads = trainer_threads(config, each) if "trainer-0" in gpus.devices else 1
    components = [
        _component("controller", [shares[role] for role in ("controller", "reward") if role in shares], gpus),
        _component(
            "trainer", [shares["trainer"]], gpus, hides_gpus=config.trainer.device == "cpu", num_threads=threads
        ),
        *([_component("generation", [shares["generator"]], gpus)] if "generator" in shares else []),
        *(_component(f"service-{share.service}", [share], gpus) for share in service_shares(config)),
    ]
    if config.evaluation:  # as for the command `rlhpc evaluate`: without thread limits
        components += [_component("evaluation", [Share(EVALUATOR, 1)], gpus) | {"defaults": {}}]
    job = {"name": LOCAL, "array_size": None, "components": components}
    machine = {"num_cores": num_cores, "num_gpus_left": len(gpus.spare), "uses_gpus": bool(gpus.devices)}
    typed = {"again": [*again], "typed_in": str(Path.cwd())} if again else {}
    return plan_text(layout.root, LOCAL, [job], "requeue", limits, machine=machine, **typed)


def _component(
    name: str, shares: list[Share], gpus: GpuMap, *, hides_gpus: bool = False, num_threads: int = 1
) -> dict[str, Any]:
    names = [name for share in shares for name in share.names]
    return {
        "name": name,
        "runs_in_batch_step": True,
        "roles": [asdict(share) for share in shares],
        "gpus_per_task": 0,
        "srun": [],
        "python": [sys.executable],
        "environment": ROLE_ENVIRONMENT | (NO_GPU if hides_gpus else {}),
        "defaults": thread_defaults(num_threads),
        "visible_devices": {name: shown for name in names if (shown := gpus.variable(name)) is not None},
    }
