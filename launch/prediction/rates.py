"""The speed of each part of the ring, and the source of each figure.

Input: numbers from a site file, a run that was measured, or a table of guesses.  Output: Rates.  Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

GUESS = "a guess"  # how the source of a guessed figure begins


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and where it comes from."""

    value: float
    source: str

    @property
    def is_guess(self) -> bool:
        """It is neither measured nor given."""
        return self.source.startswith(GUESS)


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds, unless a name says otherwise.

    An engine that decodes n rollouts at once gives each its next token every `engine_step_s + engine_sample_s · n`.
    A trainer takes `trainer_step_s + trainer_pflop_s · Σ_m max_r cost(r, m)` for a batch, cost in 10^15 floating-point
    operations of a forward pass by rlhpc/packing/cost.py, m micro-batches and r data-parallel ranks as they are packed.
    """

    engine_step_s: Figure
    engine_sample_s: Figure
    prefill_token_s: Figure  # in which an engine reads a token of a prompt, and decodes nothing
    judge_s: Figure  # from the last token of a rollout until the controller has it
    trainer_step_s: Figure
    trainer_pflop_s: Figure
    between_steps_s: Figure  # controller and trainer, a step: messages, journal, metrics
    publish_s: Figure  # the trainer is busy with new weights
    live_s: Figure  # from then on until all engines sample with them
    pause_s: Figure  # in which engines sample nothing for it
    save_s: Figure  # a checkpoint holds up training
    start_s: Figure  # from the first process to the first lease

    def __post_init__(self) -> None:
        for field in fields(self):
            figure = getattr(self, field.name)
            if not (math.isfinite(figure.value) and figure.value >= 0):
                raise ValueError(f"{field.name}={figure.value}: legal: 0 or more, finite")

    def token_s(self, num_decoded: float) -> float:
        """Seconds between two tokens of a rollout, by the number of rollouts decoded together."""
        return self.engine_step_s.value + self.engine_sample_s.value * num_decoded

    def items(self) -> Mapping[str, Figure]:
        """All figures by name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
