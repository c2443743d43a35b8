"""Whether a trainer rank that has its GPU to itself fits it; if not, which change of [trainer] would help.

Input: a Config, its model and a limit.  Output: nothing, or a ConfigError with one line of advice.  Tries the usual
changes in the usual order, with the formulas of plan.py, so that the advice is an estimate too.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launch.checks.memory.plan import GIB, RankMemory, fullest, plan_memory
from rlhpc.config import Config, obeys_rules, with_values
from rlhpc.config_effects import as_toml
from rlhpc.errors import ConfigError
from rlhpc.model_shape import ModelShape
from rlhpc.parallel_layout import ParallelLayout

Change = dict[str, Any]  # key → value; of [trainer], where nothing else is said


def refuse_trainer(
    config: Config, model: Mapping[str, Any], shape: ModelShape, rank: RankMemory, memory_gib: float, gpu: str
) -> None:
    """Raises ConfigError with a change that fits.  gpu: words for which GPU that is and who says so."""
    need = rank.peak / GIB
    if need > memory_gib:
        raise ConfigError(
            f"{_layout_keys(config)}: a rank of stage {rank.stage} needs {need:.1f} GiB (estimate), "
            f"{need - memory_gib:.1f} GiB more than the {memory_gib:.4g} GiB of {gpu}; "
            f"{advise(config, model, shape, memory_gib)}"
        )


def _layout_keys(config: Config) -> str:
    trainer = config.trainer
    if trainer.backend == "deepspeed":
        keys = ["num_ranks", "zero_stage"]
    elif trainer.backend == "megatron":
        keys = ["num_ranks", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"]
        keys = keys[:3] + [key for key in keys[3:] if getattr(trainer, key) > 1]
    else:
        keys = ["num_ranks"]
    words = [f"{key}={getattr(trainer, key)}" for key in (*keys, "token_budget")]
    return f"trainer.backend={trainer.backend!r} with {', '.join(words)}"


def advise(config: Config, model: Mapping[str, Any], shape: ModelShape, limit_gib: float) -> str:
    """Say the first change of [trainer] that fits, cheapest first, in words that may follow `rlhpc check RUN.toml`.

    limit_gib: memory of one GPU.  What a change does not need is left out of it.
    """

    def need(change: Change) -> float:
        changed = _legal(config, change, model)
        return math.inf if changed is None else fullest(plan_memory(changed, shape)).peak / GIB

    for change in _changes(config):
        if need(change) <= limit_gib:
            change = without_needless(change, lambda fewer: need(fewer) <= limit_gib)
            words = " ".join(f"trainer.{key}={as_toml(value)}" for key, value in change.items())
            return f"would fit: {words} ({need(change):.1f} GiB)"
    return "no layout that was tried fits: take larger GPUs, more of them, or a smaller model"


def without_needless(change: Change, fits: Callable[[Change], bool]) -> Change:
    """A change that fits, without the keys that it fits without."""
    for key in list(change):
        fewer = {name: value for name, value in change.items() if name != key}
        change = fewer if fits(fewer) else change
    return change


def _changes(config: Config) -> Iterator[Change]:
    """What one would try by hand: what costs little first, alone and then together; more GPUs after that."""
    cheap = list(cheap_changes(config))
    yield from cheap
    nothing, *together = itertools.accumulate(cheap, operator.or_, initial=Change())
    yield from together
    # Beside more GPUs what costs little; half the tokens and an optimiser on the host only where nothing else helps.
    everything = together[-1] if together else nothing
    gentle = {key: value for key, value in everything.items() if key not in ("token_budget", "optimizer_offload")}
    wider = list(_wider(config))
    for change in wider:
        yield from (change, gentle | change)
    yield from (everything | change for change in wider)


def cheap_changes(config: Config) -> Iterator[Change]:
    """On the same ranks, in the order of what they cost; what is set already or legal nowhere here drops out."""
    trainer = config.trainer
    longest = config.generation.max_tokens
    changes: tuple[Change, ...] = (
        {"reference_memory": "host"},
        {"ema_memory": "host"},
        {"distributed_optimizer": True},
        {"sequence_parallel": True},
        *({"zero_stage": stage} for stage in range(trainer.zero_stage + 1, 4) if trainer.backend == "deepspeed"),
        *({"recompute_activations": kind} for kind in ("selective", "full") if trainer.recompute_activations != "full"),
        {"token_budget": max(longest, trainer.token_budget // 2)},
        {"optimizer_offload": True},
    )
    for change in changes:
        if any(getattr(trainer, key) != value for key, value in change.items()) and _obeys(config, change):
            yield change


def _wider(config: Config) -> Iterator[Change]:
    """Layouts with smaller parts: those that take fewest ranks first."""
    trainer = config.trainer
    if trainer.backend in ("megatron", "reference"):  # the reference shares nothing out
        for change in sorted(_wider_megatron(config), key=lambda change: change["num_ranks"]):
            yield change if trainer.backend == "megatron" else {"backend": "megatron", **change}
    if trainer.backend == "deepspeed":
        yield from ({"num_ranks": factor * trainer.num_ranks} for factor in (2, 4, 8, 16, 32))


def _wider_megatron(config: Config) -> Iterator[Change]:
    """More replicas to share the optimiser, tensor ranks up to a node of eight, more stages."""
    trainer = config.trainer
    tensors = [trainer.tensor_parallel * factor for factor in (1, 2, 4, 8) if trainer.tensor_parallel * factor <= 8]
    for stages, tensor in itertools.product((1, 2, 4, 8, 16), tensors or [trainer.tensor_parallel]):
        pipeline = trainer.pipeline_parallel * stages
        replica = tensor * pipeline * trainer.context_parallel
        layout: Change = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
        layout |= {"sequence_parallel": True} if tensor > 1 else {}
        for num_ranks in sorted({trainer.num_ranks, replica, replica * trainer.data_parallel, 2 * trainer.num_ranks}):
            if num_ranks >= trainer.num_ranks:
                yield {"num_ranks": num_ranks, **layout}


def _legal(config: Config, change: Change, model: Mapping[str, Any]) -> Config | None:
    """The run file with `change`, or None where a rule or the model forbids it."""
    if not _obeys(config, change):
        return None
    changed = _with(config, change)
    try:
        if changed.trainer.backend == "megatron":
            ParallelLayout.of(changed.trainer).refuse_unfit(model)
    except ConfigError:
        return None
    return changed


def _obeys(config: Config, change: Change) -> bool:
    return obeys_rules(_with(config, change))


def _with(config: Config, change: Change) -> Config:
    return with_values(config, {f"trainer.{key}": value for key, value in change.items()})
