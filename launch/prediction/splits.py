"""Compare numbers of generators and bounds on staleness, and recommend one.

Input: RingShape, Rates, Lengths.  Output: Split.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.prediction.lengths import Lengths
from launch.prediction.rates import Rates
from launch.prediction.ring import Outcome, Ring, RingShape

STALENESS = (0, 1, 2, 4, 8)
WITHIN = 0.05  # of the fastest: counts as equally fast
_ROLLOUTS = 60_000  # of a simulation for the table
_FEWEST_STEPS, _MOST_STEPS = 30, 200


@dataclass(frozen=True, slots=True)
class Price:
    """The resources that a run occupies while it has its jobs."""

    trainer_units: int  # GPUs, or processes of a run without any
    engine_units: int  # of one generator
    unit: str  # "GPU-hours", "process-hours"
    start_s: float


@dataclass(frozen=True, slots=True)
class Split:
    """A number of generators and a bound, with the predicted outcome."""

    num_engines: int
    max_staleness: int
    outcome: Outcome
    num_steps: int  # of the whole run
    price: Price

    @property
    def wall_s(self) -> float:
        """From the start of the processes to the last step; steps beyond the simulated ones take as long as those."""
        beyond = max(0, self.num_steps - self.outcome.num_steps)
        return self.price.start_s + self.outcome.seconds + beyond * self.outcome.step_s

    @property
    def hours(self) -> float:
        """Hours of GPUs, or of processes."""
        return (self.price.trainer_units + self.num_engines * self.price.engine_units) * self.wall_s / 3600


def this_split(shape: RingShape, rates: Rates, lengths: Lengths, price: Price, num_steps: int) -> Split:
    """The run as it is configured, every step simulated."""
    outcome = Ring(shape, rates, lengths).run(num_steps)
    return Split(shape.num_engines, shape.admission.max_staleness, outcome, num_steps, price)


def other_splits(shape: RingShape, rates: Rates, lengths: Lengths, price: Price, num_steps: int) -> list[Split]:
    """The table, by staleness within generators; a simulation each, shorter than the run."""
    rollouts = shape.admission.groups_per_step * shape.admission.group_size
    steps = min(num_steps, max(_FEWEST_STEPS, min(_MOST_STEPS, _ROLLOUTS // rollouts)))
    return [
        Split(engines, bound, Ring(shape.split(engines, bound), rates, lengths).run(steps), num_steps, price)
        for engines in numbers_of_engines(shape.num_engines)
        for bound in sorted({*STALENESS, shape.admission.max_staleness})
    ]


def numbers_of_engines(num_engines: int) -> list[int]:
    """Candidates around a number, up to twice as many; all of them if there are few."""
    if num_engines <= 4:
        return list(range(1, 2 * num_engines + 1))
    quarters = {max(1, round(num_engines * quarter / 4)) for quarter in (1, 2, 3, 4, 5, 6, 8)}
    return sorted(quarters)


def recommended(splits: Sequence[Split], max_staleness: int) -> Split:
    """Among the splits within WITHIN of the fastest, the one with the fewest generators, then the lowest bound.

    max_staleness: of the run.  The effect of a higher one on learning is not simulated, so none is recommended.
    """
    allowed = [split for split in splits if split.max_staleness <= max_staleness]
    fastest = min(split.outcome.step_s for split in allowed)
    fast = [split for split in allowed if split.outcome.step_s <= (1 + WITHIN) * fastest]
    return min(fast, key=lambda split: (split.num_engines, split.max_staleness))
