"""Whether all processes of a run that share one GPU of this machine fit into its memory.

Input: a Config, its model, who gets which GPU, and how large each is.  Output: a line, or a ConfigError that names
every share, and a change that fits.  An estimate (plan.py, engine.py).  Peaks are added although they rarely coincide:
torch keeps for itself what it has freed, so that the other process cannot have it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launch.checks.memory.engine import least_cache_bytes, plan_engine
from launch.checks.memory.engine_verdict import BUCKETS, refuse_engine, refuse_small_cache
from launch.checks.memory.plan import GIB, RankMemory, plan_memory
from launch.checks.memory.trainer_verdict import Change, cheap_changes, refuse_trainer, without_needless
from launch.plan.gpu_map import EVALUATION, GpuMap
from rlhpc.config import Config, obeys_rules, with_values
from rlhpc.config_effects import as_toml
from rlhpc.errors import ConfigError
from rlhpc.model_shape import ModelShape

AN_ESTIMATE = "an estimate; nothing was measured"
_CACHE_STEP = 64 << 20  # an advised cache is a multiple of it, so that it can be read


@dataclass(frozen=True, slots=True)
class Share:
    """What one process takes of a GPU."""

    process: str  # "trainer-0"
    parts: Mapping[str, int]  # in words → bytes

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """In GiB, part by part."""
        parts = ", ".join(f"{words} {value / GIB:.1f}" for words, value in self.parts.items() if value)
        return f"{self.process} {self.total / GIB:.1f} ({parts})"


def judge_devices(
    config: Config, model: Mapping[str, Any], shape: ModelShape, gpus: GpuMap, memory_gib: Mapping[str, float]
) -> str:
    """Say how much the fullest GPU has to spare.  Raises ConfigError if one has too little.

    memory_gib: of each GPU, by its word of CUDA_VISIBLE_DEVICES; one that is missing is not judged.
    """
    spare: dict[str, float] = {}
    holders = _holders(gpus)
    known = [word for word in holders if word in memory_gib]
    for word, processes in ((word, holders[word]) for word in known):
        _refuse(config, model, shape, processes, word, memory_gib[word])
        spare[word] = memory_gib[word] - _total(config, shape, processes) / GIB
    if len(known) < len(holders):
        unknown = next(word for word in holders if word not in known)
        return f"fits        not judged: the memory of GPU {unknown} is not known"
    word = min(spare, key=spare.__getitem__)
    shares = _shares(config, shape, holders[word])
    sums = " + ".join(f"{share.process} {share.total / GIB:.1f}" for share in shares)
    return f"fits        {_named(word, memory_gib[word])}: {sums} GiB, {spare[word]:.1f} GiB to spare ({AN_ESTIMATE})"


def _holders(gpus: GpuMap) -> dict[str, list[str]]:
    """GPU → processes on it; [evaluation] has GPUs of its own, and the engine of a generator."""
    holders: dict[str, list[str]] = {}
    for process, words in gpus.devices.items():
        for word in words if process != EVALUATION else ():
            holders.setdefault(word, []).append(process)
    return holders


def _refuse(
    config: Config, model: Mapping[str, Any], shape: ModelShape, processes: list[str], word: str, limit: float
) -> None:
    if len(processes) > 1:
        _refuse_together(config, shape, processes, word, limit)
    elif _is_engine(processes[0]):
        refuse_engine(config, shape, limit, f"{_named(word, limit)}, {processes[0]}'s own")
    else:
        refuse_trainer(
            config, model, shape, _rank(config, shape, processes[0]), limit, f"GPU {word}, {processes[0]}'s own"
        )


def _refuse_together(config: Config, shape: ModelShape, processes: list[str], word: str, limit: float) -> None:
    if any(map(_is_engine, processes)):
        refuse_small_cache(config, shape)
    shares = _shares(config, shape, processes)
    total = sum(share.total for share in shares) / GIB
    if total > limit:
        keys = ["trainer.token_budget"] if not all(map(_is_engine, processes)) else []
        keys += ["generation.kv_cache_bytes"] if any(map(_is_engine, processes)) else []
        raise ConfigError(
            f"{' and '.join(f'{key}={_value(config, key)}' for key in keys)}: "
            f"{' + '.join(share.describe() for share in shares)} = {total:.1f} GiB (estimate), "
            f"{total - limit:.1f} GiB more than {_named(word, limit)} has; {_advice(config, shape, processes, limit)}"
        )


def _named(word: str, limit: float) -> str:
    return f"GPU {word} ({limit:.4g} GiB)"


def _is_engine(process: str) -> bool:
    return process.startswith("generator-")


def _rank(config: Config, shape: ModelShape, process: str) -> RankMemory:
    plan = plan_memory(config, shape)
    return plan[int(process.rpartition("-")[2]) * len(plan) // config.trainer.num_ranks]


def _shares(config: Config, shape: ModelShape, processes: list[str]) -> list[Share]:
    return [_share(config, shape, process) for process in processes]


def _total(config: Config, shape: ModelShape, processes: list[str]) -> int:
    return sum(share.total for share in _shares(config, shape, processes))


def _share(config: Config, shape: ModelShape, process: str) -> Share:
    if _is_engine(process):
        need = plan_engine(config, shape)
        return Share(
            process,
            {
                "weights": need.weights,
                "KV cache": need.kv_cache,
                "new weights while they arrive": need.beside,
                "CUDA, activations": need.allowance,
            },
        )
    rank = _rank(config, shape, process)
    return Share(
        process,
        {
            "weights": rank.parameters,
            "gradients": rank.gradients,
            "optimiser": rank.optimizer,
            "ZeRO buckets": rank.buckets,
            "reference": rank.reference,
            "average of weights": rank.average,
            "a step or an export": rank.moment,
            "CUDA, NCCL, fragments": rank.allowance,
        },
    )


# -------------------------------------------------------------------------------------------------- what would fit


def _advice(config: Config, shape: ModelShape, processes: list[str], limit: float) -> str:
    """The first change that fits: less cache, then smaller buckets, then what spares the trainer memory."""
    for change in _changes(config, processes):
        found = _with_smaller_cache(config, change, shape, processes, limit)
        if found is None:
            continue
        found = without_needless(found, lambda fewer: _fits(with_values(config, fewer), shape, processes, limit))
        need = _total(with_values(config, found), shape, processes) / GIB
        words = " ".join(f"{key}={as_toml(value)}" for key, value in found.items())
        return f"would fit: {words} ({need:.1f} GiB)"
    return "no setting that was tried fits: give trainer and engine GPUs of their own, or take a smaller model"


def _fits(config: Config, shape: ModelShape, processes: list[str], limit: float) -> bool:
    return obeys_rules(config) and _total(config, shape, processes) <= limit * GIB


def _changes(config: Config, processes: list[str]) -> Iterator[Change]:
    buckets: list[Change] = [{}]
    buckets += [{"weights.bucket_bytes": size} for size in BUCKETS if size < config.weights.bucket_bytes]
    trainer: list[Change] = [{}]
    if not all(map(_is_engine, processes)):
        alone = [{f"trainer.{key}": value for key, value in each.items()} for each in cheap_changes(config)]
        trainer += [*alone, *itertools.accumulate(alone, operator.or_)]
    for cheaper, smaller in itertools.product(trainer, buckets):
        yield cheaper | smaller


def _with_smaller_cache(
    config: Config, change: Change, shape: ModelShape, processes: list[str], limit: float
) -> Change | None:
    """`change`, with as much KV cache as fits beside it, if that is less than is wanted; None if it does not fit."""
    changed = with_values(config, change)
    if not obeys_rules(changed):
        return None
    engines = sum(map(_is_engine, processes))
    excess = _total(changed, shape, processes) - int(limit * GIB)
    if excess <= 0:
        return change or None
    if not engines:
        return None
    room = plan_engine(changed, shape).kv_cache - -(-excess // engines)
    if room < least_cache_bytes(changed, shape):
        return None
    return {**change, "generation.kv_cache_bytes": room // _CACHE_STEP * _CACHE_STEP or room}


def _value(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
