"""Whether a trainer rank that has its GPU to itself fits it; if not, which change of [trainer] would help.

Input: a Config, its model, a rank's memory and that of a GPU.  Output: nothing, or a ConfigError.  An estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.checks.memory.advice import advise
from launch.checks.memory.model_shape import ModelShape
from launch.checks.memory.plan import GIB, RankMemory
from rlhpc.config import Config
from rlhpc.errors import ConfigError


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
