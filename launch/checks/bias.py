"""Settings that are legal but bias the statistics of a run, with measured effects, or that are hardly intended.

Input: Config.  Output: lines of `rlhpc check`, those of `unusual` also of `run` and `submit`.  docs/algorithms.md has
the tables of biases; a test compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhpc.config.rules import TABLES_OF_STAGE, Config, rates_of_run_files
from rlhpc.config.setting import Usual, marks_of, spelt, tables_of
from rlhpc.rewards.text_answer import MARKED, MARKS

_DEFAULT_STALENESS = 1
_PROCESSES_PER_CORE = 8  # verifiers wait for programs and endpoints most of their time


def doubtful(config: Config, *, num_cores: int | None) -> list[str]:
    """Lines about values that make no sense beside another; num_cores: of this machine, if the run is here."""
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
    found += _stops_before_answers(config)
    if num_cores is not None:
        found += _crowds(config, num_cores)
    return [f"warning     {each}" for each in found]


def _stops_before_answers(config: Config) -> list[str]:
    """Lines about stop strings that cut completions before the answer, which stands behind the mark."""
    tasks = sorted(MARKED & {part for task in config.data_tasks for part in config.parts_of(task)})
    return [
        f"generation.stop={stop!r} ends a completion before {mark!r}, behind which data.task={tasks[0]!r} looks for "
        "the answer: it would find none; another stop, or none"
        for stop in config.generation.stop
        for mark in MARKS
        if tasks and stop.strip() and (mark in stop or stop.strip() in mark)
    ]


def _crowds(config: Config, num_cores: int) -> list[str]:
    """Lines about processes that a machine has no cores for."""
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
    """Lines about settings that bias the training data."""
    admission, most, aggregation = config.admission, config.curriculum.max_group_size, config.algorithm.aggregation
    if most == "off" or aggregation == "prompt":
        return []
    return [
        f"warning     curriculum.max_group_size={most} with algorithm.aggregation={aggregation!r}: a prompt weighs by "
        f"its rollouts, a hard one up to {most / admission.group_size:g} times as much as others; with 'prompt' all "
        "weigh the same (docs/algorithms.md, Curriculum)"
    ]


# ------------------------------------------------------------------------------------------------------ unusual values


def unusual(config: Config) -> list[str]:
    """Lines "key=value is unusual (usual: …): why" about values far from the usual ones."""
    return [
        f"{name}={spelt(value)} is unusual (usual: {usual}): {usual.why}"
        for name, usual, value in _numbers(config)
        if math.isfinite(value) and value not in usual
    ]


def _numbers(config: Config) -> Iterator[tuple[str, Usual, float]]:
    """Yield numbers that have usual values: name with index, usual values, value.

    Numbers of supervised fine-tuning that [sft] gives are only named there.
    """
    filled_in = {"run.num_steps", *rates_of_run_files()} if config.is_supervised else set[str]()
    for place, table in tables_of(config):
        if config.is_supervised and place.partition(".")[0] not in TABLES_OF_STAGE:
            continue
        for key, field in type(table).model_fields.items():
            if f"{place}.{key}" in filled_in:
                continue
            for usual in marks_of(field, Usual):
                value = getattr(table, key)
                values = value if isinstance(value, dict) else {"": value}
                for name, each in values.items():
                    if isinstance(each, int | float) and not isinstance(each, bool):
                        yield f"{place}.{key}.{name}".removesuffix("."), usual, each
