"""The bottleneck formula: how many samples each stage of a run can make a second; the slowest sets the pace.

Input: Config, Rates, a Split of the processes.  Output: Pace.  Pure.

Legend: a batch has B = groups_per_step · group_size samples, for which sampled = B / (1 − dropped_share) are decoded;
each of E generators decodes n = min(max_num_seqs, (S + 1)·B / E) at once, S = max_staleness, a token of each every τ
seconds; L is the mean number of tokens of a completion.  Seconds a batch:
    generation   g = sampled · L · τ / (n·E), and pause_s for new weights
    rewards      sampled · judge_s / workers
    training     t = tokens / (data-parallel ranks · trainer_tokens_per_s), and what a step takes besides
    staleness    (longest · τ + max(0, g − L·τ) + judge_s + t' + between_steps_s + live_s) / (S + 1): at most S + 1
                 batches are in flight, and the slots of one are free once it is sampled to its longest completion,
                 judged, trained and live (docs/staleness.md); t' is the share of t that steps in parts leave to the end
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launch.prediction.rates import Rates
from rlhpc.config import Config


@dataclass(frozen=True, slots=True)
class Split:
    """How the processes are shared out, and the bound on staleness."""

    generators: int
    data_parallel: int  # ranks of the trainer
    max_staleness: int

    @classmethod
    def of(cls, config: Config) -> Split:
        """The split of a run file."""
        return cls(config.generation.num_replicas, config.trainer.data_parallel, config.admission.max_staleness)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a batch takes in each stage."""

    split: Split
    num_samples: int  # of a batch
    stages_s: dict[str, float]

    @property
    def step_s(self) -> float:
        """The expected time between two steps."""
        return max(self.stages_s.values())

    @property
    def bottleneck(self) -> str:
        """The slowest stage."""
        return max(self.stages_s, key=self.stages_s.__getitem__)


def pace_of(config: Config, rates: Rates, split: Split) -> Pace:
    """The formula above."""
    admission, part, num_batches = config.admission, config.smallest_part, split.max_staleness + 1
    batch = admission.groups_per_step * admission.group_size
    sampled = batch / (1 - rates.dropped_share) if admission.active_sampling else batch
    together = min(config.generation.max_num_seqs, num_batches * batch / split.generators)
    token_s = rates.engine_step_s + rates.engine_sample_s * together
    decode_s = sampled * rates.mean_tokens * token_s / (together * split.generators)
    sampled_s = rates.longest_tokens * token_s + max(0.0, decode_s - rates.mean_tokens * token_s)
    tokens = batch * (rates.prompt_tokens + rates.mean_tokens)
    train_s = config.algorithm.epochs * tokens / (split.data_parallel * rates.trainer_tokens_per_s)
    last_part_s = train_s * max(part.groups / admission.groups_per_step, min(1.0, part.tokens / tokens))
    in_turn_s = sampled_s + rates.judge_s + last_part_s + rates.between_steps_s + rates.live_s
    num_workers = config.rewards.num_replicas * config.rewards.workers_per_replica
    stages_s = {
        "generation": decode_s + rates.pause_s,
        "rewards": sampled * rates.judge_s / num_workers,
        "training": train_s + rates.between_steps_s + rates.save_s / config.checkpoint.every_steps,
        "staleness": in_turn_s / num_batches,
    }
    return Pace(split, batch, stages_s)


def other_splits(config: Config, rates: Rates, rank_units: int, generator_units: int) -> list[Pace]:
    """All splits of the same number of GPUs (or processes), this one included, fastest first.

    rank_units, generator_units: of one data-parallel rank, and of one generator.
    """
    this, batch = Split.of(config), config.admission.groups_per_step * config.admission.group_size
    total = this.data_parallel * rank_units + this.generators * generator_units
    splits = [
        replace(this, data_parallel=ranks, generators=(total - ranks * rank_units) // generator_units)
        for ranks in range(1, min((total - generator_units) // rank_units, batch) + 1)
    ]
    paces = (pace_of(config, rates, split) for split in splits)
    return sorted(paces, key=lambda pace: (pace.step_s, abs(pace.split.data_parallel - this.data_parallel)))
