"""Settings that are legal but bias the statistics of a run, with measured effects, or that nobody means.

Input: Config.  Output: lines of `rlhpc check`, those of `unusual` also of `run` and `submit`.  docs/algorithms.md has
the tables of biases; a test compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlhpc.config.effects import as_toml
from rlhpc.config.rules import Config
from rlhpc.config.tables import Section

_DEFAULT_STALENESS = 1
_PROCESSES_PER_CORE = 8  # verifiers wait for programs and endpoints most of their time


def doubtful(config: Config, *, num_cores: int | None) -> list[str]:
    """One line for each value that makes no sense beside another; num_cores: of this machine, if it runs here."""
    admission, trainer, run = config.admission, config.trainer, config.run
    samples = admission.groups_per_step * admission.group_size
    found = []
    if admission.max_staleness > max(_DEFAULT_STALENESS, run.num_steps - 1):
        found.append(
            f"admission.max_staleness={admission.max_staleness} with run.num_steps={run.num_steps}: no rollout can be "
            f"so stale, and {admission.num_slots:,} groups are in flight at once"
        )
    if trainer.data_parallel > samples:
        found.append(
            f"trainer.num_ranks={trainer.num_ranks}: {trainer.data_parallel} data-parallel ranks share "
            f"admission.groups_per_step × group_size = {samples} samples a step, so that "
            f"{trainer.data_parallel - samples} have none"
        )
    if num_cores is not None:
        found += _crowds(config, num_cores)
    return [f"warning     {each}" for each in found]


def _crowds(config: Config, num_cores: int) -> list[str]:
    """Processes that one machine has no cores for."""
    workers = config.rewards.num_replicas * config.rewards.workers_per_replica
    counts = {
        f"generation.num_replicas={config.generation.num_replicas}": config.generation.num_replicas,
        f"rewards.num_replicas × workers_per_replica = {workers}": workers,
        f"trainer.num_ranks={config.trainer.num_ranks}": config.trainer.num_ranks,
    }
    return [
        f"{what}: processes that share {num_cores} cores here; without --site they all run on this machine"
        for what, number in counts.items()
        if number > _PROCESSES_PER_CORE * num_cores
    ]


def biases(config: Config) -> list[str]:
    """One line for each setting that biases what is learnt from."""
    admission, most, aggregation = config.admission, config.curriculum.max_group_size, config.algorithm.aggregation
    if most == "off" or aggregation == "prompt":
        return []
    return [
        f"warning     curriculum.max_group_size={most} with algorithm.aggregation={aggregation!r}: a prompt weighs by "
        f"its rollouts, a hard one up to {most / admission.group_size:g} times as much as others; with 'prompt' all "
        "weigh the same (docs/algorithms.md, Curriculum)"
    ]


# ------------------------------------------------------------------------------------------------------ unusual values


@dataclass(frozen=True, slots=True)
class UsualRange:
    """The values of a key that somebody has meant; what lies far outside is a slip of the exponent, or of the unit."""

    low: float
    high: float
    why: str
    zero: bool = False  # 0 is usual, too: it switches something off

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high or (self.zero and value == 0)

    def __str__(self) -> str:
        return f"{_short(self.low)} to {_short(self.high)}{', or 0' if self.zero else ''}"


_RATE = "RL of pretrained models takes 1e-6 to 1e-5; above 1e-2 language models diverge, below 1e-8 none learns"
_SECONDS = "it is in seconds"
_BYTES = "it is in bytes"
_TOKENS = "it is in tokens"
_PROCESSES = "each is a process of its own"
_GPUS = "each is a GPU"
_STEPS = "it is in optimiser steps"
_TRIES = "it is a number of attempts"
_GROUPS = "it is in groups, of admission.group_size rollouts each"
_OF_A_RATIO = "ratios of policies are near 1"

USUAL_RANGES: Mapping[str, UsualRange] = MappingProxyType(
    {
        "run.num_steps": UsualRange(1, 1e6, _STEPS),
        "run.log_bytes": UsualRange(1 << 20, 1e11, _BYTES),
        "data.weight": UsualRange(1e-4, 1e7, "weights of datasets count relative to each other"),
        "curriculum.solved_rest_epochs": UsualRange(1, 1000, "it is in epochs of the dataset", zero=True),
        "curriculum.hopeless_rest_epochs": UsualRange(1, 1000, "it is in epochs of the dataset", zero=True),
        "curriculum.max_group_size": UsualRange(1, 4096, "it is in rollouts of one prompt"),
        "curriculum.stage_groups": UsualRange(1, 1e6, _GROUPS),
        "generation.num_replicas": UsualRange(1, 4096, _PROCESSES),
        "generation.tensor_parallel": UsualRange(1, 64, _GPUS),
        "generation.max_prompt_tokens": UsualRange(1, 1e7, _TOKENS),
        "generation.max_completion_tokens": UsualRange(1, 1e7, _TOKENS),
        "generation.max_num_seqs": UsualRange(1, 1e4, "it is in sequences that one engine decodes at once"),
        "generation.max_num_batched_tokens": UsualRange(1, 1e7, _TOKENS),
        "generation.kv_cache_bytes": UsualRange(1e6, 1e12, _BYTES),
        "generation.gpu_memory_utilization": UsualRange(0.05, 1, "it is a share of the GPU's memory"),
        "admission.groups_per_step": UsualRange(1, 1e5, _GROUPS),
        "admission.group_size": UsualRange(1, 4096, "it is in rollouts of one prompt"),
        "admission.max_staleness": UsualRange(0, 100, "rollouts of so old a policy teach little"),
        "admission.window_groups": UsualRange(1, 1e7, _GROUPS),
        "admission.step_parts": UsualRange(1, 1024, "each part is a forward and a backward pass of its own"),
        "admission.lease_deadline_s": UsualRange(1, 86400, _SECONDS),
        "admission.max_attempts": UsualRange(1, 100, _TRIES),
        "admission.max_groups_without_spread": UsualRange(1, 1e7, _GROUPS),
        "rewards.num_replicas": UsualRange(1, 1024, _PROCESSES),
        "rewards.workers_per_replica": UsualRange(1, 4096, _PROCESSES),
        "rewards.batch_size": UsualRange(1, 1e5, "it is in completions"),
        "rewards.timeout_s": UsualRange(
            0.1, 3600, f"{_SECONDS}, and a verifier that hangs blocks a worker for so long"
        ),
        "rewards.task_timeout_s": UsualRange(
            0.1, 3600, f"{_SECONDS}, and a verifier that hangs blocks a worker for so long"
        ),
        "rewards.memory_bytes": UsualRange(1e7, 1e13, _BYTES, zero=True),
        "rewards.task_memory_bytes": UsualRange(1e7, 1e13, _BYTES),
        "rewards.max_attempts": UsualRange(1, 100, _TRIES),
        "rewards.error_patience_s": UsualRange(
            1, 86_400, "so long a run that fails everywhere stands still", zero=True
        ),
        "sandbox.compile_s": UsualRange(0.5, 600, _SECONDS),
        "sandbox.compile_memory_bytes": UsualRange(1e7, 1e12, _BYTES),
        "sandbox.cpu_s": UsualRange(0.05, 3600, _SECONDS),
        "sandbox.wall_s": UsualRange(0.05, 3600, _SECONDS),
        "sandbox.memory_bytes": UsualRange(1e7, 1e12, _BYTES),
        "judge.worst": UsualRange(-1000, 1000, "it is a grade"),
        "judge.best": UsualRange(-1000, 1000, "it is a grade"),
        "judge.max_tokens": UsualRange(1, 1e6, _TOKENS),
        "judge.timeout_s": UsualRange(0.1, 3600, _SECONDS),
        "judge.attempts": UsualRange(1, 100, _TRIES),
        "judge.backoff_s": UsualRange(0.01, 60, f"{_SECONDS}, and doubled with each attempt"),
        "judge.requests_per_s": UsualRange(0.01, 1e5, "it is in requests a second", zero=True),
        "composite.weights": UsualRange(-1e4, 1e4, "advantages that are not divided by a deviation grow with it"),
        "environment.max_turns": UsualRange(1, 10_000, "it is in turns of the policy"),
        "environment.max_turn_tokens": UsualRange(1, 1e7, _TOKENS),
        "environment.max_result_characters": UsualRange(10, 1e7, "it is in characters"),
        "environment.num_documents": UsualRange(1, 1000, "all of them are in the prompt of the next turn"),
        "agent.turn_timeout_s": UsualRange(1, 86400, _SECONDS),
        "agent.max_sessions": UsualRange(1, 1e5, _PROCESSES),
        "agent.max_request_bytes": UsualRange(1e4, 1e9, _BYTES),
        "shaping.part_weights": UsualRange(-1e4, 1e4, "advantages that are not divided by a deviation grow with it"),
        "shaping.overlong_penalty": UsualRange(1e-4, 100, "the reward of a right answer is 1"),
        "shaping.length_weight": UsualRange(-100, 100, "the reward of a right answer is 1"),
        "algorithm.discount": UsualRange(0.5, 1, "it is per token: of a reward after 100 tokens, 0.95 leaves 0.6 %"),
        "algorithm.minibatches": UsualRange(1, 256, "optimiser steps for one pass over a batch"),
        "algorithm.epochs": UsualRange(1, 32, "passes over the same batch"),
        "algorithm.clip_low": UsualRange(1e-5, 1, _OF_A_RATIO),
        "algorithm.clip_high": UsualRange(1e-5, 100, _OF_A_RATIO),
        "algorithm.dual_clip": UsualRange(1, 100, _OF_A_RATIO),
        "algorithm.sapo_tau_positive": UsualRange(0.01, 100, "the paper has 1.0 and 1.05"),
        "algorithm.sapo_tau_negative": UsualRange(0.01, 100, "the paper has 1.0 and 1.05"),
        "algorithm.importance_cap": UsualRange(0.1, 1000, _OF_A_RATIO),
        "algorithm.mask_above": UsualRange(1, 1e4, _OF_A_RATIO),
        "algorithm.veto_drift_above": UsualRange(1e-4, 10, "it is in nats a token"),
        "algorithm.kl_coefficient": UsualRange(1e-6, 1, "from 1 on the policy hardly leaves its reference", zero=True),
        "algorithm.reference_every": UsualRange(1, 1e6, "it is in policy versions", zero=True),
        "algorithm.entropy_coefficient": UsualRange(1e-7, 1, "from 1 on noise is worth more than rewards", zero=True),
        "critic.learning_rate": UsualRange(1e-8, 1e-2, _RATE),
        "critic.head_start_steps": UsualRange(1, 1e4, _STEPS, zero=True),
        "critic.value_clip": UsualRange(1e-3, 100, "values are as large as rewards"),
        "trainer.num_ranks": UsualRange(1, 1e5, _GPUS),
        "trainer.tensor_parallel": UsualRange(1, 64, _GPUS),
        "trainer.pipeline_parallel": UsualRange(1, 128, _GPUS),
        "trainer.chunks_per_stage": UsualRange(1, 64, "it is in blocks of layers"),
        "trainer.context_parallel": UsualRange(1, 256, _GPUS),
        "trainer.expert_parallel": UsualRange(1, 1024, _GPUS),
        "trainer.ema_decay": UsualRange(0.5, 1, "the average is over about 1 / (1 − decay) versions"),
        "trainer.token_budget": UsualRange(1, 1e7, _TOKENS),
        "trainer.learning_rate": UsualRange(1e-8, 1e-2, _RATE),
        "trainer.warmup_steps": UsualRange(1, 1e5, _STEPS, zero=True),
        "trainer.decay_steps": UsualRange(1, 1e6, _STEPS),
        "trainer.decay_tokens": UsualRange(1000, 1e14, _TOKENS),
        "trainer.decay_hours": UsualRange(0.01, 1e4, "it is in hours"),
        "trainer.min_learning_rate": UsualRange(1e-10, 1e-2, _RATE, zero=True),
        "trainer.weight_decay": UsualRange(
            1e-5, 1, "it is multiplied with the learning rate; 0.01 to 0.1 are common", zero=True
        ),
        "trainer.adam_beta1": UsualRange(0.5, 1, "0.9 is common", zero=True),
        "trainer.adam_beta2": UsualRange(0.8, 1, "0.95 to 0.999 are common"),
        "trainer.adam_eps": UsualRange(1e-16, 1e-3, "1e-8 is common; far above it no gradient moves a weight"),
        "trainer.max_grad_norm": UsualRange(1e-6, 1e6, "1 is common; a norm is clipped that is above it"),
        "weights.bucket_bytes": UsualRange(1 << 16, 1e10, _BYTES),
        "weights.full_every": UsualRange(1, 1e5, "it is in versions"),
        "weights.timeout_s": UsualRange(1, 3600, _SECONDS),
        "weights.canary_every": UsualRange(1, 1e5, "it is in versions", zero=True),
        "weights.max_canary_logratio": UsualRange(1e-6, 10, "it is in nats a token"),
        "checkpoint.every_steps": UsualRange(1, 1e6, _STEPS),
        "checkpoint.keep": UsualRange(2, 1e4, "each checkpoint is as large as model and optimiser"),
        "evaluation.max_prompt_tokens": UsualRange(1, 1e7, _TOKENS),
        "evaluation.max_completion_tokens": UsualRange(1, 1e7, _TOKENS),
        "evaluation.every_steps": UsualRange(1, 1e6, _STEPS),
        "evaluation.samples": UsualRange(1, 10_000, "it is in samples of one prompt"),
        "evaluation.prompts": UsualRange(1, 1e7, "it is in prompts"),
        "evaluation.num_replicas": UsualRange(1, 1024, _PROCESSES),
        "evaluation.stop_after": UsualRange(1, 1000, "it is in evaluations"),
        "guard.patience_steps": UsualRange(1, 1e4, _STEPS),
        "guard.calm_steps": UsualRange(1, 1e5, _STEPS),
        "guard.max_mismatch_kl": UsualRange(1e-4, 100, "it is in nats a token"),
        "guard.min_entropy": UsualRange(1e-7, 10, "it is in nats a token", zero=True),
        "guard.max_entropy": UsualRange(0.01, 20, "it is in nats a token; a vocabulary of 150,000 has at most 12"),
        "guard.grad_norm_deviations": UsualRange(1, 1000, "it is in standard deviations"),
        "buffer.segment_groups": UsualRange(1, 1e6, _GROUPS),
        "buffer.partial_interval_tokens": UsualRange(1, 1e7, _TOKENS),
        "buffer.partial_interval_s": UsualRange(0.05, 3600, _SECONDS),
        "transport.dead_after_s": UsualRange(1, 3600, _SECONDS),
    }
)
# Keys without a bound on some side whose values say nothing by their size, or that other keys bound.
ANY_VALUE = frozenset(
    (
        "run.seed",
        "model.chat_template_kwargs",
        "data.levels",
        "data.settings",
        "algorithm.loss_arguments",  # of own code
        "algorithm.advantage_arguments",
        "rewards.task_arguments",
        "data.max_prompt_tokens",  # at most that of [generation]
        "data.max_completion_tokens",
        "curriculum.stages",  # of a dataset's own difficulties
        "curriculum.solved_at",  # pass rates
        "curriculum.target_pass_rate",
        "curriculum.min_chance",
        "curriculum.newest_weight",
        "curriculum.pass_chance",
        "curriculum.stage_pass_rate",
        "judge.correct_from",  # between worst and best
        "environment.arguments",
        "shaping.overlong_tokens",  # below max_completion_tokens
        "algorithm.pass_k",  # below admission.group_size
        "algorithm.max_token_age",  # below admission.max_staleness
    )
)


def unusual(config: Config) -> list[str]:
    """One line, "key=value is unusual (usual: …): why", for each value that is far from those that people mean."""
    return [
        f"{name}={as_toml(value)} is unusual (usual: {USUAL_RANGES[key]}): {USUAL_RANGES[key].why}"
        for key, name, value in _numbers(config)
        if key in USUAL_RANGES and math.isfinite(value) and value not in USUAL_RANGES[key]
    ]


def _numbers(config: Config) -> Iterator[tuple[str, str, float]]:
    """Yield each number of a run file: its key, its name with the place among several, and itself."""
    for section in type(config).model_fields:
        found = getattr(config, section)
        if isinstance(found, Section):
            tables = {section: found}
        elif isinstance(found, dict):
            tables = {f"{section}.{name}": table for name, table in found.items()}
        else:
            tables = {f"{section}.{place}" if len(found) > 1 else section: table for place, table in enumerate(found)}
        for where, table in tables.items():
            for key in type(table).model_fields:
                value = getattr(table, key)
                values = (
                    {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
                )
                for name, each in values.items():
                    if isinstance(each, int | float) and not isinstance(each, bool):
                        yield f"{section}.{key}", f"{where}.{name}", each


def _short(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
