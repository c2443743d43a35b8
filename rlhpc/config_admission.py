"""How batches are put together: what a run file may not say of it, and what is chosen where it says nothing.

Input: Config.  Output: SmallestPart.  Each rule raises ValueError naming keys, values and what would be legal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhpc.config_algorithm import OVER_BATCH

if TYPE_CHECKING:
    from rlhpc.config import Config

AUTO_PARTS = 4  # beyond them little is gained (python -m bench.admission)


@dataclass(frozen=True, slots=True)
class SmallestPart:
    """Of a step, while its batch is not there; a part that cannot be completed to a batch is never begun."""

    groups: int  # as many as a batch: steps have no parts
    tokens: int = 0  # prompts included


def smallest_part(config: Config) -> SmallestPart:
    """With admission.step_parts filled in: by default a part fills a row of every data-parallel rank.

    With pipeline stages there are none by default: each part fills and drains the pipeline.
    """
    admission, trainer = config.admission, config.trainer
    if admission.step_parts != "auto":
        return SmallestPart(-(-admission.groups_per_step // admission.step_parts))
    if trainer.pipeline_parallel > 1 or _of_whole_batches(config):
        return SmallestPart(admission.groups_per_step)
    return SmallestPart(-(-admission.groups_per_step // AUTO_PARTS), trainer.data_parallel * trainer.token_budget)


def deterministic_order_is_strict(config: Config) -> None:
    """With a window, the batch depends on which groups are finished first."""
    if config.run.deterministic and (window := config.admission.window_groups or 1) > 1:
        raise ValueError(f"run.deterministic=true needs admission.window_groups=1, its default there; it is {window}")


def parts_are_within_a_batch(config: Config) -> None:
    """Each part has a group at least."""
    parts, groups = config.admission.step_parts, config.admission.groups_per_step
    if parts != "auto" and parts > groups:
        raise ValueError(
            f"admission.step_parts={parts} is more than admission.groups_per_step={groups}; legal: 1 to {groups}"
        )


def parts_add_up(config: Config) -> None:
    """The gradient of a part must not depend on what is in the parts that come after it."""
    if config.admission.step_parts not in ("auto", 1) and (refusal := _of_whole_batches(config)):
        raise ValueError(f"admission.step_parts={config.admission.step_parts} with {refusal}")


def _of_whole_batches(config: Config) -> str:
    """A setting with which a step needs its whole batch at once, why, and what would be legal; "": there is none."""
    algorithm = config.algorithm
    settings = {
        "algorithm.advantage_normalization": (algorithm.advantage_normalization, "off", "it is over the whole batch"),
        "algorithm.aggregation": (algorithm.aggregation, "token", "other shares in the loss are of the whole batch"),
        "algorithm.minibatches": (algorithm.minibatches, 1, "the whole batch is dealt out"),
        "algorithm.epochs": (algorithm.epochs, 1, "the whole batch is passed over again"),
    }
    if config.run.deterministic:
        return (
            "run.deterministic=true: who is finished first decides what is in a part; "
            "legal: step_parts=1, or run.deterministic=false"
        )
    if config.has_critic or algorithm.advantage in OVER_BATCH:
        return (
            f"algorithm.advantage={algorithm.advantage!r}, which is over the whole batch; "
            "legal: step_parts=1, or an advantage over a group"
        )
    for key, (value, legal, why) in settings.items():
        if value != legal:
            return f"{key}={value!r}: {why}; legal: step_parts=1, or {key}={legal!r}"
    return ""


ADMISSION = (
    deterministic_order_is_strict,
    parts_are_within_a_batch,
    parts_add_up,
)
