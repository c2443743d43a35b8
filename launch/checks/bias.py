"""Settings that are legal but bias the statistics of a run, with measured effects, or that nobody means.

Input: Config.  Output: lines of `rlhpc check`.  docs/algorithms.md has the tables of biases; a test compares.
"""

from __future__ import annotations

from rlhpc.config import Config
from rlhpc.config_effects import as_toml

OVERSAMPLING = (
    "what is trained is 1–16 % shorter than what is sampled with 0.125, 1–26 % with 0.25, 2–36 % with 0.5; the more "
    "lengths differ from prompt to prompt, the larger the difference"
)

# Ten times what small models are trained with from random weights; RL of real ones takes 1e-6 to 1e-5.
_HIGHEST_RATE = 1e-2
_DEFAULT_STALENESS = 1
_PROCESSES_PER_CORE = 8  # verifiers wait for programs and endpoints most of their time


def doubtful(config: Config, *, num_cores: int | None) -> list[str]:
    """One line for each value that makes no sense beside another; num_cores: of this machine, if it runs here."""
    admission, trainer, run = config.admission, config.trainer, config.run
    samples = admission.groups_per_step * admission.group_size
    rates = {"trainer.learning_rate": trainer.learning_rate}
    rates |= {"critic.learning_rate": config.critic.learning_rate} if config.algorithm.advantage == "gae" else {}
    found = [
        f"{key}={as_toml(rate)}: language models diverge at such a rate; RL of pretrained ones takes 1e-6 to 1e-5"
        for key, rate in rates.items()
        if rate > _HIGHEST_RATE
    ]
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
    found = []
    if admission.oversample:
        found.append(
            f"warning     admission.oversample={as_toml(admission.oversample)} drops up to {admission.most_cut} "
            f"stragglers a batch: {OVERSAMPLING} (docs/algorithms.md, Over-sampling)"
        )
    if most != "off" and aggregation != "prompt":
        found.append(
            f"warning     curriculum.max_group_size={most} with algorithm.aggregation={aggregation!r}: a prompt weighs "
            f"by its rollouts, a hard one up to {most / admission.group_size:g} times as much as others; with 'prompt' "
            "all weigh the same (docs/algorithms.md, Curriculum)"
        )
    return found
