"""The learning rates of every batch, and the progress of the run by which schedules decay.

Input: batches in the order in which they are trained, and what was recorded of those that are repeated.  Output: the
same batches with their rates, which the trainer applies.
Guarantees: a step that is trained again begins where it began; tokens and seconds are those of all attempts, less what
a resume has undone.  Seconds are those in which the run trains: not in a queue, while it starts or repeats steps, or
between the beginning of its last step and a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhpc.algorithms.schedule import Progress, learning_rate, rate_factor_by_age
from rlhpc.buffer.event_log import Trained
from rlhpc.config import Config
from rlhpc.contracts import Clock
from rlhpc.packing.layout import tokens_trained
from rlhpc.types import PackedBatch


@dataclass(slots=True)
class RunProgress:
    """Tokens and seconds that a run has trained; part of its checkpoints."""

    clock: Clock = lambda: 0.0
    num_tokens: int = 0
    _seconds: float = 0.0
    _since_s: float | None = None  # on the clock, while it runs

    @property
    def seconds(self) -> float:
        """Now."""
        return self._seconds if self._since_s is None else self._seconds + self.clock() - self._since_s

    def start(self) -> None:
        """Training begins, or goes on: from now on the clock counts."""
        self._seconds, self._since_s = self.seconds, self.clock()

    def go_on_from(self, seconds: float) -> None:
        """A time that was recorded, unless it is later already."""
        self._seconds += max(0.0, seconds - self.seconds)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"num_tokens": self.num_tokens, "seconds": self.seconds}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], clock: Clock) -> RunProgress:
        """Raises KeyError, TypeError, ValueError if it is malformed."""
        return cls(clock, int(state["num_tokens"]), float(state["seconds"]))


class LearningRates:
    """Gives each batch its rates."""

    def __init__(self, config: Config, run: RunProgress) -> None:
        self._config, self._run = config, run
        self.began_s = 0.0  # seconds that the run had trained before the last batch

    def start(self) -> None:
        """What is trained from now on is trained for the first time."""
        self._run.start()

    def give(self, batch: PackedBatch, recorded: Trained | None) -> PackedBatch:
        """The batch with its rates.  recorded: how its step went, if it is repeated and that is known."""
        at = self._progress(batch.step, recorded)
        self.began_s = at.seconds
        trainer, critic = self._config.trainer, self._config.critic
        scheduled = rate = learning_rate(at, trainer, self._config.run.num_steps)
        if self._config.algorithm.scale_rate_by_age:
            rate *= rate_factor_by_age((row.versions for row in batch.rows), batch.policy_version)
        if not self._config.has_critic:
            return replace(batch, learning_rate=rate)
        rate = 0.0 if at.step < critic.head_start_steps else rate
        share = scheduled / trainer.learning_rate if critic.follows_schedule else 1.0
        return replace(batch, learning_rate=rate, critic_learning_rate=share * critic.learning_rate)

    def trained(self, batch: PackedBatch) -> None:
        """A batch was trained, or skipped."""
        self._run.num_tokens += tokens_trained(batch)

    def _progress(self, step: int, recorded: Trained | None) -> Progress:
        if recorded is not None:
            self._run.go_on_from(recorded.began_s)
            return Progress(step, self._run.num_tokens, recorded.began_s)
        return Progress(step, self._run.num_tokens, self._run.seconds)
