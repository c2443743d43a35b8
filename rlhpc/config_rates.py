"""What a run file may not say of learning rates.

Input: Config.  Each rule raises ValueError naming keys, values and what would be legal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhpc.config import Config


def warmup_is_shorter_than_run(config: Config) -> None:
    """Otherwise the learning rate is never reached."""
    if config.trainer.warmup_steps > config.run.num_steps:
        raise ValueError(
            f"trainer.warmup_steps={config.trainer.warmup_steps} is more than run.num_steps={config.run.num_steps}; "
            f"legal: 0 to {config.run.num_steps}"
        )


def rate_falls_over_one_thing(config: Config) -> None:
    """Which of several would end the fall?"""
    trainer = config.trainer
    over = [key for key in ("decay_steps", "decay_tokens", "decay_hours") if getattr(trainer, key) is not None]
    if len(over) > 1:
        both = " and ".join(f"trainer.{key}={getattr(trainer, key):g}" for key in over)
        raise ValueError(f"{both}: the learning rate falls over one of them; legal: one of trainer.decay_*, or none")
    if trainer.decay_steps is not None and trainer.decay_steps <= trainer.warmup_steps:
        raise ValueError(
            f"trainer.decay_steps={trainer.decay_steps} ends before warm-up, trainer.warmup_steps="
            f"{trainer.warmup_steps}; legal: {trainer.warmup_steps + 1} or more"
        )


def no_clock_in_what_is_deterministic(config: Config) -> None:
    """The same run again takes another time."""
    if config.run.deterministic and config.trainer.decay_hours is not None:
        raise ValueError(
            f"run.deterministic=true with trainer.decay_hours={config.trainer.decay_hours:g}: no two runs take the "
            "same time; legal: trainer.decay_steps, trainer.decay_tokens"
        )


def rates_do_not_cross(config: Config) -> None:
    """A schedule decreases."""
    trainer = config.trainer
    if trainer.min_learning_rate > trainer.learning_rate:
        raise ValueError(
            f"trainer.min_learning_rate={trainer.min_learning_rate:g} is above "
            f"trainer.learning_rate={trainer.learning_rate:g}; legal: 0 to {trainer.learning_rate:g}"
        )


RATES = (
    warmup_is_shorter_than_run,
    rate_falls_over_one_thing,
    no_clock_in_what_is_deterministic,
    rates_do_not_cross,
)
