"""Rules that tie one key of a run file to another.  Each raises ValueError naming keys, values and what is legal.

Eats a whole Config.  A rule is one function; RULES is the list that the schema applies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhpc.config import Config


def budget_holds_longest_sample(config: Config) -> None:
    """A sample is never cut, so it has to fit a micro-batch."""
    longest = config.generation.max_prompt_tokens + config.generation.max_completion_tokens
    if config.trainer.token_budget < longest:
        raise ValueError(
            f"trainer.token_budget={config.trainer.token_budget} is below the longest sample, "
            f"generation.max_prompt_tokens + generation.max_completion_tokens = {longest}; legal: {longest} or more"
        )


def window_leaves_slots(config: Config) -> None:
    """A wide window costs slots; a batch must still fit."""
    admission = config.admission
    if admission.num_slots < admission.groups_per_step:
        legal = admission.max_staleness * admission.groups_per_step + 1
        raise ValueError(
            f"admission.window_groups={admission.window} with max_staleness={admission.max_staleness} leaves "
            f"{admission.num_slots} slots for batches of {admission.groups_per_step} groups; legal: 1 to {legal}"
        )


def group_has_spread(config: Config) -> None:
    """Group-relative advantages need a group."""
    if config.admission.group_size == 1:
        raise ValueError(
            f"admission.group_size=1 with algorithm.advantage={config.algorithm.advantage!r}: a group of one has no "
            "spread, so every advantage is zero; legal: 2 or more"
        )


def ratio_is_unbiased(config: Config) -> None:
    """Processed log-probabilities are renormalised over the nucleus: the ratio is off by the nucleus' mass S."""
    generation = config.generation
    for key, is_cut in (("top_p", generation.top_p < 1), ("top_k", generation.top_k > 0)):
        if is_cut:
            raise ValueError(
                f"generation.{key}={getattr(generation, key)} with an importance ratio: the sampler's log-"
                "probabilities are renormalised over the tokens that were kept, the trainer's are not, so that every "
                f"ratio is too small by the mass that was kept; legal: {key}={'1.0' if key == 'top_p' else '0'}"
            )


def warmup_is_shorter_than_run(config: Config) -> None:
    """Otherwise the learning rate is never reached."""
    if config.trainer.warmup_steps > config.run.num_steps:
        raise ValueError(
            f"trainer.warmup_steps={config.trainer.warmup_steps} is more than run.num_steps={config.run.num_steps}"
        )


def rates_do_not_cross(config: Config) -> None:
    """A schedule falls, it does not rise."""
    trainer = config.trainer
    if trainer.min_learning_rate > trainer.learning_rate:
        raise ValueError(
            f"trainer.min_learning_rate={trainer.min_learning_rate:g} is above "
            f"trainer.learning_rate={trainer.learning_rate:g}"
        )


def death_takes_longer_than_a_beat(config: Config) -> None:
    """One late heartbeat is no death."""
    transport = config.transport
    if transport.dead_after_s < 3 * transport.heartbeat_s:
        raise ValueError(
            f"transport.dead_after_s={transport.dead_after_s} is less than three heartbeats of "
            f"transport.heartbeat_s={transport.heartbeat_s}; legal: {3 * transport.heartbeat_s} or more"
        )


RULES = (
    budget_holds_longest_sample,
    window_leaves_slots,
    group_has_spread,
    ratio_is_unbiased,
    warmup_is_shorter_than_run,
    rates_do_not_cross,
    death_takes_longer_than_a_beat,
)
